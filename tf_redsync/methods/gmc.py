"""GMC and CodedGMC: sparse communication with a global momentum."""

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
class _GlobalMomentum(MomentumInExchange, Sparsifier):
    """A sparsifier with global momentum: K workers each add `beta / K` times the last total.

    Args:
        momentum: beta, in [0, 1). The inner optimizer must then have none.
    """

    momentum: float = 0.9

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        checks.momentum(self.momentum, False)

    @override
    def dense(self) -> Method:
        """Return `Dense` with the same momentum.

        Without a residual, global momentum is heavy-ball momentum of the total.
        """
        return Dense(momentum=self.momentum)

    def worker_momentum(self, layout: BucketLayout) -> float:
        """Return beta / K, each worker's factor of the last total."""
        return self.momentum / layout.workers


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class GMC(_GlobalMomentum):
    """Global momentum compression: a sparsifier with one momentum for all workers.

    Chang-Wei Shi, Shen-Yi Zhao, Yin-Peng Xie, Hao Gao, Wu-Jun Li (2019), "Global Momentum
    Compression for Sparse Communication in Distributed Learning", arXiv 1905.12948.

    With momentum correction, each worker has a velocity that depends on its own data. Here all
    workers add the same momentum, that of the last update, which needs no communication. In the
    paper's units, updates, with learning rate eta, K workers, weights w, residual e and momentum
    beta:

        a <- e + eta g(w) + beta d              d: last update
        c <- C(a)                               top-k, or the same random block on all workers
        e <- a - c
        d <- mean over workers of c,  w <- w - d

    The compressor C commutes with scaling. Divided by K eta, the steps are those of this method.
    Its workers receive g / K, and the inner optimizer, SGD without momentum, applies eta:

        a <- v + g / K + (beta / K) total       v = e / (K eta);  total of the last step
        c <- C(a),  v <- a - c
        total <- sum over workers of c          an all-gather (top-k) or all-reduce

    Differences from the paper

    * Both forms are equal while the learning rate is constant. If it changes from eta to eta',
      residual and momentum are scaled by eta' / eta here, as in SGD with a momentum of gradients.
      In the paper's form they are still scaled by eta.
    * The inner optimizer applies weight decay, outside of the residual.
    * With random blocks GMC needs a small learning rate. Use `GMCPlus` instead.

    Args:
        density: Fraction of the elements that is sent, in (0, 1].
        momentum: beta, in [0, 1). The inner optimizer must then have none.
        selection: `"top_k"`, or `"random_block"`: the same contiguous elements on all workers.
        seed: Seed of the blocks, equal on all workers.
        dense_below: Tensors of fewer float32 bytes are all-reduced densely, with the same momentum.

    Raises:
        ValueError: If an argument is out of range; the message names it.
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
            state_kinds={"residual": "sum", "before": "shared"},
            # Block sums come from the all-reduce, and messages have bounded values
            totals_may_overflow=False,
            sends_selected=self.selection == "top_k",
        )

    @override
    def describe(self, spec: TensorSpec) -> str:
        return f"{self.selection}, {self.k(spec)} elements"

    @override
    def init(self, layout: BucketLayout) -> State:
        zeros = [tf.zeros(s.shape, tf.float32) for s in layout.specs]
        return {"residual": zeros, "before": list(zeros) if self.momentum else []}

    @override
    def dense_exchange(self, grads: list[tf.Tensor], state: State, ctx: Context) -> Exchange:
        """All-reduce gradients with global momentum; the residual is unchanged."""
        grads = self.with_momentum(ctx.layout, feedback.scaled(grads, ctx.scale), state)
        totals = yield AllReduce(grads)
        return totals, {**state, **self.momentum_state(totals)}

    def with_momentum(
        self, layout: BucketLayout, grads: list[tf.Tensor], state: State
    ) -> list[tf.Tensor]:
        """Return this worker's gradients plus its part of the global momentum."""
        momentum = self.worker_momentum(layout)
        return feedback.momentum_step(grads, state["before"], momentum, nesterov=False)[0]

    def momentum_state(self, totals: list[tf.Tensor]) -> State:
        """Return the state that the next step's momentum needs."""
        return {"before": list(totals) if self.momentum else []}

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
        """Return totals and residuals; the op receives the last total as its velocity."""
        selection = ops.accumulate_and_select(
            grads,
            state["residual"],
            state["before"],
            self.capacities(ctx.layout),
            selectors="exact",
            momentum=self.worker_momentum(ctx.layout),
            keep_velocities=False,
            scale=ctx.scale,
        )
        # Dense totals, because the next step adds them as momentum.
        layout = dataclasses.replace(ctx.layout, sparse_totals=False)
        return (yield from deliver(dataclasses.replace(ctx, layout=layout), selection))


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class CodedGMC(_GlobalMomentum, CodedSelection):
    """Global momentum in coded messages, 0.25 bits per weight at the default density.

    Chang-Wei Shi, Shen-Yi Zhao, Yin-Peng Xie, Hao Gao, Wu-Jun Li (2019), "Global Momentum
    Compression for Sparse Communication in Distributed Learning", arXiv 1905.12948, for the
    momentum.

    Felix Sattler, Simon Wiedemann, Klaus-Robert Müller, Wojciech Samek (2020), "Robust and
    Communication-Efficient Federated Learning from Non-IID Data", IEEE Transactions on Neural
    Networks and Learning Systems, arXiv 1903.02891 ("sparse ternary compression"), for the message.

    On every one of K workers, with gradient g, residual v and momentum beta, for each tensor of n
    elements, k = density n:

        v <- v + g
        S  = the k largest of |v|                   exactly; the lower index among equals
        q  = sign(v[S]) times a mean of |v[S]|      value_bits each; see `codings.SignedLevels`
        message = [Golomb code of S, means, codes of q]     one all-gather per bucket of tensors
        v[S] <- v[S] - q                            error feedback
        total = sum over workers of q on S
        v <- v + (beta / K) total                   the next step's momentum

    g is the gradient that the exchange receives, already divided by K. The last line is GMC's
    `(beta / K) total`, added at the end of a step instead of at the start of the next one. So the
    residual is the only state, and `flush` delivers the momentum as well. A dense step, such as
    the first one after `disable()`, delivers the whole residual.

    Both parts improve accuracy. A coded position and value take an eighth of the bits of a 32-bit
    index and value. So the same bytes hold eight times as many elements, and an element stays in
    the residual an eighth as long. The momentum passes through the same selection as the gradients.
    With momentum correction, in contrast, the velocity of an unsent element keeps accumulating
    until `masking` clears it. CodedGMC needs neither masking nor a warm-up. docs/accuracy.md
    compares both parts with dense training.

    Differences from the papers

    * Those of `GMC`.
    * Sparse ternary compression has no momentum, and a server compresses the sum again. Here every
      worker sums the messages of all workers.
    * Small tensors share the coded message, as in `CodedTopK`.

    Args:
        density: Fraction of a tensor's elements that is sent, in (0, 1]. A tensor of n elements
            sends k = max(1, round(density n)).
        small_density: Density of small tensors: biases, norms, and tensors of fewer than
            `dense_below` bytes. At least `density` is used. `None`: all-reduce them densely, with
            the same momentum.
        momentum: beta, in [0, 1). The inner optimizer must then have none.
        value_bits: Bits per value. 1 is a sign, 2 to 4 add one of 2, 4 or 8 magnitudes, and 16 is
            bfloat16. At a density of 1 this is sign compression with error feedback; use `Dense()`
            for dense training.
        dense_below: Tensors of fewer float32 bytes are small.

    Raises:
        ValueError: If an argument is out of range; the message names it.

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
            dense_delivers=True,
            totals_may_overflow=False,  # the values of a message are bounded
        )

    @override
    def dense_exchange(self, grads: list[tf.Tensor], state: State, ctx: Context) -> Exchange:
        """All-reduce gradients and residuals; only the momentum stays."""
        scaled = feedback.scaled(grads, ctx.scale)
        sums = [g + v for g, v in zip(scaled, state["residual"], strict=True)]
        totals = yield AllReduce(sums)
        return totals, {"residual": [self.worker_momentum(ctx.layout) * t for t in totals]}

    @override
    def payloads(self, layout: BucketLayout, step: int) -> Payloads:
        return self.message_payloads(layout)

    @override
    def exchange(self, grads: list[tf.Tensor], state: State, ctx: Context) -> Exchange:
        totals, selected = yield from self.select_and_deliver(
            grads, state["residual"], [], ctx, total_momentum=self.worker_momentum(ctx.layout)
        )
        return totals, {"residual": selected.residuals}
