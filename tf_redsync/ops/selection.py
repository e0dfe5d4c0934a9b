"""Ops around an all-gather of selected elements: accumulate and select, decode, chunked top-k."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from tf_redsync.ops import native
from tf_redsync.ops.codec_checks import check_ints
from tf_redsync.ops.limits import MAX_WORD
from tf_redsync.ops.message_layout import MessageLayout
from tf_redsync.ops.native import runs_natively
from tf_redsync.ops.reference import decode as reference_decode
from tf_redsync.ops.reference import selection as reference_selection
from tf_redsync.ops.sparse import SparseTotal
from tf_redsync.ops.wire import before_cast

SELECTORS = ("exact", "trimmed", "threshold", "fixed")
_READ = (tf.float32, tf.bfloat16)  # dtypes of gradients that the op reads without a cast
_FLOAT32 = (tf.float32,)


class Selection(NamedTuple):
    """The result of `accumulate_and_select`.

    Attributes:
        message: int32 vector, this worker's message.
        residuals: List of float32 tensors, the new residuals (selected elements are zero).
        velocities: List of float32 tensors, the new momentum; empty if it is not kept.
        ratios: float32 vector, one threshold ratio per tensor, -1 if there is none to reuse; for
            "fixed" the given threshold.
        layout: The layout of the message.
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
    keep_velocities: bool = True,
    scale: tf.Tensor | float | None = None,
    side: tf.Tensor | int | None = None,
    search: tf.Tensor | bool | None = None,
) -> Selection:
    """Add gradients to the residuals and move the largest elements into a message.

    Elementwise in float32, with `t = scale * g`:

        no momentum:  v' = v + t
        momentum:     u' = momentum * u + t       v' = v + u'
        Nesterov:     u' = momentum * (u + t)     v' = (v + u') + t

    Then, for each tensor, elements of `a = |v'|` (or `a = side * v'` if quantized) with `a > 0` are
    selected:

    * "exact" and "trimmed" select the `k` largest, the lower index first among equals.
    * "threshold" selects all above `mean + r * (max - mean)`, where `r` is bisected until between
      3k/4 and k elements pass, or is reused from an earlier step. If no `r` qualifies, as for
      heavy-tailed input, it selects the exact `k` largest.
    * "fixed" selects those with `a >= ratios[i]`, an absolute threshold; if more than `k` pass, the
      `k` largest of them. The others stay in the residual.

    Selected elements of the residual are set to zero, and those of the velocity too if `masking`.

    The message is all zero if an accumulated value is non-finite or has a magnitude of 2^96 or
    more, or if the threshold of "fixed" is NaN. The ratios are then unchanged, and the new
    residuals and velocities are unspecified, so the caller keeps the old ones. Because of the
    bound, sums of messages over workers cannot overflow.

    Args:
        grads: N float32 or bfloat16 tensors of any shape, n_i elements each; n_i may be 0.
        residuals: N float32 tensors of the same shapes.
        velocities: N float32 tensors of the same shapes; empty if `momentum` is 0.
        k: int32 [N], number of elements to select ("fixed": at most); 1 <= k_i <= n_i, or 0 if n_i
            is 0.
        ratios: float32 [N], from the previous step; -1 or `None` if there are none. For "fixed" the
            threshold, >= 0, which is returned unchanged.
        selectors: "exact", "trimmed", "threshold" or "fixed" for all tensors, or N of these names.
        quantized: A bool for all tensors, or N; a quantized tensor sends positions of one sign and
            their mean.
        momentum: Factor >= 0; 0 for no velocity.
        nesterov: Whether the momentum is Nesterov's.
        masking: Whether selected elements of the velocity are set to zero.
        keep_velocities: Whether to return the new velocities. With `nesterov` they are always
            returned.
        scale: float32 scalar, factor of the gradients (local clipping); 1 for `None`.
        side: int32 scalar, +1 or -1: the sign that quantized tensors send; +1 for `None`.
        search: Bool scalar: bisect again (True) or try `ratios` first (False); True for `None`.

    Returns:
        A `Selection`: message and its layout, residuals, velocities, ratios.

    Raises:
        ValueError: If lengths, shapes, names or the momentum are invalid.
        TypeError: If gradients are not float32 or bfloat16, or residuals or velocities are not
            float32.
        tf.errors.InvalidArgumentError: When run, if `k`, `side` or a threshold is out of range. On
            a GPU the native op checks only `k`: a negative threshold gives an all-zero message.

    Reference:
        Fang, Fu, Yang and Hsieh, "RedSync: Reducing synchronization bandwidth for distributed deep
        learning training system", J. Parallel Distrib. Comput., 2019.
    """
    n = len(grads)
    selectors = (selectors,) * n if isinstance(selectors, str) else tuple(selectors)
    grads, residuals, velocities = validated(grads, residuals, velocities, selectors, momentum)
    layout = MessageLayout.of(k, quantized)
    kept = len(velocities) * (keep_velocities or nesterov)
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
        op = native.load().redsync_accumulate_and_select
        made = op(quantized=layout.quantized, U=kept, **arguments)
    else:
        made = reference_selection.accumulate_and_select(layout=layout, kept=kept, **arguments)
    return Selection(made[0], made[1], made[2], made[3], layout)


