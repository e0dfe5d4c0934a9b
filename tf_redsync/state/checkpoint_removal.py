"""Removes files that this package wrote to a directory of checkpoints, and nothing else.

The directory may hold the files of others, under such names too: other frameworks also call a
folder `checkpoint-100000`. Only regular files with the names that the store gives are removed. A
folder that holds anything else, and a symbolic link in the place of a folder, stay as they are.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable
from pathlib import Path

from tf_redsync.state import checkpoint_files, checkpoint_manifest

_PARTIAL = rf"({re.escape(checkpoint_files.TEMPORARY)})?"
_IN_CHECKPOINT = re.compile(
    rf"(part-\d{{5,}}\.npz|{re.escape(checkpoint_manifest.NAME)}){_PARTIAL}"
)
_TOKEN = re.compile(rf"\.worker-[0-9a-f]{{32}}-\d+{_PARTIAL}")
_SHOWN = 3  # names in a message
_logger = logging.getLogger("tf_redsync")


class Foreign(Exception):
    """A folder that holds what this package did not write; the text says what."""


def checkpoint(directory: Path) -> None:
    """Remove a checkpoint, complete or not: its manifest first.

    Raises:
        Foreign: if anything else is there, which stays, and so does the checkpoint.
        OSError: if that is not possible.
    """
    if not os.path.lexists(directory):
        return
    _check(directory)
    checkpoint_files.remove_file(directory / checkpoint_manifest.NAME)
    checkpoint_files.sync_directory(directory)
    for path in sorted(filter(_of_a_checkpoint, directory.iterdir())):
        checkpoint_files.remove_file(path)
    checkpoint_files.remove_directory(directory)
    _logger.info("removed %s", directory)


def partial_files(directory: Path) -> list[str]:
    """Remove files of a checkpoint that are not complete; return their names."""
    if directory.is_symlink():
        return []
    return _removed(filter(_of_a_checkpoint, directory.glob(f"*{checkpoint_files.TEMPORARY}")))


def tokens(directory: Path) -> list[str]:
    """Remove the tokens of workers; return their names."""
    return _removed(p for p in directory.glob(".worker-*") if _is(p, _TOKEN))


def _removed(paths: Iterable[Path]) -> list[str]:
    found = sorted(paths)
    for path in found:
        checkpoint_files.remove_file(path)
        _logger.info("removed %s", path)
    return [path.name for path in found]


def _is(path: Path, name: re.Pattern[str]) -> bool:
    return bool(name.fullmatch(path.name)) and path.is_file() and not path.is_symlink()


def _of_a_checkpoint(path: Path) -> bool:
    return _is(path, _IN_CHECKPOINT)


def _check(directory: Path) -> None:
    """Raise `Foreign` for a folder that is no checkpoint or has other content as well."""
    if directory.is_symlink():
        raise Foreign("it is a symbolic link")
    if not directory.is_dir():
        raise Foreign("it is not a directory")
    others = sorted(p.name for p in directory.iterdir() if not _of_a_checkpoint(p))
    if others:
        more = f" and {len(others) - _SHOWN} more" if len(others) > _SHOWN else ""
        raise Foreign(f"`Checkpoint` did not write {', '.join(others[:_SHOWN])}{more} in it")
