"""Words that are only moved, without a detour of a GPU's through the host's memory.

TensorFlow keeps int32 tensors of a GPU in host memory where its kernels slice, reshape, stack or
compare them, since they are mostly shapes. Messages are not: as floats with the same bits they stay
where they are. They must not be compared or added up as floats, of which a flag of 1 is the
smallest there is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_redsync.ops import native


def moved(move: Callable[..., Any], *words: tf.Tensor) -> Any:
    """Return what a function makes of int32 words that only moves them.

    Args:
        move: Takes as many tensors, and returns a tensor, or a structure of them: a slice, a
            reshape, a concatenation. On a GPU they are float32.
        words: int32 tensors.
    """
    if native.are_on_cpus(words):
        return move(*words)
    floats = move(*(tf.bitcast(w, tf.float32) for w in words))
    return tf.nest.map_structure(lambda f: tf.bitcast(f, tf.int32), floats)


def joined(*words: tf.Tensor, axis: int = 0) -> tf.Tensor:
    """Return int32 words behind each other."""
    return moved(lambda *each: tf.concat(each, axis=axis), *words)


def as_row(message: tf.Tensor) -> tf.Tensor:
    """Return a message, int32 `[words]`, as one of several: `[1, words]`."""
    return moved(lambda m: m[tf.newaxis], message)


def only_row(messages: tf.Tensor) -> tf.Tensor:
    """Undo `as_row`."""
    return moved(lambda m: m[0], messages)


def as_column(words: tf.Tensor, count: tf.Tensor | None = None) -> tf.Tensor:
    """Return the first `count` of a vector of words, or all, as places to scatter to: `[n, 1]`."""
    return moved(lambda w: w[:count, tf.newaxis], words)


def cut(messages: tf.Tensor, lengths: Sequence[Any]) -> list[tf.Tensor]:
    """Return messages, int32 `[rows, words]`, cut into parts of these lengths."""
    return moved(lambda m: tf.split(m, lengths, axis=1), messages)


def padded(words: tf.Tensor, slots: int) -> tf.Tensor:
    """Return int32 words and zeros behind them, `slots` in all."""

    def pad(w: tf.Tensor) -> tf.Tensor:
        return tf.ensure_shape(tf.pad(w, [[0, slots - tf.size(w)]]), [slots])

    return moved(pad, words)


def leading(count: tf.Tensor, slots: int | tf.Tensor) -> tf.Tensor:
    """Return which of `slots` places are among the first `count`, bool.

    Args:
        count: int32 scalar, or `[rows, 1]`.
        slots: Their number.
    """
    if isinstance(slots, int):
        places = tf.constant(np.arange(slots), tf.int64)
    else:
        places = tf.range(tf.cast(slots, tf.int64))
    return places < tf.cast(count, tf.int64)


def all_ones(flags: tf.Tensor) -> tf.Tensor:
    """Return whether all of some flags, int32, are 1: a bool scalar."""
    if native.are_on_cpus([flags]):
        return tf.reduce_all(tf.equal(flags, 1))
    return tf.reduce_all(tf.equal(tf.cast(flags, tf.float32), 1.0))  # numbers, not bits


def before_cast(tensor: tf.Tensor) -> tf.Tensor:
    """Return the bfloat16 tensor that a float32 one was cast from, where that is known.

    A model in mixed precision computes its gradients in bfloat16 and casts each to its variable's
    float32. The cast writes and reads 8 bytes per element where an op that widens bfloat16 itself
    reads 2. In a graph it is removed as dead code, unless something else needs its result.

    Args:
        tensor: In a graph the result of a cast, perhaps.

    Returns:
        What was cast from bfloat16 to float32, which changes no value; else `tensor` itself.
    """
    if not tf.is_symbolic_tensor(tensor) or tensor.dtype != tf.float32:
        return tensor
    op = tensor.op
    was_narrow = op.type == "Cast" and op.inputs[0].dtype == tf.bfloat16
    return op.inputs[0] if was_narrow else tensor


def widened(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Return tensors as float32; see `before_cast` for who does not need that."""
    return [tf.cast(t, tf.float32) for t in tensors]
