"""Pure-TensorFlow reference of `ops/selection.py`: equal bits, but many passes over memory.

It runs without the native library and is the readable specification of the native ops. Elementwise
arithmetic is float32 in the order written; reductions are float64.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tf_redsync.ops.message_layout import MessageLayout
from tf_redsync.ops.reference.common import after, check_countable
from tf_redsync.ops.wire import opaque

_TRIM_START, _TRIM_STEP = 0.8, 0.2  # ratio of the first trimming threshold, and its decrement
_PROBES = 10  # bisection steps of the threshold search
_NO_RATIO = -1.0
TOO_LARGE = 2.0**96  # messages hold values below it, so that no sum over workers overflows


def accumulate_and_select(
    grads: Sequence[tf.Tensor],
    residuals: Sequence[tf.Tensor],
    velocities: Sequence[tf.Tensor],
    k: tf.Tensor,
    ratios: tf.Tensor,
    *,
    layout: MessageLayout,
    kept: int,
    selectors: Sequence[str],
    momentum: float,
    nesterov: bool,
    masking: bool,
    scale: tf.Tensor,
    side: tf.Tensor,
    search: tf.Tensor,
) -> tuple[tf.Tensor, list[tf.Tensor], list[tf.Tensor], tf.Tensor]:
    """See `tf_redsync.ops.accumulate_and_select`; all arguments are given and already checked.

    `kept` is the number of velocities to return: all or none.
    """
    check_countable("grads", grads)
    quantized = layout.quantized
    checks = _check_select(grads, k, ratios, side, selectors, any(quantized))
    k, ratios, scale = (after(checks, t) for t in (k, ratios, scale))
    side = tf.cast(side, tf.float32)
    finite, sent, new_v, new_u, new_ratios = [], [], [], [], []
    for i, g in enumerate(grads):
        u = velocities[i] if momentum else None
        v, u = _accumulate(tf.cast(g, tf.float32), residuals[i], u, scale, momentum, nesterov)
        shape, v = tf.shape(v), tf.reshape(v, [-1])
        finite.append(tf.reduce_all(tf.abs(v) < TOO_LARGE))  # false for NaN
        a = side * v if quantized[i] else tf.abs(v)
        if selectors[i] == "fixed":
            finite[-1] &= ~tf.math.is_nan(ratios[i])
        a = tf.where(finite[-1], a, 0.0)  # NaN has no order; selects nothing
        indices, ratio = _select(a, k[i], ratios[i], search, selectors[i], quantized[i])
        sent.append(_sent(v, indices, k[i], quantized[i]))
        new_v.append(tf.reshape(_zero_at(v, indices), shape))
        new_ratios.append(ratio)
        if kept:
            flat_u = tf.reshape(u, [-1])
            new_u.append(tf.reshape(_zero_at(flat_u, indices), shape) if masking else u)
    flag = tf.reduce_all(tf.stack(finite))
    counts, indices, values = zip(*sent, strict=True)
    message = layout.message(flag, tf.stack(counts), indices, values)
    message.set_shape([layout.words if layout.is_static else None])
    for new, like in zip(new_v + new_u, [*residuals, *velocities[:kept]], strict=True):
        new.set_shape(like.shape)
    ratios = tf.where(flag, tf.stack(new_ratios), ratios)
    return message, new_v, new_u, ratios


def _check_select(grads, k, ratios, side, selectors, any_quantized):
    n = tf.stack([tf.size(g) for g in grads])
    bad = tf.reshape(tf.where((k < tf.minimum(n, 1)) | (k > n)), [-1])[:1]
    checks = [
        tf.debugging.assert_equal(tf.shape(k), [len(grads)], "`k` must have one entry per tensor."),
        tf.debugging.assert_equal(
            tf.shape(ratios), [len(grads)], "`ratios` must have one entry per tensor."
        ),
        tf.debugging.Assert(
            tf.equal(tf.size(bad), 0),
            ["`k` must be in [1, size]. Received (tensor, k, size):", bad]
            + [tf.gather(k, bad), tf.gather(n, bad)],
        ),
    ]
    fixed = tf.constant([s == "fixed" for s in selectors])
    text = "`ratios` must be >= 0 where the selector is 'fixed'. Received:"
    checks.append(tf.debugging.Assert(~tf.reduce_any(fixed & (ratios < 0.0)), [text, ratios]))
    if any_quantized:
        ok = tf.equal(tf.abs(side), 1)
        checks.append(tf.debugging.Assert(ok, ["`side` must be +1 or -1. Received:", side]))
    return checks


def _accumulate(g, v, u, scale, momentum: float, nesterov: bool):
    """Apply momentum and accumulate; return the new residual and velocity."""
    t = scale * g
    if not momentum:
        return v + t, None
    momentum = tf.constant(momentum, tf.float32)
    if nesterov:
        u = momentum * (u + t)
        # Grappler would otherwise add the three terms in another order.
        return opaque(v + u) + t, u
    u = momentum * u + t
    return v + u, u


def _select(a, k, ratio, search, selector: str, one_mean: bool):
    """Return ascending positions of the selected elements of `a` [n], and the ratio to keep."""
    none = tf.constant(_NO_RATIO)
    if selector == "exact":
        return top_k(a, k), none
    if selector == "fixed":
        return top_k(tf.where(a >= ratio, a, 0.0), k), ratio
    mean, top = tf.reduce_sum(tf.cast(a, tf.float64)), tf.cast(tf.reduce_max(a), tf.float64)
    mean = mean / tf.cast(tf.size(a), tf.float64)

    def level(r):  # threshold at the fraction r (float64) of the way from the mean to the maximum
        return tf.cast(mean + r * (top - mean), tf.float32)

    if selector == "trimmed":
        return _trimmed_top_k(a, k, level), none
    search = tf.constant(True) if one_mean else search
    indices, ratio = _threshold_search(a, k, ratio, search, level)
    return indices, none if one_mean else ratio


def top_k(a, k):
    """Return the k largest positive elements; `top_k` selects the lower index among equals."""
    values, indices = tf.math.top_k(a, k)
    count = tf.math.count_nonzero(values > 0.0, dtype=tf.int32)
    return tf.sort(indices[:count])


def _trimmed_top_k(a, k, level):
    """Return the exact top-k among elements above a threshold, lowered until k pass (RedSync)."""
    n, step = tf.size(a), tf.constant(_TRIM_STEP, tf.float64)

    def too_few(ratio, count):
        return (count < k) & (ratio > 0.5 * step)

    def trim(ratio, _):
        count = tf.math.count_nonzero(a > level(ratio), dtype=tf.int32)
        return tf.where(count < k, ratio - step, ratio), count

    start = tf.constant(_TRIM_START, tf.float64), tf.constant(0, tf.int32)
    ratio, count = tf.while_loop(too_few, trim, start)

    def among_candidates():
        candidates = tf.cast(tf.reshape(tf.where(a > level(ratio)), [-1]), tf.int32)
        return tf.gather(candidates, top_k(tf.gather(a, candidates), k))

    # A constant input never has k elements above its mean: all elements are then candidates.
    return tf.cond((count >= k) & (n > 0), among_candidates, lambda: top_k(a, k))


def _threshold_search(a, k, ratio, search, level):
    """Bisect the ratio until 3k/4 < count <= k; select all elements above the threshold."""
    n = tf.size(a)

    def above(r):
        return (a > level(tf.cast(r, tf.float64))) & (a > 0.0)

    def count_at(r):
        return tf.cast(tf.math.count_nonzero(above(r)), tf.int64)

    k64 = tf.cast(k, tf.int64)

    def too_few(nnz):
        return 4 * nnz <= 3 * k64

    def in_band(nnz):
        return ~too_few(nnz) & (nnz <= k64)

    # k >= n selects everything: no probe, and the top-k below takes all eligible elements.
    searchable = k < n
    try_reuse = searchable & ~search & (ratio >= 0.0)
    reused = tf.cond(try_reuse, lambda: in_band(count_at(ratio)), lambda: tf.constant(False))

    def unfinished(probe, low, high, mid, found):
        return ~found & (probe < _PROBES)

    def bisect(probe, low, high, mid, found):
        mid = (low + high) / 2.0
        nnz = count_at(tf.cast(mid, tf.float32))
        found, too_high = in_band(nnz), too_few(nnz)
        low, high = tf.where(too_high, low, mid), tf.where(too_high, mid, high)
        return probe + 1, low, high, mid, found

    zero, one = tf.constant(0.0, tf.float64), tf.constant(1.0, tf.float64)
    first = tf.where(searchable, 0, _PROBES)
    state = (first, zero, one, tf.cast(ratio, tf.float64), reused)
    _, _, _, mid, found = tf.while_loop(unfinished, bisect, state)
    mid = tf.cast(mid, tf.float32)

    def everything_above():
        return tf.cast(tf.reshape(tf.where(above(mid)), [-1]), tf.int32)

    indices = tf.cond(found, everything_above, lambda: top_k(a, k))
    return indices, tf.where(found, mid, _NO_RATIO)


def _zero_at(x, indices):
    return tf.tensor_scatter_nd_update(x, indices[:, None], tf.zeros_like(indices, x.dtype))


def _sent(v, indices, slots, one_mean: bool):
    """Return this tensor's part of the message: count, indices, and values or one mean."""
    count = tf.size(indices)
    unused = [[0, slots - count]]
    values = tf.gather(v, indices)
    if one_mean:
        total = tf.reduce_sum(tf.cast(values, tf.float64))
        mean = tf.math.divide_no_nan(total, tf.cast(count, tf.float64))
        values = tf.cast(mean, tf.float32)[tf.newaxis]
    else:
        values = tf.pad(values, unused)
    return count, tf.pad(indices, unused), values


def chunked_top_k(chunks: tf.Tensor, k: int) -> tuple[tf.Tensor, tf.Tensor]:
    """See `tf_redsync.ops.selection.chunked_top_k`; all arguments are given and already checked."""
    # Magnitudes sort alike as integers, including NaNs and denormals, on every device.
    magnitudes = tf.bitwise.bitwise_and(tf.bitcast(chunks, tf.int32), 0x7FFFFFFF)
    _, positions = tf.math.top_k(magnitudes, k, sorted=True)
    positions = tf.sort(positions, axis=1)
    return positions, tf.gather(chunks, positions, batch_dims=1)
