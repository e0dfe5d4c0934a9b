"""Restores the snapshots of one run (`snapshot.py`) on any number of workers.

Every worker brings the snapshots that it has. The workers exchange their ranks as texts, without a
collective, and all make the same decision:

* With as many workers as in the saved run, each with its own snapshot, every worker restores its
  own bits.
* Otherwise each snapshot counts once, even if several workers have it. Arrays of kind "sum" are
  added up and given to the workers in equal shares, all workers get the mean of kind "mean", and
  shared arrays are copied. Arrays cross the network only if the workers have different snapshots.

Snapshots of different saves, of another model or with invalid values raise on all workers. If
snapshots of some ranks are missing, a warning names the ranks and the others are used.
"""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_redsync.auto import Auto, decision
from tf_redsync.auto.bit_budget import BitBudget
from tf_redsync.cluster import agreement
from tf_redsync.network import strategies
from tf_redsync.state.snapshot import (
    LENGTHS,
    Entry,
    IncompatibleState,
    Snapshot,
    auto_decision,
    entries,
    incompatible_message,
    needs_several_workers,
    shortened,
    workers_here,
)
from tf_redsync.step import masks, state_variables
from tf_redsync.step.gradient_exchange import GradientExchange

_TRIAL = "trial/"


def restore(exchange: GradientExchange, load: Callable[[], Sequence[Mapping[str, Any]]]) -> bool:
    """Restore the state; see `SaveableExchange.restore_worker_states`.

    Args:
        exchange: The exchange.
        load: Returns this worker's snapshots. All workers raise its `ValueError`.

    Returns:
        Whether any worker has a snapshot; otherwise the state is unchanged.
    """
    snapshots: list[Snapshot] = []
    exchange.schedule.settle()  # a transfer in the background would overwrite the restored state

    def read() -> dict[str, Any]:
        snapshots.extend(map(Snapshot.of, load()))
        return {"snapshots": [[s.rank, s.fingerprint()] for s in snapshots]}

    brought = [report["snapshots"] for report in _all_reports(exchange, read)]
    if not any(brought):
        return False
    ranks = [{rank for rank, _ in report} for report in brought]
    by_rank = {rank: snapshot for snapshot in snapshots for rank in snapshot.ranks}
    _Restoration(exchange, _common_fingerprint(brought), ranks, by_rank).run()
    return True


def restore_or_warn(
    exchange: GradientExchange, load: Callable[[], Sequence[Mapping[str, Any]]]
) -> None:
    """Restore as `restore` does, or set the initial state.

    For files that also hold weights, which any method can use: a residual belongs to the weights
    that they replace. A state of another model or method only causes a warning.
    """
    try:
        if not restore(exchange, load):
            _start_anew(exchange)
    except IncompatibleState as error:
        _start_anew(exchange)
        exchange.fresh = False
        remedy = "Or load with compile=False and compile again."
        warnings.warn(f"the exchange starts with a new state: {error} {remedy}", stacklevel=2)


def mark_restored(exchange: GradientExchange) -> None:
    """Notify the parts of an exchange that its variables have been restored."""
    exchange.fresh = False
    exchange.schedule.resumed()
    for length in exchange.lengths:
        length.restored(exchange.strategy)
    if masks.any_pruned(exchange):
        exchange.expects_pruning = True


def _start_anew(exchange: GradientExchange) -> None:
    """Set methods' states, except pruning masks, and their counters to the initial values.

    All workers must call it. Before the first step they have these values, so nothing is done.
    """
    if exchange.fresh and not int(exchange.step.numpy()):
        return
    counters, consensus = [exchange.step], exchange.consensus
    if consensus is not None:
        counters += [consensus.steps, consensus.rounds]
    in_scope = tf.distribute.has_strategy()  # a strategy's scope cannot be entered in another one
    with contextlib.nullcontext() if in_scope else exchange.strategy.scope():
        for counter in counters:
            counter.assign(0)
        for bucket, old in zip(exchange.schedule.buckets, exchange.states, strict=True):
            # New variables, because workers may round random initial values differently.
            initial = exchange.schedule.init(bucket)
            new = state_variables.StateVariables(
                *initial, bucket.layout.index, exchange.worker.variable
            )
            for name, group in old.variables_by_name.items():
                if name == masks.NAME:
                    continue
                for pair in zip(group, new.variables_by_name[name], strict=True):
                    copies = (state_variables.copies(v, exchange.strategy) for v in pair)
                    for target, source in zip(*copies, strict=True):
                        target.assign(source)
    exchange.fresh = True


