"""Ternary codes -1, 0 and 1, summed over the workers by an all-reduce of float32 numbers.

The sums of K workers' codes are integers from -K to K: digits in base B = 2 K + 1. A float32 holds
every integer up to 2^24 exactly, so D digits fit into one number if (B^D - 1) / 2 <= 2^24, and no
partial sum of the K numbers is rounded.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import tensorflow as tf

from tf_redsync.exchange.requests import AllGather, AllReduce, Request
from tf_redsync.methods.common.sparsifier import flat
from tf_redsync.ops import wire
from tf_redsync.ops.quantization import dequantize_sum, quantize

MAX_INTEGER = 2**24  # float32 is exact for integers up to this


def deliver_ternary(
    tensors: Sequence[tf.Tensor], scalers: tf.Tensor, stream: tf.Tensor, workers: int
) -> Generator[Request, Any, list[tf.Tensor]]:
    """All-reduce ternary codes, scaled by the largest scaler of all workers for each tensor.

    Use it as `totals = yield from deliver_ternary(...)`.

    Args:
        tensors: Float32 tensors of any shape. Elements are clipped at this worker's scaler.
        scalers: This worker's scalers, float32, one for each tensor.
        stream: Random stream, as in `ops.quantize`.
        workers: Number of workers.

    Returns:
        For each tensor the sum over workers.
    """
    messages = yield AllGather(wire.message(wire.all_finite(tensors), scalers))
    shared = tf.reduce_max(wire.split(messages, len(tensors))[1], axis=0)
    clipped = [
        tf.clip_by_value(t, -c, c) for t, c in zip(tensors, tf.unstack(scalers), strict=True)
    ]
    coded = quantize(clipped, shared, stream=stream, mode="stochastic")
    local = dequantize_sum(coded.message[tf.newaxis], tensors, mode="stochastic")
    codes = flat([tf.sign(t) for t in local])
    (sums,) = yield AllReduce([packed_digits(codes, workers)])
    integers = tf.split(
        unpacked_digits(sums, codes.shape[0], workers), [t.shape.num_elements() for t in tensors]
    )
    return [
        c * tf.reshape(n, t.shape)
        for c, n, t in zip(tf.unstack(shared), integers, tensors, strict=True)
    ]


def digits_per_number(workers: int) -> int:
    """Return D, the number of codes in one float32.

    Example:
        >>> [digits_per_number(workers) for workers in (1, 2, 8, 64)]
        [15, 10, 6, 3]
    """
    base, digits = 2 * workers + 1, 1
    while (base ** (digits + 1) - 1) // 2 <= MAX_INTEGER:
        digits += 1
    return digits


def packed_digits(codes: tf.Tensor, workers: int) -> tf.Tensor:
    """Pack codes -1, 0, 1, float32 `[n]`, into float32 `[ceil(n / D)]`."""
    base, digits = 2 * workers + 1, digits_per_number(workers)
    numbers = -(-codes.shape[0] // digits)
    places = tf.reshape(tf.pad(codes, [[0, digits * numbers - codes.shape[0]]]), [digits, numbers])
    weights = tf.constant([[float(base**d)] for d in range(digits)])
    return tf.reduce_sum(weights * places, axis=0)


def unpacked_digits(sums: tf.Tensor, size: int, workers: int) -> tf.Tensor:
    """Return the sums of the codes, float32 `[size]`, from the sums of the packed numbers."""
    base, digits = 2 * workers + 1, digits_per_number(workers)
    rest = tf.cast(sums, tf.int32) + (base**digits - 1) // 2  # digits 0 .. 2 K
    places = []
    for _ in range(digits):
        places.append(rest % base - workers)
        rest //= base
    return tf.cast(tf.concat(places, axis=0)[:size], tf.float32)
