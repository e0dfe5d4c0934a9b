"""Local SGD and DiLoCo: local steps, then an average or an outer step."""

from __future__ import annotations

import dataclasses

from typing_extensions import override

from tf_redsync import checks, outer
from tf_redsync.config import register
from tf_redsync.exchange.layout import TensorSpec
from tf_redsync.exchange.method import Method
from tf_redsync.exchange.sync_schedule import SyncSchedule
from tf_redsync.exchange.traits import Traits
from tf_redsync.outer import Nesterov, Outer


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class LocalSGD(Method):
    """Local SGD: workers take local steps, then average their weights.

    Between two exchanges the workers' weights differ. The workers exchange early when an epoch ends
    and before an evaluation or a save, so that they have common weights there. In a custom loop
    call `optimizer.exchange.to_consensus()`.

    Sebastian U. Stich (2019), "Local SGD Converges Fast and Communicates Little", ICLR, arXiv
    1805.09767. H. Brendan McMahan, Eider Moore, Daniel Ramage, Seth Hampson, Blaise Agüera y Arcas
    (2017), "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS.

    With the common weights W, on every worker, in rounds of `steps` steps:

        w <- W;  in each step: w <- optimizer(w, gradient at w)
        W <- W + mean over workers of (w - W)           one all-reduce

    With an outer optimizer, which takes a step along that mean, it is `DiLoCo`.

    Differences from the papers

    * All workers take part in every round, with the same number of steps.
    * Each worker has its own optimizer slots, which are never averaged. So optimizers whose weights
      follow from slots or averages cannot take the local steps: Ftrl, ScheduleFreeAdamW, Addons'
      MovingAverage and SWA, and any with `use_ema`. All others can.
    * Constraints of layers hold after each local step. Common weights, a mean with or without a
      step of the outer optimizer, may violate them: the mean of unit vectors is shorter.

    Args:
        steps: Number of local steps between two exchanges.
        outer: Outer optimizer, which takes a step along the mean change; see `tf_redsync.outer`.
            `None`: the mean change is added to the weights.

    Raises:
        ValueError: If an argument is out of range; the message names it.
    """

    steps: int = 8
    outer: Outer | None = None

    def __post_init__(self) -> None:
        checks.integer("steps", self.steps, low=1)
        outer.check("outer", self.outer)

    @property
    @override
    def traits(self) -> Traits:
        return dataclasses.replace(
            super().traits,
            paper="Stich 2019; McMahan et al. 2017",
            requests="all-reduce of weights' changes",
            bits="32 / steps",
            # Totals are results of the all-reduce
            totals_may_overflow=False,
        )

    @property
    @override
    def sync_schedule(self) -> SyncSchedule:
        return SyncSchedule(local_steps=self.steps, outer=self.outer)

    @property
    def averages_changes(self) -> bool:
        """Whether `exchange` is a plain sum, which wrappers may take over."""
        return type(self).exchange is LocalSGD.exchange

    @override
    def dense(self) -> Method:
        return self

    @override
    def describe(self, spec: TensorSpec) -> str:
        then = "" if self.outer is None else f", then {self.outer!r}"
        return f"all-reduce every {self.steps} steps{then}"

    exchange = Method.dense_exchange  # of weight changes in place of gradients


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class DiLoCo(LocalSGD):
    """DiLoCo: hundreds of local steps, then an outer step along the mean change of the weights.

    Between two exchanges the workers' weights differ. The workers exchange early when an epoch ends
    and before an evaluation or a save, so that they have common weights there. In a custom loop
    call `optimizer.exchange.to_consensus()`.

    Arthur Douillard, Qixuan Feng, Andrei A. Rusu, Rachita Chhaparia, Yani Donchev, Adhiguna
    Kuncoro, Marc'Aurelio Ranzato, Arthur Szlam, Jiajun Shen (2023), "DiLoCo: Distributed
    Low-Communication Training of Language Models", arXiv 2311.08105.

    With the common weights W, on every worker, in rounds of `steps` steps:

        w <- W;  in each step: w <- optimizer(w, gradient at w)     AdamW in the paper
        d = mean over workers of (w - W)                            one all-reduce
        m <- 0.9 m + d;   W <- W + 0.7 (d + 0.9 m)                  `outer`, Nesterov momentum

    Each worker has its own slots of the inner optimizer, which are never exchanged. The slots of
    the outer optimizer are equal on all workers. A single worker uses the inner optimizer only.

    Args:
        steps: Number of local steps between two exchanges, H: 500 in the paper, 15 to 500 in
            practice.
        outer: Outer optimizer. `None`: the weights are averaged, as by `LocalSGD`.

    Raises:
        ValueError: If an argument is out of range; the message names it.
    """

    steps: int = 500
    outer: Outer | None = Nesterov()

    @property
    @override
    def traits(self) -> Traits:
        return dataclasses.replace(super().traits, paper="Douillard et al. 2023")
