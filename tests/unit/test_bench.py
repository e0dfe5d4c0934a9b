"""`tf-redsync bench`: measurement by workers, the result table and command errors."""

import dataclasses
import json
import os
import sys
import time
from pathlib import Path
from unittest import mock

import pytest
import tensorflow as tf

import tf_redsync as rs
from tests.distributed.cluster import run_workers
from tf_redsync import config, expressions
from tf_redsync.cli import bench, bench_result, bench_worker, launch
from tf_redsync.methods import known_losses
from tf_redsync.planning import subject as subjects

ROOT = Path(__file__).resolve().parents[2]


def tiny():
    import keras

    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.layers.Input((40,)), keras.layers.Dense(50)])


def run_worker(path, methods):
    code = bench_worker.main(
        ["--model=tests.unit.test_bench:tiny", "--steps=2", "--rounds=2", "--batch-size=4",
         f"--json={path}", "--training-steps=100", "--methods", *methods]
    )  # fmt: skip
    return {"code": code}


def run_uneven_workers(path, methods):
    """Runs a worker, each step of which takes 30 ms longer on worker 1."""
    prepare = bench_worker.prepare

    def slow(*args):
        timing = prepare(*args)
        step = timing.step
        timing.step = lambda: (time.sleep(0.03), step())[1]
        return timing

    is_slow = json.loads(os.environ["TF_CONFIG"])["task"]["index"] == 1
    with mock.patch.object(bench_worker, "prepare", slow if is_slow else prepare):
        return run_worker(path, methods)


@pytest.mark.distributed
@pytest.mark.timeout(120)
def test_methods_are_measured_in_turn(tmp_path):
    path = tmp_path / "times.json"
    methods = ["Dense", "TopK(density=0.01, dense_below=0)", "NoExchange()"]
    codes = run_workers(run_uneven_workers, args=(str(path), methods))
    assert [worker["code"] for worker in codes] == [0, 0]
    dense, top, nothing = json.loads(path.read_text())
    assert [row["method"] for row in (dense, top, nothing)] == methods
    for row in (dense, top, nothing):
        assert len(row["seconds"]) == 2 and all(0 < s < 60 for s in row["seconds"])
        assert min(row["seconds"]) >= 0.03  # of the slower worker, also without an exchange
    weights = 40 * 50 + 50
    assert dense["bytes"] == pytest.approx(4 * weights, rel=0.01)  # a ring of two workers
    assert 0 < top["bytes"] < dense["bytes"] / 5 and nothing["bytes"] == 0


def test_measurements_cover_whole_rounds_of_local_steps():
    """Otherwise the median may cover only steps without an exchange."""
    strategy = tf.distribute.get_strategy()
    subject = subjects.subject(tiny(), 4)
    for text, steps in (("Dense()", 4), ("LocalSGD(steps=3)", 6), ("ACPSGD(rank=1)", 4)):
        timing = bench_worker.prepare(strategy, text, expressions.evaluate(text), subject)
        timing.run(4)
        assert int(timing.optimizer.exchange.step.numpy()) == steps
    timing.run(5)
    assert int(timing.optimizer.exchange.step.numpy()) == 4 + 6  # alternates between two exchanges


@pytest.mark.parametrize(
    ("text", "begins"),
    [
        ("CodedTopK(warm_up=DenseWarmUp(10))", False),
        ("Dense(), warm_up=DenseWarmUp(10)", False),
        ("Dense(), warm_up=DenseWarmUp(fraction=0.1)", False),
        ("DGC(warm_up=ExponentialWarmUp(5))", False),
        ("CodedTopK()", True),
        ("TopK(), warm_up=DenseWarmUp(9)", True),
    ],
)
def test_warm_ups_are_not_measured(mirrored, text, begins):
    with mirrored(2).scope():
        subject = subjects.subject(tiny(), 4)
    timing = bench_worker.prepare(mirrored(2), text, expressions.evaluate(text), subject)
    if begins:
        bench_worker.check_begun(timing, 10)
        return
    with pytest.raises(ValueError, match="`--steps`.*Received") as error:
        bench_worker.check_begun(timing, 10)
    assert text in str(error.value)


def build_with_own_method():
    @config.register
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class OfUserModule(rs.Dense):
        """A dense method under another name."""

    return tiny()


def test_methods_that_the_users_module_registers(tmp_path, monkeypatch):
    monkeypatch.setattr(config, "_REGISTRY", dict(config._REGISTRY))
    monkeypatch.setattr(bench_worker, "measure", lambda *args: None)
    monkeypatch.setattr(bench_result, "show", lambda *args: None)
    argv = ["--model=tests.unit.test_bench:build_with_own_method", "--steps=1", "--rounds=1",
            "--training-steps=1", "--methods", "OfUserModule"]  # fmt: skip
    assert bench_worker.main(argv) == 0


