"""The context of an exchange: what it needs to know about its step."""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow as tf

from tf_redsync.exchange.layout import BucketLayout


@dataclasses.dataclass(frozen=True)
class Rounding:
    """How values that are added up over the workers travel.

    Attributes:
        dtype: `"float16"` or `"bfloat16"`.
        error_feedback: Whether workers learn what their values lose.
    """

    dtype: str
    error_feedback: bool


@dataclasses.dataclass(frozen=True)
class Context:
    """One step of one bucket, as a worker sees it, beside its gradients and state.

    Attributes:
        layout: The bucket: static, the same on all workers and in every step.
        rank: This worker's number, int32 scalar in [0, workers). The one field in which workers
            differ: for random numbers of a worker's own and for the block that is its to add up,
            never for a branch around a collective.
        step: int64 scalar tensor, the number of exchanges before this one.
        scale: float32 scalar factor for the gradients, from `Clipping.clip_scale`, or `None`.
        rounding: How all-reduced values travel; `None` for float32. A method around another one
            sets it, as `HalfPrecision` does.
        coding: How selected elements travel, a `codings.MessageCoding`; `None` for as `rounding`
            says. A method around another one sets it, as `Coded` does.
    """

    layout: BucketLayout
    rank: Any
    step: tf.Tensor
    scale: tf.Tensor | None = None
    rounding: Rounding | None = None
    coding: Any = None
