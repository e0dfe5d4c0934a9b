"""CUDA block quantisation: the bits of the CPU's ops, whatever the floats and the words."""

import ctypes

import numpy as np
import pytest

from tests.gpu import device as d
from tests.gpu.codec_calls import GARBAGE, run
from tests.gpu.inputs import KINDS, assert_same_bits
from tests.kernels.common import on
from tf_redsync.ops.block_quantization import block_dequantize, block_quantize, block_words

FORMATS = [(8, 256), (4, 32), (4, 96), (2, 256), (2, 64)]


class Quantize(ctypes.Structure):
    """RedsyncGpuBlockQuantize."""

    _fields_ = [(n, d.Int64) for n in ("bits", "block", "rows", "size")]
    _fields_ += [(n, d.Pointer) for n in ("values", "messages", "errors")]


class Dequantize(ctypes.Structure):
    """RedsyncGpuBlockDequantize."""

    _fields_ = [(n, d.Int64) for n in ("bits", "block", "rows", "size")]
    _fields_ += [("sum", d.Int32), ("messages", d.Pointer), ("values", d.Pointer)]


def quantize(device, rows, bits, block, in_place=False):
    """Messages and errors; neighbours of the outputs stay as they are."""
    number, size = rows.shape
    words = number * block_words(size, bits=bits, block=block)
    given = device.array(np.append(rows.ravel(), np.float32(GARBAGE)))
    messages = device.array(np.full(words + 1, GARBAGE, np.int32))
    errors = given if in_place else device.array(np.full(number * size + 1, GARBAGE, np.float32))
    call = Quantize(bits, block, number, size, *map(device.pointer, (given, messages, errors)))
    run(device, "block_quantize", call, record=False)
    messages, errors = device.get(messages), device.get(errors)
    assert messages[-1] == GARBAGE and errors[-1] == np.float32(GARBAGE)
    return messages[:-1].reshape(number, -1), errors[:-1].reshape(number, size)


def dequantize(device, messages, size, bits, block, add):
    """Values of messages, or their sum."""
    rows = len(messages)
    given = device.array(messages)
    values = device.array(np.full(size * (1 if add else rows) + 1, GARBAGE, np.float32))
    call = Dequantize(bits, block, rows, size, add, device.pointer(given), device.pointer(values))
    run(device, "block_dequantize", call, record=False)
    found = device.get(values)
    assert found[-1] == np.float32(GARBAGE)
    return found[:-1] if add else found[:-1].reshape(rows, size)


def check(device, rows, bits, block, what="", in_place=False):
    expected = on("tensorflow", lambda: block_quantize(rows, bits=bits, block=block))
    found = quantize(device, rows, bits, block, in_place)
    what = f"{what}, {bits} bits, block {block}"
    if not expected[0].any():  # nothing usable: errors are unspecified
        return assert_same_bits([found[0]], [expected[0]], what)
    assert_same_bits(list(found), list(expected), what)
    for add in (False, True):
        size = rows.shape[1]
        back = on(
            "tensorflow",
            lambda: block_dequantize(expected[0], size, bits=bits, block=block, add=add),  # noqa: B023
        )
        got = dequantize(device, expected[0], size, bits, block, add)
        assert_same_bits([got], [back], f"{what}, add={add}")
    return None


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "denormal"])
def test_equals_the_cpu(device, kind):
    rng = np.random.default_rng(0)
    for bits, block in FORMATS:
        for size in (32, 480):
            rows = np.stack([KINDS[kind](rng, size) for _ in range(3)]).astype(np.float32)
            check(device, rows, bits, block, f"{kind}, size {size}")


def test_errors_in_the_place_of_the_values(device):
    rows = np.random.default_rng(1).laplace(size=(2, 1056)).astype(np.float32)
    for bits, block in FORMATS:
        check(device, rows, bits, block, in_place=True)


@pytest.mark.parametrize("bad", [np.nan, -np.inf, 2.0**126])
def test_bad_values_leave_no_message(device, bad):
    rows = np.ones((3, 544), np.float32)
    rows[2, 543] = bad
    messages, _ = quantize(device, rows, 4, 256)
    assert not messages.any()


def test_any_words(device):
    rng = np.random.default_rng(2)
    for bits, block in FORMATS:
        words = block_words(96, bits=bits, block=block)
        messages = rng.integers(-(2**31), 2**31, (3, words)).astype(np.int32)
        messages[:, 1 : 1 + -(-96 // (2 * block))] &= 0x3FFF3FFF  # finite, positive scales
        for add in (False, True):
            expected = on(
                "tensorflow",
                lambda: block_dequantize(messages, 96, bits=bits, block=block, add=add),  # noqa: B023
            )
            got = dequantize(device, messages, 96, bits, block, add)
            assert_same_bits([got], [expected], f"{bits} bits, block {block}, add={add}")


@pytest.mark.parametrize(("bits", "block", "size"), [(3, 32, 32), (8, 48, 96), (8, 32, 33)])
def test_arguments_out_of_range(device, bits, block, size):
    with pytest.raises(ValueError, match="invalid"):
        run(
            device, "block_quantize", Quantize(bits, block, 1, size, None, None, None), record=False
        )
