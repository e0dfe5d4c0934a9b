"""Quantized Frank-Wolfe: the s-partition encoding in both phases of a reduction."""

from __future__ import annotations

import dataclasses

import tensorflow as tf
from typing_extensions import override

from tf_redsync.config import register
from tf_redsync.contrib.common.quantized_blocks import (
    Blocks,
    by_tensor,
    by_worker,
    cut,
    for_each_worker,
    joined,
    one_message,
)
from tf_redsync.exchange import feedback
from tf_redsync.exchange.context import Context
from tf_redsync.exchange.layout import TensorSpec
from tf_redsync.exchange.method import Exchange, State
from tf_redsync.exchange.requests import AllGather, AllToAll
from tf_redsync.exchange.traits import Traits
from tf_redsync.methods.common.quantizer import StochasticQuantizer, largest
from tf_redsync.ops.quantization import Quantized, dequantize_sum, quantize
from tf_redsync.ops.quantized_format import check_levels, code_bits

MODE = "stochastic"


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantizedFW(StochasticQuantizer):
    """Quantized Frank-Wolfe: unbiased quantization of gradients and of their sums.

    Mingrui Zhang, Lin Chen, Aryan Mokhtari, Hamed Hassani, Amin Karbasi (2020), "Quantized
    Frank-Wolfe: Faster Optimization, Lower Communication, and Projection Free", AISTATS, arXiv
    1902.06332.

    The s-partition encoding Q_s of a vector g, with c = max |g|: |g_i| / c lies in one of s equal
    intervals of [0, 1],

        l <= s |g_i| / c <= l + 1
        Q_s(g)_i = sign(g_i) c (l + 1) / s     with probability s |g_i| / c - l
                   sign(g_i) c l / s           else

    which is unbiased with a variance of at most c^2 / (4 s^2). Sign and l take z(s) = ceil(log2(s +
    1)) + 1 bits. The server sums the codes and quantizes the sum again, with s2 levels. Here every
    worker is the server of one of K blocks; on worker w, with its gradient g:

        Q_s(g[b]) goes to worker b, for every block b           one all-to-all
        t = g[w] + sum over the other workers of their Q_s(g[w])
        Q_s2(t) goes to all workers                             one all-gather
        total = the K blocks Q_s2(t)

    A worker sends (z(s) + z(s2)) (K - 1) / K bits per element, almost independent of K. An
    all-gather of codes would take z(s) (K - 1). The method is stateless, and all roundings are
    independent.

    Differences from the paper

    * The Frank-Wolfe step is left to the optimizer: any optimizer can use the total. There is no
      variance reduction by gradients at two points.
    * There is no server. A worker does not quantize its own part of its block. c is the largest
      magnitude of a block of a tensor, since each block is a message of its own. Both reduce the
      error.
    * s and s2 are constant; in the paper they grow with the number of steps.
    * Biases, norms and small tensors are all-reduced densely.

    Args:
        levels: s, number of intervals of the gradient codes, at most 32767.
        sum_levels: s2, number of intervals of the codes of the sums, at most 32767.
        seed: Seed of the rounding, the same on all workers; each worker draws different numbers.
        dense_below: Tensors of fewer float32 bytes are all-reduced densely.

    Raises:
        ValueError: If an argument is out of range; the message names it.

    Example:
        >>> QuantizedFW(levels=1, sum_levels=7).traits.conserves
        False
    """

    levels: int = 7
    sum_levels: int = 7

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("levels", "sum_levels"):
            check_levels(name, getattr(self, name))

    @property
    @override
    def traits(self) -> Traits:
        return dataclasses.replace(
            super().traits,
            paper="Zhang, Chen, Mokhtari, Hassani, Karbasi 2020",
            requests="all-to-all, then all-gather, of codes and maxima",
            bits="z(s) + z(s2) / K, z(s) = ceil(log2(s + 1)) + 1",
        )

    @override
    def describe(self, spec: TensorSpec) -> str:
        gradients, sums = (code_bits(MODE, s) for s in (self.levels, self.sum_levels))
        return f"{gradients} bits for gradients, {sums} bits for sums"

    @override
    def exchange(self, grads: list[tf.Tensor], state: State, ctx: Context) -> Exchange:
        grads, workers, rank = feedback.scaled(grads, ctx.scale), ctx.layout.workers, ctx.rank
        blocks = [cut(g, s, workers) for g, s in zip(grads, ctx.layout.specs, strict=True)]
        own_stream = self.worker_stream(ctx)

        coded = _quantized(blocks, own_stream, self.levels)
        rows = yield AllToAll(for_each_worker(coded.message, len(blocks), workers))
        received = dequantize_sum(rows, [b[0] for b in blocks], mode=MODE, levels=self.levels)
        errors = by_tensor(coded.errors, len(blocks))
        own_sums = [  # the received sums, with this worker's own part unquantized
            (total + tf.gather(error, rank))[tf.newaxis]
            for total, error in zip(received, errors, strict=True)
        ]

        # Ranks from `workers` on give the second rounding its own random numbers.
        other_stream = own_stream + tf.constant([0, workers, 0])
        messages = yield AllGather(_quantized(own_sums, other_stream, self.sum_levels).message)
        together = one_message(messages, len(blocks))
        parts = dequantize_sum(together, by_worker(blocks), mode=MODE, levels=self.sum_levels)
        return joined(by_tensor(parts, len(blocks)), ctx.layout), state


def _quantized(blocks: Blocks, own_stream: tf.Tensor, levels: int) -> Quantized:
    """Quantize blocks in the order of `by_worker`, each scaled by its largest magnitude."""
    scales = tf.stack([largest(b) for b in blocks], axis=1)
    return quantize(
        by_worker(blocks),
        tf.reshape(scales, [-1]),
        mode=MODE,
        levels=levels,
        stream=own_stream,
        errors=True,
    )
