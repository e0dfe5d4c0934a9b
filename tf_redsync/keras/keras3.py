"""Wrapper of Keras 3 optimizers.

Private names of Keras 3 used here, all on the *instance* of the inner optimizer:
`_all_reduce_sum_gradients(grads_and_vars)` is called after unscaling and clipping and sums over
replicas; `_distributed_tf_update_step(strategy, grads_and_vars, learning_rate)` applies the sums.
`_update_model_variables_moving_average(variables)` and
`_overwrite_model_variables_with_average_value(variables)` average the weights, in
`_model_variables_moving_average`, which `_get_variable_index(variable)` indexes;
`_trainable_variables` are the optimizer's, and `_u_product` is a product of Nadam's. Gradient
accumulation also uses `_backend_update_step(grads, variables, learning_rate)`,
`_backend_increment_gradient_accumulators(grads, sums)`, `_backend_reset_gradient_accumulators()`,
and `_iterations`, the counter of steps. `_distribution_strategy` is the strategy in whose scope an
optimizer was created, and in which it creates variables. Of `tf.distribute.ReplicaContext`:
`_merge_call(function, args, kwargs)`, the part of `merge_call` for a single replica, which replaces
`merge_call` on the instance in a branch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
from typing_extensions import override

from tf_redsync.exchange.method import Method
from tf_redsync.keras import (
    conflicts,
    exchange_state,
    loss_scaling,
    models,
    slots,
    weight_sync,
)
from tf_redsync.keras.adapter import Adapter, UpdateGuard
from tf_redsync.keras.wrapper import Inner, Wrapper, install, outside_of_replicas
from tf_redsync.network import collectives, initial_values, strategies
from tf_redsync.ops.sparse import EitherTotal, SparseTotal, descend
from tf_redsync.step.branches import carry

install(keras)


@keras.saving.register_keras_serializable(package="tf_redsync", name="DistributedOptimizer")
class Keras3Optimizer(Wrapper, keras.optimizers.Optimizer):
    """A Keras 3 optimizer whose gradients are exchanged by a tf_redsync method.

    `tf_redsync.DistributedOptimizer` creates it and documents the arguments; see `Wrapper` for the
    attributes that it forwards.
    """

    saving = keras.saving
    exchange_state_class = exchange_state.class_of(keras.losses.Loss)
    inner_from_config = staticmethod(keras.saving.deserialize_keras_object)
    set_weights = Inner()

    def __init__(
        self, inner_optimizer: Any, method: Any = None, *, name: str | None = None, **options: Any
    ) -> None:
        super().__init__(learning_rate=0.0, name=name or f"distributed_{inner_optimizer.name}")
        adapter = self.wrap(inner_optimizer, method, options)
        updater = inner_optimizer
        if isinstance(inner_optimizer, keras.optimizers.LossScaleOptimizer):
            updater = inner_optimizer.inner_optimizer
        updater._all_reduce_sum_gradients = adapter.aggregate
        updater._distributed_tf_update_step = adapter.guard_update(
            _with_sparse_descent(updater._distributed_tf_update_step)
        )
        _guard_step(updater, adapter.guard)
        self._window = conflicts.accumulation_steps(inner_optimizer)
        self._run_step = self._accumulate if self._window else adapter.run_step
        if self._window:
            _accumulate_in_branches(updater, adapter)
        if updater is not inner_optimizer:
            loss_scaling.agree(inner_optimizer, adapter, finishes=not self._window)
        self.__dict__["_iterations"] = updater._iterations  # returned by Keras's `apply_gradients`
        if type(inner_optimizer).apply_gradients is not keras.optimizers.Optimizer.apply_gradients:
            self.apply_gradients = self._apply_by_override
        self.built: bool = False

    def adopt_scaler(self, scaler: Any) -> None:
        """Move an outer `LossScaleOptimizer` inside this wrapper, unless the wrapper has one.

        Raises:
            ValueError: one of the two is built.
        """
        loss_scaling.check_new(scaler, self)
        if isinstance(self.inner_optimizer, keras.optimizers.LossScaleOptimizer):
            return
        scaler.inner_optimizer = self.inner_optimizer
        loss_scaling.agree(scaler, self._adapter, finishes=not self._window)
        self.rewrap(scaler)

    @override
    def build(self, variables: Sequence[Any]) -> None:
        """Create the inner optimizer's variables and the exchange's state.

        Call it in the strategy's scope. Otherwise `model.fit` or the first step calls it. Keras's
        `MultiOptimizer` calls it while the first step is traced.

        Args:
            variables: All trainable variables, float32, bfloat16 or float16.

        Raises:
            TypeError: a variable has another dtype.
            ValueError: this worker would train alone, the variables are outside of the scope, or
                `gradient_accumulation_steps` was set after wrapping.
            Disagreement: on all workers, if their models, methods or settings differ.
        """
        if not self.built and variables:  # Keras's `.h5` loader passes no variables
            outside_of_replicas(lambda: self._build(variables))

    def _build(self, variables: Sequence[Any]) -> None:
        steps = conflicts.accumulation_steps(self.inner_optimizer)
        if steps != self._window:
            raise conflicts.late_accumulation(steps)
        trains = models.may_train(variables)
        if not self.inner_optimizer.built:
            _take_into_scope(self.inner_optimizer)
            with initial_values.own(only_zeros=True):
                self.inner_optimizer.build(variables)
        loss_scaling.share_averages(self.inner_optimizer)
        if not trains:
            return
        self.build_exchange(variables, self._accepts_sparse_totals)
        if self.inner_optimizer.loss_scale_factor is not None:
            _accept_slices(self.inner_optimizer)
        self.built = True

    def _accepts_sparse_totals(self, method: Method) -> bool:
        """Return whether plain SGD applies a method's totals.

        Its update leaves elements with a zero total unchanged. Weight decay, clipping and averages
        happen outside of the update step. Momentum does not, unless the method applies it.
        """
        inner = conflicts.innermost(self.inner_optimizer)
        in_exchange = method.traits.momentum_in_exchange > 0.0
        return type(inner) is keras.optimizers.SGD and (in_exchange or not inner.momentum)

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Exchange the gradients and update the variables; see `keras.optimizers.Optimizer`.

        Args:
            grads: This replica's gradients; some may be `None`.
            trainable_variables: Their variables; `None`: those of `build`.

        Raises:
            ValueError: the step is inside a branch of the program or of another optimizer.
        """
        if trainable_variables is not None:
            trainable_variables = list(trainable_variables)  # may be a generator
            if len(grads) and not self.exchange.built:
                self.build_if_needed(trainable_variables)
        if collectives.inside_branch():
            raise _in_branch()
        self._run_step(self.inner_optimizer.apply, grads, trainable_variables)

    def _accumulate(self, apply: Callable[..., Any], *args: Any) -> None:
        """Run a step of an optimizer that updates only in some steps."""
        before = self.exchange.before_accumulation()
        self._adapter.run_step(apply, *args, finish=False)
        self.exchange.after_accumulation(before)

    def _apply_by_override(self, grads_and_vars: Any) -> Any:
        """Run a step by the `apply_gradients` of a user's class, which may change gradients."""
        pairs = list(grads_and_vars)
        self.build_if_needed([variable for _, variable in pairs])
        if collectives.inside_branch():
            raise _in_branch()
        self._run_step(self.inner_optimizer.apply_gradients, pairs)
        return self._iterations

    @property
    def variables(self) -> list[Any]:
        """The inner optimizer's variables, without the exchange's state."""
        return self.inner_optimizer.variables

    def scale_loss(self, loss: Any) -> Any:
        """Return the loss, scaled by the inner optimizer."""
        return self.inner_optimizer.scale_loss(loss)

    def finalize_variable_values(self, var_list: Sequence[Any]) -> None:
        """Synchronize the weights, and let the inner optimizer assign its averages."""
        self.exchange.to_consensus()
        self.inner_optimizer.finalize_variable_values(var_list)

    def save_own_variables(self, store: Any) -> None:
        """Store the inner optimizer's variables, like the plain optimizer.

        A file that was saved with the wrapper therefore loads into the plain optimizer, and vice
        versa.

        Raises:
            ValueError: the workers' weights differ at present.
        """
        weight_sync.check_synchronized(self.exchange)
        self.inner_optimizer.save_own_variables(store)

    def load_own_variables(self, store: Any) -> None:
        """Load variables that `save_own_variables` of this or the plain optimizer stored."""
        self.inner_optimizer.load_own_variables(store)

    @override
    def __dir__(self) -> list[str]:
        # Keras saves every saveable attribute that `dir` lists. The inner optimizer is saved by
        # `save_own_variables`, under the path where the plain optimizer would be.
        return [name for name in super().__dir__() if name != "inner_optimizer"]


