"""Wrapper of tf_keras (Keras 2) optimizers.

Names of the inner *instance* used here: `aggregate_gradients(grads_and_vars)`, public, sums over
replicas; `_distributed_apply_gradients_fn(strategy, grads_and_vars)`, private, applies the sums;
`_learning_rate`, private, which the `TensorBoard` callback reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from typing_extensions import override

from tf_redsync import requirements
from tf_redsync.keras import (
    conflicts,
    exchange_state,
    loss_scaling,
    models,
)
from tf_redsync.keras.wrapper import Inner, Wrapper, install
from tf_redsync.network import initial_values

try:
    import tf_keras
except ModuleNotFoundError as error:
    raise requirements.no_tf_keras() from error

install(tf_keras)


def inner_from_config(config: Any, *args: Any) -> Any:
    """Return the optimizer of a config in a file.

    Args:
        config: The serialized optimizer.
        *args: The `custom_objects` of Keras.
    """
    try:
        return tf_keras.saving.deserialize_keras_object(config, *args)
    except ValueError:  # `.h5` files lack the module of classes of `tf_keras.optimizers`
        return tf_keras.optimizers.deserialize(config, *args)


@tf_keras.saving.register_keras_serializable(package="tf_redsync", name="DistributedOptimizer")
class TfKerasOptimizer(Wrapper, tf_keras.optimizers.Optimizer):
    """A tf_keras optimizer whose gradients are exchanged by a tf_redsync method.

    `tf_redsync.DistributedOptimizer` creates it and documents the arguments; see `Wrapper` for the
    attributes that it forwards.
    """

    saving = tf_keras.saving
    exchange_state_class = exchange_state.class_of(tf_keras.losses.Loss)
    inner_from_config = staticmethod(inner_from_config)
    set_weights = Inner()
    _learning_rate = Inner()
    compute_gradients = Inner()  # scales losses in a LossScaleOptimizer

    def __init__(
        self, inner_optimizer: Any, method: Any = None, *, name: str | None = None, **options: Any
    ) -> None:
        applies = conflicts.innermost(inner_optimizer)
        conflicts.check_aggregation(applies, type(applies).aggregate_gradients)
        super().__init__(name=name or f"distributed_{applies.name}", jit_compile=False)
        adapter = self.wrap(inner_optimizer, method, options)
        applies.jit_compile = False  # the update shares a function with collectives
        scaled = applies is not inner_optimizer
        aggregate = adapter.aggregate_or_nan if scaled else adapter.aggregate_or_none
        applies.aggregate_gradients = aggregate
        adapter.guard.decay_later(applies)
        applies._distributed_apply_gradients_fn = adapter.guard_update(
            applies._distributed_apply_gradients_fn, result=lambda: applies.iterations
        )

    def adopt_scaler(self, scaler: Any) -> None:
        """Move an outer `LossScaleOptimizer` inside this wrapper.

        This object becomes a `ScaledTfKerasOptimizer`.

        Raises:
            ValueError: one of the two is built.
        """
        loss_scaling.check_new(scaler, self)
        applies = scaler._optimizer = self.inner_optimizer
        applies.aggregate_gradients = self._adapter.aggregate_or_nan
        self.__class__ = ScaledTfKerasOptimizer
        self.rewrap(scaler)

    @override
    def build(self, var_list: Sequence[Any]) -> None:
        """Create the inner optimizer's variables and the exchange's state."""
        trains = models.may_train(var_list)
        with initial_values.own(only_zeros=True):
            self.inner_optimizer.build(var_list)
        if trains:
            self.build_exchange(var_list)

    @override
    def apply_gradients(
        self,
        grads_and_vars: Any,
        name: str | None = None,
        skip_gradients_aggregation: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Exchange the gradients and update the variables; see `tf_keras.optimizers.Optimizer`.

        Raises:
            ValueError: `skip_gradients_aggregation` is `True`.
        """
        if skip_gradients_aggregation or not kwargs.get("experimental_aggregate_gradients", True):
            raise ValueError(
                "`skip_gradients_aggregation=True` would skip the exchange. Apply local gradients; "
                "the wrapper sums them."
            )
        grads_and_vars = list(grads_and_vars)
        variables = [v for _, v in grads_and_vars]
        self.build_if_needed(variables)
        adapter, apply = self._adapter, self.inner_optimizer.apply_gradients
        adapter.guard.begin(variables)
        applied = adapter.run_step(apply, grads_and_vars, finish=False, name=name, **kwargs)
        adapter.guard.end()
        adapter.finish_step()
        return applied

    def aggregate_gradients(self, grads_and_vars: Any) -> None:
        """Raise `ValueError`, because only `apply_gradients` sums gradients."""
        raise ValueError(
            "the DistributedOptimizer must be the outermost optimizer: only `apply_gradients` "
            "sums. `compile` reorders a LossScaleOptimizer; in a custom loop use "
            "DistributedOptimizer(tf_keras.mixed_precision.LossScaleOptimizer(inner))."
        )

    @property
    def variables(self) -> Any:
        """The inner optimizer's variables."""
        return self.inner_optimizer.variables

    def finalize_variable_values(self, var_list: Sequence[Any]) -> None:
        """Synchronize the weights, and let the inner optimizer assign its averages."""
        self.exchange.to_consensus()
        self.inner_optimizer.finalize_variable_values(var_list)


# Attributes of a `LossScaleOptimizer` that custom loops use.
SCALING = [
    name
    for name in vars(tf_keras.mixed_precision.LossScaleOptimizer)
    if name[0] != "_" and name != "inner_optimizer"
]


@tf_keras.saving.register_keras_serializable(
    package="tf_redsync", name="ScaledDistributedOptimizer"
)
class ScaledTfKerasOptimizer(TfKerasOptimizer, tf_keras.mixed_precision.LossScaleOptimizer):
    """A wrapper around a `LossScaleOptimizer`, and a `LossScaleOptimizer` itself.

    Under the dtype policy "mixed_float16" `compile` would otherwise scale the loss twice.
    """

    inner_optimizer = None  # an instance attribute instead of the base class's property
    vars().update({name: Inner() for name in SCALING})
