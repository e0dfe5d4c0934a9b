"""Sparse dithering and spherical compression.

Alyazeed Albasyoni, Mher Safaryan, Laurent Condat, Peter Richtárik (2020), "Optimal Gradient
Compression for Distributed and Federated Learning", arXiv 2010.03246.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf
from typing_extensions import override

from tf_redsync import checks
from tf_redsync.config import register
from tf_redsync.exchange import feedback
from tf_redsync.exchange.context import Context
from tf_redsync.exchange.layout import BucketLayout, TensorSpec
from tf_redsync.exchange.method import Exchange, State
from tf_redsync.exchange.requests import AllGather
from tf_redsync.exchange.traits import Traits
from tf_redsync.methods.common.quantizer import Quantizer, l2_norm
from tf_redsync.methods.common.random_numbers import stream, uniform
from tf_redsync.methods.common.sparsifier import flat, split
from tf_redsync.ops import bits, wire
from tf_redsync.ops.quantization import bucketed
from tf_redsync.ops.rice import rice_decode, rice_encode

# Sparse dithering.
SLACK = 1.0001  # factor of the bound, for rounding in float32
MOST_BITS = 2**31 - 1  # positions in a bitmap are int32
TINY = float(np.finfo(np.float32).tiny)  # smaller norms are too imprecise for the bound

# Spherical compression.
MOST_INDEX_BITS = 16
MOST_BLOCK_SIZE = 2**20  # the integral of `index_cost` underflows far above
FACTOR_BITS = 5  # bits of a factor
# Factors are rounded to these multiples of the largest one; BOUNDS separates them.
FACTORS = np.concatenate([[0.0], 2.0 ** (np.arange(2 - 2**FACTOR_BITS, 1) / 4)]).astype("f4")
BOUNDS = np.concatenate([FACTORS[1:2] / 2, np.sqrt(FACTORS[1:-1] * FACTORS[2:])])
PRODUCTS = 2**22  # inner products to compute at a time: 16 MiB

# Both methods.
VALUES = 2**22  # values to decode at a time: 16 MiB


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class SparseDithering(Quantizer):
    """Sparse dithering: uniform levels with a Rice code of bounded length.

    Alyazeed Albasyoni, Mher Safaryan, Laurent Condat, Peter Richtárik (2020), "Optimal Gradient
    Compression for Distributed and Federated Learning", arXiv 2010.03246.

    Any code of b bits per element has a worst-case squared error of at least alpha = 4^-b relative
    to the squared norm: an error of a tenth takes 1.66 bits. Uniform levels come close. On every
    worker, for each tensor of d elements, with gradient g and residual e:

        p   = g + e
        u   = p / ||p||,  h = sqrt(alpha / d)
        k_j = |u_j| / (2 h), rounded,  s_j = sign(u_j)                 levels 2 h apart
        c   = <p, s k> / ||s k||^2
        all-gather of c and of the code of s k                         decoded to c s k
        total = sum over workers of c s k
        e   = p - c s k

    ||p - c s k||^2 <= alpha ||p||^2: no |u_j| is further than h from 2 h k_j, so the squared errors
    add up to at most alpha. The message has the best factor c of s k instead of the norm, which is
    no worse than 2 h ||p||. For a normal vector about alpha / 3 remains.

    The code is short because few levels can be large. Let n be the number of non-zero levels. For
    these k_j <= |u_j| / (2 h) + 1/2, and the sum of their |u_j| is at most sqrt(n), so

        sum k_j <= sqrt(n d / alpha) / 2 + n / 2

    The zigzag code of s_j k_j is z = 2 k_j if s_j > 0, else 2 k_j - 1. The Rice code of z has its
    low r bits and z >> r zeros followed by a one. If c is negated when necessary, at least half of
    the n signs are negative, and for r >= 1

        sum (z >> r) <= (sum k_j - n / 2) / 2^(r - 1) <= d / (2^r sqrt(alpha))

    So r + 1 + 2^-r / sqrt(alpha) bits per element suffice for every vector: 3.58 at alpha = 0.1,
    where r = 1. A normal vector fills 2.88 of them. The message has this length for all tensors of
    a bucket together: the low bits, and a bitmap of the zeros and ones.

    Differences from the paper

    * The paper numbers all vectors (n, positions, signs, and levels of a bounded sum) and sends
      the number of one, about 3.35 bits per element at alpha = 0.1. Such a number takes arithmetic
      on d digits. A Rice code can be written and read in parallel. Entropy codes have a variable
      length, and messages here have a fixed one.
    * The factor c replaces gamma ||p|| 2 h of the paper, where gamma is a constant.
    * Only the deterministic form is implemented. It is biased, so there is error feedback. Biases,
      norms and small tensors are all-reduced densely.

    Args:
        alpha: Bound of the squared error relative to the squared norm, in [1e-6, 1).
        dense_below: Tensors of fewer float32 bytes are all-reduced densely.

    Raises:
        ValueError: If an argument is out of range; the message names it.

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
        """Number of low bits r, which minimises the bound of the length."""
        return max(1, math.ceil(-math.log2(self.alpha) / 2) - 1)

    @override
    def refuses(self, spec: TensorSpec) -> str | None:
        if self._bitmap_bits([spec.size]) > MOST_BITS:
            return f"{spec.size} elements, whose code may exceed {MOST_BITS} bits"
        return super().refuses(spec)

    @override
    def describe(self, spec: TensorSpec) -> str:
        length = self.rice + self._bitmap_bits([spec.size]) / max(spec.size, 1)
        return f"{length:.3g} bits, error at most {100 * self.alpha:.3g} %"

    @override
    def exchange(self, grads: list[tf.Tensor], state: State, ctx: Context) -> Exchange:
        sizes = [s.size for s in ctx.layout.specs]
        self._check_size(sizes)
        grads = feedback.scaled(grads, ctx.scale)
        sums = [e + g for e, g in zip(state["residual"], grads, strict=True)]
        quantized = [self._levels(tf.reshape(p, [-1])) for p in sums]
        factors = tf.stack([f for f, _ in quantized])
        levels = tf.concat([k for _, k in quantized], axis=0)
        finite = tf.reduce_all(tf.math.is_finite(factors))
        code = rice_encode(
            tf.cast(levels, tf.int32), rice=self.rice, bitmap_words=self._bitmap_words(sizes)
        )
        messages = yield AllGather(wire.message(finite, factors, code))

        def values(messages: tf.Tensor) -> tf.Tensor:
            return self._decoded(messages, sizes)

        total = decoded_sum(messages, ctx.layout.workers, values, sum(sizes))
        residual = flat(sums) - spread(factors[tf.newaxis], sizes)[0] * levels
        return split(total, ctx.layout.specs), {"residual": split(residual, ctx.layout.specs)}

    def _check_size(self, sizes: list[int]) -> None:
        """Check that positions in the bitmap of a bucket are int32."""
        if self._bitmap_bits(sizes) > MOST_BITS:
            raise ValueError(
                f"The code of a bucket must have at most {MOST_BITS} bits, about {MOST_BITS // 3} "
                f"elements. Received: a bucket of {sum(sizes)} elements. Use a smaller "
                "`bucket_bytes`."
            )

    def _bitmap_bits(self, sizes: list[int]) -> int:
        """Return the bits of the bitmap of a bucket: a one for each element, and the zeros."""
        zeros = [math.ceil(SLACK * n / (2**self.rice * self.alpha**0.5)) for n in sizes]
        return sum(sizes) + sum(zeros)

    def _bitmap_words(self, sizes: list[int]) -> int:
        """Return the words of the bitmap of a bucket."""
        return -(-self._bitmap_bits(sizes) // 32)

    def _levels(self, vector: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Return the factor, NaN if any element is non-finite, and the signed levels."""
        norm = l2_norm(vector[tf.newaxis])[0]
        norm = tf.where(norm < TINY, 0.0, norm)
        finite = tf.reduce_all(tf.math.is_finite(vector)) & tf.math.is_finite(norm)
        u = tf.where(finite, tf.math.divide_no_nan(vector, norm), 0.0)
        steps = (vector.shape[0] / self.alpha) ** 0.5 / 2.0  # 1 / (2 h)
        levels = tf.round(u * steps)
        # The more frequent sign gets the shorter codes.
        levels *= tf.where(tf.reduce_sum(tf.sign(levels)) > 0.0, -1.0, 1.0)
        share = tf.math.divide_no_nan(tf.reduce_sum(u * levels), tf.reduce_sum(tf.square(levels)))
        return tf.where(finite, norm * share, float("nan")), levels

    def _decoded(self, messages: tf.Tensor, sizes: list[int]) -> tf.Tensor:
        """Decode messages `[rows, words]` to all tensors as one vector: `[rows, size]`."""
        _, factors, code = wire.split(messages, len(sizes))
        levels = rice_decode(
            code, rice=self.rice, bitmap_words=self._bitmap_words(sizes), count=sum(sizes)
        )
        return spread(factors, sizes) * tf.cast(levels, tf.float32)


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class SphericalCompression(Quantizer):
    """Spherical compression: the index of a random unit vector that is close to the direction.

    Alyazeed Albasyoni, Mher Safaryan, Laurent Condat, Peter Richtárik (2020), "Optimal Gradient
    Compression for Distributed and Federated Learning", arXiv 2010.03246.

    A sequence of random unit vectors xi_1, xi_2, ... is equal on all workers. On every worker, for
    each block of d elements of each tensor, with gradient g and residual e:

        p = g + e
        k = the first index with <xi_k, p> >= sqrt(1 - alpha) ||p||
        all-gather of k and of c, a rounded <xi_k, p>, of all blocks
        total = sum over workers of c xi_k
        e = p - c xi_k

    The error is at most alpha of the squared norm of a block, before c is rounded. A random vector
    is close enough with probability q = I_alpha((d - 1) / 2, 1/2) / 2, where I is the regularised
    incomplete beta function. So k takes about log2(1 / q) bits. As d grows, this approaches the
    minimum of any code, d log2(1 / alpha) / 2 bits, but the search takes 1 / q vectors.

        bits per element          d = 16    32      64      limit
        alpha = 0.5               0.65      0.59    0.55    0.5
        alpha = 0.9               0.20      0.15    0.12    0.076

    Differences from the paper

    * In the paper d is the size of the gradient, which makes the search infeasible. Blocks make it
      feasible, and cost a factor for each.
    * A codebook has 2^b vectors, so k has a fixed length of b bits. A code of variable length would
      take about log2(1 / q) + 1.5 bits. Blocks without a close enough vector take the nearest one.
      With `nearest=True` all blocks do: for normal vectors, d = 16 and b = 5, this delivers 1/4 of
      the squared norm instead of 1/5. The codebook changes in every step, so that later vectors
      deliver the remaining directions.
    * c is the inner product, where the paper has sqrt(1 - alpha) ||p||. It takes as many bits, and
      its error is never larger, also for blocks without a close vector. It has 5 bits: 0, or one of
      31 multiples of the largest factor of the tensor, spaced by 2^(1/4).
    * The compressor is biased, so there is error feedback, which also compensates the rounding of
      c. Biases, norms and small tensors are all-reduced densely.

    Args:
        alpha: Squared error relative to the squared norm of a block below which a vector is close
            enough, in (0, 1).
        block_size: d, elements per block, from 2 to 2^20.
        index_bits: b, where the codebook has 2^b vectors; at most 16 and at least
            `index_cost(alpha, block_size)`.
        nearest: Whether every block takes the nearest vector of the codebook instead of the first
            one that is close enough, for a smaller error at the same size.
        seed: Seed of the codebook; the same on all workers.
        dense_below: Tensors of fewer float32 bytes are all-reduced densely.

    Raises:
        ValueError: If an argument is out of range; the message names it.

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
        checks.real("block_size", self.block_size, low=2, high=MOST_BLOCK_SIZE)
        checks.integer("index_bits", self.index_bits, low=1)
        checks.boolean("nearest", self.nearest)
        checks.integer("seed", self.seed, low=0)
        cost = index_cost(self.alpha, self.block_size)
        if not cost <= self.index_bits <= MOST_INDEX_BITS:
            raise ValueError(
                f"`index_bits` must be at least {math.ceil(cost)} for alpha={self.alpha} and "
                f"block_size={self.block_size}, so that most blocks find a close vector, and at "
                f"most {MOST_INDEX_BITS}. Received: index_bits={self.index_bits}. If no value "
                "satisfies both, use a larger `alpha` or a smaller `block_size`."
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
            # A step delivers about 1 - alpha of the squared norm
            waiting_steps=1.0 / (1.0 - self.alpha),
        )

    @override
    def describe(self, spec: TensorSpec) -> str:
        length = (self.index_bits + FACTOR_BITS) / self.block_size
        return f"{2**self.index_bits} directions of {self.block_size} elements, {length:.3g} bits"

    def codebook(self, layout: BucketLayout, step: tf.Tensor) -> tf.Tensor:
        """Return the unit vectors of a step, float32 `[2^b, d]`, equal bits on every device.

        Elements are centred sums of twelve uniform integers, which are nearly normal. The sums of
        their squares are integers below 2^53, so they are exact in float64 in any order.
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
        # Factors are not negative. The padding serves tensors without elements.
        largest = tf.stack([tf.reduce_max(tf.pad(f, [[0, 1]])) for f in tf.split(factors, counts)])
        shares = tf.math.divide_no_nan(factors, spread(largest[tf.newaxis], counts)[0])
        level = tf.searchsorted(tf.constant(BOUNDS), shares, side="right")
        finite = tf.reduce_all(tf.math.is_finite(rows)) & tf.reduce_all(tf.math.is_finite(factors))
        codes = bits.packed(index | tf.bitwise.left_shift(level, self.index_bits), self._code_bits)
        message = wire.message(finite, largest, codes)
        messages = yield AllGather(message)

        def values(messages: tf.Tensor) -> tf.Tensor:
            return self._decoded(messages, codebook, counts)

        total = decoded_sum(messages, ctx.layout.workers, values, rows.shape.num_elements())
        residuals = tf.reshape(rows, [-1]) - values(message[tf.newaxis])[0]
        return self._joined(total, ctx.layout), {"residual": self._joined(residuals, ctx.layout)}

    @property
    def _code_bits(self) -> int:
        return self.index_bits + FACTOR_BITS

    def search(self, rows: tf.Tensor, codebook: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Return the vector of each block: the first that is close enough, else the nearest.

        Args:
            rows: Blocks, float32 `[blocks, d]`.
            codebook: Unit vectors, float32 `[vectors, d]`.

        Returns:
            Indices of the vectors, int32 `[blocks]`, and inner products, float32 `[blocks]`, at
            least 0.
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

    def _decoded(self, messages: tf.Tensor, codebook: tf.Tensor, counts: list[int]) -> tf.Tensor:
        """Decode messages `[rows, words]` to all blocks as one vector: `[rows, elements]`."""
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
        """Return the tensors of a bucket from the vector of all their blocks."""
        parts = tf.split(vector, [self._blocks(s) * self.block_size for s in layout.specs])
        return [
            tf.reshape(part[: s.size], s.shape) for part, s in zip(parts, layout.specs, strict=True)
        ]


def index_cost(alpha: float, block_size: int) -> float:
    """Return log2(1 / q), where q is the probability that a random direction is close enough.

    q = I_alpha((d - 1) / 2, 1/2) / 2 is the fraction of the sphere within an angle of
    arcsin(sqrt(alpha)) of a point, which is an integral of sin^(d - 2).

    Example:
        >>> [round(index_cost(0.9, d) / d, 2) for d in (16, 32, 64)]
        [0.2, 0.15, 0.12]
    """

    def integral(end: float, largest: float) -> float:
        angles = (np.arange(20_000) + 0.5) * (end / 20_000)
        return float(np.sum((np.sin(angles) / largest) ** (block_size - 2)) * (end / 20_000))

    near = integral(math.asin(alpha**0.5), alpha**0.5)  # times alpha^((d - 2) / 2)
    return math.log2(integral(math.pi, 1.0) / near) - (block_size - 2) / 2 * math.log2(alpha)


def decoded_sum(
    messages: tf.Tensor, workers: int, values: Callable[[tf.Tensor], tf.Tensor], size: int
) -> tf.Tensor:
    """Return the sum of the decoded messages of all workers, added in the order of ranks.

    A loop decodes groups of workers, so memory does not grow with the number of workers.

    Args:
        messages: int32 `[workers, words]`.
        workers: Number of workers.
        values: Function that decodes int32 messages `[rows, words]` to float32 `[rows, size]`, and
            a message of zeros to zeros.
        size: Number of values.

    Returns:
        float32 `[size]`.
    """
    group = max(1, min(workers, VALUES // max(size, 1)))
    groups = -(-workers // group)
    # As float32 with the same bits, which TensorFlow keeps on the GPU in a loop.
    padded = tf.pad(tf.bitcast(messages, tf.float32), [[0, groups * group - workers], [0, 0]])
    padded = tf.reshape(padded, [groups, group, -1])

    def add(number: tf.Tensor, total: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        for row in tf.unstack(values(tf.bitcast(padded[number], tf.int32)), num=group):
            total += row
        return number + 1, total

    start = (tf.constant(0), tf.zeros([size]))
    return tf.while_loop(lambda number, _: number < groups, add, start, parallel_iterations=1)[1]


def spread(scales: tf.Tensor, sizes: Sequence[int]) -> tf.Tensor:
    """Expand one scale per tensor, `[rows, N]`, to one per element, `[rows, sum(sizes)]`.

    The scale of a single tensor stays `[rows, 1]` and is broadcast. `tf.repeat` would make a mask
    of N times the largest size.
    """
    if len(sizes) == 1:
        return scales
    rows, columns = tf.shape(scales)[0], tf.split(scales, len(sizes), axis=1)
    parts = [tf.broadcast_to(c, [rows, n]) for c, n in zip(columns, sizes, strict=True)]
    return tf.concat(parts, axis=1)
