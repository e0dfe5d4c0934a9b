"""Program of a worker of `notebook_launcher`: calls the function, and saves its result or error.

The argument is the launcher's private folder; `notebook.py` is the launcher's side. The top of the
module imports only the standard library, because other modules need the notebook's `sys.path`.
"""

import json
import linecache
import os
import pickle
import sys
import traceback
from pathlib import Path
from typing import Any

RESULT = "result.pickle"
CALL = "call.pickle"
SURROUNDINGS = "surroundings.json"
# Marks, in the output of rank 0, the traceback of an error that the launcher raises itself.
ERROR_FOLLOWS = b"\x1etf_redsync: error of rank 0\n"


def write_private(path: Path, data: bytes) -> None:
    """Write a new file that other users of this machine cannot read."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)


def error_file(rank: int) -> str:
    """Return the name of the file with a worker's error."""
    return f"error_{rank}.pickle"


def _restore_surroundings(folder: Path) -> None:
    """Set the notebook's `sys.path`, and the sources of its cells.

    AutoGraph and tracebacks read the source of a function from `linecache`.
    """
    surroundings = json.loads((folder / SURROUNDINGS).read_bytes())
    sys.path[:] = surroundings["path"]
    for name, lines in surroundings["cells"].items():
        linecache.cache[name] = sum(map(len, lines)), None, lines, name


def _dump(value: Any) -> bytes:
    import cloudpickle

    data: bytes = cloudpickle.dumps(value)
    return data


def _dump_result(result: Any) -> bytes:
    try:
        return _dump(result)
    except Exception as error:
        raise TypeError(
            "`train` must return an object that can be pickled, such as numbers, arrays or a "
            f"dict of them. Received: {type(result).__name__}, for which pickling fails with "
            f"{type(error).__name__}: {error}"
        ) from error


def _dump_error(error: Exception) -> bytes:
    """Return a pickled pair: the pickled error, and its traceback as text.

    An error whose constructor does not take its `args` cannot be unpickled. Instead of it, the pair
    has its class, `args` and attributes, or `None` if these cannot be pickled either.
    """
    user_traceback = (
        error.__traceback__ and error.__traceback__.tb_next
    )  # without this module's frame
    text = "".join(traceback.format_exception(type(error), error, user_traceback))
    for form in (error, (type(error), error.args, vars(error))):
        try:
            data = _dump(form)
            pickle.loads(data)
        except Exception:
            continue
        return _dump((data, text))
    return _dump((None, text))


def main(folder: Path, rank: int) -> None:
    """Call the function; save the result of rank 0, or this worker's error, which is raised."""
    _restore_surroundings(folder)
    try:
        train, args = pickle.loads((folder / CALL).read_bytes())
        result = train(*args)
        if rank == 0:
            write_private(folder / RESULT, _dump_result(result))
    except Exception as error:
        write_private(folder / error_file(rank), _dump_error(error))
        if rank == 0:
            sys.stdout.flush()
            os.write(2, ERROR_FOLLOWS)
        raise


if __name__ == "__main__":
    _folder = sys.argv.pop()
    main(Path(_folder), json.loads(os.environ["TF_CONFIG"])["task"]["index"])
