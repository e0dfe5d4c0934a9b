"""`Prune`, and a callback that is not needed any more."""

from __future__ import annotations

import warnings
from typing import Any

import keras
from typing_extensions import override

from tf_redsync import checks
from tf_redsync.callbacks.common import OfBothKeras, exchange_of
from tf_redsync.keras import pruning
from tf_redsync.keras.fit_hook import ForTfKeras
from tf_redsync.step import masks


class ConsensusWeights(ForTfKeras, keras.callbacks.Callback):
    """Deprecated, without effect: `fit`, `evaluate` and `predict` do this by themselves.

    With local steps (`LocalSGD`, `SBC`) and with points of each worker's own (`CDSGD`) the model's
    weights differ from worker to worker between two exchanges. They are brought together before
    every evaluation and prediction, at the end of every epoch, before all callbacks, and before
    the model saves; this callback, which did so once, remains for programs that name it.

    Example:
        >>> import tf_redsync as rs
        >>> callbacks = [rs.callbacks.ConsensusWeights()]  # the same as []
    """


class Prune(OfBothKeras):
    """Prunes the weights that `PacTrain` exchanges, once, and keeps them at 0 from then on.

    The smallest magnitudes of the variables that `PacTrain` serves, kernels but not biases or
    norms, are set to 0 on all workers before the same step, and the optimizer's slots with them.
    From then on they stay 0 under any optimizer, in this and in later calls of `fit`: the masks are
    part of the exchange's state, saved and restored with it. `PacTrain` switches to compact
    exchanges after its `stable_steps`.

    Give it to `fit` on all workers, of Keras 3 or tf_keras, with the same arguments also to a `fit`
    that goes on from a checkpoint: if the weights are pruned already, it does nothing. To prune in
    portions use one callback for each, of rising sparsity. Before step 0 it takes the weights as
    they are, for example those of a model that was trained or pruned elsewhere.

    Args:
        sparsity: Fraction of the weights that is pruned, in (0, 1). That of `PacTrain` must not be
            larger, nor may it in any single variable with `scope="model"`.
        at_step: Prune before the step of this number, `optimizer.exchange.step`, from 0. With
            `steps_per_execution` above 1, before the first execution that starts there or later.
        epoch: Instead of `at_step`: prune when this epoch begins, from 0.
        scope: `"layer"`: that fraction of each variable; `"model"`: of all of them together.

    Raises:
        ValueError: for bad arguments; in `fit`, for an optimizer without `PacTrain`, or for
            `at_step` or `epoch` in the past while nothing is pruned.

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
                "`at_step` or `epoch` must be given, and not both. Received: "
                f"at_step={at_step!r}, epoch={epoch!r}"
            )
        name, value = ("at_step", at_step) if epoch is None else ("epoch", epoch)
        checks.integer(name, value, low=0)
        self.sparsity, self.at_step, self.epoch, self.scope = sparsity, at_step, epoch, scope
        self._done = False

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Announce the masks to the exchange; check that it is not too late."""
        exchange = exchange_of(self)
        pruning.check_methods(exchange.policy, type(self).__name__)
        exchange.awaited = True
        self._done = False
        if self.at_step is not None and self._step() > self.at_step:
            self._must_be_pruned("at_step", self.at_step, f"step {self._step()}")

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Prune if it is time."""
        if self.epoch is None or self._done:
            return
        if epoch > self.epoch:
            self._must_be_pruned("epoch", self.epoch, f"epoch {epoch}")
        elif epoch == self.epoch:
            self._prune()

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Prune if it is time."""
        if self.at_step is not None and not self._done and self._step() >= self.at_step:
            self._prune()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Warn if it was never time."""
        if not self._done:
            when = f"at_step={self.at_step}" if self.epoch is None else f"epoch={self.epoch}"
            warnings.warn(
                f"`fit` ended before {when}, so `Prune` has not pruned, and PacTrain has exchanged "
                "densely.",
                stacklevel=2,
            )

    def _step(self) -> int:
        exchange = exchange_of(self)
        return int(exchange.step.numpy()) if exchange.built else 0

    def _must_be_pruned(self, name: str, value: int, now: str) -> None:
        exchange = exchange_of(self)
        if not (exchange.built and masks.any_pruned(exchange)):
            raise ValueError(
                f"`{name}` of `Prune` is in the past, and nothing is pruned: training goes on with "
                f"{now}. Received: {name}={value}. Give a later one, or restore the exchange's "
                "state with the weights (docs/saving.md)."
            )
        self._done = True

    def _prune(self) -> None:
        optimizer: Any = self.model.optimizer
        with self.model.distribute_strategy.scope():
            if not optimizer.exchange.built:  # tf_keras builds it in the first step
                if not self.model.built:
                    raise ValueError(
                        "`Prune` before the first step needs a model that is built. Received: "
                        f"{type(self.model).__name__} without variables. Call model.build(...)."
                    )
                optimizer.build(self.model.trainable_variables)
            optimizer.prune(self.sparsity, self.scope)
        self._done = True

    @override
    def _implements_train_batch_hooks(self) -> bool:
        return self.at_step is not None
