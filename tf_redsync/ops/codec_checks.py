"""Checks of the codecs' arguments, and the type of decoded positions."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from tf_redsync.ops.limits import MAX_COUNT


class Positions(NamedTuple):
    """Decoded positions of all workers.

    Attributes:
        indices: List of int32 tensors [P, slots], the bits of unsigned positions, ascending; 0
            after the first `count`.
        counts: int32 [P, N].
    """

    indices: list[tf.Tensor]
    counts: tf.Tensor


def check_list(name: str, tensors: Sequence[tf.Tensor], dtype: tf.DType = tf.float32) -> None:
    """Check the dtype of a list of tensors, and the number of positions in each.

    Raises:
        ValueError: If `tensors` is empty, or an int32 tensor has 2^31 positions or more.
        TypeError: If a tensor does not have `dtype`. The messages have `name`.
    """
    if not tensors:
        raise ValueError(f"`{name}` must hold at least one tensor. Received: an empty list.")
    for i, tensor in enumerate(tensors):
        if tensor.dtype != dtype:
            raise TypeError(
                f"`{name}` must be {dtype.name}. Received: {name}[{i}] of {tensor.dtype.name}."
            )
        size = tensor.shape.num_elements()
        if dtype == tf.int32 and size is not None and size > MAX_COUNT:
            raise ValueError(
                f"`{name}` must have at most {MAX_COUNT} entries each, because counts are int32. "
                f"Received: {name}[{i}] of shape {tensor.shape}. Select fewer elements."
            )


def check_ints(
    name: str, values: Sequence[int], low: int, high: int, length: int | None = None
) -> tuple[int, ...]:
    """Check Python ints, one per tensor, and return them as a tuple.

    Raises:
        TypeError: If a value is not an int.
        ValueError: If `values` is empty or does not have `length` entries, or a value is outside
            [low, high]. The message has `name`.
    """
    try:
        values = tuple(map(operator.index, values))
    except TypeError:
        raise TypeError(f"`{name}` must be ints. Received: {name}={values!r}") from None
    if not values or len(values) != (length or len(values)):
        raise ValueError(
            f"`{name}` must have one entry per tensor, and at least one. Received: {len(values)} "
            f"entries{'' if length is None else f' for {length} tensors'}."
        )
    for i, value in enumerate(values):
        if not low <= value <= high:
            raise ValueError(f"`{name}` must be in [{low}, {high}]. Received: {name}[{i}]={value}.")
    return values