def test_bad_methods_and_models_exit_with_one_line(capsys):
    assert run_worker("unused", ["RedSync(densty=0.1)"])["code"] == 2
    assert "Did you mean `density`" in capsys.readouterr().err
    assert run_worker("unused", ["TopK(), warmup=None"])["code"] == 2
    assert "--methods: DistributedOptimizer has no argument `warmup`" in capsys.readouterr().err
    argv = ["--model=nowhere:f", "--steps=1", "--rounds=1", "--training-steps=1",
            "--methods", "Dense"]  # fmt: skip
    assert bench_worker.main(argv) == 2
    assert "--model=nowhere:f" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--json", "--plot"])
def test_paths_are_checked_before_the_measurement(tmp_path, capsys, monkeypatch, flag):
    monkeypatch.setattr(bench_worker, "measure", lambda *args: pytest.fail("measured"))
    argv = ["--model=tests.unit.test_bench:tiny", "--steps=1", "--rounds=1", "--training-steps=1"]
    for path in (tmp_path / "missing" / "file", tmp_path):
        assert bench_worker.main([*argv, f"{flag}={path}", "--methods", "Dense"]) == 2
        assert f"Received: {flag}={path}" in capsys.readouterr().err


def test_plot_failure_keeps_the_times(tmp_path):
    path = tmp_path / "times.json"
    with pytest.raises(OSError, match="missing"):
        bench_result.show(
            [row("Dense()", "none", 0.2)], 100, str(tmp_path / "missing" / "p.html"), str(path)
        )
    assert json.loads(path.read_text())[0]["seconds"] == [0.2]


def row(method, loss, *seconds):
    return bench_result.Measured(method=method, loss=loss, seconds=list(seconds), bytes=1234.0)


def test_speedups_are_relative_to_dense():
    rows = [row("Dense()", "none", 0.1, 0.3, 0.2), row("TopK()", "not measured", 0.05)]
    lines = bench_result.table(rows, 36_000).splitlines()
    numbers = ["Dense()", "200.0", "100.0", "300.0", "1,234", "1.00x", "2.00", "none"]
    assert lines[1].split() == numbers
    assert "4.00x" in lines[2] and "not measured" in lines[2]
    assert "speed" not in bench_result.table(rows[1:], 1)


def test_summary_names_the_fastest_method_and_the_fastest_lossless_one():
    nothing = row("NoExchange", "not measured", 0.01)
    dense, half = row("Dense()", "none", 0.2), row("HalfPrecision()", "none", 0.1)
    coded = row("CodedGMC()", "0.5 to 2.6 points", 0.05)
    text = bench_result.sentence([dense, half, coded, nothing], 36_000)
    assert (
        text.startswith("Use CodedGMC(), 50.0 ms a step, 0.5 h for 36,000 (dense: 200.0 ms")
        and "0.5 to 2.6 points" in text
    )
    assert text.endswith("Without a loss: HalfPrecision(), 100.0 ms a step, 1.0 h for 36,000.")
    text = bench_result.sentence([dense, half, nothing], 36_000)
    assert text.startswith("Use HalfPrecision()") and "beyond noise" in text
    slow = row("HalfPrecision()", "none", 0.19)
    assert "Without" not in bench_result.sentence([dense, slow, coded], 1)
    assert bench_result.sentence([dense, slow], 1).startswith("Stay dense: 200.0 ms a step")
    assert bench_result.sentence([half, coded], 1) == ""  # no other method to compare with


@pytest.mark.parametrize("dense", ["Dense", "rs.Dense()", "tf_redsync.Dense()", "Dense( )"])
def test_baselines_in_any_spelling(dense):
    rows = [
        row(dense, "none", 0.2),
        row("HalfPrecision()", "none", 0.1),
        row("rs.NoExchange()", "not measured", 0.01),
    ]
    text = bench_result.sentence(rows, 36_000)
    assert text.startswith("Use HalfPrecision()") and "dense: 200.0 ms" in text
    table = bench_result.table(rows, 36_000)
    assert "2.00x" in table and "not measured" not in table


def test_plot_has_a_bar_and_a_loss_per_method():
    pytest.importorskip("plotly", reason="pip install plotly")
    rows = [row("Dense()", "none", 0.2), row("CodedGMC()", "0.5 to 2.6 points", 0.05)]
    figure = bench_result.figure(rows, 36_000)
    (bars,) = figure.data
    assert list(bars.y) == ["CodedGMC()", "Dense()"] and list(bars.x) == pytest.approx([0.5, 2.0])
    assert "0.5 to 2.6 points" in bars.text[0] and "loss" not in bars.text[1]
    assert "Use CodedGMC()" in figure.layout.title.text


