"""Gradient compression of COMP-AMS, for the optimizer `AMSGrad`."""

from __future__ import annotations

import dataclasses

import tensorflow as tf
from typing_extensions import override

from tf_redsync import checks
from tf_redsync.config import register
from tf_redsync.exchange.context import Context
from tf_redsync.exchange.layout import TensorSpec
from tf_redsync.exchange.method import Exchange, Method, State
from tf_redsync.exchange.traits import Traits
from tf_redsync.methods.common.sparsifier import Sparsifier
from tf_redsync.methods.signs import EFSignSGD
from tf_redsync.methods.topk import TopK

COMPRESSORS = ("top_k", "block_sign")


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class CompAMS(Sparsifier):
    """COMP-AMS: AMSGrad on compressed gradients with error feedback.

    Xiaoyun Li, Belhal Karimi, Ping Li (2022), "On Distributed Adaptive Optimization with Gradient
    Compression", ICLR, arXiv 2205.05632.

    On every worker, with gradient g, residual e and compressor C, and then equally on all workers:

        c <- C(g + e),  e <- e + g - c
        G = mean over workers of c
        m <- beta_1 m + (1 - beta_1) G
        v <- beta_2 v + (1 - beta_2) G^2,  h <- max(h, v)
        w <- w - eta m / sqrt(h + epsilon)

    C is top-k, or "block-sign": for each tensor x of d elements, sign(x) ||x||_1 / d.

    This method does the first two lines. `tf_redsync.AMSGrad`, an optimizer for Keras 3, does the
    others:

        DistributedOptimizer(tf_redsync.AMSGrad(5e-4), tf_redsync.contrib.CompAMS(density=0.01))

    The paper's learning rate is 5e-4 sqrt(workers). `AMSGrad(beta_1=0.0)` came closer to dense
    training. docs/adaptive.md has the measurements, and explains how adaptive optimizers behave
    with sparse totals.

    Differences from the paper

    * Every worker computes the server's step itself, from the same messages.
    * Biases, norms and small tensors are all-reduced densely.

    Args:
        compressor: `"top_k"` or `"block_sign"`.
        density: Fraction of the elements that is sent with `"top_k"`, in (0, 1].
        dense_below: Tensors of fewer float32 bytes are all-reduced densely.

    Raises:
        ValueError: If an argument is out of range; the message names it.

    Example:
        >>> import tf_redsync as rs
        >>> optimizer = rs.DistributedOptimizer(rs.AMSGrad(5e-4), rs.contrib.CompAMS(density=0.01))
    """

    compressor: str = "top_k"

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        checks.choice("compressor", self.compressor, COMPRESSORS)

    @property
    @override
    def traits(self) -> Traits:
        return dataclasses.replace(
            super().traits,
            paper="Li, Karimi, Li 2022",
            requests="all-gather of indices and values, or of signs and scales",
            bits="64 density; block-sign 1",
            rounds_values=self.compressor == "top_k",
            # Block-sign sends all elements in every step
            waiting_steps=super().traits.waiting_steps if self.compressor == "top_k" else 1.0,
            sends_selected=self.compressor == "top_k",
            needs_amsgrad=True,
        )

    def inner_method(self) -> Method:
        """Return the method that compresses with error feedback."""
        if self.compressor == "top_k":
            return TopK(density=self.density, dense_below=self.dense_below)
        return EFSignSGD(dense_below=self.dense_below)

    @override
    def describe(self, spec: TensorSpec) -> str:
        return self.compressor

    @override
    def exchange(self, grads: list[tf.Tensor], state: State, ctx: Context) -> Exchange:
        return (yield from self.inner_method().exchange(grads, state, ctx))
