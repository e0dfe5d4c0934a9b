"""benchmarks/selection/gpu.py: its rows in the emulator, and its message without a GPU."""

import numpy as np
import pytest

from benchmarks.selection import gpu
from tests.gpu import device as d


def make(kind, n):
    return np.random.default_rng(0).normal(size=n).astype(np.float32)


@pytest.mark.deep
def test_rows(device, monkeypatch):
    monkeypatch.setattr(gpu, "RUNS", 2)
    monkeypatch.setattr(gpu, "WARM_UP", 1)
    rows = gpu.measure([4096, 9984], [0.01], ["normal"], [0.0, 0.9], device=device, make=make)
    for n in (4096, 9984):
        for momentum in (0.0, 0.9):
            found = [r for r in rows if (r["n"], r["momentum"]) == (n, momentum)]
            assert {"exact", "threshold", "decode8", "copy"} <= {r["op"] for r in found}
            assert all(r["ms"] > 0 and r["density"] == 0.01 for r in found)
            moved = {r["op"] for r in found if r["fraction_of_copy"] is not None}
            assert moved == {"exact", "threshold"}


def test_no_gpu():
    if d.cuda_problem() is None:
        pytest.skip("there is a GPU")
    with pytest.raises(SystemExit, match="cannot be measured here: .*(GPU|nvcc|libcudart)"):
        gpu.measure([4096], [0.01], ["normal"], [0.9], make=make)
