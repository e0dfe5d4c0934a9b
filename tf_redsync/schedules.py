"""Warm-up and density schedules.

Steps are exchanges (optimizer steps), counted from 0 and equal on all workers.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from typing_extensions import override

from tf_redsync import checks
from tf_redsync.config import Configurable, register


@register
@dataclasses.dataclass(frozen=True)
class DenseWarmUp(Configurable):
    """Dense all-reduce during the first steps, the warm-up of RedSync.

    RedSync trains its first epochs densely, since a ramp of densities costs more than the dense
    all-reduce once `workers * density` is near 1.

    As an argument of `DistributedOptimizer` it applies to all methods, whose step counts begin at 0
    after it. Some methods have a `warm_up` argument that applies only to their own tensors. See
    docs/warm-up.md.

    Args:
        steps: Number of dense steps, at least 1.
        fraction: Alternative to `steps`, in (0, 1): the fraction of the steps that the first `fit`
            runs, rounded, at least one step. For `DistributedOptimizer` and `OneBitAdam` only. If
            a `train_step` applies the optimizer n times, pass n times the fraction.

    Raises:
        ValueError: neither or both are given, or one is out of range.

    Example:
        >>> DenseWarmUp(steps=100)
        DenseWarmUp(steps=100)
        >>> DenseWarmUp(fraction=0.05)
        DenseWarmUp(fraction=0.05)

    Reference:
        Fang, Fu, Yang, Hsieh (2019), "RedSync", warm-up training.
    """

    steps: int | None = None
    fraction: float | None = None

    def __post_init__(self) -> None:
        if self.fraction is None:
            checks.integer("steps", self.steps, low=1)
            return
        if self.steps is not None:
            raise ValueError(
                "exactly one of `steps` and `fraction` must be given. "
                f"Received: steps={self.steps!r}, fraction={self.fraction!r}"
            )
        bounds: dict[str, Any] = {"low": 0.0, "high": 1.0, "low_open": True, "high_open": True}
        checks.real("fraction", self.fraction, **bounds)

    @override
    def __repr__(self) -> str:
        argument = f"steps={self.steps}" if self.fraction is None else f"fraction={self.fraction}"
        return f"{type(self).__name__}({argument})"

    def length(self, total: int) -> int:
        """Return the number of dense steps of a training of `total` steps."""
        return self.steps or max(1, math.floor((self.fraction or 0.0) * total + 0.5))


@register
@dataclasses.dataclass(frozen=True)
class ExponentialWarmUp(Configurable):
    """Density that decreases in stages to its final value, the warm-up of DGC.

    Args:
        steps_per_stage: Length of a stage in steps, usually one epoch.
        densities: Density of each stage, in (0, 1], non-increasing.

    Example:
        >>> ExponentialWarmUp(steps_per_stage=390).densities
        (0.25, 0.0625, 0.015625, 0.004)

    Reference:
        Lin et al. (2018), "Deep Gradient Compression", section 3.3 (sparsity 75 %, 93.75 %,
        98.44 %, 99.6 %, 99.9 %).
    """

    steps_per_stage: int
    densities: tuple[float, ...] = (0.25, 0.0625, 0.015625, 0.004)

    def __post_init__(self) -> None:
        checks.integer("steps_per_stage", self.steps_per_stage, low=1)
        checks.make_tuple(self, "densities")
        if not self.densities:
            raise ValueError(
                "`densities` must have at least one number in (0, 1]. "
                f"Received: densities={self.densities!r}"
            )
        for value in self.densities:
            checks.real("densities", value, low=0.0, high=1.0, low_open=True)
        if list(self.densities) != sorted(self.densities, reverse=True):
            raise ValueError(
                f"`densities` must be non-increasing. Received: densities={self.densities}"
            )

    def stages(self, final: float) -> tuple[tuple[int, float], ...]:
        """Return the first step and the density of each stage, at least `final`."""
        densities = (*(max(density, final) for density in self.densities), final)
        return tuple((i * self.steps_per_stage, d) for i, d in enumerate(densities))

    def density(self, step: int, final: float) -> float:
        """Return the density at `step`: at least `final`, which it is after the last stage."""
        return density_at(self.stages(final), step)


@register
@dataclasses.dataclass(frozen=True)
class DensityStages(Configurable):
    """Piecewise constant density, for `Scheduled`.

    Args:
        begins: The first step of each stage, increasing from 0.
        densities: The density of each stage, in (0, 1]; the last stage has no end.

    Raises:
        ValueError: a value is out of range, or the tuples differ in length.

    Example:
        >>> DensityStages(begins=(0, 200, 1000), densities=(0.1, 0.03, 0.01)).stages()
        ((0, 0.1), (200, 0.03), (1000, 0.01))
    """

    begins: tuple[int, ...]
    densities: tuple[float, ...]

    def __post_init__(self) -> None:
        checks.make_tuple(self, "begins")
        checks.make_tuple(self, "densities")
        if not self.begins or len(self.begins) != len(self.densities):
            raise ValueError(
                "`begins` and `densities` must be non-empty tuples of the same length: the first "
                f"step and the density of each stage. Received: begins={self.begins!r}, "
                f"densities={self.densities!r}"
            )
        for begin in self.begins:
            checks.integer("begins", begin, low=0)
        if self.begins[0] != 0 or list(self.begins) != sorted(set(self.begins)):
            raise ValueError(f"`begins` must increase from 0. Received: begins={self.begins}")
        for density in self.densities:
            checks.real("densities", density, low=0.0, high=1.0, low_open=True)

    @classmethod
    def of(cls, schedule: Callable[[int], Any], begins: Iterable[int]) -> DensityStages:
        """Sample a schedule, such as one of Keras, at the first step of each stage.

        Args:
            schedule: A function of the step, such as a `LearningRateSchedule` of Keras 3 or
                tf_keras, that returns a density.
            begins: The first step of each stage, from 0, such as `range(0, 2000, 500)`.

        Raises:
            ValueError: `schedule` is not callable, `begins` is not a sequence of integers from 0,
                or a density is not in (0, 1].

        Example:
            >>> import keras
            >>> decay = keras.optimizers.schedules.ExponentialDecay(0.1, 100, 0.5)
            >>> [round(d, 4) for d in DensityStages.of(decay, range(0, 400, 100)).densities]
            [0.1, 0.05, 0.025, 0.0125]
        """
        if not callable(schedule):
            raise ValueError(
                "`schedule` must be a function of the step, such as a LearningRateSchedule of "
                f"Keras. Received: schedule={schedule!r}"
            )
        if not isinstance(begins, Iterable):
            raise ValueError(f"`begins` must be a sequence of steps. Received: begins={begins!r}")
        begins = tuple(begins)
        for begin in begins:
            checks.integer("begins", begin, low=0)
        steps = tuple(map(int, begins))
        return cls(steps, tuple(float(schedule(step)) for step in steps))

    def stages(self, final: float = 0.0) -> tuple[tuple[int, float], ...]:
        """Return the first step and the density of each stage; `final` is not used."""
        del final
        return tuple(zip(self.begins, self.densities, strict=True))


def density_at(stages: Sequence[tuple[int, float]], step: int) -> float:
    """Return the density of the stage that a step is in."""
    return [density for begin, density in stages if begin <= step][-1]


def check_warm_up(warm_up: Any, *kinds: type) -> None:
    """Check a method's `warm_up`.

    Raises:
        ValueError: it is neither `None` nor an instance of `kinds`, or it is a fraction.
    """
    if warm_up is not None and not isinstance(warm_up, kinds):
        *others, last = ["None", *(f"{kind.__name__}(...)" for kind in kinds)]
        raise ValueError(
            f"`warm_up` must be {', '.join(others)} or {last}. Received: warm_up={warm_up!r}"
        )
    if isinstance(warm_up, DenseWarmUp) and warm_up.steps is None:
        raise ValueError(
            "`warm_up` of a method must be a number of steps: a method does not know how many "
            f"steps `fit` runs. Received: warm_up={warm_up!r}. Use DenseWarmUp(steps=...), or "
            f"DistributedOptimizer(optimizer, method, warm_up={warm_up!r})."
        )


def dense_steps(warm_up: Any) -> int:
    """Return the number of dense steps in a method's `warm_up`."""
    return warm_up.steps or 0 if isinstance(warm_up, DenseWarmUp) else 0
