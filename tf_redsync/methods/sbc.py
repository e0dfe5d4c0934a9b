"""SBC, sparse binary compression."""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow as tf
from typing_extensions import override

from tf_redsync import checks, ops, outer
from tf_redsync.codings.base import Capacity
from tf_redsync.codings.golomb import Golomb
from tf_redsync.config import register
from tf_redsync.exchange import feedback
from tf_redsync.exchange.context import Context
from tf_redsync.exchange.layout import TensorSpec
from tf_redsync.exchange.method import Exchange, Method, State
from tf_redsync.exchange.requests import AllGather
from tf_redsync.exchange.sync_schedule import SyncSchedule
from tf_redsync.exchange.traits import Traits
from tf_redsync.methods.common.sparsifier import Sparsifier, capacity
from tf_redsync.methods.local_sgd import LocalSGD
from tf_redsync.ops import MessageLayout, wire
from tf_redsync.ops.message_layout import Parts
from tf_redsync.ops.wire import as_column
from tf_redsync.outer import Outer

_PRESETS = {1: (1, 0.001), 2: (10, 0.01), 3: (100, 0.01)}


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class SBC(Sparsifier):
    """Sparse binary compression: local steps, then a signed mean per tensor and coded positions.

    Between two exchanges the workers' weights differ. The workers exchange early when an epoch ends
    and before an evaluation or a save, so that they have common weights there. In a custom loop
    call `optimizer.exchange.to_consensus()`.

    Felix Sattler, Simon Wiedemann, Klaus-Robert Müller, Wojciech Samek (2019), "Sparse Binary
    Compression: Towards Distributed Deep Learning with minimal Communication", IJCNN, arXiv
    1805.08768.

    dW is the change of the weights in a round of `steps` local steps, and R the residual. On every
    worker, for each tensor of n elements, k = ceil(density n):

        A = R + dW
        v+ = the k largest positive elements of A,  v- = those of -A,  m+, m- = their means
        if m+ >= m-:  dW* = +m+ at the positions of v+,  else:  dW* = -m- at the positions of v-
        R <- A - dW*;  momentum of the inner optimizer <- 0 where dW* is not 0
        message = [m of each tensor, Golomb code of the positions]          one all-gather
        W <- W + mean over workers of dW*

    The Golomb code of a gap d between positions is (d - 1) >> b zeros and a one, and the b low bits
    of d - 1. `codings.Golomb` stores both parts separately. For a fraction p of random positions it
    takes b + 1 / (1 - (1 - p)^(2^b)) bits per position on average. For any positions it takes at
    most b + 1 + (1 / p - 1) / 2^b.

    Differences from the paper

    * The positions of all tensors of a bucket with about the same density form one stream of gaps,
      so that a small tensor costs one mean and no header.
    * Messages have a fixed length, with capacity for any positions. This is 3 % to 5 % more than
      the average length.
    * Tensors below `dense_below` are averaged densely, since they oscillate if each round changes
      them in one direction only.

    Args:
        steps: Number of local steps between two exchanges.
        density: Fraction of the elements that is sent in an exchange, in (0, 1].
        masking: Clear the inner optimizer's momentum of sent elements.
        outer: Outer optimizer, which takes a step along the mean of dW*; `None`: the mean is added
            to the weights.
        dense_below: Tensors of fewer float32 bytes are averaged densely.

    Raises:
        ValueError: If an argument is out of range; the message names it.

    Example:
        >>> SBC.preset(3)  # the paper's SBC (3)
        SBC(density=0.01, dense_below=4096, steps=100, masking=True, outer=None)
    """

    steps: int = 10
    masking: bool = True
    outer: Outer | None = None

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        checks.integer("steps", self.steps, low=1)
        checks.boolean("masking", self.masking)
        outer.check("outer", self.outer)

    @property
    @override
    def traits(self) -> Traits:
        return dataclasses.replace(
            super().traits,
            paper="Sattler, Wiedemann, Müller, Samek 2019",
            requests="all-gather of means and coded positions",
            bits="density (b + 1 + (1 / density - 1) / 2^b) / steps",
            rounds_values=False,
            sends_selected=False,
        )

    @classmethod
    def preset(cls, number: int, **options: Any) -> SBC:
        """Return the paper's SBC (1), (2) or (3).

        Args:
            number: 1: every step, density 0.1 %; 2: every 10 steps, 1 %; 3: every 100 steps, 1 %.
            options: Further hyper-parameters.

        Raises:
            ValueError: If `number` is not 1, 2 or 3.
        """
        if number not in _PRESETS:
            raise ValueError(f"`number` must be 1, 2 or 3. Received: number={number!r}")
        steps, density = _PRESETS[number]
        return cls(**{"steps": steps, "density": density, **options})

    @property
    @override
    def sync_schedule(self) -> SyncSchedule:
        return SyncSchedule(
            local_steps=self.steps, masks_local_momentum=self.masking, outer=self.outer
        )

    @override
    def refuses(self, spec: TensorSpec) -> str | None:
        if spec.bytes < self.dense_below:
            return f"{spec.bytes} bytes < dense_below"
        return None

    @override
    def dense(self) -> Method:
        return LocalSGD(steps=self.steps, outer=self.outer)

    @override
    def describe(self, spec: TensorSpec) -> str:
        return f"one mean, coded positions, every {self.steps} steps"

    @override
    def exchange(self, grads: list[tf.Tensor], state: State, ctx: Context) -> Exchange:
        """Exchange the changes of the weights; `grads` are these changes divided by K."""
        specs = ctx.layout.specs
        layout = MessageLayout.of(self.capacities(ctx.layout), quantized=True)
        capacities = Capacity(tuple(s.size for s in specs), layout.capacities)
        sums = [
            r + g for r, g in zip(state["residual"], feedback.scaled(grads, ctx.scale), strict=True)
        ]
        finite, means, positions, counts = _select(sums, layout)
        coded = Golomb().encode(positions, counts, capacities, tf.constant(0))
        messages = yield AllGather(wire.message(finite, tf.stack(means), coded.words))
        totals = _sum_messages(messages, layout, capacities, sums)
        residuals = [
            tf.tensor_scatter_nd_sub(tf.reshape(a, [-1]), as_column(at, n), tf.fill([n], mean))
            for a, at, n, mean in zip(
                sums, coded.indices, tf.unstack(coded.counts), means, strict=True
            )
        ]
        residuals = [tf.reshape(r, s.shape) for r, s in zip(residuals, specs, strict=True)]
        return totals, {"residual": residuals}

    @override
    def k(self, spec: TensorSpec) -> int:
        return capacity(max(1.0, self.density * spec.size - 1e-9), spec.size)


