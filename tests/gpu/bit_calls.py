"""Whole calls of bits_api.h, with the oracles' arguments and results; see codec_calls."""

from __future__ import annotations

import ctypes

import numpy as np

from tests.gpu import device as d
from tests.gpu.codec_calls import garbage, run, scratch_bytes


def _structure(name: str, numbers: str, pointers: str, then: str = "", last: str = ""):
    """Returns a structure of 64-bit numbers, pointers, then `then` and `last`."""
    fields = [(n, kind) for names, kind in (
        (numbers, d.Int64), (pointers, d.Pointer), (then, d.Int64), (last, d.Pointer)
    ) for n in names.split()]  # fmt: skip
    return type(name, (ctypes.Structure,), {"_fields_": fields})


Codes = _structure("Codes", "rows count bits", "given out")
WriteBits = _structure("WriteBits", "", "codes lengths", "count size", "words")
RiceEncode = _structure("RiceEncode", "", "numbers", "count rice bitmap_words", "code")
RiceDecode = _structure("RiceDecode", "", "codes", "rows count rice bitmap_words", "numbers")
SetBits = _structure("SetBits", "", "words", "rows size slots", "positions counts")


class Bitmap(ctypes.Structure):
    """RedsyncGpuBitmap."""

    _fields_ = [("positions", d.Pointer), ("slots", d.Int64), ("count", d.Pointer)]
    _fields_ += [("size", d.Int64), ("words", d.Pointer)]


def packed_words(count: int, bits: int) -> int:
    """Returns the number of words of `count` codes."""
    return -(-count * bits // 32)


def _codes(device, name, codes, rows, count, bits, words):
    given, out = device.array(np.asarray(codes, np.int32)), garbage(device, words, np.int32)
    call = Codes(rows, count, bits, device.pointer(given), device.pointer(out))
    run(device, name, call, record=False)
    return device.get(out)


def pack(device, codes, bits):
    """See `pack_numpy`."""
    *before, count = np.shape(codes)
    rows, words = int(np.prod(before)), packed_words(count, bits)
    out = _codes(device, "pack_bits", codes, rows, count, bits, rows * words)
    return out.reshape(*before, words)


def unpack(device, words, bits, count):
    """See `unpack_numpy`."""
    rows = len(words)
    return _codes(device, "unpack_bits", words, rows, count, bits, rows * count).reshape(
        rows, count
    )


def write(device, codes, lengths, words):
    """See `write_numpy`. Returns (words, `Error` or None)."""
    given = [device.array(np.asarray(codes, np.int64)), device.array(np.asarray(lengths, np.int32))]
    out = garbage(device, words, np.int32)
    call = WriteBits(*map(device.pointer, given), len(codes), words, device.pointer(out))
    error = run(
        device, "write_bits", call, record=True, scratch=scratch_bytes(device, "write_bits", call)
    )
    return device.get(out), error


def bitmap(device, positions, count, words):
    """See `bitmap_numpy`. Returns (words, `Error` or None)."""
    given = device.array(np.asarray(positions, np.int32))
    number, out = device.array(np.array([count], np.int32)), garbage(device, words, np.int32)
    call = Bitmap(device.pointer(given), given.size, device.pointer(number), words)
    call.words = device.pointer(out)
    error = run(device, "bitmap", call, record=True)
    return device.get(out), error


def set_bits(device, words, slots):
    """See `set_bits_numpy`."""
    rows, size = np.shape(words)
    given = device.array(np.asarray(words, np.int32))
    out, counts = (garbage(device, n, np.int32) for n in (rows * slots, rows))
    call = SetBits(device.pointer(given), rows, size, slots, *map(device.pointer, (out, counts)))
    run(device, "set_bits", call, record=False, scratch=scratch_bytes(device, "set_bits", call))
    return device.get(out).reshape(rows, slots), device.get(counts).reshape(rows, 1)


def rice_encode(device, numbers, rice, bitmap_words):
    """See `rice_encode_numpy`. Returns (code, `Error` or None)."""
    given = device.array(np.asarray(numbers, np.int32))
    out = garbage(device, packed_words(given.size, max(rice, 0)) + max(bitmap_words, 0), np.int32)
    call = RiceEncode(device.pointer(given), given.size, rice, bitmap_words, device.pointer(out))
    error = run(
        device, "rice_encode", call, record=True, scratch=scratch_bytes(device, "rice_encode", call)
    )
    return device.get(out), error


def rice_decode(device, codes, rice, bitmap_words, count):
    """See `rice_decode_numpy`. Returns (numbers, `Error` or None)."""
    rows, given = len(codes), device.array(np.asarray(codes, np.int32))
    out = garbage(device, rows * max(count, 0), np.int32)
    call = RiceDecode(device.pointer(given), rows, count, rice, bitmap_words, device.pointer(out))
    error = run(
        device, "rice_decode", call, record=True, scratch=scratch_bytes(device, "rice_decode", call)
    )
    return device.get(out).reshape(rows, count), error
