"""Masks of weights in the state of methods that always leave out the same elements.

Such a method has in its state, under the name `mask` and of kind "shared", a bool tensor for each
variable: weights are 0 for good where it is `False`. The adapters keep them there, whatever the
optimizer does. `method.with_masks(layout, masks)` makes the state for new ones.
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
    """What this module needs of a `GradientExchange`; see there."""

    program: EveryStep
    states: Sequence[StateVariables]
    awaited: bool


def has_masks(method: Any) -> bool:
    """Whether a method has masks in its state."""
    return NAME in method.state_kinds


def variables(exchange: Masked) -> dict[int, Any]:
    """Return the masks of an exchange, as variables, by the position of what they are masks of."""
    return {
        spec.position: mask
        for bucket, states in zip(exchange.program.buckets, exchange.states, strict=True)
        if has_masks(bucket.method)
        for spec, mask in zip(bucket.layout.specs, states.variables_by_name[NAME], strict=True)
    }


def any_pruned(exchange: Masked) -> bool:
    """Whether a mask leaves out anything."""
    return not all(np.all(mask.numpy()) for mask in variables(exchange).values())


def write(exchange: Masked, masks: Mapping[int, np.ndarray]) -> None:
    """Replace all masks, between two steps and in the strategy's scope; all workers must do it.

    Args:
        exchange: The exchange.
        masks: By position, as `variables`.
    """
    exchange.awaited = True
    for bucket, states in zip(exchange.program.buckets, exchange.states, strict=True):
        if has_masks(bucket.method):
            own = [masks[spec.position] for spec in bucket.layout.specs]
            states.assign(bucket.method.with_masks(bucket.layout, own))


def warn_of_waiting(exchange: Masked) -> None:
    """Warn, once, of methods that wait for masks where no pruning callback is registered."""
    methods = {b.method for b in exchange.program.buckets if b.method.sync_schedule.waits_for}
    if not methods or exchange.awaited:
        return
    exchange.awaited = True
    for method in methods:
        warnings.warn(
            f"{type(method).__name__} exchanges densely, for it waits for "
            f"{method.sync_schedule.waits_for}. Nothing of the kind has been announced (it may "
            "still come from a checkpoint).",
            stacklevel=2,
        )
