"""Pruning masks in the state of methods that never send the pruned elements.

Such a method implements `Masked` of `exchange/capabilities.py`. Weights are 0 where the mask is
`False`; the adapters set them to 0 after every update.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from tf_redsync.exchange.capabilities import Masked, capability, required
from tf_redsync.step.exchange_schedule import ExchangeSchedule
from tf_redsync.step.state_variables import StateVariables

NAME = "mask"


class ExchangeOfMasked(Protocol):
    """Protocol with the members of `GradientExchange` that this module uses."""

    schedule: ExchangeSchedule
    states: Sequence[StateVariables]
    expects_pruning: bool


def has_masks(method: Any) -> bool:
    """Return whether a method has masks in its state."""
    return capability(method, Masked) is not None


def variables(exchange: ExchangeOfMasked) -> dict[int, Any]:
    """Return the bool variables of the masks, by the position of the masked variable."""
    return {
        spec.position: mask
        for bucket, states in zip(exchange.schedule.buckets, exchange.states, strict=True)
        if NAME in states.variables_by_name
        for spec, mask in zip(bucket.layout.specs, states.variables_by_name[NAME], strict=True)
    }


def any_pruned(exchange: ExchangeOfMasked) -> bool:
    """Return whether any mask prunes an element."""
    return not all(np.all(mask.numpy()) for mask in variables(exchange).values())


def write(exchange: ExchangeOfMasked, masks: Mapping[int, np.ndarray]) -> None:
    """Replace all masks, between two steps and in the strategy's scope, on all workers.

    Args:
        exchange: The exchange.
        masks: bool arrays by position, as in `variables`; `True` for kept weights.
    """
    exchange.expects_pruning = True
    for bucket, states in zip(exchange.schedule.buckets, exchange.states, strict=True):
        if has_masks(bucket.method):
            bucket_masks = [masks[spec.position] for spec in bucket.layout.specs]
            states.assign(required(bucket.method, Masked).with_masks(bucket.layout, bucket_masks))


def warn_if_no_masks_come(exchange: ExchangeOfMasked) -> None:
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
