"""PowerSGD and ACP-SGD: low-rank gradients, as products of two thin matrices."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Generator
from typing import Any

import tensorflow as tf
from typing_extensions import override

from tf_redsync import checks
from tf_redsync.config import register
from tf_redsync.exchange import feedback
from tf_redsync.exchange.context import BlockRounding, Context
from tf_redsync.exchange.layout import BucketLayout, TensorSpec
from tf_redsync.exchange.method import (
    Exchange,
    Method,
    Payloads,
    State,
)
from tf_redsync.exchange.requests import AllReduce, Request
from tf_redsync.exchange.traits import Traits
from tf_redsync.methods.common.random_numbers import stream
from tf_redsync.methods.common.rounded_all_reduce import all_reduce
from tf_redsync.methods.common.sparsifier import flat
from tf_redsync.methods.dense import Dense

Factors = list[tf.Tensor]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _LowRank(Method):
    """Base class: the ranks, shapes and initial factors of tensors as matrices."""

    rank: int = 4
    min_compression_rate: float = 2.0
    seed: int = 0

    def __post_init__(self) -> None:
        checks.integer("rank", self.rank, low=1)
        rate = self.min_compression_rate
        checks.real("min_compression_rate", rate, low=0.0, high=math.inf, high_open=True)
        checks.integer("seed", self.seed, low=0)

    @property
    @override
    def traits(self) -> Traits:
        return dataclasses.replace(super().traits, rounds_values=True)

    @override
    def refuses(self, spec: TensorSpec) -> str | None:
        if spec.is_bias_or_norm:
            return f"rank {len(spec.shape)} (bias, norm)"
        if spec.size == 0:
            return "no elements"
        rate = spec.size / max(1, self.rank_of(spec) * sum(matrix_shape(spec)))
        if rate <= self.min_compression_rate:
            return f"compression rate {rate:.2g} <= min_compression_rate"
        return None

    @override
    def dense(self) -> Method:
        return Dense()

    @override
    def describe(self, spec: TensorSpec) -> str:
        rows, columns = matrix_shape(spec)
        return f"rank {self.rank_of(spec)} of {rows} x {columns}"

    def rank_of(self, spec: TensorSpec) -> int:
        """Return the rank of a tensor's factors, at most that of its matrix."""
        return min(self.rank, *matrix_shape(spec))

    def factor_payload(self, layout: BucketLayout, side: int) -> tuple[type[Request], int]:
        """Return the all-reduce payload of all factors P (side 0) or Q (side 1), in float32."""
        return AllReduce, 4 * sum(self.rank_of(s) * sides(s)[side] for s in layout.specs)

    def random_factors(self, layout: BucketLayout, side: int) -> Factors:
        """Return normal random factors P (side 0) or Q (side 1), equal on all workers."""
        return [
            tf.random.stateless_normal(
                [sides(s)[side], self.rank_of(s)],
                stream(self.seed, tf.constant(side, tf.int64), s.position),
                alg="philox",
            )
            for s in layout.specs
        ]


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class PowerSGD(_LowRank):
    """PowerSGD: low-rank gradients by one step of power iteration.

    Thijs Vogels, Sai Praneeth Karimireddy, Martin Jaggi (2019), "PowerSGD: Practical Low-Rank
    Gradient Compression for Distributed Optimization", NeurIPS, arXiv 1905.13727.

    A tensor is a matrix of n rows and m columns, n <= m: it is transposed otherwise. On every
    worker, with gradient G, residual E, rank r, P [n, r], Q [m, r]:

        M = G + E
        P = M Q                     all-reduce of P
        P <- orth(P)
        Q = M^T P                   all-reduce of Q
        total = P Q^T               with the Q of all workers
        E <- M - P Q_local^T        with the local Q

    "local" is before the all-reduce. Q is random at the start and equal on all workers. It is kept
    between steps (warm start), so that the steps form a power iteration towards the leading
    singular vectors.

    Differences from the paper

    * The first axes of a tensor are one side of its matrix and the others the other side, split
      where n + m is smallest. Dense kernels are [in, out] and convolutions [height width in, out],
      as in the paper. Convolutions with few outputs are [height width, in out], and attention
      kernels [in, heads, size] are [in, heads size].
    * P belongs to the shorter side of the matrix, so the factor to orthogonalise is the cheaper
      one. Rounding errors of P rotate the subspace, which no residual corrects, so
      `BlockQuantized` sends P in twice the bits, at most 8.
    * Totals are sums over workers, not averages.
    * The residual subtracts the local product, not the total. The sum over workers is the same,
      and the authors' later package does so too.
    * The columns of Q are scaled to length 1 before the product. orth(P) is the same, but P keeps
      the magnitude of M. With an unscaled Q, P could overflow in `HalfPrecision`.
    * A column of a factor that becomes zero, as after a gradient of 0, is not kept: the next step
      starts from the last other column. In the paper such a column remains zero.
    * orth is the QR decomposition. All workers must compute equal bits, so use the same kind of
      processor on all of them.

    Args:
        rank: r, the number of columns of both factors: 1 to 4 for convolutional networks, 32 or
            more for transformers.
        min_compression_rate: Tensors of n x m elements with `n m / (r (n + m))` up to this are
            all-reduced densely; so are biases and norms.
        seed: Seed of the initial factors, equal on all workers.

    Raises:
        ValueError: If an argument is out of range; the message names it.
    """

    @property
    @override
    def traits(self) -> Traits:
        return dataclasses.replace(
            super().traits,
            paper="Vogels, Karimireddy, Jaggi 2019",
            requests="two all-reduces of factors",
            bits="32 r (n + m) / (n m)",
            state_kinds={"residual": "sum", "q": "shared"},
            finer_sums=1,
        )

    @override
    def payloads(self, layout: BucketLayout, step: int) -> Payloads:
        return [self.factor_payload(layout, side) for side in (0, 1)]

    @override
    def init(self, layout: BucketLayout) -> State:
        zeros = [tf.zeros(s.shape, tf.float32) for s in layout.specs]
        return {"residual": zeros, "q": self.random_factors(layout, side=1)}

    @override
    def exchange(self, grads: list[tf.Tensor], state: State, ctx: Context) -> Exchange:
        matrices = as_matrices(ctx.layout, feedback.scaled(grads, ctx.scale), state["residual"])
        directions = [of_unit_length(q) for q in state["q"]]
        local_p = times(ctx.layout, matrices, directions, side=1)
        finer = ctx.rounding and ctx.rounding.finer()
        p, _ = yield from _sum_over_workers(dataclasses.replace(ctx, rounding=finer), local_p)
        p = [orthogonal(f) for f in p]
        local_q = times(ctx.layout, matrices, p, side=0)
        q, errors = yield from _sum_over_workers(ctx, local_q)
        delivered = products(ctx.layout, p, differences(local_q, errors))
        totals = as_tensors(ctx.layout, products(ctx.layout, p, q))
        residuals = as_tensors(ctx.layout, differences(matrices, delivered))
        return totals, {"residual": residuals, "q": with_directions(q, state["q"])}


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class ACPSGD(_LowRank):
    """ACP-SGD, alternately compressed PowerSGD: one factor in each step.

    Lin Zhang, Longteng Zhang, Shaohuai Shi, Xiaowen Chu, Bo Li (2023), "Evaluation and Optimization
    of Gradient Compression for Distributed Deep Learning", ICDCS, arXiv 2306.08881.

    It sends half the bytes of PowerSGD, in one all-reduce instead of two sequential ones. A tensor
    is a matrix of n rows and m columns, n <= m: it is transposed otherwise. On every worker, with
    gradient G, residual E, rank r, P [n, r], Q [m, r]:

        M = G + E
        even steps                          odd steps
        Q <- orth(Q)                        P <- orth(P)
        P = M Q                             Q = M^T P
        all-reduce of P                     all-reduce of Q
        total = P Q^T                       total = P Q^T
        E <- M - P_local Q^T                  E <- M - P Q_local^T

    "local" is before the all-reduce. P and Q are random at the start and equal on all workers. They
    are kept between steps, so that the steps form a power iteration towards the leading singular
    vectors.

    Differences from the paper

    * The first axes of a tensor are one side of its matrix and the others the other side, split
      where n + m is smallest. Dense kernels are [in, out] and convolutions [height width in, out],
      as in the paper. Convolutions with few outputs are [height width, in out], and attention
      kernels [in, heads, size] are [in, heads size].
    * P belongs to the shorter side of the matrix.
    * Totals are sums over workers, not averages.
    * A column of a factor that becomes zero, as after a gradient of 0, is not kept: the next step
      starts from the last other column. In the authors' code such a column becomes a unit vector.
    * orth is the QR decomposition. All workers must compute equal bits, so use the same kind of
      processor on all of them.

    Args:
        rank: r, the number of columns of both factors.
        min_compression_rate: Tensors of n x m elements with `n m / (r (n + m))` up to this are
            all-reduced densely; so are biases and norms.
        seed: Seed of the initial factors, equal on all workers.

    Raises:
        ValueError: If an argument is out of range; the message names it.
    """

    @property
    @override
    def traits(self) -> Traits:
        return dataclasses.replace(
            super().traits,
            paper="Zhang, Zhang, Shi, Chu, Li 2023",
            requests="all-reduce of one factor, in turn",
            bits="16 r (n + m) / (n m)",
            state_kinds={"residual": "sum", "p": "shared", "q": "shared"},
            # P and Q alternate
            period=2,
        )

    @override
    def payloads(self, layout: BucketLayout, step: int) -> Payloads:
        return [self.factor_payload(layout, step % 2)]

    @override
    def init(self, layout: BucketLayout) -> State:
        return {
            "residual": [tf.zeros(s.shape, tf.float32) for s in layout.specs],
            "p": self.random_factors(layout, side=0),
            "q": self.random_factors(layout, side=1),
        }

    @override
    def exchange(self, grads: list[tf.Tensor], state: State, ctx: Context) -> Exchange:
        known = tf.get_static_value(ctx.step)
        even = tf.equal(ctx.step % 2, 0) if known is None else bool(known % 2 == 0)
        matrices = as_matrices(ctx.layout, feedback.scaled(grads, ctx.scale), state["residual"])

        def project(fixed: Factors, side: int) -> tuple[Factors, Factors]:
            fixed = [orthogonal(f) for f in fixed]
            return fixed, times(ctx.layout, matrices, fixed, side)

        def p_step() -> tuple[Factors, Factors, tf.Tensor]:
            q, p = project(state["q"], side=1)
            return p, q, flat(_by_columns(ctx, p))

        def q_step() -> tuple[Factors, Factors, tf.Tensor]:
            p, q = project(state["p"], side=0)
            return p, q, flat(_by_columns(ctx, q))

        # P and Q differ in shape, so the sent factor is flattened.
        local_p, local_q, sent = _cond(even, p_step, q_step)
        (received,), (error,) = yield from all_reduce(ctx, [sent])

        def factors(vector: tf.Tensor) -> Any:
            return _cond(
                even,
                lambda: (_from_columns(ctx, vector, local_p), local_q),
                lambda: (local_p, _from_columns(ctx, vector, local_q)),
            )

        p, q = factors(received)
        totals = as_tensors(ctx.layout, products(ctx.layout, p, q))
        delivered = products(ctx.layout, *factors(sent - error))
        residuals = as_tensors(ctx.layout, differences(matrices, delivered))
        p, q = with_directions(p, state["p"]), with_directions(q, state["q"])
        return totals, {"residual": residuals, "p": p, "q": q}


