"""Wrapper of Keras 3 optimizers.

Private names of Keras 3 used here, all on the *instance* of the inner optimizer:
`_all_reduce_sum_gradients(grads_and_vars)` is called after unscaling and clipping and sums over
replicas; `_distributed_tf_update_step(strategy, grads_and_vars, learning_rate)` applies the sums.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf
from typing_extensions import override

from tf_redsync.config import imported_only
from tf_redsync.keras import (
    accumulation,
    conflicts,
    exchange_state,
    loading,
    loss_scaling,
    own_weights,
)
from tf_redsync.keras.delegation import Inner
from tf_redsync.keras.wrapper import Wrapper, install
from tf_redsync.network import collectives
from tf_redsync.ops.sparse import EitherTotal, SparseTotal, descend

install(keras)


@keras.saving.register_keras_serializable(package="tf_redsync", name="DistributedOptimizer")
class Keras3Optimizer(Wrapper, keras.optimizers.Optimizer):
    """A Keras 3 optimizer whose gradients are exchanged by a tf_redsync method.

    Made by `tf_redsync.DistributedOptimizer`, which documents the arguments.

    See `Wrapper` for what it passes on.
    """

    saving = keras.saving
    exchange_state_class = exchange_state.class_of(keras.losses.Loss)
    inner_from_config = staticmethod(
        lambda config, *args, **options: keras.saving.deserialize_keras_object(
            imported_only(config), *args, **options
        )
    )
    set_weights = Inner()

    def __init__(
        self, inner_optimizer: Any, method: Any = None, *, name: str | None = None, **options: Any
    ) -> None:
        super().__init__(learning_rate=0.0, name=name or f"distributed_{inner_optimizer.name}")
        adapter = self.wrap(inner_optimizer, method, options)
        applies = inner_optimizer
        if isinstance(inner_optimizer, keras.optimizers.LossScaleOptimizer):
            applies = inner_optimizer.inner_optimizer
            loss_scaling.agree(inner_optimizer, adapter)
        applies._all_reduce_sum_gradients = adapter.aggregate
        applies._distributed_tf_update_step = adapter.guarded(
            _with_sparse_descent(applies._distributed_tf_update_step)
        )
        adapter.skipping.guard_keras3(applies)
        self._accumulates = conflicts.accumulates(inner_optimizer)
        if self._accumulates:
            accumulation.install(applies, adapter.finish_step)
        self.built: bool = False

    def take_inside(self, scaler: Any) -> None:
        """Put a `LossScaleOptimizer` inside that is around this, unless there is one.

        Raises:
            ValueError: if one of the two is built.
        """
        loss_scaling.check_new(scaler, self)
        if isinstance(self.inner_optimizer, keras.optimizers.LossScaleOptimizer):
            return
        scaler.inner_optimizer = self.inner_optimizer
        loss_scaling.agree(scaler, self._adapter)
        self.rewrap(scaler)

    @override
    def build(self, variables: Sequence[Any]) -> None:
        """Create the inner optimizer's variables and the exchange's state.

        In the strategy's scope. `model.fit` calls it, and otherwise the first step does.
        """
        if self.built or not variables:  # Keras's `.h5` loader builds optimizers with nothing
            return
        trains = loading.may_train(variables)
        if not self.inner_optimizer.built:
            self.inner_optimizer.build(variables)
        if not trains:
            return
        self.build_exchange(
            variables, sparse_totals=_is_plain_sgd(conflicts.innermost(self.inner_optimizer))
        )
        self.built = True

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Exchange the gradients and update the variables; see Keras."""
        if trainable_variables is not None:
            trainable_variables = list(trainable_variables)  # it may be a generator
            if len(grads) and not self.exchange.built:
                self.build_once(trainable_variables)
        if collectives.inside_branch():
            raise _not_outermost()
        apply = self.inner_optimizer.apply
        if not self._accumulates:
            self._adapter.run(apply, grads, trainable_variables)
            return
        before = self.exchange.step.read_value()
        self._adapter.run(apply, grads, trainable_variables, finish=False)
        self.exchange.average_after_updates(before)

    @property
    def variables(self) -> list[Any]:
        """The inner optimizer's variables. The exchange's state is in `exchange`."""
        return self.inner_optimizer.variables

    def scale_loss(self, loss: Any) -> Any:
        """Scale the loss as the inner optimizer does."""
        return self.inner_optimizer.scale_loss(loss)

    def finalize_variable_values(self, var_list: Sequence[Any]) -> None:
        """Go to the consensus; let the inner optimizer write its averages into the variables."""
        self.exchange.to_consensus()
        self.inner_optimizer.finalize_variable_values(var_list)

    def save_own_variables(self, store: Any) -> None:
        """Store the inner optimizer's variables, exactly as it would without the wrapper.

        So a file that was saved with the wrapper loads into the plain optimizer, and back.

        Raises:
            ValueError: while the model's weights are each worker's own.
        """
        own_weights.check_together(self.exchange)
        self.inner_optimizer.save_own_variables(store)

    def load_own_variables(self, store: Any) -> None:
        """Load what `save_own_variables` of this or of the plain optimizer stored."""
        self.inner_optimizer.load_own_variables(store)

    @override
    def __dir__(self) -> list[str]:
        # Keras saves every saveable attribute that `dir` lists. The inner optimizer is saved by
        # `save_own_variables`, under the path where the plain optimizer would be.
        return [name for name in super().__dir__() if name != "inner_optimizer"]


