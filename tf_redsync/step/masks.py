"""Pruning masks in the state of methods that never send the pruned elements.

Such a method has a bool tensor for each variable in its state, under the name `mask` and of kind
"shared". Weights are 0 where the mask is `False`; the adapters reset them after every update.
`method.with_masks(layout, masks)` makes the state for new masks.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from tf_redsync.step.every_step import EveryStep
from tf_redsync.step.state_variables import StateVariables

NAME = "mask"


class Masked(Protocol):
    """The members of `GradientExchange` that this module uses; see there."""

    schedule: EveryStep
    states: Sequence[StateVariables]
    expects_pruning: bool


def has_masks(method: Any) -> bool:
    """Whether a method has masks in its state."""
    return NAME in method.traits.state_kinds


def variables(exchange: Masked) -> dict[int, Any]:
    """Return the variables of the masks by the position of the masked variable."""
    return {
        spec.position: mask
        for bucket, states in zip(exchange.schedule.buckets, exchange.states, strict=True)
        if has_masks(bucket.method)
        for spec, mask in zip(bucket.layout.specs, states.variables_by_name[NAME], strict=True)
    }


def any_pruned(exchange: Masked) -> bool:
    """Whether a mask prunes any element."""
    return not all(np.all(mask.numpy()) for mask in variables(exchange).values())


def write(exchange: Masked, masks: Mapping[int, np.ndarray]) -> None:
    """Replace all masks, between two steps and in the strategy's scope, on all workers.

    Args:
        exchange: The exchange.
        masks: The masks by position, as in `variables`.
    """
    exchange.expects_pruning = True
    for bucket, states in zip(exchange.schedule.buckets, exchange.states, strict=True):
        if has_masks(bucket.method):
            own = [masks[spec.position] for spec in bucket.layout.specs]
            states.assign(bucket.method.with_masks(bucket.layout, own))


def warn_if_no_masks_come(exchange: Masked) -> None:
    """Warn once if methods wait for masks and no pruning callback is registered."""
    methods = {b.method for b in exchange.schedule.buckets if b.method.sync_schedule.waits_for}
    if not methods or exchange.expects_pruning:
        return
    exchange.expects_pruning = True
    for method in methods:
        warnings.warn(
            f"{type(method).__name__} exchanges densely because it waits for "
            f"{method.sync_schedule.waits_for}. No callback that provides this is registered (a "
            "checkpoint may still restore it).",
            stacklevel=2,
        )
