"""The exchange of a whole model: its state and its step, independent of Keras."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import tensorflow as tf

from tf_redsync import explanation
from tf_redsync.cluster import agreement, step_counters, step_errors
from tf_redsync.exchange.capabilities import clipping
from tf_redsync.exchange.driver import Outcome
from tf_redsync.exchange.layout import GRADIENT_DTYPES, TensorSpec, make_buckets
from tf_redsync.exchange.method import Method, State
from tf_redsync.network import collectives, groups, strategies
from tf_redsync.ops.sparse import EitherTotal, SparseTotal
from tf_redsync.ops.wire import before_cast
from tf_redsync.policy import Policy, Resolved, Undecided
from tf_redsync.step import masks, state_variables, workers
from tf_redsync.step.averaging import average_states
from tf_redsync.step.branches import carry
from tf_redsync.step.drift import DriftDetector
from tf_redsync.step.exchange_schedule import Inputs
from tf_redsync.step.fit_steps import FitSteps, TrainingLength, WarmUp
from tf_redsync.step.nonfinite import NonFiniteCounter, not_finite
from tf_redsync.step.schedule_choice import for_buckets

Gradient = Any  # a `tf.Tensor` or `tf.IndexedSlices`
Positions = Sequence[int]  # of variables, in `build`'s list
States = Sequence[State]  # of the buckets
TotalsAndFinite = tuple[list[tf.Tensor | SparseTotal | EitherTotal], tf.Tensor]  # finite: bool

# Consequences of a step without gradients of some variables
_MOVED = "The outer optimizer or the residual still moves them at the end of a round."
_IN_TURN = (
    "The method exchanges parts of a gradient in turn, and may never reach some parts. Apply all "
    "gradients together, or use one optimizer for each set of variables."
)


class GradientExchange(tf.Module):
    """Replacement of one optimizer's all-reduce of gradients; see `ExchangeBuilder.build`.

    Args:
        strategy: The strategy in whose scope the exchange is built.
        worker: This worker, a replica or a host, and its network.
        weights: The trainable variables, as `tf.Variable`s.
        specs: Their descriptions, in the order of the optimizer.
        policy: The policy that the user passed.
        resolved: The policy that assigns methods: `policy`, or the decision of `Auto`.
        bucket_bytes: See `make_buckets`.
        sparse_totals: Returns whether totals of a method may be sparse.
        max_skipped: Number of skipped steps in a row that raises; 0 for no limit.
        warm_up: A dense warm-up of all methods, or `None`.
        training: The length of the training, or `None` if no setting is a fraction of it.
        rate: Returns the optimizer's learning rate, a scalar.
        expects_pruning: Whether a pruning callback is registered; see `SyncSchedule.waits_for`.

    Attributes:
        strategy, worker, specs, policy, resolved, warm_up, training, rate, expects_pruning: As
            given.
        assignments: The method of each variable.
        step: int64 variable, number of steps so far. Skipped ones count, except those that
            `agree_on_finite` skips before the exchange.
        skipped: int64 variable, number of skipped non-finite steps; see `step/nonfinite.py`.
        nonfinite: Counter of skipped steps.
        bytes_sent, bytes_in_all: float64 variables, bytes that this worker sent in the last step
            and in all steps of this process.
        states: For every bucket, the variables of its state.
        consensus: The weights that all workers agree on, if each worker has its own weights; else
            `None`.
        schedule: The sync schedule.
        applies_momentum: Whether a method applies momentum, so that the optimizer must not.
        has_masks: Whether a method has pruning masks in its state.
        network: The network that answers requests.
        workers: Number of workers.
        weights: Returns the trainable variables.
        own_variables: The optimizer's variables if they differ between workers; see `LocalSteps`.
        run_id: Random number that identifies this run and is saved in its checkpoints.
        fresh: Whether the state is the initial one and was not restored.
        called: Whether a step has been traced or run.
        length_checked: Whether the length of a training has been checked; see
            `keras/training_length.py`.
        drift: Compares the workers' weights, or `None`.
        replacement: Function that replaces the exchange while a step is traced; see `flushing.py`.
    """

    weights: Callable[[], tuple[tf.Variable, ...]]
    consensus: state_variables.Consensus | None = None
    built = True
    fresh = True
    called = False
    length_checked = False
    drift: DriftDetector | None = None
    replacement: Callable[..., Any] | None = None
    own_variables: tuple[tf.Variable, ...] = ()
    _counts_elements = False
    _present: set[int] | None = None
    _traced_end_round: Callable[[], Any] | None = None  # `tf.function` of `_end_round`
    _attach: Callable[[], None] | None = None  # see `attach_optimizer`

    def __init__(
        self,
        *,
        strategy: tf.distribute.Strategy,
        worker: workers.Worker,
        weights: Sequence[tf.Variable],
        specs: tuple[TensorSpec, ...],
        policy: Policy | Undecided,
        resolved: Resolved,
        bucket_bytes: int | None,
        sparse_totals: Callable[[Method], bool],
        max_skipped: int,
        warm_up: WarmUp | None,
        training: TrainingLength | None,
        rate: Callable[[], Any] | None,
        expects_pruning: bool,
    ):
        super().__init__(name="gradient_exchange")
        self.strategy, self.specs, self.policy, self.rate = strategy, specs, policy, rate
        self.warm_up, self.training, self.expects_pruning = warm_up, training, expects_pruning
        self._bucket_bytes, self._sparse_totals = bucket_bytes, sparse_totals
        self.worker, self.network = worker, worker.network
        self.workers = self.network.workers
        self.step = state_variables.counter("exchange_step")
        self.bytes_sent = state_variables.float_counter("exchange_bytes_sent")
        self.bytes_in_all = state_variables.float_counter("exchange_bytes_in_all")
        for length in self.lengths:
            length.create(self.step)
        self.nonfinite = NonFiniteCounter([s.name for s in specs], self.network, max_skipped)
        self.skipped = self.nonfinite.total
        self._has_redsync_strategy = strategies.is_redsync_strategy(strategy)
        self._clipping = clipping(policy.default)
        self.create_state(resolved)
        if self.schedule.per_worker_weights:
            strategies.check_one_replica(strategy, self.network)
            self.consensus = state_variables.Consensus(weights)
        frozen, number = tuple(weights), state_variables.random_number("exchange_run")
        self.weights = lambda: frozen  # a list would be tracked, but the model saves its variables
        self.run_id = int(state_variables.copies(number, strategy)[0].numpy())
        self._switched, self._switches = 0, state_variables.counter("exchange_switched")

    def create_state(self, resolved: Resolved) -> None:
        """Create the schedule and the state's variables, in the strategy's scope."""
        assignments = resolved.assign(self.specs)
        self.resolved, self.assignments = resolved, assignments
        self.applies_momentum = any(a.method.traits.momentum_in_exchange for a in assignments)
        self.has_masks = any(masks.has_masks(a.method) for a in assignments)
        sparse = all(self._sparse_totals(a.method) for a in assignments)
        pairs, create = [(a.spec, a.method) for a in assignments], self.worker.variable
        buckets = make_buckets(pairs, self.workers, self._bucket_bytes, sparse)
        trial_steps = resolved.trial_steps if self.network.in_branches else 0
        self.schedule = for_buckets(
            buckets,
            self.workers,
            trial_steps=trial_steps,
            create=create,
            warm_up=self.warm_up,
            training=self.training,
            nonfinite=self.nonfinite,
            clock=self.step,
        )
        self.schedule.branches = self.network.in_branches
        if self._attach is not None:
            self._attach()
        self._averages = any(b.method.sync_schedule.average_every for b in buckets)
        self._positions_by_bucket = [[s.position for s in b.layout.specs] for b in buckets]
        if self._counts_elements:
            self.schedule.count_elements(self.network)
        self._before_steps = list(self._checks())
        self.states = [
            state_variables.StateVariables(*self.schedule.init(b), b.layout.index, create)
            for b in buckets
        ]

    def __call__(self, grads: Sequence[Gradient], positions: Positions) -> TotalsAndFinite:
        """Exchange one step's gradients, in a replica context.

        The state advances only if the step is finite on all workers.

        Args:
            grads: This replica's gradients, dense or `tf.IndexedSlices`; float32, bfloat16 or
                float16.
            positions: For every gradient, the position of its variable in `build`'s list.

        Returns:
            The totals, in the order of `grads`, and a bool scalar that is equal on all workers. If
            it is false, the caller must not apply the step. Totals have the dtypes and
            shapes of their variables. With `sparse_totals` of `build` some are sparse,
            float32.

        Raises:
            TypeError: If a gradient has another dtype.
            ValueError: Under XLA compilation. If a variable has several gradients. While a length
                that is a fraction of the training is unknown. If a delayed exchange receives
                gradients of other variables than before.
            tf.errors.InvalidArgumentError: At execution, on a worker that receives a corrupted
                message, and in a step that was traced before the last `switch`.
        """
        if collectives.compiling_with_xla():
            raise _no_xla()
        for check in self._before_steps:
            check(positions)
        self.called = True
        if self._has_redsync_strategy:  # our strategy has counted the step at its beginning
            self.nonfinite.register_skip_condition(self.strategy, self.schedule.skips_locally)
        else:
            step_counters.enter_step(grads[:1])
        step_counters.reach_exchange(grads[:1])
        checks = self._stale_step_checks()
        replica_grads = [as_dense(g, self.specs[p]) for g, p in zip(grads, positions, strict=True)]
        exchange = functools.partial(self.replacement or self._exchange, positions, checks)
        totals, finite = self.worker.with_sums(exchange, replica_grads)
        for i, total in enumerate(totals):
            if isinstance(total, tf.Tensor):  # sparse totals stay float32
                totals[i] = tf.cast(total, self.specs[positions[i]].dtype)
        return totals, finite

    def _exchange(
        self, positions: Positions, checks: list[Any], local_grads: list[tf.Tensor]
    ) -> TotalsAndFinite:
        """Exchange the sums of this worker's replicas; return the totals in their order."""
        whole = list(positions) == list(range(len(self.specs)))
        grads = local_grads if whole else self._by_variable(positions, local_grads)
        schedule, step = self.schedule, self.step.read_value()
        nonfinite_flags = None if schedule.skips_locally else self.nonfinite.nonfinite_flags(grads)
        by_bucket = [[grads[p] for p in places] for places in self._positions_by_bucket]
        with tf.control_dependencies(checks):
            states = schedule.read(self.states)
        scale = None if self._clipping is None else self._clipping.clip_scale(grads, self.workers)
        read = states if whole else schedule.hide_absent(states, set(positions))
        outcome = schedule.run(Inputs(by_bucket, read, scale, step, self.network, schedule.meter))
        if not schedule.skips_locally:
            step_counters.note_exchange(outcome.finite)
        if not whole:
            schedule.keep_absent(outcome, states, set(positions))
        return self.store(outcome, states, positions, nonfinite_flags)

    def store(
        self, outcome: Outcome, states: States, positions: Positions, nonfinite_flags: Any
    ) -> TotalsAndFinite:
        """Store a step's new state; return the totals in the order of `positions`.

        Args:
            outcome: The outcome of the exchange.
            states: The states before the step.
            positions: As in `__call__`.
            nonfinite_flags: From `NonFiniteCounter.nonfinite_flags`; `None` if each worker counts
                its own skipped steps.
        """
        changed = [
            pair
            for variables, (_, new), old in zip(self.states, outcome.results, states, strict=True)
            for pair in variables.changed(new, old)
        ]
        values = carry([value for _, value in changed])

        def advance() -> None:
            for (variable, _), value in zip(changed, values(), strict=True):
                variable.assign(value, read_value=False)
            if nonfinite_flags is not None:
                self.nonfinite.advance()

        def skip() -> None:
            if self.schedule.always_stored:
                for variables, (_, new) in zip(self.states, outcome.results, strict=True):
                    variables.assign({n: new[n] for n in self.schedule.always_stored if n in new})
            if nonfinite_flags is not None:
                self.nonfinite.skip(nonfinite_flags)

        tf.cond(outcome.finite, advance, skip)
        self.step.assign_add(1, read_value=False)
        sent = tf.cast(outcome.bytes_sent, tf.float64)
        if self._averages:
            sent += average_states(self.schedule.buckets, self.states, self.step, self.network)
        self.bytes_sent.assign(sent, read_value=False)
        self.bytes_in_all.assign_add(sent, read_value=False)
        if self.consensus is not None:
            self.schedule.before_update(self.consensus)
            self.schedule.note_rate(self.states, self.rate)
        totals: dict[int, Any] = {}
        for places, (of_bucket, _) in zip(self._positions_by_bucket, outcome.results, strict=True):
            totals.update(zip(places, of_bucket, strict=True))
        return [totals[p] for p in positions], outcome.finite

    def _by_variable(self, positions: Sequence[int], grads: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Return one gradient per variable, in order; zeros for variables without a gradient.

        Raises:
            ValueError: If a variable has several gradients.
        """
        ordered: list[Any] = [None] * len(self.specs)
        for position, grad in zip(positions, grads, strict=True):
            if ordered[position] is not None:
                raise ValueError(
                    "a step must have one gradient for each variable. Received: several gradients "
                    f"of {self.specs[position].name!r}. Add them up."
                )
            ordered[position] = grad
        return [tf.zeros(self.specs[i].shape) if g is None else g for i, g in enumerate(ordered)]

    def _stale_step_checks(self) -> list[tf.Operation]:
        """Return ops that fail in a step that was traced before `switch`.

        With one replica per process they also join `CHECKS`, which later collectives wait for.
        """
        switches, traced_at = self._switches.read_value(), tf.constant(self._switched, tf.int64)
        check = tf.debugging.assert_equal(switches, traced_at, step_errors.STALE_STEP)
        checks = [] if check is None else [check]  # `None` in eager mode
        if self.worker.replicas == 1 and self.network.in_branches:  # one replica in this process
            tf.compat.v1.get_collection_ref(collectives.CHECKS).extend(checks)
        return checks

    def switch(self, off: bool) -> None:
        """Disable or enable compression between two steps; all workers must call it.

        While compression is disabled, every step runs as in a dense warm-up. Steps that were traced
        before must be retraced. `keras/fit_hook.py` retraces Keras's steps; any other stale step
        raises.

        Args:
            off: Whether to disable compression.

        Raises:
            Disagreement: If the workers do not call it at the same step.
        """
        if self.schedule.off == off:
            return
        action = "disable" if off else "enable"
        self.to_consensus()
        if off:
            self._share_own_variables()
        with self.agreed(f"{action} compression (`{action}()`)"):
            self.schedule.off = off
            self._switched += 1
            for copy in state_variables.copies(self._switches, self.strategy):
                copy.assign(self._switched)

    def _share_own_variables(self) -> None:
        """Set the optimizer's slots to their means over the workers, for synchronous steps.

        After local steps each worker has its own slots. Scalars, such as the learning rate, are
        equal.
        """
        copies = [state_variables.copies(v, self.strategy)[0] for v in self.own_variables]
        shared = [v for v in copies if v.dtype.is_floating and v.shape.rank]

        def share() -> None:
            sums = self.network.all_reduce([tf.cast(v.read_value(), tf.float32) for v in shared])
            for variable, total in zip(shared, sums, strict=True):
                variable.assign(tf.cast(total / self.workers, variable.dtype))

        if shared and self.workers > 1:
            with self.agreed("bring the optimizer's variables together (`disable()`)"):
                tf.function(lambda: self.strategy.run(share))()

    def agree_on_finite(self, finite: tf.Tensor, grads: Sequence[Any]) -> tf.Tensor:
        """Return whether gradients are finite on all workers, in a replica context.

        Call it before the exchange, and skip the exchange if the result is false; this function
        counts the skipped step. Do not call it with local steps, which must not communicate.

        Args:
            finite: Bool scalar: whether this replica's gradients are finite.
            grads: This replica's gradient of each variable, by position; some may be `None`.

        Returns:
            Bool scalar, equal on all workers.
        """

        def count(sums: Sequence[tf.Tensor]) -> tf.Tensor:
            failures, nonfinite_flags = sums
            agreed = tf.equal(self.network.all_reduce([failures])[0], 0.0)
            tf.cond(agreed, lambda: None, lambda: self._skip(nonfinite_flags))
            return agreed

        def get_nonfinite_flags() -> tf.Tensor:
            tensors = [tf.zeros([]) if g is None else tf.convert_to_tensor(g) for g in grads]
            return not_finite(tensors)

        local_flags = tf.cond(finite, lambda: tf.zeros([len(grads)]), get_nonfinite_flags)
        if self._has_redsync_strategy:
            self.nonfinite.register_skip_condition(self.strategy, self.schedule.skips_locally)
        return self.worker.with_sums(count, [1.0 - tf.cast(finite, tf.float32), local_flags])

    def _skip(self, nonfinite_flags: tf.Tensor) -> None:
        """Count a step whose exchange is skipped; each worker stays at its own point."""
        self.schedule.interrupt()
        self.nonfinite.skip(nonfinite_flags)

    @property
    def lengths(self) -> tuple[FitSteps, ...]:
        """The numbers of steps that `fit` may set when it begins."""
        return tuple(filter(None, (self.warm_up, self.training)))

    @property
    def weights_differ(self) -> bool:
        """Whether the workers' weights may differ now; equal on all workers."""
        return self.consensus is not None and int(self.consensus.steps.numpy()) > 0

    def agreed(self, action: str) -> AbstractContextManager[None]:
        """Context of an `action` that all workers take at the same step; see `agreement.agreed`."""
        return agreement.agreed(self.strategy, f"{action} at step {int(self.step.numpy())}")

    def count_elements(self) -> bool:
        """Count the sent elements of each variable, from the next trace on; see `Meter`.

        Counting needs no communication.

        Returns:
            Whether an earlier step must be retraced.
        """
        begins, self._counts_elements = not self._counts_elements, True
        if begins:
            self.schedule.count_elements(self.network)
        return begins and self.called

    def attach_optimizer(
        self,
        variables: Sequence[tf.Variable],
        momenta: Mapping[int, tf.Variable],
        iterations: tf.Variable | None,
    ) -> None:
        """Give local steps access to the optimizer's variables, which differ between workers.

        Args:
            variables: All variables of the optimizer.
            momenta: The optimizer's momentum variables, by position.
            iterations: The optimizer's number of updates, which each round makes equal; or `None`.
        """
        self.own_variables = tuple(variables)
        self._attach = lambda: self.schedule.attach_optimizer(momenta, iterations)
        self._attach()

    def _warn_alone(self) -> None:
        if not self.called:
            workers.warn_alone(self.strategy, self.worker)

    def _check_present(self, positions: Sequence[int]) -> None:
        """Check that a delayed exchange receives gradients of the same variables in every step.

        Raises:
            ValueError: If a step has gradients of other variables than the first one.
        """
        present = set(positions)
        if self.replacement is None and self._present not in (None, present):
            names = [self.specs[p].name for p in sorted(present ^ (self._present or set()))]
            raise ValueError(
                "with a delay of one step, all steps must have gradients of the same variables: "
                "the stale total of a variable without a gradient could not be applied. Received: "
                f"{', '.join(names)} in some steps only. Use a method without a delay."
            )
        if self.replacement is None:
            self._present = present

    def _checks(self) -> Iterator[Callable[[Sequence[int]], None]]:
        """Yield functions that check the positions of a step's gradients before it is traced."""
        buckets, schedule = self.schedule.buckets, self.schedule
        yield from (length.check_known for length in self.lengths)
        if self.workers == 1:
            yield lambda _: self._warn_alone()
        if schedule.delay:
            yield self._check_present
        elif self.workers > 1:
            for concerns, consequence in (
                (moves_without_gradients, _MOVED),
                (lambda method: method.traits.period > 1, _IN_TURN),
            ):
                specs = [s for b in buckets if concerns(b.method) for s in b.layout.specs]
                if specs:
                    concerned = {s.position for s in specs}
                    yield functools.partial(self._warn_of_absent, concerned, consequence)
        if any(b.method.sync_schedule.waits_for for b in buckets) and self.workers > 1:
            yield lambda _: masks.warn_if_no_masks_come(self)

    def _warn_of_absent(
        self, concerned: set[int], consequence: str, positions: Sequence[int]
    ) -> None:
        """Warn of variables among `concerned` that had gradients before, and have none now."""
        if self.replacement is not None:
            return
        absent = sorted(((self._present or set()) & concerned) - set(positions))
        self._present = (self._present or set()) | set(positions)
        if absent:
            names = ", ".join(self.specs[p].name for p in absent[:5])
            warnings.warn(
                f"some variables had gradients before, but have none in this step: {names}. "
                f"{consequence} If you froze their layers, compile the model with a new optimizer.",
                stacklevel=2,
            )

    def set_own_weights(self) -> None:
        """Set the worker's own weights after the optimizer's update, in a replica context."""
        consensus = self.consensus
        assert consensus is not None and self.rate is not None
        rate = tf.cast(self.rate(), tf.float32)
        if self.schedule.averages_statistics:
            strategies.average_statistics_when(
                self.strategy, lambda: self.schedule.statistics_due(consensus)
            )
        with collectives.after_checks():
            sent = self.schedule.after_update(consensus, self.states, rate, self.network)
        if sent is not None:
            counted = sent[0]
            warmed = self.schedule.warmed()
            if warmed is not None:  # the gradients of a warm-up step are already counted
                counted = tf.where(warmed, self.bytes_sent.read_value(), counted)
            self.bytes_sent.assign(counted, read_value=False)
            self.bytes_in_all.assign_add(sent[0], read_value=False)

    def before_accumulation(self) -> tuple[tf.Tensor, tf.Tensor]:
        """Return the counters of steps and of steps skipped in a row, for `after_accumulation`."""
        counter = self.nonfinite
        streak = counter.local_streak if self.schedule.skips_locally else counter.in_a_row
        return self.step.read_value(), streak.read_value()

    def after_accumulation(self, before: tuple[tf.Tensor, tf.Tensor]) -> None:
        """End a step of gradient accumulation, which may have no exchange.

        Only a step that the exchange has skipped restores BatchNormalization's statistics. With
        local steps they are averaged after updates only. Call it after `set_own_weights`, outside
        of the branch in which `set_own_weights` is traced.

        Args:
            before: The result of `before_accumulation` when the step began.
        """
        steps, streak = before
        if self._has_redsync_strategy:
            self.nonfinite.register_skip_condition(
                self.strategy, self.schedule.skips_locally, streak
            )
        consensus = self.consensus
        if consensus is not None and self.schedule.averages_statistics:
            strategies.average_statistics_when(
                self.strategy,
                lambda: (self.step > steps) & self.schedule.statistics_due(consensus),
            )

    def to_consensus(self) -> None:
        """Set the model's weights to those that all workers agree on, to evaluate or save them.

        While the weights are equal, this is a no-op. Otherwise all workers must call it between two
        steps and outside of any replica. Call it also before the model's `set_weights`. Weights
        that are set in the middle of a round count as changes of the round.

        Raises:
            Disagreement: If the workers do not call it at the same step.
        """
        if self.consensus is None or not self.weights_differ:
            return
        if self._traced_end_round is None:
            self._traced_end_round = tf.function(lambda: self.strategy.run(self._end_round))
        with self.agreed("bring the workers' weights together (`to_consensus()`)"):
            self.schedule.settle()
            self._traced_end_round()
            strategies.average_statistics(self.strategy)

    def _end_round(self) -> None:
        """Call the schedule's `to_consensus` in a replica context, and count the bytes."""
        assert self.consensus is not None
        sent = self.schedule.to_consensus(self.consensus, self.states, self.network)
        if sent is not None:
            self.bytes_in_all.assign_add(sent, read_value=False)

    def explain(self) -> explanation.Explanation:
        """Return a table of the variables, their methods and their bytes per step."""
        begins = self.warm_up.describe() if self.warm_up else ""
        off = "dense until `enable()`: compression is disabled"
        return dataclasses.replace(
            explanation.explain(
                self.assignments, self.schedule.buckets, self.workers, self.bytes_per_step()
            ),
            decision="" if self.resolved is self.policy else str(self.resolved),
            replicas=self.worker.replicas,
            warm_up=off if self.schedule.off else begins,
            carrier=groups.carrier(self.strategy),
        )

    def bytes_per_step(self) -> float:
        """Return the mean bytes that this worker sends per step after warm-up; see `traffic`."""
        return self.schedule.bytes_per_step(self.workers)


def moves_without_gradients(method: Method) -> bool:
    """Return whether the end of a round moves a variable without gradients in the round."""
    schedule = method.sync_schedule
    return bool(schedule.local_steps and (schedule.outer or method.traits.state_kinds))


def as_dense(grad: tf.Tensor | tf.IndexedSlices, spec: TensorSpec) -> tf.Tensor:
    """Return a gradient as a dense tensor of the variable's shape, bfloat16 or float32.

    bfloat16 gradients stay bfloat16; other dtypes become float32.

    Args:
        grad: The gradient.
        spec: The description of its variable.

    Raises:
        TypeError: If the gradient is not float32, bfloat16 or float16.
    """
    if grad.dtype not in GRADIENT_DTYPES:
        raise _bad_dtype(grad, spec)
    if isinstance(grad, tf.IndexedSlices):
        # An embedding's gradient. The residual is dense, so duplicates are summed in float32.
        values, shape = tf.cast(grad.values, tf.float32), tf.constant(spec.shape)
        grad = tf.IndexedSlices(values, grad.indices, shape)  # its own shape may be `None`
    tensor = before_cast(tf.convert_to_tensor(grad))
    if tensor.dtype != tf.bfloat16:
        tensor = tf.cast(tensor, tf.float32)
    return tensor if tensor.shape == spec.shape else tf.ensure_shape(tensor, spec.shape)


def _bad_dtype(grad: Any, spec: TensorSpec) -> TypeError:
    return TypeError(
        f"the gradient of {spec.name!r} must be float32, bfloat16 or float16. "
        f"Received: dtype={grad.dtype.name}. Build the model in one of these dtypes."
    )


def _no_xla() -> ValueError:
    return ValueError(
        "`jit_compile=True` is not supported: XLA has no all-gather for this strategy. "
        "Received: jit_compile=True. Compile the model with jit_compile=False."
    )
