"""Wrapper of tf_keras (Keras 2) optimizers.

Names of the inner *instance* used here: `aggregate_gradients(grads_and_vars)`, public, sums over
replicas; `_distributed_apply_gradients_fn(strategy, grads_and_vars)`, private, applies the sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from typing_extensions import override

from tf_redsync import requirements
from tf_redsync.config import imported_only
from tf_redsync.keras import (
    conflicts,
    exchange_state,
    loading,
    loss_scaling,
)
from tf_redsync.keras.delegation import Inner
from tf_redsync.keras.wrapper import Wrapper, install

try:
    import tf_keras
except ModuleNotFoundError as error:
    raise requirements.no_tf_keras() from error

install(tf_keras)


def inner_from_config(config: Any, *args: Any) -> Any:
    """Return the optimizer that a file describes; see `imported_only` for what is refused."""
    imported_only(config)
    try:
        return tf_keras.saving.deserialize_keras_object(config, *args)
    except ValueError:  # `.h5` files name classes of `tf_keras.optimizers` without their module
        return tf_keras.optimizers.deserialize(config, *args)


@tf_keras.saving.register_keras_serializable(package="tf_redsync", name="DistributedOptimizer")
class TfKerasOptimizer(Wrapper, tf_keras.optimizers.Optimizer):
    """A tf_keras optimizer whose gradients are exchanged by a tf_redsync method.

    Made by `tf_redsync.DistributedOptimizer`, which documents the arguments.

    See `Wrapper` for what it passes on.
    """

    saving = tf_keras.saving
    exchange_state_class = exchange_state.class_of(tf_keras.losses.Loss)
    inner_from_config = staticmethod(inner_from_config)
    set_weights = Inner()
    compute_gradients = Inner()  # of scaled losses, in a LossScaleOptimizer

    def __init__(
        self, inner_optimizer: Any, method: Any = None, *, name: str | None = None, **options: Any
    ) -> None:
        applies = conflicts.innermost(inner_optimizer)
        super().__init__(name=name or f"distributed_{applies.name}", jit_compile=False)
        adapter = self.wrap(inner_optimizer, method, options)
        applies.jit_compile = False  # the update shares a function with collectives
        scaled = applies is not inner_optimizer
        applies.aggregate_gradients = adapter.aggregate_or_nan if scaled else adapter.aggregate
        adapter.skipping.decay_later(applies)
        applies._distributed_apply_gradients_fn = adapter.guarded(
            applies._distributed_apply_gradients_fn, otherwise=lambda: applies.iterations
        )

    def take_inside(self, scaler: Any) -> None:
        """Put a `LossScaleOptimizer` inside that is around this.

        This becomes a `ScaledTfKerasOptimizer`.

        Raises:
            ValueError: if one of the two is built.
        """
        loss_scaling.check_new(scaler, self)
        applies = scaler._optimizer = self.inner_optimizer
        applies.aggregate_gradients = self._adapter.aggregate_or_nan
        self.__class__ = ScaledTfKerasOptimizer
        self.rewrap(scaler)

    @override
    def build(self, var_list: Sequence[Any]) -> None:
        """Create the inner optimizer's variables and the exchange's state."""
        trains = loading.may_train(var_list)
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
        """Exchange the gradients and update the variables; see Keras.

        Raises:
            ValueError: for `skip_gradients_aggregation=True`, since aggregation is what the
                wrapper is for.
        """
        if skip_gradients_aggregation or not kwargs.get("experimental_aggregate_gradients", True):
            raise ValueError(
                "`skip_gradients_aggregation=True` would skip the exchange. Apply gradients as "
                "they are; the wrapper sums them."
            )
        grads_and_vars = list(grads_and_vars)
        variables = [v for _, v in grads_and_vars]
        self.build_once(variables)
        adapter, apply = self._adapter, self.inner_optimizer.apply_gradients
        adapter.skipping.begin(variables)
        applied = adapter.run(apply, grads_and_vars, finish=False, name=name, **kwargs)
        adapter.skipping.end()
        adapter.finish_step()
        return applied

    def aggregate_gradients(self, grads_and_vars: Any) -> None:
        """Refuse to sum gradients without applying them.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            "tf_redsync's optimizer must be the outermost one: only `apply_gradients` sums. "
            "`compile` brings a LossScaleOptimizer in order; in a loop of your own wrap the other "
            "way round: DistributedOptimizer(tf_keras.mixed_precision.LossScaleOptimizer(inner))."
        )

    @property
    def variables(self) -> Any:
        """The inner optimizer's variables."""
        return self.inner_optimizer.variables

    def finalize_variable_values(self, var_list: Sequence[Any]) -> None:
        """Go to the consensus; let the inner optimizer write its averages into the variables."""
        self.exchange.to_consensus()
        self.inner_optimizer.finalize_variable_values(var_list)


# What custom loops ask a `LossScaleOptimizer` for.
SCALING = [
    name
    for name in vars(tf_keras.mixed_precision.LossScaleOptimizer)
    if name[0] != "_" and name != "inner_optimizer"
]


@tf_keras.saving.register_keras_serializable(
    package="tf_redsync", name="ScaledDistributedOptimizer"
)
class ScaledTfKerasOptimizer(TfKerasOptimizer, tf_keras.mixed_precision.LossScaleOptimizer):
    """A wrapper around a `LossScaleOptimizer`, which `compile` must take for one.

    Otherwise it would scale the loss once more under the policy "mixed_float16".
    """

    inner_optimizer = None  # each one's own, not that property of the base class
    vars().update({name: Inner() for name in SCALING})
