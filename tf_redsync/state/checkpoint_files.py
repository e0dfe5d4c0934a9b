"""Atomic files: each exists completely or not at all, whenever the process or the machine dies.

Every change on disk is a call of a function of `os` in this module, so that a test can kill the
process after each of them.

Named arrays are written as one `.npz` file without pickle. numpy stores dtypes that it does not
know, such as bfloat16, as bytes without a name. Here they are written as unsigned integers of the
same size, with the dtypes' names in a separate array.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import stat
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np

TEMPORARY = ".part"  # suffix of incomplete files
_BLOCK = 1 << 20  # bytes
_DTYPES = "dtypes"  # the array with the names of dtypes, as JSON in UTF-8
_PREFIX = "arrays/"


def write(path: Path, content: Callable[[IO[bytes]], None]) -> None:
    """Write a file under a temporary name, flush it to the disk, and rename it.

    Args:
        path: The file; an existing one is replaced.
        content: Writes to the open file that it receives.

    Raises:
        OSError: If the file cannot be written. The temporary file is then removed, if possible.
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
    """Make a directory with its parents, if missing, and flush its name to the disk."""
    if path.is_dir():
        return
    with contextlib.suppress(FileExistsError):  # another worker was faster
        make_new_directory(path)
    if not path.is_dir():
        raise NotADirectoryError(f"{path} is a file")


def make_new_directory(path: Path) -> None:
    """Make a directory with its missing parents, and flush its name to the disk.

    Raises:
        FileExistsError: If the path exists.
    """
    make_directory(path.parent)
    os.mkdir(path)
    sync_directory(path.parent)


def remove_file(path: Path) -> None:
    """Remove a file; a no-op if it is missing."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def remove_directory(path: Path) -> None:
    """Remove an empty directory; a no-op if it is missing."""
    with contextlib.suppress(FileNotFoundError):
        os.rmdir(path)


def sync_directory(path: Path) -> None:
    """Flush the names in a directory to the disk, if its file system can."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # of SMB and some FUSE file systems
            raise
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def opened(path: Path, most: int) -> Iterator[IO[bytes]]:
    """Open a regular file for reading: a pipe would block, and a device may be endless.

    Args:
        path: The file, or a symbolic link to one.
        most: Its largest allowed size in bytes.

    Raises:
        OSError: If `path` is not a regular file, or larger than `most`.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        if status.st_size > most:
            raise OSError(errno.EFBIG, f"{status.st_size} bytes exceed the limit of {most}")
        with open(descriptor, "rb", closefd=False) as file:
            yield file
    finally:
        os.close(descriptor)


def sha256(path: Path, most: int) -> str:
    """Return the SHA-256 of a file in hexadecimal digits; see `opened`."""
    digest = hashlib.sha256()
    with opened(path, most) as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def write_arrays(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """Write named arrays to an `.npz` file, atomically; see `write`.

    Raises:
        TypeError: If an array has dtype object.
    """
    plain, named = {}, {}
    for name, value in arrays.items():
        array = np.asarray(value)
        if array.dtype.hasobject:
            raise TypeError(f"only numbers can be saved. Received: {name} of {array.dtype}")
        if array.dtype.kind == "V":
            named[name] = array.dtype.name
            array = array.view(f"u{array.dtype.itemsize}")
        plain[_PREFIX + name] = array
    plain[_DTYPES] = np.frombuffer(json.dumps(named).encode(), np.uint8)

    def content(file: IO[bytes]) -> None:
        np.savez(file, **plain)  # type: ignore[arg-type]

    write(path, content)


def check_unpacked(archive: zipfile.ZipFile, most: int) -> None:
    """Check that an archive is not compressed, so that its arrays are smaller than the file.

    Raises:
        ValueError: If the arrays have more than `most` bytes.
    """
    unpacked = sum(entry.file_size for entry in archive.infolist())
    if unpacked > most:
        raise ValueError(f"{unpacked} bytes of arrays exceed the limit of {most}")


def read_arrays(
    path: Path, most: int, dtype_of: Callable[[str], Any] = np.dtype
) -> dict[str, np.ndarray]:
    """Read the arrays of a file that `write_arrays` wrote.

    Args:
        path: The file.
        most: Its largest allowed size in bytes.
        dtype_of: Maps the name of a dtype that numpy does not know to the dtype.

    Raises:
        OSError: If `path` is not a regular file, or larger than `most`.
        ValueError: If the file is corrupted, or was not written by `write_arrays`.
    """
    with opened(path, most) as file:
        try:
            with np.load(file, allow_pickle=False) as archive:
                check_unpacked(archive.zip, most)
                named = json.loads(bytes(archive[_DTYPES]))
                keys = [key for key in archive.files if key != _DTYPES]
                loaded = {key.removeprefix(_PREFIX): archive[key] for key in keys}
            return {
                name: array.view(dtype_of(named[name])) if name in named else array
                for name, array in loaded.items()
            }
        except OSError:
            raise
        except Exception as error:  # zipfile and numpy raise many classes for corrupted data
            raise ValueError(f"{path} cannot be read: {error}") from error
