"""DeMo, decoupled momentum optimization."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import tensorflow as tf
from typing_extensions import override

from tf_redsync import checks
from tf_redsync.config import register
from tf_redsync.exchange import feedback
from tf_redsync.exchange.context import Context
from tf_redsync.exchange.layout import BucketLayout, TensorSpec
from tf_redsync.exchange.method import (
    Exchange,
    Method,
    Payloads,
    State,
)
from tf_redsync.exchange.requests import AllGather
from tf_redsync.exchange.traits import Traits
from tf_redsync.methods.common.chunk_messages import ChunkMessages
from tf_redsync.methods.common.chunking import SIDE, Chunks
from tf_redsync.ops import wire
from tf_redsync.ops.selection import chunked_top_k

MAX_CHUNK = 256  # the transform takes 2 * chunk multiplications per element


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class DeMo(Method):
    """DeMo, decoupled momentum: workers exchange the fast components of their momenta.

    Bowen Peng, Jeffrey Quesnelle, Diederik P. Kingma (2024), "DeMo: Decoupled Momentum
    Optimization", arXiv 2411.19870.

    Tensors are cut into chunks of at most 64 x 64 elements. On every worker, with gradient g, local
    momentum d, and the discrete cosine transform (DCT) of each chunk:

        d <- beta d + g
        q = the k coefficients of DCT(d) with the largest magnitude, in each chunk
        message = [positions in the chunk, values] of q         one all-gather
        d <- d - IDCT(q)
        Q = mean of each coefficient over the workers that sent it
        total = sign(IDCT(Q))

    Slow components stay in the local momenta and accumulate until they are sent. A position in a
    chunk of 64 x 64 takes 12 bits.

    Totals are -1, 0 and 1, so every step changes a weight by the learning rate. Use a much smaller
    learning rate than with SGD, about that of Adam. The inner optimizer is SGD without momentum.
    The paper's decoupled weight decay is `SGD(learning_rate=r, weight_decay=l)` in Keras:
    w <- (1 - r l) w - r total. No tensor is sent densely, since dense totals would need another
    learning rate.

    The transform is the orthonormal DCT-II: C_h X C_w^T of a chunk X, with C[u, x] =
    sqrt(2 / n) cos(pi (2 x + 1) u / (2 n)), and the row u = 0 divided by sqrt(2).

    The sides of a chunk are the largest divisors of the tensor's sides that are at most `chunk`,
    and the chunks of a vector have at most `chunk` elements. A tensor of a higher rank is reshaped
    to a matrix [product of the other axes, last axis]. A prime side gives thin chunks, of which a
    larger fraction is sent: a vocabulary of 50,257 = 29 x 1733 words has chunks of 29 rows; one of
    50,261 words, a prime, has chunks of a single row. `explain()` prints the chunks of each tensor.

    Differences from the paper

    * The momentum is in units of the gradient, and the optimizer applies the learning rate to the
      total. In the paper the momentum is in units of the update. Both give the same totals while
      the learning rate is constant.
    * As in the authors' code, the mean is over the workers that sent a coefficient. A coefficient
      that a single worker sent thus has the same weight as one that all workers sent.
    * Values are float32.
    * With one worker the total is also a sign.

    All workers compute the sign of the same Q, with equal bits on the same kind of processor.

    Args:
        decay: beta of the momentum, in [0, 1).
        top_k: k, the number of coefficients sent per chunk. A smaller chunk is sent whole.
        chunk: Largest side of a chunk of a matrix, and largest length of a chunk of a vector; at
            most 256.

    Raises:
        ValueError: If an argument is out of range; the message names it.

    Example:
        >>> DeMo().describe(TensorSpec("w", (768, 3072)))
        '32 of 4,096 frequencies of 576 chunks of 64 x 64'
    """

    decay: float = 0.999
    top_k: int = 32
    chunk: int = SIDE

    def __post_init__(self) -> None:
        checks.real("decay", self.decay, low=0.0, high=1.0, high_open=True)
        checks.integer("top_k", self.top_k, low=1)
        checks.integer("chunk", self.chunk, low=1)
        if self.chunk > MAX_CHUNK:
            raise ValueError(f"`chunk` must be at most {MAX_CHUNK}. Received: chunk={self.chunk!r}")

    @property
    @override
    def traits(self) -> Traits:
        return dataclasses.replace(
            super().traits,
            paper="Peng, Quesnelle, Kingma 2024",
            requests="all-gather of positions in chunks and coefficients",
            bits="k (32 + 2 log2(s)) / s^2, s = 64",
            state_kinds={"velocity": "sum"},
            votes=True,
            # Totals are signs
            conserves=False,
            momentum_in_exchange=self.decay,
        )

    @override
    def dense(self) -> Method:
        """Return the method itself: it refuses no tensor."""
        return self

    @override
    def describe(self, spec: TensorSpec) -> str:
        cut = self._chunks_of(spec)
        k = min(self.top_k, cut.size)
        return (
            f"{k:,} of {cut.size:,} frequencies of {cut.number:,} chunks of "
            f"{cut.height} x {cut.width}"
        )

    def _chunks_of(self, spec: TensorSpec) -> Chunks:
        return Chunks.of(spec.shape, side=self.chunk, length=self.chunk)

    def _messages(self, layout: BucketLayout) -> ChunkMessages:
        return ChunkMessages(tuple(self._chunks_of(s) for s in layout.specs), self.top_k)

    @override
    def payloads(self, layout: BucketLayout, step: int) -> Payloads:
        return [(AllGather, self._messages(layout).payload)]

    @override
    def exchange(self, grads: list[tf.Tensor], state: State, ctx: Context) -> Exchange:
        form, grads = self._messages(ctx.layout), feedback.scaled(grads, ctx.scale)
        momenta = [self.decay * d + g for d, g in zip(state["velocity"], grads, strict=True)]
        coefficients = [
            tf.reshape(dct(c), [g.number, g.size])
            for g, c in zip(form.groups, form.split(momenta), strict=True)
        ]
        chosen = [
            chunked_top_k(f, form.k(g)) for g, f in zip(form.groups, coefficients, strict=True)
        ]
        positions, values = zip(*chosen, strict=True)
        message, _ = form.message(wire.all_finite(coefficients), positions, values)
        messages = yield AllGather(message)
        sent = [form.scattered(g, *q) for g, q in zip(form.groups, chosen, strict=True)]
        momenta = [d - q for d, q in zip(momenta, spatial(form, sent), strict=True)]
        sums, senders = form.sums(messages)
        means = [tf.math.divide_no_nan(s, n) for s, n in zip(sums, senders, strict=True)]
        return [tf.sign(q) for q in spatial(form, means)], {"velocity": momenta}

    dense_exchange = exchange  # a single worker applies signs, too


def spatial(form: ChunkMessages, coefficients: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Return the tensors with the DCT coefficients `[number, size]` of each group."""
    blocks = [
        idct(tf.reshape(c, [g.number, *g.sides]))
        for g, c in zip(form.groups, coefficients, strict=True)
    ]
    return form.join(blocks)


