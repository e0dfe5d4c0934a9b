"""Top-k with error feedback (memory)."""

from __future__ import annotations

import dataclasses

import tensorflow as tf
from typing_extensions import override

from tf_redsync import checks, ops
from tf_redsync.config import register
from tf_redsync.exchange.context import Context
from tf_redsync.exchange.layout import BucketLayout, TensorSpec
from tf_redsync.exchange.method import Exchange, Payloads, State
from tf_redsync.exchange.traits import Traits
from tf_redsync.methods.common.sparsifier import (
    Sparsifier,
    deliver,
    flat,
    selected_payloads,
    split,
)
from tf_redsync.ops import MessageLayout

SCOPES = ("layer", "model")


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class TopK(Sparsifier):
    """Top-k with memory: send the largest elements, keep the others in the residual.

    Sebastian U. Stich, Jean-Baptiste Cordonnier, Martin Jaggi (2018), "Sparsified SGD with Memory",
    NeurIPS, arXiv 1809.07599. Selection per layer or in the whole model: Negar Foroutan Eghlidi,
    Martin Jaggi (2020), "Sparse Communication for Training Deep Networks", arXiv 2009.09271.

    On every worker, with gradient g and residual v:

        v <- v + g
        S  = the k elements of v with the largest |v|, of each tensor or of the whole model
        message = [indices of S, values v[S]]           one all-gather
        v[S] <- 0
        total = sum over workers of the messages        scatter-add, rank by rank

    Differences from the paper

    * The residual is in units of the gradient, and the optimizer applies the learning rate to the
      total. In Mem-SGD the residual is in units of the update. Both are equal while the learning
      rate is constant.
    * Biases, norms and small tensors are all-reduced densely with scope `"layer"`. Scope `"model"`
      selects from all tensors.

    Args:
        density: Fraction of the elements that is sent, in (0, 1].
        scope: `"layer"` selects in each tensor, `"model"` in all tensors together. `"model"` sends
            more of the gradient's energy, but small layers may stay in the residual for long.
        dense_below: With scope `"layer"`, tensors of fewer float32 bytes are all-reduced densely.

    Raises:
        ValueError: If an argument is out of range; the message names it.
    """

    scope: str = "layer"

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        checks.choice("scope", self.scope, SCOPES)

    @property
    @override
    def traits(self) -> Traits:
        return dataclasses.replace(
            super().traits,
            paper="Stich, Cordonnier, Jaggi 2018",
            requests="all-gather of indices and values",
            bits="64 density",
            whole_model=self.scope == "model",
            # Values in messages are bounded
            totals_may_overflow=False,
        )

    @override
    def refuses(self, spec: TensorSpec) -> str | None:
        return None if self.scope == "model" else super().refuses(spec)

    @override
    def payloads(self, layout: BucketLayout, step: int) -> Payloads:
        return selected_payloads(MessageLayout.of(self.capacities(self._selected_from(layout))))

    def _selected_from(self, layout: BucketLayout) -> BucketLayout:
        """Return the layout to select from; with scope `"model"`, one vector of all tensors."""
        if self.scope != "model":
            return layout
        vector = TensorSpec("model", (sum(s.size for s in layout.specs),))
        return dataclasses.replace(layout, specs=(vector,), sparse_totals=False)

    @override
    def exchange(self, grads: list[tf.Tensor], state: State, ctx: Context) -> Exchange:
        specs, residuals, whole = ctx.layout.specs, state["residual"], self.scope == "model"
        if whole:
            ctx = dataclasses.replace(ctx, layout=self._selected_from(ctx.layout))
            grads, residuals = [flat(grads)], [flat(residuals)]
        k = self.capacities(ctx.layout)
        selection = ops.accumulate_and_select(grads, residuals, [], k, scale=ctx.scale)
        totals, residuals = yield from deliver(ctx, selection)
        if whole:
            totals, residuals = split(totals[0], specs), split(residuals[0], specs)
        return totals, {"residual": residuals}
