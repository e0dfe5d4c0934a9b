"""Files that are there as a whole or not at all, whenever the process or the machine dies.

Everything that changes a disk goes through the functions of `os` that are named here, one by one,
so that a test can end the process after each of them.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

TEMPORARY = ".part"  # what the names of files end in that are not complete
_BLOCK = 1 << 20  # bytes


def write(path: Path, content: Callable[[IO[bytes]], None]) -> None:
    """Write a file under a temporary name, to the disk, and only then give it its name.

    Args:
        path: Where it is to be; what is there is replaced.
        content: Writes to the open file that it gets.

    Raises:
        OSError: where that is not possible; the temporary file is gone then, if it can be.
    """
    temporary = path.with_name(path.name + TEMPORARY)
    try:
        with open(temporary, "wb") as file:
            content(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    sync_directory(path.parent)


def make_directory(path: Path) -> None:
    """Make a directory that may be there already, and see to it that its name is on the disk."""
    if path.is_dir():
        return
    if not path.parent.exists():
        make_directory(path.parent)
    with contextlib.suppress(FileExistsError):  # another worker was faster
        os.mkdir(path)
    if not path.is_dir():
        raise NotADirectoryError(f"{path} is a file")
    sync_directory(path.parent)


def remove_file(path: Path) -> None:
    """Remove a file; one that is gone already is no error."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def remove_directory(path: Path) -> None:
    """Remove an empty directory; one that is gone already is no error."""
    with contextlib.suppress(FileNotFoundError):
        os.rmdir(path)


def sync_directory(path: Path) -> None:
    """Bring the names in a directory to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def opened(path: Path, most: int) -> Iterator[IO[bytes]]:
    """Open a regular file for reading: a pipe would block, and a device need not end.

    Args:
        path: The file, or a symbolic link to one.
        most: Bytes that it may have.

    Raises:
        OSError: for anything else, and for a larger file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        if found.st_size > most:
            raise OSError(errno.EFBIG, f"{found.st_size} bytes, and {most} is the most")
        with open(descriptor, "rb", closefd=False) as file:
            yield file
    finally:
        os.close(descriptor)


def sha256(path: Path, most: int) -> str:
    """Return the SHA-256 of a file's content, in hexadecimal digits; see `opened`."""
    digest = hashlib.sha256()
    with opened(path, most) as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()
