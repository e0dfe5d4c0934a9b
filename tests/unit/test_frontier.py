"""methods/frontier.py: a short run with two candidates, the Pareto frontier, bad arguments."""

import json
from pathlib import Path

import keras
import numpy as np
import pytest

from benchmarks.methods import frontier, language_frontier, time_to_loss

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.mark.deep
def test_rows_and_plot(tmp_path, capsys):
    flags = ["--only", "Dense", "--only", "TopK", "--steps", "4", "--seeds", "2"]
    args = frontier.parse([*flags, "--workers", "2"])
    rows = frontier.run(args)
    assert [row["name"] for row in rows] == ["Dense"] + len(frontier.DENSITIES) * ["TopK"]
    assert "6/6 TopK 10.0%" in capsys.readouterr().out
    bits = [row["bits"] for row in rows[1:]]
    assert bits == sorted(bits) and len(set(bits)) == len(bits) and bits[-1] < rows[0]["bits"] == 32
    assert all(0 < row["loss"] < np.log(10) + 0.2 for row in rows)
    frontier.plot(rows, str(tmp_path / "plot.png"))
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_pareto_frontier():
    points = [(1.0, 1.0), (0.5, 2.0), (2.0, 0.5), (2.0, 2.0), (1.0, 1.5)]
    rows = [
        {"bits": b, "loss": p, "name": "x", "setting": "", "accuracy": 0.5, "sent_bytes": 1.0}
        for b, p in points
    ]
    # Equal bits alone do not dominate.
    assert frontier.undominated(rows) == [True, True, True, False, True]
    assert [line.endswith("*") for line in frontier.table(rows).splitlines()[1:]] == (
        frontier.undominated(rows)
    )


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--only", "Nothing"], "invalid choice: 'Nothing'"),
        (["--seeds", "0"], "`--seeds` must be at least 1. Received: --seeds=0"),
    ],
)
def test_bad_arguments(flags, words, capsys):
    with pytest.raises(SystemExit):
        frontier.parse(flags)
    assert words in capsys.readouterr().err


def test_language_model_candidates():
    """Each method suits its inner optimizer."""
    from benchmarks.method_expressions import exchanged
    from tf_redsync.keras import conflicts
    from tf_redsync.policy import Policy

    inner = {
        "adamw": keras.optimizers.AdamW(),
        "without_beta_1": keras.optimizers.AdamW(beta_1=0.0),
        "sgd": keras.optimizers.SGD(),
    }
    for contender in language_frontier.CONTENDERS:
        policy = Policy(default=exchanged(contender.method).method)
        conflicts.check_adam(inner[contender.group], policy)
        conflicts.check_momentum(inner[contender.group], policy)
    assert set(inner) == set(language_frontier.GROUPS)


def test_rows_of_the_language_model(tmp_path, capsys):
    flags = ["--task", "charlm", "--folder", str(tmp_path), "--workers", "2", "--steps", "9"]
    assert frontier.main(flags) == 1
    assert "give --data_dir to train" in capsys.readouterr().out
    common = {"bits": 32.0, "sent_bytes": 2000.0, "peak_bytes": 3000.0}
    dense = [{"method": "Dense()", "seed": i, "metric": 6.0 + i, **common} for i in range(3)]
    broken = {"method": "ACPSGD()", "seed": 0, "error": "it diverged"}
    for group, rows in (("adamw", [*dense, broken]), ("sgd", [{**dense[0], "method": "DeMo()"}])):
        path = tmp_path / f"charlm_9_2_workers_{group}.json"
        path.write_text(json.dumps({"settings": {}, "rows": rows}))
    picture = tmp_path / "plot.png"
    assert frontier.main([*flags, "--plot", str(picture)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2:] == [
        "| Dense |  | 3 | 7.00 | 1.00 | 32.000 | 2.0 | 3.0 |",
        "| ACPSGD |  | 0, 1 diverged | - | - | - | - | - |",
        "| DeMo |  | 1 | 6.00 | - | 32.000 | 2.0 | 3.0 |",
    ]
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("page", "workers"), [("benchmarks.md", 4), ("archive/benchmarks.md", 8)])
def test_pages_match_the_command(page, workers, capsys):
    """The documented command prints the published table."""
    flags = ["--task", "charlm", "--folder", str(DOCS / "accuracy"), "--workers", str(workers)]
    assert frontier.main(flags) == 0
    printed = capsys.readouterr().out.strip()
    assert printed.count("\n") > 20
    assert f"\n\n{printed}\n\n" in (DOCS / page).read_text(encoding="utf-8")


def test_steps_to_a_perplexity():
    curve = {"steps": [250, 500, 1000], "metric": [12.0, 10.0, 6.0]}
    found = [time_to_loss.steps_to(curve, p) for p in (13.0, 12.0, 11.0, 8.0, 6.0, 5.9)]
    assert found == [250.0, 250.0, 375.0, 750.0, 1000.0, None]


def test_seconds_to_a_perplexity(tmp_path, capsys):
    curve = {"steps": [500, 1000], "metric": [8.0, 6.0]}
    rows = [{"method": "Dense()", "seed": i, "curve": curve} for i in range(2)]
    (tmp_path / "charlm_1000_4_workers_adamw.json").write_text(json.dumps({"rows": rows}))
    measured = tmp_path / "steps.json"
    timed = {
        "Dense()": {"step_ms": 30.0, "step_ms_mean": 40.0},
        "DiLoCo(steps=50)": {"step_ms": 10.0, "step_ms_mean": 10.0},
    }
    report = {"rate": "10mbit", "latency_ms": 50.0, "workers": 2, "methods": timed}
    measured.write_text(json.dumps(report))
    other = tmp_path / "more_workers.json"
    other.write_text(json.dumps({**report, "workers": 4, "methods": {"Dense()": {
        "step_ms": 90.0, "step_ms_mean": 100.0}}}))  # fmt: skip
    flags = ["--measured", str(measured), str(other), "--folder", str(tmp_path), "--perplexity"]
    assert time_to_loss.main([*flags, "7"]) == 0
    head, _, *found = capsys.readouterr().out.splitlines()
    assert head.endswith("| 10mbit, 50 ms, 2 workers | 10mbit, 50 ms, 4 workers |")
    assert found == ["| Dense | 750 | 30 (40) | 75 (100) |"]
    assert time_to_loss.main([*flags, "9"]) == 0  # reached at some step up to the first evaluation
    assert "| Dense | <= 500 | 20 (40) | 50 (100) |" in capsys.readouterr().out
    assert time_to_loss.main([*flags, "5"]) == 0
    assert "| Dense | - | - (40) | - (100) |" in capsys.readouterr().out
    rows[1] = {"method": "Dense()", "seed": 1, "error": "the loss is not finite"}
    (tmp_path / "charlm_1000_4_workers_adamw.json").write_text(json.dumps({"rows": rows}))
    assert time_to_loss.main([*flags, "7"]) == 0
    assert "| Dense | - | - (40) | - (100) |" in capsys.readouterr().out
