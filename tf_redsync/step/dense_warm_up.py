"""A dense warm-up of all methods together: whether a step is in it, and when the methods begin.

It is the one of `DistributedOptimizer(..., warm_up=...)`, for all programs alike. Methods know
nothing of it: they begin after it, at step 0 of their own. What they say by
`SyncSchedule.warm_up_steps` is another matter, and counts from there.
"""

from __future__ import annotations

import tensorflow as tf
from typing_extensions import override

from tf_redsync.schedules import DenseWarmUp
from tf_redsync.step.fit_steps import FitSteps


class WarmUp(FitSteps):
    """A warm-up, whose length may become known when `fit` begins.

    Args:
        wanted: What the user asked for.

    Attributes:
        wanted: As given.
    """

    def __init__(self, wanted: DenseWarmUp):
        super().__init__("exchange_warm_up_steps", f"warm_up={wanted!r}", wanted.steps or 0)
        self.wanted = wanted

    @override
    def of(self, total: int) -> int:
        return self.wanted.length(total)

    def lasts(self, step: tf.Tensor) -> tf.Tensor:
        """Return whether a step is in it: bool scalar, the same on all workers."""
        return step < self.read()

    def lasted(self) -> tf.Tensor:
        """Return whether the step was in it whose exchange has just been counted."""
        assert self._step is not None
        return self._step.read_value() <= self.read()

    def after(self, step: tf.Tensor) -> tf.Tensor:
        """Return the number of steps since its end, int64 scalar; 0 in it."""
        return tf.maximum(step - self.read(), 0)

    def describe(self) -> str:
        """Return a line for `explain()`."""
        asked, steps = self.wanted.fraction, self.steps
        part = "" if asked is None else f"{asked:.4g} of the steps of the first `fit`"
        if not steps:
            return f"dense at first, for {part}"
        return f"dense for the first {steps:,} steps" + (f", {part}" if part else "")
