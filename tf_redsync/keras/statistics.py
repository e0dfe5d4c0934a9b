"""Detection of moving statistics, and of the steps that assign them.

In Keras 3 every replica updates BatchNormalization's moving statistics locally. The strategy
averages the statistics that a step has assigned. It searches a graph and its called functions for
assignments; in eager steps the variables record them. Statistics of both Keras libraries are
restored after steps that are skipped or make them non-finite.

Private name of TensorFlow used here: `_strided_slice_assign` of a variable.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from types import FrameType
from typing import Any

import keras
import tensorflow as tf

from tf_redsync.ops.wire import all_finite

_SCATTERS = ("update", "add", "sub", "mul", "div", "min", "max")
_ASSIGNMENTS = (
    *("AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp"),
    "ResourceStridedSliceAssign",
    *(f"ResourceScatter{name.title()}" for name in _SCATTERS),
)
_METHODS = (
    *("assign", "assign_add", "assign_sub", "_strided_slice_assign"),
    *(f"scatter_{name}" for name in _SCATTERS),
)
_OF_ROWS = "tf_redsync_of_rows"  # marks a variable whose rows are those of a worker's batches
_IN_ROUNDS = "tf_redsync_in_rounds"  # marks a variable that some step averages only if it is due
_BEFORE = "statistics_before_step"  # scope of the names of operations
_KEPT = "tf_redsync_statistics"  # attribute of a graph that reads them
_BRANCHES = ("If", "StatelessIf", "Case", "StatelessCase")  # their first input is the index


def updating_layer(variable: Any, kwargs: dict[str, Any]) -> Any:
    """Return the layer or loss that updates a variable locally on each replica, or `None`.

    Args:
        variable: A variable that the caller has just created.
        kwargs: Keyword arguments with which it was created.
    """
    averaged_by_others = (
        tf.VariableSynchronization.ON_READ,
        tf.VariableAggregation.MEAN,
    ) == (getattr(variable, "synchronization", None), getattr(variable, "aggregation", None))
    candidate = (
        kwargs.get("trainable") is False
        and isinstance(variable, tf.distribute.DistributedValues)
        and variable.dtype.is_floating
        and (averaged_by_others or needs_averaging(variable))
    )
    return _creator() if candidate else None


def mark_state_of_rows(variable: Any, layer: Any) -> None:
    """Mark the state of a recurrent layer, which belongs to the rows of a worker's batches."""
    if any(kind.__name__ == "RNN" for kind in type(layer).__mro__):  # of either library
        setattr(variable, _OF_ROWS, True)


def needs_averaging(variable: Any) -> bool:
    """Return whether a statistic's copies differ unless the strategy averages them.

    TensorFlow averages statistics of tf_keras when they are read outside of a replica.
    """
    return (
        variable.aggregation == tf.VariableAggregation.NONE
        and variable.synchronization != tf.VariableSynchronization.ON_READ
        and not hasattr(variable, _OF_ROWS)
    )


def mark_averaged_in_rounds(variables: Iterable[Any]) -> None:
    """Mark statistics that may differ between workers after a step, until the round ends."""
    for variable in variables:
        setattr(variable, _IN_ROUNDS, True)


def is_shared(variable: Any) -> bool:
    """Return whether a statistic is equal on all workers after each step."""
    return needs_averaging(variable) and not hasattr(variable, _IN_ROUNDS)


def _creator() -> Any:
    """Return the layer or loss that is creating a variable; `None` for an optimizer or metric.

    TensorFlow cannot distinguish an optimizer's slots, which are equal on all workers.
    """
    others, layers = _owners("tf_keras" in sys.modules)
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, others):
            return None
        if isinstance(owner, layers):
            return owner
        frame = frame.f_back
    return None


@functools.cache
def _owners(with_tf_keras: bool) -> tuple[tuple[type, ...], tuple[type, ...]]:
    """Return two tuples of classes: optimizers and metrics, and those whose states are averaged."""
    others: tuple[type, ...] = (keras.optimizers.Optimizer, keras.metrics.Metric)
    layers: tuple[type, ...] = (keras.Layer, keras.losses.Loss)
    if with_tf_keras:
        import tf_keras

        optimizers = tf_keras.optimizers
        others += (optimizers.Optimizer, optimizers.legacy.Optimizer, tf_keras.metrics.Metric)
        layers += (tf_keras.layers.Layer, tf_keras.losses.Loss)
    return others, layers


# A network may have a hundred statistics. A step packs statistics of the same kind into one vector,
# since checking, averaging and restoring a vector needs few operations. Each operation of a graph
# prolongs its start.


def groups(variables: Sequence[Any]) -> list[list[Any]]:
    """Return statistics grouped by dtype and by whether the strategy averages them."""
    by_kind: dict[tuple[tf.DType, bool], list[Any]] = {}
    for variable in variables:
        by_kind.setdefault((variable.dtype, needs_averaging(variable)), []).append(variable)
    return list(by_kind.values())


def pack(values: Iterable[Any]) -> tf.Tensor:
    """Return tensors or variables of one dtype, flattened and concatenated into a vector."""
    tensors = map(tf.convert_to_tensor, values)
    return tf.concat([t if t.shape.rank == 1 else tf.reshape(t, [-1]) for t in tensors], axis=0)


def assign(variables: Sequence[Any], packed: tf.Tensor) -> None:
    """Set statistics to the parts of a vector from `pack`, in a replica context."""
    parts = tf.split(packed, [v.shape.num_elements() for v in variables])
    for variable, part in zip(variables, parts, strict=True):
        value = part if variable.shape.rank == 1 else tf.reshape(part, variable.shape)
        variable.assign(value, read_value=False)


