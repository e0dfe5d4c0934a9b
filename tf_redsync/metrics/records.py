"""Files of a run directory, one per worker, and the history of a training read from them.

Each line is a JSON object with `record`, its kind. This module does not need TensorFlow.

    run     when `fit` begins: versions, the model's variables, methods, the text of `explain()`,
            `step` and `bytes_sent` so far
    sample  at regular steps: `step`, `epoch`, `seconds` since `fit` began, `time` (Unix),
            `bytes_sent` by the worker since the run's first step, `bytes_per_step`,
            `compression_ratio`, `density`, `residual_norm`, `skipped_steps` since the run's first
            step, `step_ms`, Keras's `logs`, and values per variable in `layers`
    split   a profile of some steps, in milliseconds; see `profiler.Split`
    epoch   when an epoch ends: Keras's `logs`, including those of the validation
    end     when `fit` ends

A non-finite number is `null`. A resumed training appends to its file, so a file may hold several
runs. A process that was killed may leave an incomplete last line.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

FORMAT = 1
_BLOCK = 1 << 20  # bytes that `newest_first` reads at once
_FILE = re.compile(r"worker-(\d+)\.jsonl")


def is_records(path: Path) -> bool:
    """Return whether a file has the name of a worker's file."""
    return _FILE.fullmatch(path.name) is not None


def path_of(directory: str | os.PathLike[str], rank: int) -> Path:
    """Return the path of a worker's file in a run directory."""
    return Path(directory) / f"worker-{rank}.jsonl"


class RunFile:
    """Writer of a worker's file. An error becomes a warning and ends the writing.

    Args:
        directory: The run directory, which is created if it does not exist.
        rank: Rank of the worker.
    """

    def __init__(self, directory: str | os.PathLike[str], rank: int):
        self.path = path_of(directory, rank)
        self._file: Any = None
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            broken = self.path.is_file() and _ends_early(self.path)
            self._file = self.path.open("a", encoding="utf-8")
            if broken:  # the previous process was killed while it wrote
                self._file.write("\n")
        except OSError as error:
            self._give_up(error)

    def append(self, record: str, **values: Any) -> None:
        """Write a record."""
        if self._file is None:
            return
        try:
            self._file.write(json.dumps(finite({"record": record, **values}), allow_nan=False))
            self._file.write("\n")
            self._file.flush()
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        """Close the file."""
        file, self._file = self._file, None
        if file is not None:
            _close(file)

    def _give_up(self, error: OSError) -> None:
        file, self._file = self._file, None
        warnings.warn(
            f"`CompressionMetrics` cannot write {self.path}: {error.strerror or error}. Training "
            "continues without this file; `fit`'s logs still have the metrics.",
            stacklevel=4,
        )
        if file is not None:
            _close(file)


def _close(file: Any) -> None:
    try:
        file.close()
    except OSError:  # the buffer cannot be written, which has been reported
        pass


