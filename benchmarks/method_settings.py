"""Hyper-parameters of the methods in benchmarks: defaults, with the exceptions listed here.

`make` is for small tasks, on which all methods train for some hundred steps. `for_steps` is for
measuring steps of a large model, which need not converge.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tf_redsync as rs

# For all methods with the hyper-parameter, on small tasks. Defaults for large tensors (0.1 %, dense
# below 128 KiB) would compress hardly anything.
DENSITY = 0.01
DENSE_BELOW = 4096


@dataclasses.dataclass(frozen=True)
class Setting:
    """Exceptions for one method.

    Attributes:
        reason: The reason for the exception.
        task: Hyper-parameters on small tasks, or functions that return them.
        steps: Hyper-parameters for measuring steps, or functions that return them.
        votes: Whether it uses the learning rate for votes, on small tasks.
        threshold: Whether it uses the threshold for gradients, on small tasks.
        inner: Name of the inner optimizer, if it is not that of the model.
        learning_rate: Rate of the inner optimizer for measuring steps, if it is not SGD; `None` for
            the common rate.
    """

    reason: str = "defaults"
    task: dict[str, Any] = dataclasses.field(default_factory=dict)
    steps: dict[str, Any] = dataclasses.field(default_factory=dict)
    votes: bool = False
    threshold: bool = False
    inner: str | None = None
    learning_rate: float | None = None

    @property
    def on_task(self) -> bool:
        """Whether it differs from the defaults on small tasks."""
        return bool(self.task or self.votes or self.threshold)


_VOTES = Setting(
    "totals are -1, 0 or 1: a weight moves by the learning rate, however small its gradient, so at "
    "the rate of the others the loss of a large model would overflow",
    votes=True,
    learning_rate=1e-5,
)
_ADAPTED = Setting(
    "totals are updates of Adam: a weight moves by about the learning rate of SGD",
    votes=True,
    inner="SGD",
    learning_rate=1e-5,
)
_THRESHOLD = Setting("the threshold is for gradients: each task needs its own", threshold=True)
EXCEPTIONS = {
    "CDSGD": Setting(
        "the default warm-up is longer than the task; steps are measured as they are after it",
        task={"warm_up": None},
        steps={"warm_up": None},
    ),
    "CompAMS": Setting("it is made for AMSGrad", inner="AMSGrad", learning_rate=1e-4),
    "FixedThreshold": _THRESHOLD,
    "LGC": Setting(
        "stages 1 and 2 are longer than the task, and the autoencoder larger than its network; "
        "steps are measured as they are after both stages, the second of a single step",
        task={
            "dense_steps": 4,
            "training_steps": 12,
            "dense_ends": False,
            "channels": (16, 32),
            "decoder_channels": (16, 16),
            "code_channels": 1,
        },
        steps={"dense_steps": 0, "training_steps": 1},
    ),
    "OneBitAdam": Setting(
        "it is made for Adam; its first stage is short, and steps are measured after it",
        task={"warm_up": lambda: _dense_steps(8)},
        steps={"warm_up": lambda: _dense_steps(1)},
        inner="Adam",
        learning_rate=1e-4,
    ),
    "ZeroOneAdam": Setting(
        "it is made for Adam; its steps are measured as they are in rounds of 16",
        task={"start": 30, "double_after": 20, "steps": 4},
        steps={"start": 1, "double_after": 1, "steps": 16},
        inner="Adam",
        learning_rate=1e-4,
    ),
    "PacTrain": Setting(
        "steps are measured as they are once it is compact", steps={"stable_steps": 0}
    ),
    "Strom": _THRESHOLD,
}


def names() -> list[str]:
    """All public methods, `Dense` first."""
    import tf_redsync as rs

    listed = [entry.name for entry in rs.methods.table().entries]
    return sorted(listed, key=lambda name: (name != "Dense", name))


def setting_of(name: str) -> Setting:
    """Returns a method's settings; defaults for methods without exceptions."""
    if name in EXCEPTIONS or name not in names():
        return EXCEPTIONS.get(name, Setting())
    traits = _class_of(name)().traits
    return _VOTES if traits.votes else _ADAPTED if traits.needs_sgd else Setting()


def make(
    name: str, threshold: float, density: float = DENSITY, dense_below: int = DENSE_BELOW
) -> rs.Method:
    """Returns the method with its settings for small tasks.

    Args:
        name: One of `names()`.
        threshold: For methods with a threshold for gradients.
        density: For methods with a density.
        dense_below: In bytes, for methods with this hyper-parameter.
    """
    import tf_redsync as rs

    cls, setting = _class_of(name), setting_of(name)
    options = _known(cls, density=density, dense_below=dense_below)
    if issubclass(cls, (rs.Coded, rs.Scheduled)):  # the inner sparsifier has them
        options["method"] = rs.TopK(density=density, dense_below=dense_below)
    if cls is rs.Scheduled:  # its default stages are longer than the task
        options["stages"] = rs.ExponentialWarmUp(4, (0.25,))
    if setting.threshold:
        options["threshold"] = threshold
    return cls(**{**options, **_made(setting.task)})


def for_steps(name: str, density: float | None, **options: Any) -> rs.Method:
    """Returns the method with its settings for measuring steps.

    Args:
        name: One of `names()`.
        density: For methods with a density; `None` for their defaults.
        **options: Other hyper-parameters.
    """
    cls = _class_of(name)
    given = {} if density is None else _known(cls, density=density)
    return cls(**{**given, **_made(setting_of(name).steps), **options})


def once_begun(method: rs.Method) -> rs.Method:
    """Returns the method for measuring steps, without a warm-up or stages."""
    options = _made(setting_of(type(method).__name__).steps)
    defaults = {f.name: f.default for f in dataclasses.fields(method) if f.name in options}
    left = {n: v for n, v in options.items() if getattr(method, n) == defaults[n]}
    return dataclasses.replace(method, **left) if left else method


def learning_rate(method: rs.Method, dense: float, votes: float) -> float:
    """Returns the learning rate for a method on a small task.

    Momentum in the exchange makes every step 1 / (1 - momentum) times as long. The rate compensates
    for this, except for votes.

    Args:
        method: The method.
        dense: The rate for `Dense`.
        votes: The rate for methods whose totals are votes, or updates of Adam.
    """
    if method.traits.votes or method.traits.needs_sgd:
        return votes
    return dense * (1.0 - method.traits.momentum_in_exchange)


def _made(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value() if callable(value) else value for name, value in options.items()}


def _dense_steps(steps: int) -> Any:
    import tf_redsync as rs

    return rs.DenseWarmUp(steps=steps)


def _class_of(name: str) -> Any:
    from tf_redsync.config import registered

    return registered()[name]


def _known(cls: type, **options: Any) -> dict[str, Any]:
    """The given hyper-parameters that a class has."""
    fields = {field.name for field in dataclasses.fields(cls)}
    return {name: value for name, value in options.items() if name in fields}
