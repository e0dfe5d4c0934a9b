"""Captured energy: how much of a gradient a first exchange delivers."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tf_redsync.exchange import loopback
from tf_redsync.exchange.layout import make_buckets
from tf_redsync.policy import Assignment

# A step far beyond any warm-up, and a multiple of all small numbers: methods that take turns, or
# search every so many steps, are at the beginning of a round.
STEADY_STEP = 720_720_000
WORKERS = 2


def captured_energy(
    assignments: Sequence[Assignment], grads: Sequence[tf.Tensor | None]
) -> list[float | None]:
    """Return the part of each gradient's energy that a first exchange delivers.

    With g the gradient and d what is delivered of it:

        <g, d>^2 / (|g|^2 |d|^2)

    Of elements that are selected, and of projections, this is |d|^2 / |g|^2, since the rest of the
    gradient is orthogonal to them. It does not depend on a factor, so it also says how well signs
    or rounded values agree with the gradient. Two workers exchange the same gradient in this
    process, without residuals of earlier steps.

    Args:
        assignments: In the model's order.
        grads: Dense float32; `None` for what has none.

    Returns:
        One for each of `assignments`; `None` where there is no gradient, or only zeros.
    """
    found: dict[int, float | None] = {}
    pairs = [(a.spec, a.method) for a in assignments]
    for bucket in make_buckets(pairs, WORKERS):
        specs = bucket.layout.specs
        present = [grads[s.position] for s in specs]
        own = [tf.zeros(s.shape) if g is None else g for s, g in zip(specs, present, strict=True)]
        states = loopback.initial_states(bucket.method, bucket.layout)
        both = [own] * WORKERS
        step = loopback.run_step(bucket.method, bucket.layout, both, states, STEADY_STEP)
        for spec, grad, total in zip(specs, own, step.totals[0], strict=True):
            # What is not finite is not delivered: all workers skip such a step.
            found[spec.position] = _agreement(grad, total) if step.finite else 0.0
    return [found[a.spec.position] for a in assignments]


def _agreement(grad: tf.Tensor, total: tf.Tensor) -> float | None:
    g, d = (tf.reshape(tf.cast(t, tf.float64), [-1]) for t in (grad, total))
    energy, delivered = float(tf.reduce_sum(g * g)), float(tf.reduce_sum(d * d))
    if energy == 0.0:
        return None
    # Not more than 1, whatever rounding says.
    return min(float(tf.reduce_sum(g * d)) ** 2 / (energy * delivered), 1.0) if delivered else 0.0
