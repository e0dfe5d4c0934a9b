"""benchmarks/paper_tables.py: declared tables, counted bytes, variants, flags."""

import argparse
import json

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_redsync as rs
from benchmarks import paper_tables
from benchmarks.accuracy.report import Report
from benchmarks.loopback_workers import Exchange
from benchmarks.method_expressions import exchanged
from benchmarks.papers import counted, digits, step_times
from benchmarks.papers.declared import TABLES, Row, Table
from benchmarks.step import step_methods
from tests.loops import loop
from tf_redsync.exchange.layout import TensorSpec

MATRICES = [TensorSpec(f"kernel{i}", (1000, 1000), position=i) for i in range(4)]


# ------------------------------------------------------------------------------- declarations


@loop("name", list(TABLES))
def test_declared_rows(name):
    table = TABLES[name]
    for row in table.rows:
        assert isinstance(exchanged(row.method).method, rs.Method)
    for rows in ([r.key for r in table.rows], [r.what for r in table.rows]):
        assert len(set(rows)) == len(rows)  # a report would confuse the two
    assert table.kind in paper_tables.KINDS
    # A star needs its explanation.
    assert "*" in table.paper or not any("*" in row.paper for row in table.rows)
    assert paper_tables.parse([name]).chosen == table


def test_grids_have_all_points_of_the_papers():
    """A sweep that lost a point would still run."""
    methods = {name: [exchanged(r.method).method for r in t.rows] for name, t in TABLES.items()}
    swept = {(m.density, m.quantized) for m in methods["redsync"] if isinstance(m, rs.RedSync)}
    assert swept == {(d, q) for d in (0.1, 0.01, 0.001, 0.0001) for q in (False, True)}
    for name in ("acpsgd", "acpsgd_time"):
        assert {m.rank for m in methods[name] if isinstance(m, rs.ACPSGD)} == {1, 4, 8, 16, 32}
    buckets = [exchanged(r.method).options.get("bucket_bytes") for r in TABLES["acpsgd_time"].rows]
    assert [b for b in buckets if b] == [1, 10**6, 5 * 10**6, 25 * 10**6, 10**8, 15 * 10**8]
    grid = {(m.steps, m.density) for m in methods["sbc"] if isinstance(m, rs.SBC)}
    assert len(grid) == 9
    assert grid >= {(rs.SBC.preset(i).steps, rs.SBC.preset(i).density) for i in (1, 2, 3)}
    schemes = {
        (type(m).__name__, getattr(m, "scope", None) == "model" or r.whole_model, r.feedback)
        for m, r in zip(methods["foroutan"], TABLES["foroutan"].rows, strict=True)
    }
    for scheme in ("TopK", "RandomK", "RandomBlock"):
        assert {s[1:] for s in schemes if s[0] == scheme} == {
            (model, feedback) for model in (False, True) for feedback in (False, True)
        }
    delays = [m.full_every for m in methods["cdsgd"] if isinstance(m, rs.CDSGD)]
    assert {2, 5, 10, 20} < set(delays) and max(delays) > TABLES["cdsgd"].settings["steps"]


# ---------------------------------------------------------------------------------- counting


def test_formula_of_sbc():
    """Against an expectation summed gap by gap, and the formula's figures."""
    for steps, density, bits, about in ((1, 0.001, 9, 2784), (10, 0.01, 6, 3947)):
        found = counted.papers_compression(steps, density)
        gaps = np.arange(1, 40_000)
        chance = density * (1 - density) ** (gaps - 1)
        expected = np.sum(chance * (((gaps - 1) >> bits) + 1 + bits))
        assert found == pytest.approx(32 * steps / (density * expected), rel=1e-6)
        assert found == pytest.approx(about, abs=1)


@pytest.mark.parametrize("preset", [1, 2, 3])
def test_counted_bytes_of_sbc(preset):
    """Our size adds the capacity for the worst positions: half a bit each and some words."""
    method = rs.SBC.preset(preset, dense_below=0)
    found = counted.compression(method, MATRICES)
    formula = counted.papers_compression(method.steps, method.density)
    assert 0.92 * formula < found < formula
    size, means = 4_000_000, 4
    k, rice = round(size * method.density), {0.001: 9, 0.01: 6}[method.density]
    bits = k * (1 + rice) + ((size - k) >> rice) + 32 * means
    sent = counted.message_bytes(method, MATRICES)
    assert bits / 8 <= sent <= bits / 8 + 32  # flag, count, last word
    assert found == pytest.approx(4 * size * method.steps / sent)
    # A ten times longer delay gives ten times the compression.
    longer = rs.SBC(steps=10 * method.steps, density=method.density, dense_below=0)
    assert counted.compression(longer, MATRICES) == pytest.approx(10 * found)


