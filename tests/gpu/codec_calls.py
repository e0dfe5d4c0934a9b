"""Whole calls of the CUDA core's codecs, with the numpy oracles' arguments and results.

Outputs and scratch memory contain garbage before a call.
"""

from __future__ import annotations

import ctypes

import numpy as np

from tests.gpu import codec_structs as structs
from tests.gpu import device as d

MODES = {"sign": 0, "two_level": 1, "threshold": 2, "stochastic": 3, "uniform": 4, "natural": 5}
GARBAGE = -7


def run(device, name: str, call, *, record: bool, scratch: int | None = None):
    """Calls `redsync_gpu_<name>` with `scratch` bytes; returns an `Error` or None."""
    function = getattr(device.library, f"redsync_gpu_{name}")
    place = device.array(np.zeros(ctypes.sizeof(d.Record), np.uint8))
    pointers = [d.Pointer(device.pointer(place))] if record else []
    if scratch is not None:
        memory = device.array(np.full(scratch, 0xA5, np.uint8))
        pointers.append(d.Pointer(device.pointer(memory)))
        short = function(ctypes.byref(call), *pointers, d.Int64(scratch - 1), None)
        assert short == 2, "too little scratch memory must be rejected"
        pointers.append(d.Int64(scratch))
    status = function(ctypes.byref(call), *pointers, None)
    if status == 1:
        raise ValueError("an argument is invalid")
    assert status == d.OK, (status, device.library.redsync_gpu_last_error())
    if not record:
        return None
    filled = d.Record.from_buffer_copy(device.get(place).tobytes())
    error = structs.Error()
    explain = getattr(device.library, f"redsync_gpu_explain_{name}")
    found = explain(ctypes.byref(call), ctypes.byref(filled), ctypes.byref(error))
    return error if found else None


def scratch_bytes(device, name: str, call) -> int:
    """Returns `redsync_gpu_<name>_scratch_bytes`; raises ValueError for a bad argument."""
    size = getattr(device.library, f"redsync_gpu_{name}_scratch_bytes")(ctypes.byref(call))
    if size < 0:
        raise ValueError("an argument is invalid")
    return size


def garbage(device, shape, dtype):
    """Returns a device array of garbage."""
    filled = np.full(shape, GARBAGE, dtype) if dtype == np.int32 else np.full(shape, np.nan, dtype)
    return device.array(filled)


def _dense(device, arrays, outputs):
    tensors = (structs.Dense * len(outputs))()
    for i, (array, output) in enumerate(zip(arrays, outputs, strict=True)):
        size = array.shape[0]
        given = [None if a is None else device.pointer(a) for a in (array, output)]
        tensors[i] = structs.Dense(size, *given)
    return tensors


def quantize(
    device, tensors, scales, *, mode, levels=1, bucket_size=None, stream=(0, 0, 0), errors=True,
    in_place=False, misalign=0,
):  # fmt: skip
    """See `quantize_numpy`. Returns (message, errors, `Error` or None)."""
    on_device = [device.array(np.asarray(x, np.float32), misalign) for x in tensors]
    outputs = [None] * len(on_device)
    if errors:
        outputs = on_device if in_place else [garbage(device, x.size, np.float32) for x in tensors]
    numbers = np.array([int(x) % 2**32 for x in stream], np.uint32).view(np.int32)
    inputs = [device.array(np.asarray(scales, np.float32)), device.array(numbers)]
    call = structs.Quantize(
        structs.Quantizer(MODES[mode], levels, bucket_size or 0), _dense(device, on_device, outputs)
    )
    call.count = len(on_device)
    words = device.library.redsync_gpu_quantized_words(
        ctypes.byref(call.quantizer), call.tensors, d.Int64(call.count)
    )
    if words < 0:
        raise ValueError("an argument is invalid")
    message = garbage(device, words, np.int32)
    call.scales, call.stream = map(device.pointer, inputs)
    call.message = device.pointer(message)
    size = device.library.redsync_gpu_quantize_scratch_bytes()
    error = run(device, "quantize", call, record=True, scratch=size)
    left = [
        device.get(o).reshape(np.shape(x))
        for o, x in zip(outputs, tensors, strict=True)
        if o is not None
    ]
    return device.get(message), left, error


def dequantize_sum(
    device, messages, shapes, *, mode, levels=1, bucket_size=None, misalign=0
):  # fmt: skip
    """See `dequantize_sum_numpy`. Returns (totals, `Error` or None)."""
    outputs = [device.array(np.full(int(np.prod(s)), np.nan, np.float32), misalign) for s in shapes]
    received = device.array(np.asarray(messages, np.int32))
    call = structs.Dequantize(structs.Quantizer(MODES[mode], levels, bucket_size or 0))
    call.tensors, call.count = _dense(device, outputs, outputs), len(outputs)
    call.messages, (call.ranks, call.words) = device.pointer(received), np.shape(messages)
    error = run(device, "dequantize", call, record=True)
    return [device.get(t).reshape(s) for t, s in zip(outputs, shapes, strict=True)], error


