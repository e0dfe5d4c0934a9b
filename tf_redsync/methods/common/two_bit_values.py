"""Values of chunks in two bits: a sign, and one of two magnitudes.

On a worker, for the values v of each chunk of a tensor, with their mean magnitude m:

    u = |v| / m
    small, large = means over the tensor of the u below 1, and of the u from 1 on
    decoded v = sign(v) m small  or  sign(v) m large

Each level is the mean of the magnitudes that it replaces, so that quantization adds no bias to
their mean. The code takes 2 bits per value, a float32 per chunk, and two float32 per tensor.

The public code of SparseLoCo uses bins of equal width over six standard deviations, with their
means as levels, one set per tensor. The largest values of a chunk are never near zero, which would
leave two of four such bins almost empty; and the scales of chunks differ.

Reference: Amir Sarfi, Benjamin Thérien, Joel Lidin, Eugene Belilovsky (2025), "Communication
Efficient LLM Pre-training with SparseLoCo", arXiv 2508.15706.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

BITS = 2
LEVELS = 2  # magnitudes


class TwoBitValues(NamedTuple):
    """Encoded values of the chunks of some tensors.

    Attributes:
        codes: int32 `[..., number, k]`. Bit 0 is set for negative values, bit 1 for large ones.
        scales: float32 `[..., number]`, the mean magnitude of each chunk.
        levels: float32 `[..., tensors, 2]`: small and large, in units of the scales.
    """

    codes: tf.Tensor
    scales: tf.Tensor
    levels: tf.Tensor


def encode(values: tf.Tensor, numbers: Sequence[int]) -> TwoBitValues:
    """Encode the selected values of some tensors.

    The means exclude chunks of zeros, which need no level. Scales or levels are non-finite if a
    value is, or if the sum of a chunk's magnitudes overflows.

    Args:
        values: float32 `[number, k]`.
        numbers: The number of chunks of each tensor.
    """
    magnitudes = tf.abs(values)
    scales = tf.math.divide_no_nan(tf.reduce_sum(magnitudes, axis=1), float(values.shape[1]))
    units = tf.math.divide_no_nan(magnitudes, scales[:, tf.newaxis])
    large = units >= 1.0
    small = ~large & (scales[:, tf.newaxis] > 0.0)
    tensors = _tensor_of_chunk(numbers)
    levels = [_means(units, chosen, tensors, len(numbers)) for chosen in (small, large)]
    codes = tf.cast(values < 0.0, tf.float32) + 2.0 * tf.cast(large, tf.float32)
    return TwoBitValues(tf.cast(codes, tf.int32), scales, tf.stack(levels, axis=1))


def decode(coded: TwoBitValues, numbers: Sequence[int]) -> tf.Tensor:
    """Decode to float32 `[..., number, k]`, for one or several workers."""
    levels = tf.gather(coded.levels, _tensor_of_chunk(numbers), axis=-2)
    small, large = tf.unstack(levels[..., tf.newaxis, :], axis=-1)
    codes = tf.cast(coded.codes, tf.float32)  # int32 kernels of GPUs run on the host
    is_large = codes >= 2.0
    level = tf.where(is_large, large, small)
    sign = 1.0 - 2.0 * (codes - 2.0 * tf.cast(is_large, tf.float32))
    return sign * (level * coded.scales[..., tf.newaxis])


def _means(units: tf.Tensor, chosen: tf.Tensor, tensors: tf.Tensor, count: int) -> tf.Tensor:
    """Return the mean of the chosen numbers of each of `count` tensors; 0 if there are none."""
    totals, counts = (
        tf.math.unsorted_segment_sum(tf.reduce_sum(x, axis=1), tensors, count)
        for x in (tf.where(chosen, units, 0.0), tf.cast(chosen, tf.float32))
    )
    return tf.math.divide_no_nan(totals, counts)


def _tensor_of_chunk(numbers: Sequence[int]) -> tf.Tensor:
    """Return the number of the tensor of each chunk, int64."""
    return tf.constant(np.repeat(np.arange(len(numbers)), numbers), tf.int64)
