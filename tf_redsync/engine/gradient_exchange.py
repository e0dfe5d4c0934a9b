"""The exchange of a whole model: layout, state, one step. Independent of Keras."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tf_redsync import explanation
from tf_redsync.config import serialize
from tf_redsync.engine import masks, saved_state, workers
from tf_redsync.exchange import agreement, collectives, skips, state
from tf_redsync.exchange.layout import (
    DEFAULT_BUCKET_BYTES,
    GRADIENT_DTYPES,
    make_buckets,
    tensor_spec,
)
from tf_redsync.ops.sparse import EitherTotal, SparseTotal
from tf_redsync.policy import Policy, Undecided
from tf_redsync.programs import for_buckets


class GradientExchange(tf.Module):
    """Replaces the all-reduce of gradients for one optimizer.

    Args:
        policy: Chooses a method for every variable: a `Policy`, or what becomes one, as `Auto`.
        bucket_bytes: See `make_buckets`.
        direct_collectives: Use single-round collectives where the strategy has them.
        two_levels: Whether a process with several replicas is one worker; see `workers.py`.
        max_skipped_steps: See `exchange/skips.py`.

    Attributes:
        step: int64 variable, number of steps so far, skipped ones included.
        skipped: int64 variable, number of steps that were not finite; see `exchange/skips.py`.
        bytes_sent: float64 variable, bytes this worker sent in the last step.
        strategy: In whose scope this was built.
        resolved: What the methods are assigned by: the policy, or what `Auto` decided.
        rate: Returns the optimizer's learning rate.
        awaited: Whether a pruning callback is registered; see `Cadence.waits_for`.
    """

    def __init__(
        self,
        policy: Policy | Undecided,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        direct_collectives: bool = True,
        two_levels: bool | None = None,
        max_skipped_steps: int | None = skips.DEFAULT_LIMIT,
    ):
        super().__init__(name="gradient_exchange")
        self.policy = policy
        self._bucket_bytes = bucket_bytes
        self._direct = direct_collectives
        self._two_levels = two_levels
        self._max_skipped = max_skipped_steps or 0
        self.built = self.awaited = False
        self.rate: Callable[[], Any] | None = None
        self._present: set[int] | None = None
        self._gather: Callable[[], Any] | None = None  # see `to_consensus`

    def build(
        self,
        variables: Sequence[Any],
        sparse_totals: bool = False,
        weights: Sequence[tf.Variable] | None = None,
        described: dict[str, Any] | None = None,
    ) -> None:
        """Lay out the buckets, create the state, and make sure that all workers do the same.

        Args:
            variables: The trainable variables, all of them, in the optimizer's order. Call it in
                the strategy's scope, outside of any replica.
            sparse_totals: Whether the caller takes totals in coordinate form (`ops/sparse.py`).
            weights: The same variables as TensorFlow has them, if these are not.
            described: What else workers must have alike, as JSON has it.

        Raises:
            ValueError: for an unsupported strategy or dtype.
            Disagreement: when workers have different models or methods.
        """
        self.strategy = strategy = tf.distribute.get_strategy()
        collectives.check_supported(strategy)
        self._worker = workers.this_worker(strategy, self._two_levels, self._direct)
        self.network, self.workers = self._worker.network, self._worker.network.workers
        self.specs = tuple(tensor_spec(v, i) for i, v in enumerate(variables))
        agreement.agree(strategy, self._describe(described))
        self.resolved = self.policy.resolve(self.specs, strategy, self.network, self._bucket_bytes)
        self.assignments = self.resolved.assign(self.specs)
        buckets = make_buckets(
            [(a.spec, a.method) for a in self.assignments],
            self.workers,
            self._bucket_bytes,
            sparse_totals
            and all(s.dtype == "float32" for s in self.specs)
            and not any(a.method.cadence.local_steps for a in self.assignments),
        )
        with agreement.agreed(strategy, "create the state of the exchange"):  # of all its variables
            self._create_state(buckets, variables if weights is None else weights)
        workers.warn_if_alone(strategy, self.workers, self._two_levels)
        self.built = True

    def _create_state(self, buckets: Sequence[Any], weights: Sequence[Any]) -> None:
        """Create all variables; which ones they are follows from what the workers agreed on."""
        trial_steps = self.resolved.trial_steps if self.network.in_branches else 0
        create = self._worker.variable
        self.program = for_buckets(buckets, self.workers, trial_steps, create)
        self.step = state.counter("exchange_step")
        self.skips = skips.of_program(self.program, self.specs, self.network, self._max_skipped)
        self.skipped = self.skips.total
        self.bytes_sent = state.float_counter("exchange_bytes_sent")
        self.states = [
            state.StateVariables(*self.program.init(b), b.layout.index, create) for b in buckets
        ]
        self.consensus: state.Consensus | None = None
        if self.program.own_weights:
            collectives.check_one_replica(self.strategy, self.network)
            self.consensus = state.Consensus(weights)

    def __call__(
        self, grads: Sequence[tf.Tensor | tf.IndexedSlices], positions: Sequence[int]
    ) -> tuple[list[tf.Tensor | SparseTotal | EitherTotal], tf.Tensor]:
        """Exchange one step's gradients, in a replica context.

        The state advances only if the step is finite on all workers.

        Args:
            grads: This replica's gradients.
            positions: For every gradient, the position of its variable in `build`'s list.

        Returns:
            The sums over workers, in the order and the dtypes of `grads`, some in coordinate form
            if `build` was told to; and a bool scalar: if it is false, which it is on all workers
            or none, the step must not be applied.

        Raises:
            TypeError: for a gradient that is not float32, bfloat16 or float16.
            ValueError: under XLA compilation.
        """
        if collectives.compiling_with_xla():
            raise ValueError(
                "`jit_compile=True` is not supported: XLA has no all-gather for this strategy. "
                "Received: jit_compile=True. Compile the model with jit_compile=False."
            )
        self._check_present(set(positions))
        masks.warn_of_waiting(self)
        self.skips.note(self.strategy)
        workers.enter_step(self.strategy)
        totals, finite = self._worker.run(
            lambda sums: self._exchange(dict(zip(positions, sums, strict=True))),
            self._dense_gradients(grads, positions),
        )
        return [_like(t, g) for t, g in zip(totals, grads, strict=True)], finite

    def _exchange(self, sums: dict[int, tf.Tensor]) -> tuple[list[Any], tf.Tensor]:
        """Exchange this worker's gradients, by position; return the totals in their order."""
        dense = {
            s.position: sums[s.position] if s.position in sums else tf.zeros(s.shape, tf.float32)
            for s in self.specs
        }
        step = self.step.read_value()
        flags = None if self.program.own_steps else self.skips.flags(list(dense.values()))
        buckets = self.program.buckets
        everything = [dense[s.position] for b in buckets for s in b.layout.specs]
        scale = self.policy.default.clip_scale(everything, self.workers)
        states = [s.read() for s in self.states]
        outcome = self.program.run(
            [[dense[s.position] for s in b.layout.specs] for b in buckets],
            states,
            scale,
            step,
            self.network,
        )
        self._keep_absent(outcome, states, set(sums))
        self._commit(outcome, states, flags)
        if self.consensus is not None:
            self.program.before_update(self.consensus)
        totals = {
            spec.position: total
            for bucket, (bucket_totals, _) in zip(buckets, outcome.results, strict=True)
            for spec, total in zip(bucket.layout.specs, bucket_totals, strict=True)
        }
        return [totals[p] for p in sums], outcome.finite

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
                self.strategy, lambda: tf.equal(consensus.steps.read_value(), 0)
            )
        sent = self.program.after_update(consensus, self.states, rate, self.network)
        if sent is not None:
            self.bytes_sent.assign(sent[0], read_value=False)

    def to_consensus(self) -> None:
        """Make the model's weights those that all workers agree on: to evaluate or save them.

        Does nothing for methods whose weights are always the same on all workers. Between two steps
        and outside of any replica; with several workers all of them must call it.
        """
        if not self.built or self.consensus is None:
            return
        if self._gather is None:
            arguments = (self.consensus, self.states, self.network)
            self._gather = tf.function(
                lambda: self.strategy.run(self.program.to_consensus, arguments)
            )
        with saved_state.agreed(self, "bring the workers' weights together"):
            self._gather()
            collectives.average_statistics(self.strategy)

    def _commit(self, outcome, old_states, flags) -> None:
        new_states = [new for _, new in outcome.results]

        def advance():
            for variables, new, old in zip(self.states, new_states, old_states, strict=True):
                if new is not old:
                    variables.assign(new)

        def skip():
            for variables, new in zip(self.states, new_states, strict=True):
                variables.assign(self.program.always_stored(new))

        tf.cond(outcome.finite, advance, skip)
        if flags is not None:
            self.skips.count(outcome.finite, flags)
        self.step.assign_add(1, read_value=False)
        self.bytes_sent.assign(tf.cast(outcome.bytes_sent, tf.float64), read_value=False)

    def _dense_gradients(self, grads, positions) -> list[tf.Tensor]:
        """The gradients as dense float32 tensors."""
        dense = []
        for grad, position in zip(grads, positions, strict=True):
            spec = self.specs[position]
            if grad.dtype not in GRADIENT_DTYPES:
                raise TypeError(
                    f"the gradient of {spec.name!r} must be float32, bfloat16 or float16. "
                    f"Received: dtype={grad.dtype.name}. Build the model in one of these dtypes."
                )
            # An embedding's IndexedSlices: the residual is dense, so duplicates are summed here.
            value = tf.cast(tf.convert_to_tensor(grad), tf.float32)
            dense.append(tf.ensure_shape(value, spec.shape))
        return dense

    def explain(self) -> explanation.Explanation:
        """Return a table of what happens to every variable.

        Raises:
            RuntimeError: before `build`.
        """
        self._require_built("explain")
        return explanation.explain(
            self.assignments,
            self.program.buckets,
            self.workers,
            self.bytes_per_step(),
            "" if self.resolved is self.policy else str(self.resolved),
            self._worker.replicas,
        )

    def bytes_per_step(self) -> float:
        """Bytes that this worker sends in a step after warm-up, by the costs of ring collectives.

        Raises:
            RuntimeError: before `build`.
        """
        self._require_built("bytes_per_step")
        return self.program.bytes_per_step(self.workers)

    def total_state(self) -> dict[str, Any]:
        """Return the state as arrays: per-worker parts summed or averaged over the workers.

        With several workers this is a collective: all of them must call it.
        """
        self._require_built("total_state")
        return saved_state.total(self)

    def restore_total_state(self, arrays: dict[str, Any]) -> None:
        """Assign what `total_state` returned; sums are given to the workers in equal shares.

        Raises:
            ValueError: when the arrays are not those of this exchange.
        """
        self._require_built("restore_total_state")
        saved_state.restore(self, arrays)

    def _require_built(self, what: str) -> None:
        if not self.built:
            raise RuntimeError(
                f"`{what}` needs the model's variables: call `optimizer.build(variables)` or train "
                "a step first."
            )

    def _describe(self, described: dict[str, Any] | None) -> str:
        return json.dumps(
            {
                "policy": serialize(self.policy),
                "bucket_bytes": self._bucket_bytes,
                "two_levels": self._two_levels,
                "max_skipped_steps": self._max_skipped,
                "replicas": self.strategy.num_replicas_in_sync,
                "trainable_variables": [f"{s.dtype}{list(s.shape)}" for s in self.specs],
                **(described or {}),
            }
        )


def _like(total: Any, grad) -> Any:
    sparse = isinstance(total, (SparseTotal, EitherTotal))
    return total if sparse else tf.cast(total, grad.dtype)
