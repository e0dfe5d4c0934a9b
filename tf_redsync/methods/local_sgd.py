"""Averaged weights every so many steps, and DiLoCo's step along their mean change."""

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
    """Local SGD: workers train alone for some steps, then their weights are averaged.

    Between two exchanges the workers' weights differ. A round ends early where an epoch ends and
    where an evaluation or saving begins, so that all agree on the weights there; in a custom loop
    call `optimizer.exchange.to_consensus()`.

    Sebastian U. Stich (2019), "Local SGD Converges Fast and Communicates Little", ICLR, arXiv
    1805.09767. H. Brendan McMahan, Eider Moore, Daniel Ramage, Seth Hampson, Blaise Agüera y Arcas
    (2017), "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS.

    With W the weights that all agree on, on every worker, in rounds of `steps` steps:

        w <- W;  in each step: w <- optimizer(w, gradient at w)
        W <- W + mean over workers of (w - W)           one all-reduce

    With an outer optimizer, which then takes a step along that mean, it is `DiLoCo`.

    Differences from the papers

    * All workers take part in every round, with the same number of steps.
    * Any optimizer of Keras does the local steps. Its slots are each worker's own and stay so.

    Args:
        steps: Steps that each worker takes between two exchanges.
        outer: Takes a step along the mean change, an optimizer of `tf_redsync.outer`. `None`: the
            mean change is the step.

    Raises:
        ValueError: for a hyper-parameter out of its range.
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
            # They are what the all-reduce returned
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

    exchange = Method.dense_exchange  # here the gradients are the changes of the weights


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class DiLoCo(LocalSGD):
    """DiLoCo: hundreds of local steps, then a step of an outer optimizer along their mean change.

    Between two exchanges the workers' weights differ. A round ends early where an epoch ends and
    where an evaluation or saving begins, so that all agree on the weights there; in a custom loop
    call `optimizer.exchange.to_consensus()`.

    Arthur Douillard, Qixuan Feng, Andrei A. Rusu, Rachita Chhaparia, Yani Donchev, Adhiguna
    Kuncoro, Marc'Aurelio Ranzato, Arthur Szlam, Jiajun Shen (2023), "DiLoCo: Distributed
    Low-Communication Training of Language Models", arXiv 2311.08105.

    With W the weights that all agree on, on every worker, in rounds of `steps` steps:

        w <- W;  in each step: w <- optimizer(w, gradient at w)     AdamW in the paper
        d = mean over workers of (w - W)                            one all-reduce
        m <- 0.9 m + d;   W <- W + 0.7 (d + 0.9 m)                  `outer`, Nesterov's momentum

    The inner optimizer's slots are each worker's own and are never exchanged; those of the outer
    one are equal on all workers. A single worker trains with the inner optimizer alone.

    Args:
        steps: Steps that each worker takes between two exchanges, H in the paper: 500 there, 15 to
            500 in use.
        outer: The outer optimizer. `None`: the weights are averaged, as by `LocalSGD`.

    Raises:
        ValueError: for a hyper-parameter out of its range.
    """

    steps: int = 500
    outer: Outer | None = Nesterov()

    @property
    @override
    def traits(self) -> Traits:
        return dataclasses.replace(
            super().traits,
            paper="Douillard et al. 2023",
            requests="all-reduce of weights' changes",
            bits="32 / steps",
        )
