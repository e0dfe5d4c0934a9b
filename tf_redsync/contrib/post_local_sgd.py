"""Post-local SGD: synchronous steps, followed by local SGD."""

from __future__ import annotations

import dataclasses

from typing_extensions import override

from tf_redsync import checks
from tf_redsync.config import register
from tf_redsync.exchange.capabilities import DenseStart
from tf_redsync.exchange.layout import TensorSpec
from tf_redsync.exchange.traits import Traits
from tf_redsync.methods.local_sgd import LocalSGD
from tf_redsync.schedules import DenseWarmUp


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class PostLocalSGD(DenseStart, LocalSGD):
    """Post-local SGD: synchronous steps, followed by local SGD.

    Tao Lin, Sebastian U. Stich, Kumar Kshitij Patel, Martin Jaggi (2020), "Don't Use Large
    Mini-Batches, Use Local SGD", ICLR, arXiv 1808.07217, section 3, where the first decay of the
    learning rate ends the synchronous phase.

        steps before `start`:   W <- optimizer(W, mean gradient)        the same on all workers
        from `start` on:         as `LocalSGD`

    It equals `LocalSGD` with `warm_up=DenseWarmUp(steps=start)` of `DistributedOptimizer`, which
    rejects a second warm-up. With an outer optimizer it is `DiLoCo` after synchronous steps.

    Args:
        start: Number of synchronous steps at the start, at least 1. A value below 1 is a fraction
            of the steps that the first `fit` runs, see `DenseWarmUp`.
        steps: Local steps of each worker between two exchanges after `start`.
        outer: Outer optimizer, see `LocalSGD`.

    Raises:
        ValueError: If an argument is out of range; the message names it.
    """

    start: int | float = 1000

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        checks.steps_or_fraction("start", self.start)

    @property
    @override
    def traits(self) -> Traits:
        return dataclasses.replace(super().traits, paper="Lin, Stich, Patel, Jaggi 2020")

    @property
    @override
    def dense_start(self) -> DenseWarmUp:
        if self.start < 1:
            return DenseWarmUp(fraction=self.start)
        return DenseWarmUp(steps=int(self.start))

    @override
    def describe(self, spec: TensorSpec) -> str:
        first = f"{self.start} steps" if self.start >= 1 else f"{self.start:.4g} of `fit`"
        return f"all-reduce in {first}, then {super().describe(spec)}"
