"""Values of chunks in two bits: a sign, and whether the magnitude is a small or a large one.

On a worker, for the values v of each chunk of a tensor, with their mean magnitude m:

    u = |v| / m
    small, large = the means of the tensor's u below 1 and from 1 on
    v as sent = sign(v) m small  or  sign(v) m large

Each is the mean of what it stands for, of the tensor, so the code adds no bias to magnitudes. It
takes 2 bits a value, a float32 a chunk, and two a tensor.

The public code of SparseLoCo has bins of equal width, of six standard deviations together, and
their means as levels, one set for a tensor. Of the largest values of a chunk none is near zero, so
that two of four such bins would be almost empty; and the scales of chunks differ.

Reference: Amir Sarfi, Benjamin Thérien, Joel Lidin, Eugene Belilovsky (2025), "Communication
Efficient LLM Pre-training with SparseLoCo", arXiv 2508.15706.
"""

from __future__ import annotations

from typing import NamedTuple

import tensorflow as tf

BITS = 2
LEVELS = 2  # of magnitudes


class TwoBitValues(NamedTuple):
    """The values of a tensor's chunks, coded.

    Attributes:
        codes: int32 `[..., number, k]`: bit 0 is set for negative values, bit 1 for large ones.
        scales: float32 `[..., number]`, the mean magnitude of each chunk.
        levels: float32 `[..., 2]`: small and large, in units of the scales.
    """

    codes: tf.Tensor
    scales: tf.Tensor
    levels: tf.Tensor


def encode(values: tf.Tensor) -> TwoBitValues:
    """Code the values that are sent of a tensor, float32 `[number, k]`.

    Scales or levels are not finite if values are not, or if the magnitudes of a chunk add up to
    more than a float holds.
    """
    magnitudes = tf.abs(values)
    scales = tf.math.divide_no_nan(tf.reduce_sum(magnitudes, axis=1), float(values.shape[1]))
    units = tf.math.divide_no_nan(magnitudes, scales[:, tf.newaxis])
    large = units >= 1.0
    levels = [_mean(units, chosen) for chosen in (~large, large)]
    codes = tf.cast(values < 0.0, tf.float32) + 2.0 * tf.cast(large, tf.float32)
    return TwoBitValues(tf.cast(codes, tf.int32), scales, tf.stack(levels))


def decode(coded: TwoBitValues) -> tf.Tensor:
    """Return what the codes stand for, float32 `[..., number, k]`; also for several workers."""
    small, large = tf.unstack(coded.levels[..., tf.newaxis, tf.newaxis, :], axis=-1)
    codes = tf.cast(coded.codes, tf.float32)  # which GPUs compute with
    is_large = codes >= 2.0
    level = tf.where(is_large, large, small)
    sign = 1.0 - 2.0 * (codes - 2.0 * tf.cast(is_large, tf.float32))
    return sign * (level * coded.scales[..., tf.newaxis])


def _mean(numbers: tf.Tensor, chosen: tf.Tensor) -> tf.Tensor:
    """Of those that are chosen; 0 without any."""
    total = tf.reduce_sum(tf.where(chosen, numbers, 0.0))
    return tf.math.divide_no_nan(total, tf.reduce_sum(tf.cast(chosen, tf.float32)))
