"""Random numbers that are equal on all workers, or of a worker's own, on every kind of device."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import tensorflow as tf

from tf_redsync.exchange.context import Context

_PHILOX = tf.random.Algorithm.PHILOX.value


def stream(seed: int, step: tf.Tensor, position: int) -> tf.Tensor:
    """Return the seed of a random stream for one tensor and step, int32 `[2]`.

    A function of numbers that are equal on all workers, for `uniform` and for TensorFlow's
    stateless generators. Name `alg="philox"` there: the default generator depends on the device.

    Args:
        seed: The method's seed.
        step: int64 scalar, number of exchanges so far.
        position: Position of the tensor's variable in the model, or -1 for none.
    """
    # The generators mix the two words. The first is another one for every position of a seed.
    digest = hashlib.blake2b(str(seed).encode(), digest_size=4).digest()
    fixed = (int.from_bytes(digest, "little") + position * 0x9E3779B9) % 2**32
    return tf.stack([tf.constant(fixed - 2**31, tf.int32), tf.cast(step, tf.int32)])


def worker_seed(seed: tf.Tensor, rank: tf.Tensor) -> tf.Tensor:
    """Return the seed of a stream of one worker's own, from that of all workers.

    Args:
        seed: int32 `[2]`, from `stream`.
        rank: The worker's, int32 scalar.
    """
    return seed + tf.stack([tf.cast(rank, tf.int32) * 0x5851F42D, 0])


def worker_stream(seed: int, ctx: Context) -> tf.Tensor:
    """Return this worker's stream for `ops.quantize`, int32 `[3]`.

    A function of the seed, the step, the rank and the position of the bucket's first tensor.
    """
    word, number = tf.unstack(stream(seed, ctx.step, ctx.layout.specs[0].position))
    return tf.stack([word, tf.cast(ctx.rank, tf.int32), number])


def uniform(shape: Sequence[int], seed: tf.Tensor, dtype: tf.DType = tf.float32) -> tf.Tensor:
    """Return random numbers in [0, 1) of a stream, equal on every kind of device.

    The counter-based generator Philox4x32-10, with the first word of `seed` as its key and the
    second one above the bits that count the numbers. `tf.random.stateless_uniform` would spend
    some 50 operations on mixing a seed, for every tensor again.

    Args:
        shape: Of the result.
        seed: int32 `[2]`, from `stream`.
        dtype: Of the result.
    """
    key, number = tf.split(tf.cast(tf.bitcast(seed, tf.uint32), tf.uint64), 2)
    counter = tf.concat([tf.zeros([1], tf.uint64), number], axis=0)
    return tf.raw_ops.StatelessRandomUniformV2(
        shape=list(shape), key=key, counter=counter, alg=_PHILOX, dtype=dtype
    )
