"""`notebook_launcher`: runs a function of a notebook on worker processes of this machine.

A function of a cell belongs to the notebook's `__main__`, which a worker cannot import. So it is
pickled by value with cloudpickle. Processes of one user on one machine exchange the pickles, in
files of mode 600 in a new folder of mode 700, which is removed at the end. No other pickles are
loaded. `notebook_worker.py` is the program of a worker.
"""

from __future__ import annotations

import codecs
import functools
import io
import json
import linecache
import pickle
import sys
import tempfile
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from typing_extensions import override

from tf_redsync.cli import launch, notebook_worker, output, root_cause
from tf_redsync.cli.processes import TAIL_LINES, LaunchResult, WorkerResult
from tf_redsync.errors import DistributedError

PROGRAM = notebook_worker.__file__
_NO_FILE = "<dynamic-code>"


def notebook_launcher(train: Callable[..., Any], workers: int = 2, args: Sequence[Any] = ()) -> Any:
    """Call a function on worker processes of this machine; return the result of rank 0.

    It works in notebooks and in scripts. Every worker is a new process with its own `TF_CONFIG`,
    and calls `train(*args)`, which creates its own `MultiWorkerMirroredStrategy`:

        def train(epochs):
            strategy = rs.MultiWorkerMirroredStrategy()
            with strategy.scope():
                model = ...
            return model.fit(dataset(), epochs=epochs).history

        history = rs.notebook_launcher(train, workers=2, args=(5,))

    The cell shows the output of rank 0 as it arrives. All workers end with the cell: after an
    interrupt, after an error of one of them, or when the notebook's process ends.

    `train` is copied with the functions, classes and variables of the notebook that it uses. It
    sees their values, but its assignments stay in the worker. Create the strategy, datasets and
    model inside `train`: a tensor or a model from outside starts TensorFlow before the strategy
    does. Pass arrays instead. Workers import modules again, with the notebook's `sys.path` and
    environment variables.

    Requires the package cloudpickle (extra `notebook`).

    Args:
        train: Function that every worker calls.
        workers: Number of worker processes, at least 1. They share the cores of this machine.
        args: Positional arguments of `train`, equal for all workers.

    Returns:
        The result of rank 0, pickled and restored. Results of other workers are dropped.

    Raises:
        ImportError: cloudpickle is not installed.
        TypeError: `train`, `args` or the result of rank 0 cannot be pickled.
        ValueError: `workers` is not an integer >= 1, or TF_CONFIG is set.
        DistributedError: a worker was ended by a signal, exited, or its error cannot be restored.
        Exception: the error of the worker that failed first, with its rank and traceback as a note.
    """
    call = _pickled(train, args)
    with tempfile.TemporaryDirectory(prefix="tf_redsync_notebook_") as name:
        folder = Path(name)
        notebook_worker.write_private(folder / notebook_worker.CALL, call)
        surroundings = json.dumps({"path": list(map(str, sys.path)), "cells": _cells()}).encode()
        notebook_worker.write_private(folder / notebook_worker.SURROUNDINGS, surroundings)
        command = [sys.executable, PROGRAM, name]
        try:
            result = launch.run(command, workers, stream=_Cell())
        except KeyboardInterrupt:  # raised again without the launcher's stack frames
            raise KeyboardInterrupt("all workers have been ended") from None
        if result.exit_code:
            _raise(result, folder)
        saved = folder / notebook_worker.RESULT
        if not saved.exists():
            raise DistributedError("worker 0 has exited before `train` returned.")
        return pickle.loads(saved.read_bytes())


