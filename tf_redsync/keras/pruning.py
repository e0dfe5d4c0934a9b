"""Magnitude pruning of the variables whose method has masks in its state.

With sparsity s, pruning keeps the ceil((1 - s) n) largest magnitudes of the n weights of a
variable, or of all variables together. Among equal magnitudes, it keeps the first. All workers have
the same weights and compute the masks locally. They compare digests of the masks before they write
them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_redsync import checks
from tf_redsync.cluster.agreement import agree
from tf_redsync.methods.common.sparsifier import kept_elements
from tf_redsync.step import masks as exchange_masks

SCOPES = ("layer", "model")


def check(sparsity: float, scope: str) -> None:
    """Check the arguments of pruning.

    Raises:
        ValueError: `sparsity` is outside (0, 1), or `scope` is unknown.
    """
    checks.real("sparsity", sparsity, low=0.0, high=1.0, low_open=True, high_open=True)
    checks.choice("scope", scope, SCOPES)


def check_methods(policy: Any, caller: str) -> None:
    """Check that a method of a policy has masks.

    Args:
        policy: The policy.
        caller: Name of the caller, for the message.

    Raises:
        ValueError: no method has masks.
    """
    if not any(exchange_masks.has_masks(m) for m in policy.methods):
        names = ", ".join(type(m).__name__ for m in policy.methods)
        raise ValueError(
            f"`{caller}` needs an optimizer with the method tf_redsync.contrib.PacTrain, which "
            f"keeps pruned weights at 0. Received: method={names}. For dense training of a pruned "
            "model, use PacTrain with more `stable_steps` than the training has steps."
        )


def magnitude_masks(
    weights: Mapping[int, np.ndarray], sparsity: float, scope: str
) -> dict[int, np.ndarray]:
    """Return masks by position, bool arrays in the shapes of `weights`; `True` for kept weights.

    Args:
        weights: Arrays by position.
        sparsity: Fraction of the weights to prune, in (0, 1).
        scope: `"layer"` prunes the fraction of each array, `"model"` of all arrays together.
    """
    if scope == "model":
        together = np.concatenate([np.abs(w).ravel() for w in weights.values()])
        parts = np.split(
            _largest(together, sparsity), np.cumsum([w.size for w in weights.values()])
        )
        masks = dict(zip(weights, parts, strict=False))  # the last part is empty
    else:
        masks = {p: _largest(np.abs(w).ravel(), sparsity) for p, w in weights.items()}
    return {p: k.reshape(weights[p].shape) for p, k in masks.items()}


def _largest(magnitudes: np.ndarray, sparsity: float) -> np.ndarray:
    """Return a bool mask of a vector's largest elements; the first of equal ones."""
    order = np.argsort(-magnitudes, kind="stable")
    mask = np.zeros(magnitudes.size, bool)
    mask[order[: kept_elements(sparsity, magnitudes.size)]] = True
    return mask


def prune(
    exchange: Any,
    variables: Sequence[tf.Variable],
    slots: Sequence[Sequence[Any]],
    sparsity: float,
    scope: str,
) -> None:
    """Prune an exchange's variables; see `Wrapper.prune`.

    Args:
        exchange: A built `GradientExchange`.
        variables: Its variables, by position.
        slots: The optimizer's slots: for each kind a list by position; `None` for absent slots.
        sparsity: See `magnitude_masks`.
        scope: See `magnitude_masks`.

    Raises:
        ValueError: an argument is out of range, no variable has a mask, or weights are non-finite.
        Disagreement: on all workers, if they do not prune the same weights at the same step.
    """
    check(sparsity, scope)
    check_methods(exchange.policy, "prune")
    positions = sorted(exchange_masks.variables(exchange))
    if not positions:
        raise ValueError(
            "nothing can be pruned: PacTrain exchanges no variable. All are biases, norms, or "
            "smaller than its `dense_below`. See optimizer.explain()."
        )
    weights = {p: np.asarray(variables[p].numpy(), np.float32) for p in positions}
    for p, w in weights.items():
        if not np.isfinite(w).all():
            raise ValueError(
                "weights to prune must be finite. Received: non-finite values of "
                f"{exchange.specs[p].name!r}"
            )
    masks = magnitude_masks(weights, sparsity, scope)
    digest = hashlib.sha256(b"".join(np.packbits(m).tobytes() for m in masks.values())).hexdigest()
    step = int(exchange.step.numpy())
    agree(
        tf.distribute.get_strategy(),
        f"prune to {sparsity} by {scope} before step {step}, masks {digest[:16]}",
    )
    exchange_masks.write(exchange, masks)
    for p, mask in masks.items():
        for variable in (variables[p], *(kind[p] for kind in slots)):
            if variable is not None and tuple(variable.shape) == mask.shape:
                value = variable.numpy()
                variable.assign(np.where(mask, value, np.zeros_like(value)))


def keep(variable: tf.Variable, mask: tf.Variable) -> None:
    """Set weights to 0 where the bool mask is `False`, after an update."""
    variable.assign(tf.where(mask, variable, tf.zeros_like(variable)))
