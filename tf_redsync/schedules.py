"""Warm-up: how the density falls, or how long the exchange stays dense, at the start of training.

Steps are exchanges (optimizer steps), counted from 0 and the same on all workers.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from tf_redsync import checks
from tf_redsync.methods.base import Configurable, register


@register
@dataclasses.dataclass(frozen=True)
class DenseWarmUp(Configurable):
    """Dense all-reduce during the first steps, RedSync's own warm-up.

    RedSync trains its first epochs densely, since a ramp of densities costs more than the dense
    all-reduce once `workers * density` is near 1.

    Args:
        steps: Number of dense steps, at least 1.

    Example:
        >>> DenseWarmUp(steps=100)
        DenseWarmUp(steps=100)

    Reference:
        Fang, Fu, Yang, Hsieh (2019), "RedSync", warm-up training.
    """

    steps: int

    def __post_init__(self) -> None:
        checks.integer("steps", self.steps, low=1)


@register
@dataclasses.dataclass(frozen=True)
class ExponentialWarmUp(Configurable):
    """Density that falls stage by stage to its final value, DGC's warm-up.

    Args:
        steps_per_stage: Length of a stage in steps, usually one epoch.
        densities: Density of each stage, in (0, 1], not rising.

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
        if not isinstance(self.densities, tuple) or not self.densities:
            raise ValueError(
                "`densities` must be a tuple of numbers in (0, 1]. "
                f"Received: densities={self.densities!r}"
            )
        for value in self.densities:
            checks.real("densities", value, low=0.0, high=1.0, low_open=True)
        if list(self.densities) != sorted(self.densities, reverse=True):
            raise ValueError(f"`densities` must not rise. Received: densities={self.densities}")

    def density(self, step: int, final: float) -> float:
        """Return the density at `step`: `final` after the last stage, and never less than it."""
        stage = min(step // self.steps_per_stage, len(self.densities))
        return max((*self.densities, final)[stage], final)


def check_warm_up(warm_up: Any, *kinds: type) -> None:
    """Check a method's `warm_up`.

    Raises:
        ValueError: unless it is `None` or of one of `kinds`.
    """
    if warm_up is not None and not isinstance(warm_up, kinds):
        *others, last = ["None", *(f"{kind.__name__}(...)" for kind in kinds)]
        raise ValueError(
            f"`warm_up` must be {', '.join(others)} or {last}. Received: warm_up={warm_up!r}"
        )
