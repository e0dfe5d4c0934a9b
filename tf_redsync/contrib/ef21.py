"""EF21: compressed differences between the gradient and its estimate."""

from __future__ import annotations

import dataclasses

import tensorflow as tf
from typing_extensions import override

from tf_redsync import ops
from tf_redsync.config import register
from tf_redsync.exchange import feedback
from tf_redsync.exchange.context import Context
from tf_redsync.exchange.layout import BucketLayout, TensorSpec
from tf_redsync.exchange.method import Exchange, Payloads, State
from tf_redsync.exchange.requests import AllGather, AllReduce
from tf_redsync.exchange.traits import Traits
from tf_redsync.methods.common.sparsifier import Sparsifier, selected_payloads
from tf_redsync.ops import MessageLayout


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class EF21(Sparsifier):
    """EF21: workers send the compressed difference between their gradient and its estimate.

    Peter Richtárik, Igor Sokolov, Ilyas Fatkhullin (2021), "EF21: A New, Simpler, Theoretically
    Better, and Practically Faster Error Feedback", NeurIPS, arXiv 2106.05203.

    On every worker i, with gradient grad_i and its estimate g_i, the sum of all earlier messages.
    g is the sum of the estimates of all workers. Estimates start at 0:

        c_i = C(grad_i - g_i)                           C: the k largest elements of each tensor
        message = [indices of c_i, values of c_i]       one all-gather
        g_i <- g_i + c_i
        g   <- g + sum over workers of c_i
        total = g

    A dense warm-up of `DistributedOptimizer` sets g_i to its last gradient and g to their sum, as
    the paper initialises them.

    There is no residual: the next difference contains the elements that were not sent. Once
    gradients stop changing, the differences converge to 0 and the total to the sum of the
    gradients, whereas a residual would keep changing. The total is dense in every step, so
    optimizers such as Adam see all elements.

    Differences from the paper

    * Totals are sums over workers instead of averages.
    * Every worker keeps g; there is no server. It is summed up in float32, so after a gradient
      10^7 times as large as all others g keeps an error of the others' size.
    * Biases, norms and small tensors are all-reduced densely.

    Resume with the saved parts of all workers. Without those of some ranks, g contains estimates
    that no worker has, and all later totals are wrong by their sum.

    The paper's theory assumes the full gradient of a worker's data. The noise of a mini-batch stays
    in an estimate until the element is sent again, so EF21 needs larger batches than error feedback
    with a residual.

    Args:
        density: Fraction of the elements that is sent, in (0, 1].
        dense_below: Tensors of fewer float32 bytes are all-reduced densely.

    Raises:
        ValueError: If an argument is out of range; the message names it.

    Example:
        >>> EF21(density=0.01).traits.waiting_steps
        1.0
    """

    @property
    @override
    def traits(self) -> Traits:
        return dataclasses.replace(
            super().traits,
            paper="Richtárik, Sokolov, Fatkhullin 2021",
            requests="all-gather of indices and values",
            bits="64 density",
            state_kinds={"estimate": "sum", "total": "shared"},
            # Estimates must equal the sums of the received values
            rounds_values=False,
            # Totals are sums of estimates, and there is no residual
            conserves=False,
            # The total covers all elements in every step
            waiting_steps=1.0,
            sends_selected=False,
        )

    @override
    def describe(self, spec: TensorSpec) -> str:
        return f"changes of {self.k(spec)} elements"

    @override
    def payloads(self, layout: BucketLayout, step: int) -> Payloads:
        return selected_payloads(MessageLayout.of(self.capacities(layout)))

    @override
    def exchange(self, grads: list[tf.Tensor], state: State, ctx: Context) -> Exchange:
        estimates, totals = state["estimate"], state["total"]
        grads = feedback.scaled(grads, ctx.scale)
        selection = ops.accumulate_and_select(
            grads, [-e for e in estimates], [], self.capacities(ctx.layout)
        )
        messages = yield AllGather(selection.message)
        changes = ops.decode(messages, selection.layout, grads)
        # `selection.residuals` are the differences without the elements that are sent.
        sent = [g - e - r for g, e, r in zip(grads, estimates, selection.residuals, strict=True)]
        totals = [t + c for t, c in zip(totals, changes, strict=True)]
        estimates = [e + c for e, c in zip(estimates, sent, strict=True)]
        return totals, {"estimate": estimates, "total": totals}

    @override
    def dense_exchange(self, grads: list[tf.Tensor], state: State, ctx: Context) -> Exchange:
        """All-reduce the gradients, and take them as the new estimates."""
        grads = feedback.scaled(grads, ctx.scale)
        totals = yield AllReduce(grads)
        return totals, {"estimate": list(grads), "total": list(totals)}
