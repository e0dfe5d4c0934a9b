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
        votes: Whether it takes the learning rate for votes.
        threshold: Whether it takes the threshold for gradients.
        options: Other hyper-parameters.
    """

    reason: str
    votes: bool = False
    threshold: bool = False
    options: dict[str, Any] = dataclasses.field(default_factory=dict)


_VOTES = "totals are -1, 0 or 1: a weight moves by the learning rate, however small its gradient"
_TRIAL = "the threshold is one for gradients, so every task needs its own"
EXCEPTIONS = {
    "CDSGD": Setting("the default warm-up is longer than the task", options={"warm_up": None}),
    "FixedThreshold": Setting(_TRIAL, threshold=True),
    "LGC": Setting(
        "stages 1 and 2 are longer than the task, and the autoencoder larger than its network",
        options={
            "dense_steps": 4,
            "training_steps": 12,
            "dense_ends": False,
            "channels": (16, 32),
            "decoder_channels": (16, 16),
            "code_channels": 1,
        },
    ),
    "SignSGD": Setting(_VOTES, votes=True),
    "Signum": Setting(_VOTES, votes=True),
    "Strom": Setting(_TRIAL, threshold=True),
}
_PLAIN = Setting("defaults")


def names() -> list[str]:
    """All public methods, `Dense` first."""
    listed = [entry.name for entry in rs.methods.table().entries]
    return sorted(listed, key=lambda name: (name != "Dense", name))


def make(
    name: str, threshold: float, density: float = DENSITY, dense_below: int = DENSE_BELOW
) -> rs.Method:
    """Returns the method as it is set for small tasks.

    Args:
        name: One of `names()`.
        threshold: For methods with a threshold for gradients.
        density: For methods that have it.
        dense_below: For methods that have it, bytes.
    """
    cls, setting = registered()[name], EXCEPTIONS.get(name, _PLAIN)
    fields = {f.name for f in dataclasses.fields(cls)}
    given = {"density": density, "dense_below": dense_below}
    options: dict[str, Any] = {k: v for k, v in given.items() if k in fields}
    if issubclass(cls, rs.Coded):  # the sparsifier inside has them
        options["method"] = rs.TopK(density=density, dense_below=dense_below)
    if setting.threshold:
        options["threshold"] = threshold
    return cls(**{**options, **setting.options})


def learning_rate(method: rs.Method, dense: float, votes: float) -> float:
    """Returns the learning rate for a method.

    Momentum in the exchange makes every step 1 / (1 - momentum) times as long, so that is taken
    back, but for votes.

    Args:
        method: The method.
        dense: The rate for `Dense`.
        votes: The rate for methods whose totals are votes.
    """
    if EXCEPTIONS.get(type(method).__name__, _PLAIN).votes:
        return votes
    return dense * (1.0 - method.momentum_in_exchange)
