"""Checkpoints on which all workers agree, when they are written and when they are restored.

An error on one worker reaches all workers before any of them proceeds, so they write the same
checkpoints and resume from the same one. The workers exchange texts; there are no collectives.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import math
import warnings
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from tf_redsync.cluster import agreement
from tf_redsync.network import collectives
from tf_redsync.state.checkpoint_manifest import (
    Manifest,
    Part,
    Refused,
    checksum,
    differences,
)
from tf_redsync.state.checkpoint_store import Store
from tf_redsync.state.shared_directories import by_worker, leaders, os_error

Arrays = dict[str, np.ndarray]
_SHARED, _OWN = "shared/", "own/"
# Limits of a part's size, per byte of the model and the optimizer and in total: a method's state
# has a few times as many elements as the model, for each replica of the process.
_MOST_PER_BYTE, _MOST_BYTES = 100, 1 << 30
_logger = logging.getLogger("tf_redsync")


@dataclasses.dataclass(frozen=True)
class Found:
    """A checkpoint that was read.

    Attributes:
        path: Its folder.
        manifest: Its manifest.
        shared: The values for this worker of what the workers have in common.
        own: The values of this worker alone; or, if another number of workers wrote it, of each of
            them, by rank.
    """

    path: Path
    manifest: Manifest
    shared: Arrays
    own: list[Arrays]


class Checkpoints:
    """The checkpoints of a job, in one directory or in one per machine.

    All workers must create it and call its methods in the same order.

    Args:
        strategy: The strategy of the workers.
        directory: The directory, as this worker sees it.
        keep: How many checkpoints stay.
        when: When they are saved, on which the workers must agree.

    Raises:
        OSError: On all workers, if one of them cannot write to the directory.
    """

    def __init__(
        self, strategy: tf.distribute.Strategy, directory: str | Path, keep: int, when: str
    ):
        self._strategy, self._keep = strategy, keep
        self._store = Store(directory)
        self._rank = collectives.worker_rank(strategy)
        self._workers = collectives.worker_count(strategy)
        # The leader of a directory writes the values that its workers have in common.
        what = f"keep {keep} checkpoints, one {when}"
        self._leaders = leaders(strategy, self._store, what)
        told = [self._store.numbers(), self._store.next_number()]
        all_told = [json.loads(t) for t in self._gather("list checkpoints", json.dumps(told))]
        self._numbers = sorted({n for numbers, _ in all_told for n in numbers}, reverse=True)
        self._next = max(following for _, following in all_told)
        self._refused: dict[int, str] = {}
        self._last: Path | None = None

    @property
    def leads(self) -> bool:
        """Whether this worker is the leader of its directory."""
        return self._leaders[self._rank] == self._rank

    def _gather(self, what: str, told: str) -> list[str]:
        return agreement.gather_texts(self._strategy, what, told)

    def _clean_up(self, remove: Callable[[], Any]) -> None:
        """Remove old files; best effort, since errors do not concern other workers."""
        try:
            remove()
        except OSError as error:
            warnings.warn(f"cannot remove old files: {error}", stacklevel=4)

    # ---------------------------------------------------------------------------------- restoring

    def restore(
        self,
        subject: dict[str, Any],
        check: Callable[[Found], None],
        use: Callable[[Found], None],
    ) -> Found | None:
        """Restore the newest checkpoint that all workers can use; `None` without checkpoints.

        A warning names the checkpoints that were refused, the reasons, and the one that is used.

        Args:
            subject: Identifies the model and the methods; see `checkpoint_manifest.differences`.
            check: Raises a `ValueError` for values that the model cannot use. It must not
                communicate.
            use: Assigns the values on all workers, or raises a `ValueError` on all of them.

        Raises:
            ValueError: If checkpoints exist and none can be used.
        """
        found = next(filter(None, (self._try(n, subject, check, use) for n in self._numbers)), None)
        refused = "".join(f"\n{self._store.path(n)}: {r}" for n, r in self._refused.items())
        if found is None and refused:
            raise ValueError(
                "no checkpoint can be used. Give `Checkpoint` another directory, or move these "
                f"away to start a new training.{refused}"
            )
        if found is not None:
            self._last = found.path
            if refused:
                warnings.warn(
                    f"training resumes from {found.path} ({found.manifest}); newer checkpoints "
                    f"cannot be used:{refused}",
                    stacklevel=3,
                )
            if self.leads:
                _logger.info("training resumes from %s: %s", found.path, found.manifest)
        if self.leads:
            self._clean_up(self._store.remove_leftovers)
        return found

    def _try(
        self,
        number: int,
        subject: dict[str, Any],
        check: Callable[[Found], None],
        use: Callable[[Found], None],
    ) -> Found | None:
        """Restore a checkpoint if all workers can."""
        name, found, failed, digest = self._store.path(number).name, None, "", ""
        try:
            found = self._read(number, subject)
            check(found)
            digest = checksum(found.manifest)
        except ValueError as error:  # or the subclass `Refused`
            failed = str(error)
        told = [json.loads(t) for t in self._gather(f"read {name}", json.dumps([failed, digest]))]
        all_failed = [failed for failed, _ in told]
        if not any(all_failed) and len({digest for _, digest in told}) > 1:
            all_failed = ["the workers see different checkpoints under this name"]
        if not any(all_failed):
            assert found is not None
            try:
                use(found)
            except ValueError as error:
                failed = str(error)
            all_failed = self._gather(f"restore {name}", failed)
            if not any(all_failed):
                return found
        self._refused[number] = by_worker(all_failed)
        return None

    def _read(self, number: int, subject: dict[str, Any]) -> Found:
        """Verify and read the parts of a checkpoint that this worker needs."""
        manifest = self._store.manifest(number)
        different = differences(subject, manifest.subject)
        if different:
            raise Refused(different)
        parts = manifest.parts
        wanted = [parts[self._rank]] if manifest.workers == self._workers else list(parts)
        whole = next((p for p in self._store.here(number, parts) if p.whole), None)
        if whole is None:
            raise Refused("no part in this directory has the model's variables")
        needed = list(dict.fromkeys([*wanted, whole]))
        most = _most_bytes(subject)
        for part in needed:
            if part.size > most:
                raise Refused(f"{part.name} has {part.size} bytes, above the limit of {most}")
        self._store.verify(number, needed)
        read = {p.rank: self._store.read_part(number, p, _dtype_of) for p in needed}
        shared = _of(_SHARED, read[whole.rank])
        if manifest.workers == self._workers:
            shared |= _of(_SHARED, read[self._rank])
        own = [_of(_OWN, read[p.rank]) for p in wanted]
        return Found(self._store.path(number), manifest, shared, own)

    # ------------------------------------------------------------------------------------- saving

    def save(
        self,
        manifest: Manifest,
        shared: Mapping[str, Callable[[], np.ndarray]],
        own: Arrays,
        compared: Collection[str],
        problem: Callable[[Arrays], str] = lambda shared: "",
    ) -> bool:
        """Write a checkpoint.

        If one worker fails, all workers warn with the reason, and the previous checkpoint stays.

        Args:
            manifest: Its manifest, without parts; the same on all workers.
            shared: Functions that read the values that the workers have in common, by name. Only
                the leaders write them.
            own: Values of this worker alone.
            compared: Names in `shared` whose values may differ between workers. A worker whose
                value differs from its leader's writes it, too.
            problem: Returns why the values in `shared` must not be saved, or `""`.

        Returns:
            Whether the checkpoint is committed; the same on all workers.
        """
        number, path = self._next, self._store.path(self._next)
        self._next += 1
        name = f"{path.name} at step {manifest.step}"
        values = self._values(f"save {name}", shared, compared)
        failed = problem(_of(_SHARED, values))
        written: dict[str, Any] = {}
        if not failed:
            values |= {_OWN + n: value for n, value in own.items()}
            failed, written = self._write(number, values)
        results = [
            json.loads(t) for t in self._gather(f"commit {name}", json.dumps([failed, written]))
        ]
        all_failed = [failed for failed, _ in results]
        if not any(all_failed):
            parts = tuple(Part(**part) for _, part in results)
            complete = dataclasses.replace(manifest, parts=parts)
            failed = os_error(lambda: self._store.commit(number, complete)) if self.leads else ""
            all_failed = self._gather(f"keep {name}", failed)
        if any(all_failed):
            self._give_up(number, manifest.step, all_failed)
            return False
        self._last = path
        if self.leads:
            subject = manifest.subject
            self._clean_up(lambda: self._store.remove_old(self._keep, subject, self._refused))
        return True

    def _values(
        self, what: str, shared: Mapping[str, Callable[[], np.ndarray]], compared: Collection[str]
    ) -> Arrays:
        """Return the values that this worker writes of those that workers have in common."""
        read = {n: shared[n]() for n in compared}
        digests = {n: _digest(value) for n, value in read.items()}
        told = self._gather(what, json.dumps(digests) if self.leads else "")
        if self.leads:
            read |= {n: value() for n, value in shared.items() if n not in read}
            return {_SHARED + n: value for n, value in read.items()}
        theirs = json.loads(told[self._leaders[self._rank]])
        return {_SHARED + n: read[n] for n in compared if theirs.get(n) != digests[n]}

    def _write(self, number: int, values: Arrays) -> tuple[str, dict[str, Any]]:
        """Write this worker's part; return an error message, or `""`, and the part's fields."""
        try:
            part = self._store.write_part(number, self._rank, values, whole=self.leads)
        except OSError as error:
            return str(error), {}
        return "", dataclasses.asdict(part)

    def _give_up(self, number: int, step: int, failed: list[str]) -> None:
        """Abandon a checkpoint that could not be written, with a warning."""
        if self.leads:
            self._clean_up(lambda: self._store.remove(number))
        last = f"The last checkpoint is {self._last}" if self._last else "No checkpoint precedes it"
        warnings.warn(
            f"{self._store.path(number)} could not be saved at step {step}; training continues. "
            f"{last}.\n{by_worker(failed)}",
            stacklevel=4,
        )


def _digest(value: np.ndarray) -> str:
    return hashlib.blake2b(np.ascontiguousarray(value).tobytes(), digest_size=8).hexdigest()


def _of(prefix: str, values: Arrays) -> Arrays:
    return {n.removeprefix(prefix): v for n, v in values.items() if n.startswith(prefix)}


def _most_bytes(subject: dict[str, Any]) -> int:
    """Return the largest plausible size of a part of a model and an optimizer, in bytes."""
    variables = [v for listed in subject["variables"].values() for v in listed]
    sizes = [math.prod(map(abs, s)) * np.dtype(_dtype_of(d)).itemsize for _, d, s in variables]
    return _MOST_BYTES + _MOST_PER_BYTE * sum(sizes)


def _dtype_of(name: str) -> Any:
    """Return numpy's dtype for the name of one of TensorFlow's."""
    return tf.as_dtype(name).as_numpy_dtype
