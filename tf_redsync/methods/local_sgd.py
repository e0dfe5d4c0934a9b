"""Averaged weights every so many steps."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from typing_extensions import override

from tf_redsync import checks
from tf_redsync.exchange.layout import TensorSpec
from tf_redsync.methods.base import Method, register
from tf_redsync.methods.common.cadence import Cadence


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

    Differences from the papers

    * All workers take part in every round, with the same number of steps.
    * Any optimizer of Keras does the local steps. Its slots are each worker's own and stay so.

    Args:
        steps: Steps that each worker takes between two exchanges.

    Raises:
        ValueError: for a hyper-parameter out of its range.
    """

    steps: int = 8

    paper: ClassVar[str] = "Stich 2019; McMahan et al. 2017"
    requests: ClassVar[str] = "all-reduce of weights' changes"
    bits: ClassVar[str] = "32 / steps"

    def __post_init__(self) -> None:
        checks.integer("steps", self.steps, low=1)

    @property
    @override
    def cadence(self) -> Cadence:
        return Cadence(local_steps=self.steps)

    @property
    @override
    def totals_may_overflow(self) -> bool:
        """They are what the all-reduce returned."""
        return False

    @override
    def dense(self) -> Method:
        return self

    @override
    def describe(self, spec: TensorSpec) -> str:
        return f"all-reduce every {self.steps} steps"

    exchange = Method.dense_exchange  # here the gradients are the changes of the weights
