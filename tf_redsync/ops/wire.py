"""The wire format of messages: words, flags and checksums; casts and finiteness of tensors.

A message is a vector of int32 words. Floats are *bit-cast* to words; indices are never cast to
float, which would round them from 2**24 on. Word 0 is the finite flag; on a network it also carries
the checksum of the other words, see `sealed`.

TensorFlow's kernels slice, reshape, stack and compare int32 tensors of a GPU in host memory, since
most of them are shapes. Messages stay on the GPU as floats with the same bits (`map_words`).
They must not be compared or summed as floats: a flag of 1 is the smallest denormal, which
TensorFlow's constant folding flushes to 0 in functions that are not inlined.

The checksum of words `w` is the sum of `w[i] * g^(i + 1)` modulo the prime `p = 2^32 - 5`. It
replaces the message's flag, which is one more term of the sum, so messages do not get longer. It
detects any two inverted bits in messages of up to 2^25 words. It also detects all changes of a
single word, except between -5 ... -1 and 0 ... 4, which are equal modulo p. It misses one in 2^32
of all other changes. On a GPU, `sealed` does not check the flag: any flag other than 0 and 1 yields
a checksum that receivers reject.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_redsync.ops import native
from tf_redsync.ops.native import runs_natively
from tf_redsync.ops.reference import checksums as reference_checksums

BYTES_PER_WORD = 4
HEADER_WORDS = 1  # word 0: the finite flag or, sealed, flag and checksum
NO_SENDER = -1  # in place of a rank, for a missing worker; see `absent`


def map_words(move: Callable[..., Any], *words: tf.Tensor) -> Any:
    """Apply `move` to int32 words. On a GPU it sees them as floats with the same bits.

    See the module's docstring.

    Args:
        move: Slices, reshapes or concatenates the tensors that it receives, which are float32 on a
            GPU; returns a tensor or a structure of tensors.
        words: int32 tensors.

    Returns:
        The result of `move`, with int32 tensors.
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


def shape_of(tensor: tf.Tensor) -> tf.Tensor:
    """Return a dynamic shape, int64. TensorFlow would copy int32 from a GPU to read its shape."""
    return tf.shape(_as_floats(tensor) if tensor.dtype == tf.int32 else tensor, tf.int64)


def joined(*words: tf.Tensor, axis: int = 0) -> tf.Tensor:
    """Concatenate int32 words."""
    return map_words(lambda *each: tf.concat(each, axis=axis), *words)


def as_row(message: tf.Tensor) -> tf.Tensor:
    """Return a message, int32 `[words]`, as a row `[1, words]`."""
    return map_words(lambda m: m[tf.newaxis], message)


def only_row(messages: tf.Tensor) -> tf.Tensor:
    """Return the only row of messages `[1, words]`."""
    return map_words(lambda m: tf.squeeze(m, axis=0), messages)


def as_column(words: tf.Tensor, count: tf.Tensor | None = None) -> tf.Tensor:
    """Return the first `count` words of a vector, or all, as indices for a scatter: `[n, 1]`."""
    return map_words(lambda w: w[:count, tf.newaxis], words)


def cut(messages: tf.Tensor, lengths: Sequence[Any]) -> list[tf.Tensor]:
    """Split messages, int32 `[rows, words]`, into parts of these lengths."""
    return map_words(lambda m: tf.split(m, lengths, axis=1), messages)


def padded(words: tf.Tensor, slots: int) -> tf.Tensor:
    """Pad int32 words with zeros to `slots`."""

    def pad(w: tf.Tensor) -> tf.Tensor:
        return tf.ensure_shape(tf.pad(w, [[0, slots - tf.size(w)]]), [slots])

    return map_words(pad, words)


def leading(count: tf.Tensor, slots: int | tf.Tensor) -> tf.Tensor:
    """Return a mask of the first `count` of `slots` places, bool.

    Args:
        count: int32 scalar, or `[rows, 1]`.
        slots: Number of places.
    """
    if isinstance(slots, int):
        places = tf.constant(np.arange(slots), tf.int64)
    else:
        places = tf.range(tf.cast(slots, tf.int64))
    return places < tf.cast(count, tf.int64)


def all_ones(flags: tf.Tensor) -> tf.Tensor:
    """Return whether all flags, int32, are 1: a bool scalar."""
    if native.are_on_cpus([flags]):
        return tf.reduce_all(tf.equal(flags, 1))
    return tf.reduce_all(tf.equal(tf.cast(flags, tf.float32), 1.0))  # a conversion, not a bit-cast


def before_cast(tensor: tf.Tensor) -> tf.Tensor:
    """Return the bfloat16 tensor that `tensor` was cast from, if a graph shows such a cast.

    A model in mixed precision computes its gradients in bfloat16 and casts each to its variable's
    float32. The cast moves 8 bytes per element; an op that reads bfloat16 itself moves 2. The cast
    is then removed as dead code, unless another op needs its result.

    Args:
        tensor: A tensor.

    Returns:
        The input of the cast from bfloat16 to float32, which changes no value; else `tensor`.
    """
    if not tf.is_symbolic_tensor(tensor) or tensor.dtype != tf.float32:
        return tensor
    op = tensor.op
    was_narrow = op.type == "Cast" and op.inputs[0].dtype == tf.bfloat16
    return op.inputs[0] if was_narrow else tensor


