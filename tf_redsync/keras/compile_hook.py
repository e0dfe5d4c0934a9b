"""Hook into a model's `compile`: enters the scope, checks arguments, reorders wrappers."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from tf_redsync.exchange.method import Method
from tf_redsync.keras import consistency, fit_hook, loss_scaling, models, slots, weight_sync
from tf_redsync.network import strategies
from tf_redsync.patching import patch_once

_METRICS = ("metrics", "weighted_metrics")  # arguments of `compile`


def install(model_class: Any) -> None:
    """Patch a family's `compile`; a second call is a no-op.

    The patched method runs in the scope of the strategy in which the model was created. Keras 3
    does not enter this scope, and metrics created outside of it would differ between workers. A
    method instead of an optimizer raises `TypeError`, a metric object from outside of the scope
    `ValueError`. With a wrapped optimizer `jit_compile="auto"`, Keras's default, is `False`: Keras
    would choose XLA on a GPU without a strategy. The workers compare the other arguments when `fit`
    begins. While the weights differ between workers, all workers must call `compile`: it
    synchronizes the weights first.

    Args:
        model_class: `keras.Model` or `tf_keras.Model`.
    """

    def compiling(compiled: Any) -> Any:
        signature = inspect.signature(compiled)

        def in_scope(self: Any, *args: Any, **kwargs: Any) -> None:
            optimizer = kwargs["optimizer"] if "optimizer" in kwargs else next(iter(args), None)
            _check(optimizer)
            inside = getattr(optimizer, "inner_optimizer", None)  # of a `LossScaleOptimizer`
            wrapped = models.is_wrapper(optimizer) or models.is_wrapper(inside)
            if wrapped and _jit_is_automatic(signature, args, kwargs):
                kwargs["jit_compile"] = False
            weight_sync.synchronize(self)  # a new optimizer would not know that the weights differ
            with _scope(self):
                compiled(self, *args, **kwargs)
                loss_scaling.move_scaler_inside(self, optimizer)
            arguments = signature.bind(self, *args, **kwargs).arguments
            _check_metrics(self, arguments)
            consistency.note_compile(self, arguments)
            fit_hook.note_model(self)

        return in_scope

    patch_once(model_class, "compile", compiling)


def _jit_is_automatic(
    signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> bool:
    """Return whether a call of `compile`, without `self`, leaves the choice of XLA to Keras 3."""
    names = list(signature.parameters)[1:]
    if "jit_compile" not in names or "jit_compile" in names[: len(args)]:
        return False
    return bool(kwargs.get("jit_compile", signature.parameters["jit_compile"].default) == "auto")


def _scope(model: Any) -> contextlib.AbstractContextManager[Any]:
    strategy = getattr(model, "distribute_strategy", None)
    if strategy is None or strategy is tf.distribute.get_strategy():
        return contextlib.nullcontext()
    scope: contextlib.AbstractContextManager[Any] = strategy.scope()
    return scope


def _check_metrics(model: Any, arguments: Mapping[str, Any]) -> None:
    """Check that metric objects have a variable on each replica, whose values Keras adds up.

    tf_keras checks this itself. Other variables would hold the values of this worker's rows.

    Raises:
        ValueError: a metric was created outside of the scope of the model's strategy.
    """
    strategy = getattr(model, "distribute_strategy", None)
    if not strategies.is_redsync_strategy(strategy) or strategies.process_count(strategy) == 1:
        return
    for metric in tf.nest.flatten([arguments.get(name) for name in _METRICS]):
        for variable in getattr(metric, "variables", ()):
            if not isinstance(slots.tf_variable(variable), tf.distribute.DistributedValues):
                raise ValueError(
                    "`metrics` of `compile` must be created in the scope of the model's strategy; "
                    "otherwise each worker measures only its own rows. Received: "
                    f"{type(metric).__name__} {metric.name!r} from outside. Create it inside of "
                    "`with strategy.scope():`, or pass its name as a string."
                )


def _check(optimizer: Any) -> None:
    is_class = isinstance(optimizer, type) and issubclass(optimizer, Method)
    if is_class or isinstance(optimizer, Method):
        name = optimizer.__name__ if is_class else type(optimizer).__name__
        raise TypeError(
            "`optimizer` of `compile` must be an optimizer. Received: "
            f"optimizer={optimizer!r}, a method. Wrap an optimizer with it: "
            f"optimizer=tf_redsync.DistributedOptimizer(keras.optimizers.SGD(0.1), {name}())."
        )