def test_dispatch():
    specs = [
        TensorSpec("small", (128, 255), position=0),  # just below 128 KiB
        TensorSpec("middle", (128, 256), position=1),
        TensorSpec("large", (1024, 1025), position=2),  # just above 4 MiB
        TensorSpec("bias", (10**6,), position=3),
    ]
    paper, code = counted.dispatch(TABLES["redsync_dispatch"].rows, {"net": specs})
    assert paper["layers"] == {"dense": 1, "trimmed": 1, "threshold": 1}
    total = sum(s.size for s in specs)
    assert paper["shares"]["dense"] == (specs[0].size + 10**6) / total
    assert paper["shares"]["threshold"] == specs[2].size / total
    assert code["layers"] == {"dense": 2, "trimmed": 1, "threshold": 0}


# ---------------------------------------------------------------------------- variants


def gradients(seed):
    generator = np.random.default_rng(seed)
    shapes = [(8, 5), (5,)]
    return [
        [tf.constant(generator.standard_normal(s), tf.float32) for s in shapes] for _ in range(2)
    ]


SPECS = [TensorSpec("w", (8, 5)), TensorSpec("b", (5,), position=1)]


def flat(tensors):
    return np.concatenate([np.ravel(t) for t in tensors])


def test_model_as_one_tensor_is_global_top_k():
    """The library has it under another name."""
    method = rs.TopK(density=0.2, dense_below=0)
    one = digits.Varied(method, SPECS, 2, Row("", "TopK()", whole_model=True))
    other = Exchange(rs.TopK(density=0.2, scope="model"), SPECS, 2)
    layers = Exchange(method, SPECS, 2)
    for number in range(3):
        own = gradients(number)
        found, expected = one.run(own, number), other.run(own, number)
        assert [t.shape for t in found] == [(8, 5), (5,)]
        np.testing.assert_array_equal(flat(found), flat(expected))
        assert not np.array_equal(flat(found), flat(layers.run(own, number)))


def test_no_feedback():
    """Every step equals the first; with feedback, the residual is added."""
    method = rs.TopK(density=0.2, dense_below=0)
    forgetful = digits.Varied(method, SPECS, 2, Row("", "TopK()", feedback=False))
    keeping = digits.Varied(method, SPECS, 2, Row("", "TopK()"))
    for number in range(3):
        own = gradients(number)
        first = Exchange(method, SPECS, 2).run(own, number)
        np.testing.assert_array_equal(flat(forgetful.run(own, number)), flat(first))
        assert np.array_equal(flat(keeping.run(own, number)), flat(first)) == (number == 0)


def test_digits_table_resumes(tmp_path, capsys):
    path = tmp_path / "rows.json"
    flags = ["--steps", "4", "--workers", "2", "--json", str(path)]
    assert paper_tables.main(["foroutan", "--rows", "2,3", "--seeds", "1", *flags]) == 0
    assert "| 10 %: top-k, layer, no feedback |" in capsys.readouterr().out
    before = json.loads(path.read_text())["rows"]
    assert paper_tables.main(["foroutan", "--rows", "2", "--seeds", "2", *flags]) == 0
    after = json.loads(path.read_text())["rows"]
    assert after[:2] == before and len(after) == 3
    flags[1] = "5"
    assert paper_tables.main(["foroutan", "--rows", "2", "--seeds", "1", *flags]) == 2
    assert "steps 4 and not 5" in capsys.readouterr().err


@pytest.mark.deep  # `test_digits_table_resumes` runs in every commit
def test_convergence_table(tmp_path, capsys):
    path = tmp_path / "rows.json"
    flags = ["--seeds", "1", "--steps", "3", "--workers", "2", "--json", str(path)]
    assert paper_tables.main(["acpsgd", "--rows", "1,2", *flags]) == 0
    assert "| ACP-SGD, rank 1 |" in capsys.readouterr().out
    found = json.loads(path.read_text())
    assert found["settings"]["steps"] == 3
    assert [r["method"] for r in found["rows"]] == [r.method for r in TABLES["acpsgd"].rows[:2]]
    with pytest.raises(SystemExit, match="2"):  # and no table of rows with other settings
        paper_tables.main(["acpsgd", *flags[:3], "4", *flags[4:]])
    out = capsys.readouterr()
    assert "steps 3 and not 4" in out.err and "|" not in out.out


