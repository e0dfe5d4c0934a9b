"""`Checkpoint`: saves all that a training needs to go on, and lets `fit` go on from it."""

from __future__ import annotations

import datetime
import math
import os
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

from tf_redsync import checks, stopping
from tf_redsync.callbacks.common import OfBothKeras, exchange_of
from tf_redsync.cluster.step_barrier import StepBarrier
from tf_redsync.keras import training_state
from tf_redsync.keras.fit_resume import Position
from tf_redsync.network import collectives
from tf_redsync.state.agreed_checkpoints import Checkpoints, Found
from tf_redsync.state.checkpoint_manifest import Manifest

_TIMER, _SIGNAL = "it is time", "signal "  # requests by the chief's clock, and of a scheduler
_EVERY = (
    "`every` must be 'epoch', a number of steps from 1, or a positive datetime.timedelta. "
    "Received: every={every!r}"
)


class Checkpoint(OfBothKeras):
    """Saves checkpoints of all workers, and lets `fit` go on from the newest one.

    A checkpoint holds what a training needs to go on to the bit: the weights, the optimizer's
    variables, each worker's own state of the exchange, moving statistics, seeds and metrics, and
    the epoch and the batch that come next. Each worker writes its part; when all parts are on the
    disk, the chief writes a manifest with their SHA-256. Without it a checkpoint does not exist,
    so a save that is interrupted at any moment leaves the checkpoint before it.

    When `fit` begins, it goes on from the newest checkpoint in `directory` that all workers can
    use; one that is damaged or of another model is named in a warning. See docs/checkpoints.md for
    what the data must be like for the middle of an epoch.

    While `fit` runs, SIGTERM and SIGUSR1 to any worker make a checkpoint at the end of a step, and
    all workers end by `SystemExit` with exit code 75.

    Give it to `fit` on all workers, of Keras 3 or tf_keras, with the same arguments. The model must
    be built and its optimizer a `DistributedOptimizer`. It runs before the user's other callbacks,
    wherever it stands in the list; what these did at the end of a step or an epoch is saved.

    Args:
        directory: Where the checkpoints are, for one `fit`. Best on a file system that all workers
            see; else each machine keeps what its workers have written.
        every: `"epoch"`, a number of steps, or a `datetime.timedelta`, by the chief's clock. A
            checkpoint is also made at the end of `fit`.
        keep: How many of the newest checkpoints stay.

    Attributes:
        when_saved: Called on all workers with the reason that `save_now` was given, and with
            whether there is a checkpoint now. It may raise, to end `fit`.

    Raises:
        ValueError: for bad arguments; in `fit`, for a model that is not built, an optimizer without
            an exchange, or if there are checkpoints of which none can be used.
        OSError: in `fit`, if a worker cannot write to `directory`. Later it is a warning.

    Example:
        >>> import tf_redsync as rs
        >>> checkpoint = rs.callbacks.Checkpoint("/tmp/run1", every=500)
        >>> # model.fit(..., callbacks=[checkpoint])
    """

    comes_first = True  # see `fit_hook.py`
    restores = True  # see `backups.py`

    def __init__(
        self,
        directory: str | os.PathLike[str],
        every: str | int | datetime.timedelta = "epoch",
        keep: int = 2,
    ) -> None:
        super().__init__()
        if not isinstance(directory, (str, os.PathLike)) or not os.fspath(directory):
            raise ValueError(f"`directory` must be a path. Received: directory={directory!r}")
        if isinstance(every, datetime.timedelta):
            good = every > datetime.timedelta(0)
        elif isinstance(every, str):
            good = every == "epoch"
        else:
            good = isinstance(every, int) and not isinstance(every, bool) and every >= 1
        if not good:
            raise ValueError(_EVERY.format(every=every))
        checks.integer("keep", keep, low=1)
        self.directory, self.every, self.keep = os.fspath(directory), every, keep
        self.when_saved: Callable[[str, bool], None] | None = None
        self._at: StepBarrier | None = None  # in `fit`
        self._early = ""  # a reason that was given before it
        self._signals = stopping.Requests()
        self._next_time = math.inf  # when the chief's clock asks for a checkpoint

    def save_now(self, reason: str) -> None:
        """Ask for a checkpoint at the end of a step, the same one on all workers.

        One worker's request is enough. It returns at once and may be called by a signal handler or
        a thread; before `fit` it is remembered.

        Args:
            reason: For the checkpoint and for `when_saved`.
        """
        if self._at is None:
            self._early = reason
        else:
            self._at.ask(reason)

    # ---------------------------------------------------------------------------------- the hooks

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Restore the newest checkpoint."""
        exchange_of(self)
        training_state.build(self.model)
        strategy = self.model.distribute_strategy
        self._subject = training_state.subject(self.model)
        self._files = Checkpoints(strategy, self.directory, self.keep, f"every {self.every}")
        self._position = Position(self.model)
        self._metrics: dict[str, np.ndarray] = {}
        self._first_epoch: int | None = None
        found = self._files.restore(self._subject, self._check, self._use)
        if found is not None:
            self._go_on(found.manifest)
        self._warn_of_order(in_the_middle=found is not None and found.manifest.batch > 0)
        self._epoch, self._batch = 0, 0
        self._due, self._asked, self._trained, self._signalled = "", "", False, False
        self._chief = collectives.worker_rank(strategy) == 0
        self._restart_clocks()
        if self._at is not None:  # of a `fit` that did not end
            self._end()
        self._at = StepBarrier(strategy)
        if self._early:
            self._at.ask(self._early)
            self._early = ""
        self._signals.listen()

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Drop the batches that were seen; save what the end of the last epoch asked for."""
        model, metrics, self._metrics = self.model, self._metrics, {}
        self._position.epoch_begins(lambda: training_state.restore_metrics(model, metrics))
        training_state.restore_metrics(model, metrics)  # Keras has reset them
        if self._first_epoch is None:
            self._first_epoch = epoch
        self._epoch, self._batch = epoch, 0
        self._save_if_due(epoch, 0)

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Save what the end of the last step asked for."""
        if self._batch == 0:
            self._batch = batch  # perhaps in the middle
        self._save_if_due(self._epoch, batch)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Find out, with all workers, whether it is time."""
        assert self._at is not None
        self._steps += batch + 1 - self._batch
        self._batch, self._trained = batch + 1, True
        if isinstance(self.every, int) and self._steps >= self.every:
            self._due = self._due or f"{self.every} steps"
        if self._chief and time.monotonic() >= self._next_time:
            self._next_time = math.inf
            self._at.ask(_TIMER)
        if self._signals.requested is not None and not self._signalled:
            self._signalled = True
            self._at.ask(_SIGNAL + self._signals.requested)
        reason = self._at.step()
        if reason is not None:
            self._due = reason
            self._asked = reason if reason != _TIMER else ""

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Note that it is time."""
        if self.every == "epoch":
            self._due = self._due or f"the end of epoch {epoch + 1}"

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Save the end."""
        assert self._at is not None
        self._position.reset()
        if self._trained:
            self._due = self._due or "the end of `fit`"
            self._save_if_due(self._epoch + 1, 0, finished=self.params["epochs"])
        self._end()

    # ----------------------------------------------------------------------------------- the work

    def _end(self) -> None:
        """Ask for nothing any more."""
        assert self._at is not None
        self._at.stop()
        self._at = None
        self._signals.close()

    def _warn_of_order(self, in_the_middle: bool) -> None:
        """Say if batches may be seen twice, and others not at all."""
        doubts = self._position.doubts
        if doubts and (self.every != "epoch" or in_the_middle):
            warnings.warn(
                f"{doubts}, so an epoch that `Checkpoint` goes on with in its middle may see some "
                "batches twice and others not at all. Use a tf.data pipeline with seeds, or save "
                "with every='epoch'.",
                stacklevel=3,
            )

    def _restart_clocks(self) -> None:
        self._steps = 0  # since the last save
        every = self.every
        seconds = every.total_seconds() if isinstance(every, datetime.timedelta) else math.inf
        self._next_time = time.monotonic() + seconds

    def _save_if_due(self, epoch: int, batch: int, finished: int = 0) -> None:
        if not self._due:
            return
        reason, asked, self._due, self._asked = self._due, self._asked, "", ""
        saved = self._save(epoch, batch, reason, finished)
        self._restart_clocks()
        if asked.startswith(_SIGNAL) and not finished:
            self._end()
            raise stopping.Stopped
        if asked and self.when_saved is not None:
            self.when_saved(asked, saved)

    def _save(self, epoch: int, batch: int, reason: str, finished: int) -> bool:
        model = self.model
        described = Manifest(
            step=int(exchange_of(self).step.numpy()),
            epoch=epoch,
            batch=batch,
            parts=(),
            subject=self._subject,
            versions=training_state.versions(model),
            first_epoch=self._first_epoch or 0,
            finished=finished,
            reason=reason,
        )
        return self._files.save(
            described,
            training_state.shared(model),
            training_state.own(model, with_metrics=batch > 0),
            training_state.perhaps_own(model),
            lambda values: training_state.problem(model, values),
        )

    def _check(self, found: Found) -> None:
        """Refuse values that the model cannot take over."""
        training_state.check(self.model, found)

    def _use(self, found: Found) -> None:
        """Take over what a checkpoint holds."""
        self._metrics = training_state.take_over(self.model, found)

    def _go_on(self, described: Manifest) -> None:
        """Let `fit` begin where a checkpoint ended."""
        epochs, epoch = self.params["epochs"], described.epoch
        if described.finished >= epochs:  # it may have ended early
            epoch = max(epoch, epochs)
        if epoch >= epochs and self._files.leads:
            warnings.warn(
                f"`fit` has nothing left to do: {self.directory} holds its end, after epoch "
                f"{described.epoch}. For another training give `Checkpoint` another directory. "
                f"Received: epochs={epochs}",
                stacklevel=3,
            )
        self._first_epoch = described.first_epoch
        past = epoch - described.first_epoch if epoch < epochs else 0
        self._position.go_on(epoch, described.batch, past)
