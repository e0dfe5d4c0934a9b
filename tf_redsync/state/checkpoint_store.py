"""A directory of checkpoints, each of them complete or not there.

    DIRECTORY/checkpoint-000017/part-00000.npz     one for each worker, written by it
                                part-00001.npz
                                manifest.json      written by the chief once all parts are there

A checkpoint without a manifest does not exist. It is removed the way it came into being, backwards:
the manifest first. So a process may be killed at any moment, and what it leaves behind is found by
its missing manifest.
"""

from __future__ import annotations

import errno
import os
import re
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tf_redsync.state import (
    checkpoint_arrays,
    checkpoint_files,
    checkpoint_manifest,
    checkpoint_removal,
)
from tf_redsync.state.checkpoint_manifest import Manifest, Part, Refused

_PREFIX = "checkpoint-"
_TOKEN = ".worker-"
_NUMBERED = re.compile(rf"{_PREFIX}(\d{{6,}})")


class Store:
    """One worker's view of a directory.

    Args:
        directory: It need not exist.
    """

    def __init__(self, directory: str | Path):
        self.directory = Path(directory)
        self._left_alone: set[Path] = set()  # folders that the user has been told of

    def path(self, number: int) -> Path:
        """Where a checkpoint is."""
        return self.directory / f"{_PREFIX}{number:06d}"

    def numbers(self) -> list[int]:
        """The numbers of all checkpoints that exist, the newest first, usable or not."""
        return [n for n in self._all() if os.path.exists(self.path(n) / checkpoint_manifest.NAME)]

    def next_number(self) -> int:
        """A number above all that are in use, by leftovers as well."""
        return max(self._all(), default=0) + 1

    def _all(self) -> list[int]:
        if not self.directory.is_dir():
            return []
        names = {path.name for path in self.directory.iterdir()}
        numbers = (int(n[1]) for n in map(_NUMBERED.fullmatch, names) if n)
        return sorted((n for n in numbers if self.path(n).name in names), reverse=True)

    # ------------------------------------------------------------------------------------ tokens

    def leave_token(self, job: str, rank: int) -> None:
        """Write a small file, by which other workers see whether the directory is theirs, too.

        Raises:
            OSError: where nothing can be written, with what to do.
        """
        try:
            checkpoint_files.make_directory(self.directory)
            checkpoint_files.write(
                self._token(job, rank), lambda file: None if file.write(b"\n") else None
            )
        except OSError as error:
            raise explained(error, self.directory) from error

    def tokens(self, job: str) -> list[int]:
        """The ranks of the workers that have left a token in this directory."""
        found = self.directory.glob(f"{_TOKEN}{job}-*")
        ranks = (path.name.rpartition("-")[2] for path in found)
        return sorted(int(rank) for rank in ranks if rank.isdigit())

    def remove_token(self, job: str, rank: int) -> None:
        """Remove a worker's token, once all have looked."""
        checkpoint_files.remove_file(self._token(job, rank))

    def _token(self, job: str, rank: int) -> Path:
        return self.directory / f"{_TOKEN}{job}-{rank}"

    # ------------------------------------------------------------------------------------ writing

    def write_part(
        self, number: int, rank: int, values: dict[str, np.ndarray], whole: bool
    ) -> Part:
        """Write one worker's part of a checkpoint.

        Args:
            number: Of the checkpoint, the same on all workers.
            rank: Of the worker.
            values: Arrays of numbers.
            whole: See `Part`.

        Raises:
            OSError: where that is not possible, with what to do. The part is not there then.
        """
        directory = self.path(number)
        path = directory / checkpoint_manifest.part_name(rank)
        try:
            checkpoint_files.make_directory(directory)
            checkpoint_arrays.save(path, values)
            size = path.stat().st_size
            return Part(rank, size, checkpoint_files.sha256(path, size), whole)
        except OSError as error:
            raise explained(error, path) from error

    def commit(self, number: int, described: Manifest) -> None:
        """Let a checkpoint exist, whose parts are all written.

        Raises:
            OSError: where that is not possible. It does not exist then.
        """
        try:
            checkpoint_manifest.write(self.path(number), described)
        except OSError as error:
            raise explained(error, self.path(number) / checkpoint_manifest.NAME) from error

    def remove(self, number: int) -> bool:
        """Remove a checkpoint, complete or not; return whether it is gone.

        A folder with files of others stays as it is, with one warning.
        """
        directory = self.path(number)
        try:
            checkpoint_removal.checkpoint(directory)
        except checkpoint_removal.Foreign as reason:
            if directory not in self._left_alone:
                self._left_alone.add(directory)
                warnings.warn(
                    f"{directory} is not removed: {reason}. Give `Checkpoint` a directory of its "
                    "own, or move this away.",
                    stacklevel=4,
                )
            return False
        return True

    def remove_old(self, keep: int, subject: dict[str, Any], refused: Iterable[int] = ()) -> None:
        """Remove what came before the newest checkpoints, and never those of others.

        Args:
            keep: How many stay.
            subject: Only checkpoints of this are counted and removed; see `manifest.differences`.
            refused: Numbers of those that were found to be damaged. They are not counted.
        """
        kept, refused = 0, set(refused)
        for number in self.numbers():
            if number in refused or not self._is_of(number, subject):
                continue
            kept += 1
            if kept > keep:
                self.remove(number)

    def _is_of(self, number: int, subject: dict[str, Any]) -> bool:
        try:
            return not checkpoint_manifest.differences(
                subject, checkpoint_manifest.read(self.path(number)).subject
            )
        except Refused:
            return False

    def remove_leftovers(self) -> list[str]:
        """Remove what saves left behind that were killed; return the names.

        No save may be going on.
        """
        removed = []
        for number in self._all():
            directory = self.path(number)
            if not os.path.lexists(directory / checkpoint_manifest.NAME):
                removed += [directory.name] if self.remove(number) else []
            else:
                removed += [
                    f"{directory.name}/{n}" for n in checkpoint_removal.partial_files(directory)
                ]
        return removed + checkpoint_removal.tokens(self.directory)

    # ------------------------------------------------------------------------------------ reading

    def manifest(self, number: int) -> Manifest:
        """Read what a checkpoint is of.

        Raises:
            Refused: for one that cannot be used.
        """
        return checkpoint_manifest.read(self.path(number))

    def verify(self, number: int, parts: Iterable[Part]) -> None:
        """Check files of a checkpoint by size and SHA-256.

        Raises:
            Refused: by the first one that is not what was written.
        """
        for part in parts:
            path = self.path(number) / part.name
            try:
                size = path.stat().st_size
                digest = checkpoint_files.sha256(path, part.size) if size == part.size else ""
            except OSError as error:
                missing = error.errno == errno.ENOENT
                reason = "is missing" if missing else f"cannot be read: {error.strerror}"
                raise Refused(f"{part.name} {reason}") from error
            if size != part.size:
                raise Refused(f"{part.name} has {size} bytes, and {part.size} were written")
            if digest != part.sha256:
                raise Refused(f"{part.name} is damaged: its SHA-256 is another one")

    def here(self, number: int, parts: Iterable[Part]) -> Iterator[Part]:
        """Those of some parts whose files are in this directory."""
        return (part for part in parts if (self.path(number) / part.name).exists())

    def read_part(self, number: int, part: Part, dtype_of: Any = np.dtype) -> dict[str, np.ndarray]:
        """Read a part that was verified; see `arrays.load`.

        Raises:
            Refused: if it cannot be read.
        """
        try:
            return checkpoint_arrays.load(self.path(number) / part.name, part.size, dtype_of)
        except (OSError, ValueError) as error:
            raise Refused(str(error)) from error


_REMEDIES = {
    errno.ENOSPC: "The disk is full: make room, or give `Checkpoint` another directory.",
    errno.EDQUOT: "The quota is used up: make room, or give `Checkpoint` another directory.",
    errno.EROFS: "The file system is read-only: give `Checkpoint` a directory on another one.",
    errno.EACCES: "This user may not write there: change the rights, or give another directory.",
    errno.EPERM: "This user may not write there: change the rights, or give another directory.",
    errno.ENOTDIR: "A part of the path is a file: give `Checkpoint` a directory.",
}


def explained(error: OSError, path: Path) -> OSError:
    """The same error with the path, and what to do."""
    remedy = _REMEDIES.get(error.errno or 0, "Give `Checkpoint` a directory that can be written.")
    text = f"cannot write {path}: {error.strerror or error}. {remedy}"
    return type(error)(error.errno, text) if error.errno else OSError(text)
