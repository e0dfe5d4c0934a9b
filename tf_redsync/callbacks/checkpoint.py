"""`Checkpoint`: saves the complete state of a training and resumes `fit` from it."""

from __future__ import annotations

import datetime
import itertools
import json
import math
import numbers
import os
import time
import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from typing_extensions import override

from tf_redsync import checks, stopping
from tf_redsync.cluster import agreement
from tf_redsync.cluster.step_barrier import StepBarrier
from tf_redsync.keras import closing, models, training_state
from tf_redsync.keras.fit_hook import ForTfKeras, OfBothKeras, exchange_of
from tf_redsync.keras.fit_resume import Position
from tf_redsync.network import strategies
from tf_redsync.state.agreed_checkpoints import Checkpoints, LoadedCheckpoint
from tf_redsync.state.checkpoint_manifest import Manifest, changed_options
from tf_redsync.state.snapshot import shortened

# Prefixes of requests: of the chief's clock, of signals, and of the user.
_TIMER, _SIGNAL, _USER = "it is time", "signal ", "request "
_EVERY = (
    "`every` must be 'epoch', a number of steps from 1, or a positive datetime.timedelta. "
    "Received: every={every!r}"
)


class Checkpoint(OfBothKeras):
    """Saves checkpoints of all workers, and resumes `fit` from the newest one.

    A resumed training continues bit by bit, except with `Auto`, which decides by timing. A
    checkpoint holds the weights, the optimizer's variables, each worker's state of the exchange,
    moving statistics, seeds, metrics, and the next epoch and batch. Each worker copies its part to
    host memory between two steps, and a thread writes it while training continues. When all parts
    are on disk, the chief writes a manifest with their SHA-256 sums, which makes the checkpoint
    valid. An interrupted save therefore leaves the previous checkpoint in place. At most one save
    is in flight: the next one, the end of `fit`, and an error that ends it wait for it.

    `fit` resumes from the newest checkpoint in `directory` that all workers can use. It warns about
    checkpoints that are damaged or belong to another model. See docs/checkpoints.md for data
    pipelines that can resume in the middle of an epoch.

    During `fit`, SIGTERM or SIGUSR1 to any worker makes a checkpoint at the end of a step, and all
    workers exit with `SystemExit` and code 75.

    Pass it to `fit` of Keras 3 or tf_keras on all workers, with the same arguments. The model must
    be built and its optimizer must be a `DistributedOptimizer`. The callback runs before the user's
    other callbacks, whatever its position in the list. Changes that these make at the end of a
    step, an epoch or the training are saved.

    Args:
        directory: Directory of the checkpoints of one `fit`, preferably on a shared file system.
            Otherwise each machine keeps the parts of its workers.
        every: `"epoch"`, a number of steps, or a `datetime.timedelta` on the chief's clock. The end
            of `fit` makes a checkpoint, too.
        keep: Number of checkpoints to keep.

    Attributes:
        when_saved: Called on all workers with the reason passed to `save_now` and with whether the
            save succeeded. It may raise to end `fit`.

    Raises:
        ValueError: an argument is out of range. In `fit`: the model is not built, the optimizer is
            not a `DistributedOptimizer`, the number of epochs is unknown, or there are checkpoints
            but none can be used.
        OSError: in `fit`, a worker cannot write to `directory` at the start. Later failures are
            warnings.

    Example:
        >>> import tf_redsync as rs
        >>> checkpoint = rs.callbacks.Checkpoint("/tmp/run1", every=500)
        >>> # model.fit(..., callbacks=[checkpoint])
    """

    comes_first = copies_weights = True  # see `fit_hook.py`
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
        checks.no_url("directory", directory)
        if isinstance(every, datetime.timedelta):
            good = every > datetime.timedelta(0)
        elif isinstance(every, str):
            good = every == "epoch"
        else:
            integral = isinstance(every, numbers.Integral) and not isinstance(every, bool)
            good, every = integral and every >= 1, int(every) if integral else every
        if not good:
            raise ValueError(_EVERY.format(every=every))
        checks.integer("keep", keep, low=1)
        self.directory, self.every, self.keep = os.fspath(directory), every, keep
        self.when_saved: Callable[[str, bool], None] | None = None
        self._at: StepBarrier | None = None  # during `fit`
        self._waiting: list[str] = []  # reasons of this worker's requests, until all workers act
        self._signals = stopping.StopSignals()
        self.before_bar = _AtTheEnd(self)
        self._next_time = math.inf  # next checkpoint by the chief's clock

    def save_now(self, reason: str) -> None:
        """Request a checkpoint at the end of the same step on all workers.

        The request of one worker is enough. The method returns immediately and is safe in signal
        handlers and threads. A request before `fit` takes effect when it begins, and one after the
        last step at the end of `fit`; during the last save, when the next `fit` begins.

        Args:
            reason: Reason for the checkpoint's manifest and `when_saved`, a non-empty string.

        Raises:
            ValueError: `reason` is not a non-empty string.
        """
        if not isinstance(reason, str) or not reason:
            raise ValueError(f"`reason` must be a non-empty string. Received: reason={reason!r}")
        self._waiting.append(reason)  # first: `fit` may begin or end in another thread
        barrier = self._at
        if barrier is not None:
            barrier.ask(_USER + reason)

    # ---------------------------------------------------------------------------------- the hooks

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Restore the newest checkpoint."""
        exchange_of(self)
        if self.params.get("epochs") is None:
            raise ValueError(
                "`Checkpoint` needs the number of epochs. Pass a list of callbacks to `fit`, or a "
                f"CallbackList with `epochs`. Received: params={self.params}"
            )
        training_state.build(self.model)
        strategy = self.model.distribute_strategy
        self._subject = training_state.subject(self.model)
        self._subject["options"].append({"steps_per_epoch": self.params.get("steps")})
        if self._at is not None:  # left by a loop that raised, without `fit`
            self.close()
        self._files = Checkpoints(strategy, self.directory, self.keep, f"every {self.every}")
        self._position = Position(self.model)
        closing.register(self)
        self._metrics: dict[str, np.ndarray] = {}
        self._first_epoch: int | None = None
        restored = self._files.restore(self._subject, self._check, self._use)
        if restored is not None:
            self._resume(restored.manifest)
        self._in_the_middle = restored is not None and restored.manifest.batch > 0
        self._rate: float | None = None  # of an epoch that resumes in the middle
        self._warn_of_order()
        self._epoch = 0
        self._due, self._trained, self._signalled, self._stops = "", False, False, False
        self._requests: list[str] = []  # the user's reasons for the checkpoint that is due
        self._chief = strategies.process_rank(strategy) == 0
        self._restart_clocks()
        self._at = StepBarrier(strategy)
        for reason in dict.fromkeys(self._waiting):
            self._at.ask(_USER + reason)
        self._signals.listen()

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Skip processed batches, and save if the end of the last epoch requested it."""
        model, metrics, self._metrics = self.model, self._metrics, {}
        self._position.epoch_begins(lambda: training_state.restore_metrics(model, metrics))
        training_state.restore_metrics(model, metrics)  # Keras resets metrics at this point
        if self._first_epoch is None:
            self._first_epoch = epoch
        if self._in_the_middle:
            self._in_the_middle = False
            rate = getattr(model.optimizer, "learning_rate", None)
            if hasattr(rate, "assign"):  # otherwise a schedule of the steps
                self._rate = float(tf.convert_to_tensor(rate))
        self._epoch = epoch
        self._save_if_due(epoch, 0)

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Save if the end of the last step requested it."""
        self._restore_rate()
        self._save_if_due(self._epoch, batch)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Report a save that has ended, and decide with all workers whether one is due."""
        assert self._at is not None
        self._files.finish(wait=False)
        self._steps += models.steps_per_execution(self.model)
        self._trained = True
        if isinstance(self.every, int) and self._steps >= self.every:
            self._due = self._due or f"{self.every} steps"
        if self._chief and time.monotonic() >= self._next_time:
            self._next_time = math.inf
            self._at.ask(_TIMER, unless_acted=True)
        if self._signals.requested is not None and not self._signalled:
            self._signalled = True
            self._at.ask(_SIGNAL + self._signals.requested)
        request = self._at.step()
        if request is not None:
            self._due = request.removeprefix(_USER)
            self._stops = request.startswith(_SIGNAL)
            if request.startswith(_USER):
                self._requests.append(self._due)
                while self._due in self._waiting:
                    self._waiting.remove(self._due)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Request a checkpoint with `every="epoch"`."""
        self._restore_rate()  # no batch was left
        if self.every == "epoch":
            self._due = self._due or f"the end of epoch {epoch + 1}"

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Reset the resume position; `end` runs after the other callbacks."""
        self._position.reset()

    def end(self) -> None:
        """Save the last checkpoint, after other callbacks have changed the model.

        Raises:
            Stopped: a worker received SIGTERM or SIGUSR1 after the last step. A signal that arrives
                after the workers have agreed stops this worker only.
        """
        assert self._at is not None
        strategy = self.model.distribute_strategy
        if self._trained:
            own = list(self._waiting)
            del self._waiting[: len(own)]  # later requests wait for the next `fit`
            waiting = agreement.gather_texts(strategy, "save the last checkpoint", json.dumps(own))
            self._requests += dict.fromkeys(itertools.chain(*map(json.loads, waiting)))
            self._due = "".join(self._requests[:1]) or self._due or "the end of `fit`"
            self._save_if_due(self._epoch + 1, 0, finished=self.params["epochs"])
        signal = self._signals.requested or ""
        signals = agreement.gather_texts(strategy, "end `Checkpoint`", signal)
        self.close()
        if any(signals) or self._signals.requested is not None:
            raise stopping.Stopped

    def close(self) -> None:
        """Stop the step barrier and the signal handlers, and wait for the save in flight.

        `fit` calls it when it ends or raises.
        """
        closing.unregister(self)
        self._position.reset()
        if self._at is not None:
            self._at.stop()
            self._at = None
        self._signals.close()
        self._files.finish()

    # ----------------------------------------------------------------------------------- the work

    def _restore_rate(self) -> None:
        """Restore the rate that callbacks changed for the second time when the epoch began."""
        rate, self._rate = self._rate, None
        if rate is not None:
            self.model.optimizer.learning_rate = rate

    def _warn_of_order(self) -> None:
        """Warn if a resumed epoch may repeat some batches and skip others."""
        warning = self._position.order_warning
        if warning and (self.every != "epoch" or self._in_the_middle):
            warnings.warn(
                f"{warning}, so an epoch that `Checkpoint` resumes in the middle may repeat some "
                "batches and skip others. Use a tf.data pipeline with seeds, or every='epoch'.",
                stacklevel=3,
            )

    def _warn_of_callbacks(self) -> None:
        """Warn of other callbacks that change the training by what they saw in earlier epochs."""
        listed = getattr(models.running_locals(self.model, "fit").get("callbacks"), "callbacks", [])
        classes = {kind.__name__ for callback in listed for kind in type(callback).__mro__}
        names = " and ".join(sorted(classes & {"EarlyStopping", "ReduceLROnPlateau"}))
        if names:
            warnings.warn(
                f"`Checkpoint` does not restore {names}: the best value and the patience begin "
                "anew, so the final weights may differ from those of an uninterrupted run. For a "
                "reproducible run use a learning-rate schedule and a fixed number of epochs.",
                stacklevel=4,
            )

    def _warn_of_options(self, described: Manifest) -> None:
        """Warn if the optimizer has other options than in the saved run, or `fit` other batches."""
        changes = changed_options(self._subject, described.subject)
        if not described.batch:
            changes = [c for c in changes if not c.startswith("steps_per_epoch:")]
        if self._subject["options"][0]["learning_rate"] == training_state.rate(self.model):
            changes = [c for c in changes if not c.startswith("learning_rate:")]
        kept = [c for c in changes if c.startswith(("warm_up", "learning_rate:"))]
        used = [c for c in changes if c not in kept]
        if used and self._files.leads:
            warnings.warn(
                f"the run in {self.directory} continues with other options: "
                f"{shortened(used, '; ', '; and')}. To continue as before, pass the saved "
                "values, also where a default has changed since tf_redsync "
                f"{described.versions.get('tf_redsync', ''):.20}.",
                stacklevel=4,
            )
        if kept and self._files.leads:
            warnings.warn(
                f"the run in {self.directory} keeps the values that it saved: "
                f"{shortened(kept, '; ', '; and')}. To change a learning rate, assign it in a "
                "callback.",
                stacklevel=4,
            )

    def _restart_clocks(self) -> None:
        self._steps = 0  # steps since the last save
        every = self.every
        seconds = every.total_seconds() if isinstance(every, datetime.timedelta) else math.inf
        self._next_time = time.monotonic() + seconds

    def _save_if_due(self, epoch: int, batch: int, finished: int = 0) -> None:
        if not self._due:
            return
        reason, requests, self._due, self._requests = self._due, self._requests, "", []
        stops, self._stops = self._stops and not finished, False
        self._begin_save(epoch, batch, reason, finished)
        self._restart_clocks()
        when_saved = self.when_saved if requests else None
        if not (finished or stops or when_saved):
            return
        saved = self._files.finish()
        if stops:
            self.close()
            raise stopping.Stopped
        if when_saved is not None:
            for request in requests:
                when_saved(request, saved)

    def _begin_save(self, epoch: int, batch: int, reason: str, finished: int) -> None:
        model = self.model
        for exchange in models.exchanges_of(model):
            exchange.schedule.interrupt()
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
        self._files.begin(
            described,
            training_state.shared(model),
            lambda: training_state.per_worker(model, with_metrics=batch > 0),
            training_state.may_differ(model),
            training_state.validator(model),
        )

    def _check(self, checkpoint: LoadedCheckpoint) -> None:
        """Raise an error for values that do not fit the model."""
        training_state.check(self.model, checkpoint)

    def _use(self, checkpoint: LoadedCheckpoint) -> None:
        """Restore the values of a checkpoint."""
        self._metrics = training_state.restore(self.model, checkpoint)

    def _resume(self, described: Manifest) -> None:
        """Make `fit` continue where a checkpoint was saved."""
        epochs, epoch = self.params["epochs"], described.epoch
        if described.finished >= epochs:  # the training may have ended early
            epoch = max(epoch, epochs)
        if epoch >= epochs and self._files.leads:
            warnings.warn(
                f"`fit` has nothing left to do: {self.directory} has the checkpoint of its end, "
                f"after epoch {described.epoch}. Pass another `directory` to `Checkpoint` for "
                f"another training. Received: epochs={epochs}",
                stacklevel=3,
            )
        now = strategies.process_count(self.model.distribute_strategy)
        if described.batch and described.workers != now and self._files.leads:
            warnings.warn(
                f"`Checkpoint` resumes in the middle of epoch {epoch + 1} with another number of "
                f"workers. The next batch, {described.batch}, is right only with the same global "
                "batch, and a learning rate without a schedule is the saved one. Use a global "
                "batch and a rate that do not depend on the number of workers. Received: "
                f"workers: {now}, saved by {described.workers}",
                stacklevel=3,
            )
        self._warn_of_options(described)
        self._first_epoch = described.first_epoch
        left = epoch < epochs
        past = epoch - described.first_epoch if left else 0
        if past and self._files.leads:
            self._warn_of_callbacks()
        self._position.resume_at(epoch, described.batch if left else 0, past)


class _AtTheEnd(ForTfKeras, keras.callbacks.Callback):
    """Calls `Checkpoint.end` after the last changes of the other callbacks to the model."""

    comes_last = True

    def __init__(self, checkpoint: Checkpoint):
        super().__init__()
        self._checkpoint = checkpoint

    @override
    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        self._checkpoint.end()
