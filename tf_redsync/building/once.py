"""Makes a file in one of several processes while the others wait for it.

The operating system releases the lock when the process that holds it and its compilers have ended,
for any reason. The file is renamed when it is complete.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

LIMIT_SECONDS = 1800.0  # for a build, and for waiting for another process
_POLL_SECONDS = 0.2


class BuildError(RuntimeError):
    """A library cannot be built; the message is one line with the reason and the remedy."""


def make_once(
    target: Path, label: str, make: Callable[[int], None], *, again: bool = False
) -> None:
    """Make `target`, unless it is complete or another process makes it meanwhile.

    Args:
        target: The file, which exists afterwards.
        label: Its description, for messages.
        make: Makes the file, or raises `BuildError`. It receives the descriptor of the lock and
            passes it to its child processes, so that the lock is held until they end.
        again: Whether to replace a complete `target`, which stays if `make` fails.

    Raises:
        BuildError: If this process, or the one that it waited for, cannot make the file.
    """
    if _is_complete(target) and not again:
        return
    check_folder(target.parent)
    path = target.with_suffix(".lock")
    try:
        lock = _open(path)
    except OSError as error:
        raise _unusable(target.parent, error) from error
    try:
        before = os.fstat(lock).st_mtime_ns
        _acquire(lock, path, label)
        if _is_complete(target) and not again:
            return
        failure = os.pread(lock, 10_000, 0).decode(errors="replace")
        if failure and os.fstat(lock).st_mtime_ns != before:
            raise BuildError(failure)  # the other process's error: a retry would fail, too
        try:
            make(lock)
        except BuildError as error:
            _note(lock, str(error))
            raise
        _note(lock, "")
    finally:
        os.close(lock)


def _is_complete(target: Path) -> bool:
    """Return whether a file exists and is not empty, as after a crash of the machine."""
    try:
        return target.stat().st_size > 0
    except OSError:  # also where the user may not look
        return False


def _open(path: Path) -> int:
    """Open the lock. Another user's is opened to be locked, but not to note an error in it."""
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except PermissionError:
        return os.open(path, os.O_RDONLY)


def check_folder(folder: Path) -> None:
    """Raise `BuildError` before a build if `folder` cannot hold a library."""
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
        "a writable folder on a file system that allows programs"
    )


def _acquire(lock: int, path: Path, label: str) -> None:
    limit = f"{LIMIT_SECONDS / 60:.0f} minutes"
    deadline = time.monotonic() + LIMIT_SECONDS
    announced = False
    while not _locked(lock):
        if not announced:
            say(f"waiting for another process that builds {label}, at most {limit}")
            announced = True
        if time.monotonic() > deadline:
            raise BuildError(
                f"Another process has been building {label} for {limit}. End the process that "
                f"holds {path}"
            )
        time.sleep(_POLL_SECONDS)


def _locked(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks: several processes build and rename
        return True
    return True


def _note(lock: int, text: str) -> None:
    with contextlib.suppress(OSError):  # a full disk
        os.ftruncate(lock, 0)
        os.pwrite(lock, text.encode(), 0)


def say(text: str) -> None:
    """Print one line on standard error."""
    print(f"tf_redsync: {text}", file=sys.stderr, flush=True)
