"""Uniform levels in a short code."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import tensorflow as tf
from typing_extensions import override

from tf_redsync import checks
from tf_redsync.config import register
from tf_redsync.contrib.common.decoded_sums import added_up, spread
from tf_redsync.exchange import feedback
from tf_redsync.exchange.context import Context
from tf_redsync.exchange.layout import TensorSpec
from tf_redsync.exchange.method import Exchange, State
from tf_redsync.exchange.requests import AllGather
from tf_redsync.exchange.traits import Traits
from tf_redsync.methods.common.quantizer import Quantizer, l2_norm
from tf_redsync.methods.common.sparsifier import flat, split
from tf_redsync.ops import wire
from tf_redsync.ops.rice import rice_decode, rice_encode

SLACK = 1.0001  # of the bound, for float32
MOST_BITS = 2**31 - 1  # places in a bitmap are int32
TINY = float(np.finfo(np.float32).tiny)  # norms below have too few digits for the bound


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class SparseDithering(Quantizer):
    """Sparse dithering: uniform levels whose code is short because vectors have a norm.

    Alyazeed Albasyoni, Mher Safaryan, Laurent Condat, Peter Richtárik (2020), "Optimal Gradient
    Compression for Distributed and Federated Learning", arXiv 2010.03246.

    No code of b bits an element leaves less than alpha = 4^-b of every vector's squared norm: a
    tenth takes 1.66 bits. Uniform levels come close. On every worker, for each tensor of d
    elements, with gradient g and residual e:

        p   = g + e
        u   = p / ||p||,  h = sqrt(alpha / d)
        k_j = |u_j| / (2 h), rounded,  s_j = sign(u_j)                 levels 2 h apart
        c   = <p, s k> / ||s k||^2
        all-gather of c and of the code of s k                         what all decode: c s k
        total = sum over workers of c s k
        e   = p - c s k

    ||p - c s k||^2 <= alpha ||p||^2: no |u_j| is further than h from 2 h k_j, which makes alpha in
    all, and the best factor c of s k, which is sent in the place of the norm, is no worse than 2 h
    ||p||. Of a normal vector about alpha / 3 is left.

    The code is short as levels cannot be large everywhere. Let n be the number of levels that are
    not 0. For those k_j <= |u_j| / (2 h) + 1/2, and their |u_j| add up to at most sqrt(n), so that

        sum k_j <= sqrt(n d / alpha) / 2 + n / 2

    The zigzag number of s_j k_j is z = 2 k_j if s_j > 0, else 2 k_j - 1. Rice's code of z takes its
    low r bits as they are and z >> r zeros with a one at their end. With c negated if need be, at
    least half of the n signs are negative, and for r >= 1

        sum (z >> r) <= (sum k_j - n / 2) / 2^(r - 1) <= d / (2^r sqrt(alpha))

    So r + 1 + 2^-r / sqrt(alpha) bits an element are enough for every vector: 3.58 at alpha = 0.1,
    where r = 1, of which a normal vector fills 2.88. A message of that length holds the low bits,
    and the ones and zeros as a bitmap, of all tensors of a bucket together.

    Differences from the paper

    * The paper counts the vectors (n, places, signs, and levels of a bounded sum) and gives each
      its number: about 3.35 bits an element at alpha = 0.1. Such numbers have d digits; this code
      can be written and read in parallel. Entropy codes would have a varying length, which messages
      here cannot have.
    * The factor c takes the place of the paper's gamma ||p|| 2 h, gamma being a constant.
    * Only the deterministic form: it is biased, so there is error feedback. Biases, norms and small
      tensors are all-reduced densely.

    Args:
        alpha: Bound of the squared error, relative to the squared norm, in [1e-6, 1).
        dense_below: Tensors of fewer float32 bytes are all-reduced densely.

    Raises:
        ValueError: for a hyper-parameter out of its range.

    Example:
        >>> SparseDithering(alpha=0.1).describe(TensorSpec("w", (100, 100)))
        '3.58 bits, error at most 10 %'
    """

    alpha: float = 0.1

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        checks.real("alpha", self.alpha, low=1e-6, high=1.0, high_open=True)

    @property
    @override
    def traits(self) -> Traits:
        return dataclasses.replace(
            super().traits,
            paper="Albasyoni, Safaryan, Condat, Richtárik 2020",
            requests="all-gather of factors and codes",
            bits="r + 1 + 2^-r / sqrt(alpha), r = 1 at 0.1",
            state_kinds={"residual": "sum"},
        )

    @property
    def rice(self) -> int:
        """r, the low bits: as many as make the bound of the length the lowest."""
        return max(1, math.ceil(-math.log2(self.alpha) / 2) - 1)

    @override
    def refuses(self, spec: TensorSpec) -> str | None:
        if self._places([spec.size]) > MOST_BITS:
            return f"{spec.size} elements, whose code may have {MOST_BITS} bits"
        return super().refuses(spec)

    @override
    def describe(self, spec: TensorSpec) -> str:
        length = self.rice + self._places([spec.size]) / max(spec.size, 1)
        return f"{length:.3g} bits, error at most {100 * self.alpha:.3g} %"

    @override
    def exchange(self, grads: list[tf.Tensor], state: State, ctx: Context) -> Exchange:
        sizes = [s.size for s in ctx.layout.specs]
        self._check_size(sizes)
        grads = feedback.scaled(grads, ctx.scale)
        sums = [e + g for e, g in zip(state["residual"], grads, strict=True)]
        found = [self._levels(tf.reshape(p, [-1])) for p in sums]
        factors, levels = tf.stack([f for f, _ in found]), tf.concat([k for _, k in found], axis=0)
        finite = tf.reduce_all(tf.math.is_finite(factors))
        code = rice_encode(
            tf.cast(levels, tf.int32), rice=self.rice, bitmap_words=self._bitmap_words(sizes)
        )
        messages = yield AllGather(wire.message(finite, factors, code))

        def values(messages: tf.Tensor) -> tf.Tensor:
            return self._read(messages, sizes)

        total = added_up(messages, ctx.layout.workers, values, sum(sizes))
        residual = flat(sums) - spread(factors[tf.newaxis], sizes)[0] * levels
        return split(total, ctx.layout.specs), {"residual": split(residual, ctx.layout.specs)}

    def _check_size(self, sizes: list[int]) -> None:
        """Check that places in the bitmap of a bucket are int32."""
        if self._places(sizes) > MOST_BITS:
            raise ValueError(
                f"a bucket's code may have {MOST_BITS} bits, about {MOST_BITS // 3} elements. "
                f"Received: a bucket of {sum(sizes)} elements. Use a smaller `bucket_bytes`."
            )

    def _places(self, sizes: list[int]) -> int:
        """Bits of the bitmap of a bucket: a one for each element, and zeros."""
        zeros = [math.ceil(SLACK * n / (2**self.rice * self.alpha**0.5)) for n in sizes]
        return sum(sizes) + sum(zeros)

    def _bitmap_words(self, sizes: list[int]) -> int:
        """Words of the bitmap of a bucket's Rice code."""
        return -(-self._places(sizes) // 32)

    def _levels(self, vector: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """The factor, NaN if not all is finite, and the levels with their signs."""
        norm = l2_norm(vector[tf.newaxis])[0]
        norm = tf.where(norm < TINY, 0.0, norm)
        finite = tf.reduce_all(tf.math.is_finite(vector)) & tf.math.is_finite(norm)
        u = tf.where(finite, tf.math.divide_no_nan(vector, norm), 0.0)
        steps = (vector.shape[0] / self.alpha) ** 0.5 / 2.0  # 1 / (2 h)
        levels = tf.round(u * steps)
        # The commoner sign gets the shorter codes.
        levels *= tf.where(tf.reduce_sum(tf.sign(levels)) > 0.0, -1.0, 1.0)
        share = tf.math.divide_no_nan(tf.reduce_sum(u * levels), tf.reduce_sum(tf.square(levels)))
        return tf.where(finite, norm * share, float("nan")), levels

    def _read(self, messages: tf.Tensor, sizes: list[int]) -> tf.Tensor:
        """What messages `[rows, words]` stand for, all tensors as one vector: `[rows, size]`."""
        _, factors, code = wire.split(messages, len(sizes))
        levels = rice_decode(
            code, rice=self.rice, bitmap_words=self._bitmap_words(sizes), count=sum(sizes)
        )
        return spread(factors, sizes) * tf.cast(levels, tf.float32)
