"""A file that one process of many makes while the others wait for it.

The lock is one of the operating system: it ends with the process that holds it, however that ends,
and with what that process has started to compile. The file appears whole, by a renaming.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

LIMIT_SECONDS = 1800.0  # Of a build, and of waiting for another process's.
_POLL_SECONDS = 0.2


class BuildError(RuntimeError):
    """A library cannot be built; the text, one line, says why and what to do."""


def make_once(target: Path, what: str, make: Callable[[int], None]) -> None:
    """Have `target` made, unless it is there or another process makes it meanwhile.

    Args:
        target: The file; it exists afterwards.
        what: What it is, for people.
        make: Makes it, or raises `BuildError`. Is given the descriptor of the lock, which what it
            starts may inherit: then nobody else begins while that still runs.

    Raises:
        BuildError: if it cannot be made, or if another process that tried to could not.
    """
    if target.exists():
        return
    check_folder(target.parent)
    path = target.with_suffix(".lock")
    try:
        lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise _unusable(target.parent, error) from error
    try:
        before = os.fstat(lock).st_mtime_ns
        _acquire(lock, path, what)
        if target.exists():
            return
        failure = os.pread(lock, 10_000, 0).decode(errors="replace")
        if failure and os.fstat(lock).st_mtime_ns != before:
            raise BuildError(failure)  # of the process that was waited for: it would be the same
        try:
            make(lock)
        except BuildError as error:
            _note(lock, str(error))
            raise
        _note(lock, "")
    finally:
        os.close(lock)


def check_folder(folder: Path) -> None:
    """Raises `BuildError` where `folder` cannot take a library, before any time is spent on one."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if os.statvfs(folder).f_flag & os.ST_NOEXEC:
            raise OSError(
                "its file system is mounted `noexec`, so no library can be loaded from it"
            )
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(13, "Permission denied")
    except OSError as error:
        raise _unusable(folder, error) from error


def _unusable(folder: Path, error: OSError) -> BuildError:
    return BuildError(
        f"The folder {folder} cannot be used ({error.strerror or error}). Set TF_REDSYNC_CACHE to "
        "one that can be written and may hold programs"
    )


def _acquire(lock: int, path: Path, what: str) -> None:
    limit = f"{LIMIT_SECONDS / 60:.0f} minutes"
    deadline = time.monotonic() + LIMIT_SECONDS
    said = False
    while not _locked(lock):
        if not said:
            say(f"waiting for another process that builds {what}, {limit} at most")
            said = True
        if time.monotonic() > deadline:
            raise BuildError(
                f"Another process has been building {what} for {limit}. End the one that holds "
                f"{path}"
            )
        time.sleep(_POLL_SECONDS)


def _locked(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # A file system without locks: several processes build, and rename.
        return True
    return True


def _note(lock: int, text: str) -> None:
    with contextlib.suppress(OSError):  # A full disk.
        os.ftruncate(lock, 0)
        os.pwrite(lock, text.encode(), 0)


def say(text: str) -> None:
    """One line for people, on standard error."""
    print(f"tf_redsync: {text}", file=sys.stderr, flush=True)
