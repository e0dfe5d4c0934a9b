"""Callbacks for `fit` of Keras 3."""

from __future__ import annotations

import keras


class ConsensusWeights(keras.callbacks.Callback):
    """Evaluates, predicts and saves with the weights that all workers agree on.

    With local steps (`LocalSGD`, `SBC`) and with points of each worker's own (`CDSGD`) the model's
    weights differ from worker to worker during training. This callback brings them together before
    every evaluation or prediction and at the end of every epoch: workers that are in the middle of
    a round of local steps exchange their changes early. `fit` does the same at its end, with or
    without the callback. For other methods, whose weights are always equal, it does nothing.

    Give it to `fit` on all workers, before callbacks that save, as `ModelCheckpoint`. With tf_keras
    call `optimizer.exchange.to_consensus()` in a `LambdaCallback`.

    Example:
        >>> import tf_redsync as rs
        >>> callbacks = [rs.callbacks.ConsensusWeights()]  # model.fit(..., callbacks=callbacks)
    """

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        """Bring the weights together."""
        self._gather()

    def on_test_begin(self, logs: dict | None = None) -> None:
        """Bring the weights together."""
        self._gather()

    def on_predict_begin(self, logs: dict | None = None) -> None:
        """Bring the weights together."""
        self._gather()

    def _gather(self) -> None:
        exchange = getattr(self.model.optimizer, "exchange", None)
        if exchange is None:
            raise ValueError(
                "`ConsensusWeights` needs a model that is compiled with a "
                "tf_redsync.DistributedOptimizer. Received: optimizer="
                f"{type(self.model.optimizer).__name__}."
            )
        exchange.to_consensus()