def _by_columns(ctx: Context, factors: Factors) -> Factors:
    """Return the factors in the layout of the all-reduce: transposed with block quantization.

    The columns of a factor have the magnitudes of singular values. If columns shared a block, small
    ones would be rounded to 0. The function is its own inverse.
    """
    blocks = isinstance(ctx.rounding, BlockRounding)
    return [tf.transpose(f) for f in factors] if blocks else factors


def _from_columns(ctx: Context, vector: tf.Tensor, like: Factors) -> Factors:
    """Return the factors in a vector of `flat(_by_columns(...))`."""
    return _by_columns(ctx, unflat(vector, _by_columns(ctx, like)))


def _sum_over_workers(
    ctx: Context, factors: Factors
) -> Generator[Request, Any, tuple[Factors, Factors]]:
    """Return the sums of factors and this worker's rounding errors."""
    sums, errors = yield from all_reduce(ctx, _by_columns(ctx, factors))
    return _by_columns(ctx, sums), _by_columns(ctx, errors)


def _cond(condition: tf.Tensor | bool, yes: Callable[..., Any], no: Callable[..., Any]) -> Any:
    """Return `tf.cond`, evaluated in Python if the condition is static."""
    if isinstance(condition, bool):
        return yes() if condition else no()
    return tf.cond(condition, yes, no)


