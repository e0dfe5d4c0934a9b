"""What the native ops and their references have in common: types, argument checks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from tf_redsync.ops.message_layout import MessageLayout

SELECTORS = ("exact", "trimmed", "threshold", "fixed")
MAX_WORD = 2**32 - 1  # positions travel as 32 bits without a sign
MAX_COUNT = 2**31 - 1  # counts in messages are int32, and those of tf.math.top_k


class Selection(NamedTuple):
    """Result of `accumulate_and_select`.

    Attributes:
        message: int32 vector, what this worker sends.
        residuals: list of float32 tensors, the new residuals (selected elements are zero).
        velocities: list of float32 tensors, the new momentum; empty without momentum.
        ratios: float32 vector, one threshold ratio per tensor, -1 where there is none to reuse; for
            "fixed" the threshold as it was given.
        layout: of the message.
    """

    message: tf.Tensor
    residuals: list[tf.Tensor]
    velocities: list[tf.Tensor]
    ratios: tf.Tensor
    layout: MessageLayout


def packed_words(count: int, bits: int) -> int:
    """Words of 32 bits that `count` codes of so many bits take."""
    return -(-count * bits // 32)


def _check_selector(selector: str) -> None:
    if selector not in SELECTORS:
        raise ValueError(
            f"`selectors` must be among {', '.join(map(repr, SELECTORS))}. Received: {selector!r}."
        )


def _check_tensor(name: str, i: int, tensor: tf.Tensor, *, narrow: bool = False) -> None:
    if tensor.dtype not in ((tf.float32, tf.bfloat16) if narrow else (tf.float32,)):
        what = (
            "float32 or bfloat16 (cast float16 first)"
            if narrow
            else "float32 (cast bfloat16 and float16 first)"
        )
        raise TypeError(f"`{name}` must be {what}. Received: {name}[{i}] of {tensor.dtype.name}.")
    size = tensor.shape.num_elements()
    if size is not None and size > MAX_WORD:
        raise ValueError(
            f"`{name}` must have at most {MAX_WORD} elements each, since positions are sent as 32 "
            f"bits. Received: {name}[{i}] of shape {tensor.shape}. Split the variable."
        )


def check_countable(name: str, tensors: Sequence[tf.Tensor]) -> None:
    """Checks that `tf.math.top_k`, which counts in int32, can serve the tensors."""
    for i, tensor in enumerate(tensors):
        size = tensor.shape.num_elements()
        if size is not None and size > MAX_COUNT:
            raise ValueError(
                f"`{name}` must have at most {MAX_COUNT} elements each in pure TensorFlow, whose "
                f"top_k takes no more. Received: {name}[{i}] of shape {tensor.shape}. Use the "
                f"native ops, which take up to {MAX_WORD} (see `python -m tf_redsync.doctor`), or "
                "split the variable."
            )


def _check_same_shapes(name: str, tensors: Sequence[tf.Tensor], grads: Sequence[tf.Tensor]) -> None:
    for i, (t, g) in enumerate(zip(tensors, grads, strict=True)):
        _check_tensor(name, i, t)
        if not g.shape.is_compatible_with(t.shape):
            raise ValueError(
                f"`{name}` must have the shapes of `grads`. Received: {name}[{i}] of shape "
                f"{t.shape} and grads[{i}] of shape {g.shape}."
            )


def _check_tensors(name: str, tensors: Sequence[tf.Tensor], *, narrow: bool = False) -> None:
    """Checks that there is a tensor, and that all can be selected from."""
    if not tensors:
        raise ValueError(f"`{name}` must hold at least one tensor. Received: an empty list.")
    for i, tensor in enumerate(tensors):
        _check_tensor(name, i, tensor, narrow=narrow)


def check_decode(like: Sequence[tf.Tensor], layout: MessageLayout) -> None:
    """Checks the arguments of `decode` while the graph is built.

    Raises:
        ValueError: for a layout of another number of tensors.
        TypeError: for a dtype other than float32.
    """
    _check_tensors("like", like)
    if len(like) != len(layout.capacities):
        raise ValueError(
            "`layout` must have one capacity per tensor of `like`. Received: "
            f"{len(layout.capacities)} capacities, {len(like)} like."
        )


def check_select(
    grads: Sequence[tf.Tensor],
    residuals: Sequence[tf.Tensor],
    velocities: Sequence[tf.Tensor],
    selectors: Sequence[str],
    quantized: Sequence[bool],
    momentum: float,
) -> None:
    """Checks the arguments of `accumulate_and_select` while the graph is built.

    Raises:
        ValueError: for wrong lengths, shapes, selector names or a momentum outside [0, inf).
        TypeError: for a dtype other than float32, of gradients other than that and bfloat16.
    """
    _check_tensors("grads", grads, narrow=True)
    if not len(grads) == len(selectors) == len(quantized):
        raise ValueError(
            f"`selectors` and `quantized` must have one entry per tensor. Received: {len(grads)} "
            f"grads, {len(selectors)} selectors, {len(quantized)} quantized."
        )
    for selector in selectors:
        _check_selector(selector)
    if not (momentum >= 0.0 and math.isfinite(momentum)):
        raise ValueError(f"`momentum` must be finite and >= 0. Received: momentum={momentum}.")
    if len(residuals) != len(grads):
        raise ValueError(
            f"`residuals` must have one tensor per gradient. Received: {len(residuals)} residuals, "
            f"{len(grads)} grads."
        )
    expected = len(grads) if momentum else 0
    if len(velocities) != expected:
        raise ValueError(
            f"`velocities` must have one tensor per gradient if momentum is used, and be empty "
            f"without. Received: {len(velocities)} velocities, {len(grads)} grads, "
            f"momentum={momentum}."
        )
    _check_same_shapes("residuals", residuals, grads)
    if velocities:
        _check_same_shapes("velocities", velocities, grads)
