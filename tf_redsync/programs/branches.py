"""Branches around collectives: one of several phases of a step, by what is equal on all workers.

A branch on anything that a single worker knows would deadlock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tf_redsync.exchange.driver import Network, Outcome
from tf_redsync.methods.base import Method
from tf_redsync.ops.sparse import EitherTotal, SparseTotal

Triple = tuple[tf.Tensor, tf.Tensor, tf.Tensor]  # dense, indices, values


def choose(
    predicate: tf.Tensor | None, phase: Callable[[bool], Outcome], network: Network
) -> Outcome:
    """Return `phase(True)` where `predicate`, equal on all workers, holds, else `phase(False)`.

    A total that one phase leaves as coordinates and the other one makes dense comes out as an
    `EitherTotal`.

    Args:
        predicate: Bool scalar; `None`: `phase(False)` always.
        phase: What makes either outcome.
        network: What carries the requests.
    """
    if predicate is None:
        return phase(False)
    if network.in_branches and tf.executing_eagerly():
        return phase(bool(predicate))
    sparse: list[list[list[bool]]] = []  # by branch, bucket and tensor

    def run(first: bool):
        return _as_tensors(phase(first), sparse)

    if network.in_branches:
        results, finite, sent = tf.cond(predicate, lambda: run(True), lambda: run(False))
    else:  # run both, keep one
        kept, dropped = run(True), run(False)
        results, finite, sent = tf.cond(predicate, lambda: kept, lambda: dropped)
    first, second = sparse
    joined = []
    for (totals, state), *flags in zip(results, first, second, strict=True):
        either = [_total(t, a, b, predicate) for t, a, b in zip(totals, *flags, strict=True)]
        joined.append((either, state))
    return Outcome(joined, finite, sent)


def in_turn(
    step: tf.Tensor, ends: Sequence[int], phase: Callable[[int], Outcome], network: Network
) -> Outcome:
    """Return `phase(start)` for the last one of 0 and `ends` that `step` has reached.

    Args:
        step: int64 scalar, equal on all workers.
        ends: Rising step numbers at which one phase ends and the next one starts.
        phase: What makes the outcome of the phase that starts at a step. All of them must leave a
            total in the same form.
        network: What carries the requests.
    """

    def run(start: int, ends: Sequence[int]) -> Outcome:
        if not ends:
            return phase(start)
        end, *later = ends
        return choose(step < end, lambda now: phase(start) if now else run(end, later), network)

    return run(0, ends)


def phase_at(method: Method, step: int) -> str:
    """Return the name of the exchange that a method runs at a step that is not dense."""
    return next((name for until, name in method.cadence.phases if step < until), "exchange")


def _as_tensors(outcome: Outcome, sparse: list[list[list[bool]]]):
    """An outcome of a structure that does not depend on the form of its totals."""
    sparse.append([[isinstance(t, SparseTotal) for t in ts] for ts, _ in outcome.results])
    empty = tf.zeros([0]), tf.zeros([0], tf.int32)
    results = [([_triple(t, *empty) for t in totals], state) for totals, state in outcome.results]
    return results, outcome.finite, tf.cast(outcome.bytes_sent, tf.float64)


def _triple(total: tf.Tensor | SparseTotal, values: tf.Tensor, indices: tf.Tensor) -> Triple:
    """A total in both forms, empty in the other one."""
    if isinstance(total, EitherTotal):
        raise TypeError("the phases of a method must all leave a total in the same form")
    if isinstance(total, SparseTotal):
        return values, total.indices, total.values
    return total, indices, values


def _total(triple: Triple, first: bool, second: bool, predicate: tf.Tensor) -> Any:
    """The total again, from whether it is sparse in either branch."""
    dense, coordinates = triple[0], SparseTotal(*triple[1:])
    if first == second:
        return coordinates if first else dense
    return EitherTotal(dense, coordinates, ~predicate if first else predicate)