class _Cell:
    """Prints output as it arrives, without TensorFlow's log noise.

    A progress bar has no complete lines before its end. TensorFlow writes whole lines, so its lines
    are recognized at the beginning of a chunk, too. The traceback of rank 0 is not printed, because
    it is a note of the error that the launcher raises.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._ended = False

    def __call__(self, data: bytes) -> None:
        if self._ended:
            return
        data, mark, _ = data.partition(notebook_worker.ERROR_FOLLOWS)
        self._ended = bool(mark)
        lines = data.splitlines(keepends=True)
        shown = b"".join(line for line in lines if not output.is_noise(line))
        sys.stdout.write(self._decoder.decode(shown))
        sys.stdout.flush()


def _pickled(train: Callable[..., Any], args: Sequence[Any]) -> bytes:
    if not callable(train):
        raise TypeError(f"`train` must be a function. Received: train={train!r}")
    if not isinstance(args, (list, tuple)):
        raise TypeError(f"`args` must be a tuple of arguments of `train`. Received: args={args!r}")
    try:
        import cloudpickle
    except ModuleNotFoundError as error:
        raise ImportError(
            "cloudpickle is not installed, and `notebook_launcher` needs it: "
            "pip install cloudpickle"
        ) from error

    class Pickler(cloudpickle.Pickler):
        """Keeps the file names of code, which locate its source; cloudpickle 3.1 drops them."""

        @override
        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, types.CodeType) and obj.co_filename != _NO_FILE:
                rename = functools.partial(types.CodeType.replace, co_filename=obj.co_filename)
                return rename, (obj.replace(co_filename=_NO_FILE),)
            return super().reducer_override(obj)

    data = io.BytesIO()
    try:
        Pickler(data).dump((train, tuple(args)))
    except Exception as error:
        raise TypeError(
            "`train`, `args` and the variables that `train` uses must be picklable. Make datasets, "
            "strategies and open files inside of `train`. Received an object for which pickling "
            f"fails with {type(error).__name__}: {error}"
        ) from error
    return data.getvalue()


def _cells() -> dict[str, list[str]]:
    """Return the sources of the notebook's cells, which are not in files, by name."""
    cached = {name: entry for name, entry in linecache.cache.items() if len(entry) == 4}
    return {name: list(entry[2]) for name, entry in cached.items() if entry[1] is None}


def _raise(result: LaunchResult, folder: Path) -> NoReturn:
    """Raise the error of the worker that failed first."""
    worker = result.workers[result.first_failed or 0]
    saved = folder / notebook_worker.error_file(worker.index)
    if not result.failed or not saved.exists():
        raise DistributedError(result.message)
    pickled, text = pickle.loads(saved.read_bytes())
    error = _restored(pickled)
    if error is None:
        error = DistributedError(result.message.rpartition("\n")[2])
    notes = [f"Raised by worker {worker.index}:\n{text.rstrip()}", *_earlier_lines(worker, text)]
    if worker.index and (first := folder / notebook_worker.error_file(0)).exists():
        _, text = pickle.loads(first.read_bytes())
        notes.append(f"Worker 0 failed after it:\n{text.rstrip()}")
    error.__notes__ = [*getattr(error, "__notes__", ()), *notes]  # `add_note` needs Python 3.11
    raise error


def _restored(pickled: bytes | None) -> Exception | None:
    try:
        error = None if pickled is None else pickle.loads(pickled)
        if isinstance(error, tuple):
            kind, arguments, attributes = error
            error = kind.__new__(kind, *arguments)
            error.__dict__.update(attributes)
    except Exception:  # for example a class whose constructor takes other arguments
        return None
    return error if isinstance(error, Exception) else None


def _earlier_lines(worker: WorkerResult, traceback: str) -> list[str]:
    """Return a note with a worker's last lines before its traceback, unless they were streamed."""
    count = traceback.count(root_cause.TRACEBACK)  # one for each chained error
    before = root_cause.plain(worker.output).rsplit(root_cause.TRACEBACK, count)[0]
    lines = before.rstrip().splitlines()
    shown = [line for line in lines if not output.is_noise(line.encode())][-TAIL_LINES:]
    return ["\n".join(["Its last lines before:", *shown])] if worker.index and shown else []
