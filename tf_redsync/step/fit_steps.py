"""Numbers of steps that may become known when `fit` begins, the same on all workers.

`FitHook` sets them before the first step, from the epochs and steps that `fit` is going to run; see
`keras/training_length.py`. They are variables, so that graphs read them and files keep them.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf
from typing_extensions import override

from tf_redsync.schedules import DenseWarmUp
from tf_redsync.step import state_variables


class FitSteps:
    """A number of steps that may become known when `fit` begins.

    Args:
        name: Of its variable.
        asked: What is a fraction of the training, as the user has written it.
        steps: The number, 0 if it is not known.

    Attributes:
        asked: As given.
        steps: The number, the same on all workers; 0 while it is not known.
        variable: int64, the same, for graphs and what is saved; `None` before `create`.
    """

    def __init__(self, name: str, asked: str, steps: int = 0):
        self.asked, self.steps = asked, steps
        self._name, self._given = name, steps
        self.variable: tf.Variable | None = None
        self._step: tf.Variable | None = None

    def of(self, total: int) -> int:
        """Return the number for a training of `total` steps."""
        return total

    def create(self, step: tf.Variable) -> None:
        """Create the variable, in the strategy's scope.

        Args:
            step: The exchange's step counter.
        """
        self.variable = state_variables.counter(self._name, self.steps)
        self._step = step

    @property
    def steps_so_far(self) -> int:
        """The number of exchanges so far."""
        return 0 if self._step is None else int(self._step.numpy())

    def begin(self, total: int, strategy: tf.distribute.Strategy) -> None:
        """Set the number, which was not known.

        Args:
            total: Steps of the whole training, the same on all workers.
            strategy: Theirs.
        """
        self.steps = self.of(total)
        self._assign(strategy)

    def restored(self, strategy: tf.distribute.Strategy) -> None:
        """Note that the variable holds what was saved, perhaps before the number was known."""
        if self.variable is not None:
            self.steps = int(self.variable.numpy()) or self._given
            self._assign(strategy)

    def _assign(self, strategy: tf.distribute.Strategy) -> None:
        if self.variable is not None:
            for copy in state_variables.copies(self.variable, strategy):
                copy.assign(self.steps)

    def check_known(self, positions: Sequence[int] = ()) -> None:
        """Check that the number is known, before a step with gradients of any `positions`.

        Raises:
            ValueError: if not.
        """
        if not self.steps:
            raise ValueError(
                f"{self.asked} is a fraction of what `fit` will run, and this step is not one of "
                "`fit`. In a loop of your own, and with `train_on_batch`, give a number of steps."
            )

    def read(self) -> tf.Tensor:
        """Return the number, int64 scalar."""
        assert self.variable is not None
        return self.variable.read_value()


class TrainingLength(FitSteps):
    """The steps of the training, of which settings of a method are fractions.

    Args:
        asked: The method, as the user has written it.
    """

    def __init__(self, asked: str):
        super().__init__("exchange_training_steps", asked)


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
