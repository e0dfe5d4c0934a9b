"""The library's internal callback, and base classes of its public callbacks.

Keras does not notify an optimizer of epochs, evaluations and the end of a training. `install`
patches `CallbackList.set_model` of Keras 3 and tf_keras, which `fit`, `evaluate` and `predict`
call. The patch inserts a `FitHook` before the user's callbacks of every model that trains under our
strategy or with a wrapped optimizer.

Names of Keras used here: `CallbackList.set_model(model)` and its list `callbacks`, both public, and
of tf_keras's models the public `autotune_steps_per_execution`.
"""

from __future__ import annotations

import warnings
import weakref
from typing import Any

import keras
import numpy as np
from typing_extensions import override

from tf_redsync.cluster import agreement
from tf_redsync.errors import DistributedError
from tf_redsync.keras import (
    backups,
    consistency,
    data_amounts,
    exchange_state,
    models,
    slots,
    training_length,
    weight_sync,
)
from tf_redsync.keras.closing import closing_on_error
from tf_redsync.network import strategies
from tf_redsync.patching import patch_once

_models: weakref.WeakSet[Any] = weakref.WeakSet()  # those whose steps `trace_again` finds
_METHODS = ("fit", "evaluate", "predict", "save", "save_weights", "load_weights")


def install(callbacks_module: Any) -> None:
    """Insert a `FitHook` into every `CallbackList` of a family; a second call is a no-op.

    Args:
        callbacks_module: `keras.callbacks` or `tf_keras.callbacks`.
    """
    bar_class = type("_WithoutZeros", (_WithoutZeros, callbacks_module.Callback), {})
    hook_class = type("FitHook", (FitHook, callbacks_module.Callback), {})

    def inserting(set_model: Any) -> Any:
        def with_hook(self: Any, model: Any) -> None:
            concerned = model is not None and concerns(model)
            if concerned and not any(isinstance(c, FitHook) for c in self.callbacks):
                hook = hook_class()
                hook.callbacks, hook.before_bar = self.callbacks, bar_class()
                self.callbacks.insert(0, hook)
                self.callbacks += [c.before_bar for c in self.callbacks if hasattr(c, "before_bar")]
                copies = any(getattr(c, "copies_weights", False) for c in self.callbacks)
                self.callbacks.sort(key=lambda c: _order(c, copies))
            set_model(self, model)

        return with_hook

    patch_once(callbacks_module.CallbackList, "set_model", inserting)


def _order(callback: Any, copies: bool) -> int:
    """Return the sort key of a callback: the hook is first, the progress bar last.

    Args:
        callback: The callback.
        copies: Whether a callback copies the weights in `on_epoch_begin`.
    """
    if isinstance(callback, FitHook):
        return 0
    names = {kind.__name__ for kind in type(callback).__mro__}
    if copies and "SwapEMAWeights" in names and getattr(callback, "swap_on_epoch", False):
        return 1  # it restores the weights in `on_epoch_begin`
    if "ProgbarLogger" in names:
        return 6
    for place, name in ((2, "comes_first"), (4, "comes_last"), (5, "comes_after_saving")):
        if getattr(callback, name, False):
            return place
    return 3


def concerns(model: Any) -> bool:
    """Return whether a model trains with a wrapped optimizer, or under our strategy."""
    strategy = getattr(model, "distribute_strategy", None)
    return strategies.is_redsync_strategy(strategy) or bool(models.exchanges_of(model))


def note_model(model: Any) -> None:
    """Record a model that may train, also by `train_on_batch`, for `trace_again`."""
    _models.add(model)


def trace_again(exchange: Any) -> None:
    """Retrace the train step of models that train with an exchange, also during `fit`."""
    for model in list(_models):
        trains = any(e is exchange for e in models.exchanges_of(model))
        if trains and model.train_function is not None:
            model.make_train_function(force=True)


class ForTfKeras:
    """Mixin with the attributes that tf_keras reads of a callback, without batch hooks."""

    _supports_tf_logs = True

    def __init__(self) -> None:
        super().__init__()
        self.params: dict[str, Any] = {}  # a `CallbackList` of a custom loop may set none

    def _implements_train_batch_hooks(self) -> bool:
        return False

    def _implements_test_batch_hooks(self) -> bool:
        return False

    def _implements_predict_batch_hooks(self) -> bool:
        return False


class OfBothKeras(ForTfKeras, keras.callbacks.Callback):
    """Base of callbacks for Keras 3 and tf_keras with hooks for training batches."""

    @override
    def _implements_train_batch_hooks(self) -> bool:
        return True