def _select(
    sums: list[tf.Tensor], layout: MessageLayout
) -> tuple[tf.Tensor, list[tf.Tensor], list[tf.Tensor], tf.Tensor]:
    """Select the sign with the larger mean magnitude for each tensor.

    Args:
        sums: Residuals plus changes, float32 tensors.
        layout: Layout of the message.

    Returns:
        Whether all elements are finite, bool scalar; for each tensor the signed mean; for each
        tensor the positions, int32 `[k]`; and their numbers, int32 `[tensors]`.
    """
    zeros = [tf.zeros_like(a) for a in sums]
    above, below = (
        layout.split(
            ops.accumulate_and_select(
                sums, zeros, [], layout.capacities, selectors="exact", quantized=True, side=side
            ).message
        )
        for side in (1, -1)
    )
    finite = tf.equal(above.flags[0], 1) & tf.equal(below.flags[0], 1)
    larger = [a[0] >= -b[0] for a, b in zip(above.values, below.values, strict=True)]
    means, positions = (
        [tf.where(first, a, b) for first, a, b in zip(larger, *sides, strict=True)]
        for sides in ((above.values, below.values), (above.indices, below.indices))
    )
    counts = tf.where(tf.stack(larger), above.counts, below.counts)
    return finite, [mean[0] for mean in means], positions, counts


def _sum_messages(
    messages: tf.Tensor, layout: MessageLayout, capacities: Capacity, like: list[tf.Tensor]
) -> list[tf.Tensor]:
    """Return the sums of the messages of all workers, in the shapes of `like`."""
    flags, means, words = wire.split(messages, len(like))
    positions = Golomb().decode(words, capacities, tf.constant(0))
    values = tf.split(means, len(like), axis=1)
    parts = Parts(flags, positions.counts, positions.indices, values)
    return ops.decode(layout.join(parts), layout, like)
