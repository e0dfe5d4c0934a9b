"""CUDA top-k of chunks: the numpy oracle's bits for arbitrary floats."""

import ctypes

import numpy as np
import pytest

from tests.gpu import device as d
from tests.gpu.codec_calls import GARBAGE, run
from tests.gpu.inputs import KINDS, assert_same_bits
from tests.oracle.chunks import chunked_top_k_numpy

SIZES = (1, 2, 31, 64, 100, 255, 256, 257, 511, 1000)


class Chunks(ctypes.Structure):
    """RedsyncGpuChunks."""

    _fields_ = [("chunks", d.Pointer)] + [(n, d.Int64) for n in ("number", "size", "k")]
    _fields_ += [("positions", d.Pointer), ("values", d.Pointer)]


def top_k(device, chunks, k):
    """Returns positions and values; asserts that memory next to the outputs is unchanged."""
    number, size = chunks.shape
    given = device.array(chunks)
    outputs = [device.array(np.full(number * k + 1, GARBAGE, t)) for t in (np.int32, np.float32)]
    call = Chunks(device.pointer(given), number, size, k, *map(device.pointer, outputs))
    run(device, "chunked_top_k", call, record=False)
    found = [device.get(out) for out in outputs]
    assert all(out[-1] == GARBAGE for out in found)
    return [out[:-1].reshape(number, k) for out in found]


def check(device, chunks, k, what=""):
    expected = chunked_top_k_numpy(chunks, k)
    assert_same_bits(top_k(device, chunks, k), list(expected), f"{what}, k={k}")


@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_oracle(device, kind):
    rng = np.random.default_rng(0)
    for size in SIZES:
        chunks = np.stack([KINDS[kind](rng, size) for _ in range(3)]).astype(np.float32)
        for k in sorted({0, 1, size // 33, size // 2, size - 1, size}):
            check(device, chunks, k, f"{kind}, size {size}")


@pytest.mark.parametrize("k", [32, 128])
def test_usual_chunks(device, k):
    rng = np.random.default_rng(k)
    chunks = rng.standard_t(3, (6, 4096)).astype(np.float32)
    chunks[1] = 0.0
    chunks[2, 100:] = 0.25
    chunks[3] = rng.integers(-3, 4, 4096)
    check(device, chunks, k)


def test_arbitrary_bits(device):
    """NaNs rank above infinities, these above numbers; denormals count."""
    rng = np.random.default_rng(1)
    special = [0, -(2**31), 1, -1, 0x7F800000, -0x800000, 0x7FC00000, 0x00000007, 0x3F800000]
    for size in (9, 300):
        words = rng.integers(-(2**31), 2**31, (8, size)).astype(np.int32)
        words[rng.random(words.shape) < 0.5] = rng.choice(np.array(special, np.int64)).astype(
            np.int32
        )
        words[0, :9] = special
        for k in (1, 2, 5, 9):
            check(device, words.view(np.float32), k, f"size {size}")


def test_no_chunks(device):
    check(device, np.zeros((0, 5), np.float32), 2)


@pytest.mark.parametrize(("size", "k"), [(4, 5), (4, -1), (2**31, 1)])
def test_arguments_out_of_range(device, size, k):
    call = Chunks(None, 1, size, k, None, None)
    with pytest.raises(ValueError, match="invalid"):
        run(device, "chunked_top_k", call, record=False)


def test_failed_launch_is_attributed_to_its_call(device):
    """The error is cleared, so the next call has none."""
    fail = getattr(device.library, "emulator_fail", None)
    if fail is None:
        pytest.skip("only the emulator can inject failures")
    chunks = np.ones((2, 8), np.float32)
    fail()
    with pytest.raises(AssertionError, match="3.*unspecified launch failure"):
        top_k(device, chunks, 2)
    check(device, chunks, 2)
    assert device.library.redsync_gpu_last_error() == b"unspecified launch failure"
