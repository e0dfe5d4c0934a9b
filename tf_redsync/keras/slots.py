"""Access to optimizers' slots, and variables of Keras 3, tf_keras and `tf.distribute`.

Private names used here: `_unique_id` of variables; `_distributed_container`, which links a
component of a distributed variable, or its handle, to the whole; and the list `_v` of Adafactor.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tf_redsync.exchange.capabilities import AdamMoments, capability
from tf_redsync.keras import conflicts, momentum
from tf_redsync.step.gradient_exchange import GradientExchange


def momentum_slots(inner: Any) -> Sequence[Any]:
    """Return the momentum slots of a Keras 3 or tf_keras optimizer, by variable; may be empty."""
    inner = conflicts.innermost(inner)
    if not momentum.of(inner).values:  # ScheduleFreeAdamW has points in slots of this name
        return ()
    for name in ("momentums", "_momentums", "_m"):
        if getattr(inner, name, None):
            return getattr(inner, name)
    return ()


@dataclasses.dataclass(frozen=True)
class Access:
    """Access to the state of an optimizer, by family.

    Attributes:
        rate: Returns the learning rate of a step, a scalar.
        momenta: Returns the momentum slots by variable; may be empty.
        adam: Returns coefficients and slots of an Adam.
        slots: Returns all slots for given variables: a list by variable for each kind of slot.
    """

    rate: Callable[[], Any]
    momenta: Callable[[], Sequence[Any]]
    adam: Callable[[], AdamParts]
    slots: Callable[[Sequence[tf.Variable]], Sequence[Sequence[Any]]]

    @classmethod
    def of(cls, inner: Any) -> Access:
        """Return the access to an optimizer of Keras 3 or tf_keras."""
        return cls(
            rate=lambda: inner.learning_rate,
            momenta=lambda: momentum_slots(inner),
            adam=lambda: adam_parts(inner),
            slots=lambda variables: all_slots(inner, variables),
        )


class AdamParts(NamedTuple):
    """The coefficients of an Adam, and its slots by variable.

    Attributes:
        beta_1: Decay of the first moment.
        beta_2: Decay of the second moment.
        momenta: First moments.
        variances: Second moments, without bias correction.
    """

    beta_1: Any
    beta_2: Any
    momenta: Sequence[Any]
    variances: Sequence[Any]


def adam_parts(inner: Any) -> AdamParts:
    """Return the coefficients and slots of a Keras 3 or tf_keras Adam."""
    adam = conflicts.innermost(inner)
    return AdamParts(adam.beta_1, adam.beta_2, adam._momentums, adam._velocities)


def all_slots(inner: Any, variables: Sequence[tf.Variable]) -> list[list[Any]]:
    """Return the slots of a Keras 3 or tf_keras optimizer: for each kind a list by variable.

    An absent slot is `None`. The function returns attributes that are lists as long as `variables`.
    It excludes the list of the model's variables and that of all the optimizer's variables, which
    starts with the step counter.
    """
    inner = conflicts.innermost(inner)
    others = {id(v) for v in (tf_variable(inner.iterations), *variables)}
    kinds = []
    for value in vars(inner).values():
        if isinstance(value, (list, tuple)) and len(value) == len(variables):
            kind = [tf_variable(v) for v in value]
            slots = [v if isinstance(v, tf.Variable) else None for v in kind]
            if any(s is not None for s in slots) and not any(id(v) in others for v in kind):
                kinds.append(slots)
    return kinds


def all_variables(inner: Any) -> list[tf.Variable]:
    """Return all variables of an optimizer of any family: slots, counter, learning rate."""
    listed = inner.variables
    return [tf_variable(v) for v in (listed() if callable(listed) else listed)]


def tf_variable(variable: Any) -> tf.Variable:
    """Return the `tf.Variable` of a Keras 3 variable, or the variable itself."""
    return variable if isinstance(variable, tf.Variable) else getattr(variable, "value", variable)


def key(variable: Any) -> Any:
    """Return a hashable id that a distributed variable shares with its components."""
    if isinstance(variable, tf.distribute.DistributedValues):
        return variable._unique_id
    container = getattr(variable, "_distributed_container", None)
    if container is None:
        container = getattr(getattr(variable, "handle", None), "_distributed_container", None)
    return (container() if container is not None else variable)._unique_id


class AdamSlots:
    """Writer of an Adam's slots, for methods whose totals are momenta (`AdamMoments`).

    The rule of Adam is

        m <- beta_1 m + (1 - beta_1) g;   v <- beta_2 v + (1 - beta_2) g^2
        w <- w - eta sqrt(1 - beta_2^t) / (1 - beta_1^t)  m / (sqrt(v) + epsilon)

    With slots m / beta_1 and v / beta_2 and a gradient of 0, the optimizer takes the step of m and
    v. If the exchange has no variance, Adam's bias-corrected variance, v / (1 - beta_2^t), stays
    constant. v then grows with t, and converges after thousands of steps.

    Args:
        inner: The inner optimizer.
        parts: Returns the optimizer's coefficients and slots.
        exchange: The built exchange, whose state has `momentum` and optionally a bias-corrected
            `variance`.
    """

    def __init__(
        self,
        inner: Any,
        parts: Callable[[], AdamParts],
        exchange: GradientExchange,
    ):
        self._adam, self._parts, self._exchange = conflicts.innermost(inner), parts, exchange

    def _state_variables(self, name: str) -> dict[int, Any]:
        """Return the exchange's state variables of a name, by position."""
        by_position: dict[int, Any] = {}
        exchange = self._exchange
        for bucket, state in zip(exchange.schedule.buckets, exchange.states, strict=True):
            if capability(bucket.method, AdamMoments):
                variables = state.variables_by_name.get(name, ())
                by_position.update(
                    zip([s.position for s in bucket.layout.specs], variables, strict=False)
                )
        return by_position

    def _takes_momenta(self) -> tf.Tensor:
        """Return whether the step takes its momenta from the exchange's state, a bool scalar."""
        if self._state_variables("variance"):
            return tf.constant(True)
        return tf.logical_not(self._exchange.schedule.warmed())

    def gradients(self, totals: Sequence[Any], positions: Sequence[int]) -> list[Any]:
        """Return the gradients for the optimizer, 0 where the slots alone define the step.

        Call it in a replica context.

        Args:
            totals: Sums over workers.
            positions: Positions of their variables.
        """
        from_exchange, momenta = self._takes_momenta(), self._state_variables("momentum")
        return [
            tf.where(from_exchange, tf.zeros_like(total), total) if p in momenta else total
            for total, p in zip(totals, positions, strict=True)
        ]

    def prepare(self, distribution: Any, served: Sequence[tuple[int, Any]]) -> None:
        """Write the slots, in a cross-replica context, before an update that is not skipped.

        Args:
            distribution: The strategy.
            served: `(position, variable)` of the updated variables.
        """
        parts, from_exchange = self._parts(), self._takes_momenta()
        momenta = self._state_variables("momentum")
        corrected_variances = self._state_variables("variance")
        t = tf.cast(self._adam.iterations, tf.float32) + 1.0
        beta_2 = tf.cast(parts.beta_2, tf.float32)
        bias = 1.0 - beta_2**t
        grown = tf.math.divide_no_nan(bias, 1.0 - beta_2 ** (t - 1.0)) / beta_2

        def put_in(variable: Any, momentum: Any, m: Any, v: Any, *corrected: Any) -> None:
            del variable
            in_adam = tf.cast(momentum, m.dtype) / tf.cast(parts.beta_1, m.dtype)
            factor = tf.cast(bias / beta_2 if corrected else grown, v.dtype)
            variance = factor * tf.cast(corrected[0] if corrected else v, v.dtype)
            m.assign(tf.where(from_exchange, in_adam, m))
            v.assign(tf.where(from_exchange, variance, v))

        for position, variable in served:
            if position in momenta:
                slots = [tf_variable(s[position]) for s in (parts.momenta, parts.variances)]
                arguments = [momenta[position], *slots]
                if position in corrected_variances:
                    arguments.append(corrected_variances[position])
                distribution.extended.update(variable, put_in, args=tuple(arguments), group=False)