def sparse_merge(device, indices, values, counts, *, sizes, k):
    """See `sparse_merge_numpy`. Returns (its fields, `Error` or None)."""
    n, ranks = len(sizes), len(counts)
    on_device = [[device.array(np.asarray(x)) for x in xs] for xs in (indices, values)]
    slots = [np.shape(x)[1] for x in indices]
    kinds = (np.int32, np.float32)
    kept = [[garbage(device, k[i], kind) for i in range(n)] for kind in kinds]
    dropped = [[garbage(device, ranks * slots[i], kind) for i in range(n)] for kind in kinds]
    tensors = (structs.Blocks * n)()
    for i in range(n):
        arrays = [arrays[i] for arrays in (*on_device, *kept, *dropped)]
        tensors[i] = structs.Blocks(slots[i], sizes[i], k[i], *map(device.pointer, arrays))
    numbers = [
        device.array(np.asarray(counts, np.int32)),
        *(garbage(device, n, np.int32) for _ in "kd"),
    ]
    given, of_kept, of_dropped = map(device.pointer, numbers)
    call = structs.Merge(tensors, n, given, ranks, of_kept, of_dropped)
    size = scratch_bytes(device, "merge", call)
    error = run(device, "merge", call, record=True, scratch=size)
    fields = []
    for outputs, count in ((kept, numbers[1]), (dropped, numbers[2])):
        fields += [[device.get(x) for x in xs] for xs in outputs] + [device.get(count)]
    return tuple(fields), error


def _golomb_words(device, call) -> int:
    words = device.library.redsync_gpu_golomb_words(call.tensors, call.count)
    if words < 0:
        raise ValueError("an argument is invalid")
    return words


def golomb_encode(device, indices, counts, *, sizes, rice):
    """See `golomb_encode_numpy`. Returns (message, `Error` or None)."""
    on_device = [device.array(np.asarray(x, np.int32)) for x in indices]
    tensors = (structs.Positions * len(sizes))()
    for i, x in enumerate(on_device):
        tensors[i] = structs.Positions(sizes[i], x.shape[0], rice[i], device.pointer(x), None)
    given = device.array(np.asarray(counts, np.int32))
    call = structs.GolombEncode(tensors, len(sizes), device.pointer(given))
    message = garbage(device, _golomb_words(device, call), np.int32)
    call.message = device.pointer(message)
    size = scratch_bytes(device, "golomb_encode", call)
    error = run(device, "golomb_encode", call, record=True, scratch=size)
    return device.get(message), error


def golomb_decode(device, messages, *, sizes, slots, rice):
    """See `golomb_decode_numpy`. Returns (indices, counts, `Error` or None)."""
    messages = np.asarray(messages, np.int32)
    ranks, n = len(messages), len(sizes)
    outputs = [garbage(device, ranks * k, np.int32) for k in slots]
    tensors = (structs.Positions * n)()
    for i, x in enumerate(outputs):
        tensors[i] = structs.Positions(sizes[i], slots[i], rice[i], None, device.pointer(x))
    received, counts = device.array(messages), garbage(device, ranks * n, np.int32)
    call = structs.GolombDecode(tensors, n, device.pointer(received), ranks)
    call.stride = call.words = messages.shape[1]
    call.counts = device.pointer(counts)
    size = scratch_bytes(device, "golomb_decode", call)
    error = run(device, "golomb_decode", call, record=True, scratch=size)
    indices = [device.get(x).reshape(ranks, k) for x, k in zip(outputs, slots, strict=True)]
    return indices, device.get(counts).reshape(ranks, n), error


def _seed(device, seed: int):
    return device.array(np.array([seed % 2**32], np.uint32).view(np.int32))


def bloom_build(device, indices, counts, seed, *, sizes, words, hashes):
    """See `bloom_build_numpy`. Returns (filters, `Error` or None)."""
    on_device = [device.array(np.asarray(x, np.int32)) for x in indices]
    tensors = (structs.Filter * len(sizes))()
    for i, x in enumerate(on_device):
        tensors[i] = structs.Filter(
            sizes[i], x.shape[0], words[i], hashes[i], device.pointer(x), None
        )
    given, number = device.array(np.asarray(counts, np.int32)), _seed(device, seed)
    filters = garbage(device, sum(words), np.int32)
    pointers = map(device.pointer, (given, number, filters))
    call = structs.BloomBuild(tensors, len(sizes), *pointers)
    error = run(device, "bloom_build", call, record=True)
    return device.get(filters), error


def bloom_query(device, filters, seed, *, sizes, slots, words, hashes):
    """See `bloom_query_numpy`. Returns (indices, counts)."""
    filters = np.asarray(filters, np.int32)
    ranks, n = len(filters), len(sizes)
    outputs = [garbage(device, ranks * k, np.int32) for k in slots]
    tensors = (structs.Filter * n)()
    for i, x in enumerate(outputs):
        tensors[i] = structs.Filter(
            sizes[i], slots[i], words[i], hashes[i], None, device.pointer(x)
        )
    on_device, number = device.array(filters), _seed(device, seed)
    counts = garbage(device, ranks * n, np.int32)
    call = structs.BloomQuery(tensors, n, device.pointer(on_device), *filters.shape)
    call.seed, call.counts = map(device.pointer, (number, counts))
    size = scratch_bytes(device, "bloom_query", call)
    run(device, "bloom_query", call, record=False, scratch=size)
    indices = [device.get(x).reshape(ranks, k) for x, k in zip(outputs, slots, strict=True)]
    return indices, device.get(counts).reshape(ranks, n)
