"""The context of an exchange: bucket, rank, step, and the rounding and coding of values."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import tensorflow as tf

from tf_redsync.exchange.layout import BucketLayout


@dataclasses.dataclass(frozen=True)
class Rounding:
    """Rounding of all-reduced values to 16-bit floats.

    Attributes:
        dtype: `"float16"` or `"bfloat16"`.
        error_feedback: Whether the exchange returns the rounding errors, to be added to the
            residuals.
    """

    dtype: str
    error_feedback: bool

    def finer(self) -> Rounding:
        """Return itself: 16 bits are enough for all sums."""
        return self


@dataclasses.dataclass(frozen=True)
class BlockRounding:
    """Rounding of all-reduced values to a few bits; see `ops/block_quantization.py`.

    Attributes:
        bits: Bits per element: 8, 4 or 2.
        block: Number of elements that share a scale.
        error_feedback: Always true; see `Rounding`.
    """

    bits: int
    block: int
    error_feedback: ClassVar[bool] = True

    def finer(self) -> BlockRounding:
        """Return the rounding to twice the bits, at most 8; see `Traits.finer_sums`."""
        return dataclasses.replace(self, bits=min(8, 2 * self.bits))


@dataclasses.dataclass(frozen=True)
class Context:
    """One step of one bucket on one worker, apart from its gradients and state.

    Attributes:
        layout: The bucket: static, the same on all workers and in every step.
        rank: This worker's rank, int32 scalar in [0, workers). The only field that differs between
            workers: for random streams per worker and for the block that a worker sums, never for
            a branch around a collective.
        step: int64 scalar tensor, the number of exchanges before this one. Non-finite ones count;
            a dense warm-up of all methods does not. Python's `if` cannot read it; use `phases` or
            `dense_every` of `SyncSchedule`.
        scale: float32 scalar factor for the gradients, from `Clipping.clip_scale`, or `None`.
        rounding: Rounding of all-reduced values; `None`: float32. Set by wrappers such as
            `HalfPrecision`.
        coding: Coding of selected elements, a `codings.message.MessageCoding`; `None`: plain words,
            rounded by `rounding`. Set by wrappers such as `Coded`.
    """

    layout: BucketLayout
    rank: Any
    step: tf.Tensor
    scale: tf.Tensor | None = None
    rounding: Rounding | BlockRounding | None = None
    coding: Any = None
