"""A density that changes in stages during training."""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow as tf
from typing_extensions import override

from tf_redsync import checks
from tf_redsync.config import register
from tf_redsync.exchange.capabilities import Staged
from tf_redsync.exchange.context import Context
from tf_redsync.exchange.layout import BucketLayout, TensorSpec
from tf_redsync.exchange.method import (
    Exchange,
    Method,
    Payloads,
    State,
)
from tf_redsync.exchange.sync_schedule import SyncSchedule
from tf_redsync.exchange.traits import Traits
from tf_redsync.methods.common.momentum_correction import MomentumCorrected
from tf_redsync.methods.common.wrapper import MethodWrapper, innermost
from tf_redsync.methods.redsync import RedSync
from tf_redsync.schedules import DensityStages, ExponentialWarmUp, density_at


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class Scheduled(Staged, MethodWrapper):
    """A wrapper that changes the density of any method in stages.

    With stages that begin at the steps b_0 = 0 < b_1 < ... and have the densities d_0, d_1, ...:

        total, state <- the method's exchange with density d_i, where b_i <= step < b_(i+1)

    Each stage has its own message size and code length, and all workers change the stage at the
    same step. State (residuals, velocities) is kept between stages. A default that depends on the
    density (`masking`) is chosen in each stage. With `ExponentialWarmUp`, all stages use the
    default of the last one.

    Steps are exchanges (rounds with local steps), counted from 0 or from the end of a dense warm-up
    of all methods. Each stage adds an exchange to the traced graph, so use few stages whose
    densities differ by large factors. A factor of 2/3 has little effect on training.

    Args:
        method: A method with a `density`, such as `RedSync`, `CodedTopK`, `TopK` or `SBC`; or
            `Coded` or `HalfPrecision` around one.
        stages: `ExponentialWarmUp(steps_per_stage)`, which ends at the method's density;
            `DensityStages(begins, densities)`, which replaces the method's density; or
            `DensityStages.of(schedule, begins)` for any Keras `LearningRateSchedule`.

    Raises:
        ValueError: If the method has no density, or changes it itself.

    Example:
        >>> import tf_redsync as rs
        >>> stages = rs.DensityStages(begins=(0, 200, 1000), densities=(0.1, 0.03, 0.01))
        >>> rs.Scheduled(method=rs.CodedTopK(momentum=0.9), stages=stages).method.density
        0.01
    """

    method: Method = dataclasses.field(default_factory=RedSync)
    stages: DensityStages | ExponentialWarmUp = dataclasses.field(
        default_factory=lambda: ExponentialWarmUp(1000)
    )

    def __post_init__(self) -> None:
        if not isinstance(self.stages, (DensityStages, ExponentialWarmUp)):
            raise ValueError(
                "`stages` must be DensityStages(begins, densities), DensityStages.of(schedule, "
                f"begins) or ExponentialWarmUp(steps_per_stage). Received: stages={self.stages!r}"
            )
        density = _density(self.method)
        if density is None:
            raise ValueError(
                "`method` must have a density, as RedSync, CodedTopK, TopK, DGC and SBC do, or be "
                "Coded or HalfPrecision around such a method. Received: "
                f"method={self.method!r}{checks.class_hint(self.method)}"
            )
        if self.method.traits.density_changes or self.method.sync_schedule.stages:
            raise ValueError(
                f"`method` must have a constant density. Received: method={self.method!r}. Pass "
                "an ExponentialWarmUp as `stages`, and warm_up=None to the method."
            )
        last = self.stages.stages(density)[-1][1]
        object.__setattr__(self, "method", _replace(self.method, density=last))

    @property
    @override
    def traits(self) -> Traits:
        return dataclasses.replace(
            super().traits,
            paper="-",
            requests="as the method",
            bits="as the method, in each stage",
        )

    @property
    def begins(self) -> tuple[tuple[int, float], ...]:
        """First step and density of each stage."""
        density = _density(self.method)
        assert density is not None
        return self.stages.stages(density)

    @property
    @override
    def sync_schedule(self) -> SyncSchedule:
        begins = tuple(begin for begin, _ in self.begins[1:])
        return dataclasses.replace(self.method.sync_schedule, stages=begins)

    @override
    def at(self, step: int) -> Method:
        method, inner = self.method, innermost(self.method)
        if isinstance(self.stages, ExponentialWarmUp) and isinstance(inner, MomentumCorrected):
            # As in the method itself, the final density decides about masking.
            method = _replace(method, masking=inner.masks)
        return _replace(method, density=density_at(self.begins, step))

    @override
    def describe(self, spec: TensorSpec) -> str:
        (_, first), *others = self.begins
        densities = [f"{first:.4g}", *(f"{d:.4g} from step {begin:,} on" for begin, d in others)]
        return f"{self.method.describe(spec)}; density {', '.join(densities)}"

    @override
    def payloads(self, layout: BucketLayout, step: int) -> Payloads | None:
        return self.at(step).payloads(layout, step)

    @override
    def exchange(self, grads: list[Any], state: State, ctx: Context) -> Exchange:
        """Run the exchange of the stage that `ctx.step`, a static value, is in.

        The sync schedule calls `at` instead.
        """
        step = tf.get_static_value(ctx.step)
        if step is None:
            raise ValueError("`ctx.step` must be static. Run `at(step)` in each stage")
        return (yield from self.at(int(step)).exchange(grads, state, ctx))


def _density(method: Any) -> float | None:
    inner = innermost(method)
    return getattr(inner, "density", None) if isinstance(inner, Method) else None


def _replace(method: Any, **values: Any) -> Any:
    """Return the method with other hyper-parameters; of a wrapper, those of the wrapped method."""
    inner = getattr(method, "method", None)
    if isinstance(inner, Method):
        return dataclasses.replace(method, method=_replace(inner, **values))
    return dataclasses.replace(method, **values)
