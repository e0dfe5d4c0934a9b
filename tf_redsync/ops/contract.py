"""What the native ops and their references have in common: message layout, types, argument checks.

A message is a vector of 32-bit words, equal in length on all workers:

    [flag] then for every tensor, in order,
        not quantised:  [count, index * k, value * k]
        quantised:      [count, mean, index * k]

`flag` is 1 if everything accumulated is finite, else 0 (and then every other word is 0 too).
Indices are positions in the flattened tensor, ascending, 32 bits without a sign; values and means
are float32. All are *bit-cast* to int32, never converted, so that no index or value loses a bit.
Unused slots hold 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

SELECTORS = ("exact", "trimmed", "threshold", "fixed")
MAX_WORD = 2**32 - 1  # positions travel as 32 bits without a sign
MAX_COUNT = 2**31 - 1  # counts in messages are int32, and those of tf.math.top_k


class Selection(NamedTuple):
    """Result of `accumulate_and_select`.

    Attributes:
        message: int32 vector, what this worker sends; see the module's docstring for the layout.
        residuals: list of float32 tensors, the new residuals (selected elements are zero).
        velocities: list of float32 tensors, the new momentum; empty without momentum.
        ratios: float32 vector, one threshold ratio per tensor, -1 where there is none to reuse; for
            "fixed" the threshold as it was given.
    """

    message: tf.Tensor
    residuals: list[tf.Tensor]
    velocities: list[tf.Tensor]
    ratios: tf.Tensor


def message_words(k: Sequence[int], quantized: Sequence[bool]) -> int:
    """Length of a message in 32-bit words.

    Args:
        k: most elements to select, one int per tensor.
        quantized: one bool per tensor.

    Returns:
        The number of words, a Python int.

    Example:
        >>> message_words([10, 4], [False, True])
        28
    """
    return 1 + sum(2 + ki if mean else 1 + 2 * ki for ki, mean in zip(k, quantized, strict=True))


def packed_words(count: int, bits: int) -> int:
    """Words of 32 bits that `count` codes of so many bits take."""
    return -(-count * bits // 32)


def form_of(selector: str, tensors: int) -> dict[str, Any]:
    """`selectors` and `quantized` of the ops, for tensors that all send values in the same way."""
    return {"selectors": [selector] * tensors, "quantized": [False] * tensors}


def static_message_words(k, quantized) -> int | None:
    """Length of the message if it is known while the graph is built, else None."""
    k = tf.get_static_value(k)
    return None if k is None else message_words([int(ki) for ki in k], quantized)


def _check_selector(selector: str) -> None:
    if selector not in SELECTORS:
        raise ValueError(
            f"`selectors` must be among {', '.join(map(repr, SELECTORS))}. Received: {selector!r}."
        )


def _check_tensor(name: str, i: int, tensor: tf.Tensor) -> None:
    if tensor.dtype != tf.float32:
        raise TypeError(
            f"`{name}` must be float32 (cast bfloat16 and float16 first). "
            f"Received: {name}[{i}] of {tensor.dtype.name}."
        )
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


def check_layout(name: str, tensors: Sequence[tf.Tensor], selectors, quantized) -> None:
    """Checks what select and decode share: one selector and one bool per tensor."""
    if not tensors:
        raise ValueError(f"`{name}` must hold at least one tensor. Received: an empty list.")
    if not len(tensors) == len(selectors) == len(quantized):
        raise ValueError(
            f"`selectors` and `quantized` must have one entry per tensor. Received: {len(tensors)} "
            f"{name}, {len(selectors)} selectors, {len(quantized)} quantized."
        )
    for selector in selectors:
        _check_selector(selector)
    for i, tensor in enumerate(tensors):
        _check_tensor(name, i, tensor)


def check_select(grads, residuals, velocities, selectors, quantized, momentum: float) -> None:
    """Checks the arguments of `accumulate_and_select` while the graph is built.

    Raises:
        ValueError: for wrong lengths, shapes, selector names or a momentum outside [0, inf).
        TypeError: for a dtype other than float32.
    """
    check_layout("grads", grads, selectors, quantized)
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
