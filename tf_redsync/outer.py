"""Outer optimizers: updates of the shared weights after a round of local steps.

Let W be the weights that all workers agree on, and d the mean over the workers of their changes
w - W in a round. The outer optimizer takes a step along d, as if -d were a gradient: DiLoCo's
"outer gradient" (Douillard et al. 2023, arXiv 2311.08105, algorithm 1). Its slots are equal on all
workers and need no communication. Methods with local steps take it as their argument `outer`;
without it, the step is d, which averages the weights.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import tensorflow as tf
from typing_extensions import override

from tf_redsync import checks
from tf_redsync.config import Configurable, imported_only, register

__all__ = ["SGD", "Adam", "KerasSchedule", "Nesterov", "Outer"]

Slots = dict[str, list[tf.Tensor]]


@register
@dataclasses.dataclass(frozen=True)
class KerasSchedule(Configurable):
    """A `LearningRateSchedule` of Keras as JSON, so that it can be compared and saved.

    Args:
        text: The schedule's config as JSON; see `KerasSchedule.of`.

    Raises:
        ValueError: `text` is not such a config.
    """

    text: str

    def __post_init__(self) -> None:
        try:
            config = json.loads(self.text)
            valid = isinstance(config["library"], str) and "class_name" in config["schedule"]
        except (KeyError, RecursionError, TypeError, ValueError):
            valid = False
        if not valid:
            raise ValueError(
                "`text` must be the JSON config of a schedule. Use KerasSchedule.of(schedule). "
                f"Received: text={self.text!r}"
            )

    @classmethod
    def of(cls, schedule: Any) -> KerasSchedule:
        """Convert a schedule.

        Args:
            schedule: A `LearningRateSchedule` of Keras 3 or of tf_keras, of the number of rounds.
                A user's class must be registered by `register_keras_serializable`.

        Raises:
            ValueError: Keras cannot restore the schedule from its config.
        """
        # The schedule may be of the user's own subclass.
        roots = [base.__module__.partition(".")[0] for base in type(schedule).__mro__]
        library = "tf_keras" if "tf_keras" in roots else "keras"
        config = _library(library).optimizers.schedules.serialize(schedule)
        made = cls(json.dumps({"library": library, "schedule": config}, sort_keys=True))
        try:
            made.restore()
        except (TypeError, ValueError) as error:
            name = type(schedule).__name__
            raise ValueError(
                "Keras cannot restore the schedule from its config. Decorate its class with "
                f"@{library}.saving.register_keras_serializable(), and return all arguments of "
                f"its constructor in `get_config`. Received: learning_rate={name}(...)"
            ) from error
        return made

    def restore(self) -> Any:
        """Return the schedule of Keras."""
        config = json.loads(self.text)
        saving = _library(config["library"]).saving
        schedule = imported_only(config["schedule"], saving.get_registered_object)
        return saving.deserialize_keras_object(schedule)

    def __call__(self, step: tf.Tensor) -> tf.Tensor:
        """Return the value at a step, float32 scalar."""
        return tf.cast(self.restore()(step), tf.float32)

    @override
    def __repr__(self) -> str:
        schedule = json.loads(self.text)["schedule"]
        arguments = [
            f"{n}={v!r}" for n, v in (schedule.get("config") or {}).items() if v is not None
        ]
        return f"KerasSchedule({schedule['class_name']}({', '.join(arguments)}))"


def _library(name: str) -> Any:
    if name == "tf_keras":
        import tf_keras

        return tf_keras
    import keras

    return keras


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outer(Configurable):
    """Base of optimizers of the weights that all workers agree on. Frozen, pure.

    Args:
        learning_rate: eta > 0, or a `LearningRateSchedule` of Keras, of the number of rounds.
    """

    learning_rate: Any = 1.0

    def __post_init__(self) -> None:
        rate = self.learning_rate
        if isinstance(rate, KerasSchedule):
            return
        if callable(rate) and hasattr(rate, "get_config") and not isinstance(rate, type):
            object.__setattr__(self, "learning_rate", KerasSchedule.of(rate))
        else:
            checks.positive("learning_rate", rate)

    @property
    def slots(self) -> tuple[str, ...]:
        """Names of the slots: each has a float32 tensor per variable, initially 0."""
        return ()

    def rate(self, rounds: tf.Tensor) -> tf.Tensor | float:
        """Return the learning rate after `rounds` rounds."""
        scheduled = isinstance(self.learning_rate, KerasSchedule)
        return self.learning_rate(rounds) if scheduled else self.learning_rate

    def step(
        self, changes: list[tf.Tensor], slots: Slots, rounds: tf.Tensor
    ) -> tuple[list[tf.Tensor], Slots]:
        """Return the update to add to the weights, and the new slots.

        Args:
            changes: The mean change of each variable over the workers, float32.
            slots: By name, one tensor per variable.
            rounds: int64 scalar, number of rounds before this one.
        """
        raise NotImplementedError


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class SGD(Outer):
    """Gradient descent along the mean change, with momentum in PyTorch's form.

        m <- momentum m + d;   W <- W + eta m           with Nesterov: W <- W + eta (d + momentum m)

    With a rate of 1 and no momentum it averages the weights, as without an outer optimizer.

    Args:
        learning_rate: eta, see `Outer`.
        momentum: In [0, 1).
        nesterov: Whether to use Nesterov momentum. Without momentum it changes nothing.

    Example:
        >>> SGD(learning_rate=0.5).slots
        ()
    """

    momentum: float = 0.0
    nesterov: bool = False

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        checks.real("momentum", self.momentum, low=0.0, high=1.0, high_open=True)
        checks.boolean("nesterov", self.nesterov)

    @property
    @override
    def slots(self) -> tuple[str, ...]:
        return ("momentum",) if self.momentum else ()

    @override
    def step(
        self, changes: list[tf.Tensor], slots: Slots, rounds: tf.Tensor
    ) -> tuple[list[tf.Tensor], Slots]:
        eta = self.rate(rounds)
        if not self.momentum:
            return [eta * d for d in changes], {}
        momenta = [self.momentum * m + d for m, d in zip(slots["momentum"], changes, strict=True)]
        along = momenta
        if self.nesterov:
            along = [d + self.momentum * m for d, m in zip(changes, momenta, strict=True)]
        return [eta * a for a in along], {"momentum": momenta}


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class Nesterov(SGD):
    """`SGD` with Nesterov momentum, the outer optimizer of DiLoCo (section 2: 0.7 and 0.9).

    m <- momentum m + d;   W <- W + eta (d + momentum m)
    """

    learning_rate: Any = 0.7
    momentum: float = 0.9
    nesterov: bool = True


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class Adam(Outer):
    """Adam along the mean change ("FedAdam", Reddi et al. 2021, arXiv 2003.00295, algorithm 2).

        m <- beta_1 m + (1 - beta_1) d;   v <- beta_2 v + (1 - beta_2) d^2
        W <- W + eta (m / (1 - beta_1^t)) / (sqrt(v / (1 - beta_2^t)) + epsilon)

    Difference from the paper: FedAdam has no bias correction.

    Args:
        learning_rate: eta, see `Outer`; about the size of an element's change in a round.
        beta_1: In [0, 1).
        beta_2: In [0, 1).
        epsilon: Above 0; the paper's tau.
    """

    learning_rate: Any = 0.001
    beta_1: float = 0.9
    beta_2: float = 0.99
    epsilon: float = 1e-8

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("beta_1", "beta_2"):
            checks.real(name, getattr(self, name), low=0.0, high=1.0, high_open=True)
        checks.positive("epsilon", self.epsilon)

    @property
    @override
    def slots(self) -> tuple[str, ...]:
        return ("momentum", "velocity")

    @override
    def step(
        self, changes: list[tf.Tensor], slots: Slots, rounds: tf.Tensor
    ) -> tuple[list[tf.Tensor], Slots]:
        t = tf.cast(rounds + 1, tf.float32)
        first, second = 1.0 - self.beta_1**t, 1.0 - self.beta_2**t
        m = [
            self.beta_1 * m + (1.0 - self.beta_1) * d
            for m, d in zip(slots["momentum"], changes, strict=True)
        ]
        v = [
            self.beta_2 * v + (1.0 - self.beta_2) * tf.square(d)
            for v, d in zip(slots["velocity"], changes, strict=True)
        ]
        eta = self.rate(rounds)
        steps = [
            eta * (a / first) / (tf.sqrt(b / second) + self.epsilon)
            for a, b in zip(m, v, strict=True)
        ]
        return steps, {"momentum": m, "velocity": v}


def check(name: str, value: Any) -> None:
    """Check a method's argument `outer`.

    Raises:
        ValueError: it is neither `None` nor an outer optimizer.
    """
    if value is not None and not isinstance(value, Outer):
        raise ValueError(
            f"`{name}` must be None or an optimizer of tf_redsync.outer, such as "
            f"tf_redsync.outer.Nesterov(). Received: {name}={value!r}{checks.class_hint(value)}"
        )
