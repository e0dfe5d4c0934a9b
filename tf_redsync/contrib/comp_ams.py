"""The exchange of COMP-AMS, for the optimizer `AMSGrad`."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import tensorflow as tf
from typing_extensions import override

from tf_redsync import checks
from tf_redsync.config import register
from tf_redsync.exchange.context import Context
from tf_redsync.exchange.layout import TensorSpec
from tf_redsync.exchange.method import Exchange, Method, State
from tf_redsync.methods.common.sparsifier import Sparsifier
from tf_redsync.methods.signs import EFSignSGD
from tf_redsync.methods.topk import TopK

COMPRESSORS = ("top_k", "block_sign")


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class CompAMS(Sparsifier):
    """COMP-AMS: AMSGrad over compressed gradients.

    Xiaoyun Li, Belhal Karimi, Ping Li (2022), "On Distributed Adaptive Optimization with Gradient
    Compression", ICLR, arXiv 2205.05632.

    On every worker, with gradient g, residual e and compressor C, and then on all alike:

        c <- C(g + e),  e <- e + g - c
        G = mean over workers of c
        m <- beta_1 m + (1 - beta_1) G
        v <- beta_2 v + (1 - beta_2) G^2,  h <- max(h, v)
        w <- w - eta m / sqrt(h + epsilon)

    C is top-k, or "block-sign": for each tensor x of d elements, sign(x) ||x||_1 / d.

    This method is the first two lines; the others are `tf_redsync.AMSGrad`, an optimizer for Keras
    3:

        DistributedOptimizer(tf_redsync.AMSGrad(5e-4), tf_redsync.contrib.CompAMS(density=0.01))

    The paper's learning rate is 5e-4 sqrt(workers). Why AMSGrad, what other adaptive optimizers do
    with sparse totals, and which setting came closer to dense training: docs/adaptive.md.

    Differences from the paper

    * The server's part is done by every worker, from the same messages.
    * Biases, norms and small tensors are all-reduced densely.

    Args:
        compressor: `"top_k"` or `"block_sign"`.
        density: With `"top_k"`, fraction of the elements that is sent, in (0, 1].
        dense_below: Tensors of fewer float32 bytes are all-reduced densely.

    Raises:
        ValueError: for a hyper-parameter out of its range.

    Example:
        >>> import tf_redsync as rs
        >>> optimizer = rs.DistributedOptimizer(rs.AMSGrad(5e-4), rs.contrib.CompAMS(density=0.01))
    """

    compressor: str = "top_k"

    paper: ClassVar[str] = "Li, Karimi, Li 2022"
    requests: ClassVar[str] = "all-gather of indices and values, or of signs and scales"
    bits: ClassVar[str] = "64 density; block-sign 1"

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        checks.choice("compressor", self.compressor, COMPRESSORS)

    @property
    @override
    def waiting_steps(self) -> float:
        """Signs of all elements are sent in every step."""
        return super().waiting_steps if self.compressor == "top_k" else 1.0

    @property
    @override
    def rounds_values(self) -> bool:  # type: ignore[override]
        """Whether it sends values and not signs."""
        return self.compressor == "top_k"

    @property
    @override
    def needs_amsgrad(self) -> bool:
        return True

    def compresses_by(self) -> Method:
        """Return the compressor with error feedback, which is a method too."""
        if self.compressor == "top_k":
            return TopK(density=self.density, dense_below=self.dense_below)
        return EFSignSGD(dense_below=self.dense_below)

    @override
    def describe(self, spec: TensorSpec) -> str:
        return self.compressor

    @override
    def exchange(self, grads: list[tf.Tensor], state: State, ctx: Context) -> Exchange:
        return (yield from self.compresses_by().exchange(grads, state, ctx))