def widened(tensors: Iterable[tf.Tensor]) -> list[tf.Tensor]:
    """Cast tensors to float32; ops that read bfloat16 use `before_cast` instead."""
    return [tf.cast(t, tf.float32) for t in tensors]


def to_words(values: tf.Tensor) -> tf.Tensor:
    """Return float32 `values` as int32 words with the same bits and shape."""
    return tf.bitcast(values, tf.int32)


def from_words(words: tf.Tensor) -> tf.Tensor:
    """Return int32 `words` as float32 values with the same bits and shape."""
    return tf.bitcast(words, tf.float32)


def with_header(finite: tf.Tensor, words: tf.Tensor) -> tf.Tensor:
    """Prepend the finite flag (bool scalar) to int32 words of shape `[n]`: shape `[1 + n]`."""
    return joined(as_row(tf.cast(finite, tf.int32)), words)


def message(finite: tf.Tensor, *parts: tf.Tensor) -> tf.Tensor:
    """Return a message of a flag and vectors, int32 `[words]`; all zero if it is non-finite.

    Args:
        finite: Bool scalar.
        parts: int32 or float32 vectors.
    """
    words = [to_words(part) if part.dtype == tf.float32 else part for part in parts]
    return zero_unless(finite, with_header(finite, joined(*words)))


def zero_unless(finite: tf.Tensor, words: tf.Tensor) -> tf.Tensor:
    """Return int32 words, all zero unless `finite`, a bool scalar."""
    return map_words(lambda w: tf.where(finite, w, tf.zeros([], w.dtype)), words)


def split(messages: tf.Tensor, floats: int) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Split messages of a float32 and an int32 vector into flags, numbers and words.

    Args:
        messages: int32 `[P, words]`, made by `message`.
        floats: Length of the float32 vector.
    """
    sizes = [HEADER_WORDS, floats, -1]
    flags, numbers, words = cut(messages, sizes)
    return flags, from_words(numbers), words


def each_finite(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Return which tensors have only finite elements, bool `[N]`.

    One op replaces three for each tensor, which a model of many variables would have to trace.

    Args:
        tensors: N floating point tensors of any shape.
    """
    if tensors and native.are_on_cpus(tensors) and runs_natively(tensors):
        finite: tf.Tensor = native.load().redsync_all_finite(tensors=tensors)
        return finite
    return tf.convert_to_tensor([tf.reduce_all(tf.math.is_finite(t)) for t in tensors], tf.bool)


def all_finite(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Return whether all elements of all tensors are finite, a bool scalar."""
    return tf.reduce_all(each_finite(tensors))


def flags_are_set(messages: tf.Tensor) -> tf.Tensor:
    """Return whether the flags of all messages, int32 `[rows, words]`, are 1, a bool scalar."""
    return all_ones(map_words(lambda m: m[:, 0], messages))


def as_one(messages: tf.Tensor, words: tf.Tensor) -> tf.Tensor:
    """Return a single message in place of several.

    Args:
        messages: int32 `[rows, words]`.
        words: int32, the words of the result without the flag.

    Returns:
        int32 `[1, words]`, all zero if one of `messages` is non-finite.
    """
    return as_row(message(flags_are_set(messages), words))


def absent(message: tf.Tensor) -> tf.Tensor:
    """Return the placeholder for the message of a missing worker: flag 1, then zeros.

    Args:
        message: int32 `[words]`, a message of the same length.
    """
    return with_header(tf.constant(True), map_words(lambda m: tf.zeros_like(m[1:]), message))


def totals_are_finite(totals: Sequence[Any]) -> tf.Tensor:
    """Return whether all totals are finite: sums of finite values may overflow.

    All workers compute equal totals, so the bool scalar is equal on all workers.

    Args:
        totals: Dense tensors, or tuples of `(indices, values)` whose values are summed per index.
            Such a total counts as finite if the sum of all magnitudes does not overflow.
    """
    dense = all_finite([total for total in totals if not isinstance(total, tuple)])
    values = [total[1] for total in totals if isinstance(total, tuple)]
    return tf.reduce_all([dense, *map(_has_finite_sum, values)])


def _has_finite_sum(values: tf.Tensor) -> tf.Tensor:
    return tf.reduce_sum(tf.abs(tf.cast(values, tf.float64))) <= tf.float32.max


def sealed(messages: tf.Tensor) -> tf.Tensor:
    """Combine the flag of each message with a checksum.

    Args:
        messages: int32 `[rows, words]`; word 0 is the flag, 0 or 1.

    Returns:
        int32 `[rows, words]`; only word 0 differs.

    Raises:
        tf.errors.InvalidArgumentError: When run on a CPU, for any other flag.
    """
    if runs_natively([messages]):
        return native.load().redsync_seal(messages=messages)
    return reference_checksums.sealed(messages)


def opened(messages: tf.Tensor, senders: tf.Tensor, receiver: tf.Tensor) -> tf.Tensor:
    """Check the checksums of received messages and restore their flags.

    Args:
        messages: int32 `[rows, words]`.
        senders: int32 `[rows]`, the rank of each sender. A row with `NO_SENDER` stays unchanged.
        receiver: int32 scalar, this worker's rank.

    Returns:
        int32 `[rows, words]`, the messages before `sealed`.

    Raises:
        tf.errors.InvalidArgumentError: When run, if a message is corrupted; the error names the
            sender.
    """
    if runs_natively([messages]):
        return native.load().redsync_open(sealed=messages, senders=senders, receiver=receiver)
    return reference_checksums.opened(messages, senders, receiver)
