"""Random rounding to powers of two."""

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
    """Natural compression: powers of two.

    Samuel Horváth, Chen-Yu Ho, Ľudovít Horváth, Atal Narayan Sahu, Marco Canini, Peter Richtárik
    (2019), "Natural Compression for Distributed Deep Learning", arXiv 1905.10988.

    On every worker, each element t of a gradient becomes one of the two powers of two around it,

        sign(t) 2^floor(log2 |t|)     with probability (2^ceil(log2 |t|) - |t|) / 2^floor(log2 |t|)
        sign(t) 2^ceil(log2 |t|)      else

    which is t on average, with a variance of at most t^2 / 8. In a float32 that is: add 23 random
    bits to the mantissa, and clear it. Sign and exponent are left, 9 bits, and nothing else has to
    be sent: no norm, and no pass over the data to find one.

        total = sum over workers of the powers              one all-gather of 9-bit codes

    Nothing is kept; every worker draws numbers of its own. What is rounded up to 2^128 stops the
    step.

    Differences from the paper

    * Biases, norms and small tensors are all-reduced densely.
    * The sum is not compressed once more on its way back to the workers: there is no server, every
      worker adds up for itself.
    * What is below 2^-126, where float32 has no exponents left, becomes 0 or 2^-126; this too is
      right on average.

    Args:
        seed: Of the rounding; the same on all workers, who draw different numbers even so.
        dense_below: Tensors of fewer float32 bytes are all-reduced densely.

    Raises:
        ValueError: for a hyper-parameter out of its range.

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
            own_stream=self.own_stream(ctx),
            mode="natural",
        )
        return totals, state