def dct(chunks: tf.Tensor) -> tf.Tensor:
    """Return the orthonormal two-dimensional DCT-II of blocks `[number, height, width]`."""
    vertical, horizontal = _matrices(chunks)
    return tf.matmul(vertical, tf.matmul(chunks, horizontal, transpose_b=True))


def idct(coefficients: tf.Tensor) -> tf.Tensor:
    """Return the inverse DCT of blocks, by the transposed matrices."""
    vertical, horizontal = _matrices(coefficients)
    return tf.matmul(vertical, tf.matmul(coefficients, horizontal), transpose_a=True)


def _matrices(blocks: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Return the DCT matrices of the columns and of the rows of blocks."""
    _, height, width = blocks.shape
    return tf.constant(dct_matrix(height)), tf.constant(dct_matrix(width))


def dct_matrix(n: int) -> np.ndarray:
    """Return C, float32 `[n, n]`, whose product with a vector is its orthonormal DCT-II.

    Example:
        >>> dct_matrix(2)  # sum and difference, divided by sqrt(2)
        array([[ 0.70710677,  0.70710677],
               [ 0.70710677, -0.70710677]], dtype=float32)
    """
    x = np.arange(n)
    cosines = np.sqrt(2.0 / n) * np.cos(np.pi * np.outer(x, 2 * x + 1) / (2 * n))
    cosines[0] = np.sqrt(1.0 / n)
    return cosines.astype(np.float32)
