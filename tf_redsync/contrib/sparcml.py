"""SparCML: sparse all-reduce of top-k by recursive doubling."""

from __future__ import annotations

import dataclasses

import tensorflow as tf
from typing_extensions import override

from tf_redsync import ops
from tf_redsync.config import register
from tf_redsync.contrib.common import recursive_doubling
from tf_redsync.exchange.context import Context
from tf_redsync.exchange.layout import BucketLayout
from tf_redsync.exchange.method import Exchange, State
from tf_redsync.exchange.requests import PairGather
from tf_redsync.exchange.traits import Traits
from tf_redsync.methods.common.sparsifier import Sparsifier, capacity, flat, split
from tf_redsync.ops import MessageLayout, wire
from tf_redsync.ops.wire import as_row, map_words


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class SparCML(Sparsifier):
    """SparCML: the sum of all workers' top-k by recursive doubling, sparse or dense.

    Cedric Renggli, Saleh Ashkboos, Mehdi Aghagolzadeh, Dan Alistarh, Torsten Hoefler (2019),
    "SparCML: High-Performance Sparse Communication for Machine Learning", SC, arXiv 1802.08021.

    Every worker selects as `TopK` does, with gradient g and residual v of each tensor:

        v <- v + g;   x = the k elements of v with the largest |v|;   v <- v - x

    and the total is the sum of all x: no element is dropped. In round r = 0, 1, ... a worker and
    its partner exchange the sums of their groups of 2^r workers and add them:

        x <- x + the partner's x

    The sum of 2^r workers has at most 2^r k elements, each an index and a value. It is sent as a
    dense vector of n values if 2 * 2^r k >= n, so a round sends min(2 * 2^r k, n) words. While
    sparse, all rounds send 2 k (K - 1) words, as an all-gather does, but in log2(K) messages
    instead of K - 1. SparCML is faster if latency dominates, or if the sums of many workers become
    nearly dense. `SparDL` and `OkTopk` send less.

    Differences from the paper

    * The representation changes by a static rule, from k, n and the round. The paper decides by the
      data: at |x| + |y| > delta for the partners' x and y, with delta where both representations
      have the same size. Messages have a fixed length here, so the rule takes the maximum size of
      x. If workers select the same elements, dense rounds begin earlier than necessary.
    * It is the paper's recursive doubling. The variants for large messages (split and all-gather,
      with sparse or dense results) and the quantization of dense results are left out.
    * Rounds sum dense vectors too; in the paper dense results come from a dense all-gather.
    * Biases, norms and small tensors are all-reduced densely.

    Args:
        density: Fraction of the elements of a tensor that a worker sends, in (0, 1].
        dense_below: Tensors of fewer float32 bytes are all-reduced densely.

    Raises:
        ValueError: If an argument is out of range; the message names it.

    Example:
        >>> SparCML(density=0.001).density
        0.001
    """

    @property
    @override
    def traits(self) -> Traits:
        return dataclasses.replace(
            super().traits,
            paper="Renggli, Ashkboos, Aghagolzadeh, Alistarh, Hoefler 2019",
            requests="log2(K) exchanges with a partner, of indices and values or dense",
            bits="min(64 density 2^r, 32) for each r < log2(K)",
            rounds_values=False,
            sends_selected=False,
        )

    @override
    def exchange(self, grads: list[tf.Tensor], state: State, ctx: Context) -> Exchange:
        k = self.capacities(ctx.layout)
        if not sum(k):
            return grads, state
        selection = ops.accumulate_and_select(grads, state["residual"], [], k, scale=ctx.scale)
        stream = _Stream(ctx.layout, selection.layout, selection.message).shortest()
        first, doubling, last = recursive_doubling.rounds(ctx.layout.workers)
        if first is not None:
            stream = stream.plus((yield PairGather(stream.message, first)))
            message = recursive_doubling.after_first_round(stream.message, ctx.rank, first)
            stream = dataclasses.replace(stream, message=message)
        for distance in doubling:
            stream = stream.plus((yield PairGather(stream.message, distance)))
        if last is not None:
            rows = yield PairGather(stream.message, last)
            stream = dataclasses.replace(stream, message=map_words(lambda r: r[0], rows))
        totals = stream.totals(as_row(stream.message))
        totals = recursive_doubling.nan_unless_finite(stream.message, totals)
        return totals, {"residual": list(selection.residuals)}


@dataclasses.dataclass(frozen=True)
class _Stream:
    """Sum of one or more workers, as a message.

    Attributes:
        bucket: Layout of the bucket.
        layout: Layout of the message; `None` if it is dense.
        message: int32 `[words]`: a flag, and either counts, indices and values or all values.
    """

    bucket: BucketLayout
    layout: MessageLayout | None
    message: tf.Tensor

    def shortest(self) -> _Stream:
        """Return the same sum as a dense message if that is no longer."""
        if self.layout is None or self._is_short(self.layout):
            return self
        return self._dense(as_row(self.message))

    def plus(self, rows: tf.Tensor) -> _Stream:
        """Return the sum of both partners' messages, int32 `[2, words]`."""
        if self.layout is not None:
            sizes = [s.size for s in self.bucket.specs]
            counts = zip(self.layout.capacities, sizes, strict=True)
            both = MessageLayout.of([capacity(2 * n, size) for n, size in counts])
            if self._is_short(both):
                message = recursive_doubling.merged(rows, self.layout, sizes, both)
                return dataclasses.replace(self, layout=both, message=message)
        return self._dense(rows)

    def _is_short(self, layout: MessageLayout) -> bool:
        return layout.words < wire.HEADER_WORDS + sum(s.size for s in self.bucket.specs)

    def _dense(self, rows: tf.Tensor) -> _Stream:
        """Return the sum of messages as a dense message."""
        sums = flat(self.totals(rows))
        finite = wire.flags_are_set(rows) & tf.reduce_all(tf.math.is_finite(sums))
        message = wire.message(finite, sums)
        return dataclasses.replace(self, layout=None, message=message)

    def totals(self, rows: tf.Tensor) -> list[tf.Tensor]:
        """Return the sums of messages, int32 `[P, words]`, as dense tensors."""
        specs = self.bucket.specs
        if self.layout is None:
            _, dense, _ = wire.split(rows, sum(s.size for s in specs))
            return split(tf.add_n(tf.unstack(dense, num=rows.shape[0])), specs)
        return ops.decode(rows, self.layout, [tf.zeros(s.shape) for s in specs])
