"""Named arrays as one `.npz` file, without pickle.

numpy writes dtypes that it does not know, bfloat16 for one, as bytes without a name. They are
stored as unsigned integers of their size, and their names in one more array.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import IO, Any

import numpy as np

from tf_redsync.state import checkpoint_files

_DTYPES = "dtypes"  # the array with the dtypes' names, as JSON in UTF-8
_PREFIX = "arrays/"


def save(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """Write arrays to a file, see `files.write`.

    Raises:
        TypeError: for arrays of objects.
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

    checkpoint_files.write(path, content)


def load(path: Path, most: int, dtype_of: Any = np.dtype) -> dict[str, np.ndarray]:
    """Read what `save` wrote.

    Args:
        path: The file.
        most: Bytes that it may have.
        dtype_of: From a name that numpy does not know to the dtype.

    Raises:
        OSError: for anything but a regular file of this size.
        ValueError: for a file that is not whole, or not one of `save`.
    """
    with checkpoint_files.opened(path, most) as file:
        try:
            with np.load(file, allow_pickle=False) as archive:
                # Not compressed, so the arrays are smaller than the file.
                unpacked = sum(entry.file_size for entry in archive.zip.infolist())
                if unpacked > most:
                    raise ValueError(f"{unpacked} bytes of arrays, and {most} is the most")
                named = json.loads(bytes(archive[_DTYPES]))
                keys = [key for key in archive.files if key != _DTYPES]
                loaded = {key.removeprefix(_PREFIX): archive[key] for key in keys}
            return {
                name: array.view(dtype_of(named[name])) if name in named else array
                for name, array in loaded.items()
            }
        except OSError:
            raise
        except Exception as error:  # zip and numpy raise whatever they meet
            raise ValueError(f"{path} cannot be read: {error}") from error
