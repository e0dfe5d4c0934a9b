"""An exchange with a saveable state, by itself or in a `tf.train.Checkpoint`."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from typing_extensions import override

from tf_redsync.state import checkpoint_files, restore, snapshot
from tf_redsync.step.gradient_exchange import GradientExchange

CHECKPOINT_KEY = "worker_state"  # the name of an exchange's snapshot in a checkpoint


class SnapshotState(tf.train.experimental.PythonState):
    """This worker's snapshot as one value of a `tf.train.Checkpoint`: bytes of an `.npz` archive.

    Args:
        exchange: Returns the exchange, which must be built.
    """

    def __init__(self, exchange: Callable[[], GradientExchange]):
        self._exchange = exchange

    @override
    def serialize(self) -> bytes:
        archive = io.BytesIO()
        arrays: dict[str, Any] = snapshot.capture(self._exchange())
        np.savez(archive, **arrays)
        return archive.getvalue()

    @override
    def deserialize(self, string_value: bytes) -> None:
        restore.restore_or_warn(self._exchange(), lambda: [arrays_of(string_value)])


def arrays_of(archive: bytes) -> dict[str, np.ndarray]:
    """Return the arrays of a snapshot in a checkpoint.

    Args:
        archive: The checkpoint's value.

    Raises:
        ValueError: If `archive` is not an `.npz` archive of arrays.
    """
    try:
        with np.load(io.BytesIO(archive), allow_pickle=False) as arrays:
            checkpoint_files.check_unpacked(arrays.zip, len(archive))
            return dict(arrays)
    except Exception as error:  # zipfile and numpy raise many classes for corrupted data
        raise ValueError(
            f"the exchange's state in the checkpoint is corrupted ({error}). Load an earlier one."
        ) from error


class SaveableExchange(GradientExchange):
    """A `GradientExchange` that saves and restores its state, also in a `tf.train.Checkpoint`."""

    def __init__(self, **settings: Any):
        super().__init__(**settings)
        self._in_checkpoint = SnapshotState(lambda: self)

    def worker_state(self) -> dict[str, np.ndarray]:
        """Return this worker's snapshot: all state that later steps depend on, as numeric arrays.

        It holds the rank, the number of workers, the step and other counters, the residuals,
        velocities and other state of the methods, and, while each worker has its own weights, the
        weights. It needs no communication, so any worker may call it between two steps.
        """
        return snapshot.capture(self)

    def restore_worker_states(self, parts: Sequence[Mapping[str, np.ndarray]]) -> None:
        """Restore the snapshots that the workers of one run took at the same step.

        All workers must call it between two steps, once the variables of the model and the
        optimizer are restored. Each passes the snapshots that it has: its own, several, or all.

        With as many workers as in that run, each with its own snapshot, training resumes bit by
        bit. Otherwise the sum over all snapshots is given to the workers in equal shares; each
        snapshot counts once, even if several workers have it.

        Args:
            parts: Dicts that `worker_state` returned. May be empty if another worker has one.

        Raises:
            ValueError: On all workers, if no worker has a part, or if `parts` are of different
                saves, of another model or method, or have invalid values.
            Disagreement: If the workers restore at different steps.
        """
        if not restore.restore(self, lambda: parts):
            raise ValueError(
                "`parts` must hold a part on at least one worker. Received: parts=[] on all "
                "workers."
            )

    @override
    def _trackable_children(self, save_type: str = "checkpoint", **kwargs: Any) -> dict[str, Any]:
        """Return the snapshot for a checkpoint, and nothing for a SavedModel."""
        del kwargs
        return {CHECKPOINT_KEY: self._in_checkpoint} if save_type == "checkpoint" else {}

    @override
    def _lookup_dependency(self, name: str, cached_dependencies: Any = None) -> Any:
        del cached_dependencies
        return self._in_checkpoint if name == CHECKPOINT_KEY else None
