"""Pure-TensorFlow reference of `ops/quantization.py`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tf_redsync.ops.quantized_format import RANDOM_MODES, max_code, scales_per_bucket
from tf_redsync.ops.reference.common import add_rows, after, assert_none, assert_shape
from tf_redsync.ops.wire import opaque

PHILOX = 1  # TensorFlow's number of the algorithm
INT32_MAX = 2**31 - 1


def quantize(
    tensors: Sequence[tf.Tensor],
    scales: tf.Tensor,
    stream: tf.Tensor,
    *,
    mode: str,
    levels: int,
    bucket_size: int | None,
    errors: bool,
) -> tuple[tf.Tensor, list[tf.Tensor]]:
    """See `tf_redsync.ops.quantize`; all arguments are given and already checked."""
    sizes = [tf.size(t, tf.int64) for t in tensors]
    counts = [_scale_count(n, mode, bucket_size) for n in sizes]
    checks = [
        assert_shape("scales", scales, [tf.add_n(counts)]),
        assert_shape("stream", stream, [3]),
    ]
    parts = tf.split(after(checks, scales), counts, num=len(tensors))
    finite, sent, words, remainders = [], [], [], []
    for i, (x, part) in enumerate(zip(tensors, parts, strict=True)):
        flat, part = tf.reshape(x, [-1]), tf.where(sizes[i] > 0, part, 0.0)  # unused: 0
        if mode != "two_level":
            part = after([assert_none("scales", "scale", part < 0.0, part, i)], part)
        finite += [tf.reduce_all(tf.math.is_finite(flat)), tf.reduce_all(tf.math.is_finite(part))]
        scale = _per_element(opaque(part), sizes[i], mode, bucket_size)
        codes = _encode(flat, scale, mode, levels, _random_words(stream, i, sizes[i], mode))
        finite.append(tf.reduce_all(codes <= max_code(mode, levels)))
        sent.append(part)
        words.append(pack(codes, _bits(mode, levels)))
        if errors:
            remainder = flat - _decode(codes, scale, mode, levels)
            remainders.append(tf.reshape(remainder, tf.shape(x)))
            remainders[-1].set_shape(x.shape)
    message = tf.concat([[1], tf.bitcast(tf.concat(sent, 0), tf.int32), *words], 0)
    return tf.where(tf.reduce_all(tf.stack(finite)), message, 0), remainders


def dequantize_sum(
    messages: tf.Tensor,
    like: Sequence[tf.Tensor],
    *,
    mode: str,
    levels: int,
    bucket_size: int | None,
) -> list[tf.Tensor]:
    """See `tf_redsync.ops.dequantize_sum`; all arguments are given and already checked."""
    bits, sizes = _bits(mode, levels), [tf.size(t, tf.int64) for t in like]
    lengths = [_scale_count(n, mode, bucket_size) for n in sizes]
    lengths += [_ceil_div(n * bits, 32) for n in sizes]
    checks = [assert_shape("messages", messages, [-1, 1 + tf.add_n(lengths)])]
    flag, *parts = tf.split(after(checks, messages), [1, *lengths], 1)
    flag = after([assert_none("messages", "flag", (flag != 0) & (flag != 1), flag, None)], flag)
    used, totals = tf.equal(flag, 1), []
    for i, tensor in enumerate(like):
        scales = tf.bitcast(parts[i], tf.float32)
        bad = ~tf.math.is_finite(scales)
        if mode != "two_level":
            bad |= scales < 0.0
        checks = [assert_none("messages", "scale", bad & used & (sizes[i] > 0), scales, i)]
        codes = unpack(parts[len(like) + i], sizes[i], bits)
        bad = used & (codes > max_code(mode, levels))
        checks.append(assert_none("messages", "code", bad, codes, i))
        scale = _per_element(opaque(after(checks, scales)), sizes[i], mode, bucket_size)
        values = tf.where(used, _decode(codes, scale, mode, levels), 0.0)
        totals.append(tf.reshape(add_rows(values), tf.shape(tensor)))
        totals[-1].set_shape(tensor.shape)
    return totals


def _bits(mode: str, levels: int) -> int:
    return max_code(mode, levels).bit_length()


def _ceil_div(a, b: int):
    return -(-a // b)


def _scale_count(size, mode: str, bucket_size: int | None):
    buckets = tf.constant(1, tf.int64) if bucket_size is None else _ceil_div(size, bucket_size)
    return scales_per_bucket(mode) * buckets


def _per_element(scales, size, mode: str, bucket_size: int | None):
    """Return the scale of each element, `[.., size]` or `[.., 1]`; one tensor per kind of scale."""
    step = scales_per_bucket(mode)
    kinds = [scales[..., kind::step] for kind in range(step)]
    if bucket_size is None:
        return kinds
    return [_repeated(kind, bucket_size)[..., :size] for kind in kinds]


def _repeated(x, times: int):
    """Repeat every element; `tf.repeat` would count in int32."""
    shape = tf.shape(x, tf.int64)
    copies = tf.broadcast_to(x[..., tf.newaxis], tf.concat([shape, [times]], 0))
    return tf.reshape(copies, tf.concat([shape[:-1], [-1]], 0))


def _random_words(stream, tensor: int, size, mode: str):
    """Return Philox4x32-10 words of the elements, uint32 [size]; `None` if unused."""
    if mode not in RANDOM_MODES:
        return None
    halves = tf.stack([stream[0], stream[1], tf.constant(tensor), stream[2]])
    key, high = tf.unstack(tf.bitcast(tf.reshape(halves, [2, 2]), tf.uint64))
    return tf.raw_ops.StatelessRandomUniformFullIntV2(
        shape=[size], key=[key], counter=tf.stack([tf.zeros([], tf.uint64), high]), alg=PHILOX,
        dtype=tf.uint32,
    )  # fmt: skip


def _encode(x, scale, mode: str, levels: int, words):
    """Return codes, int64."""
    if mode in ("sign", "two_level"):
        return tf.cast(x >= 0.0, tf.int64)
    if mode == "threshold":
        return 1 + tf.cast(x >= scale[0], tf.int64) - tf.cast(x <= -scale[0], tf.int64)
    if mode == "natural":
        bits = tf.bitcast(x, tf.int32)
        rounded = (bits & INT32_MAX) + tf.bitcast(words // 512, tf.int32)  # overflow: non-finite
        exponent = tf.cast(tf.bitwise.right_shift(rounded, 23), tf.int64)
        return 2 * exponent + tf.cast(bits < 0, tf.int64)
    s = tf.constant(levels, tf.float32)
    divisor = tf.where(scale[0] > 0.0, scale[0], np.inf)
    if mode == "uniform":
        y = (x / divisor + 1.0) * (s * 0.5)
        y = tf.where(y > 0.0, y, 0.0)  # also for NaN
        return tf.cast(_at_random(tf.where(y < s, y, s), words), tf.int64)
    y = (tf.abs(x) / divisor) * s
    level = _at_random(tf.where(y < s, y, s), words)  # s for NaN
    return tf.cast(levels + tf.where(x < 0.0, -level, level), tf.int64)


def _at_random(y, words):
    """Round numbers >= 0 up with probability y - floor(y), else down; int32."""
    floor = tf.cast(y, tf.int32)
    uniform = tf.cast(tf.bitcast(words // 256, tf.int32), tf.float32) * 2.0**-24
    return floor + tf.cast(uniform < y - tf.cast(floor, tf.float32), tf.int32)


def _decode(codes, scale, mode: str, levels: int):
    """Return the values of codes, float32."""
    if mode in ("sign", "two_level"):
        low, high = (-scale[0], scale[0]) if mode == "sign" else scale
        return tf.where(codes > 0, high, low)
    if mode == "natural":
        bits = (codes // 2) * 2**23 + (codes % 2) * 2**31
        return tf.bitcast(tf.cast(bits, tf.uint32), tf.float32)
    unit = scale[0] / opaque(tf.constant(levels, tf.float32))
    return tf.cast((2 * codes if mode == "uniform" else codes) - levels, tf.float32) * unit


def _bit_places(bits: int):
    """Return, for the 32 codes of a group, the first word and the lowest bit in it."""
    at = np.arange(32) * bits
    return at // 32, at % 32


def pack(codes: tf.Tensor, bits: int) -> tf.Tensor:
    """Return codes, int64 [n], as int32 words [ceil(n * bits / 32)]."""
    size = tf.size(codes, tf.int64)
    groups = tf.reshape(tf.pad(codes, [[0, -size % 32]]), [-1, 32])
    word, shift = _bit_places(bits)
    shifted = tf.bitwise.left_shift(groups, shift.astype(np.int64))
    mask = np.int64(2**32 - 1)
    low, high = shifted & mask, tf.bitwise.right_shift(shifted, np.int64(32))
    # Codes do not overlap, so a sum is a bitwise or. Row j of the matrix maps code j to its word.
    to_low = np.arange(bits) == word[:, None]
    to_high = np.arange(bits) == word[:, None] + 1
    words = tf.matmul(low, to_low.astype(np.int64)) + tf.matmul(high, to_high.astype(np.int64))
    words = tf.bitcast(tf.cast(words, tf.uint32), tf.int32)
    return tf.reshape(words, [-1])[: _ceil_div(size * bits, 32)]


def unpack(words: tf.Tensor, size: tf.Tensor, bits: int) -> tf.Tensor:
    """Return the codes, int64 [P, size], in int32 words [P, ceil(size * bits / 32)]."""
    ranks, length = tf.unstack(tf.shape(words, tf.int64))
    words = tf.pad(words, [[0, 0], [0, -length % bits]])
    words = tf.reshape(words, [ranks, _ceil_div(length, bits), bits])
    words = tf.cast(tf.bitcast(words, tf.uint32), tf.int64)
    word, shift = _bit_places(bits)
    low = tf.gather(words, word, axis=2)
    high = tf.gather(words, np.minimum(word + 1, bits - 1), axis=2)
    both = tf.bitwise.left_shift(high, np.int64(32)) | low
    codes = tf.bitwise.right_shift(both, shift.astype(np.int64)) & np.int64(2**bits - 1)
    return tf.reshape(codes, [ranks, _ceil_div(length, bits) * 32])[:, :size]
