"""GMC, GMC+ and CodedGMC: sparse communication with one global momentum."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator
from typing import Any

import tensorflow as tf
from typing_extensions import override

from tf_redsync import checks, ops
from tf_redsync.config import register
from tf_redsync.exchange import feedback
from tf_redsync.exchange.context import Context
from tf_redsync.exchange.layout import BucketLayout, TensorSpec
from tf_redsync.exchange.method import Exchange, Method, Payloads, State
from tf_redsync.exchange.requests import AllReduce, Request
from tf_redsync.exchange.traits import Traits
from tf_redsync.methods.common.coded_selection import CodedSelection
from tf_redsync.methods.common.sparsifier import Sparsifier, deliver
from tf_redsync.methods.dense import Dense, MomentumInExchange
from tf_redsync.methods.random_sparse import RandomBlock

SELECTIONS = ("top_k", "random_block")


@dataclasses.dataclass(frozen=True, kw_only=True)
class GlobalMomentum(MomentumInExchange, Sparsifier):
    """A sparsifier of which every worker adds its share of one momentum, the last total's.

    Args:
        density: Fraction of the elements that is sent, in (0, 1].
        momentum: beta, in [0, 1). The inner optimizer must then have none.
        dense_below: Tensors of fewer float32 bytes are small.
    """

    momentum: float = 0.9

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        checks.momentum(self.momentum, False)

    @property
    @override
    def traits(self) -> Traits:
        return dataclasses.replace(
            super().traits, state_kinds={"residual": "sum", "before": "shared"}
        )

    @override
    def dense(self) -> Method:
        """Nothing held back, global momentum is SGD's."""
        return Dense(momentum=self.momentum)

    @override
    def init(self, layout: BucketLayout) -> State:
        zeros = [tf.zeros(s.shape, tf.float32) for s in layout.specs]
        return {"residual": zeros, "before": list(zeros) if self.momentum else []}

    @override
    def dense_exchange(self, grads: list[tf.Tensor], state: State, ctx: Context) -> Exchange:
        """All-reduce with the momentum of the total; the residual waits."""
        grads = self.with_momentum(ctx.layout, feedback.scaled(grads, ctx.scale), state)
        totals = yield AllReduce(grads)
        return totals, {**state, **self.momentum_state(totals)}

    def worker_momentum(self, layout: BucketLayout) -> float:
        """Return by what this worker multiplies the last total: beta / K."""
        return self.momentum / layout.workers

    def with_momentum(
        self, layout: BucketLayout, grads: list[tf.Tensor], state: State
    ) -> list[tf.Tensor]:
        """Return this worker's gradients, and its share of the momentum."""
        momentum = self.worker_momentum(layout)
        return feedback.momentum_step(grads, state["before"], momentum, nesterov=False)[0]

    def with_dense_totals(self, ctx: Context) -> Context:
        """Return a context whose totals are dense, as the next step's momentum needs them."""
        return dataclasses.replace(ctx, layout=dataclasses.replace(ctx.layout, sparse_totals=False))

    def momentum_state(self, totals: list[tf.Tensor]) -> State:
        """Return what the next step needs of the totals."""
        return {"before": list(totals) if self.momentum else []}


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class GMC(GlobalMomentum):
    """Global momentum compression: a sparsifier with one momentum for all workers.

    Chang-Wei Shi, Shen-Yi Zhao, Yin-Peng Xie, Hao Gao, Wu-Jun Li (2019), "Global Momentum
    Compression for Sparse Communication in Distributed Learning", arXiv 1905.12948.

    Other sparsifiers with momentum keep a velocity on every worker, which follows that worker's own
    data. Here all workers add the same momentum, the last update, and it costs no communication. In
    the paper's units, updates, with learning rate eta, K workers, weights w, residual e and
    momentum beta:

        a <- e + eta g(w) + beta before
        c <- C(a)                               top-k, or a random block that all workers share
        e <- a - c
        before <- mean over workers of c,  w <- w - before

    Divided by K eta, which the compressor C lets pass, this is what a worker does here. It gets
    g / K and leaves the learning rate to the inner optimizer, SGD without momentum:

        a <- v + g / K + (beta / K) before      v = e / (K eta)
        c <- C(a),  v <- a - c
        total <- sum over workers of c          an all-gather (top-k) or all-reduce
        before <- total

    Differences from the paper

    * The two forms are the same as long as the learning rate is constant. If it changes from eta to
      eta', residual and momentum shrink by eta' / eta here, as in SGD with a momentum of gradients;
      in the paper's form they keep the size of the old rate.
    * Weight decay is the inner optimizer's, outside of the residual.
    * With random blocks GMC needs a small learning rate: use `GMCPlus`.

    Args:
        density: Fraction of the elements that is sent, in (0, 1].
        momentum: beta, in [0, 1). The inner optimizer must then have none.
        selection: `"top_k"`, or `"random_block"`: the same elements in a row on all workers.
        seed: Of the blocks; the same on all workers.
        dense_below: Tensors of fewer float32 bytes are all-reduced densely, with the same momentum.

    Raises:
        ValueError: for a hyper-parameter out of its range.
    """

    selection: str = "top_k"
    seed: int = 0

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        checks.choice("selection", self.selection, SELECTIONS)
        checks.integer("seed", self.seed, low=0)

    @property
    @override
    def traits(self) -> Traits:
        return dataclasses.replace(
            super().traits,
            paper="Shi, Zhao, Xie, Gao, Li 2019",
            requests="all-gather of indices and values; blocks: all-reduce of values",
            bits="64 density; blocks 32 density",
            sends_selected=self.selection == "top_k",
        )

    @override
    def describe(self, spec: TensorSpec) -> str:
        return f"{self.selection}, {self.k(spec)} elements"

    @override
    def exchange(self, grads: list[tf.Tensor], state: State, ctx: Context) -> Exchange:
        if self.selection == "top_k":
            totals, residuals = yield from self._top_k(grads, state, ctx)
        else:
            grads = self.with_momentum(ctx.layout, feedback.scaled(grads, ctx.scale), state)
            block = RandomBlock(density=self.density, seed=self.seed)
            totals, new_state = yield from block.exchange(
                grads, state, dataclasses.replace(ctx, scale=None)
            )
            residuals = new_state["residual"]
        return totals, {"residual": residuals, **self.momentum_state(totals)}

    def _top_k(
        self, grads: list[tf.Tensor], state: State, ctx: Context
    ) -> Generator[Request, Any, tuple[list[tf.Tensor], list[tf.Tensor]]]:
        """Totals and residuals. The op's velocity is the last total, which it need not return."""
        selection = ops.accumulate_and_select(
            grads,
            state["residual"],
            state["before"],
            self.counts(ctx.layout),
            selectors="exact",
            momentum=self.worker_momentum(ctx.layout),
            masking=False,
            scale=ctx.scale,
        )
        return (yield from deliver(self.with_dense_totals(ctx), selection))


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

    @property
    @override
    def traits(self) -> Traits:
        return dataclasses.replace(
            super().traits,
            paper="Shi, Zhao, Xie, Gao, Li 2019",
            requests="all-gather of coded indices and values",
            bits="density (2 + log2(1 / density) + value_bits)",
        )

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
            momentum=self.worker_momentum(ctx.layout),
            masking=False,
        )
        return totals, {"residual": selected.residuals, **self.momentum_state(totals)}
