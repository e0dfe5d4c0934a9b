"""A dense warm-up of all methods together: whether a step is in it, and when the methods begin.

It is the one of `DistributedOptimizer(..., warm_up=...)`, for all programs alike. Methods know
nothing of it: they begin after it, at step 0 of their own. What they say by
`Cadence.warm_up_steps` is another matter, and counts from there.
"""

from __future__ import annotations

import tensorflow as tf

from tf_redsync.exchange import state
from tf_redsync.schedules import DenseWarmUp


class WarmUp:
    """A warm-up, whose length may become known when `fit` begins.

    Args:
        asked: What the user asked for.

    Attributes:
        asked: As given.
        steps: Its number of steps, the same on all workers; 0 while that is not known.
        variable: int64, the same, for graphs and what is saved; `None` before `create`.
    """

    def __init__(self, asked: DenseWarmUp):
        self.asked, self.steps = asked, asked.steps or 0
        self.variable: tf.Variable | None = None
        self._step: tf.Variable | None = None

    def create(self, step: tf.Variable) -> None:
        """Create the variable, in the strategy's scope.

        Args:
            step: The exchange's step counter.
        """
        self.variable = state.counter("exchange_warm_up_steps", self.steps)
        self._step = step

    @property
    def steps_so_far(self) -> int:
        """The number of exchanges so far."""
        return 0 if self._step is None else int(self._step.numpy())

    def begin(self, total: int, strategy: tf.distribute.Strategy) -> None:
        """Set its length, which was not known.

        Args:
            total: Steps of the whole training, the same on all workers.
            strategy: Theirs.
        """
        self.steps = self.asked.length(total)
        self._assign(strategy)

    def restored(self, strategy: tf.distribute.Strategy) -> None:
        """Note that the variable holds what was saved, perhaps before a length was known."""
        if self.variable is not None:
            self.steps = int(self.variable.numpy()) or self.asked.steps or 0
            self._assign(strategy)

    def _assign(self, strategy: tf.distribute.Strategy) -> None:
        if self.variable is not None:
            for copy in state.copies(self.variable, strategy):
                copy.assign(self.steps)

    def check_known(self) -> None:
        """Check that its length is known, before a step.

        Raises:
            ValueError: if not.
        """
        if not self.steps:
            raise ValueError(
                "`warm_up` is a fraction of what `fit` will run, and this step is not one of "
                f"`fit`. Received: warm_up={self.asked!r}. In a loop of your own, and with "
                "`train_on_batch`, give a number of steps: warm_up=DenseWarmUp(steps=...)."
            )

    def lasts(self, step: tf.Tensor) -> tf.Tensor:
        """Return whether a step is in it: bool scalar, the same on all workers."""
        return step < self._length()

    def lasted(self) -> tf.Tensor:
        """Return whether the step was in it whose exchange has just been counted."""
        assert self._step is not None
        return self._step.read_value() <= self._length()

    def after(self, step: tf.Tensor) -> tf.Tensor:
        """Return the number of steps since its end, int64 scalar; 0 in it."""
        return tf.maximum(step - self._length(), 0)

    def describe(self) -> str:
        """Return a line for `explain()`."""
        asked, steps = self.asked.fraction, self.steps
        part = "" if asked is None else f"{asked:.4g} of the steps of the first `fit`"
        if not steps:
            return f"dense at first, for {part}"
        return f"dense for the first {steps:,} steps" + (f", {part}" if part else "")

    def _length(self) -> tf.Tensor:
        assert self.variable is not None
        return self.variable.read_value()