def _take_into_scope(optimizer: Any) -> None:
    """Set the strategy in which an optimizer creates its variables to the current one.

    With several replicas in a process this is a no-op, so that the build fails: every replica would
    count the iterations.
    """
    strategy = tf.distribute.get_strategy()
    if tf.distribute.has_strategy() and strategies.local_replicas(strategy) == 1:
        for part in (optimizer, conflicts.innermost(optimizer)):
            part._distribution_strategy = strategy


def _in_branch() -> ValueError:
    return ValueError(
        "a DistributedOptimizer cannot run inside a branch (`tf.cond`, or `if` on a tensor), where "
        "workers may disagree and deadlock. In a `tf.function` AutoGraph also makes branches of "
        "`for batch in iterator` and of what follows a `break`: iterate over the distributed "
        "dataset itself, and decide outside of the `tf.function`. To update in every n-th step, "
        "pass `gradient_accumulation_steps` to the inner optimizer. The branch may also be that of "
        "another optimizer: `compile` reorders a LossScaleOptimizer; in a custom loop use "
        "DistributedOptimizer(LossScaleOptimizer(inner)). A MultiOptimizer needs "
        "`loss_scale_factor` and compile(..., auto_scale_loss=False) instead."
    )


def _with_sparse_descent(update: Callable[..., Any]) -> Any:
    """Wrap an update step so that plain SGD's accepts sparse totals."""

    def update_all(distribution: Any, grads_and_vars: Any, learning_rate: Any) -> None:
        either = [(g, v) for g, v in grads_and_vars if isinstance(g, EitherTotal)]
        others = [(g, v) for g, v in grads_and_vars if not isinstance(g, EitherTotal)]
        if not either and not any(isinstance(g, SparseTotal) for g, _ in others):
            update(distribution, others, learning_rate)
            return
        # Read once. The rate of a schedule has one value per replica, all equal.
        rate = tf.cast(distribution.experimental_local_results(learning_rate)[0], tf.float32)
        _descend_all(distribution, others, rate)
        together: dict[int, tuple[tf.Tensor, list[Any]]] = {}  # `is_dense` and its pairs
        for total, variable in either:
            flag = distribution.experimental_local_results(total.is_dense)[0]  # equal on all
            together.setdefault(id(flag), (flag, []))[1].append((total, variable))
        for flag, pairs in together.values():
            _descend_either(distribution, flag, pairs, rate)

    return update_all


