"""An all-reduce in every step at first, and local SGD after it."""

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
    """Post-local SGD: an all-reduce in every step at first, and local SGD after it.

    Tao Lin, Sebastian U. Stich, Kumar Kshitij Patel, Martin Jaggi (2020), "Don't Use Large
    Mini-Batches, Use Local SGD", ICLR, arXiv 1808.07217, section 3 (there the learning rate's first
    fall ends the first part).

        steps before `start`:   W <- optimizer(W, mean gradient)        the same on all workers
        after it:               as `LocalSGD`

    It is `LocalSGD` with `warm_up=DenseWarmUp(steps=start)` of `DistributedOptimizer`, which then
    must not have another one. With an outer optimizer it is how DiLoCo begins where its workers
    start from a model that was trained for a while.

    Args:
        start: Number of the first steps that are synchronous, at least 1; below 1 this fraction of
            the steps that the first `fit` runs, see `DenseWarmUp`.
        steps: Steps that each worker takes between two exchanges after them.
        outer: See `LocalSGD`.

    Raises:
        ValueError: for a hyper-parameter out of its range.
    """

    start: int | float = 1000

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        checks.steps_or_fraction("start", self.start)

    @property
    @override
    def traits(self) -> Traits:
        return dataclasses.replace(
            super().traits,
            paper="Lin, Stich, Patel, Jaggi 2020",
            requests="all-reduce of weights' changes",
            bits="32 / steps",
        )

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
