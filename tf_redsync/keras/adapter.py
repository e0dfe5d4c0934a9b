"""The adapter of all wrappers, which replaces the all-reduce and guards the update.

Optimizers of every family have a method that sums gradients over replicas and one that applies the
sums. A wrapper replaces the first by `Adapter.aggregate` and guards the second by
`Adapter.guard_update`.

A skipped step changes only counters. Keras decays weights before the exchange, when finiteness is
not known yet, and applies constraints and averages after it. `UpdateGuard` guards these operations.
It uses a private name of Keras 3 and tf_keras on the *instance* of the inner optimizer:
`_apply_weight_decay(variables)`.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import tensorflow as tf

from tf_redsync import checks
from tf_redsync.auto import Auto
from tf_redsync.config import from_config
from tf_redsync.exchange.capabilities import AdamMoments, capability
from tf_redsync.exchange.method import Method
from tf_redsync.keras import (
    accuracy,
    conflicts,
    consistency,
    momentum,
    pruning,
    slots,
    training_length,
    weight_sync,
)
from tf_redsync.network import strategies
from tf_redsync.policy import Policy
from tf_redsync.state.saveable_exchange import SaveableExchange
from tf_redsync.step import flushing, masks
from tf_redsync.step.branches import carry
from tf_redsync.step.builder import ExchangeBuilder
from tf_redsync.step.drift import DEFAULT_EVERY
from tf_redsync.step.gradient_exchange import GradientExchange
from tf_redsync.step.local_steps import LocalSteps


class Adapter:
    """Adapter between one optimizer and its exchange.

    Args:
        inner: The wrapped optimizer.
        method: A method, a `Policy`, `Auto`, a config of one of them, or `None` for `Auto()`.
        saving: The `saving` module of the optimizer's family.
        access: Access to the optimizer's state; `None`: that of Keras 3 and tf_keras.
        check_every: See `DistributedOptimizer`.
        on_drift: See `DistributedOptimizer`.
        **options: Keyword arguments of `ExchangeBuilder`.

    Attributes:
        policy: The user's policy.
        access: As given.
        exchange: The `GradientExchange`; before `build` an `ExchangeBuilder`.
        guard: The `UpdateGuard` of the optimizer.

    Raises:
        ValueError: the optimizer cannot be wrapped, or does not suit the method.
    """

    def __init__(
        self,
        inner: Any,
        method: Method | Policy | Auto | dict[str, Any] | None,
        saving: ModuleType,
        access: slots.Access | None = None,
        check_every: int | None = DEFAULT_EVERY,
        on_drift: str = "error",
        **options: Any,
    ) -> None:
        self.policy = as_policy(method)
        options["warm_up"] = conflicts.warm_up(self.policy, options.get("warm_up"))
        conflicts.check_single(inner)
        _check_unwrapped(inner)
        self._inner, self._saving = inner, saving
        self.access = slots.Access.of(inner) if access is None else access
        self._told: set[str] = set()  # warnings that were issued
        # The warning points to the caller of `DistributedOptimizer`.
        suited = self._suited(stacklevel=9)
        self.exchange: GradientExchange | ExchangeBuilder = ExchangeBuilder(
            suited, rate=self.access.rate, kind=SaveableExchange, **options
        )
        self.exchanges_in_branch = False  # whether the inner optimizer calls `finish_in_branch`
        self._finishes_in_branch = False
        self._running = 0  # concurrent steps of this wrapper, one per replica
        self.guard = UpdateGuard()
        self._check_every, self._on_drift = check_every or 0, on_drift
        self._drift: Callable[[], None] | None = None  # compares weights when due
        self._adam: slots.AdamSlots | None = None
        self._positions: dict[int, int] = {}  # by the id of a variable, of Keras or TensorFlow
        self._positions_of_parts: dict[Any, int] = {}  # by `slots.key`
        self._variables: tuple[tf.Variable, ...] = ()
        self._family_variables: tuple[Any, ...] = ()  # the family's variables, in the same order

    def _suited(self, stacklevel: int) -> Policy | Auto:
        def warn(text: str) -> None:
            if text not in self._told:
                self._told.add(text)
                warnings.warn(text, accuracy.AccuracyWarning, stacklevel=stacklevel)

        return accuracy.suited(self._inner, self.policy, warn)

    def rewrap(self, inner: Any) -> None:
        """Replace the inner optimizer by one that contains it."""
        self._inner = inner

    def check_inner(self) -> None:
        """Check the inner optimizer again after one of its hyper-parameters was set.

        Raises:
            ValueError: the optimizer no longer suits the method.
        """
        self.exchange.policy = self._suited(stacklevel=6)

    def run_step(
        self, apply: Callable[..., Any], *args: Any, finish: bool = True, **kwargs: Any
    ) -> Any:
        """Run a step of the inner optimizer, in a replica context.

        During the step the inner optimizer may call `aggregate`, also from another thread, in which
        `LossScaleOptimizer` merges replicas.

        Args:
            apply: The inner optimizer's function, such as `apply_gradients`.
            *args: Positional arguments of `apply`.
            finish: Whether to call `finish_step` after `apply`.
            **kwargs: Keyword arguments of `apply`.

        Returns:
            The result of `apply`.
        """
        self._running += 1
        try:
            applied = apply(*args, **kwargs)
        finally:
            self._running -= 1
        if finish:
            self.finish_step()
        return applied

    def build(
        self, variables: Sequence[Any], sparse_totals: Callable[[Method], bool] | None = None
    ) -> None:
        """Build the exchange of `variables` if it is not built; see `ExchangeBuilder.build`."""
        if not isinstance(self.exchange, ExchangeBuilder):
            return
        conflicts.check_overwritten(variables, tf.distribute.get_strategy())
        tensors = [slots.tf_variable(v) for v in variables]
        described = consistency.describe(self._inner, self._saving)
        described |= {"check_every": self._check_every, "on_drift": self._on_drift}
        exchange = self.exchange.build(variables, sparse_totals, tensors, described)
        conflicts.check_accumulation(self._inner, exchange)
        self.exchange = exchange
        self._finishes_in_branch = self.exchanges_in_branch and not exchange.schedule.skips_locally
        weight_sync.register(exchange)
        training_length.watch(exchange)
        self._variables, self._family_variables = tuple(tensors), tuple(variables)
        for position, forms in enumerate(zip(tensors, variables, strict=True)):
            self._positions |= {id(form): position for form in forms}
            self._positions_of_parts[slots.key(tensors[position])] = position
        slots.keep_second_moments_positive(self._inner)
        if exchange.workers > 1 and any(
            capability(b.method, AdamMoments) for b in exchange.schedule.buckets
        ):
            self._adam = slots.AdamSlots(self._inner, self.access.adam, exchange)
        if isinstance(exchange.schedule, LocalSteps):
            self._attach(exchange)
        exchange.drift = drift = consistency.drift_of(
            exchange,
            self._inner,
            self._variables,
            self.access.rate,
            self._check_every,
            self._on_drift,
        )
        if drift is not None:
            self._drift = self._after_averages(
                lambda: exchange.worker.with_sums(lambda _: drift.step(), [])
            )

    def _attach(self, exchange: GradientExchange) -> None:
        """Give local steps access to the optimizer's variables."""
        local = tf.distribute.get_strategy().experimental_local_results
        momenta = [slots.tf_variable(m) for m in self.access.momenta()]
        # With gradient accumulation the optimizer's counter includes skipped steps.
        counts = not conflicts.accumulates(self._inner)
        exchange.attach_optimizer(
            slots.all_variables(self._inner),
            {i: local(m)[0] for i, m in enumerate(momenta) if m is not None},
            local(slots.tf_variable(self._inner.iterations))[0] if counts else None,
        )

    def prune(self, sparsity: float, scope: str = "layer") -> None:
        """Prune the smallest weights; see `Wrapper.prune`."""
        slots_of_all = self.access.slots(self._variables)
        pruning.prune(self.exchange, self._variables, slots_of_all, sparsity, scope)

    def flush(self, apply_gradients: Callable[..., Any]) -> None:
        """Deliver the residuals; see `Wrapper.flush`."""
        if isinstance(self.exchange, ExchangeBuilder):
            raise RuntimeError(
                "`flush` must follow training: there are no residuals before the first step."
            )

        def apply(positions: Sequence[int]) -> None:
            served = [self._family_variables[i] for i in positions]
            apply_gradients([(tf.zeros(v.shape, v.dtype), v) for v in served])

        frozen = [
            i
            for i, v in enumerate(self._family_variables)
            if not isinstance(v, tf.Variable) and not v.trainable
        ]
        flushing.flush(self.exchange, apply, frozen)
        training_length.forget(self.exchange)  # all gradients are delivered

    @staticmethod
    def _after_averages(check: Callable[[], None]) -> Callable[[], None]:
        """Return a function that schedules `check` after our strategy averages statistics.

        Under another strategy, return `check`.
        """
        strategy: Any = tf.distribute.get_strategy()
        if not strategies.is_redsync_strategy(strategy):
            return check
        return lambda: strategy.comparisons.update({check: check})

    def finish_step(self) -> None:
        """End a step after the optimizer's update, in a replica context.

        Raises:
            ValueError: the optimizer has not called `aggregate`.
        """
        if self._variables and not self.exchange.called:
            raise conflicts.bypasses_exchange(self._inner)
        if self.exchange.consensus is not None and not self._finishes_in_branch:
            self.exchange.set_own_weights()
        if self._drift is not None:
            self._drift()

    def finish_in_branch(self) -> None:
        """End a step in the branch of its exchange, if each worker has a point of its own.

        The point depends on the gradients, which are not accessible outside of the branch.
        """
        if self.exchange.consensus is not None and self._finishes_in_branch:
            self.exchange.set_own_weights()

    def aggregate(self, grads_and_vars: Any) -> list[tuple[tf.Tensor, Any]]:
        """Return `(sum over workers, variable)` for every `(gradient, variable)`.

        Pairs whose gradient is `None` are omitted. Totals have the shapes and dtypes of the
        variables. With `sparse_totals` of `build` some are sparse.

        Raises:
            RuntimeError: outside of the wrapper or of a replica context, or before `build`.
            ValueError: a variable was not passed to `build`.
        """
        replica = tf.distribute.get_replica_context()
        if not self._running or replica is None or isinstance(self.exchange, ExchangeBuilder):
            raise self._not_built_error(replica)
        if self.exchange.workers > 1 and replica.strategy is not self.exchange.strategy:
            raise self._not_built_error(None)  # TensorFlow's replica context without a strategy
        pairs = [(g, v) for g, v in grads_and_vars if g is not None]
        grads, variables = zip(*pairs, strict=True) if pairs else ((), ())
        positions = list(map(self._position, variables))
        totals, finite = self.exchange(grads, positions)
        self.guard.note(finite)
        if self._adam is not None and not self.exchange.schedule.off:
            totals = self._adam.gradients(totals, positions)
        return list(zip(totals, variables, strict=True))

    def _not_built_error(self, replica: Any) -> RuntimeError:
        if not self._running:
            return RuntimeError(
                f"this {type(self._inner).__name__} belongs to a DistributedOptimizer and cannot "
                "be applied directly. To continue without compression, save the model and load it "
                "with a new optimizer; see docs/saving.md."
            )
        if replica is None:
            return RuntimeError(
                "gradients must be applied in a replica context: inside the function that is "
                "passed to `strategy.run`."
            )
        return RuntimeError(
            "the optimizer is not built. Call `optimizer.build(model.trainable_variables)` "
            "inside `strategy.scope()`, or pass the variables to the first step."
        )

    def aggregate_or_none(self, grads_and_vars: Any) -> list[tuple[Any, Any]]:
        """Aggregate like `aggregate`, for optimizers that warn of gradients that are `None`.

        Pairs whose gradient is `None` come last. If all are, nothing is exchanged.
        """
        pairs = list(grads_and_vars)
        missing = [(grad, variable) for grad, variable in pairs if grad is None]
        if missing and len(missing) == len(pairs):  # the optimizer raises
            return missing
        return [*self.aggregate(pairs), *missing]

    def aggregate_or_nan(self, grads_and_vars: Any) -> list[tuple[tf.Tensor, Any]]:
        """Aggregate like `aggregate`, for optimizers that skip a step if a total is non-finite.

        In a step that must be skipped, the first total has a NaN on all workers.

        Raises:
            ValueError: workers have different totals, because each has its own weights.
        """
        if self.exchange.consensus is not None:
            raise ValueError(
                "a LossScaleOptimizer of tf_keras needs equal totals on all workers in every step. "
                f"Received: method={type(self.policy.default).__name__}. Use another method, the "
                "dtype policy 'mixed_bfloat16', or Keras 3."
            )
        (total, variable), *others = self.aggregate(grads_and_vars)
        nan = tf.constant(float("nan"), total.dtype)
        total += tf.where(self.guard.finite, tf.zeros([], total.dtype), nan)
        return [(total, variable), *others]

    def _prune(self, distribution: Any, variables: Sequence[Any]) -> None:
        """Set pruned weights to 0."""
        by_position = masks.variables(self.exchange)
        for variable in variables:
            mask = by_position.get(self._position(variable))
            if mask is not None:
                distribution.extended.update(variable, pruning.keep, args=(mask,), group=False)

    def guard_update(
        self, update: Callable[..., Any], result: Callable[[], Any] = lambda: None
    ) -> Callable[..., Any]:
        """Wrap `update(strategy, ...)` so that it runs only in steps finite on all workers.

        All workers agree on the flag and take the same branch. Pruned weights are set to 0 after
        the update.

        Args:
            update: The optimizer's function that applies totals in a cross-replica context.
            result: Returns the result of the wrapped function, whether the step is skipped or not.
        """

        def update_if_finite(
            distribution: Any, grads_and_vars: Any, *args: Any, **kwargs: Any
        ) -> Any:
            variables = [variable for _, variable in grads_and_vars]
            totals = carry([total for total, _ in grads_and_vars])

            def apply() -> Any:
                self.guard.decay_now(distribution)
                if self._adam is not None and not self.exchange.schedule.off:
                    served = [(self._position(v), v) for v in variables]
                    self._adam.prepare(distribution, served)
                pairs = list(zip(totals(), variables, strict=True))
                # `Auto` may have moved the optimizer's momentum into the exchange.
                in_exchange = self.exchange.applies_momentum
                with momentum.set_to_zero(self._inner) if in_exchange else contextlib.nullcontext():
                    update(distribution, pairs, *args, **kwargs)
                if self.exchange.has_masks:
                    self._prune(distribution, variables)
                return tf.constant(True)

            tf.cond(self.guard.finite, apply, lambda: tf.constant(False))
            return result()

        return update_if_finite

    def by_position(self, grads: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Return the gradients of some variables by position; `None` for the other variables.

        Args:
            grads: The gradients; some may be `None`.
            variables: Their variables; empty for all variables of `build`.
        """
        ordered = [None] * len(self._variables)
        for grad, variable in zip(grads, variables or self._variables, strict=True):
            ordered[self._position(variable)] = grad
        return ordered

    def _position(self, variable: Any) -> int:
        position = self._positions.get(id(variable))
        return self._position_of_part(variable) if position is None else position

    def _position_of_part(self, variable: Any) -> int:
        """Return the position of a replica's component of a distributed variable."""
        position = self._positions_of_parts.get(slots.key(slots.tf_variable(variable)))
        if position is None:
            raise ValueError(
                f"the optimizer was not built with the variable {variable.name!r}. Build it with "
                "all trainable variables, or create a new optimizer."
            )
        return position


def as_policy(method: Method | Policy | Auto | dict[str, Any] | None) -> Policy | Auto:
    """Return the policy for a user's `method`.

    Raises:
        ValueError: `method` has another type.
    """
    if isinstance(method, dict):
        method = from_config(method)
    if method is None:
        method = Auto()
    if isinstance(method, Method):
        return Policy(default=method)
    if isinstance(method, (Policy, Auto)):
        return method
    raise ValueError(
        "`method` must be a method such as tf_redsync.RedSync(density=0.001), a "
        f"tf_redsync.Policy, tf_redsync.Auto(), or None. Received: method={method!r}"
        f"{checks.class_hint(method)}"
    )


def _check_unwrapped(inner: Any) -> None:
    owners = [getattr(value, "__self__", None) for value in vars(inner).values()]
    if any(isinstance(owner, Adapter) for owner in owners):
        raise ValueError(
            "`optimizer` is already wrapped by another DistributedOptimizer. Create a new "
            f"optimizer for every wrapper. Received: optimizer={type(inner).__name__}"
        )


class UpdateGuard:
    """Prevents weight decay, constraints, averages and early changes in skipped steps.

    Attributes:
        finite: Whether the current step is finite: a bool scalar, equal on all workers, or `None`
            before the step's exchange.
        applying: Number of replicas within a step. Outside of steps `only_if_finite` guards
            nothing.
    """

    def __init__(self) -> None:
        self.finite: Any = None
        self.applying = 0
        self._decay: Callable[[], None] | None = None
        self._constrained: Sequence[Any] = ()
        self._before: list[tf.Tensor] = []

    def decay_later(self, inner: Any) -> None:
        """Defer an optimizer's weight decay to the update."""
        decay = inner._apply_weight_decay

        def remember(variables: Sequence[Any]) -> None:
            self._decay = lambda: decay(variables)

        inner._apply_weight_decay = remember

    def decay_now(self, strategy: tf.distribute.Strategy) -> None:
        """Apply the deferred weight decay, just before the update."""
        if self._decay is None:
            return
        if tf.distribute.in_cross_replica_context():
            strategy.extended.call_for_each_replica(self._decay)
        else:  # a single replica
            self._decay()

    def begin(self, variables: Sequence[Any]) -> None:
        """Begin a step of the optimizer, which may constrain `variables`."""
        self.finite, self._decay = None, None
        self._constrained = [v for v in variables if getattr(v, "constraint", None) is not None]

    def note(self, finite: tf.Tensor) -> None:
        """Record the agreed flag, a bool scalar, in a replica context: the step is finite."""
        self.finite = finite
        self._before = list(map(tf.convert_to_tensor, self._constrained))

    def end(self) -> None:
        """End the step, and undo the constraints if it is skipped."""
        if self.finite is not None and self._constrained:
            self._undo_constraints()

    def _undo_constraints(self) -> None:
        for variable, before in zip(self._constrained, self._before, strict=True):
            now = tf.convert_to_tensor(variable)
            variable.assign(tf.where(self.finite, now, before))

    @contextlib.contextmanager
    def keeping(self, variable: Any) -> Iterator[None]:
        """Context in which a step changes a variable before it is known to be finite.

        If the step is skipped, the variable keeps its value.
        """
        before = tf.identity(variable)
        yield
        variable.assign(tf.where(self.finite, tf.convert_to_tensor(variable), before))

    def only_if_finite(self, function: Callable[..., Any]) -> Callable[..., None]:
        """Wrap a function that runs after the exchange, so that skipped steps omit it.

        Keras also calls such functions outside of steps, at the end of `fit`.
        """

        def guarded(*args: Any) -> None:
            def call() -> None:
                function(*args)

            if self.applying and self.finite is not None:
                tf.cond(self.finite, call, lambda: None)
            else:
                call()

        return guarded
