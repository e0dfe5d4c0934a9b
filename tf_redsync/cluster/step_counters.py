"""Counters of this worker's progress within its steps, which the watchdog reports.

Each counter is a separate variable, because TensorFlow orders all ops on one variable. A counter
advances in the running step, either at once or when a tensor is available. So a worker that lacks a
batch looks different from a worker that waits in a collective.
"""

from __future__ import annotations

import sys
from typing import Any

import tensorflow as tf

from tf_redsync.network import collectives

BEGUN = "step"  # steps that have begun, with or without their batch
SUPPLIED = "supplied"  # steps whose arguments are available
ASKED = "asked"  # batches requested from finite datasets
ANSWERED = "answered"  # requests of `ASKED` answered by this worker's dataset
ARRIVED = "arrived"  # steps whose gradients are available
EXCHANGED = "exchanged"  # the last step that has received the messages of all workers
DEPARTED = "departed"  # exchanges begun in the background
DELIVERED = "delivered"  # exchanges that the background has completed
_NAMES = (BEGUN, SUPPLIED, ASKED, ANSWERED, ARRIVED, EXCHANGED, DEPARTED, DELIVERED)

_REQUESTING = "_calculate_replicas_with_values"  # a function of TensorFlow's `input_lib`
_counters: dict[str, tf.Variable] = {}


def create() -> None:
    """Create the counters of this process; a second call is a no-op."""
    if not _counters:
        with tf.init_scope(), tf.device("CPU:0"):
            for name in _NAMES:
                zero = tf.zeros([], tf.int64)
                _counters[name] = collectives.OneDeviceVariable(zero, trainable=False)


def values() -> dict[str, int]:
    """Return the counters by the field names of `WorkerReport`; empty before `create`."""
    return {name: int(counter.numpy()) for name, counter in _counters.items()}


def enter_step(arguments: Any) -> None:
    """Count a step, traced or eager: once as it begins, once when its arguments are available."""
    _count(BEGUN)
    _count(SUPPLIED, arguments)


def begun() -> tf.Tensor | None:
    """Return the number of steps that have begun, an int64 scalar; `None` before `create`."""
    return _counters[BEGUN].read_value() if _counters else None


def reach_exchange(gradient: Any) -> None:
    """Count a step whose backward pass has produced `gradient`.

    Args:
        gradient: Gradient of the first variable, which comes last in most models. An edge from
            every gradient would cost one message each on a GPU.
    """
    _count(ARRIVED, gradient)


def note_exchange(received: tf.Tensor) -> None:
    """Record, when `received` is available, that all workers have reached this step."""
    if _counters:
        with tf.control_dependencies([received]):
            _counters[EXCHANGED].assign(_counters[BEGUN].read_value(), read_value=False)


def note_departure() -> None:
    """Count an exchange that begins in the background."""
    _count(DEPARTED)


def note_delivery(received: tf.Tensor) -> None:
    """Count an exchange of the background, when `received` is available."""
    _count(DELIVERED, received)


def is_request(value: Any, axis: Any) -> bool:
    """Return whether reducing `value` is part of a batch request; `reduce` itself must call it.

    An iterator over a finite dataset sums how many replicas still have data, an int64 tensor of one
    element, before any replica gets its batch.
    """
    if axis is not None or not isinstance(value, tf.Tensor) or value.dtype != tf.int64:
        return False
    caller = sys._getframe(1).f_back
    return caller is not None and caller.f_code.co_name == _REQUESTING


def note_request(own: tf.Tensor) -> None:
    """Count a batch request in a function; `own` is this worker's number of replicas with data."""
    if not tf.executing_eagerly():
        _count(ASKED)
        _count(ANSWERED, own)


def watch_batches(strategy: tf.distribute.Strategy) -> None:
    """Count the batch requests of TensorFlow's strategy; tf_redsync's strategy counts its own."""
    reduce = strategy.reduce
    if hasattr(reduce, "counts_batches"):
        return

    def counting(reduce_op: Any, value: Any, axis: Any) -> Any:
        if is_request(value, axis):
            note_request(value)
        return reduce(reduce_op, value, axis)

    counted: Any = counting
    counted.counts_batches = True
    strategy.reduce = counted


def _count(name: str, after: Any = ()) -> None:
    if _counters:
        parts = tf.nest.flatten(after, expand_composites=True)
        with tf.control_dependencies([p for p in parts if isinstance(p, tf.Tensor)]):
            _counters[name].assign_add(1, read_value=False)
