"""The step-time benchmark: arithmetic, report, and real runs of a few steps."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import netlab, workers
from benchmarks.step import step_report, step_time
from tests.deep import DEEP
from tests.distributed import cluster, forks

ROOT = Path(__file__).resolve().parents[2]
PARAMETERS = 784 * 2048 + 5 * 2048 * 2048 + 2048 * 10 + 6 * 2048 + 10
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")


def run(*args, timeout=200):
    environment = {k: v for k, v in os.environ.items() if k not in ("TF_CONFIG", "PYTHONPATH")}
    return subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "step" / "step_time.py"), *args],
        env=environment,
        cwd="/",
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def one(times, counted, wire):
    return {
        "times_ms": times,
        "bytes_per_step": counted,
        "wire_bytes_per_step": wire,
        "cpu_ms_per_step": 7.0,
        "start_s": {"build": 0.5, "first_step": 2.0},
    }


def test_rounds_are_pooled():
    pooled = step_report.summary([one([1.0, 2.0, 30.0], 8, 10.0), one([3.0, 4.0], 8, 20.0)])
    assert pooled == {
        "step_ms": 3.0,
        "step_ms_mean": 8.0,
        "step_ms_min": 1.0,
        "bytes_per_step": 8,
        "wire_bytes_per_step": 15.0,
        "cpu_ms_per_step": 7.0,
        "round_step_ms": [2.0, 3.5],
        "start_s": {"build": 0.5, "first_step": 2.0},
        "period": 1,
    }
    assert step_report.summary([one([1.0], 8, None)])["wire_bytes_per_step"] is None


def test_table_holds_the_ratios():
    rows = {
        "none": step_report.summary([one([100.0], 0, 0.0)]),
        "dense": step_report.summary([one([900.0], 5_000_000, 6_000_000.0)]),
        "redsync": step_report.summary([one([150.0], 1000, None)]),
    }
    lines = [line.split() for line in step_report.table(rows).splitlines()]
    assert lines[1] == ["none", "100.0", "100.0", "7.0", "1.00", "9.00", "0.000", "0.000", "2.5"]
    assert lines[2] == ["dense", "900.0", "900.0", "7.0", "9.00", "1.00", "5.000", "6.000", "2.5"]
    assert lines[3] == ["redsync", "150.0", "150.0", "7.0", "1.50", "6.00", "0.001", "-", "2.5"]
    assert "-" in step_report.table({"redsync": rows["redsync"]})


def test_times_of_periods():
    """With one exchange in three steps, a time is the mean of three."""
    rare = {**one([1.0, 1.0, 10.0, 2.0, 2.0, 20.0], 8, 10.0), "period": 3}
    pooled = step_report.summary([rare])
    assert (pooled["step_ms"], pooled["step_ms_min"], pooled["period"]) == (6.0, 4.0, 3)


WIDE = [
    "--workers",
    "2,4",
    "--rate",
    "none, 1gbit",
    "--model",
    "mlp,vgg",
    "--methods",
    "none,dense",
]


class Lab:
    """Fake network lab that records what is created and removed."""

    log: list = []

    def __init__(self, workers, rate, latency=0.0):
        self.addresses, self.rate, self.latency = ("address",) * workers, rate, latency

    def __enter__(self):
        self.log.append(("up", len(self.addresses), self.rate))
        return self

    def __exit__(self, *_):
        self.log.append(("down", len(self.addresses), self.rate))


def fake_run(module, lab, flags, timeout):
    if flags["method"] == "dense" and flags["model"] == "vgg":
        raise workers.MeasurementError("`dense` failed. worker 1:\n  ValueError: no such luck\nbye")
    ms = len(lab.addresses) * (5.0 if flags["method"] == "dense" else 1.0)
    row = {**one([ms] * flags["steps"], 8, None), "skipped": 0, "params": 12, "batch": 3}
    return row | {"skipped": 2 if flags["density"] == 0.5 else 0}


def test_all_combinations(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(netlab, "network", Lab)
    monkeypatch.setattr(workers, "measure", fake_run)
    Lab.log = []
    files = {"json": tmp_path / "wide.json", "plot": tmp_path / "wide.png"}
    flags = [f"--{name}={path}" for name, path in files.items()]
    assert step_time.main([*WIDE, "--rounds", "3", *flags]) == 1
    # One network after the other.
    networks = [(2, "none"), (2, "1gbit"), (4, "none"), (4, "1gbit")]
    assert Lab.log == [(what, *network) for network in networks for what in ("up", "down")]
    runs = json.loads(files["json"].read_text())["runs"]
    assert [(r["workers"], r["rate"], r["model"]) for r in runs] == [
        (*network, model) for network in networks for model in ("mlp", "vgg")
    ]
    for r in runs:
        assert r["methods"]["none"]["step_ms"] == r["workers"]
        dense = r["methods"]["dense"]
        if r["model"] == "vgg":  # one run failed, the others continued
            assert dense == {"error": "ValueError: no such luck"}
        else:
            assert dense["step_ms"] == 5 * r["workers"]
    printed = capsys.readouterr()
    assert printed.out.count("failed: ValueError: no such luck") == 4 + 4  # progress and table
    assert "vgg   4 workers    1gbit, round 3/3: none" in printed.out
    assert "min" in printed.out and "s left" in printed.out and "; done)" in printed.out
    assert "`dense` failed. worker 1:" in printed.err
    assert files["plot"].read_bytes().startswith(b"\x89PNG")


def test_interruption_keeps_finished_rounds(tmp_path, monkeypatch, capsys):
    """Ctrl-C in the second round: the first one is printed and saved."""
    calls = []

    def interrupted(module, lab, flags, timeout):
        calls.append(flags["method"])
        if len(calls) == 3 or flags["model"] == "vgg":
            raise KeyboardInterrupt
        return fake_run(module, lab, flags, timeout)

    monkeypatch.setattr(netlab, "network", Lab)
    monkeypatch.setattr(workers, "measure", interrupted)
    Lab.log = []
    report = tmp_path / "one.json"
    flags = ["--methods", "none,redsync,dense", "--rounds", "2", "--json", str(report)]
    assert step_time.main(flags) == step_time.INTERRUPTED == 130
    assert calls == ["none", "redsync", "dense"] and [what for what, *_ in Lab.log] == [
        "up",
        "down",
    ]
    rows = json.loads(report.read_text())["methods"]
    assert {name: row["round_step_ms"] for name, row in rows.items()} == {
        "none": [2.0], "redsync": [2.0]
    }  # fmt: skip
    table = capsys.readouterr().out.split("interrupted")[1]
    assert "redsync" in table and "median ms" in table
    report.unlink()
    assert step_time.main([*flags, "--model", "vgg"]) == 130  # before the first round
    assert not report.exists()


def test_skipped_steps_are_a_failure(tmp_path, monkeypatch):
    monkeypatch.setattr(netlab, "network", Lab)
    monkeypatch.setattr(workers, "measure", fake_run)
    report = tmp_path / "one.json"
    flags = ["--methods", "none", "--density", "0.5", "--steps", "7", "--json", str(report)]
    assert step_time.main(flags) == 1
    row = json.loads(report.read_text())["methods"]["none"]
    assert "skipped 2 of 7 steps" in row["error"]


def test_latency_is_in_report(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(netlab, "network", Lab)
    monkeypatch.setattr(workers, "measure", fake_run)
    report = tmp_path / "one.json"
    flags = ["--methods", "none,LocalSGD(steps=3)", "--latency", "50", "--json", str(report)]
    assert step_time.main(flags) == 0
    found = json.loads(report.read_text())
    assert found["latency_ms"] == 50.0 and "LocalSGD(steps=3)" in found["methods"]
    assert "rate 1gbit, latency 50 ms" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--steps", "0"], "`--steps` must be at least 1. Received: --steps=0"),
        (["--rate", "1gbit,fast"], "`--rate` must be none, or like 100mbit"),
        (["--workers", "2,2"], "`--workers` must not repeat a value. Received: --workers=2,2"),
        (["--workers", "2,x"], "`--workers` must be numbers of workers"),
        (["--workers", "0,2"], "`--workers` must be at least 1"),
        (
            ["--latency", "5", "--rate", "none"],
            "needs a `--rate`. Received: --latency=5 --rate=none",
        ),
        (["--bucket-bytes", "0"], "`--bucket-bytes` must be at least 1"),
        (["--methods", "dense", "--plot", "x.png"], "add it to `--methods`"),
        (["--methods", "best"], "--methods=best"),
        (["--model", "unet"], "unet"),
        (["--timeout", "-1"], "`--timeout` must be finite and above 0. Received: --timeout=-1"),
        (["--json", "no/such.json"], "Received: --json=no/such.json"),
        (["--plot", "no/such.png"], "Received: --plot=no/such.png"),
    ],
)
def test_bad_arguments(capsys, args, words):
    with pytest.raises(SystemExit) as exit_:
        step_time.main(args)
    assert exit_.value.code == 2
    assert words in capsys.readouterr().err


@pytest.mark.distributed
@pytest.mark.deep  # the report that `test_wire_bytes_agree_with_the_library` covers too
def test_loopback_report(tmp_path):
    report = tmp_path / "report.json"
    methods = "none,rs_dense"
    flags = ["--rate", "none", "--model", "mlp", "--batch", "2", "--rounds", "1"]
    done = run(*flags, "--methods", methods, "--steps", "2", "--warmup", "1", "--json", str(report))
    assert done.returncode == 0, done.stderr
    data = json.loads(report.read_text())
    assert (data["workers"], data["rate"], data["model"]) == (2, "none", "mlp")
    assert data["params"] == PARAMETERS
    assert list(data["methods"]) == methods.split(",")
    for name, row in data["methods"].items():
        assert 0 < row["step_ms_min"] <= row["step_ms"], name
        assert row["wire_bytes_per_step"] is None
    # Two workers: a ring all-reduce sends the size of the gradients once.
    assert math.isclose(data["methods"]["rs_dense"]["bytes_per_step"], 4 * PARAMETERS, rel_tol=0.01)
    assert data["methods"]["none"]["bytes_per_step"] == 0
    assert "rs_dense" in done.stdout and "x none" in done.stdout


def forked(command, *args, **kwargs):
    """Like `launch.run`, with forked workers: imports take longer than the steps."""
    module, *flags = command[2:]
    path = ROOT / f"{module.replace('.', '/')}.py"
    return run_command(forks.command(cluster.ENVIRONMENT, path, *flags), *args, **kwargs)


run_command = workers.launch.run


@needs_root
@pytest.mark.distributed
@pytest.mark.deep  # a real run; a commit runs the tests above
def test_wire_bytes_agree_with_the_library(tmp_path, monkeypatch):
    monkeypatch.setattr(workers.launch, "run", forked)
    report = tmp_path / "report.json"
    flags = ["--rate", "1gbit", "--model", "mlp", "--batch", "2", "--rounds", "1", "--steps", "4"]
    methods = "dense,redsync" if DEEP else "redsync"
    flags += ["--methods", methods, "--warmup", "1", "--json", str(report)]
    assert step_time.main(flags) == 0
    rows = json.loads(report.read_text())["methods"]
    # Index and value of every thousandth element; small tensors are dense.
    assert 0.0015 < rows["redsync"]["bytes_per_step"] / (4 * PARAMETERS) < 0.01
    # Headers, acknowledgements and RPCs are added.
    assert list(rows) == methods.split(",")
    for name, row in rows.items():
        counted, wire = row["bytes_per_step"], row["wire_bytes_per_step"]
        assert counted <= wire < {"dense": 1.05, "redsync": 1.5}[name] * counted, name
    if "dense" in rows:
        assert rows["dense"]["bytes_per_step"] == 4 * PARAMETERS
        # 90 MB at 1 Gbit/s take 0.72 s: the limit is effective.
        assert rows["dense"]["step_ms"] > 700


@pytest.mark.distributed
@pytest.mark.deep  # messages of failing workers: tests/unit/test_launch.py
def test_failing_worker_is_reported():
    done = run("--rate", "none", "--methods", "redsync", "--density", "7", "--rounds", "1")
    assert done.returncode == 1
    assert "`redsync` failed. worker" in done.stderr
    assert "density" in done.stderr


@needs_root
@pytest.mark.distributed
@pytest.mark.deep  # networks after a signal: tests/unit/test_netlab.py
def test_interrupt_leaves_nothing():
    script = ROOT / "benchmarks" / "step" / "step_time.py"
    command = [sys.executable, str(script), "--methods", "dense"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as job:
        try:
            end = time.monotonic() + 100  # imports, on a busy machine
            while len(netlab.namespaces_of(job.pid)) < 3:
                assert time.monotonic() < end
                time.sleep(0.05)
            time.sleep(1)
            job.send_signal(signal.SIGTERM)
            job.wait(timeout=60)
        finally:
            job.kill()  # otherwise the context manager waits for it
    end = time.monotonic() + 60
    while netlab.namespaces_of(job.pid):
        assert time.monotonic() < end, netlab.namespaces_of(job.pid)
        time.sleep(0.05)
