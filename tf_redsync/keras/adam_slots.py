"""Adam's update with a momentum, and perhaps a variance, that come from the exchange.

For methods whose totals are momenta (`Method.adam`). The rule of Adam is

    m <- beta_1 m + (1 - beta_1) g;   v <- beta_2 v + (1 - beta_2) g^2
    w <- w - eta sqrt(1 - beta_2^t) / (1 - beta_1^t)  m / (sqrt(v) + epsilon)

If m / beta_1, v / beta_2 and a gradient of 0 are put in, it takes the step of m and v, whatever
else the optimizer does. Where the exchange has no variance, it is Adam's own that stays as it is
after the correction of its bias, v / (1 - beta_2^t): it grows with t, until after thousands of
steps it no longer does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tf_redsync.keras import conflicts, slots


class AdamSlots:
    """What is put into an Adam before its update.

    Args:
        inner: The inner optimizer.
        parts: Returns its coefficients and slots.
        momenta: By the position of a variable, that of the exchange's state.
        variances: The same for variances, corrected for their bias; empty for Adam's own.
        given: Returns whether the step that is being traced is one of these, after its exchange.
    """

    def __init__(
        self,
        inner: Any,
        parts: Callable[[], slots.AdamParts],
        momenta: Mapping[int, Any],
        variances: Mapping[int, Any],
        given: Callable[[], Any],
    ):
        self._adam = conflicts.innermost(inner)
        self._parts, self._given = parts, given
        self._momenta, self._variances = momenta, variances

    def gradients(self, totals: Sequence[Any], positions: Sequence[int]) -> list[Any]:
        """Return what the optimizer is to take for the sums of gradients, in a replica context."""
        given = self._given()
        return [
            tf.where(given, tf.zeros_like(total), total) if p in self._momenta else total
            for total, p in zip(totals, positions, strict=True)
        ]

    def prepare(self, distribution: Any, served: Sequence[tuple[int, Any]]) -> None:
        """Write the slots, in a cross-replica context, before the update and only if there is one.

        Args:
            distribution: The strategy.
            served: `(position, variable)` of those that are updated.
        """
        parts, given = self._parts(), self._given()
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
            if position in self._momenta:
                own = [slots.tf_variable(s[position]) for s in (parts.momenta, parts.variances)]
                arguments = [self._momenta[position], *own]
                if position in self._variances:
                    arguments.append(self._variances[position])
                distribution.extended.update(variable, put_in, args=tuple(arguments), group=False)
