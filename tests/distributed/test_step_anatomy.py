"""benchmarks/step/timeline.py and benchmarks/step/memory.py on real workers."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(script, *args, timeout=300):
    environment = {k: v for k, v in os.environ.items() if k not in ("TF_CONFIG", "PYTHONPATH")}
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "step" / script), *args],
        env=environment,
        cwd="/",
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.deep  # its parts: tests/unit/test_timeline.py
def test_timeline(tmp_path):
    files = {name: tmp_path / f"{name}.json" for name in ("trace", "json")}
    flags = [f"--{name}={path}" for name, path in files.items()]
    out = run("timeline.py", "--rate", "none", "--batch", "2", "--steps", "2", *flags)
    assert "waiting for collectives only" in out and "hidden:" in out
    numbers = json.loads(files["json"].read_text())
    for step in numbers["steps"]:
        for part in ("forward", "backward", "selection", "update", "collectives"):
            assert step[part] > 0, part
        total = step["computing"] + step["exposed"] + step["idle"]
        assert math.isclose(total, step["wall"], rel_tol=1e-6)
    trace = json.loads(files["trace"].read_text())["traceEvents"]
    lanes = {e["args"]["name"] for e in trace if e["name"] == "thread_name"}
    # Two hidden layers per bucket, last layers first; small tensors have a bucket of their own.
    buckets = ("dense_5, dense_4", "dense_3, dense_2", "dense_1, dense")
    assert {f"all-gather: {layers}" for layers in buckets} <= lanes
    assert sum(lane.startswith("all-reduce: dense_6") for lane in lanes) == 1
    spans = [e for e in trace if e["ph"] == "X"]
    assert {"RedsyncAccumulateAndSelect", "CollectiveGatherV2"} <= {
        e["args"].get("op") for e in spans
    }
    assert sum(e["name"] == "train" for e in spans) == 2


@pytest.mark.deep  # its parts: tests/unit/test_memory_benchmark.py
def test_memory(tmp_path):
    """A method needs copies for its state and for the values that a skipped step restores."""
    report = tmp_path / "memory.json"
    methods = "dense,redsync"
    flags = ["--methods", methods, "--batch", "2", "--steps", "3", "--warmup", "2"]
    out = run("memory.py", *flags, f"--json={report}")
    rows = json.loads(report.read_text())["methods"]
    assert list(rows) == methods.split(",") and all(name in out for name in rows)
    # Most parameters are in matrices; only these have residuals and velocities.
    assert rows["dense"]["state"] == pytest.approx(0, abs=0.001)
    assert rows["redsync"]["state"] == pytest.approx(2, abs=0.01)
    # malloc's blocks may be larger than the tensors, hence the tolerances.
    for name, row in rows.items():
        assert row["kept"] == pytest.approx(1 + row["state"], abs=0.2), name
    assert rows["redsync"]["peak"] - rows["dense"]["peak"] < 2.3
