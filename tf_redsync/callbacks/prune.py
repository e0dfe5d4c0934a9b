"""`Prune`: prunes weights for `PacTrain`."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
from typing_extensions import override

from tf_redsync import checks
from tf_redsync.keras import pruning
from tf_redsync.keras.fit_hook import OfBothKeras, exchange_of
from tf_redsync.methods.common.sparsifier import kept_elements
from tf_redsync.step import masks


class Prune(OfBothKeras):
    """Prunes the weights that `PacTrain` exchanges, once, and keeps them at 0.

    All workers set the smallest magnitudes of the variables of `PacTrain` (kernels, but not biases
    or norms) and their optimizer slots to 0 before the same step. The weights stay 0 under any
    optimizer, in this and in later calls of `fit`: the masks are part of the exchange's state,
    saved and restored with it. `PacTrain` switches to compact exchanges after its `stable_steps`.

    Pass it to `fit` of Keras 3 or tf_keras on all workers, with the same arguments. In a resumed or
    later `fit` it does nothing if at least `sparsity` of the weights are already pruned. To prune
    gradually, use several callbacks of increasing sparsity. With `at_step=0` it prunes the initial
    weights, for example those of a pretrained model.

    Args:
        sparsity: Fraction of the weights to prune, in (0, 1). It must be at least the sparsity of
            `PacTrain`, and with `scope="model"` so must the sparsity of each variable.
        at_step: Prune before this step, `optimizer.exchange.step`, from 0. With
            `steps_per_execution` above 1, prune before the first execution at or after this step.
        epoch: Prune at the beginning of this epoch, from 0, instead of `at_step`.
        scope: `"layer"` prunes the fraction of each variable, `"model"` of all of them together.

    Raises:
        ValueError: an argument is out of range. In `fit`: the optimizer has no `PacTrain`, or
            `at_step` or `epoch` has passed without pruning.

    Example:
        >>> import tf_redsync as rs
        >>> prune = rs.callbacks.Prune(0.5, at_step=100)  # model.fit(..., callbacks=[prune])
    """

    def __init__(
        self,
        sparsity: float,
        at_step: int | None = None,
        epoch: int | None = None,
        scope: str = "layer",
    ) -> None:
        super().__init__()
        pruning.check(sparsity, scope)
        if (at_step is None) == (epoch is None):
            raise ValueError(
                "exactly one of `at_step` and `epoch` must be given. Received: "
                f"at_step={at_step!r}, epoch={epoch!r}"
            )
        name, value = ("at_step", at_step) if epoch is None else ("epoch", epoch)
        checks.integer(name, value, low=0)
        self.sparsity, self.at_step, self.epoch, self.scope = sparsity, at_step, epoch, scope
        self._done = False

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Announce the masks to the exchange; check that `at_step` has not passed."""
        exchange = exchange_of(self)
        pruning.check_methods(exchange.policy, type(self).__name__)
        exchange.expects_pruning = True
        self._done = False
        if self.at_step is not None and self._step() > self.at_step:
            self._must_be_pruned("at_step", self.at_step, f"step {self._step()}")

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Prune if `epoch` begins."""
        if self.epoch is None or self._done:
            return
        if epoch > self.epoch:
            self._must_be_pruned("epoch", self.epoch, f"epoch {epoch}")
        elif epoch == self.epoch:
            self._prune()

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Prune if `at_step` is reached."""
        if self.at_step is not None and not self._done and self._step() >= self.at_step:
            self._prune()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Warn if `fit` ended before pruning."""
        if not self._done and not self._is_pruned():
            when = f"at_step={self.at_step}" if self.epoch is None else f"epoch={self.epoch}"
            warnings.warn(
                f"`fit` ended before {when}: `Prune` has not pruned, and PacTrain exchanged dense "
                "gradients.",
                stacklevel=2,
            )

    def _step(self) -> int:
        exchange = exchange_of(self)
        return int(exchange.step.numpy()) if exchange.built else 0

    def _must_be_pruned(self, name: str, value: int, now: str) -> None:
        exchange = exchange_of(self)
        if not (exchange.built and masks.any_pruned(exchange)):
            raise ValueError(
                f"`{name}` of `Prune` has passed, but the weights are not pruned: training "
                f"continues with {now}. Pass a later one, or restore the exchange's state with the "
                f"weights (docs/saving.md). Received: {name}={value}"
            )
        self._done = True

    def _is_pruned(self) -> bool:
        """Return whether the masks prune at least `sparsity` of all weights together."""
        exchange = exchange_of(self)
        kept = [m.numpy() for m in masks.variables(exchange).values()] if exchange.built else []
        most = sum(kept_elements(self.sparsity, mask.size) for mask in kept)
        return bool(kept) and sum(map(np.count_nonzero, kept)) <= most

    def _prune(self) -> None:
        self._done = True
        if self._is_pruned():  # another pruning would restart `stable_steps`, or keep more weights
            return
        optimizer: Any = self.model.optimizer
        with self.model.distribute_strategy.scope():
            if not optimizer.exchange.built:  # tf_keras builds it in the first step
                if not self.model.built:
                    raise ValueError(
                        "`Prune` before the first step needs a built model. Call model.build(...). "
                        f"Received: {type(self.model).__name__} without variables."
                    )
                optimizer.build(self.model.trainable_variables)
            optimizer.prune(self.sparsity, self.scope)

    @override
    def _implements_train_batch_hooks(self) -> bool:
        return self.at_step is not None
