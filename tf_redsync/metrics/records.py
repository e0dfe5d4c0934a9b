"""The files of a run directory: one of JSON lines for each worker. Without TensorFlow.

Each line is an object with `record`, its kind:

    run     when `fit` begins: versions, the model's variables, methods, the text of `explain()`
    sample  every so many steps: `step`, `epoch`, `seconds` since `fit` began, `time` (Unix),
            `bytes_sent` by the worker since the run's first step, `bytes_per_step`,
            `compression_ratio`, `density`, `residual_norm`, `skipped_steps`, `step_ms`, Keras's
            `logs`, and by variable `layers`
    split   a profile of some steps: milliseconds; see `time_split.Split`
    epoch   when an epoch ends: Keras's `logs`, with those of the validation
    end     when `fit` ends

A number that is not finite is `null`. A training that goes on appends to its file, so a file may
hold several runs, and a last line that is not whole where a process was killed.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import warnings
from pathlib import Path
from typing import Any

FORMAT = 1
_FILE = re.compile(r"worker-(\d+)\.jsonl")


class RunFile:
    """Appends records to a worker's file. A failure is a warning, once, and the file's end.

    Args:
        directory: The run directory, which is made if it is not there.
        rank: The worker's.
    """

    def __init__(self, directory: str | os.PathLike[str], rank: int):
        self.path = Path(directory) / f"worker-{rank}.jsonl"
        self._file: Any = None
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            broken = self.path.is_file() and _ends_early(self.path)
            self._file = self.path.open("a", encoding="utf-8")
            if broken:  # the process before was killed while it wrote
                self._file.write("\n")
        except OSError as error:
            self._give_up(error)

    def append(self, record: str, **values: Any) -> None:
        """Write a line."""
        if self._file is None:
            return
        try:
            self._file.write(json.dumps(finite({"record": record, **values}), allow_nan=False))
            self._file.write("\n")
            self._file.flush()
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        """Write no more."""
        file, self._file = self._file, None
        if file is not None:
            _close(file)

    def _give_up(self, error: OSError) -> None:
        file, self._file = self._file, None
        warnings.warn(
            f"`CompressionMetrics` cannot write {self.path}: {error.strerror or error}. Training "
            "goes on without this file; `fit`'s logs still have the metrics.",
            stacklevel=4,
        )
        if file is not None:
            _close(file)


def _close(file: Any) -> None:
    try:
        file.close()
    except OSError:  # what is still buffered cannot be written: it is said already
        pass


def _ends_early(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(0, os.SEEK_END)
        if not file.tell():
            return False
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


def finite(value: Any) -> Any:
    """Return what JSON can hold: Python's numbers, `None` for one that is not finite."""
    if isinstance(value, dict):
        return {str(k): finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(v) for v in value]
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if hasattr(value, "tolist"):  # of NumPy
        return finite(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return str(value)


@dataclasses.dataclass(frozen=True)
class Lines:
    """What a worker's file holds.

    Attributes:
        rank: The worker's.
        records: The records, in their order.
        damaged: How many lines were left out because they are no records.
    """

    rank: int
    records: tuple[dict[str, Any], ...]
    damaged: int


def read(directory: str | os.PathLike[str]) -> list[Lines]:
    """Read all workers' files of a run directory, by rank.

    Raises:
        FileNotFoundError: if it is no directory, or there is no such file in it.
    """
    folder = Path(directory)
    if not folder.is_dir():
        raise FileNotFoundError(
            f"`run_dir` must be a directory that CompressionMetrics has written. Received: "
            f"run_dir={os.fspath(directory)!r}, which is "
            + ("not a directory." if folder.exists() else "not there.")
        )
    names = ((p, _FILE.fullmatch(p.name)) for p in folder.iterdir() if p.is_file())
    found = {int(match[1]): path for path, match in names if match}
    if not found:
        raise FileNotFoundError(
            f"{folder} has no worker-0.jsonl: nothing was recorded there. Train with "
            "callbacks=[tf_redsync.callbacks.CompressionMetrics(run_dir=...)] and give that "
            f"directory. Received: run_dir={os.fspath(directory)!r}"
        )
    return [_read(rank, found[rank]) for rank in sorted(found)]


def _read(rank: int, path: Path) -> Lines:
    records, damaged = [], 0
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if isinstance(record, dict) and isinstance(record.get("record"), str):
            records.append(record)
        elif line.strip():
            damaged += 1
    return Lines(rank, tuple(records), damaged)
