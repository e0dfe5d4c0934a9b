"""Natural compression: stochastic rounding to powers of two."""

from __future__ import annotations

import dataclasses

import tensorflow as tf
from typing_extensions import override

from tf_redsync.config import register
from tf_redsync.exchange import feedback
from tf_redsync.exchange.context import Context
from tf_redsync.exchange.layout import TensorSpec
from tf_redsync.exchange.method import Exchange, State
from tf_redsync.exchange.traits import Traits
from tf_redsync.methods.common.quantizer import StochasticQuantizer, deliver_codes


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class NaturalCompression(StochasticQuantizer):
    """Natural compression: stochastic rounding to powers of two.

    Samuel Horváth, Chen-Yu Ho, Ľudovít Horváth, Atal Narayan Sahu, Marco Canini, Peter Richtárik
    (2019), "Natural Compression for Distributed Deep Learning", arXiv 1905.10988.

    On every worker, each element t of a gradient is rounded to one of the two neighbouring powers
    of two,

        sign(t) 2^floor(log2 |t|)     with probability (2^ceil(log2 |t|) - |t|) / 2^floor(log2 |t|)
        sign(t) 2^ceil(log2 |t|)      else

    which is unbiased with a variance of at most t^2 / 8. In a float32 that is: add 23 random bits
    to the mantissa and clear it. Sign and exponent remain, 9 bits. There is no norm to compute or
    to send.

        total = sum over workers of the powers              one all-gather of 9-bit codes

    The method is stateless. Each worker draws different random numbers. An element that is rounded
    up to 2^128 makes the step non-finite.

    Differences from the paper

    * Biases, norms and small tensors are all-reduced densely.
    * The sum is not compressed again: there is no server, and every worker sums the messages
      itself.
    * Magnitudes below 2^-126, the smallest normal float32, become 0 or 2^-126, which is unbiased
      too.

    Args:
        seed: Seed of the rounding, the same on all workers; each worker draws different numbers.
        dense_below: Tensors of fewer float32 bytes are all-reduced densely.

    Raises:
        ValueError: If an argument is out of range; the message names it.

    Example:
        >>> NaturalCompression().traits.conserves
        False
    """

    @property
    @override
    def traits(self) -> Traits:
        return dataclasses.replace(
            super().traits,
            paper="Horváth, Ho, Horváth, Sahu, Canini, Richtárik 2019",
            bits="9",
        )

    @override
    def describe(self, spec: TensorSpec) -> str:
        return "powers of two, 9 bits"

    @override
    def exchange(self, grads: list[tf.Tensor], state: State, ctx: Context) -> Exchange:
        totals, _ = yield from deliver_codes(
            feedback.scaled(grads, ctx.scale),
            tf.zeros([0]),
            stream=self.worker_stream(ctx),
            mode="natural",
        )
        return totals, state
