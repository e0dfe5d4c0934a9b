"""Exchanges of the optimizer that a model is compiled with."""

from __future__ import annotations

from typing import Any

from tf_redsync.keras import conflicts


def exchange_of(model: Any) -> Any:
    """Return the `GradientExchange` of a model's optimizer, or `None` without one."""
    return getattr(getattr(model, "optimizer", None), "exchange", None)


def exchanges_of(model: Any) -> list[Any]:
    """Return the exchanges of a model's optimizer: several where it is a `MultiOptimizer`."""
    optimizer: Any = getattr(model, "optimizer", None)
    parts = [optimizer]
    if conflicts.is_several(optimizer):
        specs = getattr(optimizer, "optimizer_specs", None)  # of Addons
        parts = list(optimizer.optimizers) if specs is None else [s["optimizer"] for s in specs]
    found = (getattr(part, "exchange", None) for part in parts)
    return [exchange for exchange in found if exchange is not None]


def skipped_steps(model: Any) -> int:
    """Return how many steps a model's optimizer has skipped so far.

    Of several optimizers in one, the one that has skipped the most: they skip by themselves.
    """
    skipped = (int(e.skipped.numpy()) for e in exchanges_of(model) if e.built)
    return max(skipped, default=0)
