"""Random streams, equal on all workers or one for each worker, with equal bits on all devices."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import tensorflow as tf

from tf_redsync.exchange.context import Context

_PHILOX = tf.random.Algorithm.PHILOX.value


def stream(seed: int, step: tf.Tensor, position: int) -> tf.Tensor:
    """Return the seed of a random stream for one tensor and step, int32 `[2]`.

    The arguments are equal on all workers, and so is the stream. Pass it to `uniform`, or to a
    stateless generator of TensorFlow with `alg="philox"`, since the default generator depends on
    the device.

    Args:
        seed: The method's seed.
        step: Number of exchanges so far, int64 scalar.
        position: Position of the tensor's variable in the model, or -1 for none.
    """
    # The generators mix the two words. The first word differs between positions.
    digest = hashlib.blake2b(str(seed).encode(), digest_size=4).digest()
    fixed = (int.from_bytes(digest, "little") + position * 0x9E3779B9) % 2**32
    return tf.stack([tf.constant(fixed - 2**31, tf.int32), tf.cast(step, tf.int32)])


def worker_seed(seed: tf.Tensor, rank: tf.Tensor) -> tf.Tensor:
    """Return the seed of one worker's random stream.

    Args:
        seed: Seed that all workers share, int32 `[2]`, from `stream`.
        rank: The worker's rank, int32 scalar.
    """
    return seed + tf.stack([tf.cast(rank, tf.int32) * 0x5851F42D, 0])


def worker_stream(seed: int, ctx: Context) -> tf.Tensor:
    """Return this worker's random stream for `ops.quantize`, int32 `[3]`.

    It depends on the seed, the step, the rank and the position of the bucket's first tensor.
    """
    word, number = tf.unstack(stream(seed, ctx.step, ctx.layout.specs[0].position))
    return tf.stack([word, tf.cast(ctx.rank, tf.int32), number])


def uniform(shape: Sequence[int], seed: tf.Tensor, dtype: tf.DType = tf.float32) -> tf.Tensor:
    """Return uniform random numbers in [0, 1), with equal bits on all devices.

    The counter-based generator Philox4x32-10. The first word of `seed` is its key, and the second
    word is the upper half of its counter. `tf.random.stateless_uniform` would add about 50 ops per
    tensor to mix the seed.

    Args:
        shape: Shape of the result.
        seed: int32 `[2]`, from `stream` or `worker_seed`.
        dtype: Dtype of the result.
    """
    key, number = tf.split(tf.cast(tf.bitcast(seed, tf.uint32), tf.uint64), 2)
    counter = tf.concat([tf.zeros([1], tf.uint64), number], axis=0)
    return tf.raw_ops.StatelessRandomUniformV2(
        shape=list(shape), key=key, counter=counter, alg=_PHILOX, dtype=dtype
    )
