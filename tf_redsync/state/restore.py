"""Parts of a save (`worker_state.py`) become the state of a run again, on any number of workers.

Every worker brings the parts that it has. They tell each other which these are, without a
collective, and all decide alike:

* if there are as many workers as then, and each has its own part: it takes it, bit by bit;
* otherwise each part counts once, whoever has brought it. What has the kind "sum" is added up and
  given to the workers in equal shares, of the kind "mean" all get the mean, and what all share is
  taken over. Arrays cross the network only if not every worker has brought the same parts.

Parts of two saves, of another model, or with numbers that cannot be are refused on all workers, by
a text that names them. If the parts of some ranks are missing, the others are used, with a warning.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_redsync.cluster import agreement
from tf_redsync.network import collectives
from tf_redsync.state import snapshot_checks
from tf_redsync.state.capture import (
    LENGTHS,
    Entry,
    entries,
    of_a_program,
    rows_here,
)
from tf_redsync.state.snapshot import Part

_TRIAL = "trial/"


def restore(exchange: Any, found: Callable[[], Sequence[Mapping[str, Any]]]) -> bool:
    """Set the state; see `GradientExchange.restore_worker_states`.

    Args:
        exchange: The exchange.
        found: Returns this worker's parts, or raises a `ValueError`, which all workers raise then.

    Returns:
        Whether any worker has brought a part; the state is as it was if not.
    """
    parts: list[Part] = []

    def read() -> dict[str, Any]:
        parts.extend(Part.of(part) for part in found())
        return {"parts": [[p.rank, p.save()] for p in parts]}

    brought = [report["parts"] for report in _told(exchange, read)]
    if not any(brought):
        return False
    ranks = [{rank for rank, _ in report} for report in brought]
    by_rank = {rank: part for part in parts for rank in part.ranks}
    _Restoration(exchange, snapshot_checks.one_save(brought), ranks, by_rank).run()
    return True


def restore_or_warn(exchange: Any, found: Callable[[], Sequence[Mapping[str, Any]]]) -> None:
    """As `restore`, from a file that has weights too, which are good for any method."""
    try:
        restore(exchange, found)
    except snapshot_checks.AnotherState as error:
        exchange.fresh = False
        warnings.warn(f"the exchange begins anew: {error}", stacklevel=2)


class _Restoration:
    """One restoration, on this worker.

    Args:
        exchange: The exchange.
        save: What is equal in all parts.
        brought: For every process of now, the ranks of the processes whose parts it has.
        by_rank: This process's parts, by the exchange's worker.
    """

    def __init__(
        self,
        exchange: Any,
        save: dict[str, Any],
        brought: list[set[int]],
        by_rank: dict[int, Part],
    ):
        self.exchange, self.brought, self.by_rank = exchange, brought, by_rank
        self.workers, self.rows = save["workers"], save["rows"]
        self.rank = collectives.worker_rank(exchange.strategy)
        self.part = next(iter(by_rank.values()), None)  # what all share is in any of them
        self.first = min(p for p, ranks in enumerate(brought) if ranks)
        here = rows_here(exchange)
        needed = [range(p * here, (p + 1) * here) for p in range(len(brought))]
        held = [{r for p in b for r in range(p * self.rows, (p + 1) * self.rows)} for b in brought]
        self.own = needed[self.rank]
        self.as_many = self.workers == exchange.workers
        self.exact = self.as_many and all(
            h.issuperset(n) for h, n in zip(held, needed, strict=True)
        )
        self.alike = all(h == held[0] for h in held)
        # The save's workers that are there, and the process that answers for each.
        self.answers = {
            r: min(p for p, h in enumerate(held) if r in h) for r in sorted(set().union(*held))
        }

    def run(self) -> None:
        """Check, and assign."""
        exchange = self.exchange
        decision, apart = self._from_the_first(lambda p: [p.about.get("decision"), p.apart])
        exchange.keep_decision(decision if self.workers > 1 else None)
        expected = {e.name: e for e in entries(exchange, apart)}
        if apart and exchange.consensus is None:
            expected |= self._weights()
        names, dropped = self._from_the_first(lambda part: self._check(part, expected))
        self._warn(dropped)
        kept = set(names) & {"step", "skipped", *LENGTHS} if dropped else set(names)
        for entry in [entry for name, entry in expected.items() if name in kept]:
            self._assign(entry)
        exchange.restored()

    def _from_the_first(self, answer: Callable[[Part], Any]) -> Any:
        """Return what the first worker with a part answers; all check, and all learn of errors."""

        def report() -> dict[str, Any]:
            found = [answer(part) for part in self.by_rank.values()]
            return {"answer": found[0] if found and self.rank == self.first else None}

        return _told(self.exchange, report)[self.first]["answer"]

    def _weights(self) -> dict[str, Entry]:
        """The model's weights, where each worker had its own and now there is one worker."""
        local = self.exchange.strategy.experimental_local_results
        names = [f"consensus/own/{i}" for i in range(len(self.exchange.weights()))]
        pairs = zip(names, self.exchange.weights(), strict=True)
        return {name: Entry(name, "mean", local(v)) for name, v in pairs}

    # ---------------------------------------------------------------------------------- checks

    def _check(self, part: Part, expected: Mapping[str, Entry]) -> tuple[list[str], bool]:
        """Check a part; return the names in it, and whether it is of another form, to be dropped.

        Raises:
            ValueError: for what cannot be.
        """
        who = f"the part of rank {part.rank}, saved at step {part.step},"
        one = {name: part.row(name, part.ranks.start) for name in part.arrays}
        different = sorted((set(one) ^ set(expected)) - set(LENGTHS))
        if not self.as_many:
            different = [name for name in different if not of_a_program(name)]
        common = [name for name in expected if name in one]
        different += [name for name in common if one[name].shape != expected[name].shape]
        dropped = bool(different) and snapshot_checks.may_be_dropped(self.exchange)
        if different and not dropped:
            raise snapshot_checks.AnotherState(
                snapshot_checks.another(who, different, expected, one)
            )
        if not dropped:
            for name in common:
                for rank in part.ranks:
                    snapshot_checks.check_array(who, name, part.row(name, rank), expected[name])
        snapshot_checks.check_counters(who, part, self.exchange)
        return list(one), dropped

    def _warn(self, dropped: bool) -> None:
        """Say, on one worker, what is lost."""
        missing = sorted(set(range(self.workers // self.rows)) - set().union(*self.brought))
        if self.rank > 0:
            return
        if dropped:
            exchange = self.exchange
            chosen = exchange.resolved is not exchange.policy
            reason = f"{type(exchange.policy).__name__} has chosen other methods than in"
            warnings.warn(
                f"{reason if chosen else 'the state has another form than that of'} the run that "
                "was saved, so the saved residuals (what was not delivered yet) are dropped.",
                stacklevel=2,
            )
        elif missing and self.exchange.workers > 1:  # one alone has come to evaluate, mostly
            warnings.warn(snapshot_checks.missing_parts(missing, self.workers), stacklevel=2)

    # ------------------------------------------------------------------------------ assignment

    def _assign(self, entry: Entry) -> None:
        copies = len(entry.copies)
        if not self.exact and (entry.kind == "own" or entry.name.startswith(_TRIAL)):
            return  # it goes on with what the program begins with
        if entry.kind == "shared":
            entry.assign([self._shared(entry)] * copies)
        elif self.exact:
            entry.assign([self.by_rank[rank].row(entry.name, rank) for rank in self.own])
        else:
            entry.assign([self._share(entry)] * copies)

    def _shared(self, entry: Entry) -> np.ndarray:
        """What all workers have under a name."""
        own = None if self.part is None else self.part.row(entry.name, self.part.ranks.start)
        if own is not None and all(self.brought):
            return own
        sent = own if own is not None and self.rank == self.first else None
        data = (np.zeros(entry.shape, entry.dtype) if sent is None else sent).tobytes()
        words = np.frombuffer(data + b"\0" * (-len(data) % 4), np.int32)  # plus zeros: exact
        received = _added_up(self.exchange, words).tobytes()[: len(data)]
        return np.frombuffer(received, entry.dtype).reshape(entry.shape)

    def _share(self, entry: Entry) -> np.ndarray:
        """This worker's share of a sum, or the mean."""
        total = np.zeros(entry.shape, np.float64)
        for rank, process in self.answers.items():
            if self.alike or process == self.rank:
                total += entry.numbers(self.by_rank[rank].row(entry.name, rank))
        if not self.alike:
            total = _added_up(self.exchange, total.astype(np.float32))
        parts = self.exchange.workers if entry.kind == "sum" else len(self.answers)
        return (total / parts).astype(entry.copies[0].dtype.as_numpy_dtype)


def _told(exchange: Any, report: Callable[[], dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what all workers report; an error of one of them is one of all.

    Raises:
        ValueError: on all workers, where one had something to object to.
    """
    try:
        own = report()
    except (ValueError, OSError, KeyError) as error:
        own = {"error": str(error), "another": isinstance(error, snapshot_checks.AnotherState)}
    what = f"restore the exchange's state at step {int(exchange.step.numpy())}"
    texts = agreement.gather_texts(exchange.strategy, what, json.dumps(own))
    reports = [json.loads(text) for text in texts]
    for rank, found in enumerate(reports):
        if "error" in found:
            kind = snapshot_checks.AnotherState if found["another"] else ValueError
            raise kind(
                found["error"] if len(reports) == 1 else f"on worker {rank}, {found['error']}"
            )
    return reports


def _added_up(exchange: Any, array: np.ndarray) -> np.ndarray:
    """Return the sum over the processes of an array of each, in a collective of all of them."""
    strategy, network = exchange.strategy, exchange.network
    if collectives.worker_count(strategy) == 1:
        return array
    if network.in_branches:
        return network.all_reduce([tf.constant(array)])[0].numpy()
    replicas = collectives.local_replicas(strategy)

    @tf.autograph.experimental.do_not_convert
    def on_replica(own: tf.Tensor) -> tf.Tensor:
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        first = tf.equal(tf.convert_to_tensor(replica, tf.int32) % replicas, 0)
        return network.all_reduce([tf.where(first, own, tf.zeros_like(own))])[0]

    run = tf.function(lambda own: strategy.run(on_replica, (own,)), autograph=False)
    return strategy.experimental_local_results(run(tf.constant(array)))[0].numpy()