def _ends_early(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(0, os.SEEK_END)
        if not file.tell():
            return False
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


def finite(value: Any) -> Any:
    """Return a value that JSON can hold, with `None` for non-finite numbers."""
    if isinstance(value, dict):
        return {str(k): finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(v) for v in value]
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if hasattr(value, "tolist"):  # NumPy
        return finite(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return str(value)


@dataclasses.dataclass(frozen=True)
class Lines:
    """Contents of a worker's file.

    Attributes:
        rank: Rank of the worker.
        records: The records, in the order of the file.
        damaged: Number of malformed lines, which are skipped.
    """

    rank: int
    records: tuple[dict[str, Any], ...]
    damaged: int


def read(directory: str | os.PathLike[str]) -> list[Lines]:
    """Return the contents of all workers' files in a run directory, by rank.

    Raises:
        FileNotFoundError: `directory` is not a directory or has no such files.
    """
    folder = Path(directory)
    if not folder.is_dir():
        raise FileNotFoundError(
            f"`run_dir` must be a directory of CompressionMetrics. Received: "
            f"run_dir={os.fspath(directory)!r}, which "
            + ("is not a directory." if folder.exists() else "does not exist.")
        )
    names = ((p, _FILE.fullmatch(p.name)) for p in folder.iterdir() if p.is_file())
    paths = {int(match[1]): path for path, match in names if match}
    if not paths:
        raise FileNotFoundError(
            f"`run_dir` has no file worker-0.jsonl, so it has no records. Train with "
            "callbacks=[tf_redsync.callbacks.CompressionMetrics(run_dir=...)] and pass the same "
            f"directory. Received: run_dir={os.fspath(directory)!r}"
        )
    return [read_file(rank, paths[rank]) for rank in sorted(paths)]


def read_file(rank: int, path: Path) -> Lines:
    """Return the contents of a worker's file; see `read`."""
    records, damaged = [], 0
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        record = _record(line)
        if record is not None:
            records.append(record)
        elif line.strip():
            damaged += 1
    return Lines(rank, tuple(records), damaged)


def newest_first(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a worker's file from its end, without reading all of a long file."""
    with path.open("rb") as file:
        end, head = file.seek(0, os.SEEK_END), b""
        while end:
            begin = max(0, end - _BLOCK)
            file.seek(begin)
            head, *lines = (file.read(end - begin) + head).split(b"\n")
            end = begin
            for line in reversed(lines if begin else [head, *lines]):
                record = _record(line.decode("utf-8", "replace"))
                if record is not None:
                    yield record


def _record(line: str) -> dict[str, Any] | None:
    """Return the record of a line; `None` if it is malformed."""
    try:
        record = json.loads(line)
    except (RecursionError, ValueError):
        return None
    return record if _is_record(record) else None


def _is_record(value: Any) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("record"), str):
        return False
    return value["record"] != "sample" or isinstance(value.get("step"), int)


@dataclasses.dataclass(frozen=True)
class Worker:
    """Records of one worker, without steps that a later run repeated.

    Attributes:
        rank: Rank of the worker.
        run: The last `run` record.
        start: The `run` record that the samples begin with.
        samples: Samples in the order of steps, with `elapsed`: seconds of training, without the
            time between two runs; and `dense_bytes` of their run.
        splits: Profiles of steps.
        epochs: Epochs in order.
        no_split: Reason for the absence of profiles; empty if there are any.
    """

    rank: int
    run: dict[str, Any]
    start: dict[str, Any]
    samples: tuple[dict[str, Any], ...]
    splits: tuple[dict[str, Any], ...]
    epochs: tuple[dict[str, Any], ...]
    no_split: str


@dataclasses.dataclass(frozen=True)
class History:
    """History of a training: all workers' records.

    Attributes:
        workers: Workers by rank; at least one.
        notes: Notes for the reader about missing, damaged or repeated records.
    """

    workers: tuple[Worker, ...]
    notes: tuple[str, ...]

    @property
    def first(self) -> Worker:
        """The worker that the figures show: worker 0 if it has a file."""
        return self.workers[0]


def load(run_dir: str | os.PathLike[str]) -> History:
    """Return the history in a run directory.

    Raises:
        FileNotFoundError: the directory has no files of `CompressionMetrics`.
        ValueError: the files have a later version's format, or no run.
    """
    notes: list[str] = []
    workers = []
    for lines in read(run_dir):
        if lines.damaged:
            notes.append(
                f"worker {lines.rank}: skipped {_number(lines.damaged, 'malformed line')}, such as "
                "an incomplete one of a killed process."
            )
        worker = _worker(lines, notes)
        if worker is not None:
            workers.append(worker)
    if not workers:
        raise ValueError(
            "`run_dir` has files of CompressionMetrics without a training step. Train at least one "
            f"step before the report. Received: run_dir={os.fspath(run_dir)!r}"
        )
    expected, ranks = int(workers[0].run.get("workers", 1)), [w.rank for w in workers]
    if len(ranks) < expected:
        notes.append(
            f"{_number(len(ranks), 'file')} found of {expected} workers: those of "
            f"{'worker' if len(ranks) == 1 else 'workers'} {', '.join(map(str, ranks))}. The "
            "others had no CompressionMetrics callback, or another directory."
        )
    return History(tuple(workers), tuple(notes))


def _worker(lines: Lines, notes: list[str]) -> Worker | None:
    """Join a worker's runs. A run may begin before the end of the previous one."""
    run: dict[str, Any] = {}
    start = run
    records: list[dict[str, Any]] = []
    runs, repeated, elapsed_before, no_split = 0, 0, 0.0, ""
    for record in lines.records:
        kind = record["record"]
        if kind == "run":
            _check_format(record, lines.rank)
            run, runs, no_split, step = record, runs + 1, "", record.get("step") or 0
            before = [r for r in records if step and (r.get("step") or 0) <= step]
            repeated += _samples(records) - _samples(before)
            records, start = before, start if before else run
            elapsed_before = max([r["elapsed"] for r in records], default=0.0)
        elif kind == "no_split":
            no_split = str(record.get("why", ""))
        elif kind in ("sample", "split", "epoch") and run:
            since = (record.get("time") or 0.0) - (run.get("time") or 0.0)
            elapsed = elapsed_before + max(0.0, since)
            records.append({**record, "elapsed": elapsed, "dense_bytes": run.get("dense_bytes")})
    if not run:
        return None
    if runs > 1:
        notes.append(f"worker {lines.rank}: {runs} calls of `fit`.")
    if repeated:
        notes.append(
            f"worker {lines.rank}: omitted {_number(repeated, 'sample')} of steps that a later "
            "call of `fit` repeated."
        )
    if not no_split and run.get("time_split") != "profiled":
        no_split = str(run.get("time_split", ""))

    def of(kind: str) -> tuple[dict[str, Any], ...]:
        return tuple(r for r in records if r["record"] == kind)

    return Worker(lines.rank, run, start, of("sample"), of("split"), of("epoch"), no_split)


def _samples(records: Sequence[dict[str, Any]]) -> int:
    return sum(record["record"] == "sample" for record in records)


def _check_format(run: dict[str, Any], rank: int) -> None:
    if run.get("format", 0) > FORMAT:
        raise ValueError(
            f"the file of worker {rank} has format {run['format']}, of a later version of "
            f"tf_redsync; this version reads format {FORMAT}. Update tf_redsync."
        )


def _number(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("" if count == 1 else "s")


def column(records: Sequence[dict[str, Any]], name: str) -> list[Any]:
    """Return the value of a field in each record; `None` if the record lacks it."""
    return [record.get(name) for record in records]
