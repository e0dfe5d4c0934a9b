"""Checkpoints on which all workers agree, when they are written and when they are restored.

An error on one worker reaches all workers, so they write the same checkpoints and resume from the
same one. The workers exchange texts; there are no collectives.

A save copies the values between two steps. A thread of each worker does the rest, and the threads
agree: the leaders claim the checkpoint, all workers write their parts, and the leaders commit the
checkpoint when all parts are on disk. So a save completes even if a main thread waits in a step or
has raised.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import math
import threading
import uuid
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from typing_extensions import override

from tf_redsync.cluster import agreement, watchdog
from tf_redsync.network import strategies
from tf_redsync.state.checkpoint_manifest import (
    Manifest,
    Part,
    Refused,
    checksum,
    differences,
)
from tf_redsync.state.checkpoint_store import Store
from tf_redsync.state.shared_directories import by_worker, leaders

Arrays = dict[str, np.ndarray]
_SHARED, _OWN = "shared/", "own/"
# Maximum size of a part: _MOST_BYTES, plus _MOST_PER_BYTE for each byte of the model and the
# optimizer. A method's state is a few times as large as the model, for each replica of the process.
_MOST_PER_BYTE, _MOST_BYTES = 100, 1 << 30
_NO_ANSWER = ["the other workers do not answer"]
_logger = logging.getLogger("tf_redsync")


class _Save(threading.Thread):
    """A save in flight: the thread that writes and commits a checkpoint.

    Args:
        number: The checkpoint.
        step: The step at which its values were copied.
        write: The thread's work; it sets `failed`.

    Attributes:
        failed: Error messages by rank, or `_NO_ANSWER`; empty texts after a commit.
    """

    def __init__(self, number: int, step: int, write: Callable[[_Save], None]):
        super().__init__(name="tf_redsync_checkpoint", daemon=True)
        self.number, self.step, self.failed = number, step, _NO_ANSWER
        self._write = write

    @override
    def run(self) -> None:
        self._write(self)


@dataclasses.dataclass(frozen=True)
class LoadedCheckpoint:
    """A checkpoint that was read.

    Attributes:
        path: Its folder.
        manifest: Its manifest.
        shared: This worker's values of the variables that all workers have in common.
        own: Values of this worker alone. If another number of workers wrote the checkpoint, those
            of this worker's share of them, at least one.
        repeated: Whether `own` is also the share of the worker of the rank before.
    """

    path: Path
    manifest: Manifest
    shared: Arrays
    own: list[Arrays]
    repeated: bool = False


class Checkpoints:
    """The checkpoints of a job, in one directory or in one per machine.

    All workers must create it and call its methods in the same order.

    Args:
        strategy: The strategy of the workers.
        directory: The directory, as this worker sees it.
        keep: Number of checkpoints to keep.
        when: Text for when they are saved, equal on all workers.

    Raises:
        OSError: On all workers, if one of them cannot write to `directory`.
    """

    def __init__(
        self, strategy: tf.distribute.Strategy, directory: str | Path, keep: int, when: str
    ):
        self._strategy, self._keep = strategy, keep
        self._store = Store(directory)
        self._rank = strategies.process_rank(strategy)
        self._workers = strategies.process_count(strategy)
        # The leader of a directory writes the values that the directory's workers have in common.
        action = f"keep {keep} checkpoints, one {when}"
        self._leaders = leaders(strategy, self._store, action)
        listing = [self._store.numbers(), self._store.next_number(), uuid.uuid4().hex]
        listings = [json.loads(t) for t in self._gather("list checkpoints", json.dumps(listing))]
        self._numbers = sorted({n for numbers, _, _ in listings for n in numbers}, reverse=True)
        self._next = max(following for _, following, _ in listings)
        self._channel = agreement.Channel(strategy, listings[0][2])
        self._save: _Save | None = None
        self._refused: dict[int, str] = {}
        self._last: Path | None = None

    @property
    def leads(self) -> bool:
        """Whether this worker is the leader of its directory."""
        return self._leaders[self._rank] == self._rank

    def _gather(self, action: str, text: str) -> list[str]:
        return agreement.gather_texts(self._strategy, action, text)

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
        check: Callable[[LoadedCheckpoint], None],
        use: Callable[[LoadedCheckpoint], None],
    ) -> LoadedCheckpoint | None:
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
        checkpoint = next(
            filter(None, (self._try(n, subject, check, use) for n in self._numbers)), None
        )
        refused = "".join(f"\n{self._store.path(n)}: {r}" for n, r in self._refused.items())
        if checkpoint is None and refused:
            raise ValueError(
                "no checkpoint can be used. Give `Checkpoint` another directory, or move these "
                f"away to start a new training.{refused}"
            )
        if checkpoint is not None:
            self._last = checkpoint.path
            if refused:
                warnings.warn(
                    f"training resumes from {checkpoint.path} ({checkpoint.manifest}); newer "
                    f"checkpoints cannot be used:{refused}",
                    stacklevel=3,
                )
            if self.leads:
                _logger.info("training resumes from %s: %s", checkpoint.path, checkpoint.manifest)
        if self.leads:
            self._clean_up(self._store.remove_leftovers)
        return checkpoint

    def _try(
        self,
        number: int,
        subject: dict[str, Any],
        check: Callable[[LoadedCheckpoint], None],
        use: Callable[[LoadedCheckpoint], None],
    ) -> LoadedCheckpoint | None:
        """Restore a checkpoint if all workers can."""
        name, checkpoint, failed, digest = self._store.path(number).name, None, "", ""
        try:
            checkpoint = self._read(number, subject)
            check(checkpoint)
            digest = checksum(checkpoint.manifest)
        except ValueError as error:  # or the subclass `Refused`
            failed = str(error)
        results = [
            json.loads(t) for t in self._gather(f"read {name}", json.dumps([failed, digest]))
        ]
        all_failed = [failed for failed, _ in results]
        if not any(all_failed) and len({digest for _, digest in results}) > 1:
            all_failed = ["the workers see different checkpoints under this name"]
        if not any(all_failed):
            assert checkpoint is not None
            try:
                use(checkpoint)
            except ValueError as error:
                failed = str(error)
            all_failed = self._gather(f"restore {name}", failed)
            if not any(all_failed):
                return checkpoint
        self._refused[number] = by_worker(all_failed)
        return None

    def _read(self, number: int, subject: dict[str, Any]) -> LoadedCheckpoint:
        """Verify and read the parts of a checkpoint that this worker needs."""
        manifest = self._store.manifest(number)
        different = differences(subject, manifest.subject)
        if different:
            raise Refused(different)
        parts = manifest.parts
        wanted = _share(parts, self._rank, self._workers)
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
        shared = _values_with_prefix(_SHARED, read[whole.rank])
        if manifest.workers == self._workers:
            shared |= _values_with_prefix(_SHARED, read[self._rank])
        own_parts = [_values_with_prefix(_OWN, read[p.rank]) for p in wanted]
        repeated = self._rank > 0 and wanted == _share(parts, self._rank - 1, self._workers)
        return LoadedCheckpoint(self._store.path(number), manifest, shared, own_parts, repeated)

    # ------------------------------------------------------------------------------------- saving

    def begin(
        self,
        manifest: Manifest,
        shared: Mapping[str, Callable[[], np.ndarray]],
        own: Callable[[], Arrays],
        compared: Collection[str],
        problem: Callable[[Arrays], str] = lambda shared: "",
    ) -> None:
        """Begin to save a checkpoint: copy the values, and write them in a thread.

        The call first waits for the previous save, so at most one copy is in memory.

        Args:
            manifest: Its manifest, without parts; the same on all workers.
            shared: Functions that copy the values that the workers have in common, by name. Only
                the leaders write them.
            own: Copies the values of this worker alone.
            compared: Names in `shared` whose values may differ between workers. A worker whose
                value differs from its leader's writes it, too.
            problem: Returns the reason why the values in `shared` must not be saved, or `""`. It
                runs in the thread.
        """
        self.finish()
        number, step = self._next, manifest.step
        self._next += 1
        action = f"save {self._store.path(number).name} at step {step}"
        values = self._values(action, shared, compared)
        values |= {_OWN + name: value for name, value in own().items()}
        self._save = _Save(
            number, step, lambda save: self._write_and_commit(save, manifest, values, problem)
        )
        self._save.start()

    def finish(self, wait: bool = True) -> bool:
        """End the save in flight, if any, without communication in this thread.

        If one worker failed, all workers warn with the reason, and the previous checkpoint stays.

        Args:
            wait: Whether to wait for it. Otherwise a save that is not written stays in flight.

        Returns:
            Whether a checkpoint has been committed; the same on all workers if they wait.
        """
        save = self._save
        if save is None or (not wait and save.is_alive()):
            return False
        save.join()
        self._save = None
        path = self._store.path(save.number)
        if not any(save.failed):
            self._last = path
            return True
        if watchdog.verdict() is None:  # otherwise the main thread raises the verdict
            last = (
                f"The last checkpoint is {self._last}"
                if self._last
                else "No checkpoint precedes it"
            )
            warnings.warn(
                f"{path} could not be saved at step {save.step}. {last}.\n{by_worker(save.failed)}",
                stacklevel=4,
            )
        return False

    def _write_and_commit(
        self, save: _Save, manifest: Manifest, values: Arrays, problem: Callable[[Arrays], str]
    ) -> None:
        """Claim, write and commit a checkpoint with the other workers' threads."""
        number = save.number
        claim_failed = _failure(lambda: self._store.claim(number)) if self.leads else ""
        all_failed = self._channel.gather(claim_failed) or _NO_ANSWER
        if not any(all_failed):
            all_failed = self._write(number, manifest, values, problem)
        save.failed = all_failed
        if not self.leads or claim_failed or all_failed is _NO_ANSWER:
            return
        if any(all_failed):
            self._clean_up(lambda: self._store.remove(number))
        else:
            subject = manifest.subject
            self._clean_up(lambda: self._store.remove_old(self._keep, subject, self._refused))

    def _write(
        self, number: int, manifest: Manifest, values: Arrays, problem: Callable[[Arrays], str]
    ) -> list[str]:
        """Write this worker's part, and commit the checkpoint; return the errors by rank."""
        parts: list[Part] = []

        def write() -> None:
            if reason := problem(_values_with_prefix(_SHARED, values)):
                raise Refused(reason)
            parts.append(self._store.write_part(number, self._rank, values, whole=self.leads))

        failed = _failure(write)
        values.clear()
        report = json.dumps([failed, [dataclasses.asdict(part) for part in parts]])
        results = [json.loads(text) for text in self._channel.gather(report) or ()]
        if not results:
            return _NO_ANSWER
        all_failed = [failed for failed, _ in results]
        if not any(all_failed):
            listed = tuple(Part(**part) for _, written in results for part in written)
            complete = dataclasses.replace(manifest, parts=listed)
            failed = _failure(lambda: self._store.commit(number, complete)) if self.leads else ""
            all_failed = self._channel.gather(failed) or _NO_ANSWER
        return all_failed

    def _values(
        self, action: str, shared: Mapping[str, Callable[[], np.ndarray]], compared: Collection[str]
    ) -> Arrays:
        """Return the shared values that this worker writes: all, or those unlike its leader's."""
        read = {n: shared[n]() for n in compared}
        digests = {n: _digest(value) for n, value in read.items()}
        texts = self._gather(action, json.dumps(digests) if self.leads else "")
        if self.leads:
            read |= {n: value() for n, value in shared.items() if n not in read}
            return {_SHARED + n: value for n, value in read.items()}
        theirs = json.loads(texts[self._leaders[self._rank]])
        return {_SHARED + n: read[n] for n in compared if theirs.get(n) != digests[n]}


