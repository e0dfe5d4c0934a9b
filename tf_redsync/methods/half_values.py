"""Values of selected elements in 16 bits: two in a word, and their rounding errors.

The message of `ops.accumulate_and_select` has, for every tensor, a count, indices and float32
values (`ops/contract.py`). Here the values become 16-bit numbers, so that a selected element takes
48 bits rather than 64. A tensor whose values are one mean stays as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_redsync.exchange import wire
from tf_redsync.ops.contract import capacity


def halved(
    message: tf.Tensor,
    residuals: Sequence[tf.Tensor],
    k: tf.Tensor | Sequence[int],
    dtype: tf.DType,
    **form: Any,
) -> tuple[tf.Tensor, list[tf.Tensor]]:
    """Round the values of a message.

    Args:
        message: int32 `[words]`.
        residuals: What the selection left.
        k: As given to the selection.
        dtype: Of 16 bits.
        form: `selectors` and `quantized`, as given to the selection.

    Returns:
        The shorter message, all zero unless all values are finite in `dtype`; and the residuals
        with the rounding errors where values were sent.
    """
    layout = _layout(residuals, k, **form)
    parts = tf.split(message, [1, *(length for lengths in layout for length in lengths)])
    flag, words, finite, kept = parts[0], [], tf.constant(True), []
    for i, (residual, one_mean) in enumerate(zip(residuals, form["quantized"], strict=True)):
        head, indices, bits = parts[1 + 3 * i : 4 + 3 * i]
        if one_mean:
            words += [head, indices, bits]
            kept.append(residual)
            continue
        values = wire.from_words(bits)
        halves = tf.cast(values, dtype)
        finite &= tf.reduce_all(tf.math.is_finite(halves))
        even = tf.pad(halves, [[0, tf.size(halves) % 2]])
        words += [head, indices, tf.bitcast(tf.reshape(even, [-1, 2]), tf.int32)]
        used = tf.range(tf.size(indices)) < head[0]
        errors = tf.where(used, values - tf.cast(halves, tf.float32), 0.0)
        flat = tf.tensor_scatter_nd_add(tf.reshape(residual, [-1]), indices[:, tf.newaxis], errors)
        kept.append(tf.ensure_shape(tf.reshape(flat, tf.shape(residual)), residual.shape))
    short = tf.concat([flag, *words], axis=0)
    return tf.where(finite, short, tf.zeros_like(short)), kept


def restored(
    messages: tf.Tensor,
    tensors: Sequence[tf.Tensor],
    k: tf.Tensor | Sequence[int],
    dtype: tf.DType,
    **form: Any,
) -> tf.Tensor:
    """Undo `halved`, but for the rounding, for the messages of all workers, `[workers, words]`."""
    layout = _layout(tensors, k, **form)
    lengths = []
    for (head, indices, bits), one_mean in zip(layout, form["quantized"], strict=True):
        lengths += [head, indices, bits if one_mean else (bits + 1) // 2]
    parts = tf.split(messages, [1, *lengths], axis=1)
    words = [parts[0]]
    for i, ((_, _, bits), one_mean) in enumerate(zip(layout, form["quantized"], strict=True)):
        words += parts[1 + 3 * i : 3 + 3 * i]
        if one_mean:
            words.append(parts[3 + 3 * i])
            continue
        halves = tf.reshape(tf.bitcast(parts[3 + 3 * i], dtype), [tf.shape(messages)[0], -1])
        words.append(wire.to_words(tf.cast(halves[:, :bits], tf.float32)))
    return tf.concat(words, axis=1)


def _layout(
    tensors: Sequence[tf.Tensor],
    k: tf.Tensor | Sequence[int],
    selectors: Sequence[str],
    quantized: Sequence[bool],
) -> list[tuple[Any, Any, Any]]:
    """Words of every tensor before its indices, of the indices, and of the values."""
    lengths: list[tuple[Any, Any, Any]] = []
    for i, (tensor, selector, one_mean) in enumerate(
        zip(tensors, selectors, quantized, strict=True)
    ):
        slots = _slots(k[i], selector, tensor.shape.num_elements())
        lengths.append((2, slots, 0) if one_mean else (1, slots, slots))
    return lengths


def _slots(k: Any, selector: str, size: int) -> Any:
    """Slots of a tensor in the message, for a number or a tensor k."""
    if isinstance(k, tf.Tensor):
        return tf.minimum(k + k // 2, size) if selector == "threshold" else k
    return capacity(k, selector, size)
