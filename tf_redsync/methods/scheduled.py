"""A density that changes in stages while a model trains."""

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
    """Any method with a density, in stages of other densities.

    With stages that begin at the steps b_0 = 0 < b_1 < ... and have the densities d_0, d_1, ...:

        total, state <- the exchange of the method with density d_i, where b_i <= step < b_(i+1)

    So messages have the size, and codings the length, of the stage, and all workers change at the
    same step. State (residuals, velocities) goes on from stage to stage. What a method decides by
    its density (`masking`) it decides in each stage, but in those of `ExponentialWarmUp`, which are
    masked as the last one is.

    Steps are exchanges, counted from 0, or from the end of a dense warm-up of all methods; with
    local steps they are rounds. Each stage is traced, so use a few, and powers rather than small
    steps: a density that falls to two thirds makes little difference to a training.

    Args:
        method: A method with a `density`, such as `RedSync`, `CodedTopK`, `TopK`, `SBC`; or `Coded`
            or `HalfPrecision` around one.
        stages: `ExponentialWarmUp(steps_per_stage)`, which ends at the method's own density;
            `DensityStages(begins, densities)`, whose last one takes its place, so that the
            method's own does not matter; `DensityStages.of(schedule, begins)` for any
            `LearningRateSchedule` of Keras.

    Raises:
        ValueError: for a method without a density, or with a schedule of its own.

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
                "`method` must have a density, as RedSync, CodedTopK, TopK, DGC or SBC do, or be "
                "Coded or HalfPrecision around one that has. Received: "
                f"method={self.method!r}{checks.if_class(self.method)}"
            )
        if self.method.traits.density_changes or self.method.sync_schedule.stages:
            raise ValueError(
                "`method` must not have a schedule of its own (ExponentialWarmUp). Received: "
                f"method={self.method!r}. Give it warm_up=None, and the schedule to `stages`."
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
        """The step at which each stage begins, and its density."""
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
            # As inside of the method: what the last stage does, all do.
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
        """Of a step that is known: a program runs the exchange of each stage (`at`)."""
        step = tf.get_static_value(ctx.step)
        if step is None:
            raise ValueError("the step must be known: run `at(step)` in each stage")
        return (yield from self.at(int(step)).exchange(grads, state, ctx))


def _density(method: Any) -> float | None:
    inner = innermost(method)
    return getattr(inner, "density", None) if isinstance(inner, Method) else None


def _replace(method: Any, **values: Any) -> Any:
    """A method with other hyper-parameters, or a wrapper around one."""
    inner = getattr(method, "method", None)
    if isinstance(inner, Method):
        return dataclasses.replace(method, method=_replace(inner, **values))
    return dataclasses.replace(method, **values)
