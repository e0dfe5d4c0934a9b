"""Moves of int32 words: slices, reshapes and concatenations, which stay on the words' device.

TensorFlow's kernels slice, reshape, stack and compare int32 tensors of a GPU in host memory, since
most of them are shapes. Messages stay on the GPU as floats with the same bits. They must not be
compared or summed as floats: a flag of 1 is the smallest denormal, which TensorFlow's constant
folding flushes to 0 in functions that are not inlined.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tf_redsync.ops import native


def moved(move: Callable[..., Any], *words: tf.Tensor) -> Any:
    """Apply a function that moves int32 words without changing them.

    Args:
        move: Receives the tensors, as float32 on a GPU, and returns a tensor or a structure of
            tensors: a slice, a reshape, a concatenation.
        words: int32 tensors.
    """
    if native.are_on_cpus(words):
        return move(*words)
    floats = move(*map(_as_floats, words))
    return tf.nest.map_structure(lambda f: tf.bitcast(f, tf.int32), floats)


def opaque(x: Any) -> tf.Tensor:
    """Hide a tensor from Grappler, which folds constants and turns x / c into x * (1 / c)."""
    x = tf.convert_to_tensor(x)
    return tf.raw_ops.PlaceholderWithDefault(input=x, shape=x.shape)


def _as_floats(words: tf.Tensor) -> tf.Tensor:
    """Return float32 with the same bits, which constant folding does not touch."""
    if not tf.executing_eagerly() and tf.get_static_value(words) is not None:
        words = opaque(words)
    return tf.bitcast(words, tf.float32)


def joined(*words: tf.Tensor, axis: int = 0) -> tf.Tensor:
    """Concatenate int32 words."""
    return moved(lambda *each: tf.concat(each, axis=axis), *words)
