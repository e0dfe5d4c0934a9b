"""What the callbacks share."""

from __future__ import annotations

from typing import Any

import keras
from typing_extensions import override

from tf_redsync.keras.fit_hook import ForTfKeras


class OfBothKeras(ForTfKeras, keras.callbacks.Callback):
    """A callback that tf_keras takes, too, with hooks by the batch of training."""

    @override
    def _implements_train_batch_hooks(self) -> bool:
        return True


def exchange_of(callback: keras.callbacks.Callback) -> Any:
    """Return the exchange of the model's optimizer.

    Raises:
        ValueError: for an optimizer without one.
    """
    optimizer = getattr(callback.model, "optimizer", None)  # there is none before `compile`
    exchange = getattr(optimizer, "exchange", None)
    if exchange is None:
        raise ValueError(
            f"`{type(callback).__name__}` needs a model that is compiled with a "
            f"tf_redsync.DistributedOptimizer. Received: optimizer={type(optimizer).__name__}."
        )
    return exchange
