"""Momentum and clipping around a compressed exchange, once for all methods.

Notation: `g` gradient, `u` velocity, `v` residual, `m` momentum, `P` workers.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tf_redsync.ops.reference.common import opaque


def momentum_step(
    grads: Sequence[tf.Tensor], velocities: Sequence[tf.Tensor], momentum: float, nesterov: bool
) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    """Heavy-ball or Nesterov momentum on every tensor.

    Plain: `u' = m u + g`, contribution `u'`. Nesterov: `u' = m (u + g)`, contribution `u' + g`.

    Returns:
        The contributions (what the residual would gain, or what a dense exchange sends) and the
        new velocities. Without momentum the gradients themselves and the velocities given.

    Reference:
        Lin, Han, Mao, Wang, Dally (2018), "Deep Gradient Compression", section 3.1: momentum
        correction, with the Nesterov form used in RedSync's implementation.
    """
    if momentum == 0.0:
        return list(grads), list(velocities)
    if nesterov:
        new = [momentum * (u + g) for u, g in zip(velocities, grads, strict=True)]
        return [u + g for u, g in zip(new, grads, strict=True)], new
    new = [momentum * u + g for u, g in zip(velocities, grads, strict=True)]
    return list(new), new


def accumulated(
    residuals: Sequence[tf.Tensor],
    grads: Sequence[tf.Tensor],
    velocities: Sequence[tf.Tensor],
    momentum: float,
    nesterov: bool,
) -> list[tf.Tensor]:
    """What residuals become before anything is taken out: `v + u'`, Nesterov `(v + u') + g`.

    To look at before a selection; rounded as `ops.accumulate_and_select` does it.
    """
    if momentum == 0.0:
        return [v + g for v, g in zip(residuals, grads, strict=True)]
    _, new = momentum_step(grads, velocities, momentum, nesterov)
    sums = [v + u for v, u in zip(residuals, new, strict=True)]
    # Graph optimisation would add the three terms of Nesterov's form in another order.
    return [opaque(v) + g for v, g in zip(sums, grads, strict=True)] if nesterov else sums


def scaled(grads: Sequence[tf.Tensor], scale: tf.Tensor | None) -> list[tf.Tensor]:
    """Multiply every gradient by the scalar `scale`, or return them as they are for `None`."""
    return list(grads) if scale is None else [scale * g for g in grads]


def local_clip_scale(grads: Sequence[tf.Tensor], clip_norm: float, workers: int) -> tf.Tensor:
    """Factor that clips this worker's whole gradient to norm `clip_norm / sqrt(P)`.

    `min(1, clip_norm P**-0.5 / ||g||)` over all tensors of the model. Independent gradients of P
    workers, each of norm `clip_norm / sqrt(P)`, add up to about `clip_norm`. Clipping comes before
    the residual is accumulated, never after.

    Args:
        grads: This worker's gradients, already divided by the number of workers as Keras does.
        clip_norm: Bound on the norm of the sum over workers.
        workers: P.

    Returns:
        float32 scalar; 1 where the norm is 0. NaN where the norm overflows: the step is then
        skipped and counted, since a factor of 0 would lose the gradient unnoticed.

    Reference:
        Lin et al. (2018), section 3.2.
    """
    norm = tf.linalg.global_norm([tf.cast(g, tf.float32) for g in grads])
    bound = tf.constant(clip_norm * workers**-0.5, tf.float32)
    scale = tf.where(norm > bound, bound / norm, tf.ones_like(norm))
    return tf.where(tf.math.is_inf(norm), tf.constant(float("nan")), scale)
