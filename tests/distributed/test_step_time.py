"""The step time benchmark: its arithmetic, its report, and real runs of a few steps."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import netlab, step_time

ROOT = Path(__file__).resolve().parents[2]
PARAMETERS = 784 * 2048 + 5 * 2048 * 2048 + 2048 * 10 + 6 * 2048 + 10
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")


def run(*args, timeout=200):
    environment = {k: v for k, v in os.environ.items() if k not in ("TF_CONFIG", "PYTHONPATH")}
    return subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "step_time.py"), *args],
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
    }


def test_rounds_are_pooled():
    pooled = step_time.summary([one([1.0, 2.0, 30.0], 8, 10.0), one([3.0, 4.0], 8, 20.0)])
    assert pooled == {
        "step_ms": 3.0,
        "step_ms_min": 1.0,
        "bytes_per_step": 8,
        "wire_bytes_per_step": 15.0,
        "cpu_ms_per_step": 7.0,
        "round_step_ms": [2.0, 3.5],
    }
    assert step_time.summary([one([1.0], 8, None)])["wire_bytes_per_step"] is None


def test_table_holds_the_ratios():
    rows = {
        "none": step_time.summary([one([100.0], 0, 0.0)]),
        "dense": step_time.summary([one([900.0], 5_000_000, 6_000_000.0)]),
        "redsync": step_time.summary([one([150.0], 1000, None)]),
    }
    lines = [line.split() for line in step_time.table(rows).splitlines()]
    assert lines[1] == ["none", "100.0", "100.0", "7.0", "1.00", "9.00", "0.000", "0.000"]
    assert lines[2] == ["dense", "900.0", "900.0", "7.0", "9.00", "1.00", "5.000", "6.000"]
    assert lines[3] == ["redsync", "150.0", "150.0", "7.0", "1.50", "6.00", "0.001", "-"]
    assert "-" in step_time.table({"redsync": rows["redsync"]})


@pytest.mark.parametrize("text", ["", "redsync,best", "dense,dense"])
def test_bad_methods(text):
    with pytest.raises(ValueError, match="none, dense, rs_dense, redsync"):
        step_time.parse_methods(text)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--steps", "0"], "`--steps` must be at least 1. Received: --steps=0"),
        (["--rate", "fast"], "`rate` must be none, or like 100mbit"),
        (["--methods", "best"], "--methods=best"),
        (["--model", "gpt"], "gpt"),
    ],
)
def test_bad_arguments(capsys, args, words):
    with pytest.raises(SystemExit) as exit_:
        step_time.main(args)
    assert exit_.value.code == 2
    assert words in capsys.readouterr().err


@pytest.mark.distributed
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


@needs_root
@pytest.mark.distributed
def test_wire_bytes_agree_with_the_library(tmp_path):
    report = tmp_path / "report.json"
    flags = ["--rate", "1gbit", "--model", "mlp", "--batch", "2", "--rounds", "1", "--steps", "4"]
    done = run(*flags, "--methods", "dense,redsync", "--warmup", "1", "--json", str(report))
    assert done.returncode == 0, done.stderr
    rows = json.loads(report.read_text())["methods"]
    assert rows["dense"]["bytes_per_step"] == 4 * PARAMETERS
    # Index and value of every thousandth element, and the small tensors as they are.
    assert 0.0015 < rows["redsync"]["bytes_per_step"] / (4 * PARAMETERS) < 0.01
    # Headers, acknowledgements and the calls themselves come on top.
    for name, overhead in (("dense", 1.05), ("redsync", 1.5)):
        counted, wire = rows[name]["bytes_per_step"], rows[name]["wire_bytes_per_step"]
        assert counted <= wire < overhead * counted, name
    # 90 MB at 1 Gbit/s take 0.72 s: the limit is there.
    assert rows["dense"]["step_ms"] > 700


@pytest.mark.distributed
def test_a_failing_worker_is_reported():
    done = run("--rate", "none", "--methods", "redsync", "--density", "7", "--rounds", "1")
    assert done.returncode == 1
    assert "`redsync` failed. worker" in done.stderr
    assert "density" in done.stderr


@needs_root
@pytest.mark.distributed
def test_interrupt_leaves_nothing():
    command = [sys.executable, str(ROOT / "benchmarks" / "step_time.py"), "--methods", "dense"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as job:
        end = time.monotonic() + 20
        while len(netlab.namespaces_of(job.pid)) < 3:
            assert time.monotonic() < end
            time.sleep(0.05)
        time.sleep(1)
        job.send_signal(signal.SIGTERM)
        job.wait(timeout=10)
    end = time.monotonic() + 10
    while netlab.namespaces_of(job.pid):
        assert time.monotonic() < end, netlab.namespaces_of(job.pid)
        time.sleep(0.05)