def matrix_shape(spec: TensorSpec) -> tuple[int, int]:
    """Return the shape of a tensor as a matrix: rows of its first axes, columns of the others.

    The split minimizes rows + columns, and with it the size of the factors. Ties go to the last
    split.
    """
    shape = spec.shape
    if len(shape) < 2:
        return 1, spec.size
    ends = range(len(shape) - 1, 0, -1)
    return min(((math.prod(shape[:i]), math.prod(shape[i:])) for i in ends), key=sum)


def sides(spec: TensorSpec) -> tuple[int, int]:
    """Return n and m, the shorter and the longer side of the matrix: the rows of P and of Q."""
    shape = matrix_shape(spec)
    return min(shape), max(shape)


def _is_transposed(spec: TensorSpec) -> bool:
    rows, columns = matrix_shape(spec)
    return rows > columns


def orthogonal(factor: tf.Tensor) -> tf.Tensor:
    """Return an orthonormal basis of the columns of `factor` `[rows, r]`, of the same shape."""
    return tf.linalg.qr(factor).q


def of_unit_length(factor: tf.Tensor) -> tf.Tensor:
    """Return `factor` `[rows, r]` with columns of length 1; zero columns are unchanged."""
    largest = tf.reduce_max(tf.abs(factor), axis=0)  # avoids overflow of the squares
    scaled = tf.math.divide_no_nan(factor, largest)
    return tf.math.divide_no_nan(scaled, tf.norm(scaled, axis=0))


