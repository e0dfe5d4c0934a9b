"""All-reduced values in 16 bits: added up in float32, and nothing of them lost.

An all-reduce of 16-bit numbers rounds each partial sum, and no worker learns by how much. Here a
vector is cut into K blocks, and worker b adds up block b in float32, as in `one_bit.py`. With H(x)
the 16-bit number next to x, on worker w, for values p:

    H(p[b]) goes to worker b, for every block b                 one all-to-all
    error[b] = p[b] - H(p[b])                                    for every b other than w
    s = p[w] + sum over the other workers of their H(p[w])
    H(s) goes to all workers                                     one all-gather
    error[w] = s - H(s)

A worker sends as much as in a ring all-reduce of 16-bit numbers. The sums, and the errors of all
workers, add up to the values.

A method that adds up everything here or by `sparse.deliver`, and keeps the errors in its residual,
declares the trait `rounds_values`: `HalfPrecision` takes such methods.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import tensorflow as tf

from tf_redsync.exchange.context import Context, Rounding
from tf_redsync.exchange.method import Payloads
from tf_redsync.exchange.requests import AllGather, AllReduce, AllToAll, Request
from tf_redsync.ops import wire
from tf_redsync.ops.wire import joined, moved, only_row

Tensors = list[tf.Tensor]


def all_reduced(
    ctx: Context, values: Sequence[tf.Tensor]
) -> Generator[Request, Any, tuple[Tensors, Tensors]]:
    """Add up values over the workers, in the format of `ctx.rounding`.

    Use it as `sums, errors = yield from all_reduced(...)`.

    Args:
        ctx: The exchange's.
        values: Float32 tensors of any shapes.

    Returns:
        The sums, float32; and what of this worker's values they leave out, zeros where that is
        nothing or is not known.
    """
    rounding, zeros = ctx.rounding, [tf.zeros_like(v) for v in values]
    if rounding is None:
        sums = yield AllReduce(list(values))
        return list(sums), zeros
    dtype = tf.as_dtype(rounding.dtype)
    if not rounding.error_feedback:
        sums = yield AllReduce([tf.cast(v, dtype) for v in values])
        return [tf.cast(s, tf.float32) for s in sums], zeros
    vector = tf.concat([tf.reshape(v, [-1]) for v in values], axis=0)
    sums, errors = yield from _in_blocks(ctx, vector, dtype)
    return _split(sums, values), _split(errors, values)


def rounded_payloads(rounding: Rounding, elements: int, workers: int) -> Payloads:
    """Return the payloads of `all_reduced` for so many elements of so many workers."""
    if not rounding.error_feedback:
        return [(AllReduce, elements * tf.as_dtype(rounding.dtype).size)]
    message = wire.BYTES_PER_WORD * (wire.HEADER_WORDS + _block_words(elements, workers))
    return [(AllToAll, workers * message), (AllGather, message)]


def _block_words(elements: Any, workers: int) -> Any:
    """Words of a worker's block of so many elements, two of which share a word."""
    return -(-elements // (2 * workers))


def _in_blocks(
    ctx: Context, vector: tf.Tensor, dtype: tf.DType
) -> Generator[Request, Any, tuple[tf.Tensor, tf.Tensor]]:
    """The two phases for one vector: its sum and this worker's error."""
    workers, rank = ctx.layout.workers, ctx.rank
    size = vector.shape[0] if vector.shape[0] is not None else tf.size(vector)
    words = _block_words(size, workers)
    padded = tf.pad(vector, [[0, 2 * workers * words - size]])
    blocks = tf.reshape(padded, [workers, 2 * words])

    message, errors = _rounded(blocks, dtype)
    rows = yield AllToAll(message)
    own = tf.add_n(tf.unstack(_values(rows, dtype), num=workers)) + tf.gather(errors, rank)
    message, own_error = _rounded(own[tf.newaxis], dtype)
    messages = yield AllGather(only_row(message))
    sums = tf.reshape(_values(messages, dtype), [-1])[:size]
    mine = tf.equal(tf.range(workers), rank)[:, tf.newaxis]
    return sums, tf.reshape(tf.where(mine, own_error, errors), [-1])[:size]


def _rounded(blocks: tf.Tensor, dtype: tf.DType) -> tuple[tf.Tensor, tf.Tensor]:
    """Rows of values as messages, and the errors.

    Args:
        blocks: float32 `[rows, 2 * words]`.
        dtype: Of 16 bits.

    Returns:
        int32 `[rows, 1 + words]`, all zero unless all values are finite in `dtype`; and float32 of
        the shape of `blocks`.
    """
    halves = tf.cast(blocks, dtype)
    pairs = tf.reshape(halves, [blocks.shape[0], -1, 2])
    finite = tf.reduce_all(tf.math.is_finite(halves))
    flags = tf.ones([blocks.shape[0], 1], tf.int32)
    message = joined(flags, tf.bitcast(pairs, tf.int32), axis=1)
    return wire.zero_unless(finite, message), blocks - tf.cast(halves, tf.float32)


def _values(messages: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Undo `_rounded`, as float32 `[rows, 2 * words]`."""
    pairs = tf.bitcast(moved(lambda m: m[:, wire.HEADER_WORDS :], messages), dtype)
    return tf.reshape(tf.cast(pairs, tf.float32), [messages.shape[0], -1])


def _split(vector: tf.Tensor, like: Sequence[tf.Tensor]) -> Tensors:
    parts = tf.split(vector, tf.stack([tf.size(v) for v in like]), num=len(like))
    return [
        tf.ensure_shape(tf.reshape(p, tf.shape(v)), v.shape)
        for p, v in zip(parts, like, strict=True)
    ]