class Before:
    """Snapshot of statistics before a step, in a replica context.

    Args:
        variables: The statistics.
    """

    def __init__(self, variables: Iterable[Any]):
        variables = list(variables)
        self._graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        if self._graph is not None:  # it may be called in another graph as long as they exist
            kept = getattr(self._graph, _KEPT, ())
            setattr(self._graph, _KEPT, (*kept, *variables))
        with tf.name_scope(_BEFORE):
            self._values = {id(v): tf.convert_to_tensor(v) for v in variables}

    def add(self, variable: Any) -> None:
        """Add a statistic that the step has just created and not yet assigned.

        A layer without an input shape is built in its first step, outside of the step's graph.
        """
        with contextlib.nullcontext() if self._graph is None else self._graph.as_default():
            self._values[id(variable)] = tf.convert_to_tensor(variable)

    def restored_if(self, variables: Sequence[Any], skipped: tf.Tensor) -> tf.Tensor:
        """Return a packed group of statistics, with the values before the step if restored.

        Statistics are restored after a skipped step, and if any of the group is non-finite: later
        batches cannot repair a non-finite moving average.

        Args:
            variables: A group of `groups`.
            skipped: Bool scalar: whether the step is skipped.
        """
        before, now = pack(self._values[id(v)] for v in variables), pack(variables)
        return tf.where(skipped | ~all_finite([now]), before, now)


class EagerAssignments:
    """Recorder of the variables that eager steps assign.

    The assignments follow from the program, so workers with the same program agree.
    """

    def __init__(self) -> None:
        self._replica = threading.local()  # each replica's step has its own thread
        # Assigned in functions that eager steps call; these run Python code only while traced.
        # They are kept: what later eager steps average must not depend on garbage collection.
        self._in_functions: dict[int, Any] = {}

    def watch(self, variable: Any) -> None:
        """Make a variable report assignments to its copies, which a slice assigns directly."""
        for copy, name in itertools.product(variable.values, _METHODS):
            setattr(copy, name, self._reporting(variable, getattr(copy, name)))

    def _reporting(self, variable: Any, assign: Any) -> Any:
        @functools.wraps(assign)
        def report_and_assign(*args: Any, **kwargs: Any) -> Any:
            noted = getattr(self._replica, "noted", None)
            if noted is not None:
                noted_in = noted if tf.executing_eagerly() else self._in_functions
                noted_in[id(variable)] = variable
            return assign(*args, **kwargs)

        return report_and_assign

    def start(self) -> None:
        """Begin an eager step of a replica."""
        self._replica.noted = {}

    def end(self, variables: Iterable[Any]) -> list[Any]:
        """End the step; return the variables that it may have assigned."""
        noted = self._replica.noted | self._in_functions
        self._replica.noted = None
        return [v for v in variables if id(v) in noted]


def used_and_assigned(
    variables: Sequence[Any], graph: Any, first_operation: int
) -> tuple[list[Any], list[Any]]:
    """Return the variables that a graph uses and those that it assigns, also in called functions.

    Args:
        variables: Distributed variables.
        graph: The graph.
        first_operation: Index of the first operation that counts.
    """
    operations = graph.get_operations()[first_operation:]
    # Another replica's step may begin in between.
    operations = [op for op in operations if _BEFORE not in op.name]
    captures = {id(outer): inner.name for outer, inner in getattr(graph, "captures", [])}
    handles: dict[str, Any] = {}
    for variable in variables:
        # Handles of all replicas in this process, so that each replica finds the same variables.
        copies = variable.values if hasattr(variable, "values") else [variable]
        for copy in copies:
            name = captures.get(id(copy.handle), getattr(copy.handle, "name", None))
            if name is not None:
                handles[name] = variable
    inputs = {t.name for op in operations for t in op.inputs if t.dtype == tf.resource}
    used = {id(handles[name]) for name in inputs & handles.keys()}
    targets = {id(handles[name]) for name in _targets(operations, handles, graph)}
    return [v for v in variables if id(v) in used], [v for v in variables if id(v) in targets]


def _targets(operations: Sequence[Any], handles: dict[str, Any], graph: Any) -> Iterator[str]:
    """Yield the names of the handles that operations assign to."""
    functions: dict[str, Any] = {}
    for op in operations:
        if op.type in _ASSIGNMENTS:
            if op.inputs[0].name in handles:
                yield op.inputs[0].name
            continue
        called = None
        for i, tensor in enumerate(op.inputs):
            if tensor.dtype != tf.resource or tensor.name not in handles:
                continue
            called = list(_called(op.node_def)) if called is None else called
            if called and not functions:
                library = graph.as_graph_def().library.function
                functions = {f.signature.name: f for f in library}
            at = i - (op.type in _BRANCHES)
            if any(_assigns(functions, name, at) for name in called):
                yield tensor.name


def _called(node: Any) -> Iterator[str]:
    """Yield the names of the functions that an operation calls."""
    for value in node.attr.values():
        if value.func.name:
            yield value.func.name
        yield from (function.name for function in value.list.func)


def _assigns(functions: dict[str, Any], name: str, argument: int) -> bool:
    """Return whether a function of a graph's library assigns to one of its arguments."""
    function = functions.get(name)
    if function is None or argument >= len(function.signature.input_arg):
        return False
    handle = function.signature.input_arg[argument].name
    for node in function.node_def:
        for i, text in enumerate(node.input):
            if text != handle:
                continue
            if node.op in _ASSIGNMENTS and i == 0:
                return True
            at = i - (node.op in _BRANCHES)
            if any(_assigns(functions, called, at) for called in _called(node)):
                return True
    return False
