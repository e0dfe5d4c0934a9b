"""Structures of custom_ops/core/gpu/compression_api.h."""

from __future__ import annotations

import ctypes

from tests.gpu import device as d


class Error(ctypes.Structure):
    """RedsyncGpuCodecError."""

    _fields_ = [("field", ctypes.c_char_p)]
    _fields_ += [(name, d.Int64) for name in ("rank", "tensor", "slot")]
    _fields_ += [("value", ctypes.c_double), ("rule", ctypes.c_char_p), ("limit", d.Int64)]

    def names(self) -> tuple:
        """Field, rank, tensor, slot and value."""
        return self.field.decode(), self.rank, self.tensor, self.slot, self.value

    def must_be(self) -> str:
        """The rule that the value violates."""
        return self.rule.decode() if self.rule else f"in [0, {self.limit}]"


class Quantizer(ctypes.Structure):
    """RedsyncGpuQuantizer."""

    _fields_ = [("mode", d.Int32), ("levels", d.Int32), ("bucket", d.Int64)]


class Dense(ctypes.Structure):
    """RedsyncGpuDense."""

    _fields_ = [("size", d.Int64), ("input", d.Pointer), ("output", d.Pointer)]


class Quantize(ctypes.Structure):
    """RedsyncGpuQuantize."""

    _fields_ = [("quantizer", Quantizer), ("tensors", ctypes.POINTER(Dense)), ("count", d.Int64)]
    _fields_ += [(name, d.Pointer) for name in ("scales", "stream", "message")]


class Dequantize(ctypes.Structure):
    """RedsyncGpuDequantize."""

    _fields_ = [("quantizer", Quantizer), ("tensors", ctypes.POINTER(Dense)), ("count", d.Int64)]
    _fields_ += [("messages", d.Pointer), ("ranks", d.Int64), ("words", d.Int64)]


class Blocks(ctypes.Structure):
    """RedsyncGpuBlocks."""

    _fields_ = [(name, d.Int64) for name in ("slots", "size", "k")]
    _fields_ += [(name, d.Pointer) for name in ("indices", "values", "kept_indices", "kept_values")]
    _fields_ += [(name, d.Pointer) for name in ("dropped_indices", "dropped_values")]


class Merge(ctypes.Structure):
    """RedsyncGpuMerge."""

    _fields_ = [("tensors", ctypes.POINTER(Blocks)), ("count", d.Int64), ("counts", d.Pointer)]
    _fields_ += [("ranks", d.Int64), ("kept_counts", d.Pointer), ("dropped_counts", d.Pointer)]


class Positions(ctypes.Structure):
    """RedsyncGpuPositions."""

    _fields_ = [(name, d.Int64) for name in ("size", "slots", "rice")]
    _fields_ += [("input", d.Pointer), ("output", d.Pointer)]


class GolombEncode(ctypes.Structure):
    """RedsyncGpuGolombEncode."""

    _fields_ = [("tensors", ctypes.POINTER(Positions)), ("count", d.Int64)]
    _fields_ += [("counts", d.Pointer), ("message", d.Pointer)]


class GolombDecode(ctypes.Structure):
    """RedsyncGpuGolombDecode."""

    _fields_ = [("tensors", ctypes.POINTER(Positions)), ("count", d.Int64)]
    _fields_ += [("messages", d.Pointer), ("ranks", d.Int64), ("stride", d.Int64)]
    _fields_ += [("words", d.Int64), ("counts", d.Pointer)]


class Filter(ctypes.Structure):
    """RedsyncGpuFilter."""

    _fields_ = [(name, d.Int64) for name in ("size", "slots", "words", "hashes")]
    _fields_ += [("input", d.Pointer), ("output", d.Pointer)]


class BloomBuild(ctypes.Structure):
    """RedsyncGpuBloomBuild."""

    _fields_ = [("tensors", ctypes.POINTER(Filter)), ("count", d.Int64)]
    _fields_ += [("counts", d.Pointer), ("seed", d.Pointer), ("filters", d.Pointer)]


class BloomQuery(ctypes.Structure):
    """RedsyncGpuBloomQuery."""

    _fields_ = [("tensors", ctypes.POINTER(Filter)), ("count", d.Int64), ("filters", d.Pointer)]
    _fields_ += [("ranks", d.Int64), ("words", d.Int64), ("seed", d.Pointer), ("counts", d.Pointer)]
