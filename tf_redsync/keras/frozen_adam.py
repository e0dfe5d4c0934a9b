"""Adam's update with a momentum that comes from the exchange, and a variance that stays.

For methods whose totals are momenta (`Method.adam_beta_1`). The rule of Adam is

    m <- beta_1 m + (1 - beta_1) g;   v <- beta_2 v + (1 - beta_2) g^2
    w <- w - eta sqrt(1 - beta_2^t) / (1 - beta_1^t)  m / (sqrt(v) + epsilon)

If m / beta_1, v / beta_2 and a gradient of 0 are put in, it takes the step of m and v, whatever
else the optimizer does. So that the variance stays as it is after Adam's correction of its bias,
v / (1 - beta_2^t), it grows with t; after thousands of steps it no longer does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tf_redsync.keras import conflicts, slots


class FrozenAdam:
    """What is put into an Adam before its update.

    Args:
        inner: The inner optimizer.
        parts: Returns its coefficients and slots.
        momenta: By the position of a variable, that of the exchange's state.
        frozen: Returns whether the step that is being traced is one, after its exchange.
    """

    def __init__(
        self,
        inner: Any,
        parts: Callable[[], slots.AdamParts],
        momenta: Mapping[int, Any],
        frozen: Callable[[], Any],
    ):
        self._adam = conflicts.innermost(inner)
        self._parts, self._momenta, self._frozen = parts, momenta, frozen

    def gradients(self, totals: Sequence[Any], positions: Sequence[int]) -> list[Any]:
        """Return what the optimizer is to take for the sums of gradients, in a replica context."""
        frozen = self._frozen()
        return [
            tf.where(frozen, tf.zeros_like(total), total) if p in self._momenta else total
            for total, p in zip(totals, positions, strict=True)
        ]

    def prepare(self, distribution: Any, served: Sequence[tuple[int, Any]]) -> None:
        """Write the slots, in a cross-replica context, before the update and only if there is one.

        Args:
            distribution: The strategy.
            served: `(position, variable)` of those that are updated.
        """
        parts, frozen = self._parts(), self._frozen()
        t = tf.cast(self._adam.iterations, tf.float32) + 1.0
        beta_2 = tf.cast(parts.beta_2, tf.float32)
        grown = tf.math.divide_no_nan(1.0 - beta_2**t, 1.0 - beta_2 ** (t - 1.0)) / beta_2

        def put_in(variable: Any, momentum: Any, m: Any, v: Any) -> None:
            del variable
            in_adam = tf.cast(momentum, m.dtype) / tf.cast(parts.beta_1, m.dtype)
            m.assign(tf.where(frozen, in_adam, m))
            v.assign(tf.where(frozen, tf.cast(grown, v.dtype) * v, v))

        for position, variable in served:
            if position in self._momenta:
                own = [slots.tf_variable(s[position]) for s in (parts.momenta, parts.variances)]
                arguments = (self._momenta[position], *own)
                distribution.extended.update(variable, put_in, args=arguments, group=False)
