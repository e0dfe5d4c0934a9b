"""Counts how far this worker has come in its steps; the watchdog reports the numbers.

Each counter is a variable of its own, because TensorFlow orders all ops on one variable. A counter
advances in a step that is running, either as soon as the step begins or once a tensor is there. So
a worker whose next batch does not come differs from a worker that waits for it in a collective.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tf_redsync.network import collectives

BEGUN = "step"  # steps that have begun, whether or not their batch is there
SUPPLIED = "supplied"  # steps whose arguments are there
ASKED = "asked"  # batches of finite datasets that a step has asked for
ANSWERED = "answered"  # requests of `ASKED` that this worker's dataset has answered
ARRIVED = "arrived"  # steps whose gradients are there
MET = "met"  # the number of the last step in which the messages of all workers came
_NAMES = (BEGUN, SUPPLIED, ASKED, ANSWERED, ARRIVED, MET)

_counters: dict[str, tf.Variable] = {}


def create() -> None:
    """Create the counters of this process; a second call does nothing."""
    if not _counters:
        with tf.init_scope(), tf.device("CPU:0"):
            for name in _NAMES:
                zero = tf.zeros([], tf.int64)
                _counters[name] = collectives.OneDeviceVariable(zero, trainable=False)


def values() -> dict[str, int]:
    """Return the counters, by the names of a `Report`'s fields; all are 0 before `create`."""
    return {name: int(counter.numpy()) for name, counter in _counters.items()}


@tf.autograph.experimental.do_not_convert
def enter_step(arguments: Any) -> None:
    """Count a step, in a function or eagerly: as it begins, and when its arguments are there."""
    _count(BEGUN)
    _count(SUPPLIED, arguments)


@tf.autograph.experimental.do_not_convert
def reach_exchange(gradient: Any, begins: bool) -> None:
    """Count a step whose backward pass has come to `gradient`.

    Args:
        gradient: The first variable's, which comes last in most models. An edge from every gradient
            would cost a message each on a GPU.
        begins: Whether this is the step's first count: our strategy has counted its step before.
    """
    if begins:
        enter_step(gradient)
    _count(ARRIVED, gradient)


@tf.autograph.experimental.do_not_convert
def note_meeting(received: tf.Tensor) -> None:
    """Note, once `received` is there, that all workers have come to this step."""
    if _counters:
        with tf.control_dependencies([received]):
            _counters[MET].assign(_counters[BEGUN].read_value(), read_value=False)


@tf.autograph.experimental.do_not_convert
def note_reduce(value: Any, axis: Any) -> None:
    """Count a request for a batch, if it is for one that a step is about to reduce `value`.

    In a function, an iterator over a finite dataset adds up how many replicas still have data,
    `[1, 1]` of int64, before any of them gets its batch.
    """
    if tf.executing_eagerly() or axis is not None or not isinstance(value, tf.Tensor):
        return
    if value.dtype == tf.int64 and value.shape.rank and value.shape.num_elements() == 1:
        _count(ASKED)
        _count(ANSWERED, value)


def watch_batches(strategy: tf.distribute.Strategy) -> None:
    """Count the requests for batches of a strategy that is not ours, which does so itself."""
    reduce = strategy.reduce
    if hasattr(reduce, "counts_batches"):
        return

    @tf.autograph.experimental.do_not_convert
    def counting(reduce_op: Any, value: Any, axis: Any) -> Any:
        note_reduce(value, axis)
        return reduce(reduce_op, value, axis)

    counting.counts_batches = True
    strategy.reduce = counting


def _count(name: str, after: Any = ()) -> None:
    if _counters:
        parts = tf.nest.flatten(after, expand_composites=True)
        with tf.control_dependencies([p for p in parts if isinstance(p, tf.Tensor)]):
            _counters[name].assign_add(1, read_value=False)
