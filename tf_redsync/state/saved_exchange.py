"""An exchange that can be saved: the worker's snapshot, alone or in TensorFlow's checkpoints."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from typing_extensions import override

from tf_redsync.auto import Auto, decision
from tf_redsync.cluster import agreement
from tf_redsync.state import capture, restore
from tf_redsync.step import masks
from tf_redsync.step.gradient_exchange import GradientExchange

IN_CHECKPOINT = "worker_state"  # the name of an exchange's state there


class InCheckpoint(tf.train.experimental.PythonState):
    """This worker's part as one value of a `tf.train.Checkpoint`: the bytes of an `.npz` archive.

    Args:
        exchange: Returns the exchange, a built one.
    """

    def __init__(self, exchange: Callable[[], Any]):
        self._exchange = exchange

    @override
    def serialize(self) -> bytes:
        archive = io.BytesIO()
        np.savez(archive, allow_pickle=False, **capture.capture(self._exchange()))
        return archive.getvalue()

    @override
    def deserialize(self, string_value: bytes) -> None:
        restore.restore_or_warn(self._exchange(), lambda: [arrays_of(string_value)])


def arrays_of(text: bytes) -> dict[str, np.ndarray]:
    """Return the part in the value that a checkpoint has.

    Raises:
        ValueError: for anything else.
    """
    try:
        with np.load(io.BytesIO(text), allow_pickle=False) as archive:
            return dict(archive)
    except (ValueError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(
            f"the exchange's state in the checkpoint is damaged ({error}). Load an earlier one."
        ) from error


class SavedExchange(GradientExchange):
    """A `GradientExchange` whose state can be saved and restored, also by `tf.train.Checkpoint`."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self._in_checkpoint = InCheckpoint(lambda: self)

    def worker_state(self) -> dict[str, np.ndarray]:
        """Return this worker's own state: all that later steps depend on, as arrays of numbers.

        The state of one process, by flat names: its rank, the number of workers and the step;
        counters; its residuals, velocities and whatever else its methods keep; and, where the
        weights are each worker's own at the moment, its weights. Nothing is asked of other workers,
        so any of them may call it at any time between two steps.
        """
        return capture.capture(self)

    def restore_worker_states(self, parts: Sequence[Mapping[str, np.ndarray]]) -> None:
        """Set the state to what `worker_state` returned on the workers of one save.

        All workers must call it, between two steps, each with all the parts it has: its own one, or
        those of several ranks, or of all. If there are as many workers as then, and each has its
        own part, training goes on bit by bit as it would have. Otherwise what all parts hold
        together is given to the workers in equal shares; each part
        counts once, also if several workers have it.

        Call it once the model's and the optimizer's variables are restored.

        Args:
            parts: What `worker_state` returned, on one worker or several. This worker may have
                none if others have some.

        Raises:
            ValueError: on all workers, for parts of different saves, of another model or method, or
                with numbers that cannot be; and if no worker has a part.
            Disagreement: where workers do not restore the state at the same step.
        """
        if not restore.restore(self, lambda: parts):
            raise ValueError(
                "`parts` must hold a part on one worker at least. Received: none on any worker."
            )

    def restored(self) -> None:
        """Note that the state is now one that was saved."""
        self.fresh = False
        self.schedule.resumed()
        for length in self.lengths:
            length.restored(self.strategy)
        if masks.any_pruned(self):
            self.awaited = True

    def decision(self) -> dict[str, Any] | None:
        """Return what `Auto` has chosen, as JSON has it; `None` where the user chose."""
        if self.resolved is self.policy:
            return None
        return decision.described(self.assignments, self.resolved.trial_steps)

    def keep_decision(self, found: dict[str, Any] | None) -> None:
        """Go on with what `Auto` chose in another run, if no step has been traced yet.

        Args:
            found: What `decision` returned there, the same on all workers.
        """
        if found is None or self.decision() in (None, found) or self.called:
            return
        resolved = decision.kept(found)
        assignments = resolved.assign(self.specs)
        momenta = {a.method.traits.momentum_in_exchange for a in assignments}
        if isinstance(self.policy, Auto) and not momenta <= {
            self.policy.momentum,
            self.policy.movable,
        }:
            return  # the optimizer is another one now
        local = {
            bool(a.method.sync_schedule.local_steps) for a in (*assignments, *self.assignments)
        }
        if len(local) > 1:  # other weights, too: the residuals have no place then, see `restore`
            return
        with agreement.agreed(self.strategy, "create the state that Auto chose in another run"):
            with self.strategy.scope():
                self.create_state(resolved, assignments)

    @override
    def _trackable_children(self, save_type: str = "checkpoint", **kwargs: Any) -> dict[str, Any]:
        """Return the worker's part for a checkpoint, and nothing for a SavedModel."""
        del kwargs
        return {IN_CHECKPOINT: self._in_checkpoint} if save_type == "checkpoint" else {}

    @override
    def _lookup_dependency(self, name: str, cached_dependencies: Any = None) -> Any:
        del cached_dependencies
        return self._in_checkpoint if name == IN_CHECKPOINT else None
