"""Wrapper of `tf.keras.optimizers.legacy` optimizers, including TensorFlow Addons.

Private names of the inner *instance* used here: `_aggregate_gradients(grads_and_vars)` sums over
replicas; `_distributed_apply(strategy, grads_and_vars, apply_state, name)` applies the sums;
`_m_cache` is a product of momenta that Nadam multiplies before both. Of
Addons: `_do_use_weight_decay(variable)` looks for a variable in `_decay_var_list`.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from typing_extensions import override

from tf_redsync import requirements
from tf_redsync.keras import (
    conflicts,
    exchange_state,
    loss_scaling,
    models,
    momentum,
    slots,
)
from tf_redsync.keras.tf_keras import SCALING, inner_from_config
from tf_redsync.keras.wrapper import Inner, Wrapper
from tf_redsync.network import initial_values

try:
    import tf_keras
except ModuleNotFoundError as error:
    raise requirements.no_tf_keras() from error

# Legacy optimizers and some of Addons that update only the rows of a sparse gradient. SGD and
# RMSprop do so with momentum.
_OF_ROWS = {"Adamax", "Nadam", "Ftrl", "LazyAdam"}


@tf_keras.saving.register_keras_serializable(
    package="tf_redsync", name="LegacyDistributedOptimizer"
)
class LegacyOptimizer(Wrapper, tf_keras.optimizers.legacy.Optimizer):
    """A legacy Keras optimizer whose gradients are exchanged by a tf_redsync method.

    `tf_redsync.DistributedOptimizer` creates it and documents the arguments; see `Wrapper` for the
    attributes that it forwards.
    """

    saving = tf_keras.saving
    exchange_state_class = exchange_state.class_of(tf_keras.losses.Loss)
    inner_from_config = staticmethod(inner_from_config)
    clipnorm = Inner()
    clipvalue = Inner()
    global_clipnorm = Inner()
    get_slot = Inner()
    # `get_slot_names` is not forwarded: a checkpoint would save the inner optimizer's slots twice.
    _compute_gradients = Inner()  # scales losses in a LossScaleOptimizer
    _HAS_AGGREGATE_GRAD = True

    def __init__(
        self, inner_optimizer: Any, method: Any = None, *, name: str | None = None, **options: Any
    ) -> None:
        applies = conflicts.innermost(inner_optimizer)
        for function in (applies.gradient_aggregator, type(applies)._aggregate_gradients):
            conflicts.check_aggregation(applies, function)
        _decay_listed(applies)
        super().__init__(name=name or f"distributed_{applies._name}")
        access = slots.Access(
            rate=lambda: _rate(applies),
            momenta=self._momentum_slots,
            adam=self._adam_parts,
            slots=lambda variables: self._all_slots(),
        )
        self.wrap(inner_optimizer, method, options, access)
        self._track_trackable(inner_optimizer, "inner_optimizer")
        scaled = applies is not inner_optimizer
        self._applies_totals = applies._distributed_apply
        self._intercept(applies, scaled)

    def _intercept(self, applies: Any, scaled: bool) -> None:
        adapter = self._adapter
        applies._aggregate_gradients = adapter.aggregate_or_nan if scaled else adapter.aggregate
        result = {"result": tf.no_op} if scaled else {}  # like the other branch
        applies._distributed_apply = adapter.guard_update(self._applies_totals, **result)

    def adopt_scaler(self, scaler: Any) -> None:
        """Move an outer `LossScaleOptimizer` inside this wrapper; see `TfKerasOptimizer`.

        This object becomes a `ScaledLegacyOptimizer`.
        """
        loss_scaling.check_new(scaler, self)
        applies = scaler._optimizer = self.inner_optimizer
        self._intercept(applies, scaled=True)
        self.__class__ = ScaledLegacyOptimizer
        self._track_trackable(scaler, "inner_optimizer", overwrite=True)
        scaler._track_trackable(applies, "base_optimizer", overwrite=True)
        self.rewrap(scaler)

    @override
    def build(self, var_list: Sequence[Any]) -> None:
        """Create the inner optimizer's variables and the exchange's state."""
        trains = models.may_train(var_list)
        with initial_values.own(only_zeros=True):
            self.inner_optimizer._create_all_weights(var_list)
        self._built_for = tuple(var_list)
        if not trains:
            return
        self.build_exchange(var_list)
        self._track_trackable(self.exchange, "exchange", overwrite=True)

    @override
    def apply_gradients(
        self,
        grads_and_vars: Any,
        name: str | None = None,
        experimental_aggregate_gradients: bool = True,
    ) -> Any:
        """Exchange the gradients and update the variables; see the legacy `Optimizer` of Keras.

        Raises:
            ValueError: `experimental_aggregate_gradients` is `False`.
        """
        if not experimental_aggregate_gradients:
            raise ValueError(
                "`experimental_aggregate_gradients=False` would skip the exchange. Apply local "
                "gradients; the wrapper sums them. `compile` reorders a LossScaleOptimizer; in a "
                "custom loop use DistributedOptimizer("
                "tf_keras.mixed_precision.LossScaleOptimizer(inner))."
            )
        grads_and_vars = list(grads_and_vars)
        if any(isinstance(grad, tf.IndexedSlices) for grad, _ in grads_and_vars):
            _warn_of_rows(conflicts.innermost(self.inner_optimizer))
        self.build_if_needed([v for _, v in grads_and_vars])
        apply, guard = self.inner_optimizer.apply_gradients, self._adapter.guard
        schedule = getattr(momentum.innermost(self.inner_optimizer), "_m_cache", None)  # of Nadam
        with contextlib.nullcontext() if schedule is None else guard.keeping(schedule):
            applied = self._adapter.run_step(apply, grads_and_vars, name=name)
        # The `MultiOptimizer` of Addons groups the results, and a `tf.function` may return one.
        # Both need a tensor. Automatic control dependencies run the update in any case.
        return tf.convert_to_tensor(self.iterations) if applied is None else applied

    @override
    def refuse(self, name: str, value: Any) -> None:
        super().refuse(name, value)
        if (
            name == "momentum"
            and value
            and (getattr(conflicts.innermost(self.inner_optimizer), "_momentum", True) is False)
        ):
            raise ValueError(
                "`momentum` of a legacy SGD cannot be set if it was created without momentum. "
                f"Create a new SGD with momentum. Received: momentum={value!r}"
            )

    def _momentum_slots(self) -> list[Any]:
        """Return the momentum slot of every variable; empty without momentum."""
        inner = self.inner_optimizer
        names = [n for n in ("momentum", "m") if n in inner.get_slot_names()]
        return [inner.get_slot(v, names[0]) for v in self._built_for] if names else []

    def _adam_parts(self) -> slots.AdamParts:
        """Return the coefficients and slots of the inner optimizer, which must be an Adam."""
        inner = conflicts.innermost(self.inner_optimizer)
        betas = (inner._get_hyper(name, tf.float32) for name in ("beta_1", "beta_2"))
        kinds = ([inner.get_slot(v, name) for v in self._built_for] for name in ("m", "v"))
        return slots.AdamParts(*betas, *kinds)

    def _all_slots(self) -> list[list[Any]]:
        """Return the slots of all variables for each kind of slot of the inner optimizer."""
        inner = self.inner_optimizer
        return [[inner.get_slot(v, n) for v in self._built_for] for n in inner.get_slot_names()]

    @property
    @override
    def name(self) -> str:  # type: ignore[override]
        """Name of the wrapper."""
        return self._name

    @property
    def weights(self) -> Any:
        """The inner optimizer's variables."""
        return self.inner_optimizer.weights

    def variables(self) -> Any:
        """Return the inner optimizer's variables."""
        return self.inner_optimizer.variables()

    def _get_hyper(self, name: str, dtype: Any = None) -> Any:
        return self.inner_optimizer._get_hyper(name, dtype)

    def _set_hyper(self, name: str, value: Any) -> None:
        self.inner_optimizer._set_hyper(name, value)


