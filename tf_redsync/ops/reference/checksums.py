"""Pure-TensorFlow reference of the checksums in `ops/wire.py`."""

from __future__ import annotations

import functools

import numpy as np
import tensorflow as tf

from tf_redsync.ops.reference.common import after, assert_none, to_unsigned

PRIME = 2**32 - 5
BASE = 2300216400
REACH = 2**25  # words
NOT_FINITE_TERM = pow(BASE, REACH + 1, PRIME)
FINITE_TERM = (NOT_FINITE_TERM + pow(BASE, REACH, PRIME)) % PRIME
_BLOCK = 1024  # words: the sum of their products with 16-bit halves fits int64
_LEVELS = 3  # of blocks of blocks: up to 2^30 words
_HALF = 2**16


def sealed(messages: tf.Tensor) -> tf.Tensor:
    """See `tf_redsync.ops.wire.sealed`."""
    flags, words = messages[:, :1], messages[:, 1:]
    bad = (flags < 0) | (flags > 1)
    flags = after([assert_none("messages", "flag", bad, flags, None)], flags)
    seals = (_checksums(words) + _terms(flags)) % PRIME
    return tf.concat([to_unsigned(seals), words], axis=1)


def opened(messages: tf.Tensor, senders: tf.Tensor, receiver: tf.Tensor) -> tf.Tensor:
    """See `tf_redsync.ops.wire.opened`."""
    seals, words = messages[:, :1], messages[:, 1:]
    terms = (_unsigned(seals) - _checksums(words)) % PRIME
    finite, not_finite = tf.equal(terms, FINITE_TERM), tf.equal(terms, NOT_FINITE_TERM)
    in_range = _unsigned(seals) < PRIME
    no_sender = senders[:, tf.newaxis] < 0
    good = no_sender | (in_range & (finite | not_finite))
    first = tf.gather(senders, tf.where(~good)[:1, 0])  # empty without an error
    text = (
        "received a corrupted message: the checksum does not match its words. Received by worker, "
        "from worker:"
    )
    fine = tf.debugging.Assert(tf.equal(tf.size(first), 0), [text, receiver, first])
    flags = after([fine], tf.where(no_sender, seals, tf.cast(finite, tf.int32)))
    return tf.concat([flags, words], axis=1)


def _checksums(words: tf.Tensor) -> tf.Tensor:
    """Return the checksums of `[rows, words]`, int64 `[rows, 1]`."""
    sums, base = _unsigned(words), BASE
    for level in range(_LEVELS):
        if level > 0 and sums.shape[1] == 1:
            break
        sums = _block_sums(sums, base)
        base = pow(base, _BLOCK, PRIME)
    # Congruent to BASE and less than 2^31 in magnitude: the product fits int64.
    return sums * (BASE - PRIME) % PRIME


def _block_sums(words: tf.Tensor, base: int) -> tf.Tensor:
    """Return the sums of `words[i] * base^i` in each block: of `[rows, n]`, `[rows, blocks]`."""
    count = tf.shape(words)[1] if words.shape[1] is None else words.shape[1]
    blocks = count // _BLOCK + 1
    padded = tf.pad(words, [[0, 0], [0, blocks * _BLOCK - count]])
    table = tf.reshape(padded, [-1, blocks, _BLOCK])
    powers = tf.constant(_powers(base))
    low = tf.reduce_sum((table % _HALF) * powers, axis=2)
    high = tf.reduce_sum((table // _HALF) * powers, axis=2)
    return (low + high % PRIME * _HALF) % PRIME


@functools.cache
def _powers(base: int) -> np.ndarray:
    return np.array([pow(base, i, PRIME) for i in range(_BLOCK)], np.int64)


def _terms(flags: tf.Tensor) -> tf.Tensor:
    return tf.where(tf.equal(flags, 1), tf.constant(FINITE_TERM, tf.int64), NOT_FINITE_TERM)


def _unsigned(words: tf.Tensor) -> tf.Tensor:
    return tf.cast(tf.bitcast(words, tf.uint32), tf.int64)