def _descend_either(
    distribution: Any, is_dense: tf.Tensor, totals_and_vars: list[Any], rate: tf.Tensor
) -> None:
    """Update variables by `EitherTotal`s of one predicate."""
    variables = [variable for _, variable in totals_and_vars]
    dense = carry([total.dense for total, _ in totals_and_vars])
    sparse = carry([total.sparse for total, _ in totals_and_vars])
    tf.cond(
        is_dense,
        lambda: _descend_all(distribution, zip(dense(), variables, strict=True), rate),
        lambda: _descend_all(distribution, zip(sparse(), variables, strict=True), rate),
    )


def _descend_all(distribution: Any, totals_and_vars: Iterable[Any], rate: tf.Tensor) -> None:
    """Update variables by totals, dense or sparse."""
    for total, variable in totals_and_vars:
        distribution.extended.update(
            variable, lambda v, total: descend(v, total, rate), args=(total,), group=False
        )


def _accumulate_in_branches(inner: Any, adapter: Adapter) -> None:
    """Move the exchange of an optimizer that accumulates gradients into its update branch.

    One branch of a Keras 3 conditional applies and clears the sums, the other adds to them. Its
    predicate is the step number, which is equal on all workers. TensorFlow forbids merge calls in
    a branch, but Keras makes one for every assignment. A process with one replica needs none.

    `flush()` has no sums to update with. Its step leaves them and counts as a whole window, so that
    the windows stay the same.

    Args:
        inner: The optimizer that applies the sums over workers.
        adapter: The wrapper's adapter, whose steps end after an update.
    """
    apply, step = inner.apply, inner._backend_update_step
    window = inner.gradient_accumulation_steps

    def apply_or_flush(grads: Any, trainable_variables: Any = None) -> None:
        flushes = adapter.exchange.replacement is not None
        inner.gradient_accumulation_steps = None if flushes else window
        try:
            apply(grads, trainable_variables)
        finally:
            inner.gradient_accumulation_steps = window
        if flushes:
            inner._iterations.assign_add(window - 1)

    def update(*args: Any) -> None:
        step(*args)  # of the optimizer's class, which may override Keras's
        with _at_next_update(inner, window):
            adapter.finish_step()

    inner.apply = apply_or_flush
    inner._backend_update_step = update
    for name in (
        "_backend_update_step",
        "_backend_increment_gradient_accumulators",
        "_backend_reset_gradient_accumulators",
    ):
        setattr(inner, name, _merging_in_branches(getattr(inner, name)))


@contextlib.contextmanager
def _at_next_update(inner: Any, window: int) -> Iterator[None]:
    """Context in which a schedule returns the learning rate of the update after this one.

    Keras advances the counter after the update's branch, and by 1 in each step of a window.
    """
    counter = inner._iterations
    vars(inner)["_iterations"] = counter + window
    try:
        yield
    finally:
        vars(inner)["_iterations"] = counter


