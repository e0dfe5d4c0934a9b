"""Branches around collectives: one of several phases of a step, by what is equal on all workers.

A branch on anything that a single worker knows would deadlock.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tf_redsync.exchange.driver import Network, Outcome
from tf_redsync.ops.sparse import EitherTotal, SparseTotal

Triple = tuple[tf.Tensor, tf.Tensor, tf.Tensor]  # dense, indices, values


def choose(
    predicate: tf.Tensor,
    first: Callable[[], Outcome],
    second: Callable[[], Outcome],
    network: Network,
) -> Outcome:
    """Return `first()` where `predicate`, equal on all workers, holds, else `second()`.

    A total that one of them leaves as coordinates and the other one makes dense comes out as an
    `EitherTotal`.

    Args:
        predicate: Bool scalar.
        first: What makes one outcome.
        second: What makes the other one.
        network: What carries the requests.
    """
    if network.in_branches and tf.executing_eagerly():
        return first() if bool(predicate) else second()
    sparse: list[list[list[bool]]] = []  # by branch, bucket and tensor

    def of(branch: Callable[[], Outcome]) -> Callable[[], Any]:
        return lambda: _as_tensors(branch(), sparse)

    if network.in_branches:
        results, finite, sent = tf.cond(predicate, of(first), of(second))
    else:  # run both, keep one
        kept, dropped = of(first)(), of(second)()
        results, finite, sent = tf.cond(predicate, lambda: kept, lambda: dropped)
    in_first, in_second = sparse
    joined = []
    for (totals, state), *flags in zip(results, in_first, in_second, strict=True):
        either = [_total(t, a, b, predicate) for t, a, b in zip(totals, *flags, strict=True)]
        joined.append((either, state))
    return Outcome(joined, finite, sent)


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
