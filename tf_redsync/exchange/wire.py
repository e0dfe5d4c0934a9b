"""Words on the wire: bit-casts, the finite flag, and the one place that counts bytes.

A message is a vector of int32 words. Floats are *bit-cast* into words, indices are never cast to
float (a float32 index is wrong from 2**24 on). Word 0 is the finite flag; on a network it carries
the checksum of the others as well, see `sealed`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_redsync.exchange.requests import AllGather, AllReduce, AllToAll, PairGather, Request
from tf_redsync.ops import checksums
from tf_redsync.ops.words import all_ones, as_row, cut, joined, moved, only_row

BYTES_PER_WORD = 4
HEADER_WORDS = 1


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


def sealed(request: Request) -> Request:
    """Return the request with a checksum in each message. What is added up on its way has none."""
    if isinstance(request, AllReduce):
        return request
    if isinstance(request, AllToAll):
        return dataclasses.replace(request, messages=checksums.sealed(request.messages))
    message = only_row(checksums.sealed(as_row(request.message)))
    return dataclasses.replace(request, message=message)


def opened(request: Request, reply: Any, workers: int, rank: tf.Tensor) -> Any:
    """Return the reply to a request that was `sealed`, as if it had not been.

    Args:
        request: What was asked for.
        reply: The answer.
        workers: Number of workers.
        rank: This worker's.

    Raises:
        tf.errors.InvalidArgumentError: when run, on the worker that receives a message that is not
            what was sent; the error names the sender. That worker does no more, and in particular
            does not update its weights; the others cannot go on without it.
    """
    if isinstance(request, AllReduce):
        return reply
    if isinstance(request, PairGather):
        lower = tf.bitwise.bitwise_and(rank, ~request.distance)
        pair = tf.stack([lower, lower + request.distance])
        senders = tf.where(pair < workers, pair, checksums.NOBODY)
    else:
        senders = tf.range(workers)
    return checksums.opened(reply, senders, rank)


def payload_bytes(request: Request) -> int | tf.Tensor:
    """Bytes of one worker's own payload in `request`.

    Returns:
        A Python int where the shape is static, else an int64 scalar tensor.
    """
    if isinstance(request, AllReduce):
        return _total_bytes(request.tensors)
    if isinstance(request, (AllGather, PairGather)):
        return _total_bytes([request.message])
    return _total_bytes([request.messages])


def sent_bytes(request: Request, workers: int) -> float | tf.Tensor:
    """Bytes that one worker puts on the network for `request`.

    The usual costs of ring collectives: with P workers and a payload of m bytes, an all-gather
    sends `m (P - 1)`, an all-reduce `2 m (P - 1) / P`, an all-to-all `m (P - 1) / P`. To its
    partner a worker sends `m` (one without a partner would not; it is counted as the others).

    Args:
        request: What an exchange yielded.
        workers: P, the number of workers.
    """
    factor = sent_factor(type(request), workers)
    payload = payload_bytes(request)
    return factor * (payload if isinstance(payload, int) else tf.cast(payload, tf.float64))


def sent_factor(kind: type[Request], workers: int) -> float:
    """Bytes sent for each byte of a worker's payload; see `sent_bytes`."""
    if kind is AllGather:
        return workers - 1.0
    if kind is PairGather:
        return min(1.0, workers - 1.0)
    if kind is AllReduce:
        return 2.0 * (workers - 1) / workers
    return (workers - 1.0) / workers


def is_finite(request: Request, reply: Any) -> tf.Tensor:
    """Agree on finiteness: a bool scalar that is the same on every worker.

    Messages carry a flag; a sum is non-finite on every worker as soon as one summand is. With
    messages to a single worker it is the same once a later message has passed on what was seen.
    """
    if isinstance(request, (AllGather, AllToAll, PairGather)):
        return are_finite(reply)
    return all_finite(reply)


def totals_are_finite(totals: Sequence[Any]) -> tf.Tensor:
    """Look at the totals of an exchange: finite summands may have a sum that is not.

    Every worker computes equal totals, so the bool scalar is the same on every worker.

    Args:
        totals: Dense tensors, or tuples of `(indices, values)` whose values are added up per index.
            Of those, values are taken for too large if even the sum of all magnitudes is.
    """
    finite = []
    for total in totals:
        if isinstance(total, tuple):
            magnitudes = tf.abs(tf.cast(total[1], tf.float64))
            finite.append(tf.reduce_sum(magnitudes) <= tf.float32.max)
        else:
            finite.append(tf.reduce_all(tf.math.is_finite(total)))
    return tf.reduce_all(finite)


def _total_bytes(tensors) -> int | tf.Tensor:
    if all(t.shape.is_fully_defined() for t in tensors):
        return sum(t.shape.num_elements() * t.dtype.size for t in tensors)
    return tf.add_n([tf.size(t, out_type=tf.int64) * t.dtype.size for t in tensors])


__all__ = [
    "AllToAll",
    "BYTES_PER_WORD",
    "HEADER_WORDS",
    "absent",
    "all_finite",
    "are_finite",
    "as_one",
    "from_words",
    "is_finite",
    "message",
    "opened",
    "payload_bytes",
    "sealed",
    "sent_bytes",
    "sent_factor",
    "split",
    "to_words",
    "totals_are_finite",
    "with_header",
    "zero_unless",
]
