"""selection/selection.py at a tiny size: rows, inputs, and its message without a GPU."""

import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

from benchmarks.selection import chunks, inputs, selection, workers
from benchmarks.selection.counters import Instructions

ROOT = pathlib.Path(__file__).resolve().parents[2]
OPS = {"exact", "trimmed", "threshold", "coded", "reference", "tf_top_k", "argpartition", "memcpy",
       "accumulate", "decode8"}  # fmt: skip


@pytest.mark.deep  # `test_rows_of_chunks` runs in every commit
def test_rows_of_all_ops(tmp_path, monkeypatch):
    flags = "--log2_sizes 10 --densities 0.01 --inputs normal,constant --momentum 0,0.9"
    files = ["--json", str(tmp_path / "rows.json"), "--plot", str(tmp_path / "rows.png")]
    monkeypatch.setattr(sys, "argv", ["", *flags.split(), "--seconds", "0.02", *files])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    for name in ("intra", "inter"):  # TensorFlow has already created its threads
        set_threads = f"set_{name}_op_parallelism_threads"
        monkeypatch.setattr(tf.config.threading, set_threads, lambda number: None)
    selection.main()
    rows = json.loads((tmp_path / "rows.json").read_text())
    expected = {(op, kind, m) for op in OPS for kind in ("normal", "constant") for m in (0, 0.9)}
    assert {(r["op"], r["input"], r["momentum"]) for r in rows} == expected
    assert len(rows) == len(expected)
    for row in rows:
        assert row["n"] == 1024 and row["density"] == 0.01
        assert 0 < row["min_ms"] <= row["ms"] and row["ratio_to_accumulate"] > 0
        assert row["rounds"] >= 1 and row["calls"] >= 1
        assert (row["op"] == "accumulate") <= (row["ratio_to_accumulate"] == 1)
        counted = row["instructions_per_element"]
        assert counted is None if Instructions().problem else counted > 0
    assert (tmp_path / "rows.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("kind", inputs.INPUTS)
def test_inputs(kind):
    x = inputs.make(kind, 5000)
    assert x.shape == (5000,) and x.dtype == np.float32 and np.isfinite(x).all()
    assert np.array_equal(x, inputs.make(kind, 5000))
    deviation = {"normal": 1, "laplace": np.sqrt(2), "student_t": np.sqrt(3), "constant": 0}
    if kind in deviation:
        assert np.std(x) == pytest.approx(deviation[kind], rel=0.25, abs=1e-6)
    assert (np.abs(x).max() == 1e6) == (kind == "outlier")


def test_unknown_input_raises():
    with pytest.raises(ValueError, match="`kind` must be one of"):
        inputs.make("cauchy", 10)


def test_without_a_gpu_prints_a_message():
    found = subprocess.run(
        [sys.executable, "benchmarks/selection/selection.py", "--device=gpu", "--log2_sizes=10"],
        cwd=ROOT, env={**os.environ, "CUDA_VISIBLE_DEVICES": "-1"}, capture_output=True,
        text=True, timeout=280,
    )  # fmt: skip
    assert found.returncode != 0 and "gpu" in found.stderr.lower()
    assert "Traceback" not in found.stderr


def test_rows_of_chunks(tmp_path, monkeypatch):
    for name in ("intra", "inter"):  # TensorFlow has already created its threads
        set_threads = f"set_{name}_op_parallelism_threads"
        monkeypatch.setattr(tf.config.threading, set_threads, lambda number: None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    flags = "--log2_sizes 13 --densities 0.01 --inputs normal --rounds 3 --json"
    chunks.main([*flags.split(), str(tmp_path / "rows.json")])
    rows = {row["op"]: row for row in json.loads((tmp_path / "rows.json").read_text())}
    named = chunks.__doc__.partition("thread:\n\n")[2].partition("\n\n")[0]
    assert [line.split()[0] for line in named.splitlines()] == list(rows)
    for row in rows.values():
        assert row["n"] == 8192 and row["ms"] > 0 and row["rounds"] == 3
    assert rows["read"]["ratio"] == 1


def test_rows_by_the_number_of_workers(tmp_path, monkeypatch):
    threads = []
    monkeypatch.setattr(tf.config.threading, "set_intra_op_parallelism_threads", threads.append)
    words = ["--log2_size", "12", "--densities", "0.03", "--workers", "2,3", "--rounds", "2"]
    workers.main([*words, "--json", str(tmp_path / "rows.json")])
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [(r["n"], r["density"], r["workers"]) for r in rows] == [
        (4096, 0.03, 2), (4096, 0.03, 3)
    ]  # fmt: skip
    for row in rows:
        assert min(row[n] for n in ("accumulate", "code", "decode", "descend", "update")) > 0
        for kind, apply in (("dense", "decode"), ("sparse", "descend")):
            ratio = (row["code"] + row[apply]) / row["update"]
            assert row[f"{kind} ratio"] == pytest.approx(ratio)
    assert threads == [1]
