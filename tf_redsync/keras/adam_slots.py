"""Adam's update with a momentum, and optionally a variance, from the exchange.

It serves methods whose totals are momenta (`AdamMoments`). The rule of Adam is

    m <- beta_1 m + (1 - beta_1) g;   v <- beta_2 v + (1 - beta_2) g^2
    w <- w - eta sqrt(1 - beta_2^t) / (1 - beta_1^t)  m / (sqrt(v) + epsilon)

With the slots m / beta_1 and v / beta_2 and a gradient of 0, the optimizer takes the step of m and
v. If the exchange has no variance, Adam's bias-corrected variance, v / (1 - beta_2^t), stays
constant: v grows with t, and converges after thousands of steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tf_redsync.exchange.capabilities import AdamMoments, capability
from tf_redsync.keras import conflicts, slots
from tf_redsync.step.gradient_exchange import GradientExchange


class AdamSlots:
    """Writer of an Adam's slots before its update.

    Args:
        inner: The inner optimizer.
        parts: Returns its coefficients and slots.
        exchange: The built exchange, whose state has momenta and optionally variances, corrected
            for their bias.
    """

    def __init__(
        self,
        inner: Any,
        parts: Callable[[], slots.AdamParts],
        exchange: GradientExchange,
    ):
        self._adam, self._parts, self._exchange = conflicts.innermost(inner), parts, exchange

    def _of_state(self, name: str) -> dict[int, Any]:
        """Return the exchange's state variables of a name, by position."""
        found: dict[int, Any] = {}
        exchange = self._exchange
        for bucket, state in zip(exchange.schedule.buckets, exchange.states, strict=True):
            if capability(bucket.method, AdamMoments):
                own = state.variables_by_name.get(name, ())
                found.update(zip([s.position for s in bucket.layout.specs], own, strict=False))
        return found

    def _given(self) -> tf.Tensor:
        """Return whether the step exchanges momenta, as a tensor."""
        if self._of_state("variance"):
            return tf.constant(True)
        return tf.logical_not(self._exchange.schedule.warmed())

    def gradients(self, totals: Sequence[Any], positions: Sequence[int]) -> list[Any]:
        """Return the optimizer's input instead of the gradients' sums, in a replica context."""
        given, momenta = self._given(), self._of_state("momentum")
        return [
            tf.where(given, tf.zeros_like(total), total) if p in momenta else total
            for total, p in zip(totals, positions, strict=True)
        ]

    def prepare(self, distribution: Any, served: Sequence[tuple[int, Any]]) -> None:
        """Write the slots, in a cross-replica context, before an update that is not skipped.

        Args:
            distribution: The strategy.
            served: `(position, variable)` of the updated variables.
        """
        parts, given = self._parts(), self._given()
        momenta, corrected_variances = self._of_state("momentum"), self._of_state("variance")
        t = tf.cast(self._adam.iterations, tf.float32) + 1.0
        beta_2 = tf.cast(parts.beta_2, tf.float32)
        bias = 1.0 - beta_2**t
        grown = tf.math.divide_no_nan(bias, 1.0 - beta_2 ** (t - 1.0)) / beta_2

        def put_in(variable: Any, momentum: Any, m: Any, v: Any, *corrected: Any) -> None:
            del variable
            in_adam = tf.cast(momentum, m.dtype) / tf.cast(parts.beta_1, m.dtype)
            kept = tf.cast(bias / beta_2 if corrected else grown, v.dtype)
            variance = kept * tf.cast(corrected[0] if corrected else v, v.dtype)
            m.assign(tf.where(given, in_adam, m))
            v.assign(tf.where(given, variance, v))

        for position, variable in served:
            if position in momenta:
                own = [slots.tf_variable(s[position]) for s in (parts.momenta, parts.variances)]
                arguments = [momenta[position], *own]
                if position in corrected_variances:
                    arguments.append(corrected_variances[position])
                distribution.extended.update(variable, put_in, args=tuple(arguments), group=False)
