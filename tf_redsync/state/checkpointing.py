"""Checkpoints of all workers together: they agree on every one that is written or restored.

What goes wrong on one worker is known to all before any of them goes on, so they write the same
checkpoints and start from the same one. Nothing here is a collective: they tell each other texts.
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
from tf_redsync.state.shared_directories import by_worker, failure, leaders

Arrays = dict[str, np.ndarray]
_SHARED, _OWN = "shared/", "own/"
# Bytes of a part, for each byte of the model and the optimizer: the state of a method has a few
# times as many elements as the model, once for each replica of the process.
_MOST_PER_BYTE, _MOST_BYTES = 100, 1 << 30
_logger = logging.getLogger("tf_redsync")


@dataclasses.dataclass(frozen=True)
class Found:
    """A checkpoint that all workers can use.

    Attributes:
        path: Where it is.
        manifest: What it is of.
        shared: The values that this worker starts with.
        own: What this worker alone has, or, where another number of workers wrote it, what each of
            them had, by rank.
    """

    path: Path
    manifest: Manifest
    shared: Arrays
    own: list[Arrays]


class Checkpoints:
    """The checkpoints of a job in a directory, or in one for each machine.

    All workers make one, and call its methods in the same order.

    Args:
        strategy: Whose workers they are.
        directory: Where the checkpoints are, as this worker sees it.
        keep: How many stay.
        when: When they are made, for the other workers to compare.

    Raises:
        OSError: on all workers, if one of them cannot write there.
    """

    def __init__(
        self, strategy: tf.distribute.Strategy, directory: str | Path, keep: int, when: str
    ):
        self._strategy, self._keep = strategy, keep
        self._store = Store(directory)
        self._rank = collectives.worker_rank(strategy)
        self._workers = collectives.worker_count(strategy)
        # Who sees the same directory has one leader in it, which writes what all have in common.
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
        """Whether this worker speaks for those that see its directory."""
        return self._leaders[self._rank] == self._rank

    def _gather(self, what: str, told: str) -> list[str]:
        return agreement.gather_texts(self._strategy, what, told)

    def _tidy(self, remove: Callable[[], Any]) -> None:
        """Remove files that are in nobody's way; whether that works concerns nobody else."""
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
        """Use the newest checkpoint that all workers can use; `None` where there are none.

        Those that are refused are named in a warning, with the reason, and so is the one that is
        used instead.

        Args:
            subject: What it must be of; see `manifest.differences`.
            check: Raises a `ValueError` for values that do not suit; asks no other worker.
            use: Takes the values over on all workers, or raises a `ValueError` on all of them.

        Raises:
            ValueError: if there are checkpoints, and none of them can be used.
        """
        found = next(filter(None, (self._try(n, subject, check, use) for n in self._numbers)), None)
        refused = "".join(f"\n{self._store.path(n)}: {r}" for n, r in self._refused.items())
        if found is None and refused:
            raise ValueError(
                "no checkpoint can be used. Give `Checkpoint` another directory, or move these "
                f"away to begin anew.{refused}"
            )
        if found is not None:
            self._last = found.path
            if refused:
                warnings.warn(
                    f"training goes on from {found.path} ({found.manifest}), and not from what "
                    f"cannot be used:{refused}",
                    stacklevel=3,
                )
            if self.leads:
                _logger.info("training goes on from %s: %s", found.path, found.manifest)
        if self.leads:
            self._tidy(self._store.remove_leftovers)
        return found

    def _try(
        self,
        number: int,
        subject: dict[str, Any],
        check: Callable[[Found], None],
        use: Callable[[Found], None],
    ) -> Found | None:
        """Use a checkpoint if all workers can."""
        name, found, failed, which = self._store.path(number).name, None, "", ""
        try:
            found = self._read(number, subject)
            check(found)
            which = checksum(found.manifest)
        except ValueError as error:  # `Refused` is one
            failed = str(error)
        told = [json.loads(t) for t in self._gather(f"read {name}", json.dumps([failed, which]))]
        all_failed = [failed for failed, _ in told]
        if not any(all_failed) and len({which for _, which in told}) > 1:
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
        """Verify and read what this worker needs of a checkpoint."""
        described = self._store.manifest(number)
        different = differences(subject, described.subject)
        if different:
            raise Refused(different)
        parts = described.parts
        wanted = [parts[self._rank]] if described.workers == self._workers else list(parts)
        whole = next((p for p in self._store.here(number, parts) if p.whole), None)
        if whole is None:
            raise Refused("no part in this directory holds the model")
        needed = list(dict.fromkeys([*wanted, whole]))
        most = _most_bytes(subject)
        for part in needed:
            if part.size > most:
                raise Refused(f"{part.name} has {part.size} bytes, and {most} is the most")
        self._store.verify(number, needed)
        read = {p.rank: self._store.read_part(number, p, _dtype_of) for p in needed}
        shared = _of(_SHARED, read[whole.rank])
        if described.workers == self._workers:
            shared |= _of(_SHARED, read[self._rank])
        own = [_of(_OWN, read[p.rank]) for p in wanted]
        return Found(self._store.path(number), described, shared, own)

    # ------------------------------------------------------------------------------------- saving

    def save(
        self,
        described: Manifest,
        shared: Mapping[str, Callable[[], np.ndarray]],
        own: Arrays,
        compared: Collection[str],
        problem: Callable[[Arrays], str] = lambda shared: "",
    ) -> bool:
        """Write a checkpoint; whether there is one now, on all workers alike.

        If not, a warning on all of them says why, and the one before stays.

        Args:
            described: Its manifest, without parts; the same on all workers.
            shared: What reads the values that workers have in common; their leaders write them.
            own: Values of this worker alone.
            compared: Names of values in `shared` that may differ after all; who has others than its
                leader writes them, too.
            problem: Says why values in `shared` are not worth a checkpoint, or `""`.
        """
        number, path = self._next, self._store.path(self._next)
        self._next += 1
        name = f"{path.name} at step {described.step}"
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
            whole = dataclasses.replace(described, parts=parts)
            failed = failure(lambda: self._store.commit(number, whole)) if self.leads else ""
            all_failed = self._gather(f"keep {name}", failed)
        if any(all_failed):
            self._give_up(number, described.step, all_failed)
            return False
        self._last = path
        if self.leads:
            self._tidy(lambda: self._store.remove_old(self._keep, described.subject, self._refused))
        return True

    def _values(
        self, what: str, shared: Mapping[str, Callable[[], np.ndarray]], compared: Collection[str]
    ) -> Arrays:
        """What this worker writes of the values that workers have in common."""
        read = {n: shared[n]() for n in compared}
        digests = {n: _digest(value) for n, value in read.items()}
        told = self._gather(what, json.dumps(digests) if self.leads else "")
        if self.leads:
            read |= {n: value() for n, value in shared.items() if n not in read}
            return {_SHARED + n: value for n, value in read.items()}
        theirs = json.loads(told[self._leaders[self._rank]])
        return {_SHARED + n: read[n] for n in compared if theirs.get(n) != digests[n]}

    def _write(self, number: int, values: Arrays) -> tuple[str, dict[str, Any]]:
        """Write this worker's part; return why that failed, or `""` and what it is."""
        try:
            part = self._store.write_part(number, self._rank, values, whole=self.leads)
        except OSError as error:
            return str(error), {}
        return "", dataclasses.asdict(part)

    def _give_up(self, number: int, step: int, failed: list[str]) -> None:
        """Go on without a checkpoint that could not be written."""
        if self.leads:
            self._tidy(lambda: self._store.remove(number))
        last = f"The last one is {self._last}" if self._last else "There is none before it"
        warnings.warn(
            f"{self._store.path(number)} could not be saved at step {step}; training goes on. "
            f"{last}.\n{by_worker(failed)}",
            stacklevel=4,
        )


def _digest(value: np.ndarray) -> str:
    return hashlib.blake2b(np.ascontiguousarray(value).tobytes(), digest_size=8).hexdigest()


def _of(prefix: str, values: Arrays) -> Arrays:
    return {n.removeprefix(prefix): v for n, v in values.items() if n.startswith(prefix)}


def _most_bytes(subject: dict[str, Any]) -> int:
    """How many bytes a part can have, of a model and an optimizer with these variables."""
    variables = [v for listed in subject["variables"].values() for v in listed]
    sizes = [math.prod(map(abs, s)) * np.dtype(_dtype_of(d)).itemsize for _, d, s in variables]
    return _MOST_BYTES + _MOST_PER_BYTE * sum(sizes)


def _dtype_of(name: str) -> Any:
    """The dtype of numpy for one that only TensorFlow knows."""
    return tf.as_dtype(name).as_numpy_dtype
