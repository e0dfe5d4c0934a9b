"""Steps that are skipped because something in them is not finite: counted, named, and limited.

All workers skip the same steps, and count alike. With local steps (`step/local_steps.py`) each
worker skips by itself; its count becomes known to all when a round ends.

Which worker and which variable is looked for only in the step that will be told of, before the
exchange: the residual could not reuse the memory of a gradient that is read afterwards.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tf_redsync.errors import DistributedError
from tf_redsync.exchange.driver import Network, gather
from tf_redsync.ops.wire import widened
from tf_redsync.step import state_variables

WARN_AFTER = 10  # in a row
DEFAULT_LIMIT = 100
NONE = -1  # in place of a variable's position
_logger = logging.getLogger("tf_redsync")


class SkippedSteps(DistributedError):
    """So many steps in a row were skipped that training leads nowhere."""


class NonFiniteCounter:
    """Counts skipped steps.

    Args:
        names: Of the variables, by position.
        network: What carries requests.
        limit: So many skipped steps in a row are an error; 0 for never.

    Attributes:
        total: int64 variable, skipped steps so far, the same on all workers. With local steps: of
            all workers together, and dropped rounds.
        in_a_row: int64 variable, skipped steps since the last one that was not.
        here: int64 variable, with local steps: this worker's, in a row.
    """

    def __init__(self, names: Sequence[str], network: Network, limit: int):
        self._names, self._network, self._limit = tuple(names), network, limit
        self.total = state_variables.counter("exchange_skipped")
        self.in_a_row = state_variables.counter("exchange_skipped_in_a_row")
        self.here = state_variables.counter("exchange_skipped_here")
        self._here_in_round = state_variables.counter("exchange_skipped_in_round")
        self._here_first = state_variables.counter("exchange_not_finite_here")

    @property
    def here_only(self) -> dict[str, tf.Variable]:
        """With local steps: what this worker alone knows, by name."""
        return {
            "here": self.here,
            "here_in_round": self._here_in_round,
            "here_first": self._here_first,
        }

    def watch(self, strategy: Any, own_steps: bool) -> None:
        """Let our strategy ask, after the step that is traced, whether it was skipped.

        It then puts BatchNormalization's statistics back.

        Args:
            strategy: The strategy; others than ours do not ask.
            own_steps: Whether each worker skips steps by itself.
        """
        streak = self.here if own_steps else self.in_a_row
        if hasattr(strategy, "skips"):
            strategy.skips.append((lambda: streak.read_value() > 0, not own_steps))

    def flags(self, grads: Sequence[tf.Tensor]) -> tf.Tensor:
        """Return which of this worker's gradients are not finite, by position: float32 0 or 1.

        All 0 in steps that are not to be told of.
        """
        return tf.cond(
            self._telling(self.in_a_row.read_value() + 1),
            functools.partial(not_finite, grads),
            functools.partial(tf.zeros, [len(grads)]),
        )

    def count(self, finite: tf.Tensor, flags: tf.Tensor) -> None:
        """Count a step that all workers skip or none; tell of it if it is time.

        Args:
            finite: Bool scalar, the same on all workers.
            flags: See `flags`.
        """
        tf.cond(finite, self.advance, lambda: self.skip(flags))

    def advance(self) -> None:
        """Count a step that is not skipped."""
        self.in_a_row.assign(0, read_value=False)

    def skip(self, flags: tf.Tensor) -> None:
        """Count a skipped step, in a branch that all workers take; see `count`."""
        streak = self.in_a_row.read_value() + 1
        self.in_a_row.assign_add(1, read_value=False)
        self.total.assign_add(1, read_value=False)
        self._tell_when(self._telling(streak), streak, functools.partial(first, flags))

    def count_here(self, finite: tf.Tensor, flags: Callable[[], tf.Tensor]) -> None:
        """Count a local step that this worker may have skipped alone."""

        def skipped() -> None:
            self.here.assign_add(1, read_value=False)
            self._here_in_round.assign_add(1, read_value=False)
            self._here_first.assign(first(flags()), read_value=False)

        def advance() -> None:
            self.here.assign(0, read_value=False)

        tf.cond(finite, advance, skipped)

    def count_together(self, finite: tf.Tensor, flags: tf.Tensor) -> None:
        """With local steps: count a step that all workers take together, as `count` does."""
        self.count(finite, flags)
        streak = self.here.read_value() + 1
        self.here.assign(streak * tf.cast(~finite, tf.int64), read_value=False)

    def count_round(
        self,
        finite: tf.Tensor,
        changes: Sequence[tf.Tensor],
        iterations: tf.Variable | None = None,
    ) -> None:
        """At the end of a round of local steps, in a branch that all workers take: add up.

        Args:
            finite: Whether the exchanged changes were, the same on all workers.
            changes: This worker's, by position.
            iterations: This worker's number of updates, which becomes the largest of all workers':
                learning rates that follow from it are equal again.
        """
        here, before = self.here.read_value(), self.in_a_row.read_value()
        counted = [here, self._here_in_round.read_value()]
        if iterations is not None:
            counted.append(tf.cast(iterations.read_value(), tf.int64))
        rows = gather(self._network, tf.cast(tf.stack(counted), tf.int32))
        rows = tf.cast(rows, tf.int64)  # [workers, 2 or 3]
        if iterations is not None:
            most = tf.cast(tf.reduce_max(rows[:, 2]), iterations.dtype)
            iterations.assign(most, read_value=False)
        dropped = tf.cast(~finite, tf.int64)
        streak = tf.where(
            (dropped > 0) | tf.reduce_any(rows[:, 0] > 0),
            tf.maximum(tf.reduce_max(rows[:, 0]), (before + 1) * dropped),
            0,
        )
        self.total.assign_add(tf.reduce_sum(rows[:, 1]) + dropped, read_value=False)
        self.in_a_row.assign(streak, read_value=False)
        self._here_in_round.assign(0, read_value=False)

        def reached(limit: int) -> tf.Tensor:
            return (before < limit) & (streak >= limit)

        def suspect() -> tf.Tensor:
            here_first = self._here_first.read_value()
            return tf.cond(here > 0, lambda: here_first, lambda: first(not_finite(changes)))

        too_many = streak >= self._limit if self._limit else tf.constant(False)
        self._tell_when(reached(WARN_AFTER) | too_many, streak, suspect)

    def _telling(self, streak: tf.Tensor) -> tf.Tensor:
        """Whether a streak of this length is told of."""
        return tf.equal(streak, WARN_AFTER) | tf.equal(streak, self._limit)

    def _tell_when(
        self, due: tf.Tensor, streak: tf.Tensor, suspect: Callable[[], tf.Tensor]
    ) -> None:
        def tell() -> None:
            own, rank = tf.cast(suspect(), tf.int32), self._network.rank()
            if self._network.in_branches:
                suspects = gather(self._network, own[tf.newaxis])[:, 0]
                ranks = tf.range(self._network.workers)
            else:  # each replica warns by itself
                suspects, ranks = own[tf.newaxis], rank[tf.newaxis]
            tf.py_function(self._tell, [streak, self.total.read_value(), ranks, suspects], [])

        tf.cond(due, tell, lambda: None)

    def _tell(self, streak: Any, total: Any, ranks: Any, suspects: Any) -> None:
        streak, total = int(streak), int(total)
        text = (
            f"{streak} steps in a row were skipped, for something in them was not finite ({total} "
            f"skipped in all). {self._at_fault(ranks.numpy(), suspects.numpy())}"
        )
        if self._limit and streak >= self._limit:
            raise SkippedSteps(
                f"{text} Look at the data and the learning rate; `max_skipped_steps="
                f"{self._limit}` of DistributedOptimizer allows no more."
            )
        limit = f" {self._limit} in a row are an error." if self._limit else ""
        _logger.warning("%s%s", text, limit)

    def _at_fault(self, ranks: Any, suspects: Any) -> str:
        found = [
            f"on worker {rank} in the gradient of {self._names[position]!r}"
            for rank, position in zip(ranks, suspects, strict=True)
            if position != NONE
        ]
        if not found:
            return "Each worker's own gradients are finite: they overflow when they are added up."
        return f"First seen {', '.join(found)}."


def not_finite(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Return a vector with 1.0 for each tensor with an element that is not finite, else 0.0."""
    return tf.stack(
        [tf.cast(~tf.reduce_all(tf.math.is_finite(t)), tf.float32) for t in widened(tensors)]
    )


def first(flags: tf.Tensor) -> tf.Tensor:
    """Return the position of the first of some flags that is set, int64, or `NONE`."""
    found = tf.where(flags > 0.0, tf.range(tf.size(flags, tf.int64)), tf.int64.max)
    position = tf.reduce_min(found)
    return tf.where(position < tf.int64.max, position, NONE)