def _common_fingerprint(brought: list[list[Any]]) -> dict[str, Any]:
    """Return the fingerprint of all snapshots.

    Args:
        brought: By process, the ranks and fingerprints of its snapshots.

    Raises:
        ValueError: If the snapshots are of different saves.
    """
    listed = [(p, rank, values) for p, entry in enumerate(brought) for rank, values in entry]
    first = listed[0]
    for entry in listed:
        different = [key for key in first[2] if entry[2][key] != first[2][key]]
        if different:
            descriptions = [
                f"the part of rank {rank} on worker {process} has "
                + ", ".join(f"{key} {values[key]}" for key in different)
                for process, rank, values in (first, entry)
            ]
            raise ValueError(
                f"the parts are not of one save: {'; '.join(descriptions)}. Load the parts that "
                "were written at the same step of the same run."
            )
    return first[2]


def _keep_decision(exchange: GradientExchange, saved: dict[str, Any] | None) -> None:
    """Create the state for the choice of the saved run, unless a step has been traced.

    Args:
        exchange: The exchange, whose state is created again.
        saved: The result of `auto_decision` in that run, the same on all workers.
    """
    policy, current = exchange.policy, auto_decision(exchange)
    if saved is None or current == saved or exchange.called:
        return
    if current is None and not isinstance(policy, BitBudget):
        return  # the user has chosen the methods
    output_layer = policy.output_layer if isinstance(policy, BitBudget) else None
    resolved = decision.saved_decision(saved, output_layer)
    assignments = resolved.assign(exchange.specs)
    momenta = {a.method.traits.momentum_in_exchange for a in assignments}
    considered = policy.considered if isinstance(policy, Auto) else policy.methods
    if not momenta <= {m.traits.momentum_in_exchange for m in considered}:
        return  # the momentum has changed
    local = {
        bool(a.method.sync_schedule.local_steps) for a in (*assignments, *exchange.assignments)
    }
    if len(local) > 1:  # the consensus cannot change here, so the residuals are dropped
        return
    with agreement.agreed(exchange.strategy, "create the state that Auto chose in another run"):
        off = exchange.schedule.off
        with exchange.strategy.scope():
            exchange.create_state(resolved)
        exchange.schedule.off = off


