"""Adam's update of a worker's own gradient, without momentum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tf_redsync.methods.common.sparsifier import propagate_nonfinite


class AdamUpdate(NamedTuple):
    """Adam's update from a gradient g and its second moment s, whose bias is corrected.

        s <- (1 - weight) s + workers weight g^2
        update = g / (sqrt(s) + epsilon)

    Attributes:
        weights: Weight of the squared gradient for each tensor, float32 scalars in (0, 1].
        workers: Factor of squared gradients.
        epsilon: epsilon of Adam's paper, above 0.

    Reference:
        Kingma, Ba (2015), "Adam: A Method for Stochastic Optimization", ICLR, algorithm 1.
    """

    weights: Sequence[tf.Tensor]
    workers: float
    epsilon: float

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of the native op that applies the updates and selects."""
        return {
            "weights": tf.stack(self.weights),
            "workers": self.workers,
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
        new_moments = [
            (1.0 - weight) * s + (self.workers * weight) * tf.square(g)
            for g, s, weight in zip(grads, moments, self.weights, strict=True)
        ]
        updates = [g / (tf.sqrt(s) + self.epsilon) for g, s in zip(grads, new_moments, strict=True)]
        return propagate_nonfinite(updates, new_moments), new_moments
