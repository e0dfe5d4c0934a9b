"""The number of a random direction for each block."""

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
from tf_redsync.exchange.layout import BucketLayout, TensorSpec
from tf_redsync.exchange.method import Exchange, State
from tf_redsync.exchange.requests import AllGather
from tf_redsync.exchange.traits import Traits
from tf_redsync.methods.common.quantizer import Quantizer, l2_norm
from tf_redsync.methods.common.random_numbers import stream, uniform
from tf_redsync.ops import bits, wire
from tf_redsync.ops.quantization import bucketed

MOST_INDEX_BITS = 16
FACTOR_BITS = 5
# What factors are rounded to, relative to the largest one, and the bounds between them.
FACTORS = np.concatenate([[0.0], 2.0 ** (np.arange(2 - 2**FACTOR_BITS, 1) / 4)]).astype("f4")
BOUNDS = np.concatenate([FACTORS[1:2] / 2, np.sqrt(FACTORS[1:-1] * FACTORS[2:])])
PRODUCTS = 2**22  # of blocks and vectors at a time: 16 MiB


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class SphericalCompression(Quantizer):
    """Spherical compression: the number of a random direction that is near enough.

    Alyazeed Albasyoni, Mher Safaryan, Laurent Condat, Peter Richtárik (2020), "Optimal Gradient
    Compression for Distributed and Federated Learning", arXiv 2010.03246.

    A stream of random unit vectors xi_1, xi_2, .. is the same on all workers. On every worker, for
    each block of d elements of each tensor, with gradient g and residual e:

        p = g + e
        k = the first with <xi_k, p> >= sqrt(1 - alpha) ||p||
        all-gather of k and of c, a rounded <xi_k, p>, of all blocks
        total = sum over workers of c xi_k
        e = p - c xi_k

    which leaves at most alpha of a block's squared norm, before c is rounded. A vector is near
    enough with the probability q = I_alpha((d - 1) / 2, 1/2) / 2, I being the regularised
    incomplete beta function, so that log2(1 / q) bits are about what k takes. This tends to the
    fewest that any code could have, d log2(1 / alpha) / 2 bits, as d grows, but so does the work: 1
    / q vectors to look at.

        bits an element           d = 16    32      64      limit
        alpha = 0.5               0.65      0.59    0.55    0.5
        alpha = 0.9               0.20      0.15    0.12    0.076

    Differences from the paper

    * The paper's d is that of the gradient, out of reach as a search; blocks make it feasible, and
      cost a factor for each.
    * A codebook of 2^b vectors: k has a fixed length of b bits, where a code of varying length
      would take about log2(1 / q) + 1.5, and some blocks find no vector that is near enough: these
      take the best one. With `nearest=True` all blocks do: of normal vectors, d = 16 and b = 5,
      this delivers a quarter of the squared norm and not a fifth. The codebook is another one in
      every step, so that no direction is missed for long.
    * c is the inner product, where the paper has sqrt(1 - alpha) ||p||: the best factor is as long
      to send, never worse, and right for blocks without a near vector too. It takes 5 bits: one of
      31 parts of the tensor's largest one, four to a factor of two, or 0.
    * The compressor is biased, so there is error feedback: it makes up for what is left out, the
      rounding of c included. Biases, norms and small tensors are all-reduced densely.

    Args:
        alpha: Largest squared error of a block that is taken at once, relative to its squared norm,
            in (0, 1).
        block_size: d, elements of a block, at least 2.
        index_bits: b; the codebook has 2^b vectors, with b at most 16 and at least
            `index_cost(alpha, block_size)`.
        nearest: Whether every block takes the nearest vector of the codebook and not the first one
            near enough: as many bits, less error.
        seed: Of the codebook; the same on all workers.
        dense_below: Tensors of fewer float32 bytes are all-reduced densely.

    Raises:
        ValueError: for a hyper-parameter out of its range.

    Example:
        >>> SphericalCompression(block_size=64, index_bits=10).describe(TensorSpec("w", (64, 64)))
        '1024 directions of 64 elements, 0.234 bits'
    """

    alpha: float = 0.9
    block_size: int = 16
    index_bits: int = 5
    nearest: bool = False
    seed: int = 0

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        checks.real("alpha", self.alpha, low=0.0, high=1.0, low_open=True, high_open=True)
        checks.integer("block_size", self.block_size, low=2)
        checks.integer("index_bits", self.index_bits, low=1)
        checks.boolean("nearest", self.nearest)
        checks.integer("seed", self.seed, low=0)
        cost = index_cost(self.alpha, self.block_size)
        if not cost <= self.index_bits <= MOST_INDEX_BITS:
            raise ValueError(
                f"`index_bits` must be at least {math.ceil(cost)} for alpha={self.alpha} and "
                f"block_size={self.block_size}, or few blocks find a vector, and at most "
                f"{MOST_INDEX_BITS}. Received: index_bits={self.index_bits}. Take a larger alpha "
                "or smaller blocks if these do not meet."
            )

    @property
    @override
    def traits(self) -> Traits:
        return dataclasses.replace(
            super().traits,
            paper="Albasyoni, Safaryan, Condat, Richtárik 2020",
            requests="all-gather of directions and factors",
            bits="(b + 5) / d",
            state_kinds={"residual": "sum"},
            # A step delivers about 1 - alpha of what is there
            waiting_steps=1.0 / (1.0 - self.alpha),
        )

    @override
    def describe(self, spec: TensorSpec) -> str:
        length = (self.index_bits + FACTOR_BITS) / self.block_size
        return f"{2**self.index_bits} directions of {self.block_size} elements, {length:.3g} bits"

    def codebook(self, layout: BucketLayout, step: tf.Tensor) -> tf.Tensor:
        """Return the unit vectors of a step, float32 `[2^b, d]`, the same bits on every device.

        Elements are sums of twelve uniform integers, nearly normal, about their mean. The sums of
        their squares are integers below 2^53, so neither they nor their order can be rounded.
        """
        seed = stream(self.seed, step, layout.specs[0].position)
        draws = uniform([12, 2**self.index_bits, self.block_size], seed)
        normal = tf.reduce_sum(tf.cast(draws * 2.0**16, tf.int32), axis=0) - 6 * (2**16 - 1)
        vectors = tf.cast(normal, tf.float64)
        norms = tf.sqrt(tf.reduce_sum(tf.square(vectors), axis=1, keepdims=True))
        return tf.cast(vectors / norms, tf.float32)

    @override
    def exchange(self, grads: list[tf.Tensor], state: State, ctx: Context) -> Exchange:
        grads = feedback.scaled(grads, ctx.scale)
        sums = [e + g for e, g in zip(state["residual"], grads, strict=True)]
        counts, codebook = (
            [self._blocks(s) for s in ctx.layout.specs],
            self.codebook(ctx.layout, ctx.step),
        )
        rows = [
            bucketed(p, s.size, self.block_size)
            for p, s in zip(sums, ctx.layout.specs, strict=True)
        ]
        rows = tf.concat(rows, axis=0)
        index, factors = self.search(rows, codebook)
        # None of them is negative; a tensor without elements has none.
        largest = tf.stack([tf.reduce_max(tf.pad(f, [[0, 1]])) for f in tf.split(factors, counts)])
        shares = tf.math.divide_no_nan(factors, spread(largest[tf.newaxis], counts)[0])
        level = tf.searchsorted(tf.constant(BOUNDS), shares, side="right")
        finite = tf.reduce_all(tf.math.is_finite(rows)) & tf.reduce_all(tf.math.is_finite(factors))
        codes = bits.packed(index | tf.bitwise.left_shift(level, self.index_bits), self._code_bits)
        message = wire.message(finite, largest, codes)
        messages = yield AllGather(message)

        def values(messages: tf.Tensor) -> tf.Tensor:
            return self._read(messages, codebook, counts)

        total = added_up(messages, ctx.layout.workers, values, rows.shape.num_elements())
        residuals = tf.reshape(rows, [-1]) - values(message[tf.newaxis])[0]
        return self._joined(total, ctx.layout), {"residual": self._joined(residuals, ctx.layout)}

    @property
    def _code_bits(self) -> int:
        return self.index_bits + FACTOR_BITS

    def search(self, rows: tf.Tensor, codebook: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Return the vectors of blocks: the first near enough, or else the nearest.

        Args:
            rows: Blocks, float32 `[blocks, d]`.
            codebook: Unit vectors, float32 `[vectors, d]`.

        Returns:
            Their numbers, int32 `[blocks]`, and inner products, float32 `[blocks]`, 0 for those
            that are negative.
        """
        blocks = rows.shape[0]
        length = max(1, min(blocks, PRODUCTS // codebook.shape[0]))
        chunks = -(-max(blocks, 1) // length)
        parts = tf.pad(rows, [[0, chunks * length - blocks], [0, 0]])
        parts = tf.reshape(parts, [chunks, length, self.block_size])

        def found(part: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            products = tf.matmul(part, codebook, transpose_b=True)
            bound = (1.0 - self.alpha) ** 0.5 * l2_norm(part)[:, tf.newaxis]
            near = products >= bound
            first = tf.argmax(tf.cast(near, tf.int32), axis=1, output_type=tf.int32)
            nearest = tf.argmax(products, axis=1, output_type=tf.int32)
            takes_first = tf.reduce_any(near, axis=1) & (not self.nearest)
            index = tf.where(takes_first, first, nearest)
            return index, tf.maximum(tf.gather(products, index, batch_dims=1), 0.0)

        form = (tf.TensorSpec([length], tf.int32), tf.TensorSpec([length], tf.float32))
        both = tf.map_fn(found, parts, fn_output_signature=form, parallel_iterations=1)
        index, products = (tf.reshape(t, [-1])[:blocks] for t in both)
        return index, products

    def _read(self, messages: tf.Tensor, codebook: tf.Tensor, counts: list[int]) -> tf.Tensor:
        """What messages `[rows, words]` stand for, all blocks as one vector: `[rows, elements]`."""
        _, largest, words = wire.split(messages, len(counts))
        codes = bits.unpacked(words, self._code_bits, sum(counts))
        level = tf.bitwise.right_shift(codes, self.index_bits)
        factors = spread(largest, counts) * tf.gather(tf.constant(FACTORS), level)
        vectors = tf.gather(codebook, codes % 2**self.index_bits)
        length = sum(counts) * self.block_size
        return tf.reshape(factors[:, :, tf.newaxis] * vectors, [tf.shape(codes)[0], length])

    def _blocks(self, spec: TensorSpec) -> int:
        return -(-spec.size // self.block_size)

    def _joined(self, vector: tf.Tensor, layout: BucketLayout) -> list[tf.Tensor]:
        """The tensors of a bucket, out of all their blocks."""
        parts = tf.split(vector, [self._blocks(s) * self.block_size for s in layout.specs])
        return [
            tf.reshape(part[: s.size], s.shape) for part, s in zip(parts, layout.specs, strict=True)
        ]


def index_cost(alpha: float, block_size: int) -> float:
    """Return log2(1 / q), q being the probability that a random direction is near enough.

    q = I_alpha((d - 1) / 2, 1/2) / 2 is the share of the sphere that is within arcsin(sqrt(alpha))
    of a point, so an integral of sin^(d - 2).

    Example:
        >>> [round(index_cost(0.9, d) / d, 2) for d in (16, 32, 64)]
        [0.2, 0.15, 0.12]
    """

    def integral(end: float, largest: float) -> float:
        angles = (np.arange(20_000) + 0.5) * (end / 20_000)
        return float(np.sum((np.sin(angles) / largest) ** (block_size - 2)) * (end / 20_000))

    near = integral(math.asin(alpha**0.5), alpha**0.5)  # times alpha^((d - 2) / 2)
    return math.log2(integral(math.pi, 1.0) / near) - (block_size - 2) / 2 * math.log2(alpha)
