"""`Flush`: what waits is delivered where training ends."""

from __future__ import annotations

from typing import Any

from typing_extensions import override

from tf_redsync.callbacks.common import OfBothKeras, exchange_of


class Flush(OfBothKeras):
    """Delivers, where `fit` ends, what still waits in the workers' residuals.

    A sparsifier's last steps leave some 1 / density steps' worth of gradients in its residuals. One
    more step of the optimizer applies them all, densely; see `optimizer.flush()`. It comes after
    the last epoch with its validation and checkpoints: evaluate and save after `fit`. Leave it out
    of a `fit` that another one goes on from.

    What waited for a thousand steps is a long step, so at a learning rate that has not fallen it
    costs accuracy (docs/momentum.md, "At the end"): flush where every gradient has to be applied,
    not for a better model.

    Give it to `fit` on all workers, of Keras 3 or tf_keras.

    Raises:
        ValueError: in `fit`, for an optimizer that is not a `DistributedOptimizer`.

    Example:
        >>> import tf_redsync as rs
        >>> callbacks = [rs.callbacks.Flush()]  # model.fit(..., callbacks=callbacks)
    """

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Check the optimizer."""
        exchange_of(self)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Flush, unless nothing was trained."""
        optimizer: Any = self.model.optimizer
        if exchange_of(self).built:
            optimizer.flush()

    @override
    def _implements_train_batch_hooks(self) -> bool:
        return False
