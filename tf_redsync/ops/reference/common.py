"""Helpers of the reference ops: checks, and conversions of words, bits and positions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tf_redsync.ops.limits import MAX_COUNT, MAX_WORD


def check_countable(name: str, tensors: Sequence[tf.Tensor]) -> None:
    """Check that int32, in which `tf.math.top_k` counts, can count the elements of each tensor.

    Raises:
        ValueError: If a tensor has more than 2^31 - 1 elements; the message has `name`.
    """
    for i, tensor in enumerate(tensors):
        size = tensor.shape.num_elements()
        if size is not None and size > MAX_COUNT:
            raise ValueError(
                f"`{name}` must have at most {MAX_COUNT} elements each in pure TensorFlow, which "
                f"counts in int32. Received: {name}[{i}] of shape {tensor.shape}. Use the native "
                f"ops, which take up to {MAX_WORD} (see `python -m tf_redsync doctor`), or split "
                "the variable."
            )


def assert_none(name: str, field: str, bad: tf.Tensor, value: tf.Tensor, tensor: int | None):
    """Raise `InvalidArgumentError` that names the first place (rank, slot) where `bad` is true.

    Returns:
        A control dependency for the result; `None` in eager mode.
    """
    where = tf.where(bad)[:1]  # empty without an error
    of_tensor = "" if tensor is None else f" of tensor {tensor}"
    text = f"`{name}` hold an invalid {field}{of_tensor}. Received (rank, slot), value:"
    at = tf.gather_nd(value, where)
    return tf.debugging.Assert(tf.equal(tf.size(where), 0), [text, where, at])


def assert_shape(name: str, tensor: tf.Tensor, shape) -> tf.Operation | None:
    """Raise `InvalidArgumentError` unless `tensor` has the shape; -1 allows any number."""
    shape = tf.stack([tf.cast(length, tf.int64) for length in shape])
    received = tf.shape(tensor, tf.int64)
    same = tf.equal(received, shape) | (shape < 0)
    text = f"`{name}` must have shape (-1: any number; expected, received):"
    return tf.debugging.Assert(tf.reduce_all(same), [text, shape, received])


def after(checks, tensor: tf.Tensor) -> tf.Tensor:
    """Return `tensor` with control dependencies on `checks`."""
    with tf.control_dependencies([c for c in checks if c is not None]):
        return tf.identity(tensor)


def add_rows(rows: tf.Tensor) -> tf.Tensor:
    """Sum `rows` [P, n] over P, in the order of the rows, starting from 0."""
    _, total = tf.while_loop(
        lambda rank, _: rank < tf.shape(rows)[0],
        lambda rank, total: (rank + 1, total + rows[rank]),
        (tf.constant(0), tf.zeros([tf.shape(rows, tf.int64)[1]])),
        shape_invariants=(tf.TensorShape([]), tf.TensorShape([None])),
    )
    return total


def from_words(words, size):
    """Return the int64 positions in int32 words for a tensor of `size` elements.

    The words are unsigned. For a small tensor negative words keep their sign, so that the error
    shows the value that the sender wrote: they are out of range either way.
    """
    unsigned = tf.cast(tf.bitcast(words, tf.uint32), tf.int64)
    return tf.where(tf.cast(size, tf.int64) > MAX_COUNT, unsigned, tf.cast(words, tf.int64))


def to_unsigned(integers):
    """Return int64 numbers in [0, 2^32) as int32 words with the same low bits."""
    return tf.bitcast(tf.cast(integers, tf.uint32), tf.int32)


def check_positions(positions, count, size: int, i: int | None, name: str = "indices"):
    """Check that a vector has `count` entries and that these are in [0, size)."""
    slots = tf.size(positions)
    valid = tf.range(slots) < count
    return [
        assert_none(name, "count", (count[None] < 0) | (count > slots), count[None], i),
        assert_none(name, "index", valid & ((positions < 0) | (positions >= size)), positions, i),
    ]


def check_ascending(positions, count, i: int | None, name: str = "indices"):
    """Check that a vector's first `count` entries ascend."""
    previous = tf.concat([tf.constant([-1], positions.dtype), positions[:-1]], 0)
    bad = (tf.range(tf.size(positions)) < count) & (positions <= previous)
    return assert_none(name, "index, which must ascend,", bad, positions, i)


def to_words(bits):
    """Return bits, int64 [32 * words], as int32 [words]; the first bit is the lowest."""
    words = tf.reduce_sum(
        tf.bitwise.left_shift(tf.reshape(bits, [-1, 32]), np.arange(32, dtype=np.int64)), axis=1
    )
    return to_unsigned(words)


def to_bits(words):
    """Return the bits, int32 [P, 32 * words], of words [P, words]."""
    bits = tf.bitwise.right_shift(words[:, :, None], np.arange(32, dtype=np.int32)) & 1
    return tf.reshape(bits, [tf.shape(words)[0], 32 * words.shape[1]])