def _failure(action: Callable[[], Any]) -> str:
    """Call `action`; return the message of its exception, or `""`."""
    try:
        action()
    except (OSError, Refused) as error:
        return str(error)
    except Exception as error:  # the other workers wait for the message
        return f"{type(error).__name__}: {error}"
    return ""


def _share(parts: Sequence[Part], rank: int, workers: int) -> list[Part]:
    """Return the parts that one of `workers` restores: its share of all, and at least one."""
    first = len(parts) * rank // workers
    return list(parts[first : max(first + 1, len(parts) * (rank + 1) // workers)])


def _digest(value: np.ndarray) -> str:
    return hashlib.blake2b(np.ascontiguousarray(value).tobytes(), digest_size=8).hexdigest()


def _values_with_prefix(prefix: str, values: Arrays) -> Arrays:
    return {n.removeprefix(prefix): v for n, v in values.items() if n.startswith(prefix)}


def _most_bytes(subject: dict[str, Any]) -> int:
    """Return the largest plausible size of a part of a model and an optimizer, in bytes."""
    variables = [v for listed in subject["variables"].values() for v in listed]
    sizes = [math.prod(map(abs, s)) * np.dtype(_dtype_of(d)).itemsize for _, d, s in variables]
    return _MOST_BYTES + _MOST_PER_BYTE * sum(sizes)


def _dtype_of(name: str) -> Any:
    """Return numpy's dtype for the name of one of TensorFlow's."""
    return tf.as_dtype(name).as_numpy_dtype
