"""What all wrappers share: the exchange in place of the all-reduce, and the guarded update.

Every family has one instance method that sums gradients over replicas and one that applies the
sums. A wrapper replaces the first by `Adapter.aggregate` and wraps the second by `Adapter.guarded`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import tensorflow as tf

from tf_redsync import checks
from tf_redsync.auto import Auto
from tf_redsync.config import from_config
from tf_redsync.exchange.method import Method
from tf_redsync.keras import (
    accuracy,
    adafactor,
    conflicts,
    consistency,
    momentum,
    own_weights,
    pruning,
    slots,
    training_length,
)
from tf_redsync.keras.adam_slots import AdamSlots
from tf_redsync.keras.skipping import Skipping
from tf_redsync.policy import Policy
from tf_redsync.state.saved_exchange import SavedExchange
from tf_redsync.step import flushing, masks, strategy_hooks
from tf_redsync.step.builder import ExchangeBuilder
from tf_redsync.step.drift import DEFAULT_EVERY, Drift
from tf_redsync.step.gradient_exchange import GradientExchange
from tf_redsync.step.sync_schedules import LocalSteps


class Adapter:
    """Carries gradients of one optimizer through the exchange.

    Args:
        inner: The optimizer that applies the sums.
        method: A method, a `Policy`, `Auto`, a config of one of them, or `None` for `Auto()`.
        check_every: See `DistributedOptimizer`.
        on_drift: See `DistributedOptimizer`.
        options: Keyword arguments of `ExchangeBuilder`.

    Raises:
        ValueError: for something that cannot be wrapped, or momentum on both sides.
    """

    def __init__(
        self,
        inner: Any,
        method: Method | Policy | Auto | dict[str, Any] | None,
        check_every: int | None = DEFAULT_EVERY,
        on_drift: str = "error",
        **options: Any,
    ) -> None:
        self.policy = as_policy(method)
        options["warm_up"] = conflicts.warm_up(self.policy, options.get("warm_up"))
        conflicts.check_single(inner)
        _check_unwrapped(inner)
        self._inner = inner
        self._told: set[str] = set()  # each warning once
        # To the user's line, from here through the adapter and `DistributedOptimizer`.
        suited = self._suited(stacklevel=9)
        self.exchange: GradientExchange | ExchangeBuilder = ExchangeBuilder(
            suited, rate=lambda: self.rate(), kind=SavedExchange, **options
        )
        self._entered = 0  # see `entered`
        self._asked = False  # whether the optimizer has ever called `aggregate`
        self.skipping = Skipping()
        self.saving: ModuleType | None = None  # of the optimizer's family
        self._check_every, self._on_drift = check_every or 0, on_drift
        self._drift: Drift | None = None
        self._positions: dict[Any, int] = {}
        self._variables: tuple[tf.Variable, ...] = ()
        self._given: tuple[Any, ...] = ()  # the same, as the family has them
        # The family's way to the learning rate in a step, to the momentum by variable, and to all
        # slots: a list by variable for each kind.
        self.rate: Callable[[], Any] = lambda: inner.learning_rate
        self.momenta: Callable[[], Sequence[Any]] = lambda: slots.momentum_slots(inner)
        self.adam: Callable[[], slots.AdamParts] = lambda: slots.adam_parts(inner)
        self.slots: Callable[[], Sequence[Sequence[Any]]] = lambda: slots.all_slots(
            inner, self._variables
        )

    def _suited(self, stacklevel: int) -> Policy | Auto:
        def warn(text: str) -> None:
            if text not in self._told:
                self._told.add(text)
                warnings.warn(text, accuracy.AccuracyWarning, stacklevel=stacklevel)

        return accuracy.suited(self._inner, self.policy, warn)

    def rewrap(self, inner: Any) -> None:
        """Carry the gradients of an optimizer around the one whose gradients this carries."""
        self._inner = inner

    def check_inner(self) -> None:
        """Check the inner optimizer again after one of its hyper-parameters was set.

        Raises:
            ValueError: if it no longer goes with the method.
        """
        self.exchange.policy = self._suited(stacklevel=6)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Let the inner optimizer ask for sums, as long as its wrapper applies it.

        It may ask from another thread, where `LossScaleOptimizer` brings replicas together.
        """
        self._entered += 1
        try:
            yield
        finally:
            self._entered -= 1

    def build(self, variables: Sequence[Any], sparse_totals: bool = False) -> None:
        """Make the exchange of `variables`; see `ExchangeBuilder.build`."""
        if not isinstance(self.exchange, ExchangeBuilder):
            return
        tensors = [slots.tf_variable(v) for v in variables]
        self._positions = {slots.key(v): i for i, v in enumerate(tensors)}
        described = consistency.describe(self._inner, self.saving)
        described |= {"check_every": self._check_every, "on_drift": self._on_drift}
        self.exchange = self.exchange.build(variables, sparse_totals, tensors, described)
        conflicts.check_accumulation(self._inner, self.exchange)
        own_weights.register(self.exchange)
        training_length.watch(self.exchange)
        self._variables, self._given = tuple(tensors), tuple(variables)
        adafactor.keep_positive(self._inner)
        program = self.exchange.program
        if isinstance(program, LocalSteps):
            local = tf.distribute.get_strategy().experimental_local_results
            momenta = [slots.tf_variable(m) for m in self.momenta()]
            program.momenta = {i: [local(m)[0]] for i, m in enumerate(momenta) if m is not None}
            if not conflicts.accumulates(self._inner):  # which counts skipped steps as well
                program.iterations = local(slots.tf_variable(self._inner.iterations))[0]
            self.exchange.own_variables = tuple(slots.all_variables(self._inner))
        self._drift = consistency.drift_of(
            self.exchange,
            self._inner,
            self._variables,
            lambda: self.rate(),
            self._check_every,
            self._on_drift,
        )

    def _adam_slots(self) -> AdamSlots | None:
        """What prepares the inner optimizer's update, in steps that exchange its momentum."""
        program = self.exchange.program
        by_name: dict[str, dict[int, Any]] = {"momentum": {}, "variance": {}}
        for bucket, state in zip(program.buckets, self.exchange.states, strict=True):
            positions = [s.position for s in bucket.layout.specs]
            for name, found in by_name.items() if bucket.method.adam else ():
                own = state.variables_by_name.get(name, [None] * len(positions))
                found.update({p: v for p, v in zip(positions, own, strict=True) if v is not None})
        momenta, variances = by_name.values()
        if not momenta or self.exchange.workers == 1 or program.off:
            return None
        always = tf.constant(True)
        given = (lambda: always) if variances else (lambda: tf.logical_not(program.warmed()))
        return AdamSlots(self._inner, self.adam, momenta, variances, given)

    def prune(self, sparsity: float, scope: str = "layer") -> None:
        """Set the smallest weights to 0; see `Wrapper.prune`."""
        if not self.exchange.built:
            raise RuntimeError(
                "`prune` needs the model's variables: call `optimizer.build(variables)` first."
            )
        pruning.prune(self.exchange, self._variables, self.slots(), sparsity, scope)

    def flush(self, apply_gradients: Callable[..., Any]) -> None:
        """Deliver what waits in residuals; see `Wrapper.flush`."""
        if not self.exchange.built:
            raise RuntimeError("`flush` comes after training: nothing waits before the first step.")

        def apply(positions: Sequence[int]) -> None:
            served = [self._given[i] for i in positions]
            apply_gradients([(tf.zeros(v.shape, v.dtype), v) for v in served])

        flushing.deliver(self.exchange, apply)
        training_length.forget(self.exchange)  # nothing waits

    def finish_step(self) -> None:
        """Move the weights on after the optimizer's update, in a replica context.

        Raises:
            ValueError: for an optimizer that did not ask for the sums of gradients.
        """
        if self._variables and not self._asked:
            raise conflicts.never_asks(self._inner)
        if self.exchange.consensus is not None:
            self.exchange.finish_step(tf.cast(self.rate(), tf.float32))
        drift = self._drift
        if drift is not None:
            strategy, exchange = tf.distribute.get_strategy(), self.exchange
            strategy_hooks.after_step(
                strategy, drift, lambda: exchange.in_worker(lambda _: drift.step(), [])
            )

    def aggregate(self, grads_and_vars: Any) -> list[tuple[tf.Tensor, Any]]:
        """Return `(sum over workers, variable)` for every `(gradient, variable)`.

        Raises:
            RuntimeError: outside of the wrapper, or of a replica context, or before `build`.
            ValueError: for a variable that `build` did not see.
        """
        if not self._entered:
            raise RuntimeError(
                f"this {type(self._inner).__name__} belongs to a DistributedOptimizer, which alone "
                "can apply it. To go on without compression save the model and load it with a new "
                "optimizer; see docs/saving.md."
            )
        replica = tf.distribute.get_replica_context()
        if replica is None:
            raise RuntimeError(
                "gradients must be applied in a replica context: inside the function that is "
                "given to `strategy.run`."
            )
        if isinstance(self.exchange, ExchangeBuilder):
            raise RuntimeError(
                "the optimizer is not built. Call `optimizer.build(model.trainable_variables)` "
                "inside `strategy.scope()`, or give the first step the variables, too."
            )
        pairs = [(g, v) for g, v in grads_and_vars if g is not None]
        positions = [self._position(v) for _, v in pairs]
        totals, finite = self.exchange([g for g, _ in pairs], positions)
        self._asked = True
        self.skipping.exchanged(finite)  # the same on all replicas
        adam = self._adam_slots()
        if adam is not None:
            totals = adam.gradients(totals, positions)
        return list(zip(totals, [v for _, v in pairs], strict=True))

    def aggregate_or_nan(self, grads_and_vars: Any) -> list[tuple[tf.Tensor, Any]]:
        """As `aggregate`, for optimizers that look at the sums to learn whether to skip a step.

        If it is to be skipped, there is a NaN in the first sum, on all workers.

        Raises:
            ValueError: where the sums are not the same on all workers.
        """
        if self.exchange.consensus is not None:
            raise ValueError(
                "a LossScaleOptimizer of tf_keras needs sums that all workers agree on in every "
                f"step. Received: method={type(self.policy.default).__name__}. Use another method, "
                "the policy 'mixed_bfloat16', or Keras 3."
            )
        (total, variable), *others = self.aggregate(grads_and_vars)
        nan = tf.constant(float("nan"), total.dtype)
        total += tf.where(self.skipping.finite, tf.zeros([], total.dtype), nan)
        return [(total, variable), *others]

    def guarded(
        self, update: Callable[..., Any], otherwise: Callable[[], Any] = lambda: None
    ) -> Callable[..., Any]:
        """Wrap `update(strategy, ...)` so that it runs only in steps that are finite everywhere.

        The flag is agreed on by all workers, so they all take the same branch. Weights that a mask
        leaves out are 0 after it.
        """

        def update_if_finite(
            distribution: Any, grads_and_vars: Any, *args: Any, **kwargs: Any
        ) -> Any:
            found = masks.variables(self.exchange)
            masked = [
                (v, found[self._position(v)])
                for _, v in grads_and_vars
                if self._position(v) in found
            ]

            def apply() -> Any:
                self.skipping.decay_now(distribution)
                adam = self._adam_slots()
                if adam is not None:
                    served = [(self._position(v), v) for _, v in grads_and_vars]
                    adam.prepare(distribution, served)
                with momentum.left_to(self.exchange, self._inner):
                    update(distribution, grads_and_vars, *args, **kwargs)
                for variable, mask in masked:
                    distribution.extended.update(variable, pruning.keep, args=(mask,), group=False)
                return tf.constant(True)

            tf.cond(self.skipping.finite, apply, lambda: tf.constant(False))
            return otherwise()

        return update_if_finite

    def _position(self, variable: Any) -> int:
        position = self._positions.get(slots.key(slots.tf_variable(variable)))
        if position is None:
            raise ValueError(
                f"the optimizer was not built with the variable {variable.name!r}. Build it with "
                "all trainable variables, or make a new optimizer."
            )
        return position


def as_policy(method: Method | Policy | Auto | dict[str, Any] | None) -> Policy | Auto:
    """Return a policy for what a user may pass as `method`.

    Raises:
        ValueError: for anything else.
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
        f"{checks.if_class(method)}"
    )


def _check_unwrapped(inner: Any) -> None:
    owners = [getattr(value, "__self__", None) for value in vars(inner).values()]
    if any(isinstance(owner, Adapter) for owner in owners):
        raise ValueError(
            "`optimizer` is wrapped already: it belongs to another DistributedOptimizer. Received: "
            f"optimizer={type(inner).__name__}. Make a new optimizer for every wrapper."
        )