_SMALLEST = 2.0**-126  # smallest normal float32; TensorFlow flushes smaller values to 0


def keep_second_moments_positive(inner: Any) -> None:
    """Keep Adafactor's second moments of matrices above 0.

    With R the means of g^2 + epsilon_1 over rows and C those over columns, Keras computes

        v = (R / mean(R)) C,  update = g / sqrt(v)

    If a row and a column of gradients have always been 0, R and C are epsilon_1 = 1e-30. Then v
    underflows to 0 in float32, and the update is 0 / 0. With dense totals this requires an input
    that is always 0 and a unit that is never active; with sparse totals most elements are affected.
    With v at least the smallest normal number of float32, the update is 0. Other v do not change.

    Args:
        inner: A built optimizer; a no-op unless it is an Adafactor.
    """
    adafactor = conflicts.innermost(inner)
    if type(adafactor).__name__ != "Adafactor":
        return
    for moment in adafactor._v:
        variable = moment if isinstance(moment, tf.Variable) else getattr(moment, "value", None)
        if variable is not None and len(variable.shape) > 1:
            variable.assign = _at_least_smallest(variable.assign)


def _at_least_smallest(assign: Callable[..., Any]) -> Callable[..., Any]:
    def assign_raised(value: Any, *args: Any, **kwargs: Any) -> Any:
        value = tf.convert_to_tensor(value)
        return assign(tf.maximum(value, tf.cast(_SMALLEST, value.dtype)), *args, **kwargs)

    return assign_raised
