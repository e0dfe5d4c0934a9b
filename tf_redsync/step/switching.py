"""Compression is switched off and on again in a process that goes on.

While it is off a step is one of a dense warm-up, and the rest of the program does not exist in it.
So what was traced before must be traced again. Keras's training functions are, by
`keras/fit_hook.py`; a step that somebody else has traced notices that it is out of date, on all
workers.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_redsync.exchange.method import State
from tf_redsync.step import state_variables


class Switch:
    """Whether an exchange compresses.

    Args:
        exchange: A `GradientExchange`, which is being made in the strategy's scope.
    """

    def __init__(self, exchange: Any):
        self._exchange = weakref.proxy(exchange)
        self._times, self._variable = 0, state_variables.counter("exchange_switched", 0)
        self._checks: list[Any] = []  # of the step that is being traced

    def turn(self, off: bool) -> None:
        """Switch it, between two steps; all workers must call it."""
        exchange, what = self._exchange, "disable" if off else "enable"
        if exchange.program.off == off:
            return
        exchange.to_consensus()
        with exchange.agreed(f"{what} compression (`{what}()`)"):
            exchange.program.off = off
            self._times += 1
            for copy in state_variables.copies(self._variable, exchange.strategy):
                copy.assign(self._times)

    def checked(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Return a step's gradients, once it is checked that it was traced after the last switch.

        Before any collective: one that has begun when a step fails waits for its answer for ever,
        and the next step meets what is left of it.
        """
        check = tf.debugging.assert_equal(
            self._variable.read_value(),
            tf.constant(self._times, self._variable.dtype),
            "this step was traced before compression was switched off or on. Make a new "
            "`tf.function` of the step after `optimizer.disable()` or `optimizer.enable()`.",
        )
        self._checks = [] if check is None else [check]  # none in eager steps
        with tf.control_dependencies(self._checks):
            return [tf.identity(t) for t in tensors]

    def states(self, variables: Sequence[state_variables.StateVariables]) -> list[State]:
        """Read what a step starts from: with a delay collectives wait for no gradient."""
        buckets = self._exchange.program.buckets
        with tf.control_dependencies(self._checks):
            return [
                v.read(self._exchange.program.names_in_run(b))
                for b, v in zip(buckets, variables, strict=True)
            ]
