"""Streaming DiLoCo: fragments of the model exchanged in turn, overlapped and quantized."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from typing_extensions import override

from tf_redsync import checks
from tf_redsync.config import register
from tf_redsync.exchange import feedback
from tf_redsync.exchange.capabilities import Fragmented
from tf_redsync.exchange.context import Context, Rounding
from tf_redsync.exchange.layout import BucketLayout, TensorSpec
from tf_redsync.exchange.method import Exchange, Payloads, State
from tf_redsync.exchange.requests import AllReduce
from tf_redsync.exchange.sync_schedule import SyncSchedule
from tf_redsync.exchange.traits import Traits
from tf_redsync.methods.common import rounded_all_reduce, small_floats
from tf_redsync.methods.common.sparsifier import flat, split
from tf_redsync.methods.local_sgd import DiLoCo

_VALUE_BITS = (4, 8, 16, 32)
_FRAGMENTS, _OVERLAP = 4, 5  # defaults, at most what `steps` allows
_HALF = Rounding("bfloat16", error_feedback=True)  # error feedback sums in float32


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class StreamingDiLoCo(Fragmented, DiLoCo):
    """Streaming DiLoCo: DiLoCo with communication spread evenly over the steps.

    Between two exchanges the workers' weights differ, and each exchange averages only one fragment.
    When an epoch ends, and before an evaluation or a save, all fragments are exchanged at once and
    the rounds restart. So the workers have common weights there. In a custom loop call
    `optimizer.exchange.to_consensus()`.

    Arthur Douillard, Yanislav Donchev, Keith Rush, Satyen Kale, Zachary Charles, Zachary Garrett,
    Gabriel Teston, Dave Lacey, Ross McIlroy, Jiajun Shen, Alexandre Ramé, Arthur Szlam,
    Marc'Aurelio Ranzato, Paul Barham (2025), "Streaming DiLoCo with Overlapping Communication:
    Towards a Distributed Free Lunch", arXiv 2501.18512.

    The model is divided into F fragments. Fragment p is exchanged every H = `steps` steps, with an
    offset of p H / F steps. With the common weights W of a fragment, on every worker, after step t
    in which its exchange begins:

        d_i = w - W                                             in `value_bits` bits
        d = mean over workers of d_i                            beside steps t + 1 to t + overlap
        W <- W + outer(d)                                       after step t + overlap
        w <- mixing w + (1 - mixing) W

    A step thus sends at most a fragment instead of the whole model, and waits only for a message
    that takes longer than `overlap` steps. With NCCL, step t + 1 waits for the message, because
    NCCL needs one order of all collectives of a GPU.
    `fragments=1, overlap=0, mixing=0, value_bits=32` is `DiLoCo`.

    Differences from the paper

    * With 4 and 8 bits each run of 256 values has a scale. Among more than two workers the sums are
      rounded a second time before an all-gather; see `methods/common/small_floats.py`.

    Args:
        steps: H, the number of steps between two exchanges of a fragment; 100 in most of the paper.
        outer: As in `DiLoCo`. Each fragment has its own slots and round counter.
        fragments: F, at most `steps`. Layer l, the variables whose paths are equal up to the last
            slash, belongs to fragment l mod F. Fragments without a layer are skipped. Or regular
            expressions, one per fragment, searched in the variables' paths; the first match
            decides. `None`: 4, or `steps` if that is smaller.
        overlap: tau, the number of steps between the start of an exchange and its update, from 0 to
            `steps` / F and below `steps`, so that one exchange runs at a time. `None`: 5, as in the
            paper, or the maximum if that is smaller.
        mixing: alpha, the weight of the worker's local weights when a fragment is updated, in
            [0, 1).
        value_bits: Bits per value: 4 (E3M0), 8 (E4M3), 16 (bfloat16) or 32. With 32, wrap the
            method in `BlockQuantized` or `HalfPrecision` to round values with error feedback.

    Raises:
        ValueError: If an argument is out of range; the message names it.

    Example:
        >>> StreamingDiLoCo(outer=None).describe(TensorSpec("block_1/kernel", (64, 64), fragment=1))
        '4 bits in fragment 2 of 4, every 100 steps from step 25, 5 steps late'
    """

    steps: int = 100
    fragments: int | tuple[str, ...] | None = None
    overlap: int | None = None
    mixing: float = 0.5
    value_bits: int = 4

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.fragments, (list, tuple)) and self.fragments:
            for pattern in self.fragments:
                checks.pattern("fragments", pattern)
            object.__setattr__(self, "fragments", tuple(self.fragments))
        elif self.fragments is not None:
            checks.integer("fragments", self.fragments, low=1)
        if self.count > self.steps:
            raise ValueError(
                "`fragments` must not exceed `steps`, since a step begins at most one exchange. "
                f"Received: fragments={self.fragments}, steps={self.steps}"
            )
        if self.overlap is not None:
            checks.integer("overlap", self.overlap, low=0)
        if self.late > self.most_overlap:
            raise ValueError(
                f"`overlap` must be at most {self.most_overlap}, when the next exchange begins. "
                f"Received: overlap={self.overlap}, steps={self.steps}, "
                f"fragments={self.fragments}"
            )
        checks.real("mixing", self.mixing, low=0.0, high=1.0, high_open=True)
        checks.choice("value_bits", self.value_bits, _VALUE_BITS)

    @property
    @override
    def traits(self) -> Traits:
        return dataclasses.replace(
            super().traits,
            paper="Douillard et al. 2025",
            requests="all-to-all, then all-gather, of a fragment's changes; or one all-gather",
            bits="(4 + 1 / 8) (1 + 1 / K) / steps; K = 2: (4 + 1 / 8) / steps",
            # Each fragment is one bucket
            whole_model=True,
            # Rounding errors of values are dropped
            conserves=self.value_bits == 32,
            # Two workers sum decoded values after the all-gather
            totals_may_overflow=self.value_bits in small_floats.MANTISSA_BITS,
        )

    @property
    def count(self) -> int:
        """F, the number of fragments."""
        if self.fragments is None:
            return min(_FRAGMENTS, self.steps)
        return self.fragments if isinstance(self.fragments, int) else len(self.fragments)

    @property
    def most_overlap(self) -> int:
        """The maximum of `overlap`, with which at most one exchange runs at a time."""
        return min(self.steps // self.count, self.steps - 1)

    @property
    def late(self) -> int:
        """Number of steps between the start of an exchange and its update."""
        return min(_OVERLAP, self.most_overlap) if self.overlap is None else self.overlap

    @property
    @override
    def averages_changes(self) -> bool:
        return self.value_bits == 32

    @property
    @override
    def sync_schedule(self) -> SyncSchedule:
        return SyncSchedule(
            local_steps=self.steps,
            outer=self.outer,
            fragments=self.count,
            delay=self.late,
            mixing=self.mixing,
        )

    @property
    @override
    def fragmentation(self) -> Any:
        return self.fragments or self.count, self.mixing

    @override
    def fragments_of(self, specs: Sequence[TensorSpec]) -> list[int]:
        if not isinstance(self.fragments, tuple):
            layers = list(dict.fromkeys(_layer(s) for s in specs))
            return [layers.index(_layer(s)) % self.count for s in specs]
        fragments = [_first_match(self.fragments, s) for s in specs]
        missing = set(range(self.count)) - set(fragments)
        if missing:
            raise ValueError(
                "each pattern of `fragments` must be the first match of some variable's path. "
                "Received unmatched: "
                f"{', '.join(repr(self.fragments[i]) for i in sorted(missing))}. The variables "
                f"are: {', '.join(s.name for s in specs)}."
            )
        return fragments

    @override
    def describe(self, spec: TensorSpec) -> str:
        late = f", {self.late} steps late" if self.late else ""
        then = "" if self.outer is None else f"; then {self.outer!r}"
        start = self.sync_schedule.offset(spec.fragment) or self.steps
        return (
            f"{self.value_bits} bits in fragment {spec.fragment + 1} of {self.count}, every "
            f"{self.steps} steps from step {start}{late}{then}"
        )

    @override
    def payloads(self, layout: BucketLayout, step: int) -> Payloads:
        size = sum(s.size for s in layout.specs)
        if self.value_bits == 32:
            return [(AllReduce, 4 * size)]
        if self.value_bits == 16:
            return rounded_all_reduce.rounded_payloads(_HALF, size, layout.workers)
        return small_floats.payloads(size, layout.workers, self.value_bits)

    @override
    def exchange(self, grads: list[tf.Tensor], state: State, ctx: Context) -> Exchange:
        """Exchange the changes of a fragment's weights; `grads` are these changes divided by K."""
        grads = feedback.scaled(grads, ctx.scale)
        if self.value_bits == 32:
            totals = yield AllReduce(grads)
            return totals, state
        if self.value_bits == 16:
            rounded = dataclasses.replace(ctx, rounding=_HALF)
            totals, _ = yield from rounded_all_reduce.all_reduce(rounded, grads)
            return totals, state
        sums = yield from small_floats.all_reduce(ctx, flat(grads), self.value_bits)
        return split(sums, ctx.layout.specs), state


def _layer(spec: TensorSpec) -> str:
    return spec.name.rpartition("/")[0] or spec.name


def _first_match(patterns: Sequence[str], spec: TensorSpec) -> int:
    matches = [i for i, pattern in enumerate(patterns) if re.search(pattern, spec.name)]
    if not matches:
        raise ValueError(
            "a pattern of `fragments` must match the path of each variable. Received: "
            f"fragments={tuple(patterns)}, and a variable {spec.name!r}"
        )
    return matches[0]
