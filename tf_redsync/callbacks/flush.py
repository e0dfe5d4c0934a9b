"""`Flush`: delivers the residuals at the end of training."""

from __future__ import annotations

from typing import Any

from typing_extensions import override

from tf_redsync.keras import models
from tf_redsync.keras.fit_hook import OfBothKeras, exchange_of
from tf_redsync.step import flushing


class Flush(OfBothKeras):
    """Delivers the workers' residuals at the end of `fit`.

    A sparsifier's residuals hold about 1 / density steps' worth of gradients. One more, dense step
    of each wrapped optimizer of the model applies them; see `optimizer.flush()`. The step follows
    the last epoch with its validation and checkpoints, so evaluate and save after `fit`. With
    `use_ema` the weights are then the averages, which include this step. Omit the callback if
    another `fit` continues the training.

    The residuals of many steps make a large step, which costs accuracy unless the learning rate has
    decayed (docs/momentum.md, "The residual at the end"). Flush if every gradient must be applied,
    not to improve the model, and not with `EarlyStopping(restore_best_weights=True)`: the residuals
    are those of the last step, not of the restored one.

    Pass it to `fit` of Keras 3 or tf_keras on all workers.

    Raises:
        ValueError: when `fit` begins, the optimizer is not a `DistributedOptimizer`, or a method
            exchanges momenta.

    Example:
        >>> import tf_redsync as rs
        >>> callbacks = [rs.callbacks.Flush()]  # model.fit(..., callbacks=callbacks)
    """

    comes_after_saving = True  # see `fit_hook.py`

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Check the optimizers."""
        exchange_of(self)
        for optimizer in models.optimizers_of(self.model):
            flushing.check(optimizer.exchange.policy.methods, "the callback Flush()")

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Flush the residuals of all wrapped optimizers, unless no step was trained."""
        trained = [o for o in models.optimizers_of(self.model) if o.exchange.built]
        for optimizer in trained:
            optimizer.flush()
        # Keras assigns averages before `on_train_end`.
        finalize = getattr(getattr(self.model, "optimizer", None), "finalize_variable_values", None)
        if trained and finalize is not None:
            finalize(self.model.trainable_variables)

    @override
    def _implements_train_batch_hooks(self) -> bool:
        return False
