"""SparseLoCo: local steps, chunk-wise top-k of their changes, and 2-bit values."""

from __future__ import annotations

import dataclasses

import tensorflow as tf
from typing_extensions import override

from tf_redsync import checks, outer
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
from tf_redsync.exchange.sync_schedule import SyncSchedule
from tf_redsync.exchange.traits import Traits
from tf_redsync.methods.common.chunk_messages import ChunkMessages
from tf_redsync.methods.common.chunking import SIDE, Chunks
from tf_redsync.ops import wire
from tf_redsync.ops.selection import chunked_top_k
from tf_redsync.outer import Outer

_DIVISORS = ("workers", "senders")
_VALUE_BITS = (2, 32)


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class SparseLoCo(Method):
    """SparseLoCo: DiLoCo with sparse, quantized changes, and error feedback for outer momentum.

    Between two exchanges the workers' weights differ. The workers exchange early when an epoch ends
    and before an evaluation or a save, so that they have common weights there. In a custom loop
    call `optimizer.exchange.to_consensus()`.

    Amir Sarfi, Benjamin Thérien, Joel Lidin, Eugene Belilovsky (2025), "Communication Efficient LLM
    Pre-training with SparseLoCo", arXiv 2508.15706.

    Tensors are cut into chunks of at most 64 x 64 elements, vectors into chunks of 4,096. On every
    worker, with dW the change of the weights in a round of `steps` steps and residual e:

        e <- beta e + dW
        q = the k largest |e| of each chunk, with values in two bits
        message = [positions in the chunk, 12 bits each; codes of q; scales]    one all-gather
        e <- e - q
        W <- W + eta (sum over workers of q) / K                                `outer`, eta = 1

    The residual decays by beta in each round, so that stale changes lose weight. It accumulates
    consistent changes and thus acts as DiLoCo's outer momentum.

    Differences from the paper

    * All chunks of a tensor have the same size. Their sides are the largest divisors of the
      tensor's sides that are at most `chunk`; see `DeMo` for prime sides.
    * The levels of a value are a sign times the mean of the tensor's small or large magnitudes, in
      units of the chunk's mean; see `methods/common/two_bit_values.py`.
    * Tensors of all sizes are compressed.

    Differences from the authors' training runs

    * They exchange every 30 steps: `steps=30`.
    * They average an element over the workers that sent it: `divide_by="senders"`.
    * They scale each message down to the median norm of all messages, since their peers are
      untrusted. The workers of a job trust each other, so messages are not scaled here.

    Args:
        steps: Number of local steps between two exchanges, 15 to 250 in the paper.
        top_k: k, the number of elements sent per chunk, 32 to 128 in the paper. A smaller chunk is
            sent whole.
        decay: beta of the residual, in [0, 1]: 0.95 in the paper, 0.999 in the authors' code.
        value_bits: Bits per value, 2, or 32 for float32.
        divide_by: `"workers"`: divide sums by K, as in the paper. `"senders"`: divide each element
            by the number of workers that sent it, as in the authors' code.
        chunk: Largest side of a chunk of a matrix; a chunk of a vector has up to `chunk`^2
            elements.
        outer: Outer optimizer, which takes a step along the mean; see `tf_redsync.outer`. `None`:
            the mean is added, eta = 1. The paper uses rates of 0.7 to 1 without momentum.

    Raises:
        ValueError: If an argument is out of range; the message names it.

    Example:
        >>> SparseLoCo().describe(TensorSpec("w", (768, 3072)))
        '64 of 4,096 elements of 576 chunks of 64 x 64, 2 bits each, every 50 steps'
    """

    steps: int = 50
    top_k: int = 64
    decay: float = 0.95
    value_bits: int = 2
    divide_by: str = "workers"
    chunk: int = SIDE
    outer: Outer | None = None

    def __post_init__(self) -> None:
        for name in ("steps", "top_k", "chunk"):
            checks.integer(name, getattr(self, name), low=1)
        checks.real("decay", self.decay, low=0.0, high=1.0)
        checks.choice("value_bits", self.value_bits, _VALUE_BITS)
        checks.choice("divide_by", self.divide_by, _DIVISORS)
        outer.check("outer", self.outer)

    @property
    @override
    def traits(self) -> Traits:
        return dataclasses.replace(
            super().traits,
            paper="Sarfi, Thérien, Lidin, Belilovsky 2025",
            requests="all-gather of positions in chunks and codes",
            bits="(k (2 log2(s) + 2) + 32) / (s^2 steps), s = 64",
            state_kinds={"residual": "sum"},
            # Neither a decaying residual nor a mean over senders conserves
            conserves=self.decay == 1.0 and self.divide_by == "workers",
        )

    @property
    @override
    def sync_schedule(self) -> SyncSchedule:
        return SyncSchedule(local_steps=self.steps, outer=self.outer)

    @override
    def dense(self) -> Method:
        """Return the method itself: it refuses no tensor."""
        return self

    @override
    def describe(self, spec: TensorSpec) -> str:
        cut = self._chunks_of(spec)
        return (
            f"{min(self.top_k, cut.size):,} of {cut.size:,} elements of {cut.number:,} chunks of "
            f"{cut.height} x {cut.width}, {self.value_bits} bits each, every {self.steps} steps"
        )

    def _chunks_of(self, spec: TensorSpec) -> Chunks:
        return Chunks.of(spec.shape, side=self.chunk, length=self.chunk**2)

    def _messages(self, layout: BucketLayout) -> ChunkMessages:
        chunks = tuple(self._chunks_of(s) for s in layout.specs)
        return ChunkMessages(chunks, self.top_k, self.value_bits)

    @override
    def payloads(self, layout: BucketLayout, step: int) -> Payloads:
        return [(AllGather, self._messages(layout).payload)]

    @override
    def exchange(self, grads: list[tf.Tensor], state: State, ctx: Context) -> Exchange:
        """Exchange the changes of the weights; `grads` are these changes divided by K."""
        form, changes = self._messages(ctx.layout), feedback.scaled(grads, ctx.scale)
        errors = [self.decay * e + d for e, d in zip(state["residual"], changes, strict=True)]
        rows = [
            tf.reshape(c, [g.number, g.size])
            for g, c in zip(form.groups, form.split(errors), strict=True)
        ]
        chosen = [chunked_top_k(r, form.k(g)) for g, r in zip(form.groups, rows, strict=True)]
        positions, values = zip(*chosen, strict=True)
        message, sent = form.message(wire.all_finite(rows), positions, values)
        messages = yield AllGather(message)
        delivered = form.join(list(map(form.scattered, form.groups, positions, sent)))
        residuals = [e - q for e, q in zip(errors, delivered, strict=True)]
        sums, senders = form.sums(messages)
        if self.divide_by == "senders":
            sums = [
                tf.math.divide_no_nan(ctx.layout.workers * s, n)
                for s, n in zip(sums, senders, strict=True)
            ]
        return form.join(sums), {"residual": residuals}
