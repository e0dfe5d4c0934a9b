"""Numbers of steps that may become known when `fit` begins, the same on all workers.

`FitHook` sets them before the first step, from the epochs and steps that `fit` is going to run; see
`keras/training_length.py`. They are variables, so that graphs read them and files keep them.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

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
