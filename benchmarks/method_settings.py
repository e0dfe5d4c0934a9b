"""How the methods are set where all of them train the same small task.

Whatever `rs.methods.table()` lists is run with its defaults, except for what stands here.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import tf_redsync as rs
from tf_redsync.methods.base import registered

# For all methods that have the hyper-parameter. The task's tensors are small: at defaults meant for
# large ones (0.1 %, dense below 128 KiB) hardly anything would be compressed.
DENSITY = 0.01
DENSE_BELOW = 4096


@dataclasses.dataclass(frozen=True)
class Setting:
    """What one method needs.

    Attributes:
        reason: Why.
        rate: Factor of the learning rate.
        options: Hyper-parameters.
    """

    reason: str
    rate: float = 1.0
    options: dict[str, Any] = dataclasses.field(default_factory=dict)


_VOTES = (
    "totals are -1, 0 or 1: every weight moves by the learning rate, however small its gradient"
)
_STEPS = "an element moves by the threshold at a time, which has to suit the gradients of the task"
EXCEPTIONS = {
    "Strom": Setting(_STEPS, options={"threshold": 0.1}),
    "SignSGD": Setting(_VOTES, rate=0.01),
    "Signum": Setting(_VOTES, rate=0.01),
}
_PLAIN = Setting("defaults")


def names() -> list[str]:
    """All public methods, `Dense` first."""
    listed = [entry.name for entry in rs.methods.table().entries]
    return sorted(listed, key=lambda name: (name != "Dense", name))


def make(name: str, density: float = DENSITY, dense_below: int = DENSE_BELOW) -> rs.Method:
    """Returns the method as it is set for small tasks.

    Args:
        name: One of `names()`.
        density: For methods that have it.
        dense_below: For methods that have it, bytes.
    """
    cls = registered()[name]
    fields = {f.name for f in dataclasses.fields(cls)}
    options = {"density": density, "dense_below": dense_below}
    options = {k: v for k, v in options.items() if k in fields}
    return cls(**{**options, **EXCEPTIONS.get(name, _PLAIN).options})


def learning_rate(method: rs.Method, dense_rate: float) -> float:
    """Returns the learning rate for a method where `Dense` has `dense_rate`.

    Momentum in the exchange makes every step 1 / (1 - momentum) times as long, so that is taken
    back.
    """
    factor = EXCEPTIONS.get(type(method).__name__, _PLAIN).rate
    return dense_rate * factor * (1.0 - method.momentum_in_exchange)
