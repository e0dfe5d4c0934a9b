"""Words on the wire: their bits, the header with its flag, checksums, and moves that keep bits.

A message is a vector of int32 words. Floats are *bit-cast* into words, indices are never cast to
float (a float32 index is wrong from 2**24 on). Word 0 is the finite flag; on a network it carries
the checksum of the others as well, see `sealed`.

TensorFlow keeps int32 tensors of a GPU in host memory where its kernels slice, reshape, stack or
compare them, since they are mostly shapes. Messages are not: as floats with the same bits they stay
where they are (`moved`). They must not be compared or added up as floats, of which a flag of 1 is
the smallest there is.

The checksum of words `w` is the sum of `w[i] * g^(i + 1)` modulo the prime `p = 2^32 - 5`. It
stands in the place of the message's flag, which is one more term, so that no message gets longer.
It finds every change of a single word, but for -5 and 0 up to -1 and 4, which are equal modulo p,
and any two inverted bits in messages of up to 2^25 words; of other changes it misses one in 2^32.
On a GPU nothing looks at a flag that is to be sealed: one that is neither 0 nor 1 gets a seal that
no receiver takes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_redsync.ops import native
from tf_redsync.ops.message_layout import HEADER_WORDS as HEADER_WORDS
from tf_redsync.ops.native import runs_natively
from tf_redsync.ops.reference import checksums as reference_checksums

BYTES_PER_WORD = 4
NOBODY = -1  # in place of a sender's rank
_ROW = functools.partial(tf.expand_dims, axis=0)
_ONLY = functools.partial(tf.squeeze, axis=0)
_FLOAT32 = functools.partial(tf.cast, dtype=tf.float32)


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
    return moved(_ROW, message)


def only_row(messages: tf.Tensor) -> tf.Tensor:
    """Undo `as_row`."""
    return moved(_ONLY, messages)


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
    return list(map(_FLOAT32, tensors))


def to_words(values: tf.Tensor) -> tf.Tensor:
    """Return float32 `values` as int32 words with the same bits and shape."""
    return tf.bitcast(values, tf.int32)


def from_words(words: tf.Tensor) -> tf.Tensor:
    """Return int32 `words` as float32 values with the same bits and shape."""
    return tf.bitcast(words, tf.float32)


def with_header(finite: tf.Tensor, words: tf.Tensor) -> tf.Tensor:
    """Prepend the finite flag (bool scalar) to int32 `words` of shape `[n]`: shape `[1 + n]`."""
    return joined(as_row(tf.cast(finite, tf.int32)), words)


def message(finite: tf.Tensor, *parts: tf.Tensor) -> tf.Tensor:
    """Return vectors behind their flag, int32 `[words]`; all zero, as is the rule, if not finite.

    Args:
        finite: Bool scalar.
        parts: int32 or float32 vectors.
    """
    words = [to_words(part) if part.dtype == tf.float32 else part for part in parts]
    return zero_unless(finite, with_header(finite, joined(*words)))


def zero_unless(finite: tf.Tensor, words: tf.Tensor) -> tf.Tensor:
    """Return int32 words, all zero unless `finite`, a bool scalar."""
    return moved(lambda w: tf.where(finite, w, tf.zeros([], w.dtype)), words)


def split(messages: tf.Tensor, floats: int) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Take messages of float32 numbers and then words apart: flags, numbers, words.

    Args:
        messages: int32 `[P, words]`, each as `message` makes it of one vector of either kind.
        floats: How many numbers there are.
    """
    sizes = [HEADER_WORDS, floats, -1]
    flags, numbers, words = cut(messages, sizes)
    return flags, from_words(numbers), words


def all_finite(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Return whether all elements of all tensors are finite, a bool scalar."""
    return tf.reduce_all([tf.reduce_all(tf.math.is_finite(t)) for t in tensors])


def are_finite(messages: tf.Tensor) -> tf.Tensor:
    """Return whether the flags of all messages, int32 `[rows, words]`, are 1, a bool scalar."""
    return all_ones(moved(lambda m: m[:, 0], messages))


def as_one(messages: tf.Tensor, words: tf.Tensor) -> tf.Tensor:
    """Return what several messages hold as a single one.

    Args:
        messages: int32 `[rows, words]`.
        words: int32, theirs without the flags, in the order of the result.

    Returns:
        int32 `[1, words]`, all zero if one of them is not finite.
    """
    return as_row(message(are_finite(messages), words))


def absent(message: tf.Tensor) -> tf.Tensor:
    """Return what stands for the message of a worker that does not exist: flag 1, then zeros.

    Args:
        message: int32 `[words]`, one as long.
    """
    return with_header(tf.constant(True), moved(lambda m: tf.zeros_like(m[1:]), message))


def totals_are_finite(totals: Sequence[Any]) -> tf.Tensor:
    """Look at the totals of an exchange: finite summands may have a sum that is not.

    Every worker computes equal totals, so the bool scalar is the same on every worker.

    Args:
        totals: Dense tensors, or tuples of `(indices, values)` whose values are added up per index.
            Of those, values are taken for too large if even the sum of all magnitudes is.
    """
    return tf.reduce_all([_is_finite_total(total) for total in totals])


def _is_finite_total(total: Any) -> tf.Tensor:
    if isinstance(total, tuple):
        magnitudes = tf.abs(tf.cast(total[1], tf.float64))
        return tf.reduce_sum(magnitudes) <= tf.float32.max
    return tf.reduce_all(tf.math.is_finite(total))


def sealed(messages: tf.Tensor) -> tf.Tensor:
    """Put a checksum into the flag of each message.

    Args:
        messages: int32 `[rows, words]`; word 0 is the flag, 0 or 1.

    Returns:
        int32 `[rows, words]`: the same but for word 0.

    Raises:
        tf.errors.InvalidArgumentError: when run, for another flag.
    """
    if runs_natively([messages]):
        return native.load().redsync_seal(messages=messages)
    return reference_checksums.sealed(messages)


def opened(messages: tf.Tensor, senders: tf.Tensor, receiver: tf.Tensor) -> tf.Tensor:
    """Undo `sealed` where messages arrive.

    Args:
        messages: int32 `[rows, words]`.
        senders: int32 `[rows]`, the rank of each one's sender. A row of `NOBODY` is left as it is.
        receiver: int32 scalar, this worker's rank.

    Returns:
        int32 `[rows, words]`, what was sealed.

    Raises:
        tf.errors.InvalidArgumentError: when run, for a message that is not what was sealed; the
            error names the sender.
    """
    if runs_natively([messages]):
        return native.load().redsync_open(sealed=messages, senders=senders, receiver=receiver)
    return reference_checksums.opened(messages, senders, receiver)
