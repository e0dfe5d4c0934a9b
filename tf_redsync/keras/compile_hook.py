"""Hook into a model's `compile`: enters the scope, checks arguments, reorders wrappers."""

from __future__ import annotations

import contextlib
import inspect
from typing import Any

import tensorflow as tf

from tf_redsync.exchange.method import Method
from tf_redsync.keras import consistency, loss_scaling
from tf_redsync.patching import patch_once


def install(model_class: Any) -> None:
    """Patch a family's `compile`; a second call is a no-op.

    The patched method runs in the scope of the strategy in which the model was created. Keras 3
    does not enter this scope, and metrics created outside of it would differ between workers. A
    method instead of an optimizer raises `TypeError`. The workers compare the other arguments when
    `fit` begins.

    Args:
        model_class: `keras.Model` or `tf_keras.Model`.
    """

    def compiling(compiled: Any) -> Any:
        signature = inspect.signature(compiled)

        def in_scope(self: Any, *args: Any, **kwargs: Any) -> None:
            _check(kwargs["optimizer"] if "optimizer" in kwargs else next(iter(args), None))
            with _scope(self):
                compiled(self, *args, **kwargs)
                loss_scaling.move_scaler_inside(self)
            consistency.note_compile(self, signature.bind(self, *args, **kwargs).arguments)

        return in_scope

    patch_once(model_class, "compile", compiling)


def _scope(model: Any) -> contextlib.AbstractContextManager[Any]:
    strategy = getattr(model, "distribute_strategy", None)
    if strategy is None or strategy is tf.distribute.get_strategy():
        return contextlib.nullcontext()
    scope: contextlib.AbstractContextManager[Any] = strategy.scope()
    return scope


def _check(optimizer: Any) -> None:
    is_class = isinstance(optimizer, type) and issubclass(optimizer, Method)
    if is_class or isinstance(optimizer, Method):
        name = optimizer.__name__ if is_class else type(optimizer).__name__
        raise TypeError(
            "`optimizer` of `compile` must be an optimizer. Received: "
            f"optimizer={optimizer!r}, a method. Wrap an optimizer with it: "
            f"optimizer=tf_redsync.DistributedOptimizer(keras.optimizers.SGD(0.1), {name}())."
        )