def decode(
    messages: tf.Tensor,
    layout: MessageLayout,
    like: Sequence[tf.Tensor],
) -> list[tf.Tensor]:
    """Sum the messages of all workers into dense tensors, in the order of the ranks.

    Messages whose flag is 0 are ignored.

    Args:
        messages: int32 [P, W]; row r is the message of the worker of rank r.
        layout: The layout of the messages, `Selection.layout` of all workers.
        like: N float32 tensors of the shapes of the results. Their values are ignored; the native
            op reuses their buffers if no other op needs them.

    Returns:
        N float32 tensors of the shapes of `like`: sums over the workers.

    Raises:
        ValueError: If `layout` and `like` differ in the number of tensors.
        TypeError: If `like` is not float32.
        tf.errors.InvalidArgumentError: When run, if messages have a wrong length or an invalid
            flag, count, index, value or mean; the error names the field, rank, tensor and value.
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
        quantized=layout.quantized,
    )


def sparse_totals(messages: tf.Tensor, layout: MessageLayout) -> list[SparseTotal]:
    """Return the sums of messages as sparse totals, whose rows are in the order of the ranks.

    Args:
        messages: int32 `[workers, words]`.
        layout: The layout of the messages, which must be static.

    Returns:
        For every tensor, `[workers, capacity]` entries.
    """
    parts, totals = layout.split_floats(messages), []
    for i, (indices, values) in enumerate(zip(parts.indices, parts.values, strict=True)):
        if layout.quantized[i]:
            slots = tf.range(layout.capacities[i], dtype=tf.int64)
            count = tf.bitcast(parts.counts[:, i : i + 1], tf.int32)
            values = tf.where(slots < tf.cast(count, tf.int64), values, 0.0)
        totals.append(SparseTotal(indices, values))
    return totals


def chunked_top_k(chunks: tf.Tensor, k: int) -> tuple[tf.Tensor, tf.Tensor]:
    """Return the `k` elements of largest magnitude in every chunk, exactly and in one pass.

    Magnitudes compare as the bits of their floats, so NaNs are the largest and denormals count.
    Among equal magnitudes the lower position comes first.

    Args:
        chunks: float32 `[chunks, size]`, of a static size.
        k: Number of elements per chunk, in [0, size].

    Returns:
        Positions in the chunk, ascending, int32 `[chunks, k]`; and the elements there, float32.

    Raises:
        ValueError: If `k` is out of range.
        TypeError: If `chunks` is not float32.

    Example:
        >>> positions, values = chunked_top_k(tf.constant([[1.0, -3.0, 0.5, 3.0]]), 2)
        >>> positions.numpy(), values.numpy()
        (array([[1, 3]], dtype=int32), array([[-3.,  3.]], dtype=float32))
    """
    chunks = tf.convert_to_tensor(chunks)
    if chunks.dtype != tf.float32:
        raise TypeError(f"`chunks` must be float32. Received: {chunks.dtype.name}.")
    if chunks.shape.rank != 2 or chunks.shape[1] is None:
        raise ValueError(
            "`chunks` must have shape [chunks, size] with a static size. Received: "
            f"shape {chunks.shape}."
        )
    check_ints("k", [k], 0, chunks.shape[1])
    if runs_natively([chunks]):
        return tuple(native.load().redsync_chunked_top_k(chunks=chunks, k=k))
    return reference_selection.chunked_top_k(chunks, k)


def validated(
    grads: Sequence[tf.Tensor],
    residuals: Sequence[tf.Tensor],
    velocities: Sequence[tf.Tensor],
    selectors: Sequence[str],
    momentum: float,
) -> tuple[list[tf.Tensor], list[tf.Tensor], list[tf.Tensor]]:
    """Check the arguments of a selection while the graph is built.

    Returns:
        Gradients, in bfloat16 if they were cast from it, residuals and velocities as tensors.

    Raises:
        ValueError: If lengths, shapes or selector names are invalid, or the momentum is outside
            [0, inf).
        TypeError: If gradients are not float32 or bfloat16, or other tensors are not float32.
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
    """Check number, shapes and dtypes of tensors, and that positions in them fit 32 bits."""
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
    """Return the error for a tensor, such as "grads[0]", that cannot be selected from."""
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
