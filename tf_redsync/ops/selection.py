"""Accumulate and select, and decode: the two ops around an all-gather of selected elements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from tf_redsync.ops import native
from tf_redsync.ops.message_layout import MAX_WORD, MessageLayout
from tf_redsync.ops.native import runs_natively
from tf_redsync.ops.reference import decode as reference_decode
from tf_redsync.ops.reference import selection as reference_selection
from tf_redsync.ops.sparse import SparseTotal
from tf_redsync.ops.wire import before_cast

SELECTORS = ("exact", "trimmed", "threshold", "fixed")
_READ = (tf.float32, tf.bfloat16)  # dtypes of gradients that the op reads as they are
_FLOAT32 = (tf.float32,)


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


def accumulate_and_select(
    grads: Sequence[tf.Tensor],
    residuals: Sequence[tf.Tensor],
    velocities: Sequence[tf.Tensor],
    k: tf.Tensor | Sequence[int],
    ratios: tf.Tensor | None = None,
    *,
    selectors: str | Sequence[str] = "exact",
    quantized: bool | Sequence[bool] = False,
    momentum: float = 0.0,
    nesterov: bool = False,
    masking: bool = True,
    scale: tf.Tensor | float | None = None,
    side: tf.Tensor | int | None = None,
    search: tf.Tensor | bool | None = None,
) -> Selection:
    """Adds gradients to the residuals, moves the largest elements into a message.

    Elementwise in float32, with `t = scale * g`:

        no momentum:  v' = v + t
        momentum:     u' = momentum * u + t       v' = v + u'
        Nesterov:     u' = momentum * (u + t)     v' = (v + u') + t

    Then, for each tensor, elements of `a = |v'|` (or `a = side * v'` if quantised) with `a > 0` are
    selected: "exact" and "trimmed" take the `k` largest, the lower index first among equals;
    "threshold" takes everything above `mean + r * (max - mean)`, where `r` is bisected until
    between k/2 and 3k/2 elements pass, or is reused from an earlier step. If no `r` does, or the
    input is too heavy-tailed for it, the exact `k` largest are taken. "fixed" takes those with
    `a >= ratios[i]`, an absolute threshold; if more than `k` pass, the `k` largest of them, and the
    others wait in the residual. Selected elements of the
    residual are set to zero, and those of the velocity too if `masking`.

    If anything accumulated is not finite, or the threshold of "fixed" is NaN, the message is all
    zero, the ratios stay, and the new residuals and velocities are unspecified: keep the old ones.

    Args:
        grads: N float32 or bfloat16 tensors of any shape, n_i elements each; n_i may be 0.
        residuals: N float32 tensors of the same shapes.
        velocities: N float32 tensors of the same shapes; empty if `momentum` is 0.
        k: int32 [N], elements to select ("fixed": at most); 1 <= k_i <= n_i, or 0 where n_i is 0.
        ratios: float32 [N], from the previous step; -1 where there is none, as with None. For
            "fixed" the threshold, >= 0; it comes back unchanged.
        selectors: "exact", "trimmed", "threshold" or "fixed" for all tensors, or N of these names.
        quantized: a bool for all tensors, or N; a quantised tensor sends positions of one sign and
            their mean.
        momentum: factor >= 0; 0 means no velocity.
        nesterov: whether the momentum is Nesterov's.
        masking: whether selected elements of the velocity are set to zero.
        scale: float32 scalar, factor of the gradients (local clipping); None means 1.
        side: int32 scalar, +1 or -1: the sign that quantised tensors send; None means +1.
        search: bool scalar, whether to bisect anew (True) or to try `ratios` first (False);
            None means True.

    Returns:
        A `Selection`: message and its layout, residuals, velocities, ratios.

    Raises:
        ValueError: for wrong lengths, shapes, names or a bad momentum.
        TypeError: for gradients that are not float32 or bfloat16, residuals or velocities that are
            not float32.
        tf.errors.InvalidArgumentError: when run, for `k`, `side` or a threshold out of range.

    Reference:
        Fang, Fu, Yang and Hsieh, "RedSync: Reducing synchronization bandwidth for distributed deep
        learning training system", J. Parallel Distrib. Comput., 2019.
    """
    n = len(grads)
    selectors = (selectors,) * n if isinstance(selectors, str) else tuple(selectors)
    grads, residuals, velocities = checked(grads, residuals, velocities, selectors, momentum)
    layout = MessageLayout.of(k, quantized)
    arguments = {
        "grads": grads,
        "residuals": residuals,
        "velocities": velocities,
        "k": tf.convert_to_tensor(k, tf.int32),
        "ratios": tf.convert_to_tensor([-1.0] * n if ratios is None else ratios, tf.float32),
        "selectors": selectors,
        "momentum": float(momentum),
        "nesterov": bool(nesterov),
        "masking": bool(masking),
        "scale": tf.convert_to_tensor(1.0 if scale is None else scale, tf.float32),
        "side": tf.convert_to_tensor(1 if side is None else side, tf.int32),
        "search": tf.convert_to_tensor(True if search is None else search, tf.bool),
    }
    if runs_natively(grads):
        made = native.load().redsync_accumulate_and_select(quantized=layout.quantized, **arguments)
    else:
        made = reference_selection.accumulate_and_select(layout=layout, **arguments)
    return Selection(made[0], made[1], made[2], made[3], layout)


def decode(
    messages: tf.Tensor,
    layout: MessageLayout,
    like: Sequence[tf.Tensor],
) -> list[tf.Tensor]:
    """Adds up the messages of all workers, rank by rank, into dense tensors.

    Messages whose flag is 0 contribute nothing.

    Args:
        messages: int32 [P, W], row r is what the worker of rank r sent.
        layout: of the messages, `Selection.layout` on all workers.
        like: N float32 tensors that give the shapes. Their values are not used; the native op
            writes the results into their buffers if nothing else needs them.

    Returns:
        N float32 tensors of the shapes of `like`: sums over the workers.

    Raises:
        ValueError: for a layout of another number of tensors.
        TypeError: for `like` that is not float32.
        tf.errors.InvalidArgumentError: when run, for messages of a wrong length, flag, count,
            index, value or mean; the error names the field, the rank, the tensor and the value.
    """
    like = [tf.convert_to_tensor(t) for t in like]
    _check_tensors("like", like)
    if len(like) != len(layout.capacities):
        raise ValueError(
            "`layout` must have one capacity per tensor of `like`. Received: "
            f"{len(layout.capacities)} capacities, {len(like)} like."
        )
    messages = tf.convert_to_tensor(messages, tf.int32)
    if not runs_natively(like):
        return reference_decode.decode(messages, layout, like)
    return native.load().redsync_decode(
        messages=messages,
        k=layout.k,
        like=like,
        selectors=["exact"] * len(like),  # the op has the attribute; messages do not depend on it
        quantized=layout.quantized,
    )


def coordinates(messages: tf.Tensor, layout: MessageLayout) -> list[SparseTotal]:
    """Return the content of messages as coordinates, rank after rank.

    Args:
        messages: int32 `[workers, words]`.
        layout: Of the messages, static.

    Returns:
        For every tensor `workers * capacity` entries.
    """
    parts, totals = layout.split(messages), []
    for i, (indices, values) in enumerate(zip(parts.indices, parts.values, strict=True)):
        if layout.quantized[i]:
            slots = tf.range(layout.capacities[i], dtype=tf.int64)
            sent = slots < tf.cast(parts.counts[:, i : i + 1], tf.int64)
            values = tf.where(sent, values, 0.0)
        flat = tf.reshape(tf.bitcast(indices, tf.float32), [-1])
        totals.append(SparseTotal(flat, tf.reshape(values, [-1])))
    return totals


def checked(
    grads: Sequence[tf.Tensor],
    residuals: Sequence[tf.Tensor],
    velocities: Sequence[tf.Tensor],
    selectors: Sequence[str],
    momentum: float,
) -> tuple[list[tf.Tensor], list[tf.Tensor], list[tf.Tensor]]:
    """Check what a selection is given, while the graph is built.

    Returns:
        Gradients, of bfloat16 where they were cast from it, residuals and velocities as tensors.

    Raises:
        ValueError: for wrong lengths, shapes, selector names or a momentum outside [0, inf).
        TypeError: for a dtype other than float32, of gradients other than that and bfloat16.
    """
    grads = list(map(before_cast, map(tf.convert_to_tensor, grads)))
    residuals = list(map(tf.convert_to_tensor, residuals))
    velocities = list(map(tf.convert_to_tensor, velocities))
    if not 0.0 <= momentum < math.inf:
        raise ValueError(f"`momentum` must be finite and >= 0. Received: momentum={momentum}.")
    _check_tensors("grads", grads, dtypes=_READ)
    _check_tensors("residuals", residuals, like=grads)
    if momentum or velocities:
        _check_tensors("velocities", velocities, like=grads if momentum else [])
    if len(selectors) != len(grads) or not set(selectors) <= set(SELECTORS):
        raise _bad_selectors(selectors, len(grads))
    return grads, residuals, velocities


def _check_tensors(
    name: str,
    tensors: Sequence[tf.Tensor],
    like: Sequence[tf.Tensor] | None = None,
    dtypes: Sequence[tf.DType] = _FLOAT32,
) -> None:
    """Check number, shapes and dtypes of tensors, and that their positions have 32 bits."""
    if not tensors or (like is not None and len(tensors) != len(like)):
        raise _wrong_number(name, len(tensors), like)
    for i, tensor in enumerate(tensors):
        fits = not like or tensor.shape.is_compatible_with(like[i].shape)
        short = (tensor.shape.num_elements() or 0) <= MAX_WORD
        if not (fits and short and tensor.dtype in dtypes):
            raise _bad_tensor(f"{name}[{i}]", tensor, dtypes, short, like[i] if like else None)


def _wrong_number(name: str, number: int, like: Sequence[tf.Tensor] | None) -> ValueError:
    wanted = "at least one tensor" if like is None else "one tensor per gradient"
    none = "; none without momentum" if name == "velocities" else ""
    return ValueError(f"`{name}` must have {wanted}{none}. Received: {number} tensors.")


def _bad_tensor(
    which: str,
    tensor: tf.Tensor,
    dtypes: Sequence[tf.DType],
    short: bool,
    like: tf.Tensor | None,
) -> Exception:
    """The error for a tensor, such as "grads[0]", that cannot be selected from."""
    name = which.partition("[")[0]
    if tensor.dtype not in dtypes:
        return TypeError(
            f"`{name}` must be {' or '.join(t.name for t in dtypes)}; cast others first. "
            f"Received: {which} of {tensor.dtype.name}."
        )
    if not short:
        return ValueError(
            f"`{name}` must have at most {MAX_WORD} elements each, since positions are sent as "
            f"32 bits. Received: {which} of shape {tensor.shape}. Split the variable."
        )
    shape = None if like is None else like.shape
    return ValueError(
        f"`{name}` must have the shapes of `grads`. Received: {which} of shape {tensor.shape} "
        f"and {which.replace(name, 'grads')} of shape {shape}."
    )


def _bad_selectors(selectors: Sequence[str], number: int) -> ValueError:
    return ValueError(
        f"`selectors` must be one of {', '.join(map(repr, SELECTORS))} per tensor. Received: "
        f"selectors={list(selectors)} for {number} grads."
    )
