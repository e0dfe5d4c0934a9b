"""Global momentum compression in coded messages."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import tensorflow as tf
from typing_extensions import override

from tf_redsync.config import register
from tf_redsync.exchange.context import Context
from tf_redsync.exchange.layout import BucketLayout
from tf_redsync.exchange.method import Exchange, Payloads, State
from tf_redsync.methods.common.coded_selection import CodedSelection
from tf_redsync.methods.gmc import GlobalMomentum


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class CodedGMC(CodedSelection, GlobalMomentum):
    """Global momentum in coded messages, 0.25 bits per weight at the default density.

    Chang-Wei Shi, Shen-Yi Zhao, Yin-Peng Xie, Hao Gao, Wu-Jun Li (2019), "Global Momentum
    Compression for Sparse Communication in Distributed Learning", arXiv 1905.12948: the momentum.

    Felix Sattler, Simon Wiedemann, Klaus-Robert Müller, Wojciech Samek (2020), "Robust and
    Communication-Efficient Federated Learning from Non-IID Data", IEEE Transactions on Neural
    Networks and Learning Systems, arXiv 1903.02891 ("sparse ternary compression"): the message.

    On every one of K workers, with gradient g, residual v and momentum beta, for each tensor of n
    elements, k = density n:

        v <- v + g / K + (beta / K) before          every worker adds its share of the last update
        S  = the k largest of |v|                   exactly; the lower index among equals
        q  = sign(v[S]) times a mean of |v[S]|      value_bits for each; see `codings.SignedLevels`
        message = [Golomb code of S, means, codes of q]     one all-gather for a bucket of tensors
        v[S] <- v[S] - q                            error feedback
        total = sum over workers of q on S
        before <- total

    Both halves serve accuracy. A position and a bit take an eighth of the bits of index and value,
    so eight times as many elements travel for the same bytes, and wait an eighth as long. And the
    momentum goes through the same selection as the gradients: it is added where something has
    arrived, not to a velocity of every worker's own, which goes on pushing an element that waits,
    and which `masking` then has to cut off. There is no warm-up and no masking to be set.
    docs/accuracy.md has what came of each of these, beside dense training.

    Differences from the papers

    * `GMC` has those from its paper, which hold here too.
    * Sparse ternary compression has no momentum, and compresses what a server sends, too; here all
      workers add up what all have sent.
    * Small tensors are in the message too; see `CodedTopK`, of which that is a part.

    Args:
        density: Fraction of a tensor's elements that is sent, in (0, 1]. A tensor of n elements
            sends k = max(1, round(density n)).
        small_density: The same for small tensors: biases, norms, and those of fewer than
            `dense_below` bytes. No less than `density` in any case. `None` to all-reduce them
            densely, with the same momentum.
        momentum: beta, in [0, 1). The inner optimizer must then have none.
        value_bits: Bits of a value: 1 for a sign, each further one, up to 4, for twice as many
            magnitudes; 16 for bfloat16. At a density of 1 this is sign compression with error
            feedback; dense training is `Dense()`.
        dense_below: Tensors of fewer float32 bytes are small.

    Raises:
        ValueError: for a hyper-parameter out of its range.

    Example:
        >>> import keras, tf_redsync as rs
        >>> optimizer = rs.DistributedOptimizer(
        ...     keras.optimizers.SGD(0.1), rs.CodedGMC(momentum=0.9))
    """

    density: float = 0.03

    paper: ClassVar[str] = "Shi, Zhao, Xie, Gao, Li 2019"
    requests: ClassVar[str] = "all-gather of coded indices and values"
    bits: ClassVar[str] = "density (2 + log2(1 / density) + value_bits)"

    @override
    def payloads(self, layout: BucketLayout, step: int) -> Payloads:
        return self.message_payloads(layout)

    @override
    def exchange(self, grads: list[tf.Tensor], state: State, ctx: Context) -> Exchange:
        totals, selected = yield from self.select_and_deliver(
            grads,
            state["residual"],
            state["before"],
            self.with_dense_totals(ctx),
            momentum=self.share(ctx.layout),
            masking=False,
        )
        return totals, {"residual": selected.residuals, **self.before(totals)}
