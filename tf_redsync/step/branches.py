"""Branches around collectives. Their predicates must be equal on all workers.

A branch on a per-worker value would deadlock.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tf_redsync.exchange.driver import Network, Outcome
from tf_redsync.exchange.method import State
from tf_redsync.ops.sparse import EitherTotal, SparseTotal

# A total in both forms: dense, indices, values, and a bool: whether the dense tensor is valid.
Forms = tuple[tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor]
DENSE, COORDINATES = -1, -2  # the kind of a total; for an `EitherTotal` the id of its predicate


def rarely(predicate: tf.Tensor, branch: Callable[[], Any], otherwise: Callable[[], Any]) -> Any:
    """Return `branch()` if `predicate` holds, which is rare, else `otherwise()`.

    TensorFlow also visits each operation of a branch that is not taken. `branch` therefore becomes
    a function that is not inlined, which counts as one operation.

    Args:
        predicate: Bool scalar, equal on all workers if `branch` has collectives.
        branch: Should capture only variables, and tensors that are available when the step begins:
            a function call waits for all of its captures.
        otherwise: Returns tensors of the same dtypes.
    """
    if not tf.executing_eagerly():
        apart = {"_noinline": True}
        branch = tf.function(branch, autograph=False, experimental_attributes=apart)
    return tf.cond(predicate, branch, otherwise)


def choose(
    predicate: tf.Tensor,
    first: Callable[[], Outcome],
    second: Callable[[], Outcome],
    network: Network,
) -> Outcome:
    """Return `first()` if `predicate` holds, else `second()`.

    A total that is dense in one branch and sparse in the other is returned as an `EitherTotal`.
    State tensors that neither branch changes are returned as the same objects.

    Args:
        predicate: Bool scalar, equal on all workers.
        first: Runs the exchange if `predicate` is true.
        second: Runs the exchange if it is false.
        network: The network that answers the requests.
    """
    if network.in_branches and tf.executing_eagerly():
        return first() if bool(predicate) else second()
    known = tf.get_static_value(predicate)
    if known is not None:
        return first() if known else second()
    kinds: list[list[list[int]]] = []  # by branch, bucket and tensor
    states: list[list[State]] = []  # by branch and bucket

    def traced(branch: Callable[[], Outcome]) -> Callable[[], Any]:
        return lambda: _as_tensors(branch(), kinds, states)

    if network.in_branches:
        results, finite, sent = tf.cond(predicate, traced(first), traced(second))
    else:  # run both, keep one
        first_tensors, second_tensors = traced(first)(), traced(second)()
        results, finite, sent = tf.cond(predicate, lambda: first_tensors, lambda: second_tensors)
    in_first, in_second = kinds
    flags: dict[tuple[int, int], tf.Tensor] = {  # totals of equal kinds share a predicate
        (DENSE, COORDINATES): predicate,
        (COORDINATES, DENSE): ~predicate,
    }
    joined = []
    for (totals, state), old, *branches in zip(
        results, zip(*states, strict=True), in_first, in_second, strict=True
    ):
        either = [_total(t, (a, b), flags) for t, a, b in zip(totals, *branches, strict=True)]
        joined.append((either, _keep_unchanged(state, *old)))
    return Outcome(joined, finite, sent)


def _keep_unchanged(state: State, first: State, second: State) -> State:
    """Return the state with the original tensors where both branches return the same object."""
    return {
        name: [
            a if a is b else value
            for value, a, b in zip(values, first[name], second[name], strict=True)
        ]
        for name, values in state.items()
    }


def _as_tensors(outcome: Outcome, kinds: list[list[list[int]]], states: list[list[State]]) -> Any:
    """Return an outcome as tensors in the same structure for all forms of totals."""
    kinds.append([[_kind(t) for t in totals] for totals, _ in outcome.results])
    states.append([state for _, state in outcome.results])
    absent, dense, sparse = tf.zeros([0]), tf.constant(True), tf.constant(False)  # shared by all

    def forms(total: Any) -> Forms:
        """Return a total in both forms, with empty tensors for a form that it lacks."""
        if isinstance(total, EitherTotal):
            return total.dense, *total.coordinates, total.is_dense
        if isinstance(total, SparseTotal):
            return absent, total.indices, total.values, sparse
        return total, absent, absent, dense

    results = [([forms(t) for t in totals], state) for totals, state in outcome.results]
    return results, outcome.finite, tf.cast(outcome.bytes_sent, tf.float64)


def _kind(total: Any) -> int:
    if isinstance(total, EitherTotal):
        return id(total.is_dense)
    return COORDINATES if isinstance(total, SparseTotal) else DENSE


def _total(forms: Forms, kinds: tuple[int, int], flags: dict[tuple[int, int], tf.Tensor]) -> Any:
    """Rebuild a total from its kinds in the two branches; the inverse of `forms`."""
    dense, coordinates = forms[0], SparseTotal(*forms[1:3])
    if kinds == (DENSE, DENSE):
        return dense
    if kinds == (COORDINATES, COORDINATES):
        return coordinates
    return EitherTotal(dense, coordinates, flags.setdefault(kinds, forms[3]))