def _merging_in_branches(function: Callable[..., None]) -> Callable[..., None]:
    """Wrap a function so that its merge calls work in a branch, if the process has one replica.

    Without a strategy they work anyway, and all threads share the replica context.
    """

    def call(*args: Any) -> None:
        replica: Any = tf.distribute.get_replica_context()
        outer = vars(replica).get("merge_call")
        if outer is not None or not tf.distribute.has_strategy():
            return function(*args)

        def merge_call(merged: Any, args: Any = (), kwargs: Any = None) -> Any:
            return tf.distribute.ReplicaContext._merge_call(replica, merged, args, kwargs or {})

        replica.merge_call = merge_call
        try:
            return function(*args)
        finally:
            del replica.merge_call

    return call


def _guard_step(inner: Any, guard: UpdateGuard) -> None:
    """Guard the functions that an optimizer of Keras 3 calls before and after its update.

    With gradient accumulation not every step has an update. Averages of the weights, constraints
    and the step counter are then not guarded.
    """
    guard.decay_later(inner)
    apply = inner.apply
    accumulates = getattr(inner, "gradient_accumulation_steps", None)

    def apply_guarded(grads: Any, trainable_variables: Any = None) -> None:
        omitted = trainable_variables is None
        trained = inner._trainable_variables if omitted else trainable_variables
        guard.begin(() if accumulates else trained)
        guard.applying += 1
        try:
            apply(grads, trainable_variables)
        finally:
            guard.applying -= 1
        guard.end()
        if guard.finite is not None and not accumulates:
            inner.iterations.assign_sub(tf.cast(~guard.finite, inner.iterations.dtype))

    inner.apply = apply_guarded
    if isinstance(inner, keras.optimizers.Nadam):
        _keep_schedule(inner, guard)
    inner._overwrite_model_variables_with_average_value = _overwriting(inner)
    if not accumulates:
        for name in (
            "_update_model_variables_moving_average",
            "_overwrite_model_variables_with_average_value",
        ):
            setattr(inner, name, guard.only_if_finite(getattr(inner, name)))


def _keep_schedule(inner: Any, guard: UpdateGuard) -> None:
    """Keep Nadam's product of momenta in skipped steps: Keras multiplies it before the exchange."""
    step = inner._backend_update_step

    def update(*args: Any) -> None:
        with guard.keeping(inner._u_product):
            step(*args)

    inner._backend_update_step = update


def _overwriting(inner: Any) -> Callable[..., None]:
    """Return a function that overwrites weights by their averages, also in a branch.

    With `ema_overwrite_frequency` Keras 3 overwrites them in a branch, where TensorFlow forbids the
    merge call of Keras's function. That function also pairs weights and averages by position, which
    is wrong if layers were frozen after `build`. Averages are equal on all replicas, so each can
    assign its own.
    """

    def overwrite(variables: Sequence[Any]) -> None:
        averages = inner._model_variables_moving_average
        pairs = [(v, averages[inner._get_variable_index(v)]) for v in variables]
        pairs = [tuple(map(slots.tf_variable, pair)) for pair in pairs if pair[1] is not None]
        local = tf.distribute.get_strategy().experimental_local_results
        alone = all(len(local(variable)) == 1 for variable, _ in pairs)
        across = tf.distribute.in_cross_replica_context() or not alone
        for variable, average in pairs:
            if across:
                update = inner._distribution_strategy.extended.update
                update(variable, assign, args=(average,), group=False)
            else:
                assign(local(variable)[0], local(average)[0])

    def assign(variable: tf.Variable, average: tf.Variable) -> None:
        variable.assign(tf.cast(average, variable.dtype))

    return overwrite


def _accept_slices(inner: Any) -> None:
    """Make an optimizer with `loss_scale_factor` accept `IndexedSlices`, which Keras cannot divide.

    Rows that occur more than once are summed in float32. The sums have the variable's dtype.
    """
    apply = inner.apply

    def dense(grad: Any, variable: Any) -> Any:
        if not isinstance(grad, tf.IndexedSlices):
            return grad
        values, shape = tf.cast(grad.values, tf.float32), tf.constant(list(variable.shape))
        total = tf.convert_to_tensor(tf.IndexedSlices(values, grad.indices, shape))
        return tf.cast(total, variable.dtype)

    def apply_dense(grads: Any, trainable_variables: Any = None) -> None:
        omitted = trainable_variables is None
        variables = inner._trainable_variables if omitted else trainable_variables
        apply([dense(g, v) for g, v in zip(grads, variables, strict=True)], trainable_variables)

    inner.apply = apply_dense
