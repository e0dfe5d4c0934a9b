"""Scaling of Keras 3's losses whose function returns a scalar.

Replicas sum their gradients, so Keras divides the mean of a loss by the number of replicas. If a
loss function returns a scalar, such as `keras.ops.mean((y - p) ** 2)`, Keras does not divide it, so
gradients and logged losses would be multiplied by the number of workers.

Names of Keras used here, of the module that defines `keras.losses.Loss`:
`reduce_values(values, ..., reduction)` and `scale_loss_for_distribution(value)`.
"""

from __future__ import annotations

import sys
from typing import Any

import keras
import tensorflow as tf

from tf_redsync.network import strategies
from tf_redsync.patching import patch_once

_MEANS = ("sum_over_batch_size", "mean", "mean_with_sample_weight")


def install() -> None:
    """Divide scalars by the number of replicas under our strategy; a second call is a no-op."""
    module = sys.modules[keras.losses.Loss.__module__]
    scale = getattr(module, "scale_loss_for_distribution", None)
    if scale is None:  # this version of Keras divides no loss
        return

    def scaling(reduce_values: Any) -> Any:
        def scaled(values: Any, *args: Any, **kwargs: Any) -> Any:
            loss = reduce_values(values, *args, **kwargs)
            reduction = kwargs.get("reduction", args[-1] if args else _MEANS[0])
            if values.shape == () and reduction in _MEANS:
                if strategies.is_redsync_strategy(tf.distribute.get_strategy()):
                    return scale(loss)
            return loss

        return scaled

    patch_once(module, "reduce_values", scaling)
