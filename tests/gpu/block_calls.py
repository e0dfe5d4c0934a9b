"""Whole calls of block quantization in the CUDA core; see codec_calls."""

from __future__ import annotations

import ctypes

import numpy as np

from tests.gpu import device as d
from tests.gpu.codec_calls import GARBAGE, run


class Quantize(ctypes.Structure):
    """RedsyncGpuBlockQuantize."""

    _fields_ = [(n, d.Int64) for n in ("bits", "block", "rows", "size")]
    _fields_ += [(n, d.Pointer) for n in ("values", "messages", "errors")]


class Dequantize(ctypes.Structure):
    """RedsyncGpuBlockDequantize."""

    _fields_ = [(n, d.Int64) for n in ("bits", "block", "rows", "size")]
    _fields_ += [("sum", d.Int32), ("messages", d.Pointer), ("values", d.Pointer)]


def block_words(size, *, bits, block):
    """Returns the number of words of a message: a flag, 16-bit scales, codes."""
    return 1 + -(-size // (2 * block)) + size * bits // 32


def quantize(device, rows, bits, block, in_place=False, misalign=0):
    """Returns messages and errors; asserts that memory next to the outputs is unchanged."""
    number, size = rows.shape
    words = number * block_words(size, bits=bits, block=block)
    given = device.array(np.append(rows.ravel(), np.float32(GARBAGE)), misalign)
    messages = device.array(np.full(words + 1, GARBAGE, np.int32))
    errors = given
    if not in_place:
        errors = device.array(np.full(number * size + 1, GARBAGE, np.float32), misalign)
    call = Quantize(bits, block, number, size, *map(device.pointer, (given, messages, errors)))
    run(device, "block_quantize", call, record=False)
    messages, errors = device.get(messages), device.get(errors)
    assert messages[-1] == GARBAGE and errors[-1] == np.float32(GARBAGE)
    return messages[:-1].reshape(number, -1), errors[:-1].reshape(number, size)


def dequantize(device, messages, size, bits, block, add, misalign=0):
    """Returns the values of messages, or their sum."""
    rows = len(messages)
    given = device.array(messages)
    garbage = np.full(size * (1 if add else rows) + 1, GARBAGE, np.float32)
    values = device.array(garbage, misalign)
    call = Dequantize(bits, block, rows, size, add, device.pointer(given), device.pointer(values))
    run(device, "block_dequantize", call, record=False)
    found = device.get(values)
    assert found[-1] == np.float32(GARBAGE)
    return found[:-1] if add else found[:-1].reshape(rows, size)
