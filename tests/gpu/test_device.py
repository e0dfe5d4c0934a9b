"""The harness for a real GPU, with a stub runtime library of host memory at 64-bit addresses."""

import ctypes
import gc
import pathlib
import re

import numpy as np
import pytest

from benchmarks.selection import gpu
from tests.compiling import Compiler
from tests.gpu import device as d
from tests.gpu import test_chunks, test_merge, test_select
from tests.gpu.inputs import make_inputs


@pytest.fixture(scope="module")
def stub():
    flags = ["-std=c++17", "-O1", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror"]
    return d.declare_runtime(
        ctypes.CDLL(str(Compiler([]).make(*flags, "tests/gpu/stub_runtime.cc")))
    )


@pytest.fixture(scope="module")
def cuda(stub, tmp_path_factory):
    """The harness as on a GPU; kernels run in the emulator."""
    return d.Cuda(d.build("emulated", tmp_path_factory.mktemp("gpu")), stub)


def test_addresses_have_64_bits(cuda, stub):
    before = stub.stub_allocations()
    on_device = cuda.array(np.arange(10, dtype=np.float32), misalign=3)
    assert cuda.pointer(on_device) >= 2**40 and cuda.pointer(on_device) % 16 == 12
    np.testing.assert_array_equal(cuda.get(on_device), np.arange(10))
    del on_device
    gc.collect()
    assert stub.stub_allocations() == before


def test_runtime_errors_raise(cuda):
    on_device = cuda.array(np.zeros(4, np.float32))
    on_device.address += 2**20  # not allocated
    with pytest.raises(RuntimeError, match="invalid argument"):
        cuda.get(on_device)


def test_calls_as_on_a_gpu(cuda):
    inputs = make_inputs("normal", (1000, 40_000))
    form = {"selectors": ["exact", "trimmed"], "quantized": [False, True], "momentum": 0.9}
    test_select.check(cuda, inputs, [10, 400], [-1, 0.5], "select", **form, nesterov=False,
                      masking=True, scale=np.float32(0.7), side=1, search=True)  # fmt: skip
    test_chunks.check(cuda, np.random.default_rng(0).normal(size=(3, 500)).astype(np.float32), 20)
    test_merge.check(cuda, [test_merge.make_blocks(1000, 300, 4)], [1000], [100])


def test_benchmark_runs_on_the_stub(cuda, monkeypatch):
    monkeypatch.setattr(gpu, "RUNS", 1)
    monkeypatch.setattr(gpu, "WARM_UP", 0)

    def make(kind, n):
        return np.random.default_rng(0).normal(size=n).astype(np.float32)

    rows = gpu.measure([4096], [0.01], ["normal"], [0.9], device=cuda, make=make)
    assert {"exact", "copy"} <= {r["op"] for r in rows} and all(r["ms"] > 0 for r in rows)


def test_every_function_has_a_prototype():
    """Every exported function needs types: ctypes cuts plain integers to 32 bits."""
    folder = pathlib.Path(d.ROOT) / "custom_ops" / "core" / "gpu"
    exported = set()
    for header in folder.glob("*.h"):
        exported |= set(re.findall(r"REDSYNC_GPU_API[^;]*?(redsync_gpu_\w+)\(", header.read_text()))
    found = d.prototypes()
    assert set(found) == exported and len(found) > 25
    assert found["redsync_gpu_copy"] == (ctypes.c_int, [d.Pointer, d.Pointer, d.Int64, d.Pointer])
    assert found["redsync_gpu_problem"] == (ctypes.c_char_p, [ctypes.c_int])
    assert found["redsync_gpu_last_error"] == (ctypes.c_char_p, [])
    assert found["redsync_gpu_quantize_scratch_bytes"] == (d.Int64, [])
    used = set()
    for source in (d.ROOT / "benchmarks" / "selection").glob("gpu.py"):
        used |= set(re.findall(r"\b(cuda[A-Z]\w+)\(", source.read_text()))
    used |= set(re.findall(r"\b(cuda[A-Z]\w+)\(", pathlib.Path(d.__file__).read_text()))
    assert used == set(d.RUNTIME)


@pytest.fixture
def emulated(device):
    """The emulator's library, whose driver and devices can be faked."""
    if getattr(device.library, "emulator_driver", None) is None:
        pytest.skip("only the emulator can fake a driver")
    yield device.library
    device.library.emulator_driver(13010)


def test_supported_gpus(emulated):
    assert emulated.redsync_gpu_problem(0) == b""


def test_no_driver(emulated):
    emulated.emulator_driver(0)
    assert emulated.redsync_gpu_problem(0) == b"there is no NVIDIA driver"


def test_unsupported_driver_or_gpu(emulated):
    """A test kernel decides: a driver runs code of newer toolkits of the same major version."""
    emulated.emulator_driver(12020)
    assert emulated.redsync_gpu_problem(0) == b""
    emulated.emulator_fail()
    text = emulated.redsync_gpu_problem(0).decode()
    assert "the driver is for CUDA 12.2, and the kernels were built with CUDA 13.1" in text
    assert "GPU 0: unspecified launch failure" in text
    assert emulated.redsync_gpu_problem(0) == b"", "the result must not be cached"
