"""`tf-redsync bench`: workers that measure steps, their table, and what is wrong with a command."""

import json

import pytest

from tests.distributed.cluster import run_workers
from tf_redsync.cli import bench, bench_worker, launch


def tiny():
    import keras

    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.layers.Input((40,)), keras.layers.Dense(50)])


def measured(path, methods):
    code = bench_worker.main(
        ["--model=tests.unit.test_bench:tiny", "--steps=2", "--rounds=2", "--batch-size=4",
         f"--json={path}", "--methods", *methods]
    )  # fmt: skip
    return {"code": code}


@pytest.mark.distributed
@pytest.mark.timeout(120)
def test_workers_measure_each_method_in_turn(tmp_path):
    path = tmp_path / "times.json"
    methods = ["Dense", "TopK(density=0.01, dense_below=0)", "NoExchange()"]
    codes = run_workers(measured, args=(str(path), methods))
    assert [worker["code"] for worker in codes] == [0, 0]
    dense, top, nothing = json.loads(path.read_text())
    assert [row["method"] for row in (dense, top, nothing)] == methods
    for row in (dense, top, nothing):
        assert len(row["seconds"]) == 2 and all(0 < s < 60 for s in row["seconds"])
    weights = 40 * 50 + 50
    assert dense["bytes"] == pytest.approx(4 * weights, rel=0.01)  # a ring of two workers
    assert 0 < top["bytes"] < dense["bytes"] / 5 and nothing["bytes"] == 0


def test_wrong_methods_and_models_end_with_a_line(capsys):
    assert measured("unused", ["RedSync(densty=0.1)"])["code"] == 2
    assert "Did you mean `density`" in capsys.readouterr().err
    argv = ["--model=nowhere:f", "--steps=1", "--rounds=1", "--methods", "Dense"]
    assert bench_worker.main(argv) == 2
    assert "--model=nowhere:f" in capsys.readouterr().err


def test_speeds_are_over_dense():
    def timing(method, *seconds):
        return bench_worker.Timing(method, None, lambda: None, list(seconds), bytes=1234.0)

    lines = bench_worker.table(
        [timing("Dense()", 0.1, 0.3, 0.2), timing("TopK()", 0.05)]
    ).splitlines()
    assert lines[1].split() == ["Dense()", "200.0", "100.0", "300.0", "1,234", "1.00x"]
    assert lines[2].split()[-1] == "4.00x"
    assert "speed" not in bench_worker.table([timing("TopK()", 0.05)])


def test_the_command_starts_the_launcher(monkeypatch, capsys):
    started = []
    monkeypatch.setattr(launch, "run_command", lambda words, args: started.append((words, args)))
    bench.main(["-n", "3", "--methods", "Dense", "RedSync(density=0.01)", "--rounds", "2"])
    (words, args) = started.pop()
    assert words[1:3] == ["-m", "tf_redsync.cli.bench_worker"] and args.workers == 3
    parsed = bench_worker._parsed(words[3:])
    assert parsed.methods == ["Dense", "RedSync(density=0.01)"]
    assert (parsed.rounds, parsed.steps, parsed.batch_size) == (2, 10, None)
    with pytest.raises(SystemExit) as end:
        bench.main(["-n", "2", "--rounds", "0"])
    assert end.value.code == 2 and "`--rounds` must be at least 1" in capsys.readouterr().err