def exchange_of(callback: keras.callbacks.Callback) -> Any:
    """Return the exchange of the model's optimizer.

    Raises:
        ValueError: the optimizer is not a `DistributedOptimizer`.
    """
    optimizer = getattr(callback.model, "optimizer", None)  # absent before `compile`
    exchange = getattr(optimizer, "exchange", None)
    if exchange is None:
        raise ValueError(
            f"`{type(callback).__name__}` needs a model that is compiled with a "
            f"tf_redsync.DistributedOptimizer. Received: optimizer={type(optimizer).__name__}."
        )
    return exchange


class _WithoutZeros(ForTfKeras):
    """Callback that removes zero counts from `logs`; the progress bar shows 0 as 0.0000e+00."""

    comes_last = True

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Remove `skipped_steps` if it is 0."""
        if logs is not None and logs.get("skipped_steps") == 0:
            del logs["skipped_steps"]


class FitHook(ForTfKeras):
    """The library's callback, which runs before the user's callbacks on every worker."""

    model: Any
    callbacks: list[Any]  # all callbacks of the `CallbackList`
    before_bar: Any  # a callback that runs just before the progress bar
    _restores = False  # whether a callback of Keras restores a backup
    _fits = False  # whether `fit` runs
    _validation = 0  # the number of its validation, from 1
    _skipped = 0  # steps skipped before this epoch
    _seals: Any = ()  # fingerprints of the weights when an epoch ends
    _to_run: tuple[int, int, float] | None = None  # updates so far, epochs, updates per epoch

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Run before the first step of `fit`."""
        note_model(self.model)  # `compile` may have run before it was patched
        _check_execution(self.model)
        epochs = self.params.get("epochs")
        per = models.steps_per_execution(self.model)
        action = f"begin `fit` of {epochs} epochs with steps_per_execution={per}"
        self._restores = backups.check(self.model, self.callbacks, self._with_step(action))
        consistency.compare_compile(self.model)
        data_amounts.compare(self.model, "fit", self.params)
        self._fits, self._validation = True, 0
        weight_sync.synchronize(self.model)
        for exchange in models.exchanges_of(self.model):
            if exchange.built and exchange.drift is not None:  # one worker may have loaded weights
                exchange.drift.compare_in_next_step()
        self._begin_rows("fit")

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Run before the first step of an epoch."""
        if self._restores:
            self._restores = False
            backups.check_equal(self.model, epoch)
        self._agree(f"begin epoch {epoch + 1}")
        for exchange in models.exchanges_of(self.model):  # after other callbacks have restored
            training_length.begin(self.model, exchange, self.params, epoch)
        exchange = models.exchange_of(self.model)
        if exchange is not None:
            if self._to_run is None:
                so_far = int(exchange.step.numpy()) if exchange.built else 0
                to_run = training_length.ahead(self.model, exchange, self.params, epoch)
                self._to_run = so_far, *to_run
                _warn_of_zero_lora(self.model)
            self._warn_of_length(exchange)
        if exchange is not None and exchange.built:
            begun = self.model.optimizer.iterations
            exchange_state.warn_if_fresh(exchange, begun, "this run has")
        consistency.compare_rate(self.model, f"epoch {epoch + 1} begins")
        self._skipped = models.skipped_steps(self.model)
        strategy = self.model.distribute_strategy
        if hasattr(strategy, "batch_logs"):
            strategy.batch_logs.begin_epoch(self.model)
            strategy.known_batches.begin_epoch()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Run after an epoch and its validation; add `skipped_steps` to `logs`."""
        self._compare_rows("fit", f"end epoch {epoch + 1}")
        weight_sync.synchronize(self.model)
        # Before other callbacks: one that only some workers have may assign averaged weights.
        self._seals = consistency.seals_of(self.model)
        self._interrupt()
        exchange = models.exchange_of(self.model)
        if exchange is not None:
            # At the start of the epoch the exchange may have been unbuilt, or the steps unknown.
            self._warn_of_length(exchange)
        if logs is not None and models.exchanges_of(self.model):
            logs["skipped_steps"] = models.skipped_steps(self.model) - self._skipped

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Run after the last epoch, with the final weights."""
        self._fits, self._validation = False, 0
        self._agree("end `fit`")
        consistency.compare_rate(self.model, "fit ends")
        consistency.compare_seals(self.model, self._seals)
        weight_sync.synchronize(self.model)

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Run before an evaluation, within `fit` or alone."""
        self._agree("evaluate")
        self._validation += self._fits
        data_amounts.compare(self.model, "evaluate", self.params, self._validation)
        weight_sync.synchronize(self.model)
        self._interrupt()
        self._begin_rows("evaluate")

    def on_test_end(self, logs: dict[str, Any] | None = None) -> None:
        """Run after an evaluation, within `fit` or alone, with its results."""
        self._compare_rows("evaluate", "end `evaluate`", logs or {})

    def on_predict_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Run before a prediction."""
        self._agree("predict")
        data_amounts.compare(self.model, "predict", self.params)
        weight_sync.synchronize(self.model)
        self._interrupt()

    def _warn_of_length(self, exchange: Any) -> None:
        """Warn once if the training is too short for its methods.

        If Keras does not know the number of steps per epoch, the first epoch determines it.
        """
        if self._to_run is None or not exchange.built or exchange.length_checked:
            return
        so_far, epochs, steps = self._to_run
        steps = steps or int(exchange.step.numpy()) - so_far
        if epochs < 1 or not steps:  # a `CallbackList` of a custom loop may not know the epochs
            return
        exchange.length_checked = True
        training_length.forget(exchange)
        training_length.warn(exchange, so_far, epochs, steps)

    def _agree(self, action: str) -> None:
        """Check that all workers take the same action at the same step, to prevent deadlocks."""
        agreement.agree(self.model.distribute_strategy, self._with_step(action))

    def _interrupt(self) -> None:
        """Notify the sync schedules of work between two steps, on all workers."""
        for exchange in models.exchanges_of(self.model):
            if exchange.built:
                exchange.schedule.interrupt()

    def _begin_rows(self, method: str) -> None:
        rows = self._rows(method)
        if rows is not None:
            rows.begin()

    def _compare_rows(
        self, method: str, action: str, metrics: dict[str, Any] | None = None
    ) -> None:
        """Agree on an action, and under our strategy compare the rows of the workers' batches."""
        rows = self._rows(method)
        text = "" if rows is None else rows.as_text()
        strategy = self.model.distribute_strategy
        texts = agreement.gather_texts(strategy, self._with_step(action), text)
        if rows is not None:
            rows.compare(texts, metrics)

    def _rows(self, method: str) -> Any:
        """Return the `BatchRows` of our strategy for a method; `None` under another strategy."""
        return getattr(self.model.distribute_strategy, "batch_rows", {}).get(method)

    def _with_step(self, action: str) -> str:
        exchange = models.exchange_of(self.model)
        if exchange is not None and exchange.built:
            action += f" at step {int(exchange.step.numpy())}"
        return action


