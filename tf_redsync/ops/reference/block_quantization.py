"""Pure-TensorFlow reference of block quantization: equal bits. See `block_quantization.py`."""

from __future__ import annotations

import tensorflow as tf

from tf_redsync.ops.reference.common import add_rows
from tf_redsync.ops.reference.quantization import pack, unpack
from tf_redsync.ops.wire import opaque

TOO_LARGE = 2.0**126
SMALLEST = 2.0**-100
SHARES = (1.0, 0.8, 0.6, 0.45)
LANES = 16
FLOATS = (0, 1, 2, 3, 4, 6, 8, 12)  # levels of 4 bits: floats of 2 bits of exponent, 1 of mantissa


def block_quantize(rows: tf.Tensor, *, bits: int, block: int) -> tuple[tf.Tensor, tf.Tensor]:
    """See `tf_redsync.ops.block_quantization`; all arguments are given and already checked."""
    number, size = tf.unstack(tf.shape(rows, tf.int64))
    padded = tf.pad(rows, [[0, 0], [0, -size % (2 * block)]])
    blocks = tf.reshape(padded, [number, -(-size // (2 * block)) * 2, block])
    largest = _largest(blocks)
    usable = tf.reduce_all(largest < TOO_LARGE)  # false for NaN
    scales = _scales(blocks, largest, bits)
    unit, inverse = _steps(scales, bits)
    limit = _limit(bits)
    steps = tf.clip_by_value(blocks * inverse[..., tf.newaxis], -limit, limit)
    levels = _rounded(tf.where(usable, steps, 0.0), bits)
    errors = blocks - tf.cast(levels, tf.float32) * unit[..., tf.newaxis]
    errors = tf.reshape(errors, [number, -1])[:, :size]
    halves = tf.bitcast(tf.bitcast(scales, tf.int32), tf.uint16)[..., 1]
    words = tf.bitcast(tf.reshape(halves, [number, -1, 2]), tf.int32)
    codes = _codes(tf.reshape(levels, [number, -1])[:, :size], bits)
    packed = tf.reshape(pack(tf.reshape(codes, [-1]), bits), [number, size // 32 * bits])
    messages = tf.concat([tf.ones([number, 1], tf.int32), words, packed], axis=1)
    return tf.where(usable, messages, 0), tf.ensure_shape(errors, rows.shape)


def block_dequantize(
    messages: tf.Tensor, size: tf.Tensor, *, bits: int, block: int, add: bool
) -> tf.Tensor:
    """See `tf_redsync.ops.block_quantization`; all arguments are given and already checked."""
    pairs = -(-size // (2 * block))
    _, scales, packed = tf.split(messages, [1, pairs, size // 32 * bits], axis=1)
    halves = tf.cast(tf.bitcast(tf.bitcast(scales, tf.uint16), tf.int16), tf.int32)
    halves = tf.reshape(halves, [tf.shape(messages, tf.int64)[0], 2 * pairs])
    unit, _ = _steps(tf.bitcast(tf.bitwise.left_shift(halves, 16), tf.float32), bits)
    levels = _levels(unpack(packed, size, bits), bits)
    spread = tf.repeat(unit, block, axis=1)[:, :size]
    values = tf.cast(levels, tf.float32) * spread
    return add_rows(values) if add else values


def _limit(bits: int) -> float:
    """Return L, the scale of a block divided by the unit of its values."""
    return float(FLOATS[-1]) if bits == 4 else 2.0 ** (bits - 1) - 1


def _rounded(steps: tf.Tensor, bits: int) -> tf.Tensor:
    """Round values in units to the nearest levels, half to even, int64."""
    distance = tf.ones_like(steps)
    if bits == 4:
        sizes = tf.abs(steps)
        distance = tf.where(sizes < 4.0, 1.0, tf.where(sizes < 8.0, 2.0, 4.0))
    return tf.cast(tf.round(steps / distance) * distance, tf.int64)


def _codes(levels: tf.Tensor, bits: int) -> tf.Tensor:
    """Return the codes of levels: with 4 bits a sign and an index in `FLOATS`, else the level."""
    if bits != 4:
        return levels & (2**bits - 1)
    places = tf.searchsorted(
        tf.constant(FLOATS, tf.int64), tf.reshape(tf.abs(levels), [-1]), out_type=tf.int64
    )
    return tf.reshape(places, tf.shape(levels)) + tf.where(levels < 0, tf.constant(8, tf.int64), 0)


def _levels(codes: tf.Tensor, bits: int) -> tf.Tensor:
    """Return the levels of codes, the inverse of `_codes`."""
    if bits != 4:
        sign = tf.constant(2 ** (bits - 1), tf.int64)
        return tf.bitwise.bitwise_xor(codes, sign) - sign
    sizes = tf.gather(tf.constant(FLOATS, tf.int64), codes & 7)
    return tf.where(codes >= 8, -sizes, sizes)


def _largest(blocks: tf.Tensor) -> tf.Tensor:
    """Return the largest magnitude of each block, compared as bits, denormals and NaNs included."""
    bits = tf.bitwise.bitwise_and(tf.bitcast(blocks, tf.int32), 0x7FFFFFFF)
    return tf.bitcast(tf.maximum(tf.reduce_max(bits, axis=-1), 0), tf.float32)


def _rounded_up(scales: tf.Tensor) -> tf.Tensor:
    """Return scales rounded up to bfloat16; 0 for those below `SMALLEST`."""
    bits = tf.bitcast(scales, tf.uint32)
    up = tf.bitwise.bitwise_and(bits + 0xFFFF, tf.constant(0xFFFF0000, tf.uint32))
    up = tf.bitcast(up, tf.float32)
    return tf.where(up < SMALLEST, 0.0, up)


def _steps(scales: tf.Tensor, bits: int) -> tuple[tf.Tensor, tf.Tensor]:
    """Return the unit of the values, and its inverse; 0 and 0 for a scale of 0."""
    unit = scales / opaque(tf.constant(_limit(bits)))
    return unit, tf.where(unit > 0.0, 1.0 / tf.where(unit > 0.0, unit, 1.0), 0.0)


def _scales(blocks: tf.Tensor, largest: tf.Tensor, bits: int) -> tf.Tensor:
    best = _rounded_up(largest)
    if bits > 2:
        return best
    most = _saved(blocks, best)
    for share in SHARES[1:]:
        scales = _rounded_up(share * largest)
        saved = _saved(blocks, scales)
        best = tf.where(saved > most, scales, best)
        most = tf.maximum(saved, most)
    return best


def _saved(blocks: tf.Tensor, scales: tf.Tensor) -> tf.Tensor:
    """Return the sum of scale (2 |x| - scale) over |x| > scale / 2 in each block.

    It is the reduction of the sum of squares by a scale. The order of the additions is fixed: 16
    lanes, then pairs of lanes.
    """
    scale = scales[..., tf.newaxis]
    magnitudes = tf.abs(blocks)
    saved = tf.where(magnitudes > 0.5 * scale, magnitudes + magnitudes - scale, 0.0)
    shape = tf.concat([tf.shape(scales), [-1, LANES]], axis=0)
    rows = tf.unstack(tf.reshape(saved, shape), num=blocks.shape[-1] // LANES, axis=-2)
    lanes = tf.zeros_like(rows[0])
    for row in rows:
        lanes += row
    width = LANES
    while width > 1:
        width //= 2
        lanes = lanes[..., :width] + lanes[..., width:]
    return lanes[..., 0] * scales
