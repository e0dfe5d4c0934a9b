"""This worker's own state as arrays: everything of the exchange that later steps depend on.

A *part* is what one process has, a flat dict from names to numeric arrays. Nothing is asked of
other workers to make one, so each may write its own when it likes, and the chief alone may write
one. How parts become the state of a run again, on any number of workers, is in `restoring.py`.

    format, rank, workers, rows   int64: of this layout; the process among all of them; the number
                                  of the exchange's workers; how many of them this process is
    about                         uint8, JSON: the run, the kind of each array, `Auto`'s decision
    step, skipped, ...            counters, equal on all workers
    warm_up_steps                 of a warm-up of all methods; 0 while its length is not known
    training_steps                of the training, the same; where settings are fractions of it
    consensus/..., trial/...      of programs that have them
    bucket_0/residual/0, ...      of the methods' states

An array of the kind "shared" is equal on all workers. The others are each worker's own, and have
one row for each worker that the process is: several only where the replicas of a process are
workers. The kinds "sum" and "mean" are those of `step/state_variables.py`; arrays of the kind
"own" go
on only in a worker of the same rank and of as many.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tf_redsync.network import collectives
from tf_redsync.state.snapshot import FORMAT
from tf_redsync.step import state_variables

# Of programs, which one worker alone does not have.
_OF_PROGRAMS = ("consensus/", "trial/", "skips/", "optimizer/")
# A run without a warm-up or fractions has none.
LENGTHS = ("warm_up_steps", "training_steps")
PENDING = "pending"  # gradients that may be anything: the step that sends them is skipped then


@dataclasses.dataclass(frozen=True)
class Entry:
    """Variables of the exchange that are one array of a part.

    Attributes:
        name: Of the array.
        kind: `"sum"`, `"mean"`, `"shared"` or `"own"`.
        copies: This process's, one for each of its replicas or of its workers.
    """

    name: str
    kind: str
    copies: tuple[tf.Variable, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one worker's array."""
        return tuple(self.copies[0].shape)

    @property
    def dtype(self) -> np.dtype:
        """Of the array; bfloat16, which files do not know, is kept as bits."""
        dtype = np.dtype(self.copies[0].dtype.as_numpy_dtype)
        return dtype if dtype.kind in "biuf" else np.dtype(f"u{dtype.itemsize}")

    def read(self) -> np.ndarray:
        """Return the array."""
        if self.kind == "shared":
            return np.asarray(self.copies[0].numpy()).view(self.dtype)
        return np.stack([np.asarray(c.numpy()).view(self.dtype) for c in self.copies])

    def assign(self, rows: Any) -> None:
        """Set the variables.

        Args:
            rows: One for each copy, as `read` has them.
        """
        for copy, row in zip(self.copies, rows, strict=True):
            copy.assign(np.asarray(row).view(copy.dtype.as_numpy_dtype))

    def numbers(self, array: np.ndarray) -> np.ndarray:
        """Return an array of bits, as `read` has it, as numbers."""
        return array.view(self.copies[0].dtype.as_numpy_dtype)


def entries(exchange: Any, apart: bool) -> list[Entry]:
    """Return what a part of an exchange holds.

    Args:
        exchange: A built `GradientExchange`.
        apart: Whether the workers' weights are each one's own at the moment.
    """

    def entry(found: tuple[str, str, Any]) -> Entry:
        name, kind, variable = found
        return Entry(name, kind, state_variables.copies(variable, exchange.strategy))

    return [entry(found) for found in _variables(exchange, apart)]


def _variables(exchange: Any, apart: bool) -> Iterator[tuple[str, str, Any]]:
    """Name, kind and variable of everything in a part."""
    yield "step", "shared", exchange.step
    yield "skipped", "shared", exchange.skipped
    yield "skipped_in_a_row", "shared", exchange.nonfinite.in_a_row
    for name, length in zip(LENGTHS, (exchange.warm_up, exchange.training), strict=True):
        if length is not None:
            yield name, "shared", length.variable
    if exchange.schedule.own_steps:
        for name, variable in exchange.nonfinite.here_only.items():
            yield f"skips/{name}", "own", variable
        for i, variable in enumerate(exchange.own_variables):
            yield f"optimizer/{i}", "own", variable
    consensus = exchange.consensus
    if consensus is not None:
        yield "consensus/steps", "shared", consensus.steps
        yield "consensus/rounds", "shared", consensus.rounds
        if apart:
            for i, (agreed, own) in enumerate(zip(consensus.agreed, consensus.own, strict=True)):
                yield f"consensus/agreed/{i}", "shared", agreed
                yield f"consensus/own/{i}", "mean", own
    times = getattr(exchange.schedule, "times", None)
    if times is not None:
        for name in ("count", "verdict", "delivered"):
            yield f"trial/{name}", "shared", getattr(times, name)
        yield "trial/seconds", "own", times.seconds
    for bucket, variables in enumerate(exchange.states):
        for name, group in variables.variables_by_name.items():
            for i, variable in enumerate(group):
                yield f"bucket_{bucket}/{name}/{i}", variables.kinds[name], variable


def of_a_program(name: str) -> bool:
    """Whether an array is of a program that runs on several workers only."""
    return name.startswith(_OF_PROGRAMS) or f"/{PENDING}/" in name


def capture(exchange: Any) -> dict[str, np.ndarray]:
    """Return this process's part; see `GradientExchange.worker_state`."""
    found = entries(exchange, exchange.apart)
    about = {
        "run": exchange.run,
        "kinds": {e.name: e.kind for e in found},
        "decision": exchange.decision(),
    }
    numbers = {
        "format": FORMAT,
        "rank": collectives.worker_rank(exchange.strategy),
        "workers": exchange.workers,
        "rows": rows_here(exchange),
    }
    return {
        **{name: np.asarray(value, np.int64) for name, value in numbers.items()},
        "about": np.frombuffer(json.dumps(about).encode(), np.uint8),
        **{e.name: e.read() for e in found},
    }


def rows_here(exchange: Any) -> int:
    """How many of the exchange's workers this process is."""
    return exchange.workers // collectives.worker_count(exchange.strategy)
