"""Numbers of steps that may depend on the length of `fit`, equal on all workers.

`FitHook` sets them before the first step, from the numbers of epochs and steps that `fit` will run;
see `keras/training_length.py`. They are variables, so that graphs can read them and checkpoints
save them.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf
from typing_extensions import override

from tf_redsync.schedules import DenseWarmUp
from tf_redsync.step import state_variables


class FitSteps:
    """A number of steps that `fit` may set when it begins.

    Args:
        name: The name of the variable.
        setting: The setting that is a fraction of the training, as the user wrote it.
        steps: The number of steps; 0 if it is unknown.

    Attributes:
        setting: As given.
        steps: The number of steps, equal on all workers; 0 while it is unknown.
        variable: int64 variable with `steps`, for graphs and checkpoints; `None` before `create`.
    """

    def __init__(self, name: str, setting: str, steps: int = 0):
        self.setting, self.steps = setting, steps
        self._name, self._configured_steps = name, steps
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
        """The number of steps so far; 0 before `create`."""
        return 0 if self._step is None else int(self._step.numpy())

    def begin(self, total: int, strategy: tf.distribute.Strategy) -> None:
        """Set the number from the length of the training.

        Args:
            total: Steps of the whole training, equal on all workers.
            strategy: The strategy of the workers.
        """
        self.steps = self.of(total)
        self._assign(strategy)

    def restored(self, strategy: tf.distribute.Strategy) -> None:
        """Adopt the variable's restored value; 0 means that it was saved before `begin`."""
        if self.variable is not None:
            self.steps = int(self.variable.numpy()) or self._configured_steps
            self._assign(strategy)

    def _assign(self, strategy: tf.distribute.Strategy) -> None:
        if self.variable is not None:
            for copy in state_variables.copies(self.variable, strategy):
                copy.assign(self.steps)

    def check_known(self, positions: Sequence[int] = ()) -> None:
        """Check before a step that the number is known.

        Args:
            positions: Ignored; the signature is that of all checks before a step.

        Raises:
            ValueError: If the number is unknown.
        """
        if not self.steps:
            raise ValueError(
                f"{self.setting} is a fraction of the steps of `fit`, but this step runs outside "
                "`fit`. In a custom loop, and with `train_on_batch`, pass a number of steps."
            )

    def read(self) -> tf.Tensor:
        """Return the number of steps, an int64 scalar."""
        assert self.variable is not None
        return self.variable.read_value()


class TrainingLength(FitSteps):
    """The length of the training in steps, for methods with settings that are fractions of it.

    Args:
        setting: The method, as the user wrote it.
    """

    def __init__(self, setting: str):
        super().__init__("exchange_training_steps", setting)


class WarmUp(FitSteps):
    """A dense warm-up, whose length may depend on the length of `fit`.

    Args:
        wanted: The warm-up that the user passed.

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
        """Return whether a step is in the warm-up, a bool scalar that is equal on all workers."""
        return step < self.read()

    def lasted(self) -> tf.Tensor:
        """Return whether the last counted step was in the warm-up, a bool scalar."""
        assert self._step is not None
        return self._step.read_value() <= self.read()

    def after(self, step: tf.Tensor) -> tf.Tensor:
        """Return the number of steps since the end of the warm-up, an int64 scalar; 0 during it."""
        return tf.maximum(step - self.read(), 0)

    def describe(self) -> str:
        """Return a line for `explain()`."""
        fraction, steps = self.wanted.fraction, self.steps
        part = "" if fraction is None else f"{fraction:.4g} of the steps of the first `fit`"
        if not steps:
            return f"dense at first, for {part}"
        return f"dense for the first {steps:,} steps" + (f", {part}" if part else "")
