"""Warns where several workers of one machine save to the same path.

They would write that file together. A save asks no other worker and waits for none, so the chief
may save alone: a worker notes its path in the coordination service, then looks for the others'
notes. Of two that save at once, the one that looks last finds the other's note. Workers of
different machines are not compared: their paths may be on different disks.
"""

from __future__ import annotations

import hashlib
import os
import platform
import warnings
from typing import Any

import tensorflow as tf

from tf_redsync.cluster import coordination
from tf_redsync.network import collectives
from tf_redsync.step import strategy_hooks

_PREFIX = "tf_redsync/saved"
_LOOK_MS = 1  # how long a note that is not there is waited for


def compare(model: Any, path: Any, method: str) -> None:
    """Note the path that a model is saved to, and warn of other workers that have noted it.

    Args:
        model: Of either Keras.
        path: What the method was given, if that is a path.
        method: Its name.
    """
    strategy = getattr(model, "distribute_strategy", None)
    if isinstance(path, (str, os.PathLike)) and strategy_hooks.is_ours(strategy):
        _compare(strategy, os.fspath(path), method)


def _compare(strategy: tf.distribute.Strategy, path: str, method: str) -> None:
    """Note a path, and warn of other workers of this machine that have noted it."""
    workers, rank = collectives.worker_count(strategy), collectives.worker_rank(strategy)
    if workers == 1:
        return
    place = path if "://" in path else f"{platform.node()}:{os.path.realpath(path)}"
    key = f"{_PREFIX}/{hashlib.sha256(place.encode()).hexdigest()}"
    store: Any = coordination.key_value_store()
    try:
        store.set_config_key_value(f"{key}/{rank}", path)
    except tf.errors.AlreadyExistsError:
        return  # it has looked before
    others = [r for r in range(workers) if r != rank and _is_noted(store, f"{key}/{r}")]
    if others:
        warnings.warn(
            f"worker {rank} saves to {path!r} by `{method}`, and so does worker {others[0]}: one "
            "file is written by several. Give each worker a path of its own, or save on the "
            "chief alone; see docs/saving.md.",
            stacklevel=3,
        )


def _is_noted(store: Any, key: str) -> bool:
    try:
        store.get_config_key_value(key, _LOOK_MS)
    except tf.errors.DeadlineExceededError:
        return False
    return True