class _Restoration:
    """One restoration, on this worker.

    Args:
        exchange: The exchange.
        save: The common fingerprint of all snapshots.
        brought: For every process, the ranks of the processes whose snapshots it has.
        by_rank: This process's snapshots, by rank of the exchange's worker.
    """

    def __init__(
        self,
        exchange: GradientExchange,
        save: dict[str, Any],
        brought: list[set[int]],
        by_rank: dict[int, Snapshot],
    ):
        self.exchange, self.brought, self.by_rank = exchange, brought, by_rank
        self.workers, self.rows = save["workers"], save["rows"]
        self.rank = strategies.process_rank(exchange.strategy)
        self.any_own = next(iter(by_rank.values()), None)  # shared arrays are equal in all of them
        self.first = min(p for p, ranks in enumerate(brought) if ranks)
        local_workers = workers_here(exchange)
        needed = [range(p * local_workers, (p + 1) * local_workers) for p in range(len(brought))]
        held = [{r for p in b for r in range(p * self.rows, (p + 1) * self.rows)} for b in brought]
        self.own = needed[self.rank]
        self.same_workers = self.workers == exchange.workers
        self.exact = self.same_workers and all(
            h.issuperset(n) for h, n in zip(held, needed, strict=True)
        )
        self.alike = all(h == held[0] for h in held)
        # For each saved worker that is present, the process that contributes its arrays.
        self.contributors = {
            r: min(p for p, h in enumerate(held) if r in h) for r in sorted(set().union(*held))
        }

    def run(self) -> None:
        """Check the snapshots and assign their arrays."""
        exchange = self.exchange
        saved, apart = self._ask_first_owner(lambda s: [s.about.get("decision"), s.apart])
        _keep_decision(exchange, saved if self.workers > 1 else None)
        expected = {e.name: e for e in entries(exchange, apart)}
        if apart and exchange.consensus is None:
            expected |= self._weights()
        names, dropped = self._ask_first_owner(lambda snapshot: self._check(snapshot, expected))
        self._warn(dropped)
        assigned = set(names) & {"step", "skipped", *LENGTHS} if dropped else set(names)
        if not assigned.issuperset(expected):
            _start_anew(exchange)
        for entry in [entry for name, entry in expected.items() if name in assigned]:
            self._assign(entry)
        mark_restored(exchange)

    def _ask_first_owner(self, answer: Callable[[Snapshot], Any]) -> Any:
        """Return the first snapshot owner's `answer`; an error in it raises on all workers."""

        def report() -> dict[str, Any]:
            answers = [answer(snapshot) for snapshot in self.by_rank.values()]
            return {"answer": answers[0] if answers and self.rank == self.first else None}

        return _all_reports(self.exchange, report)[self.first]["answer"]

    def _weights(self) -> dict[str, Entry]:
        """Return entries of the model's weights, for one worker that replaces several."""
        local = self.exchange.strategy.experimental_local_results
        names = [f"consensus/own/{i}" for i in range(len(self.exchange.weights()))]
        pairs = zip(names, self.exchange.weights(), strict=True)
        return {name: Entry(name, "mean", local(v)) for name, v in pairs}

    # ---------------------------------------------------------------------------------- checks

    def _check(self, snapshot: Snapshot, expected: Mapping[str, Entry]) -> tuple[list[str], bool]:
        """Check a snapshot.

        Returns:
            The names of its arrays; and whether only its counters can be used, because `Auto` chose
            other methods.

        Raises:
            ValueError: If the snapshot belongs to another model or method, or has invalid values.
        """
        owner = f"the part of rank {snapshot.rank}, saved at step {snapshot.step},"
        arrays = {name: snapshot.row(name, snapshot.ranks.start) for name in snapshot.arrays}
        different = sorted((set(arrays) ^ set(expected)) - set(LENGTHS))
        if not self.same_workers:
            different = [name for name in different if not needs_several_workers(name)]
        common = [name for name in expected if name in arrays]
        different += [name for name in common if arrays[name].shape != expected[name].shape]
        dropped = bool(different) and auto_decision(self.exchange) is not None
        if different and not dropped:
            version = f"{snapshot.about.get('version')!r:.20}"
            raise IncompatibleState(
                incompatible_message(owner, different, expected, arrays, version)
            )
        if not dropped:
            for name in common:
                for rank in snapshot.ranks:
                    expected[name].check(owner, snapshot.row(name, rank))
        snapshot.check_counters(owner)
        return list(arrays), dropped

    def _warn(self, dropped: bool) -> None:
        """Warn on the chief about state that is lost."""
        missing = sorted(set(range(self.workers // self.rows)) - set().union(*self.brought))
        if self.rank > 0:
            return
        if dropped:
            warnings.warn(
                f"{type(self.exchange.policy).__name__} has chosen other methods than in the saved "
                "run, so the saved residuals (undelivered gradients) are dropped.",
                stacklevel=2,
            )
        elif missing and self.exchange.workers > 1:  # a single worker usually only evaluates
            warnings.warn(
                f"the exchange's state was saved by {self.workers} workers, and the parts of ranks "
                f"{shortened([str(rank) for rank in missing])} are missing: their undelivered "
                "gradients are lost, and the other parts are used. To keep all of it, let every "
                "worker save to its own path and load from it; see docs/saving.md.",
                stacklevel=2,
            )
        elif not missing and self.workers > self.exchange.workers == 1 and self._needs_rounds():
            warnings.warn(
                "a single worker has no rounds, so the outer optimizer's state and the number of "
                "rounds are dropped. When workers join later, its momentum is zero, and its "
                "schedule, stages and a dense warm-up begin again. Keep at least two workers, as "
                "with `--nodes 2:4`.",
                stacklevel=2,
            )

    def _needs_rounds(self) -> bool:
        """Return whether a method has an outer optimizer, or changes after some rounds."""
        schedules = [bucket.method.sync_schedule for bucket in self.exchange.schedule.buckets]
        return any(s.local_steps and (s.outer or s.changes or s.warm_up_steps) for s in schedules)

    # ------------------------------------------------------------------------------ assignment

    def _assign(self, entry: Entry) -> None:
        copies = len(entry.copies)
        if not self.exact and (entry.kind == "own" or entry.name.startswith(_TRIAL)):
            return  # keeps the value of this run
        if entry.kind == "shared":
            entry.assign([self._shared(entry)] * copies)
        elif self.exact:
            entry.assign([self.by_rank[rank].row(entry.name, rank) for rank in self.own])
        else:
            entry.assign([self._share(entry)] * copies)

    def _shared(self, entry: Entry) -> np.ndarray:
        """Return an array that is equal on all workers."""
        any_own = self.any_own
        local = None if any_own is None else any_own.row(entry.name, any_own.ranks.start)
        if local is not None and all(self.brought):
            return local
        sent = local if local is not None and self.rank == self.first else None
        data = (np.zeros(entry.shape, entry.dtype) if sent is None else sent).tobytes()
        # One worker sends its bits and the others zeros, so the integer sum is exact.
        words = np.frombuffer(data + b"\0" * (-len(data) % 4), np.int32)
        received = self._summed(words).tobytes()[: len(data)]
        return np.frombuffer(received, entry.dtype).reshape(entry.shape)

    def _share(self, entry: Entry) -> np.ndarray:
        """Return this worker's share of an array of kind "sum", or the mean of kind "mean"."""
        total = np.zeros(entry.shape, np.float64)
        for rank, process in self.contributors.items():
            if self.alike or process == self.rank:
                total += entry.numbers(self.by_rank[rank].row(entry.name, rank))
        if not self.alike:
            dtype = entry.copies[0].dtype.as_numpy_dtype
            total = self._summed(total.astype(np.promote_types(dtype, np.float32)))
        divisor = self.exchange.workers if entry.kind == "sum" else len(self.contributors)
        return (total / divisor).astype(entry.copies[0].dtype.as_numpy_dtype)

    def _summed(self, array: np.ndarray) -> np.ndarray:
        exchange = self.exchange
        return strategies.sum_over_processes(exchange.strategy, exchange.network, array)


def _all_reports(
    exchange: GradientExchange, report: Callable[[], dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return the reports of all workers.

    Raises:
        ValueError: On all workers, if `report` raises on any of them.
    """
    try:
        own_report = report()
    except (ValueError, OSError, KeyError) as error:
        own_report = {"error": str(error), "incompatible": isinstance(error, IncompatibleState)}
    action = f"restore the exchange's state at step {int(exchange.step.numpy())}"
    texts = agreement.gather_texts(exchange.strategy, action, json.dumps(own_report))
    reports = [json.loads(text) for text in texts]
    for rank, entry in enumerate(reports):
        if "error" in entry:
            kind = IncompatibleState if entry["incompatible"] else ValueError
            raise kind(
                entry["error"] if len(reports) == 1 else f"on worker {rank}, {entry['error']}"
            )
    return reports
