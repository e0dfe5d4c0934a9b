"""A directory of checkpoints, each of them complete or absent.

    DIRECTORY/checkpoint-000017/                   created by its leader
                                part-00000.npz     one for each worker, written by it
                                part-00001.npz
                                manifest.json      written by the chief after all parts

A checkpoint without a manifest does not exist. A removal deletes the manifest first. So a process
may be killed at any moment, and the next run recognizes the leftovers by their missing manifest.
An inaccessible checkpoint (permissions, a stale mount) counts as existing; reading it fails.
Of several jobs in one directory, only the one that has created a folder writes and removes there.

Only files that this package wrote are removed. The directory may also hold foreign files under
similar names: other frameworks call a folder `checkpoint-100000`, too. So only regular files with
the names above are removed. A folder with any other content stays, as does a symbolic link in
place of a folder.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np

from tf_redsync.state import checkpoint_files, checkpoint_manifest
from tf_redsync.state.checkpoint_manifest import Manifest, Part, Refused

_PREFIX = "checkpoint-"
_TOKEN = ".worker-"
_NUMBERED = re.compile(rf"{_PREFIX}(\d{{6,}})")
_INCOMPLETE = rf"({re.escape(checkpoint_files.TEMPORARY)})?"
_CONTENT = re.compile(rf"(part-\d{{5,}}\.npz|{re.escape(checkpoint_manifest.NAME)}){_INCOMPLETE}")
_TOKEN_NAME = re.compile(rf"{re.escape(_TOKEN)}[0-9a-f]{{32}}-\d+{_INCOMPLETE}")
_SHOWN = 3  # names in a message
_logger = logging.getLogger("tf_redsync")


class Store:
    """One worker's view of a directory.

    Args:
        directory: The directory, which may be missing.
    """

    def __init__(self, directory: str | Path):
        self.directory = Path(directory)
        self._warned_of: set[Path] = set()  # folders with foreign files

    def path(self, number: int) -> Path:
        """Return the folder of a checkpoint."""
        return self.directory / f"{_PREFIX}{number:06d}"

    def numbers(self) -> list[int]:
        """Return the numbers of all checkpoints, the newest first, usable or not."""
        return [n for n in self._all_numbers() if _may_be_checkpoint(self.path(n))]

    def next_number(self) -> int:
        """Return a number above those of all checkpoints and leftovers."""
        return max(self._all_numbers(), default=0) + 1

    def _all_numbers(self) -> list[int]:
        if not self.directory.is_dir():
            return []
        names = {path.name for path in self.directory.iterdir()}
        numbers = (int(n[1]) for n in map(_NUMBERED.fullmatch, names) if n)
        return sorted((n for n in numbers if self.path(n).name in names), reverse=True)

    # ------------------------------------------------------------------------------------ tokens

    def leave_token(self, job: str, rank: int) -> None:
        """Write a small file that shows other workers that they share this directory.

        Raises:
            OSError: If the directory cannot be written; the message has the remedy.
        """

        def content(file: IO[bytes]) -> None:
            file.write(b"\n")

        try:
            checkpoint_files.make_directory(self.directory)
            checkpoint_files.write(self._token(job, rank), content)
        except OSError as error:
            raise explained(error, self.directory) from error

    def tokens(self, job: str) -> list[int]:
        """Return the ranks of the workers with a token in this directory."""
        paths = self.directory.glob(f"{_TOKEN}{job}-*")
        ranks = (path.name.rpartition("-")[2] for path in paths)
        return sorted(int(rank) for rank in ranks if rank.isdigit())

    def remove_token(self, job: str, rank: int) -> None:
        """Remove a worker's token, once all workers have read it."""
        checkpoint_files.remove_file(self._token(job, rank))

    def _token(self, job: str, rank: int) -> Path:
        return self.directory / f"{_TOKEN}{job}-{rank}"

    # ------------------------------------------------------------------------------------ writing

    def claim(self, number: int) -> None:
        """Create the folder of a checkpoint; only one of several jobs succeeds.

        Raises:
            OSError: If the folder exists or cannot be created; the message has the remedy.
        """
        path = self.path(number)
        try:
            checkpoint_files.make_new_directory(path)
        except OSError as error:
            raise explained(error, path) from error

    def write_part(
        self, number: int, rank: int, values: dict[str, np.ndarray], whole: bool
    ) -> Part:
        """Write one worker's part of a checkpoint that its job has claimed.

        Args:
            number: The checkpoint, the same on all workers.
            rank: The worker's rank.
            values: Arrays of numbers.
            whole: See `Part`.

        Raises:
            OSError: If the part cannot be written; the message has the remedy. The part then does
                not exist.
        """
        path = self.path(number) / checkpoint_manifest.part_name(rank)
        try:
            checkpoint_files.write_arrays(path, values)
            size = path.stat().st_size
            return Part(rank, size, checkpoint_files.sha256(path, size), whole)
        except OSError as error:
            raise explained(error, path) from error

    def commit(self, number: int, manifest: Manifest) -> None:
        """Commit a checkpoint whose parts are all written.

        Raises:
            OSError: If the manifest cannot be written. The checkpoint then does not exist.
        """
        try:
            checkpoint_manifest.write(self.path(number), manifest)
        except OSError as error:
            raise explained(error, self.path(number) / checkpoint_manifest.NAME) from error

    # ------------------------------------------------------------------------------------ removing

    def remove(self, number: int) -> bool:
        """Remove a checkpoint, complete or not; return whether it is gone.

        A folder with foreign files stays unchanged, with one warning.
        """
        directory = self.path(number)
        try:
            _remove_checkpoint(directory)
        except _Foreign as reason:
            if directory not in self._warned_of:
                self._warned_of.add(directory)
                warnings.warn(
                    f"{directory} is not removed: {reason}. Give `Checkpoint` a directory of its "
                    "own, or move this away.",
                    stacklevel=4,
                )
            return False
        return True

    def remove_old(self, keep: int, subject: dict[str, Any], refused: Iterable[int] = ()) -> None:
        """Remove all but the newest checkpoints of this model and method.

        Args:
            keep: The number of checkpoints that stay.
            subject: Only its checkpoints are counted and removed; see
                `checkpoint_manifest.differences`.
            refused: Numbers of corrupted checkpoints. They are neither counted nor removed.
        """
        count, refused = 0, set(refused)
        for number in self.numbers():
            if number in refused or not self._matches_subject(number, subject):
                continue
            count += 1
            if count > keep:
                self.remove(number)

    def _matches_subject(self, number: int, subject: dict[str, Any]) -> bool:
        try:
            return not checkpoint_manifest.differences(
                subject, checkpoint_manifest.read(self.path(number)).subject
            )
        except Refused:
            return False

    def remove_leftovers(self) -> list[str]:
        """Remove the files of interrupted saves; return their names.

        No save may be in progress.
        """
        removed = []
        for number in self._all_numbers():
            directory = self.path(number)
            try:
                names = os.listdir(directory)
            except OSError:  # a checkpoint may be in it
                continue
            # A stale listing may lack a file.
            manifest = directory / checkpoint_manifest.NAME
            if manifest.name not in names and _is_missing(manifest):
                removed += [directory.name] if self.remove(number) else []
            elif not directory.is_symlink():
                paths = (directory / name for name in names)
                incomplete = (p for p in paths if p.suffix == checkpoint_files.TEMPORARY)
                names = _remove_files(filter(_is_content, incomplete))
                removed += [f"{directory.name}/{name}" for name in names]
        tokens = self.directory.glob(f"{_TOKEN}*")
        return removed + _remove_files(p for p in tokens if _is_file(p, _TOKEN_NAME))

    # ------------------------------------------------------------------------------------ reading

    def manifest(self, number: int) -> Manifest:
        """Read the manifest of a checkpoint.

        Raises:
            Refused: If the manifest cannot be used; see `checkpoint_manifest.read`.
        """
        return checkpoint_manifest.read(self.path(number))

    def verify(self, number: int, parts: Iterable[Part]) -> None:
        """Check parts of a checkpoint by size and SHA-256.

        Raises:
            Refused: For the first part that is missing or corrupted.
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
                raise Refused(f"{part.name} is corrupted: its SHA-256 does not match")

    def here(self, number: int, parts: Iterable[Part]) -> Iterator[Part]:
        """Yield the parts whose files are in this directory, readable or not."""
        return (part for part in parts if not _is_missing(self.path(number) / part.name))

    def read_part(
        self, number: int, part: Part, dtype_of: Callable[[str], Any] = np.dtype
    ) -> dict[str, np.ndarray]:
        """Read a verified part; see `checkpoint_files.read_arrays`.

        Raises:
            Refused: If the part cannot be read.
        """
        path = self.path(number) / part.name
        try:
            return checkpoint_files.read_arrays(path, part.size, dtype_of)
        except (OSError, ValueError) as error:
            raise Refused(str(error)) from error


_REMEDIES = {
    errno.ENOSPC: "The disk is full: free some space, or give `Checkpoint` another directory.",
    errno.EDQUOT: "The quota is used up: free some space, or give `Checkpoint` another directory.",
    errno.EROFS: "The file system is read-only: give `Checkpoint` a directory on another one.",
    errno.EACCES: "Permission denied: change it, or give `Checkpoint` another directory.",
    errno.EPERM: "Permission denied: change it, or give `Checkpoint` another directory.",
    errno.EEXIST: "Another job saves there: give each job's `Checkpoint` its own directory. If "
    "there is none, this machine sees files of other machines late: disable the file system's "
    "cache of listings.",
    errno.ENOENT: "Perhaps another job removed it: give each job's `Checkpoint` its own directory.",
    errno.ENOTDIR: "A component of the path is a file: give `Checkpoint` a directory.",
}


def explained(error: OSError, path: Path) -> OSError:
    """Return an error of the same class with the path and a remedy."""
    remedy = _REMEDIES.get(error.errno or 0, "Give `Checkpoint` a writable directory.")
    text = f"cannot write {path}: {error.strerror or error}. {remedy}"
    return type(error)(error.errno, text) if error.errno else OSError(text)


def _is_missing(path: Path) -> bool:
    """Return whether a path does not exist; an inaccessible one may exist."""
    try:
        os.lstat(path)
    except OSError as error:
        return error.errno in (errno.ENOENT, errno.ENOTDIR)
    return False


def _may_be_checkpoint(directory: Path) -> bool:
    """Return whether a folder has a manifest or is inaccessible, as on a missing disk."""
    dangling = os.path.islink(directory) and not os.path.exists(directory)
    return dangling or not _is_missing(directory / checkpoint_manifest.NAME)


class _Foreign(Exception):
    """A folder holds foreign files; the message names them."""


def _remove_checkpoint(directory: Path) -> None:
    """Remove a checkpoint, complete or not: its manifest first.

    Raises:
        _Foreign: If the folder holds foreign files. It then stays unchanged.
        OSError: If a file cannot be removed.
    """
    if not os.path.lexists(directory):
        return
    _check_content(directory)
    checkpoint_files.remove_file(directory / checkpoint_manifest.NAME)
    checkpoint_files.sync_directory(directory)
    for path in sorted(filter(_is_content, directory.iterdir())):
        checkpoint_files.remove_file(path)
    checkpoint_files.remove_directory(directory)
    _logger.info("removed %s", directory)


def _check_content(directory: Path) -> None:
    """Raise `_Foreign` unless this is a folder of checkpoint files only."""
    if directory.is_symlink():
        raise _Foreign("it is a symbolic link")
    if not directory.is_dir():
        raise _Foreign("it is not a directory")
    others = sorted(p.name for p in directory.iterdir() if not _is_content(p))
    if others:
        more = f" and {len(others) - _SHOWN} more" if len(others) > _SHOWN else ""
        raise _Foreign(f"`Checkpoint` did not write {', '.join(others[:_SHOWN])}{more} in it")


def _remove_files(paths: Iterable[Path]) -> list[str]:
    ordered = sorted(paths)
    for path in ordered:
        checkpoint_files.remove_file(path)
        _logger.info("removed %s", path)
    return [path.name for path in ordered]


def _is_content(path: Path) -> bool:
    return _is_file(path, _CONTENT)


def _is_file(path: Path, name: re.Pattern[str]) -> bool:
    return bool(name.fullmatch(path.name)) and path.is_file() and not path.is_symlink()
