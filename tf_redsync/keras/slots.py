"""Variables of Keras 3, tf_keras and `tf.distribute`, and those that optimizers keep for them.

Private names used here: `_unique_id` of variables, and `_distributed_container`, by which a part of
a distributed variable, or its handle, knows the whole.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tf_redsync.keras import conflicts, momentum


def momentum_slots(inner: Any) -> Sequence[Any]:
    """The momentum variables of a Keras 3 or tf_keras optimizer by variable, or none."""
    inner = conflicts.innermost(inner)
    if not momentum.of(inner).values:  # ScheduleFreeAdamW keeps points under that name
        return ()
    for name in ("momentums", "_momentums", "_m"):
        if getattr(inner, name, None):
            return getattr(inner, name)
    return ()


@dataclasses.dataclass(frozen=True)
class Access:
    """The way to what an optimizer of a family keeps.

    Attributes:
        rate: Returns the learning rate of a step.
        momenta: Returns the momentum's slots by variable, or none.
        adam: Returns the parts of an Adam.
        slots: Returns all slots for given variables: a list by variable for each kind.
    """

    rate: Callable[[], Any]
    momenta: Callable[[], Sequence[Any]]
    adam: Callable[[], AdamParts]
    slots: Callable[[Sequence[tf.Variable]], Sequence[Sequence[Any]]]

    @classmethod
    def of(cls, inner: Any) -> Access:
        """Return that of an optimizer of Keras 3 or tf_keras."""
        return cls(
            rate=lambda: inner.learning_rate,
            momenta=lambda: momentum_slots(inner),
            adam=lambda: adam_parts(inner),
            slots=lambda variables: all_slots(inner, variables),
        )


class AdamParts(NamedTuple):
    """What there is of an Adam: both coefficients, and its slots by variable."""

    beta_1: Any
    beta_2: Any
    momenta: Sequence[Any]
    variances: Sequence[Any]


def adam_parts(inner: Any) -> AdamParts:
    """The parts of a Keras 3 or tf_keras Adam."""
    adam = conflicts.innermost(inner)
    return AdamParts(adam.beta_1, adam.beta_2, adam._momentums, adam._velocities)


def all_slots(inner: Any, variables: Sequence[tf.Variable]) -> list[list[Any]]:
    """The slots of a Keras 3 or tf_keras optimizer, for each kind a list by variable, or `None`.

    They are the lists among its attributes that are as long as the list of variables; but for that
    of all its variables, which starts with the counter, and the one of the model's.
    """
    inner = conflicts.innermost(inner)
    others = {id(v) for v in (tf_variable(inner.iterations), *variables)}
    found = []
    for value in vars(inner).values():
        if isinstance(value, (list, tuple)) and len(value) == len(variables):
            kind = [tf_variable(v) for v in value]
            slots = [v if isinstance(v, tf.Variable) else None for v in kind]
            if any(s is not None for s in slots) and not any(id(v) in others for v in kind):
                found.append(slots)
    return found


def all_variables(inner: Any) -> list[tf.Variable]:
    """All variables of an optimizer of any family: slots, its counter, its learning rate."""
    listed = inner.variables
    return [tf_variable(v) for v in (listed() if callable(listed) else listed)]


def tf_variable(variable: Any) -> tf.Variable:
    """The `tf.Variable` of a Keras 3 variable, or the variable itself."""
    return variable if isinstance(variable, tf.Variable) else getattr(variable, "value", variable)


def key(variable: Any) -> Any:
    """An id that is the same for a distributed variable and its parts."""
    if isinstance(variable, tf.distribute.DistributedValues):
        return variable._unique_id
    container = getattr(variable, "_distributed_container", None)
    if container is None:
        container = getattr(getattr(variable, "handle", None), "_distributed_container", None)
    return (container() if container is not None else variable)._unique_id
