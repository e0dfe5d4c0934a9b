"""The exchange of a whole model: its state, one step. Independent of Keras."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import tensorflow as tf

from tf_redsync import explanation
from tf_redsync.cluster import agreement
from tf_redsync.exchange.driver import Outcome
from tf_redsync.exchange.method import State
from tf_redsync.network import collectives, groups
from tf_redsync.ops.sparse import EitherTotal, SparseTotal
from tf_redsync.ops.words import widened
from tf_redsync.policy import Assignment, Resolved
from tf_redsync.step import gradients, masks, nonfinite, state_variables, workers
from tf_redsync.step.fit_steps import FitSteps
from tf_redsync.step.setup import Setup
from tf_redsync.step.switching import Switch
from tf_redsync.step.sync_schedules import for_buckets, meter_of


class GradientExchange(tf.Module):
    """Replaces the all-reduce of gradients for one optimizer. Made by `ExchangeBuilder.build`.

    Args:
        setup: What the workers have agreed on.
        weights: The trainable variables as TensorFlow has them.
        rate: Returns the optimizer's learning rate.
        awaited: Whether a pruning callback is registered; see `Cadence.waits_for`.

    Attributes:
        step: int64 variable, number of steps so far, skipped ones included.
        skipped: int64 variable, number of steps that were not finite; see `step/nonfinite.py`.
        bytes_sent, bytes_in_all: float64 variables, bytes this worker sent in the last step, and in
            all steps of this process.
        states: For every bucket, the variables of its state.
        consensus: The weights that all workers agree on, where each has its own; else `None`.
        program: What runs when.
        warm_up: A dense warm-up of all methods, if there is one.
        training: The training's length, where settings are fractions of it.
        network: What carries requests between the workers.
        workers: Their number.
        weights: Returns the trainable variables.
        own_variables: The optimizer's, where each worker's are its own; see `LocalSteps`.
        run: A number that is this run's, for what is saved in it.
        fresh: Whether its state is the first one, and not one that was restored.
        called: Whether a step has been traced or run.
        told_of_length: Whether a training has been looked at whose length is known; see
            `keras/training_length.py`.
        instead: What a step that is traced does in place of its exchange; see `flushing.py`.
    """

    built = True

    def __init__(
        self,
        setup: Setup,
        weights: Sequence[tf.Variable],
        rate: Callable[[], Any] | None = None,
        awaited: bool = False,
    ):
        super().__init__(name="gradient_exchange")
        self.strategy, self.specs = setup.strategy, setup.specs
        self.policy, self._buckets_of = setup.policy, setup.buckets
        self.rate, self.awaited = rate, awaited
        self._worker, self.network = setup.worker, setup.worker.network
        self.workers = self.network.workers
        self.step = state_variables.counter("exchange_step")
        names = ("exchange_bytes_sent", "exchange_bytes_in_all")
        self.bytes_sent, self.bytes_in_all = map(state_variables.float_counter, names)
        self.warm_up, self.training = setup.warm_up, setup.training
        for length in self.lengths:
            length.create(self.step)
        self.create_state(setup.resolved, setup.assignments)
        self.skips = nonfinite.of_program(self.program, self.specs, self.network, setup.max_skipped)
        self.skipped = self.skips.total
        self.consensus: state_variables.Consensus | None = None
        if self.program.own_weights:
            collectives.check_one_replica(self.strategy, self.network)
            self.consensus = state_variables.Consensus(weights)
        kept, number = tuple(weights), state_variables.drawn("exchange_run")
        self.weights = lambda: kept  # not a list: these are the model's, which saves them
        self.run = int(state_variables.copies(number, self.strategy)[0].numpy())
        self.own_variables: tuple[tf.Variable, ...] = ()
        self.switch = Switch(self)
        self.fresh, self.called, self.told_of_length = True, False, False
        self.instead: Callable[..., Any] | None = None
        self._present: set[int] | None = None
        self._gather: Callable[[], Any] | None = None  # see `to_consensus`

    def create_state(self, resolved: Resolved, assignments: list[Assignment]) -> None:
        """Create the schedule and the state's variables, in the strategy's scope."""
        self.resolved, self.assignments = resolved, assignments
        buckets, create = self._buckets_of(assignments), self._worker.variable
        trial_steps = resolved.trial_steps if self.network.in_branches else 0
        lengths = self.warm_up, self.training
        self.program = for_buckets(buckets, self.workers, trial_steps, create, *lengths)
        self.program.meter = meter_of(self.program, self.network, create)
        self.program.clock = self.step
        self.states = [
            state_variables.StateVariables(*self.program.init(b), b.layout.index, create)
            for b in buckets
        ]

    def __call__(
        self, grads: Sequence[tf.Tensor | tf.IndexedSlices], positions: Sequence[int]
    ) -> tuple[list[tf.Tensor | SparseTotal | EitherTotal], tf.Tensor]:
        """Exchange one step's gradients, in a replica context.

        The state advances only if the step is finite on all workers.

        Args:
            grads: This replica's gradients.
            positions: For every gradient, the position of its variable in `build`'s list.

        Returns:
            The sums over workers, in the order of `grads` and the dtypes of their variables, some
            in coordinate form if `build` was told to; and a bool scalar: if it is false, which it
            is on all workers or none, the step must not be applied.

        Raises:
            TypeError: for a gradient that is not float32, bfloat16 or float16.
            ValueError: under XLA compilation, and while the length of a warm-up is not known.
        """
        if collectives.compiling_with_xla():
            raise ValueError(
                "`jit_compile=True` is not supported: XLA has no all-gather for this strategy. "
                "Received: jit_compile=True. Compile the model with jit_compile=False."
            )
        for length in self.lengths:
            length.check_known()
        self.called = True
        if self.instead is None:
            self._check_present(set(positions))
        masks.warn_of_waiting(self)
        self.skips.note(self.strategy)
        workers.enter_step(self.strategy, grads)
        totals, finite = self._worker.run(
            functools.partial(self.instead or self._exchange, positions),
            self.switch.checked(gradients.dense(grads, [self.specs[p] for p in positions])),
        )
        sparse = (SparseTotal, EitherTotal)
        return [
            t if isinstance(t, sparse) else tf.cast(t, self.specs[p].dtype)
            for p, t in zip(positions, totals, strict=True)
        ], finite

    def _exchange(
        self, positions: Sequence[int], sums: Sequence[tf.Tensor]
    ) -> tuple[list[Any], tf.Tensor]:
        """Exchange this worker's gradients; return the totals in their order."""
        present = dict(zip(positions, sums, strict=True))
        dense = {
            s.position: present[s.position]
            if s.position in present
            else tf.zeros(s.shape, tf.float32)
            for s in self.specs
        }
        step = self.step.read_value()
        flags = None if self.program.own_steps else self.skips.flags(list(dense.values()))
        buckets = self.program.buckets
        everything = [dense[s.position] for b in buckets for s in b.layout.specs]
        scale = self.policy.default.clip_scale(widened(everything), self.workers)
        states = self.switch.states(self.states)
        outcome = self.program.run(
            [[dense[s.position] for s in b.layout.specs] for b in buckets],
            states,
            scale,
            step,
            self.network,
        )
        if not self.program.own_steps:
            workers.leave_exchange(outcome.finite)
        self._keep_absent(outcome, states, set(present))
        return self.stored(outcome, states, positions, flags)

    def stored(
        self,
        outcome: Outcome,
        states: Sequence[State],
        positions: Sequence[int],
        flags: tf.Tensor | None,
    ) -> tuple[list[Any], tf.Tensor]:
        """Store a step's new state; return the totals in the order of `positions`."""
        self._commit(outcome, states, flags)
        if self.consensus is not None:
            self.program.before_update(self.consensus)
        totals = {
            spec.position: total
            for bucket, (bucket_totals, _) in zip(
                self.program.buckets, outcome.results, strict=True
            )
            for spec, total in zip(bucket.layout.specs, bucket_totals, strict=True)
        }
        return [totals[p] for p in positions], outcome.finite

    def agree_on_finite(self, finite: tf.Tensor, grads: Sequence[Any]) -> tf.Tensor:
        """Return whether gradients are finite on all workers, in a replica context.

        For a check that comes before the exchange, which is left out if the answer is no; such a
        step is counted here. Not with local steps, which must not communicate.

        Args:
            finite: Bool scalar, of this replica.
            grads: Its gradients, some of them perhaps `None`.
        """

        def count(sums: Sequence[tf.Tensor]) -> tf.Tensor:
            failures, flags = sums
            agreed = tf.equal(self.network.all_reduce([failures])[0], 0.0)
            tf.cond(agreed, lambda: None, lambda: self._skip(flags))
            return agreed

        def flags() -> tf.Tensor:
            tensors = [tf.zeros([]) if g is None else tf.convert_to_tensor(g) for g in grads]
            return nonfinite.not_finite(tensors)

        here = tf.cond(finite, lambda: tf.zeros([len(grads)]), flags)
        self.skips.note(tf.distribute.get_strategy())
        return self._worker.run(count, [1.0 - tf.cast(finite, tf.float32), here])

    def _skip(self, flags: tf.Tensor) -> None:
        """Count a step that leaves the exchange out."""
        self.program.interrupt()
        if self.consensus is not None:
            self.program.before_update(self.consensus)
        self.skips.skip(flags)

    @property
    def lengths(self) -> tuple[FitSteps, ...]:
        """What may become known when `fit` begins."""
        return tuple(filter(None, (self.warm_up, self.training)))

    @property
    def apart(self) -> bool:
        """Whether the model's weights are each worker's own now; the same on all workers."""
        return self.consensus is not None and int(self.consensus.steps.numpy()) > 0

    def agreed(self, what: str) -> AbstractContextManager[None]:
        """Agree with all workers on `what`, at the same step; see `agreement.agreed`."""
        return agreement.agreed(self.strategy, f"{what} at step {int(self.step.numpy())}")

    def in_worker(self, function: Callable[[list[tf.Tensor]], Any], tensors: Sequence[tf.Tensor]):
        """Call `function` once for this worker, in a replica context; see `workers.Replica.run`."""
        return self._worker.run(function, tensors)

    def _check_present(self, present: set[int]) -> None:
        """With a delay, the totals of a step are those of the variables of the step before."""
        if self.program.delay and self._present not in (None, present):
            names = [self.specs[p].name for p in sorted(present ^ self._present)]
            raise ValueError(
                "with a delay of one step, all steps must have gradients of the same variables: "
                "what is sent of one that is left out now could not be applied. Received: "
                f"{', '.join(names)} in some steps only. Use a method without a delay."
            )
        self._present = present

    def _keep_absent(self, outcome, old_states, present: set[int]) -> None:
        """Keep the state of variables without a gradient: their totals go nowhere in this step."""
        for bucket, old, (_, new) in zip(
            self.program.buckets, old_states, outcome.results, strict=True
        ):
            if new is old:
                continue
            kept = [s.position not in present for s in bucket.layout.specs]
            for name in set(old) - set(self.program.always_stored(old)):
                values = old[name]
                if len(values) == len(kept):  # one for each variable
                    new[name] = [
                        o if keep else n for o, n, keep in zip(values, new[name], kept, strict=True)
                    ]

    def finish_step(self, rate: tf.Tensor) -> None:
        """Move the weights on after the optimizer's update, in a replica context.

        Args:
            rate: The optimizer's learning rate.
        """
        consensus = self.consensus
        if consensus is None:
            return
        if self.program.averages_statistics:
            collectives.average_statistics_when(
                self.strategy, lambda: self.program.statistics_due(consensus)
            )
        sent = self.program.after_update(consensus, self.states, rate, self.network)
        if sent is not None:
            counted = sent[0]
            warmed = self.program.warmed()
            if warmed is not None:  # whose gradients are counted already
                counted = tf.where(warmed, self.bytes_sent.read_value(), counted)
            self.bytes_sent.assign(counted, read_value=False)
            self.bytes_in_all.assign_add(sent[0], read_value=False)

    def average_after_updates(self, before: tf.Tensor) -> None:
        """With gradient accumulation: leave BatchNormalization's statistics alone in other steps.

        After `finish_step`, which is traced in a branch, outside of it.

        Args:
            before: `step` when this step began.
        """
        consensus = self.consensus
        if consensus is not None and self.program.averages_statistics:
            collectives.average_statistics_when(
                self.strategy,
                lambda: (self.step > before) & self.program.statistics_due(consensus),
            )

    def to_consensus(self) -> None:
        """Make the model's weights those that all workers agree on: to evaluate or save them.

        Does nothing while they are, and for methods whose weights are always the same on all
        workers. Between two steps and outside of any replica; otherwise all workers must call it.
        """
        if self.consensus is None or not self.apart:
            return
        if self._gather is None:
            arguments = (self.consensus, self.states, self.network)
            self._gather = tf.function(
                lambda: self.strategy.run(self.program.to_consensus, arguments)
            )
        with self.agreed("bring the workers' weights together (`to_consensus()`)"):
            self._gather()
            collectives.average_statistics(self.strategy)

    def _commit(self, outcome, old_states, flags) -> None:
        new_states = [new for _, new in outcome.results]

        def advance():
            for variables, new, old in zip(self.states, new_states, old_states, strict=True):
                variables.assign(new, old)

        def skip():
            for variables, new in zip(self.states, new_states, strict=True):
                variables.assign(self.program.always_stored(new))

        tf.cond(outcome.finite, advance, skip)
        if flags is not None:
            self.skips.count(outcome.finite, flags)
        self.step.assign_add(1, read_value=False)
        self.bytes_sent.assign(sent := tf.cast(outcome.bytes_sent, tf.float64), read_value=False)
        self.bytes_in_all.assign_add(sent, read_value=False)

    def explain(self) -> explanation.Explanation:
        """Return a table of what happens to every variable."""
        begins = self.warm_up.describe() if self.warm_up else ""
        off = "dense until `enable()`: compression is switched off"
        return explanation.explain(
            self.assignments,
            self.program.buckets,
            self.workers,
            self.bytes_per_step(),
            "" if self.resolved is self.policy else str(self.resolved),
            self._worker.replicas,
            off if self.program.off else begins,
            groups.carrier(self.strategy),
        )

    def bytes_per_step(self) -> float:
        """Return the bytes that this worker sends in a step after warm-up, in ring collectives."""
        return self.program.bytes_per_step(self.workers)
