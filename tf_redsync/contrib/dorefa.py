"""DoReFa: uniform quantization with additive noise."""

from __future__ import annotations

import dataclasses

import tensorflow as tf
from typing_extensions import override

from tf_redsync import checks
from tf_redsync.config import register
from tf_redsync.exchange import feedback
from tf_redsync.exchange.context import Context
from tf_redsync.exchange.layout import TensorSpec
from tf_redsync.exchange.method import Exchange, State
from tf_redsync.exchange.traits import Traits
from tf_redsync.methods.common.quantizer import StochasticQuantizer, deliver_codes, largest

MOST_BITS = 16


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class DoReFa(StochasticQuantizer):
    """DoReFa: uniform levels from -max to max, with additive noise before rounding.

    Shuchang Zhou, Yuxin Wu, Zekun Ni, Xinyu Zhou, He Wen, Yuheng Zou (2016), "DoReFa-Net: Training
    Low Bitwidth Convolutional Neural Networks with Low Bitwidth Gradients", arXiv 1606.06160,
    section 2.5.

    On every worker, for each tensor g and k bits, with c = max |g| and sigma uniform in [-1/2,
    1/2]:

        x    = g / (2 c) + 1/2 + sigma / (2^k - 1)
        code = round((2^k - 1) x), in [0, 2^k - 1]           all-gather of codes and c
        total = sum over workers of 2 c (code / (2^k - 1) - 1/2)

    Additive uniform noise before rounding is stochastic rounding, so the code is unbiased. The 2^k
    levels do not include 0: a zero becomes one of the two levels next to it.

    Differences from the paper

    * DoReFa quantizes the gradient of each layer's output in the backward pass, with one maximum
      per example, to compute with few bits. Here the weight gradients are quantized the same way,
      with one maximum per tensor, to send few bits.
    * Biases, norms and small tensors are all-reduced densely.
    * A code is rounded up with the probability that the noise would give, by a comparison with a
      uniform number in [0, 1). The distribution is the same.

    Args:
        bitwidth: k, bits per element, in [1, 16].
        seed: Seed of the noise, the same on all workers; each worker draws different numbers.
        dense_below: Tensors of fewer float32 bytes are all-reduced densely.

    Raises:
        ValueError: If an argument is out of range; the message names it.

    Example:
        >>> DoReFa(bitwidth=6).bitwidth
        6
    """

    bitwidth: int = 6

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        checks.integer("bitwidth", self.bitwidth, low=1)
        if self.bitwidth > MOST_BITS:
            raise ValueError(
                f"`bitwidth` must be at most {MOST_BITS}. Received: bitwidth={self.bitwidth}"
            )

    @property
    @override
    def traits(self) -> Traits:
        return dataclasses.replace(
            super().traits,
            paper="Zhou, Wu, Ni, Zhou, Wen, Zou 2016",
            bits="k",
        )

    @override
    def describe(self, spec: TensorSpec) -> str:
        return f"{2**self.bitwidth} levels, {self.bitwidth} bits"

    @override
    def exchange(self, grads: list[tf.Tensor], state: State, ctx: Context) -> Exchange:
        grads = feedback.scaled(grads, ctx.scale)
        maxima = tf.concat([largest(tf.reshape(g, [1, -1])) for g in grads], axis=0)
        totals, _ = yield from deliver_codes(
            grads,
            maxima,
            stream=self.worker_stream(ctx),
            mode="uniform",
            levels=2**self.bitwidth - 1,
        )
        return totals, state
