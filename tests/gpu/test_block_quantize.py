"""CUDA block quantization: the TensorFlow reference's bits, for arbitrary floats and words.

Without TensorFlow a GPU is compared with the emulator, which equals the reference.
"""

import functools
import importlib.util
import pathlib

import numpy as np
import pytest

from tests.gpu import device as d
from tests.gpu.block_calls import Quantize, block_words, dequantize, quantize
from tests.gpu.codec_calls import run
from tests.gpu.inputs import KINDS, assert_same_bits

FORMATS = [(8, 256), (8, 544), (4, 32), (4, 96), (4, 512), (2, 256), (2, 64), (2, 320)]


@functools.cache
def emulator():
    return d.Emulated(d.build("emulated", pathlib.Path()))


def has_tensorflow(device) -> bool:
    """Returns whether the reference is the oracle; otherwise the emulator is."""
    found = importlib.util.find_spec("tensorflow") is not None
    if not found and isinstance(device, d.Emulated):
        pytest.skip("without TensorFlow the emulator has no oracle")
    return found


def expected_message(device, rows, bits, block):
    """Returns the expected messages and errors."""
    if not has_tensorflow(device):
        return quantize(emulator(), rows, bits, block)
    from tests.kernels.common import on
    from tf_redsync.ops.block_quantization import block_quantize

    return on("tensorflow", lambda: block_quantize(rows, bits=bits, block=block))


def expected_values(device, messages, size, bits, block, add):
    """Returns the expected values of messages, or their sum."""
    if not has_tensorflow(device):
        return dequantize(emulator(), messages, size, bits, block, add)
    from tests.kernels.common import on
    from tf_redsync.ops.block_quantization import block_dequantize

    form = {"bits": bits, "block": block, "add": add}
    return on("tensorflow", lambda: block_dequantize(messages, size, **form))


def check(device, rows, bits, block, what="", **how):
    expected = expected_message(device, rows, bits, block)
    found = quantize(device, rows, bits, block, **how)
    what = f"{what}, {bits} bits, block {block}"
    if not expected[0].any():  # invalid message: errors are unspecified
        return assert_same_bits([found[0]], [expected[0]], what)
    assert_same_bits(list(found), list(expected), what)
    for add in (False, True):
        size = rows.shape[1]
        back = expected_values(device, expected[0], size, bits, block, add)
        got = dequantize(device, expected[0], size, bits, block, add, how.get("misalign", 0))
        assert_same_bits([got], [back], f"{what}, add={add}")
    return None


@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_cpu(device, kind):
    rng = np.random.default_rng(0)
    for bits, block in FORMATS:
        for size in (32, 480):
            rows = np.stack([KINDS[kind](rng, size) for _ in range(3)]).astype(np.float32)
            check(device, rows, bits, block, f"{kind}, size {size}")


def test_errors_overwrite_the_values(device):
    rows = np.random.default_rng(1).laplace(size=(2, 1056)).astype(np.float32)
    for bits, block in FORMATS:
        check(device, rows, bits, block, in_place=True)


def test_addresses_not_aligned_for_vectors(device):
    rows = np.random.default_rng(3).laplace(size=(2, 608)).astype(np.float32)
    for bits, block in FORMATS:
        check(device, rows, bits, block, in_place=True, misalign=1)


@pytest.mark.parametrize("bad", [np.nan, -np.inf, 2.0**126])
def test_bad_values_invalidate_the_message(device, bad):
    rows = np.ones((3, 544), np.float32)
    rows[2, 543] = bad
    messages, _ = quantize(device, rows, 4, 256)
    assert not messages.any()


def test_arbitrary_words(device):
    rng = np.random.default_rng(2)
    for bits, block in FORMATS:
        words = block_words(96, bits=bits, block=block)
        messages = rng.integers(-(2**31), 2**31, (3, words)).astype(np.int32)
        messages[:, 1 : 1 + -(-96 // (2 * block))] &= 0x3FFF3FFF  # finite, positive scales
        for add in (False, True):
            expected = expected_values(device, messages, 96, bits, block, add)
            got = dequantize(device, messages, 96, bits, block, add)
            assert_same_bits([got], [expected], f"{bits} bits, block {block}, add={add}")


@pytest.mark.parametrize(
    ("bits", "block", "size"), [(3, 32, 32), (8, 48, 96), (8, 32, 33), (8, 0, 32)]
)
def test_arguments_out_of_range(device, bits, block, size):
    with pytest.raises(ValueError, match="invalid"):
        run(
            device, "block_quantize", Quantize(bits, block, 1, size, None, None, None), record=False
        )
