"""Counts skipped non-finite steps, reports the worker and the variable, and limits their number.

All workers skip the same steps and have equal counts. With local steps (`step/local_steps.py`) each
worker skips its own steps, and the workers share their counts once per round. Each worker stores
its counts (`store_counts`), all gather them (`exchange_counts`), possibly concurrently with later
steps, and add the results to the common counts (`count_round`).

A step determines the worker and the variable only if it will be reported, and before the exchange:
reading a gradient afterwards would prevent TensorFlow from reusing its memory for the residual.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tf_redsync.errors import DistributedError
from tf_redsync.exchange.driver import Network, gather
from tf_redsync.ops.wire import each_finite
from tf_redsync.step import state_variables
from tf_redsync.step.branches import run_on_host

WARN_AFTER = 10  # in a row
DEFAULT_LIMIT = 100
NONE = -1  # the position if no variable is non-finite
_logger = logging.getLogger("tf_redsync")


class SkippedSteps(DistributedError):
    """More steps in a row were skipped than `max_skipped_steps` allows."""


class NonFiniteCounter:
    """Counter of skipped steps, which warns and limits them.

    Args:
        names: The names of the variables, by position.
        network: The network that answers requests.
        limit: The number of skipped steps in a row that raises `SkippedSteps`; 0 for no limit.

    Attributes:
        total: int64 variable, skipped steps so far, equal on all workers. With local steps: the sum
            over the workers, plus the number of dropped rounds.
        in_a_row: int64 variable, skipped steps since the last finite one, equal on all workers.
        local_streak: int64 variable, with local steps: this worker's skipped steps in a row.
    """

    def __init__(self, names: Sequence[str], network: Network, limit: int):
        self._names, self._network, self._limit = tuple(names), network, limit
        self.total = state_variables.counter("exchange_skipped")
        self.in_a_row = state_variables.counter("exchange_skipped_in_a_row")
        self.local_streak = state_variables.counter("exchange_skipped_here")
        self._local_in_round = state_variables.counter("exchange_skipped_in_round")
        self._local_first = state_variables.counter("exchange_not_finite_here")
        self._kept = state_variables.counters("exchange_counts_kept", 3)
        self._behind = state_variables.counter("exchange_updates_behind")
        self._gathered = state_variables.counters("exchange_counts_gathered", 2)

    @property
    def local_variables(self) -> dict[str, tf.Variable]:
        """The variables that belong to this worker only, by name; used with local steps."""
        return {
            "here": self.local_streak,
            "here_in_round": self._local_in_round,
            "here_first": self._local_first,
        }

    @property
    def in_flight(self) -> dict[str, tuple[str, tf.Variable]]:
        """The variables from `store_counts` to `count_round`: `(kind, variable)` by name."""
        return {
            "kept": ("own", self._kept),
            "behind": ("own", self._behind),
            "gathered": ("shared", self._gathered),
        }

    def register_skip_condition(self, strategy: Any, skips_locally: bool, before: Any = 0) -> None:
        """Tell tf_redsync's strategy how to recognize that the step that is traced was skipped.

        After a skipped step it restores BatchNormalization's statistics. A second call in
        a step replaces the check.

        Args:
            strategy: A `tf_redsync.MultiWorkerMirroredStrategy`.
            skips_locally: Whether each worker skips steps by itself.
            before: The streak when the step began, for steps that may leave it unchanged.
        """
        streak = self.local_streak if skips_locally else self.in_a_row
        strategy.skip_conditions[self] = lambda: streak.read_value() > before, not skips_locally

    def nonfinite_flags(self, grads: Sequence[tf.Tensor]) -> tf.Tensor:
        """Return a flag for each of this worker's gradients, float32 `[N]`: 1 if it is non-finite.

        All flags are 0 in steps that are not reported.
        """
        return tf.cond(
            self._is_reported(self.in_a_row.read_value() + 1),
            functools.partial(not_finite, grads),
            functools.partial(tf.zeros, [len(grads)]),
        )

    def advance(self) -> None:
        """Count a step that is not skipped."""
        self.in_a_row.assign(0, read_value=False)

    def skip(self, nonfinite_flags: tf.Tensor) -> None:
        """Count a skipped step, in a branch that all workers enter; report it if due."""
        streak = self.in_a_row.read_value() + 1
        self.in_a_row.assign_add(1, read_value=False)
        self.total.assign_add(1, read_value=False)
        suspect = functools.partial(first_nonfinite, nonfinite_flags)
        self._report_when(self._is_reported(streak), streak, suspect)

    def count_local_step(
        self, finite: tf.Tensor, get_nonfinite_flags: Callable[[], tf.Tensor]
    ) -> None:
        """Count a local step, which this worker skips if it is not `finite`.

        Args:
            finite: Bool scalar of this worker.
            get_nonfinite_flags: Returns the flags of `not_finite`.
        """

        def skipped() -> None:
            self.local_streak.assign_add(1, read_value=False)
            self._local_in_round.assign_add(1, read_value=False)
            self._local_first.assign(first_nonfinite(get_nonfinite_flags()), read_value=False)

        def advance() -> None:
            self.local_streak.assign(0, read_value=False)

        tf.cond(finite, advance, skipped)

    def count_together(self, finite: tf.Tensor, nonfinite_flags: tf.Tensor) -> None:
        """Count a synchronous step of a schedule with local steps; all workers skip it or none.

        Args:
            finite: Bool scalar, equal on all workers.
            nonfinite_flags: See the method `nonfinite_flags`.
        """
        tf.cond(finite, self.advance, lambda: self.skip(nonfinite_flags))
        streak = self.local_streak.read_value() + 1
        self.local_streak.assign(streak * tf.cast(~finite, tf.int64), read_value=False)

    def store_counts(self, iterations: tf.Variable | None) -> None:
        """Keep this worker's counts for `exchange_counts`.

        Args:
            iterations: This worker's number of updates, or `None`.
        """
        updates = tf.constant(0) if iterations is None else iterations.read_value()
        counts = self.local_streak.read_value(), self._local_in_round.read_value(), updates
        self._kept.assign([tf.cast(c, tf.int64) for c in counts], read_value=False)

    def exchange_counts(self, network: Network) -> None:
        """Gather the counts that all workers have stored, by a collective of `network`."""
        counts = self._kept.read_value()
        words = gather(network, tf.reshape(tf.bitcast(counts, tf.int32), [-1]))
        rows = tf.bitcast(tf.reshape(words, [network.workers, 3, 2]), tf.int64)
        longest, skipped = tf.reduce_max(rows[:, 0]), tf.reduce_sum(rows[:, 1])
        self._gathered.assign(tf.stack([longest, skipped]), read_value=False)
        self._behind.assign(tf.reduce_max(rows[:, 2]) - counts[2], read_value=False)

    def count_round(
        self,
        finite: tf.Tensor,
        changes: Sequence[tf.Tensor],
        iterations: tf.Variable | None = None,
    ) -> None:
        """Add the result of `exchange_counts`, in a branch that all workers enter.

        Args:
            finite: Bool scalar, equal on all workers: whether the exchanged changes were finite.
            changes: This worker's weight changes, by position.
            iterations: This worker's number of updates, or `None`. Its gap to the maximum over the
                workers is added, so that learning rates that depend on it are equal again.
        """
        if iterations is not None:
            behind = tf.cast(self._behind.read_value(), iterations.dtype)
            iterations.assign_add(behind, read_value=False)
        gathered = self._gathered.read_value()
        longest, skipped = gathered[0], gathered[1]
        before, dropped = self.in_a_row.read_value(), tf.cast(~finite, tf.int64)
        self.total.assign_add(skipped + dropped, read_value=False)
        self._local_in_round.assign_sub(self._kept.read_value()[1], read_value=False)
        self._note(tf.maximum(longest, (before + 1) * dropped), before, changes)

    def count_within_round(self, finite: tf.Tensor, changes: Sequence[tf.Tensor]) -> None:
        """Count an exchange that does not end a round, without a collective.

        Args:
            finite: As in `count_round`.
            changes: As in `count_round`.
        """
        before, dropped = self.in_a_row.read_value(), tf.cast(~finite, tf.int64)
        self.total.assign_add(dropped, read_value=False)
        self._note(before + dropped, before, changes)

    def _note(self, streak: tf.Tensor, before: tf.Tensor, changes: Sequence[tf.Tensor]) -> None:
        """Set the streak, equal on all workers; report it at `WARN_AFTER` or the limit."""
        self.in_a_row.assign(streak, read_value=False)

        def reached(limit: int) -> tf.Tensor:
            return (before < limit) & (streak >= limit)

        def suspect() -> tf.Tensor:
            local_streak = self.local_streak.read_value()
            local_first = self._local_first.read_value()
            return tf.cond(
                local_streak > 0, lambda: local_first, lambda: first_nonfinite(not_finite(changes))
            )

        too_many = streak >= self._limit if self._limit else tf.constant(False)
        self._report_when(reached(WARN_AFTER) | too_many, streak, suspect)

    def _is_reported(self, streak: tf.Tensor) -> tf.Tensor:
        """Return whether a streak of this length is reported, a bool scalar."""
        return tf.equal(streak, WARN_AFTER) | ((streak >= self._limit) & (self._limit > 0))

    def _report_when(
        self, due: tf.Tensor, streak: tf.Tensor, suspect: Callable[[], tf.Tensor]
    ) -> None:
        def report() -> None:
            position, rank = tf.cast(suspect(), tf.int32), self._network.rank()
            if self._network.in_branches:
                suspects = gather(self._network, position[tf.newaxis])[:, 0]
                ranks = tf.range(self._network.workers)
            else:  # each replica issues its own warning
                suspects, ranks = position[tf.newaxis], rank[tf.newaxis]
            run_on_host(self._report, [streak, self.total.read_value(), ranks, suspects])

        tf.cond(due, report, lambda: None)

    def _report(self, streak: Any, total: Any, ranks: Any, suspects: Any) -> None:
        streak, total = int(streak), int(total)
        text = (
            f"{streak} steps in a row were skipped because they were not finite ({total} skipped "
            f"in total). {self._source(ranks.numpy(), suspects.numpy())}"
        )
        if self._limit and streak >= self._limit:
            raise SkippedSteps(
                f"{text} Check the data and the learning rate, or raise `max_skipped_steps="
                f"{self._limit}` of DistributedOptimizer."
            )
        limit = (
            f" Training stops after {self._limit} in a row (`max_skipped_steps`)."
            if self._limit
            else ""
        )
        _logger.warning("%s%s", text, limit)

    def _source(self, ranks: Any, suspects: Any) -> str:
        places = [
            f"on worker {rank} in the gradient of {self._names[position]!r}"
            for rank, position in zip(ranks, suspects, strict=True)
            if position != NONE
        ]
        if not places:
            return "Each worker's own gradients are finite, but their sum or square overflows."
        return f"First seen {', '.join(places)}."


def not_finite(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Return float32 `[N]`: 1 for each of N tensors with a non-finite element, else 0."""
    return tf.cast(~each_finite(tensors), tf.float32)


def first_nonfinite(flags: tf.Tensor) -> tf.Tensor:
    """Return the position of the first flag that is set, an int64 scalar, or `NONE`."""
    positions = tf.where(flags > 0.0, tf.range(tf.size(flags, tf.int64)), tf.int64.max)
    position = tf.reduce_min(positions)
    return tf.where(position < tf.int64.max, position, NONE)
