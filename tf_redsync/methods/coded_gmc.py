"""Global momentum compression in coded messages."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import tensorflow as tf
from typing_extensions import override

from tf_redsync.methods.base import Context, Exchange, State, register
from tf_redsync.methods.common.coded_selection import CodedSelection
from tf_redsync.methods.gmc import GlobalMomentum


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class CodedGMC(CodedSelection, GlobalMomentum):
    """Global momentum and coded messages."""

    paper: ClassVar[str] = "Shi, Zhao, Xie, Gao, Li 2019"
    requests: ClassVar[str] = "all-gather of coded indices and values"
    bits: ClassVar[str] = "density (2 + log2(1 / density) + value_bits)"

    @override
    def exchange(self, grads: list[tf.Tensor], state: State, ctx: Context) -> Exchange:
        # The next step's momentum needs the total in its dense form.
        dense_layout = dataclasses.replace(ctx.layout, sparse_totals=False)
        totals, selected = yield from self.select_and_deliver(
            grads,
            state["residual"],
            state["before"],
            dataclasses.replace(ctx, layout=dense_layout),
            momentum=self.share(ctx.layout),
            masking=False,
        )
        return totals, {"residual": selected.residuals, **self.before(totals)}