@tf_keras.saving.register_keras_serializable(
    package="tf_redsync", name="LegacyScaledDistributedOptimizer"
)
class ScaledLegacyOptimizer(LegacyOptimizer, tf_keras.mixed_precision.LossScaleOptimizer):
    """A legacy wrapper around a `LossScaleOptimizer`; see `ScaledTfKerasOptimizer`."""

    inner_optimizer = None
    vars().update({name: Inner() for name in SCALING})


def _warn_of_rows(optimizer: Any) -> None:
    """Warn if an optimizer by itself updates only the rows of a sparse gradient."""
    names = {kind.__name__ for kind in type(optimizer).__mro__}
    if names & _OF_ROWS or getattr(optimizer, "_momentum", False) is True:
        warnings.warn(
            f"{type(optimizer).__name__} updates only the rows of an embedding that were looked "
            "up, but the wrapped optimizer receives dense totals and updates all rows; see "
            "docs/adaptive.md#embeddings.",
            stacklevel=3,
        )


def _decay_listed(optimizer: Any) -> None:
    """Make `exclude_from_weight_decay` of Addons recognize the components of listed variables.

    Addons compares components with distributed variables by identity, and would decay nothing.
    """

    def is_listed(variable: Any) -> bool:
        listed = optimizer._decay_var_list
        return listed is None or slots.key(variable) in [slots.key(r.deref()) for r in listed]

    rule = getattr(type(optimizer), "_do_use_weight_decay", None)
    listing = hasattr(optimizer, "_decay_var_list")  # LAMB has a rule of its own
    if listing and conflicts.defined_in("tensorflow_addons", rule):  # not by a user's subclass
        optimizer._do_use_weight_decay = is_listed


def _rate(optimizer: Any) -> Any:
    """Return the learning rate, also inside wrappers such as Lookahead; 1 for COCOB."""
    while "learning_rate" not in optimizer._hyper and hasattr(optimizer, "_optimizer"):
        optimizer = optimizer._optimizer
    if "learning_rate" not in optimizer._hyper:
        return tf.constant(1.0)
    return optimizer._decayed_lr(tf.float32)
