"""Reading a worker's part of the exchange's state from files of Keras or TensorFlow."""

from __future__ import annotations

import io
import json
import os
import zipfile
import zlib
from collections.abc import Mapping
from typing import Any

import h5py
import numpy as np
import tensorflow as tf

from tf_redsync.keras import exchange_state
from tf_redsync.state.saveable_exchange import CHECKPOINT_KEY, arrays_of

_GROUP = f"/{exchange_state.ATTRIBUTE}/vars"
_H5_IN_ARCHIVE = "model.weights.h5"
_CHECKPOINT_SUFFIX = f"{CHECKPOINT_KEY}/.ATTRIBUTES/py_state"


def read_worker_state(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Return a worker's part of the exchange's state from a file that the worker saved.

    To resume with a different number of workers, read the files of all previous workers on every
    worker, and pass the parts to `optimizer.exchange.restore_worker_states`.

    Args:
        path: A `.keras`, `.weights.h5` or sharded `.weights.json` file, or the prefix of a
            `tf.train.Checkpoint`.

    Raises:
        ValueError: the file has no such part, or several.
        OSError: the file cannot be read.

    Example:
        parts = [tf_redsync.read_worker_state(f"worker_{rank}.keras") for rank in range(4)]
        model.optimizer.exchange.restore_worker_states(parts)
    """
    name = os.fspath(path)
    try:
        states = _states(name)
    except (zipfile.BadZipFile, zlib.error, EOFError, tf.errors.OpError) as error:
        raise OSError(f"`path` cannot be read: {error}. Received: path={name!r}") from error
    if len(states) != 1:
        raise ValueError(
            "`path` must be a file with the state of exactly one exchange, saved with a built "
            f"DistributedOptimizer. Received: path={name!r} with {len(states)} states."
        )
    return states[0]


def _states(path: str) -> list[dict[str, np.ndarray]]:
    """Return the parts in a file or checkpoint."""
    if path.endswith(".keras"):
        with zipfile.ZipFile(path) as archive:
            if _H5_IN_ARCHIVE not in archive.namelist():
                return []
            return _in_h5(io.BytesIO(archive.read(_H5_IN_ARCHIVE)))
    if path.endswith(".h5"):
        return _in_h5(path)
    if path.endswith(".weights.json"):
        return _in_shards(path)
    reader = tf.train.load_checkpoint(path)
    keys = [k for k in reader.get_variable_to_shape_map() if k.endswith(_CHECKPOINT_SUFFIX)]
    return [arrays_of(reader.get_tensor(key)) for key in keys]


def _in_h5(file: Any) -> list[dict[str, np.ndarray]]:
    """Return the parts in an HDF5 file of Keras."""
    groups: list[Mapping[str, Any]] = []

    def visit(name: str, item: Any) -> None:
        if isinstance(item, h5py.Group) and f"/{name}".endswith(_GROUP):
            groups.append(item)

    with h5py.File(file, "r") as opened:
        opened.visititems(visit)
        return [exchange_state.snapshot_in(group) for group in groups if len(group)]


def _in_shards(path: str) -> list[dict[str, np.ndarray]]:
    """Return the parts in the shards that a `.weights.json` file of Keras lists, by group."""
    with open(path, encoding="utf-8") as file:
        index = json.load(file)
    shards = index.get("weight_map", {}) if isinstance(index, dict) else {}
    states = []
    for group in (g for g in shards if g.endswith(_GROUP)):
        state: dict[str, np.ndarray] = {}
        files = shards[group]
        for name in [files] if isinstance(files, str) else files:
            with h5py.File(os.path.join(os.path.dirname(path), name), "r") as opened:
                if group in opened:  # absent from a shard that was full when the group began
                    state |= exchange_state.snapshot_in(opened[group])
        states.append(state)
    return states
