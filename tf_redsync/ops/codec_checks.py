"""What the codecs share: the type of received positions, and checks of arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from tf_redsync.ops.contract import MAX_ELEMENTS


class Positions(NamedTuple):
    """Positions that were received.

    Attributes:
        indices: list of int32 tensors [P, slots], ascending; 0 after the first `count`.
        counts: int32 [P, N].
    """

    indices: list[tf.Tensor]
    counts: tf.Tensor


def check_list(name: str, tensors: Sequence[tf.Tensor], dtype: tf.DType = tf.float32) -> None:
    """Checks that there is a tensor, and that all are of one type and not too large.

    Raises:
        ValueError: for an empty list or a tensor of 2^31 elements or more.
        TypeError: for another dtype.
    """
    if not tensors:
        raise ValueError(f"`{name}` must hold at least one tensor. Received: an empty list.")
    for i, tensor in enumerate(tensors):
        if tensor.dtype != dtype:
            raise TypeError(
                f"`{name}` must be {dtype.name}. Received: {name}[{i}] of {tensor.dtype.name}."
            )
        size = tensor.shape.num_elements()
        if size is not None and size > MAX_ELEMENTS:
            raise ValueError(
                f"`{name}` must have at most {MAX_ELEMENTS} elements each. Received: {name}[{i}] "
                f"of shape {tensor.shape}. Split the variable."
            )


def check_ints(
    name: str, values: Sequence[int], low: int, high: int, length: int | None = None
) -> tuple[int, ...]:
    """Checks Python ints, one per tensor, and returns them as a tuple.

    Raises:
        ValueError: for an empty or wrong length, or a value outside [low, high].
    """
    values = tuple(int(v) for v in values)
    if not values or len(values) != (length or len(values)):
        raise ValueError(
            f"`{name}` must have one entry per tensor, and at least one. Received: {len(values)} "
            f"entries{'' if length is None else f' for {length} tensors'}."
        )
    for i, value in enumerate(values):
        if not low <= value <= high:
            raise ValueError(f"`{name}` must be in [{low}, {high}]. Received: {name}[{i}]={value}.")
    return values
