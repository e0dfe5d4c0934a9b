"""One history of a training, made of the files of a run directory. Without TensorFlow."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import Any

from tf_redsync.metrics import records


@dataclasses.dataclass(frozen=True)
class Worker:
    """What one worker has recorded, without what it did again after it was ended.

    Attributes:
        rank: Its rank.
        run: The last `run` record.
        samples: By step, ascending, with `elapsed`: seconds of training, without the time between
            two runs.
        splits: Profiles of steps.
        epochs: By epoch.
        no_split: Why there are no profiles, if there are none.
    """

    rank: int
    run: dict[str, Any]
    samples: tuple[dict[str, Any], ...]
    splits: tuple[dict[str, Any], ...]
    epochs: tuple[dict[str, Any], ...]
    no_split: str


@dataclasses.dataclass(frozen=True)
class History:
    """All workers' records.

    Attributes:
        workers: By rank; at least one.
        notes: What a reader should know: what is missing, damaged or left out.
    """

    workers: tuple[Worker, ...]
    notes: tuple[str, ...]

    @property
    def first(self) -> Worker:
        """The worker that the pictures are of: worker 0, if there is one."""
        return self.workers[0]


def load(run_dir: str | os.PathLike[str]) -> History:
    """Read a run directory.

    Raises:
        FileNotFoundError: if `CompressionMetrics` has written nothing there.
        ValueError: if what is there is of a later version, or holds no run.
    """
    notes: list[str] = []
    workers = []
    for lines in records.read(run_dir):
        if lines.damaged:
            notes.append(
                f"worker {lines.rank}: {_number(lines.damaged, 'line')} left out that "
                f"{'is' if lines.damaged == 1 else 'are'} not whole, as where a process was killed."
            )
        found = _worker(lines, notes)
        if found is not None:
            workers.append(found)
    if not workers:
        raise ValueError(
            f"{os.fspath(run_dir)} has files of CompressionMetrics, but none in which a training "
            "has begun. Train a step, and make the report again."
        )
    expected, there = int(workers[0].run.get("workers", 1)), [w.rank for w in workers]
    if len(there) < expected:
        notes.append(
            f"of {expected} workers {_number(len(there), 'file')} found: those of "
            f"{'worker' if len(there) == 1 else 'workers'} {', '.join(map(str, there))}. Others "
            "had no CompressionMetrics, or another directory."
        )
    return History(tuple(workers), tuple(notes))


def _worker(lines: records.Lines, notes: list[str]) -> Worker | None:
    """Put a worker's runs one after the other; each begins where the last one ended, or before."""
    run: dict[str, Any] = {}
    kept: list[dict[str, Any]] = []
    runs, again, elapsed_before, no_split = 0, 0, 0.0, ""
    for record in lines.records:
        kind = record["record"]
        if kind == "run":
            _check_format(record, lines.rank)
            run, runs, no_split, step = record, runs + 1, "", record.get("step") or 0
            before = [r for r in kept if step and (r.get("step") or 0) <= step]
            again += _samples(kept) - _samples(before)
            kept = before
            elapsed_before = max([r["elapsed"] for r in kept], default=0.0)
        elif kind == "no_split":
            no_split = str(record.get("why", ""))
        elif kind in ("sample", "split", "epoch") and run:
            since = (record.get("time") or 0.0) - (run.get("time") or 0.0)
            kept.append({**record, "elapsed": elapsed_before + max(0.0, since)})
    if not run:
        return None
    if runs > 1:
        notes.append(f"worker {lines.rank}: {runs} calls of `fit`, one after the other.")
    if again:
        notes.append(
            f"worker {lines.rank}: {_number(again, 'sample')} left out of steps that a later call "
            "of `fit` did again, from the checkpoint it went on from or from the start."
        )
    if not no_split and run.get("time_split") != "profiled":
        no_split = str(run.get("time_split", ""))

    def of(kind: str) -> tuple[dict[str, Any], ...]:
        return tuple(r for r in kept if r["record"] == kind)

    return Worker(lines.rank, run, of("sample"), of("split"), of("epoch"), no_split)


def _samples(found: Sequence[dict[str, Any]]) -> int:
    return sum(record["record"] == "sample" for record in found)


def _check_format(run: dict[str, Any], rank: int) -> None:
    if run.get("format", 0) > records.FORMAT:
        raise ValueError(
            f"worker {rank}'s file is of a later version of tf_redsync: format {run['format']}, "
            f"and this one reads {records.FORMAT}. Update tf_redsync."
        )


def _number(count: int, what: str) -> str:
    return f"{count} {what}" + ("" if count == 1 else "s")


def column(found: Sequence[dict[str, Any]], name: str) -> list[Any]:
    """Return one value of each record; `None` where it has none."""
    return [record.get(name) for record in found]
