"""Progress of a training and its remaining time."""

from __future__ import annotations

import time
from typing import Any


class Progress:
    """Prints the progress of a training and its remaining time.

    Args:
        rows: Number of rows to train.
        steps: Number of steps of each row.
    """

    def __init__(self, rows: int, steps: int):
        self.rows, self.steps, self.row, self.name = rows, steps, 0, ""
        self._started, self._before, self._done = time.monotonic(), 0, 0

    def begin(self, name: str, done: int) -> None:
        """Starts a row, of which an earlier call has done some steps."""
        self.row, self.name, self._done = self.row + 1, name, done
        self._before += done

    def __call__(self, training: Any) -> None:
        """Prints a line after an evaluation."""
        done = (self.row - 1) * self.steps + training.number
        here = max(1, done - self._before)
        a_step = (time.monotonic() - self._started) / here
        curve = training.curve
        print(
            f"[{self.row}/{self.rows}] {self.name}: step {training.number}/{self.steps}, "
            f"training loss {curve['train_loss'][-1]:.4f}, test loss {curve['loss'][-1]:.4f}, "
            f"{training.settings.of_task.metric} {curve['metric'][-1]:.2f}; "
            f"{1e3 * a_step:.0f} ms a step, {_clock(a_step * (self.steps - training.number))} "
            f"left, {_clock(a_step * (self.rows * self.steps - done))} for all",
            flush=True,
        )


def _clock(seconds: float) -> str:
    hours, rest = divmod(int(seconds), 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}"
