"""Branches around collectives. Their predicates must be equal on all workers.

A branch on a per-worker value would deadlock.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tf_redsync.exchange.driver import Network, Outcome
from tf_redsync.exchange.method import State
from tf_redsync.ops.sparse import EitherTotal, SparseTotal

Forms = tuple[tf.Tensor, tf.Tensor, tf.Tensor]  # a total in both forms: dense, indices, values
# Tensors in one input or output of a branch. TensorFlow infers the types of all for each one, so a
# step with groups of 128 takes longer to build than one without groups.
BUNDLED = 16
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


def run_on_host(method: Callable[..., None], inputs: Sequence[Any]) -> tf.Operation | None:
    """Call a bound method with eager tensors when the branch runs; return the op in a graph.

    TensorFlow keeps the function of a `tf.py_function` for the life of the process. This one does
    not keep the method's object, so that a model can be freed; without it the call does nothing.
    """
    reference = weakref.WeakMethod(method)

    def call(*values: tf.Tensor) -> None:
        alive = reference()
        if alive is not None:
            alive(*values)

    return tf.py_function(call, inputs, [])


def compact_cond(
    predicate: tf.Tensor,
    first: Callable[[], tuple[Any, Any]],
    second: Callable[[], tuple[Any, Any]],
) -> tuple[Any, Any]:
    """Return `tf.cond(predicate, first, second)`, with few operations for many tensors.

    `tf.cond` adds three operations for each output, which cost time in each trace and step. Here
    `BUNDLED` tensors are one output, an optional value. They are available at the same time.

    Args:
        predicate: Bool scalar.
        first: Returns two structures, of tensors and of flags, if `predicate` is true. Flags are
            separate outputs, because TensorFlow keeps bool outputs in host memory.
        second: Returns structures of the same dtypes, if `predicate` is false.

    Raises:
        TypeError: If the dtypes differ.
    """
    if tf.executing_eagerly():
        return tf.cond(predicate, first, second)
    structures = []

    def bundled(branch: Callable[[], tuple[Any, Any]]) -> Callable[[], Any]:
        def in_groups() -> Any:
            values, flags = branch()
            tensors = tf.nest.map_structure(tf.convert_to_tensor, values)
            structures.append(tensors)
            return _bundles(tf.nest.flatten(tensors)), flags

        return in_groups

    bundles, flags = tf.cond(predicate, bundled(first), bundled(second))
    pairs = zip(*map(tf.nest.flatten, structures), strict=True)
    tensors = _unbundled(bundles, [_common_spec(*pair) for pair in pairs])
    return tf.nest.pack_sequence_as(structures[0], tensors), flags


def carry(structure: Any) -> Callable[[], Any]:
    """Return a function that returns `structure` inside a branch, with few operations.

    `tf.cond` adds an operation for each tensor that a branch captures. Here the branch captures
    `BUNDLED` tensors as one optional value. They are available at the same time.

    Args:
        structure: Only its tensors of floating types on one requested device are bundled:
            TensorFlow keeps other types in host memory, and optional values as well if no device is
            requested, as in a step without a strategy. A tensor that occurs several times is one
            object inside the branch, too.
    """
    if tf.executing_eagerly():
        return lambda: structure
    leaves = tf.nest.flatten(structure)
    tensors = [x for x in leaves if isinstance(x, tf.Tensor) and x.dtype.is_floating]
    device = tensors[0].device if tensors else ""
    floats = {id(x): x for x in tensors if device and x.device == device}
    with tf.device(device):
        bundles = _bundles(list(floats.values()))

    def carried() -> Any:
        with tf.device(device):
            values = _unbundled(bundles, list(floats.values()))
        inside = dict(zip(floats, values, strict=True))
        return tf.nest.pack_sequence_as(structure, [inside.get(id(x), x) for x in leaves])

    return carried


def _bundles(tensors: list[tf.Tensor]) -> list[tf.Tensor]:
    """Return optional values of `BUNDLED` tensors each."""
    return [tf.raw_ops.OptionalFromValue(components=group) for group in _groups(tensors)]


def _unbundled(bundles: Sequence[tf.Tensor], like: list[Any]) -> list[tf.Tensor]:
    """Return the tensors of `bundles`, which have the dtypes and shapes of `like`."""
    return [
        tensor
        for bundle, group in zip(bundles, _groups(like), strict=True)
        for tensor in tf.raw_ops.OptionalGetValue(
            optional=bundle,
            output_types=[each.dtype for each in group],
            output_shapes=[each.shape for each in group],
        )
    ]


def _common_spec(first: tf.Tensor, second: tf.Tensor) -> tf.TensorSpec:
    """Return the dtype and the shape of a tensor that either branch may return."""
    if first.dtype != second.dtype:  # else a step would fail once it takes the second branch
        raise TypeError(
            "both branches must return the same dtypes. Received: "
            f"{first.dtype.name} and {second.dtype.name}."
        )
    return tf.TensorSpec(first.shape.most_specific_compatible_shape(second.shape), first.dtype)


def _groups(items: list[Any]) -> list[list[Any]]:
    """Cut a list into groups of `BUNDLED`."""
    return [items[i : i + BUNDLED] for i in range(0, len(items), BUNDLED)]


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
    kinds: list[list[int]] = []  # of all totals, by branch
    states: list[list[State]] = []  # by branch and bucket

    def traced(branch: Callable[[], Outcome]) -> Callable[[], Any]:
        return lambda: _as_tensors(branch(), kinds, states)

    branches = traced(first), traced(second)
    if not network.in_branches:  # run both, keep one
        first_tensors, second_tensors = (branch() for branch in branches)
        branches = (lambda: first_tensors), (lambda: second_tensors)
    results, (are_dense, finite, sent) = compact_cond(predicate, *branches)
    is_dense = _dense_flags(predicate, kinds, are_dense)
    joined = [
        ([_total(f, next(is_dense)) for f in totals], _keep_unchanged(state, *old))
        for (totals, state), old in zip(results, zip(*states, strict=True), strict=True)
    ]
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


def _as_tensors(outcome: Outcome, kinds: list[list[int]], states: list[list[State]]) -> Any:
    """Return an outcome as tensors and flags, in the same structure for all forms of totals."""
    kinds.append([_kind(total) for totals, _ in outcome.results for total in totals])
    states.append([state for _, state in outcome.results])
    absent, dense, sparse = tf.zeros([0]), tf.constant(True), tf.constant(False)  # shared by all
    are_dense: list[tf.Tensor] = []

    def forms(total: Any) -> Forms:
        """Return a total in both forms, with empty tensors for a form that it lacks."""
        if isinstance(total, EitherTotal):
            are_dense.append(total.is_dense)
            return total.dense, *total.sparse
        are_dense.append(sparse if isinstance(total, SparseTotal) else dense)
        return (absent, *total) if isinstance(total, SparseTotal) else (total, absent, absent)

    results = [([forms(t) for t in totals], state) for totals, state in outcome.results]
    flags = tf.convert_to_tensor(are_dense, tf.bool)
    return results, (flags, outcome.finite, tf.cast(outcome.bytes_sent, tf.float64))


def _kind(total: Any) -> int:
    if isinstance(total, EitherTotal):
        return id(total.is_dense)
    return COORDINATES if isinstance(total, SparseTotal) else DENSE


def _dense_flags(
    predicate: tf.Tensor, kinds: list[list[int]], are_dense: tf.Tensor
) -> Iterator[bool | tf.Tensor]:
    """Yield for each total whether it is dense, as a bool scalar tensor if the branches differ.

    Totals of equal kinds share a tensor.
    """
    flags: dict[tuple[int, ...], bool | tf.Tensor] = {
        (DENSE, DENSE): True,
        (COORDINATES, COORDINATES): False,
        (DENSE, COORDINATES): predicate,
        (COORDINATES, DENSE): ~predicate,
    }
    for row, pair in enumerate(zip(*kinds, strict=True)):
        if pair not in flags:
            flags[pair] = are_dense[row]
        yield flags[pair]


def _total(forms: Forms, is_dense: bool | tf.Tensor) -> Any:
    """Return a total from its forms; the inverse of `forms` in `_as_tensors`."""
    dense, sparse = forms[0], SparseTotal(*forms[1:])
    if isinstance(is_dense, bool):
        return dense if is_dense else sparse
    return EitherTotal(dense, sparse, is_dense)
