"""Runs exchanges in a background thread, concurrently with the following steps.

A step begins an exchange by an entry in a queue. A later step waits for an entry in a second queue
for each exchange begun so far. Both queues are TensorFlow resources, so steps may be traced and may
run in loops. Between the two steps the thread runs the exchange as a separate function. Its
collectives form a separate group, because TensorFlow matches collectives by their keys and not by
their order.

If an exchange fails, the step that waits for it raises an error with the reason, and so does every
later step. At the end of the program the thread completes the exchanges in which the other workers
take part.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tf_redsync.cluster import coordination, step_counters, step_errors
from tf_redsync.step.state_variables import process_variable

_CPU = "CPU:0"
_CAPACITY = 16  # entries in a queue; one exchange runs at a time
_EXIT_SECONDS = 5.0  # limit for an exchange that is in progress when the program ends
_logger = logging.getLogger("tf_redsync")


class Background:
    """A queue of exchanges that steps begin and later steps wait for; one runs at a time.

    Args:
        strategy: The strategy, with one replica in this process.
        exchanges: Functions that run one exchange in a replica context and store its results in
            variables. The argument is the `number` of `begin`, an int64 scalar.
    """

    def __init__(
        self, strategy: tf.distribute.Strategy, exchanges: Sequence[Callable[[tf.Tensor], Any]]
    ):
        self._strategy, self._exchanges = strategy, tuple(exchanges)
        with tf.init_scope(), tf.device(_CPU):
            self._begun = tf.queue.FIFOQueue(_CAPACITY, [tf.int32, tf.int64], [[], []])
            self._ended = tf.queue.FIFOQueue(_CAPACITY, [tf.string], [[]])
            self._under_way = process_variable(tf.constant(0, tf.int64))  # number of exchanges
        self._function = self._traced()
        queues = self._begun, self._ended
        # The thread holds no reference to this object while it waits, so that the object can be
        # garbage-collected.
        thread = threading.Thread(
            target=_serve,
            args=(weakref.ref(self), *queues),
            name="tf_redsync_background",
            daemon=True,
        )
        thread.start()
        weakref.finalize(self, _end, self._begun, thread, os.getpid())

    def begin(self, index: int, number: tf.Tensor) -> None:
        """Begin an exchange in this step, without waiting for it.

        Args:
            index: Index into `exchanges`.
            number: Argument of that function, int64 scalar.
        """
        with tf.device(_CPU):
            self._under_way.assign_add(1, read_value=False)
            self._begun.enqueue([tf.constant(index), number])
            step_counters.note_departure()

    def wait(self) -> tf.Tensor:
        """Wait in this step for all exchanges in progress, if any.

        Returns:
            A string scalar that becomes available at the end of the exchanges, for control
            dependencies.

        Raises:
            tf.errors.InvalidArgumentError: At execution, if an exchange has failed.
        """

        def wait() -> tf.Tensor:
            # A failure closes the queue, which then has fewer entries.
            failure = tf.strings.reduce_join(self._ended.dequeue_up_to(tf.cast(number, tf.int32)))
            check = tf.debugging.Assert(tf.equal(failure, ""), [step_errors.IN_BACKGROUND, failure])
            with tf.control_dependencies([] if check is None else [check]):
                self._under_way.assign(0, read_value=False)
                return tf.identity(failure)

        with tf.device(_CPU):
            number = self._under_way.read_value()
            return tf.cond(number > 0, wait, lambda: tf.constant(""))

    def settle(self) -> None:
        """Wait between two steps for all exchanges in progress, if any."""
        with step_errors.translated():
            self.wait()

    def trace_again(self) -> None:
        """Retrace the exchanges before the next one."""
        self._function = self._traced()

    def run(self, index: tf.Tensor, number: tf.Tensor) -> None:
        """Run an exchange in the calling thread; see `begin`."""
        self._function(index, number)

    def _traced(self) -> Callable[..., Any]:
        def exchange(index: tf.Tensor, number: tf.Tensor) -> None:
            def in_replica() -> tf.Tensor:
                branches = [functools.partial(e, number) for e in self._exchanges]
                return tf.switch_case(index, branches)

            # `Strategy.run` would count a step.
            done = self._strategy.extended.call_for_each_replica(in_replica)
            step_counters.note_delivery(done)

        return tf.function(exchange, autograph=False)


def _serve(background: weakref.ref[Background], begun: Any, ended: Any) -> None:
    """Run exchanges until `begun` is closed or one fails."""
    while True:
        try:
            index, number = begun.dequeue()
        except tf.errors.OpError:  # closed
            return
        owner = background()
        if owner is None:
            return
        try:
            owner.run(index, number)
            failure = None
        except Exception as error:  # raised by the step that waits for it
            failure = error
        del owner
        if failure is not None:
            _logger.debug("an exchange in the background failed: %s", failure)
            ended.enqueue(step_errors.fail_in_background(failure))
            ended.close()
            begun.close(cancel_pending_enqueues=True)
            return
        ended.enqueue("")


def _end(begun: Any, thread: threading.Thread, process: int) -> None:
    """End the thread, after the exchange in progress."""
    if os.getpid() != process or threading.current_thread() is thread:
        return
    with (
        tf.init_scope(),  # garbage collection may run during a trace
        contextlib.suppress(tf.errors.CancelledError),  # closed after a failure
    ):
        begun.close()
    thread.join(_EXIT_SECONDS)
    if thread.is_alive():  # another worker does not take part
        coordination.abort_collectives("the program ends during an exchange in the background")
        thread.join(_EXIT_SECONDS)
