"""Whole calls of topk_api.h, with numpy arrays; see codec_calls."""

from __future__ import annotations

import ctypes

import numpy as np

from tests.gpu import device as d
from tests.gpu.codec_calls import garbage, run, scratch_bytes
from tests.oracle.coded import GolombStreams


class Tensor(ctypes.Structure):
    """RedsyncGpuTopKTensor."""

    _fields_ = [(n, d.Int64) for n in ("size", "slots", "stream")] + [("residual", d.Pointer)]


class Format(ctypes.Structure):
    """RedsyncGpuTopKFormat."""

    _fields_ = [("tensors", ctypes.POINTER(Tensor)), ("count", d.Int64)]
    _fields_ += [("rice", ctypes.POINTER(d.Int64)), ("streams", d.Int64), ("value_bits", d.Int64)]


class EncodeTopK(ctypes.Structure):
    """RedsyncGpuEncodeTopK."""

    _fields_ = [("format", Format), ("plain", d.Pointer), ("message", d.Pointer)]


class DecodeTopK(ctypes.Structure):
    """RedsyncGpuDecodeTopK."""

    _fields_ = [("format", Format), ("messages", d.Pointer), ("ranks", d.Int64)]
    _fields_ += [("words", d.Int64), ("plain", d.Pointer)]


def make_format(sizes, slots, value_bits, residuals=None) -> Format:
    """Returns the format of tensors of these sizes and slots; `residuals` are for encoding."""
    code = GolombStreams(sizes, slots)
    stream = {i: s for s, members in enumerate(code.members) for i in members}
    tensors = (Tensor * len(sizes))()
    for i, (size, k) in enumerate(zip(sizes, slots, strict=True)):
        tensors[i] = Tensor(size, k, stream[i], residuals[i] if residuals else None)
    rice = (d.Int64 * len(code.b))(*code.b)
    return Format(tensors, len(sizes), rice, len(code.b), value_bits)


def _words(device, name: str, form: Format) -> int:
    words = getattr(device.library, f"redsync_gpu_{name}_words")(ctypes.byref(form))
    if words < 0:
        raise ValueError("an argument is invalid")
    return words


def encode_topk(device, plain, residuals, slots, value_bits):
    """Encodes a plain message; returns (message, residuals)."""
    on_device = [device.array(r) for r in residuals]
    sizes, pointers = [r.size for r in residuals], [device.pointer(t) for t in on_device]
    form = make_format(sizes, slots, value_bits, pointers)
    given = device.array(np.asarray(plain, np.int32))
    assert given.size == _words(device, "plain", form)
    message = garbage(device, _words(device, "topk", form), np.int32)
    call = EncodeTopK(form, device.pointer(given), device.pointer(message))
    run(
        device,
        "encode_topk",
        call,
        record=False,
        scratch=scratch_bytes(device, "encode_topk", call),
    )
    return device.get(message), [device.get(t) for t in on_device]


def decode_topk(device, messages, sizes, slots, value_bits):
    """Decodes the messages of all workers; returns (plain messages, `Error` or None)."""
    messages = np.asarray(messages, np.int32)
    form, received = make_format(sizes, slots, value_bits), device.array(messages)
    words = _words(device, "plain", form)
    plain = garbage(device, len(messages) * words, np.int32)
    call = DecodeTopK(form, device.pointer(received), *messages.shape, device.pointer(plain))
    error = run(
        device, "decode_topk", call, record=True, scratch=scratch_bytes(device, "decode_topk", call)
    )
    return device.get(plain).reshape(len(messages), words), error
