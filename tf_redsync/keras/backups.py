"""Checks of Keras's own saving callbacks on several workers, when `fit` begins.

Keras 3's callbacks ignore workers: each callback writes to its own path. The callbacks of tf_keras
write the chief's files, with contributions of the other workers, and all workers restore them.

Names of Keras used here, all public: the classes and attributes in `KINDS`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from tf_redsync.cluster import agreement, coordination
from tf_redsync.network import strategies
from tf_redsync.state.checkpoint_store import Store
from tf_redsync.state.shared_directories import leaders

_logger = logging.getLogger("tf_redsync")

BACKUP, MODEL, TABLE = "BackupAndRestore", "ModelCheckpoint", "CSVLogger"
# Class names of callbacks, and the attribute with the path.
KINDS = {BACKUP: "backup_dir", MODEL: "filepath", TABLE: "filename", "OrbaxCheckpoint": "directory"}
_OURS = "or use tf_redsync.callbacks.Checkpoint on all workers"


def check(model: Any, callbacks: Sequence[Any], action: str) -> bool:
    """Agree that `fit` begins, and check the callbacks that save.

    Args:
        model: The model that is trained.
        callbacks: All callbacks of this worker.
        action: Text for the agreement.

    Returns:
        Whether any worker has a backup to restore.

    Raises:
        ValueError: callbacks would lose or overwrite files, or several would restore.
        Disagreement: on all workers, if they do not begin `fit` at the same point.
    """
    strategy = model.distribute_strategy
    own_entries = [entry for c in callbacks for entry in _entry(c)]
    all_entries = [
        json.loads(t) for t in agreement.gather_texts(strategy, action, json.dumps(own_entries))
    ]
    if any(kind == BACKUP for kind, *_ in own_entries) and any(map(_restores, callbacks)):
        raise ValueError(
            "`BackupAndRestore` and `Checkpoint` both restore when `fit` begins. Pass only one of "
            "them."
        )
    if sum(map(_restores, callbacks)) > 1:
        raise ValueError("`callbacks` must have at most one `Checkpoint`. Received: several.")
    if strategies.process_count(strategy) == 1:
        return False
    for kind in KINDS:
        entries = [[e for e in entries if e[0] == kind] for entries in all_entries]
        who = [rank for rank, listed in enumerate(entries) if listed]
        if kind == BACKUP and 0 < len(who) < len(entries):
            raise ValueError(
                f"only {_names(who)} of {len(entries)} workers have a `BackupAndRestore`: after a "
                f"restart the others would have different weights. Pass it to all, {_OURS}."
            )
        for place in range(max(map(len, entries))):
            _check_place(strategy, kind, [e[place] if place < len(e) else None for e in entries])
    return any(kind == BACKUP for listed in all_entries for kind, *_ in listed)


def check_equal(model: Any, epoch: int) -> None:
    """Check that all workers have restored the same backup.

    Raises:
        ValueError: on all workers, if their backups have different epochs or weights.
    """
    digest = hashlib.blake2b(digest_size=8)
    for weight in model.trainable_variables:
        digest.update(np.ascontiguousarray(weight.numpy()).tobytes())
    backup = [epoch + 1, digest.hexdigest()]
    backups = agreement.gather_texts(
        model.distribute_strategy, "compare backups", json.dumps(backup)
    )
    if len(set(backups)) > 1:
        lines = [
            f"worker {rank}: epoch {number}, weights {weights}"
            for rank, (number, weights) in enumerate(map(json.loads, backups))
        ]
        raise _different_steps_error(lines)


def _different_steps_error(lines: Sequence[str]) -> ValueError:
    return ValueError(
        "the workers have backups of different steps: one of them was killed while the others "
        f"saved, or its backup is lost. Remove all backups, {_OURS}, which saves all or none.\n"
        + "\n".join(lines)
    )


def _entry(callback: Any) -> list[list[str]]:
    """Return `[[kind, family, folder, file, metadata]]` of a saving callback, else `[]`."""
    for base in type(callback).__mro__:
        family = base.__module__.partition(".")[0]
        if base.__name__ in KINDS and family in ("keras", "tf_keras"):
            kind = base.__name__
            path = os.fspath(getattr(callback, KINDS[kind]))
            if path == os.devnull:
                return []
            folder, file = path, ""
            if kind in (MODEL, TABLE):  # a folder's name may contain the epoch, too
                folder = os.path.dirname(path.partition("{")[0] if kind == MODEL else path) or "."
                file = os.path.relpath(path, folder)
            moment = _moment(path) if kind == BACKUP and family == "keras" else ""
            return [[kind, family, folder, file, moment]]
    return []


def _moment(folder: str) -> str:
    """Return the metadata of a backup of Keras 3 as text, or "none"."""
    try:
        return Path(folder, "training_metadata.json").read_text(encoding="utf-8")
    except OSError:
        return "none"


def _restores(callback: Any) -> bool:
    return getattr(callback, "restores", False)


def _check_place(strategy: tf.distribute.Strategy, kind: str, entries: list[Any]) -> None:
    """Check that the workers write different files with one of their callbacks."""
    written = [e for e in entries if e]
    if len(written) < 2:
        return
    entry = entries[strategies.process_rank(strategy)] or written[0]
    family, folder, file, _ = entry[1:]
    if family == "tf_keras" and kind == MODEL:
        return  # the chief writes the file, other workers temporary files
    first = [0] * len(entries)
    if not any("://" in e[2] for e in written):  # URLs are shared by all workers
        first = leaders(strategy, Store(folder), f"look where {kind} writes")
    if family == "tf_keras" and kind == BACKUP:
        if set(first) != {0}:
            raise ValueError(
                "`BackupAndRestore` of tf_keras writes only the chief's directory, and all workers "
                f"restore from it. Received: backup_dir={folder!r} on this worker. Pass all "
                f"workers the same directory on a shared file system, {_OURS}."
            )
        return
    places = [(leader, e[3]) for leader, e in zip(first, entries, strict=True) if e]
    ranks = [rank for rank, e in enumerate(entries) if e]
    same = [r for r, p in zip(ranks, places, strict=True) if places.count(p) > 1]
    if same:
        remedies = ["Use a different path on each worker"]
        if kind != BACKUP:
            remedies.append(f"pass `{kind}` to the chief only")
        if kind != TABLE:
            remedies.append("use tf_redsync.callbacks.Checkpoint on all workers")
        raise ValueError(
            f"{_names(same)} would write the same file with `{kind}`. Received: "
            f"{os.path.join(folder, file)} on this worker. {', or '.join(remedies)}."
        )
    moments = [f"worker {rank}: {e[4]}" for rank, e in enumerate(entries) if e]
    if len({e[4] for e in written}) > 1:
        raise _different_steps_error(moments)


def _names(ranks: Sequence[int]) -> str:
    return f"worker{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


_PREFIX = "tf_redsync/saved"
_READ_MS = 10_000  # for a key that exists


def compare(model: Any, path: Any, method: str) -> None:
    """Publish the path that a model is saved to, and warn if other workers save to it.

    Args:
        model: A model of Keras 3 or tf_keras.
        path: The method's argument; ignored unless it is a path.
        method: Name of the saving method.
    """
    strategy = getattr(model, "distribute_strategy", None)
    if isinstance(path, (str, os.PathLike)) and strategies.is_redsync_strategy(strategy):
        _compare(strategy, os.fspath(path), method)


def _compare(strategy: tf.distribute.Strategy, path: str, method: str) -> None:
    """Publish a path, and warn if another worker of this machine has published it.

    The key-value store keeps the first value of a key. Of several workers that publish at the same
    time, all but one therefore warn. If the chief has ended before others save, the store is gone
    and paths are not compared.
    """
    workers, rank = strategies.process_count(strategy), strategies.process_rank(strategy)
    if workers == 1:
        return
    place = path if "://" in path else f"{platform.node()}:{os.path.realpath(path)}"
    key = f"{_PREFIX}/{hashlib.sha256(place.encode()).hexdigest()}"
    store: Any = coordination.key_value_store()
    try:
        first = _first(store, key, rank)
    except tf.errors.OpError as error:
        _logger.info("%s: not compared with the paths of other workers: %s", path, error.message)
        return
    if first != rank:
        warnings.warn(
            f"workers {rank} and {first} both save to {path!r} with `{method}` and overwrite "
            "each other's file. Use a different path on each worker, or save on the chief only; "
            "see docs/saving.md.",
            stacklevel=3,
        )


def _first(store: Any, key: str, rank: int) -> int:
    """Publish a key; return the rank of the worker that published it first."""
    try:
        store.set_config_key_value(key, str(rank))
    except tf.errors.AlreadyExistsError:
        return int(store.get_config_key_value(key, _READ_MS))
    return rank