def test_failed_seed_is_reported(tmp_path, capsys, monkeypatch):
    """A mean over the other seeds alone would pass for the whole result."""
    path = tmp_path / "rows.json"
    done = {"metric": 90.0, "loss": 0.5, "bits": 32.0}
    rows = [{"method": "Dense()", "seed": seed, **done} for seed in range(2)]
    rows += [{"method": "Dense()", "seed": 2, "error": "the loss is not finite"}]
    path.write_text(json.dumps({"rows": rows}))
    monkeypatch.setattr("benchmarks.convergence.main", lambda argv: 1)
    assert paper_tables.main(["acpsgd", "--rows", "1", "--json", str(path)]) == 1
    assert "| dense | 90.00 ± 0.00 | 0.5000 | 32.0000 | 2, 1 diverged |" in capsys.readouterr().out


# ---------------------------------------------------------------------------- times of steps


def test_expressions_instead_of_names():
    optimizer = step_methods.optimizer_for("ACPSGD(rank=2), bucket_bytes=123", 0.1)
    assert optimizer.get_config()["bucket_bytes"] == 123
    for method, period in (("CDSGD(full_every=20, warm_up=None)", 20), (long_delay(), 1)):
        optimizer = step_methods.optimizer_for(method, 0.1)
        optimizer.build([keras.Variable(np.ones((64, 64), np.float32))])
        assert step_methods.period_of(optimizer) == period


def long_delay():
    return next(r.method for r in TABLES["cdsgd_time"].rows if r.what == "k = infinity")


def test_times_are_compared_round_by_round(tmp_path, monkeypatch):
    """A machine at half speed in the second round changes no ratio."""
    path = tmp_path / "rows.json"
    kept = Report({"rate": "1mbit"}, path)
    first, row = Row("first", "NoExchange()"), Row("row", "TopK()")
    common = {"wire_bytes_per_step": None, "bytes_per_step": 8.0, "cpu_ms_per_step": 1.0}
    for number, speed in enumerate((1.0, 2.0, 2.0)):
        for own, factor in ((first, 1.0), (row, 3.0)):
            times = [10 * speed * factor] * 3
            kept.add({"method": own.key, "seed": number, "times_ms": times, **common})
    found = step_times.summary(row, kept, first.key)
    assert found["ratio"] == pytest.approx(3.0) and found["step_ms"] == pytest.approx(60.0)
    table = Table("", "time", (first, row), "", "", {"rate": "1mbit"})
    monkeypatch.setattr(step_times, "run", lambda *_: None)
    heads, cells, _ = paper_tables._time(table, argparse.Namespace(rate="1mbit"), path)
    # Eight bytes are 64 bits, which take 0.064 ms at 1 Mbit/s.
    expected = {"median ms": "60.0", "x first": "3.00", "link ms": "0.1", "cpu ms": "1.0"}
    assert expected.items() <= dict(zip(heads, cells[1], strict=True)).items()
    kept.add({"method": row.key, "seed": 0, "error": "too slow"})
    assert step_times.summary(row, kept, first.key) == {"error": "too slow"}
    assert step_times.summary(Row("", "GTopK()"), kept, first.key) == {"error": "not measured"}


# ------------------------------------------------------------------------------------- flags


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["nothing"], "invalid choice: 'nothing'"),
        (["sbc", "--rows", "0"], "`--rows` must be numbers of 1 dense, 2 delay 1, density 0.1"),
        (["sbc", "--rows", "two"], "Received: --rows=two"),
        (["sbc", "--seeds", "0"], "`--seeds` must be at least 1. Received: --seeds=0"),
        (["sbc", "--data_dir", "x"], "unknown flags. Received: --data_dir x"),
        (["cdsgd_time", "--rate", "fast"], "`rate` must be none, or like 100mbit"),
    ],
)
def test_bad_flags(flags, words, capsys):
    with pytest.raises(SystemExit):
        paper_tables.parse(flags)
    assert words in capsys.readouterr().err


def test_convergence_flags_are_forwarded(monkeypatch, tmp_path):
    seen = []

    def main(argv):
        seen.extend(argv)
        (tmp_path / "f.json").write_text(json.dumps({"rows": []}))
        return 0

    monkeypatch.setattr("benchmarks.convergence.main", main)
    flags = ["--json", str(tmp_path / "f.json"), "--data_dir", "D", "--epochs", "1", "--rows", "1"]
    assert paper_tables.main(["redsync", *flags]) == 1  # nothing was measured
    # Given flags come after the table's own, so they take precedence.
    assert seen.index("--epochs=3") < seen.index("--epochs") and seen[-1] == "Dense()"


def test_settings_without_lengths():
    """A later call may request more seeds and rounds."""
    for name, left_out in (("cdsgd_time", "rounds"), ("cdsgd", "seeds")):
        table = TABLES[name]
        found = paper_tables._settings(table, argparse.Namespace(**table.settings))
        assert set(found) == set(table.settings) - {left_out}
