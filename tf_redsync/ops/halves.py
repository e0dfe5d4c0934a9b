"""Sums of vectors in 16 bits: each worker sums one block.

A vector is the concatenation of tensors. It is cut into one block per worker, all of the same even
length; the last block is padded with zeros. A block's message is a flag and the rounded elements,
two in a word, the first one low. Elements are rounded to the nearest 16-bit float, ties to even.
All messages of a worker are zero unless all of its rounded elements are finite.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_redsync.ops import native, rows, wire
from tf_redsync.ops.wire import opaque

UNIT = 2  # a block's length is a multiple of this


def words(elements: int, blocks: int) -> int:
    """Return the number of words of the message of each of the blocks."""
    return wire.HEADER_WORDS + rows.length(elements, blocks, UNIT) // 2


def half_encode(
    values: Sequence[tf.Tensor], residuals: Sequence[tf.Tensor], blocks: int, dtype: tf.DType
) -> tuple[tf.Tensor, list[tf.Tensor]]:
    """Round the sums of values and residuals.

    Args:
        values: float32 tensors of any shapes.
        residuals: Tensors in the same shapes, or none.
        blocks: The number of blocks.
        dtype: `tf.float16` or `tf.bfloat16`.

    Returns:
        Messages, int32 `[blocks, words]`; and the rounding errors of each tensor, float32, in its
        shape. Errors are unspecified if the messages are zero because a rounded element is
        non-finite.

    Example:
        >>> messages, (error,) = half_encode([tf.constant([1.0, 2049.0])], [], 1, tf.float16)
        >>> half_decode(messages, [error], tf.float16)[0].numpy(), error.numpy()
        (array([1.000e+00, 2.048e+03], dtype=float32), array([0., 1.], dtype=float32))
    """
    if _runs_natively(values):
        encode = native.load().redsync_half_encode
        messages, errors = encode(values=values, residuals=residuals, dtype=dtype, blocks=blocks)
        return messages, errors
    table = rows.from_tensors(rows.added(values, residuals), blocks, UNIT)
    messages, errors = _encode(table, dtype)
    return messages, rows.to_tensors(errors, values)


def half_reduce(
    messages: tf.Tensor, errors: Sequence[tf.Tensor], block: tf.Tensor, dtype: tf.DType
) -> tuple[tf.Tensor, list[tf.Tensor]]:
    """Sum one block of all workers and this worker's errors in the block, and round the sum.

    Args:
        messages: int32 `[workers, words]`, the block's messages.
        errors: Errors from this worker's `half_encode`.
        block: Index of the block, int32 scalar.
        dtype: As given to `half_encode`.

    Returns:
        The message of the sum, int32 `[words]`; and the errors, in this block those of the sum.
    """
    if _runs_natively([messages]):
        reduce = native.load().redsync_half_reduce
        message, new_errors = reduce(messages=messages, errors=errors, block=block, dtype=dtype)
        return message, new_errors
    table = rows.from_tensors(errors, rows.dimension(messages, 0), UNIT)
    total = _sum_in_order(_decode(messages, dtype)) + tf.gather(table, block)
    message, error = _encode(total[tf.newaxis], dtype)
    return wire.only_row(message), rows.to_tensors(rows.replaced(table, block, error), errors)


def half_decode(messages: tf.Tensor, like: Sequence[tf.Tensor], dtype: tf.DType) -> list[tf.Tensor]:
    """Decode the messages of all blocks to float32 tensors; messages of zeros decode to zeros.

    Args:
        messages: int32 `[blocks, words]`.
        like: Tensors in the shapes of the result.
        dtype: As given to `half_encode`.
    """
    if not _runs_natively([messages]):
        return rows.to_tensors(_decode(messages, dtype), like)
    sizes = tf.stack([tf.size(t, tf.int64) for t in like])
    decode = native.load().redsync_half_decode
    vectors = decode(messages=messages, sizes=sizes, N=len(like), dtype=dtype)
    return [tf.reshape(v, tf.shape(t, tf.int64)) for v, t in zip(vectors, like, strict=True)]


def _runs_natively(tensors: Sequence[tf.Tensor]) -> bool:
    return native.runs_natively(tensors) and native.are_on_cpus(tensors)


def _encode(table: tf.Tensor, dtype: tf.DType) -> tuple[tf.Tensor, tf.Tensor]:
    """Return the messages of rows, and their rounding errors."""
    halves = tf.cast(table, dtype)
    blocks = rows.dimension(table, 0)
    pairs = tf.bitcast(tf.reshape(halves, [blocks, -1, 2]), tf.int32)
    flags = tf.ones([blocks, wire.HEADER_WORDS], tf.int32)
    finite = tf.reduce_all(tf.math.is_finite(halves))
    messages = wire.zero_unless(finite, wire.joined(flags, pairs, axis=1))
    return messages, table - tf.cast(halves, tf.float32)


def _decode(messages: tf.Tensor, dtype: tf.DType) -> Any:
    """Return the decoded rows, float32 `[blocks, n]`."""
    pairs = tf.bitcast(wire.map_words(lambda m: m[:, wire.HEADER_WORDS :], messages), dtype)
    return tf.reshape(tf.cast(pairs, tf.float32), [rows.dimension(messages, 0), -1])


def _sum_in_order(table: tf.Tensor) -> Any:
    """Return the sum of rows in their order; `opaque` keeps Grappler from reordering it."""
    if table.shape[0] is None:
        return tf.foldl(tf.add, table)
    return functools.reduce(lambda total, row: opaque(total + row), tf.unstack(table))
