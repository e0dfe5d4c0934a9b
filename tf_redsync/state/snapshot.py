"""A snapshot: all state of one process that later steps of an exchange depend on, as arrays.

A snapshot is a flat dict from names to numeric arrays. Taking one needs no communication, so each
worker may write its own at any time, and the chief alone may write one. `restore.py` gives the
snapshots of a run to any number of workers.

    format, rank, workers, rows   int64: version of this layout; rank of the process; number of the
                                  exchange's workers; number of them in this process
    about                         uint8, JSON: the run, the kind of each array, `Auto`'s decision,
                                  the version of tf_redsync
    step, skipped, ...            counters, equal on all workers
    warm_up_steps                 length of a warm-up of all methods in steps; 0 while unknown
    training_steps                length of the training in steps, if settings are fractions of it;
                                  0 while unknown
    consensus/..., trial/...      state of the sync schedules that have it
    states/residual/3, ...        states of the methods, by the variable's position in the model
    states/ratios/bucket_0/0, ... states of a whole bucket

An array of kind "shared" is equal on all workers. Other arrays have one row for each worker in the
process: several rows only if the process's replicas are workers. Kinds "sum" and "mean" are those
of `step/state_variables.py`. An array of kind "own" is restored only on a worker of the same rank
in a run with as many workers.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import tensorflow as tf

from tf_redsync.auto import decision
from tf_redsync.network import strategies
from tf_redsync.step import state_variables
from tf_redsync.step.gradient_exchange import GradientExchange
from tf_redsync.step.streaming import Streaming
from tf_redsync.version import __version__

FORMAT = 1
# Absent from runs without a warm-up or fractions.
LENGTHS = ("warm_up_steps", "training_steps")
_SCALARS = ("format", "rank", "workers", "rows")
# State of sync schedules that a single worker does not run.
_OF_SCHEDULES = ("consensus/", "trial/", "skips/", "optimizer/")
_STATES = "states/"
# Gradients and changes of a delay, possibly non-finite: the step that applies them then drops them.
_DELAYED = ("/pending/", "/moving/")
_OF_BUCKETS = ("/pending/", "/outer_", "/moving")  # of a delay, rounds, fragments
_SHOWN = 5  # names in a message
_MOST_WORKERS = 1 << 20  # in a file that is not corrupted


class IncompatibleState(ValueError):
    """The saved state belongs to another model or method."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """One array of a snapshot, and the variables that it is read from and restored to.

    Attributes:
        name: The array's name.
        kind: `"sum"`, `"mean"`, `"shared"` or `"own"`.
        copies: The variables in this process, one for each of its replicas or workers.
    """

    name: str
    kind: str
    copies: tuple[tf.Variable, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one worker's array."""
        return tuple(self.copies[0].shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The array's dtype; dtypes unknown to files, such as bfloat16, are stored as bits."""
        dtype = np.dtype(self.copies[0].dtype.as_numpy_dtype)
        return dtype if dtype.kind in "biuf" else np.dtype(f"u{dtype.itemsize}")

    def read(self) -> np.ndarray:
        """Return the array: one row for each copy, or a single value if it is shared."""
        if self.kind == "shared":
            return np.asarray(self.copies[0].numpy()).view(self.dtype)
        rows = [np.asarray(c.numpy()).view(self.dtype) for c in self.copies]
        return np.stack(rows) if len(rows) > 1 else rows[0][np.newaxis]  # without another copy

    def assign(self, rows: Sequence[np.ndarray]) -> None:
        """Set the variables.

        Args:
            rows: One array for each copy, in the dtype of `read`.
        """
        for copy, row in zip(self.copies, rows, strict=True):
            copy.assign(np.asarray(row).view(copy.dtype.as_numpy_dtype))

    def numbers(self, array: np.ndarray) -> np.ndarray:
        """Return an array in the dtype of `read` as numbers of the variables' dtype."""
        return array.view(self.copies[0].dtype.as_numpy_dtype)

    def check(self, owner: str, array: np.ndarray) -> None:
        """Check one worker's array before it is restored.

        Args:
            owner: The snapshot, for the message.
            array: The array.

        Raises:
            ValueError: If `array` has another dtype, or non-finite values.
        """
        if array.dtype != self.dtype:
            raise ValueError(
                f"{owner} must have {self.name!r} of dtype {self.dtype}. "
                f"Received: dtype={array.dtype}"
            )
        numbers = self.numbers(array)
        may_be_nonfinite = any(part in self.name for part in _DELAYED)
        if numbers.dtype.kind not in "biu" and not may_be_nonfinite:
            bad = int(np.size(numbers) - np.isfinite(np.asarray(numbers, np.float32)).sum())
            if bad:
                raise ValueError(
                    f"{owner} has {bad} non-finite values in {self.name!r}. The file is corrupted: "
                    "load an earlier one."
                )


def entries(exchange: GradientExchange, apart: bool) -> list[Entry]:
    """Return the entries of an exchange's snapshot.

    Args:
        exchange: The exchange.
        apart: Whether each worker has its own weights at this step.
    """
    return [
        Entry(name, kind, state_variables.copies(variable, exchange.strategy))
        for name, kind, variable in _variables(exchange, apart)
    ]


def _variables(exchange: GradientExchange, apart: bool) -> Iterator[tuple[str, str, Any]]:
    """Yield name, kind and variable of each entry."""
    yield "step", "shared", exchange.step
    yield "skipped", "shared", exchange.skipped
    yield "skipped_in_a_row", "shared", exchange.nonfinite.in_a_row
    for name, length in zip(LENGTHS, (exchange.warm_up, exchange.training), strict=True):
        if length is not None:
            yield name, "shared", length.variable
    if exchange.schedule.skips_locally:
        for name, variable in exchange.nonfinite.local_variables.items():
            yield f"skips/{name}", "own", variable
        if isinstance(exchange.schedule, Streaming):
            for name, (kind, variable) in exchange.nonfinite.in_flight.items():
                yield f"skips/{name}", kind, variable
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
        for name in ("count", "verdict", "delivered", "interrupted"):
            yield f"trial/{name}", "shared", getattr(times, name)
        yield "trial/seconds", "own", times.seconds
    for number, variables in enumerate(exchange.states):
        positions = [str(s.position) for s in exchange.schedule.buckets[number].layout.specs]
        for name, group in variables.variables_by_name.items():
            in_bucket = [f"bucket_{number}/{i}" for i in range(len(group))]
            # States of single tensors do not depend on how tensors are grouped.
            places = positions if len(group) == len(positions) else in_bucket
            for place, variable in zip(places, group, strict=True):
                yield f"{_STATES}{name}/{place}", variables.kinds[name], variable


def needs_several_workers(name: str) -> bool:
    """Return whether an array is absent from the snapshots of a single worker."""
    return name.startswith(_OF_SCHEDULES) or any(part in name for part in _OF_BUCKETS)


def capture(exchange: GradientExchange) -> dict[str, np.ndarray]:
    """Return the snapshot of this process; see `SaveableExchange.worker_state`."""
    exchange.schedule.settle()
    saved = entries(exchange, exchange.weights_differ)
    about = {
        "run": exchange.run_id,
        "kinds": {e.name: e.kind for e in saved},
        "decision": auto_decision(exchange),
        "version": __version__,
    }
    numbers = {
        "format": FORMAT,
        "rank": strategies.process_rank(exchange.strategy),
        "workers": exchange.workers,
        "rows": workers_here(exchange),
    }
    return {
        **{name: np.asarray(value, np.int64) for name, value in numbers.items()},
        "about": np.frombuffer(json.dumps(about).encode(), np.uint8),
        **{e.name: e.read() for e in saved},
    }


def auto_decision(exchange: GradientExchange) -> dict[str, Any] | None:
    """Return the decision of `Auto` as JSON values, or `None` if the user chose the methods."""
    if exchange.resolved is exchange.policy:
        return None
    return decision.described(exchange.assignments, exchange.resolved.trial_steps)


def workers_here(exchange: GradientExchange) -> int:
    """Return the number of the exchange's workers in this process."""
    return exchange.workers // strategies.process_count(exchange.strategy)


# -------------------------------------------------------------------------------------- reading


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """A snapshot that was read from a file and has a valid layout.

    Attributes:
        rank: Rank of the process that took it.
        workers: Number of the exchange's workers in that run.
        rows: Number of them in that process.
        about: The JSON object `about`.
        arrays: All other arrays, by name.
    """

    rank: int
    workers: int
    rows: int
    about: Mapping[str, Any]
    arrays: Mapping[str, np.ndarray]

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Snapshot:
        """Validate the dict that `capture` returned.

        Raises:
            ValueError: If `values` is not the result of `capture`.
        """
        missing = [n for n in (*_SCALARS, "about", "step") if n not in values]
        if missing:
            raise ValueError(
                "`parts` must be dicts that `worker_state` returned. Received: a part without "
                f"{', '.join(missing)}, with {len(values)} arrays."
            )
        arrays = {name: _numeric(name, value) for name, value in values.items()}
        numbers = {name: _counter(name, arrays.pop(name)) for name in _SCALARS}
        if numbers.pop("format") != FORMAT:
            raise ValueError(
                f"the part has format {int(values['format'])}, and this version of tf_redsync "
                f"reads format {FORMAT}. Load it with the version that saved it."
            )
        snapshot = cls(**numbers, about=_json(arrays.pop("about")), arrays=arrays)
        snapshot.check_layout()
        return snapshot

    def check_layout(self) -> None:
        """Check that ranks, names and rows agree with each other.

        Raises:
            ValueError: If they are inconsistent.
        """
        contradict = not self.rows or (self.rank + 1) * self.rows > self.workers
        if contradict or self.workers > _MOST_WORKERS:
            raise ValueError(
                "the part's rank and workers contradict each other, or there are more than "
                f"{_MOST_WORKERS:,} workers. Received: rank={self.rank}, rows={self.rows}, "
                f"workers={self.workers}. Load an earlier one."
            )
        kinds = self.about.get("kinds")
        if not isinstance(kinds, dict) or set(kinds) != set(self.arrays):
            raise ValueError(
                "the part's arrays are not those that its 'about' lists. Received: "
                f"{len(self.arrays)} arrays. Is it a mixture of two?"
            )
        for name, array in self.arrays.items():
            if kinds[name] != "shared" and (not array.ndim or len(array) != self.rows):
                raise ValueError(
                    f"{name!r} of the part must have {self.rows} rows. Received: shape="
                    f"{array.shape}"
                )

    @cached_property
    def step(self) -> int:
        """The step at which it was taken."""
        return _counter("step", self.arrays["step"])

    @property
    def ranks(self) -> range:
        """The ranks of the exchange's workers in it."""
        return range(self.rank * self.rows, (self.rank + 1) * self.rows)

    @property
    def apart(self) -> bool:
        """Whether each worker had its own weights."""
        return any(name.startswith("consensus/own/") for name in self.arrays)

    def row(self, name: str, rank: int) -> np.ndarray:
        """Return the array of one of the exchange's workers."""
        array = self.arrays[name]
        return array if self.about["kinds"][name] == "shared" else array[rank - self.ranks.start]

    def fingerprint(self) -> dict[str, Any]:
        """Return the values that all snapshots of one save have in common, by description."""
        digest = hashlib.blake2b(digest_size=8)
        for name in sorted(self.arrays):
            digest.update(name.encode())
            if self.about["kinds"][name] == "shared":
                array = self.arrays[name]
                digest.update(f"{array.dtype}{array.shape}".encode())
                digest.update(np.ascontiguousarray(array).tobytes())
        return {
            "step": self.step,
            "run": str(self.about.get("run")),
            "workers": self.workers,
            "rows": self.rows,
            "a digest of shared arrays": digest.hexdigest(),
        }

    def check_counters(self, owner: str) -> None:
        """Check the ranges of counters that all workers share.

        Args:
            owner: This snapshot, for the message.

        Raises:
            ValueError: If a counter is out of range; the message names it.
        """
        counters = [n for n, a in self.arrays.items() if not a.shape and a.dtype.kind == "i"]
        # Counters of methods may begin below 0.
        values = {n: int(self.arrays[n]) for n in counters if not n.startswith(_STATES)}
        bounds = {
            "skipped_in_a_row": values.get("skipped"),
            "trial/verdict": 2,
            "trial/delivered": 1,
            "trial/interrupted": 2,
        }
        for name, value in values.items():
            most = bounds.get(name)
            if value < 0 or (most is not None and value > most):
                raise ValueError(
                    f"{owner} must have {name!r} from 0{'' if most is None else f' to {most}'}. "
                    f"Received: {value}. The file is corrupted: load an earlier one."
                )


def _numeric(name: str, value: Any) -> np.ndarray:
    array = np.asarray(value)
    if array.dtype.kind not in "biuf":
        raise ValueError(
            f"{name!r} of a part must be an array of numbers. Received: dtype={array.dtype}"
        )
    return array


def _counter(name: str, array: np.ndarray) -> int:
    if array.shape or array.dtype.kind not in "iu" or int(array) < 0:
        raise ValueError(f"{name!r} of a part must be an integer from 0. Received: {array!r}")
    return int(array)


def _json(array: np.ndarray) -> dict[str, Any]:
    try:
        content = json.loads(array.astype(np.uint8).tobytes().decode())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"'about' of a part must be JSON. Received: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"'about' of a part must be a JSON object. Received: {type(content)}")
    return content


# ------------------------------------------------------------------------------------- messages


def incompatible_message(
    owner: str,
    different: Sequence[str],
    expected: Mapping[str, Entry],
    received: Mapping[str, np.ndarray],
    version: str,
) -> str:
    """Return the message of an `IncompatibleState`.

    Args:
        owner: The snapshot.
        different: Names of arrays that are missing, unexpected, or of another shape.
        expected: The exchange's entries.
        received: One worker's arrays in the snapshot.
        version: `repr` of the version of tf_redsync that saved it.
    """

    def shapes(name: str) -> str:
        wanted = expected[name].shape if name in expected else "nothing"
        actual = received[name].shape if name in received else "nothing"
        return f"{name}: expected {wanted}, received {actual}"

    listed = shortened([shapes(name) for name in different], "; ", "; and")
    apart = any(name.startswith(("optimizer/", "consensus/own/")) for name in received)
    remedy = " With local steps the workers' files differ: load the same one on all workers."
    other = version != repr(__version__)
    return (
        f"{owner} belongs to another model or method"
        + (f", or is of tf_redsync {version} and not {__version__!r}" if other else "")
        + f": {listed}. Use the model, the method and the `bucket_bytes` that were saved"
        + (f" with tf_redsync {version}" if other else "")
        + "."
        + (remedy if apart else "")
    )


def shortened(words: Sequence[str], separator: str = ", ", last: str = " and") -> str:
    """Return the first `_SHOWN` words as text, with the number of the others."""
    more = f"{last} {len(words) - _SHOWN} more" if len(words) > _SHOWN else ""
    return separator.join(words[:_SHOWN]) + more
