"""Whole calls of the CUDA core, with the numpy oracle's arguments and results."""

from __future__ import annotations

import ctypes

import numpy as np

from tests.gpu import device as d

MISALIGNED = 1  # Elements.


def is_bfloat16(gradient) -> bool:
    """Returns whether a gradient is bfloat16, stored as integer bits in numpy."""
    return gradient.dtype == np.uint16


def select(
    device, grads, residuals, velocities, k, ratios, *, selectors, quantized,
    momentum=0.0, nesterov=False, masking=True, scale=None, side=1, search=True,
    in_place=False, misalign=0, seed=0, keep_velocities=True,
):  # fmt: skip
    """Runs the kernels of `accumulate_and_select_numpy`. Outputs and scratch start as garbage.

    Gradients of uint16 are bits of bfloat16.

    Without `ratios` the only scalar is the scale.

    `in_place` stores the new state in the old one's memory, or with "grads" the new residuals in
    the gradients' memory.
    """
    on_device = lambda x: device.array(x, misalign)  # noqa: E731
    g, v = [on_device(x) for x in grads], [on_device(x) for x in residuals]
    u = [on_device(x) for x in velocities]
    garbage = lambda x: on_device(np.full(x.shape, np.nan, np.float32))  # noqa: E731
    new_v = [garbage(x) for x in residuals]
    new_u = [garbage(x) for x in velocities if keep_velocities]
    if in_place == "grads":
        new_v = [b if is_bfloat16(x) else a for a, b, x in zip(g, new_v, grads, strict=True)]
    elif in_place:
        new_v, new_u = v, u
    tensors = (d.Tensor * len(grads))()
    for i in range(len(grads)):
        buffers = [g[i], v[i], u[i] if u else None, new_v[i], new_u[i] if new_u else None]
        pointers = [None if b is None else device.pointer(b) for b in buffers]
        tensors[i] = d.Tensor(
            grads[i].size,
            int(k[i]),
            d.SELECTORS[selectors[i]],
            int(quantized[i]),
            *pointers,
            int(is_bfloat16(grads[i])),
        )
    mode = 0 if momentum == 0 else 2 if nesterov else 1
    call = d.Select(tensors, len(grads), mode, int(masking), momentum, seed)
    words = device.library.redsync_gpu_message_words(ctypes.byref(call))
    if words < 0:
        raise ValueError("an argument is invalid")
    scalars = {
        "scale": np.float32([1 if scale is None else scale]),
        "message": np.full(words, -7, np.int32),
    }
    if ratios is not None:
        scalars |= {
            "side": np.int32([side]),
            "search": np.array([search]),
            "ratios": np.asarray(ratios, np.float32),
            "new_ratios": np.full(len(grads), np.nan, np.float32),
        }
    there = {name: device.array(value) for name, value in scalars.items()}
    for name, value in there.items():
        setattr(call, name, device.pointer(value))
    size = device.library.redsync_gpu_select_scratch_bytes(ctypes.byref(call))
    scratch = device.array(np.full(size, 0xA5, np.uint8))
    arguments = (ctypes.byref(call), d.Pointer(device.pointer(scratch)))
    short = device.library.redsync_gpu_select(*arguments, d.Int64(size - 1), None)
    assert short == 2, "too little scratch memory must be rejected"
    status = device.library.redsync_gpu_select(*arguments, d.Int64(size), None)
    assert status == d.OK, device.library.redsync_gpu_last_error()
    return (
        device.get(there["message"]),
        [device.get(x).reshape(like.shape) for x, like in zip(new_v, residuals, strict=True)],
        [device.get(x).reshape(u.shape) for x, u in zip(new_u, velocities, strict=False)],
        None if ratios is None else device.get(there["new_ratios"]),
    )


def decode(device, messages, k, shapes, *, selectors, quantized):
    """Runs the kernels of `decode_numpy`. Returns (totals, `Error` or None)."""
    messages = np.asarray(messages, np.int32)
    sizes = [int(np.prod(s)) for s in shapes]
    totals = [device.array(np.full(n, np.nan, np.float32)) for n in sizes]
    parts, offset = (d.Part * len(sizes))(), 1
    for i, n in enumerate(sizes):
        slots = int(k[i])
        parts[i] = d.Part(offset, slots, n, int(quantized[i]), device.pointer(totals[i]))
        offset += 2 + slots if quantized[i] else 1 + 2 * slots
    received = device.array(messages)
    call = d.Decode(device.pointer(received), *messages.shape, parts, len(sizes))
    place = device.array(np.zeros(ctypes.sizeof(d.Record), np.uint8))
    pointer = d.Pointer(device.pointer(place))
    assert device.library.redsync_gpu_sum_messages(ctypes.byref(call), pointer, None) == d.OK
    record = d.Record.from_buffer_copy(device.get(place).tobytes())
    error = d.Error()
    explain = device.library.redsync_gpu_explain_sum_messages
    found = explain(ctypes.byref(call), ctypes.byref(record), ctypes.byref(error))
    out = [device.get(t).reshape(s) for t, s in zip(totals, shapes, strict=True)]
    return out, error if found else None


def descend(device, variable, indices, values, rate):
    """Runs `variable[indices] -= rate * values`; returns it and a bad index's position."""
    there = [device.array(np.asarray(x)) for x in (indices, values, np.float32([rate]))]
    target = device.array(variable)
    call = d.Descend(
        *map(device.pointer, there), len(indices), variable.size, device.pointer(target)
    )
    place = device.array(np.zeros(ctypes.sizeof(d.Record), np.uint8))
    size = device.library.redsync_gpu_descend_scratch_bytes()
    scratch = device.array(np.full(size, 0xA5, np.uint8))
    pointers = [d.Pointer(device.pointer(x)) for x in (place, scratch)]
    run = device.library.redsync_gpu_descend
    assert run(ctypes.byref(call), *pointers, d.Int64(size), None) == d.OK
    record = d.Record.from_buffer_copy(device.get(place).tobytes())
    bad = None if record.position == 2**64 - 1 else (record.position, record.value)
    return device.get(target).reshape(variable.shape), bad