def test_known_losses_match_the_documentation():
    pages = [(ROOT / name).read_text() for name in ("README.md", "docs/accuracy.md")]
    words = " ".join(" ".join(pages).split())
    known = {  # the loss, and its place in the README's table or in accuracy.md
        rs.Dense(): ("none", ""),
        rs.HalfPrecision(): ("none beyond noise", "| `rs.HalfPrecision()` | {} |"),
        rs.BlockQuantized(bits=8): ("none in two tasks", "| `rs.BlockQuantized(bits=8)` | {} |"),
        rs.BlockQuantized(bits=4): (
            "none with SGD, 0.9 % in perplexity with AdamW", "| `rs.BlockQuantized(bits=4)` | {} |"
        ),
        rs.CodedGMC(): ("0.5 to 2.6 points", "with `rs.CodedGMC(momentum=0.9)` | {} |"),
        rs.CodedTopK(): (
            "none in characters, 2.6 BLEU in translation (beta_1=0)", "one bit per value: {}",
        ),
        rs.CodedTopK(value_bits=4): (
            "none in characters, 0.6 BLEU in translation (beta_1=0)",
            "with `rs.CodedTopK(density=0.03, value_bits=4)` | 0.34 | {} |",
        ),
        rs.CodedAdam(): (
            "none in characters and translation with 4 workers (instead of Adam: SGD at its rate)",
            "| `SGD(rate)` with `rs.CodedAdam()` | {} |",
        ),
        rs.StreamingDiLoCo(steps=50): (
            "22 to 31 % in perplexity", "| `rs.StreamingDiLoCo(steps=50)` | {} |"
        ),
        rs.SparseLoCo(steps=15, top_k=128): (
            "26 to 34 % in perplexity", "| `rs.SparseLoCo(steps=15, top_k=128)` | 26 to 34 % |"
        ),
        rs.PowerSGD(rank=4): (
            "0.3 to 1.6 points with SGD, 15 % in perplexity with AdamW",
            "`PowerSGD` lost 0.3 to 1.6 points.",
        ),
        rs.RedSync(): ("8 points in three epochs", "`RedSync` at 0.1 %, as published, loses {};"),
    }  # fmt: skip
    for method, (loss, place) in known.items():
        assert known_losses.known_loss(method) == loss
        assert place.format(loss.split(" (")[0]) in words
    lossless = {m for m, (loss, _) in known.items() if known_losses.is_lossless(loss)}
    assert lossless == {rs.Dense(), rs.HalfPrecision(), rs.BlockQuantized(bits=8)}
    unknown = [
        rs.RedSync(density=0.01), rs.CodedGMC(density=0.01), rs.PowerSGD(rank=1), rs.TopK(),
        rs.Auto(), rs.HalfPrecision(method=rs.TopK()), rs.CodedTopK(steps=10),
        rs.CodedTopK(value_bits=2), rs.StreamingDiLoCo(), rs.SparseLoCo(), rs.DiLoCo(),
        rs.LocalSGD(steps=15, outer=rs.outer.Nesterov()),
        rs.CodedTopK(density=0.1), rs.CodedAdam(value_bits=2), rs.CodedAdam(density=0.01),
    ]  # fmt: skip
    assert all(known_losses.known_loss(m).startswith("not measured") for m in unknown)


def test_command_starts_the_launcher(monkeypatch, capsys):
    started = []
    monkeypatch.setattr(launch, "run_command", lambda words, args: started.append((words, args)))
    bench.main(["-n", "3", "--methods", "Dense", "RedSync(density=0.01)", "--rounds", "2"])
    (words, args) = started.pop()
    assert words[1:3] == ["-m", "tf_redsync.cli.bench_worker"] and args.workers == 3
    parsed = bench_worker._parsed(words[3:])
    assert parsed.methods == ["Dense", "RedSync(density=0.01)"]
    assert (parsed.rounds, parsed.steps, parsed.batch_size) == (2, 10, None)
    assert parsed.training_steps == 100_000
    with pytest.raises(SystemExit) as end:
        bench.main(["-n", "2", "--rounds", "0"])
    assert end.value.code == 2 and "`--rounds` must be at least 1" in capsys.readouterr().err


def test_missing_tensorflow_is_reported_before_workers_start(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    monkeypatch.setattr(launch, "run_command", lambda *_: pytest.fail("started"))
    with pytest.raises(SystemExit) as end:
        bench.main(["-n", "2"])
    assert end.value.code == 1 and "TensorFlow is not installed" in capsys.readouterr().err