def _check_execution(model: Any) -> None:
    """Check that each execution of a train step has as many steps on all workers.

    Raises:
        ValueError: a thread of tf_keras tunes the number by the speed of each worker.
    """
    tuned = getattr(model, "autotune_steps_per_execution", False)  # absent in Keras 3
    if tuned and strategies.process_count(model.distribute_strategy) > 1:
        raise ValueError(
            '`steps_per_execution` must be a number with several workers: tf_keras tunes "auto" '
            "by each worker's speed, so workers would run different numbers of steps and deadlock. "
            'Received: steps_per_execution="auto". Pass a number to `compile`, such as '
            "steps_per_execution=10."
        )


def _warn_of_zero_lora(model: Any) -> None:
    """Warn about trainable LoRA factors that are all 0, as Keras's loaders leave them."""
    if not model.built:
        return  # nothing can have been loaded, and a model of tf_keras has no variables yet
    paths = {getattr(v, "path", ""): v for v in model.trainable_variables}
    lora = {p: v for p, v in paths.items() if p.rpartition("/")[2].startswith("lora_")}
    zero = {p for p, v in lora.items() if not np.any(slots.tf_variable(v).numpy())}
    stuck = sorted(p for p in zero if p.endswith("_a") and f"{p[:-1]}b" in zero)
    if stuck:
        warnings.warn(
            "some layers do not learn: both LoRA factors are 0, and so are their gradients. Keras "
            "loads zeros from its files, which have the product in the kernel. Assign random "
            "values to `lora_*_a`, or resume from tf_redsync.callbacks.Checkpoint or "
            f"tf.train.Checkpoint; see docs/saving.md. Layers: {', '.join(stuck[:5])}.",
            stacklevel=2,
        )


def running_method() -> str:
    """Return the name of the running method of a Keras model, such as "fit", or ""."""
    return next((name for name in models.keras_functions() if name in _METHODS), "")


def watch_ends(model_class: Any) -> None:
    """Patch a family's `fit`, `evaluate`, `predict` to handle errors; a second call is a no-op.

    An error closes the library's callbacks, and a `DistributedError` is raised from TensorFlow's
    original error.

    Args:
        model_class: `keras.Model` or `tf_keras.Model`.
    """

    def watching(method: Any) -> Any:
        def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                with closing_on_error(self):
                    return method(self, *args, **kwargs)
            except DistributedError as error:
                if error.original is None:
                    raise
                raise error from error.original
            finally:
                held = getattr(self.distribute_strategy, "known_batches", None)
                if held is not None and method.__name__ == "fit":
                    held.end()

        return watched

    for name in ("fit", "evaluate", "predict"):
        patch_once(model_class, name, watching)
