"""Ops of tf_redsync: select what to send, and add up what was received.

Every op exists twice with equal results: natively (C++) and in pure TensorFlow. `backend()` says
which one runs; `set_backend` or the environment variable `TF_REDSYNC_BACKEND` forces one. A backend
that is asked for and is not there is an error, never silently replaced.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tf_redsync.ops import native
from tf_redsync.ops.backends import backend, backend_reason, runs_natively, set_backend
from tf_redsync.ops.casts import before_cast
from tf_redsync.ops.contract import Selection, check_decode, check_select
from tf_redsync.ops.message_layout import MessageLayout
from tf_redsync.ops.native import NativeLibraryError
from tf_redsync.ops.reference import decode as reference_decode
from tf_redsync.ops.reference import selection as reference_selection

__all__ = [
    "MessageLayout",
    "NativeLibraryError",
    "Selection",
    "accumulate_and_select",
    "backend",
    "backend_reason",
    "decode",
    "select_top_k",
    "set_backend",
]


def accumulate_and_select(
    grads: Sequence[tf.Tensor],
    residuals: Sequence[tf.Tensor],
    velocities: Sequence[tf.Tensor],
    k: tf.Tensor | Sequence[int],
    ratios: tf.Tensor | None = None,
    *,
    selectors: str | Sequence[str],
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
    grads, residuals, velocities = (
        [tf.convert_to_tensor(t) for t in tensors] for tensors in (grads, residuals, velocities)
    )
    grads = [before_cast(g) for g in grads]
    n = len(grads)
    selectors = (selectors,) * n if isinstance(selectors, str) else tuple(selectors)
    quantized = (quantized,) * n if isinstance(quantized, bool) else tuple(map(bool, quantized))
    check_select(grads, residuals, velocities, selectors, quantized, momentum)
    implementation = native if runs_natively(grads) else reference_selection
    return implementation.accumulate_and_select(
        grads=grads,
        residuals=residuals,
        velocities=velocities,
        k=tf.convert_to_tensor(k, tf.int32),
        ratios=tf.convert_to_tensor([-1.0] * n if ratios is None else ratios, tf.float32),
        layout=MessageLayout.of(k, quantized),
        selectors=selectors,
        momentum=float(momentum),
        nesterov=bool(nesterov),
        masking=bool(masking),
        scale=tf.convert_to_tensor(1.0 if scale is None else scale, tf.float32),
        side=tf.convert_to_tensor(1 if side is None else side, tf.int32),
        search=tf.convert_to_tensor(True if search is None else search, tf.bool),
    )


def select_top_k(
    grads: Sequence[tf.Tensor],
    residuals: Sequence[tf.Tensor],
    k: tf.Tensor | Sequence[int],
    *,
    scale: tf.Tensor | float | None = None,
) -> Selection:
    """Adds gradients to the residuals, moves the `k` largest elements of each into a message.

    `accumulate_and_select` with the selector "exact", and with values, for all tensors.

    Args:
        grads: See there, as for the other arguments.
        residuals: See there.
        k: See there.
        scale: See there.
    """
    return accumulate_and_select(grads, residuals, [], k, selectors="exact", scale=scale)


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
    check_decode(like, layout)
    implementation = native if runs_natively(like) else reference_decode
    return implementation.decode(tf.convert_to_tensor(messages, tf.int32), layout, like)
