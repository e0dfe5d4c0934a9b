"""What the callbacks share."""

from __future__ import annotations

from typing import Any

import keras


class OfBothKeras(keras.callbacks.Callback):
    """A callback that tf_keras takes, too: it asks for what follows, besides the hooks."""

    _supports_tf_logs = True

    def _implements_train_batch_hooks(self) -> bool:
        return True

    def _implements_test_batch_hooks(self) -> bool:
        return False

    def _implements_predict_batch_hooks(self) -> bool:
        return False


def exchange_of(callback: keras.callbacks.Callback) -> Any:
    """Return the exchange of the model's optimizer.

    Raises:
        ValueError: for an optimizer without one.
    """
    optimizer = callback.model.optimizer
    exchange = getattr(optimizer, "exchange", None)
    if exchange is None:
        raise ValueError(
            f"`{type(callback).__name__}` needs a model that is compiled with a "
            f"tf_redsync.DistributedOptimizer. Received: optimizer={type(optimizer).__name__}."
        )
    return exchange