def with_directions(new: Factors, old: Factors) -> Factors:
    """Return `new` factors `[rows, r]`, with the columns of `old` in place of zero columns.

    orth would replace zero columns by unit vectors. They project a gradient that is 0 in their rows
    to zero columns again, so it would never be sent.
    """
    return [
        tf.where(tf.reduce_any(tf.not_equal(n, 0.0), axis=0), n, o)
        for n, o in zip(new, old, strict=True)
    ]


def as_matrices(layout: BucketLayout, grads: Factors, residuals: Factors) -> list[tf.Tensor]:
    """Return `grads + residuals` as matrices in the shapes of `matrix_shape`."""
    return [
        tf.reshape(g + e, matrix_shape(s))
        for s, g, e in zip(layout.specs, grads, residuals, strict=True)
    ]


def as_tensors(layout: BucketLayout, matrices: Factors) -> list[tf.Tensor]:
    """Return matrices as tensors in the shapes of the bucket."""
    return [tf.reshape(m, s.shape) for s, m in zip(layout.specs, matrices, strict=True)]


def times(layout: BucketLayout, matrices: list[tf.Tensor], factors: Factors, side: int) -> Factors:
    """Return `M Q` for factors Q (side 1), or `M^T P` for factors P (side 0)."""
    return [
        tf.matmul(m, f, transpose_a=_is_transposed(s) == (side == 1))
        for s, m, f in zip(layout.specs, matrices, factors, strict=True)
    ]


def products(layout: BucketLayout, p: Factors, q: Factors) -> list[tf.Tensor]:
    """Return `P Q^T` of every pair of factors, in the shapes of `matrix_shape`."""
    return [
        tf.matmul(*((b, a) if _is_transposed(s) else (a, b)), transpose_b=True)
        for s, a, b in zip(layout.specs, p, q, strict=True)
    ]


def differences(a: list[tf.Tensor], b: list[tf.Tensor]) -> list[tf.Tensor]:
    """Return `a - b` of every pair."""
    return [x - y for x, y in zip(a, b, strict=True)]


def unflat(vector: tf.Tensor, like: Factors) -> Factors:
    """Split a vector into factors in the shapes of `like`."""
    sizes = [f.shape.num_elements() for f in like]
    return [tf.reshape(v, f.shape) for v, f in zip(tf.split(vector, sizes), like, strict=True)]
