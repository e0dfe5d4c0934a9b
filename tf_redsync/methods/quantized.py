"""QSGD and TernGrad: unbiased stochastic quantization to a few bits per element."""

from __future__ import annotations

import dataclasses

import numpy as np
import tensorflow as tf
from typing_extensions import override

from tf_redsync import checks
from tf_redsync.config import register
from tf_redsync.exchange import feedback
from tf_redsync.exchange.context import Context
from tf_redsync.exchange.layout import TensorSpec
from tf_redsync.exchange.method import Exchange, State
from tf_redsync.exchange.traits import Traits
from tf_redsync.methods.common.quantizer import (
    StochasticQuantizer,
    deliver_codes,
    l2_norm,
    largest,
    rms,
)
from tf_redsync.methods.common.ternary_all_reduce import deliver_ternary
from tf_redsync.ops.quantization import bucketed
from tf_redsync.ops.quantized_format import check_bucket_size, check_levels, code_bits

NORMS = ("l2", "max")


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class QSGD(StochasticQuantizer):
    """QSGD: stochastic rounding to a few levels.

    Dan Alistarh, Demjan Grubic, Jerry Li, Ryota Tomioka, Milan Vojnovic (2017), "QSGD:
    Communication-Efficient SGD via Gradient Quantization and Encoding", NeurIPS, arXiv 1610.02132.

    On every worker, with gradient g, in buckets of d elements, with s levels:

        c = ||g||_2, or max |g|
        code = sign(g) s |g| / c, rounded stochastically
        total = sum over workers of c code / s              one all-gather of codes and c

    Stochastic rounding is unbiased, so no residual is needed. The workers' random streams are
    independent, so their errors partly cancel. Rounding adds a variance of at most
    `min(d / s^2, sqrt(d) / s)` times the squared norm.

    Differences from the paper

    * Biases, norms and small tensors are all-reduced densely.
    * Codes have a fixed length; there is no Elias coding.

    Args:
        levels: s, the number of magnitudes besides 0, at most 32767. A code has
            `ceil(log2(2 s + 1))` bits.
        bucket_size: d, the number of elements that share a norm, a multiple of 32; `None`: a whole
            tensor.
        norm: `"l2"`, or `"max"`, for which the largest element of a bucket is exact.
        seed: Seed of the rounding, equal on all workers. Their random streams differ by rank.
        dense_below: Tensors of fewer float32 bytes are all-reduced densely.

    Raises:
        ValueError: If an argument is out of range; the message names it.
    """

    levels: int = 7
    bucket_size: int | None = 512
    norm: str = "l2"

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        check_levels("levels", self.levels)
        if self.bucket_size is not None:
            check_bucket_size(self.bucket_size)
        checks.choice("norm", self.norm, NORMS)

    @property
    @override
    def traits(self) -> Traits:
        return dataclasses.replace(
            super().traits,
            paper="Alistarh, Grubic, Li, Tomioka, Vojnovic 2017",
            requests="all-gather of codes and norms",
            bits="ceil(log2(2 s + 1)) + 32 / d",
        )

    @override
    def describe(self, spec: TensorSpec) -> str:
        share = "one norm" if self.bucket_size is None else f"buckets of {self.bucket_size}"
        return f"{code_bits('stochastic', self.levels)} bits, {share}"

    @override
    def exchange(self, grads: list[tf.Tensor], state: State, ctx: Context) -> Exchange:
        grads = feedback.scaled(grads, ctx.scale)
        rows = [
            bucketed(g, s.size, self.bucket_size)
            for g, s in zip(grads, ctx.layout.specs, strict=True)
        ]
        norms = [largest(r) if self.norm == "max" else l2_norm(r) for r in rows]
        totals, _ = yield from deliver_codes(
            grads,
            tf.concat(norms, axis=0),
            stream=self.worker_stream(ctx),
            mode="stochastic",
            levels=self.levels,
            bucket_size=self.bucket_size,
        )
        return totals, state


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class TernGrad(StochasticQuantizer):
    """TernGrad: stochastic rounding to -1, 0 and 1.

    Wei Wen, Cong Xu, Feng Yan, Chunpeng Wu, Yandan Wang, Yiran Chen, Hai Li (2017), "TernGrad:
    Ternary Gradients to Reduce Communication in Distributed Deep Learning", NeurIPS, arXiv
    1705.07878.

    On every worker, for each tensor g:

        c = min(max |g|, 2.5 sigma)                         gradients are clipped at c
        code = sign(g) with probability |g| / c, else 0
        total = sum over workers of c code                  one all-gather of codes and c

    Stochastic rounding is unbiased, so no residual is needed. The workers' random streams are
    independent, so their errors partly cancel.

    Scaler sharing uses the largest c of all workers, from an all-gather of the scalers. The codes
    are then integers with a common scale, and an all-reduce can sum them as digits of float32
    numbers (`common/ternary_all_reduce.py`). From 5 workers on this sends less than an all-gather
    of 2-bit codes, but it rounds more coarsely.

    Differences from the paper

    * Biases, norms and small tensors are all-reduced densely.
    * sigma is the root mean square, for the mean of zero that the paper assumes. The standard
      deviation of a constant tensor is 0, which would clip it to zero.

    Args:
        clip: Clipping threshold in standard deviations of the tensor; `None`: no clipping.
        shared_scaler: Whether all workers use the largest of their scalers.
        output_layer: Whether to quantize the weights of the output layer. The paper does not.
        seed: Seed of the rounding, equal on all workers. Their random streams differ by rank.
        dense_below: Tensors of fewer float32 bytes are all-reduced densely.

    Raises:
        ValueError: If an argument is out of range; the message names it.
    """

    clip: float | None = 2.5
    shared_scaler: bool = False
    output_layer: bool = False

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        if self.clip is not None:
            checks.real("clip", self.clip, low=0.0, high=np.inf, low_open=True, high_open=True)
        checks.boolean("shared_scaler", self.shared_scaler)
        checks.boolean("output_layer", self.output_layer)

    @property
    @override
    def traits(self) -> Traits:
        return dataclasses.replace(
            super().traits,
            paper="Wen, Xu, Yan, Wu, Wang, Chen, Li 2017",
            requests="all-gather of codes, or of scalers and all-reduce",
            bits="2; shared scaler 32 / floor(log(2^25) / log(2 K + 1))",
        )

    @override
    def refuses(self, spec: TensorSpec) -> str | None:
        if spec.output_layer and not self.output_layer:
            return "output layer"
        return super().refuses(spec)

    @override
    def describe(self, spec: TensorSpec) -> str:
        return "ternary" + (", shared scaler" if self.shared_scaler else "")

    @override
    def exchange(self, grads: list[tf.Tensor], state: State, ctx: Context) -> Exchange:
        grads, stream = feedback.scaled(grads, ctx.scale), self.worker_stream(ctx)
        rows = [tf.reshape(g, [1, -1]) for g in grads]
        scalers = tf.concat([largest(r) for r in rows], axis=0)
        if self.clip is not None:
            limits = [
                self.clip * rms(r, s.size) for r, s in zip(rows, ctx.layout.specs, strict=True)
            ]
            scalers = tf.minimum(scalers, tf.concat(limits, axis=0))
        if not self.shared_scaler:  # quantization clips at the scaler, which is the code 1
            totals, _ = yield from deliver_codes(grads, scalers, stream=stream, mode="stochastic")
            return totals, state

        totals = yield from deliver_ternary(grads, scalers, stream, ctx.layout.workers)
        return totals, state
