"""Exact top-k straight to a coded message and back: native ops, the same bits from several ops.

`select_and_code` is `ops.accumulate_and_select` and then `MessageCoding.encode` with `Golomb`
positions and values in few bits. Natively one op does both: the selected elements stay in a scratch
buffer, and their errors go into the residual in place. So it is with `uncoded`, which is
`MessageCoding.decode`. In pure TensorFlow the ops are composed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tf_redsync import ops
from tf_redsync.codings.base import Capacity
from tf_redsync.codings.golomb import Golomb, groups
from tf_redsync.codings.message import MessageCoding
from tf_redsync.codings.plain import Half
from tf_redsync.codings.signed_levels import MAX_BITS, SignedLevels
from tf_redsync.ops import native
from tf_redsync.ops.message_layout import MessageLayout
from tf_redsync.ops.native import runs_natively
from tf_redsync.ops.selection import checked

HALF_BITS = 16
VALUE_BITS = (*range(1, MAX_BITS + 1), HALF_BITS)


class Selected(NamedTuple):
    """Result of `select_and_code`.

    Attributes:
        message: int32 vector, what this worker sends.
        residuals: list of float32 tensors, what it keeps.
        velocities: list of float32 tensors; empty without momentum.
        layout: of the message before it was coded.
    """

    message: tf.Tensor
    residuals: list[tf.Tensor]
    velocities: list[tf.Tensor]
    layout: MessageLayout


def coding(value_bits: int) -> MessageCoding:
    """How the message is coded: positions by `Golomb`, values in `value_bits` bits each."""
    if value_bits == HALF_BITS:
        return MessageCoding(Golomb(), Half(dtype="bfloat16"))
    return MessageCoding(Golomb(), SignedLevels(bits=value_bits))


def select_and_code(
    grads: Sequence[tf.Tensor],
    residuals: Sequence[tf.Tensor],
    velocities: Sequence[tf.Tensor],
    k: Sequence[int],
    *,
    value_bits: int,
    momentum: float = 0.0,
    nesterov: bool = False,
    masking: bool = True,
    scale: tf.Tensor | float | None = None,
) -> Selected:
    """Adds gradients to the residuals, moves the k largest elements into a coded message.

    Args:
        grads: See `ops.accumulate_and_select`, as for the other arguments that it has.
        residuals: See there.
        velocities: See there.
        k: Elements to select of each tensor, Python ints.
        value_bits: One of `VALUE_BITS`.
        momentum: See there.
        nesterov: See there.
        masking: See there.
        scale: See there.

    Returns:
        `Selected`. The message is all zero, and the rest unspecified, if anything accumulated is
        not finite, or too large for bfloat16.

    Raises:
        ValueError: for wrong lengths, shapes, `value_bits` or a bad momentum; or more than
            2^31 - 1 elements.
        TypeError: for tensors of dtypes that `ops.accumulate_and_select` does not take.
        tf.errors.InvalidArgumentError: when run, for `k` out of range.
    """
    if value_bits not in VALUE_BITS:
        raise ValueError(f"`value_bits` must be one of {VALUE_BITS}. Received: {value_bits}.")
    layout = MessageLayout.of(k)
    selectors = ["exact"] * len(grads)
    grads, residuals, velocities = checked(grads, residuals, velocities, selectors, momentum)
    options: dict[str, Any] = {"momentum": momentum, "nesterov": nesterov, "masking": masking}
    scale = tf.convert_to_tensor(1.0 if scale is None else scale, tf.float32)
    if runs_natively(grads):
        return _one_op(grads, residuals, velocities, layout, scale, value_bits, **options)
    chosen = ops.accumulate_and_select(
        grads, residuals, velocities, k, selectors=selectors, scale=scale, **options
    )
    message, kept = coding(value_bits).encode(chosen.message, chosen.residuals, layout)
    return Selected(message, kept, list(chosen.velocities), layout)


def _one_op(
    grads: list[tf.Tensor],
    residuals: list[tf.Tensor],
    velocities: list[tf.Tensor],
    layout: MessageLayout,
    scale: tf.Tensor,
    value_bits: int,
    **options: Any,
) -> Selected:
    k = layout.capacities
    streams, rice = _streams(Capacity(tuple(g.shape.num_elements() for g in grads), k))
    message, kept, moving = native.load().redsync_select_and_code(
        grads=grads,
        residuals=residuals,
        velocities=velocities,
        scale=scale,
        k=k,
        streams=streams,
        rice=rice,
        value_bits=value_bits,
        **options,
    )
    return Selected(message, kept, moving, layout)


def uncoded(
    messages: tf.Tensor, like: Sequence[tf.Tensor], layout: MessageLayout, value_bits: int
) -> tf.Tensor:
    """Return plain messages, which `ops.decode` takes, for those that workers have coded.

    Args:
        messages: int32 `[workers, words]`, of `select_and_code`.
        like: Tensors of the shapes that were selected from.
        layout: As `select_and_code` has returned it, and that of the result.
        value_bits: As given to `select_and_code`.

    Returns:
        int32 `[workers, layout.words]`.

    Raises:
        tf.errors.InvalidArgumentError: when run, for positions that nobody has coded.
    """
    if not runs_natively([messages]):
        plain, _ = coding(value_bits).decode(messages, like, layout)
        return plain
    sizes = tuple(t.shape.num_elements() for t in like)
    streams, rice = _streams(Capacity(sizes, layout.capacities))
    return native.load().redsync_uncode(
        messages=messages,
        sizes=sizes,
        k=layout.capacities,
        streams=streams,
        rice=rice,
        value_bits=value_bits,
    )


def _streams(capacity: Capacity) -> tuple[list[int], list[int]]:
    """For each tensor the number of its stream, and for each stream the bits sent as they are."""
    streams, rice = [0] * len(capacity.slots), []
    for number, group in enumerate(groups(capacity)):
        rice.append(group.rice)
        for i in group.members:
            streams[i] = number
    return streams, rice
