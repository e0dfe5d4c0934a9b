"""Adam's update of a worker's own gradient, without momentum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tf_redsync.methods.common.sparsifier import propagate_nonfinite


class AdamUpdate(NamedTuple):
    """Adam's update from a worker's gradient g and a second moment s, whose bias is corrected.

        update = g / (sqrt((1 - weight) s + own weight g^2) + epsilon)
        s <- (1 - weight) s + workers weight g^2

    Attributes:
        weights: Weight of the squared gradient for each tensor, float32 scalars in (0, 1].
        workers: Factor of the squared gradient in the second moment.
        own: Factor of the squared gradient in the update for each tensor, at most `workers`.
        epsilon: epsilon of Adam's paper, above 0.

    Reference:
        Kingma, Ba (2015), "Adam: A Method for Stochastic Optimization", ICLR, algorithm 1.
    """

    weights: Sequence[tf.Tensor]
    workers: float
    own: Sequence[tf.Tensor | float]
    epsilon: float

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of the native op that applies the updates and selects."""
        return {
            "adam": tf.stack([tf.stack(f) for f in self._factors()], axis=1),
            "epsilon": self.epsilon,
            "masking": False,
        }

    def apply(
        self, grads: Sequence[tf.Tensor], moments: Sequence[tf.Tensor]
    ) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """Return the updates and the new moments of float32 gradients.

        Where a square overflows, the update would be 0; an update of the first tensor is NaN then,
        so that the step is skipped.
        """
        updates, new_moments = [], []
        for g, s, keep, gain, own in zip(grads, moments, *self._factors(), strict=True):
            kept, square = keep * s, tf.square(g)
            updates.append(g / (tf.sqrt(kept + own * square) + self.epsilon))
            new_moments.append(kept + gain * square)
        return propagate_nonfinite(updates, new_moments), new_moments

    def _factors(self) -> tuple[list[tf.Tensor], list[tf.Tensor], list[tf.Tensor]]:
        """Return each tensor's factors of s, of g^2 in the new s, and of g^2 in the update."""
        keep = [1.0 - weight for weight in self.weights]
        gain = [self.workers * weight for weight in self.weights]
        own = [factor * weight for factor, weight in zip(self.own, self.weights, strict=True)]
        return keep, gain, own
