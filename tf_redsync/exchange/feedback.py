"""Momentum and clipping of gradients before a compressed exchange, shared by all methods.

Notation: `g` gradient, `u` velocity, `v` residual, `m` momentum, `P` workers.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tf_redsync.ops.wire import opaque


def momentum_step(
    grads: Sequence[tf.Tensor], velocities: Sequence[tf.Tensor], momentum: float, nesterov: bool
) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    """Apply heavy-ball or Nesterov momentum to every tensor.

    Heavy-ball: `u' = m u + g`, contribution `u'`. Nesterov: `u' = m (u + g)`, contribution
    `u' + g`.

    Args:
        grads: float32 gradients.
        velocities: float32, in the shapes of `grads`; not read without momentum.
        momentum: m, in [0, 1).
        nesterov: Whether the momentum is Nesterov's.

    Returns:
        The contributions, which are added to the residual or sent densely, and the new velocities.
        Without momentum: the gradients and the given velocities.

    Reference:
        Lin, Han, Mao, Wang, Dally (2018), "Deep Gradient Compression", section 3.1: momentum
        correction, with the Nesterov form used in RedSync's implementation.
    """
    if momentum == 0.0:
        return list(grads), list(velocities)
    factor = tf.constant(momentum, tf.float32)  # one for all tensors
    if nesterov:
        new = [factor * (u + g) for u, g in zip(velocities, grads, strict=True)]
        return [u + g for u, g in zip(new, grads, strict=True)], new
    new = [factor * u + g for u, g in zip(velocities, grads, strict=True)]
    return list(new), new


def accumulated(
    residuals: Sequence[tf.Tensor],
    grads: Sequence[tf.Tensor],
    velocities: Sequence[tf.Tensor],
    momentum: float,
    nesterov: bool,
) -> list[tf.Tensor]:
    """Return residuals before a selection: `v + u'`; with Nesterov momentum `(v + u') + g`.

    They are equal to the results of `ops.accumulate_and_select` to the last bit.
    """
    if momentum == 0.0:
        return [v + g for v, g in zip(residuals, grads, strict=True)]
    _, new = momentum_step(grads, velocities, momentum, nesterov)
    sums = [v + u for v, u in zip(residuals, new, strict=True)]
    # Grappler would otherwise add the three terms in another order.
    return [opaque(v) + g for v, g in zip(sums, grads, strict=True)] if nesterov else sums


def scaled(grads: Sequence[tf.Tensor], scale: tf.Tensor | None) -> list[tf.Tensor]:
    """Return every gradient times the scalar `scale`; unchanged gradients for `None`."""
    return list(grads) if scale is None else [scale * g for g in grads]


def local_clip_scale(grads: Sequence[tf.Tensor], clip_norm: float, workers: int) -> tf.Tensor:
    """Return the factor that clips this worker's whole gradient to norm `clip_norm / sqrt(P)`.

    `min(1, clip_norm P**-0.5 / ||g||)` over all tensors of the model. The sum of independent
    gradients of P workers, each of norm `clip_norm / sqrt(P)`, has a norm of about `clip_norm`.
    Gradients are clipped before they are added to the residual, never after.

    Args:
        grads: This worker's gradients, float32 or bfloat16, which Keras has divided by the number
            of workers.
        clip_norm: Bound on the L2 norm of the sum over workers.
        workers: P, the number of workers.

    Returns:
        float32 scalar; 1 if the norm is 0. NaN if the norm overflows, so that the step is skipped
        and counted; a factor of 0 would lose the gradient silently.

    Reference:
        Lin et al. (2018), section 3.2.
    """
    norm = tf.linalg.global_norm([tf.cast(g, tf.float32) for g in grads])
    bound = tf.constant(clip_norm * workers**-0.5, tf.float32)
    scale = tf.where(norm > bound, bound / norm, tf.ones_like(norm))
    return tf.where(tf.math.is_inf(norm), tf.constant(float("nan")), scale)