def _not_outermost() -> ValueError:
    return ValueError(
        "tf_redsync's optimizer must be the outermost one: its exchange cannot run inside another "
        "optimizer's branch, where workers may disagree and hang. `compile` brings a "
        "LossScaleOptimizer in order; in a loop of your own wrap the other way round: "
        "DistributedOptimizer(LossScaleOptimizer(inner))."
    )


def _is_plain_sgd(optimizer: Any) -> bool:
    """Whether an update is `w -= learning_rate * g`, so that a zero gradient changes nothing.

    Weight decay, clipping and averages happen outside of the update step.
    """
    return type(optimizer) is keras.optimizers.SGD and not optimizer.momentum


def _with_sparse_descent(update: Callable[..., Any]) -> Any:
    """Let plain SGD's update step take totals in coordinate form in place of gradients."""

    def descend_all(distribution: Any, totals_and_vars: Any, learning_rate: Any) -> None:
        for total, variable in totals_and_vars:
            distribution.extended.update(
                variable,
                lambda v, indices, values: descend(v, SparseTotal(indices, values), learning_rate),
                args=tuple(total),
                group=False,
            )

    def update_all(distribution: Any, grads_and_vars: Any, learning_rate: Any) -> None:
        def those(kind: Any) -> list[Any]:
            return [(g, v) for g, v in grads_and_vars if isinstance(g, kind)]

        dense = [(g, v) for g, v in grads_and_vars if not isinstance(g, (SparseTotal, EitherTotal))]
        if dense:
            update(distribution, dense, learning_rate)
        descend_all(distribution, those(SparseTotal), learning_rate)
        together: dict[int, list[Any]] = {}  # by what says which form they have
        for total, variable in those(EitherTotal):
            here = distribution.experimental_local_results(total.is_dense)[0]
            together.setdefault(id(here), []).append((total, variable))
        for either in together.values():
            update_either(distribution, either, learning_rate)

    def update_either(distribution: Any, either: list[Any], learning_rate: Any) -> None:
        def update_dense() -> None:
            update(distribution, [(t.dense, v) for t, v in either], learning_rate)

        def update_sparse() -> None:
            descend_all(distribution, [(t.coordinates, v) for t, v in either], learning_rate)

        is_dense = either[0][0].is_dense  # the same for all replicas
        here = distribution.experimental_local_results(is_dense)[0]
        tf.cond(here, update_dense, update_sparse)

    return update_all
