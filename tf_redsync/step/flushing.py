"""Delivery of all workers' residuals at the end of a training (`flush()`)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tf_redsync.exchange.capabilities import AdamMoments, capability
from tf_redsync.exchange.method import Method
from tf_redsync.step.exchange_schedule import UNDELIVERED
from tf_redsync.step.gradient_exchange import GradientExchange
from tf_redsync.step.local_steps import LocalSteps


def flush(
    exchange: GradientExchange,
    apply: Callable[[Sequence[int]], None],
    frozen: Collection[int] = (),
) -> None:
    """Deliver the residuals of all workers and set them to zero.

    All workers must call it, between two steps and outside of any replica.

    Args:
        exchange: A built `GradientExchange`.
        apply: Runs a step of the optimizer with zero gradients for the variables at these
            positions, in a replica context. The exchange replaces their totals by the residuals.
        frozen: Positions of variables that stay, with their residuals.

    Raises:
        ValueError: If a method exchanges momenta.
        Disagreement: If the workers do not flush at the same step.
    """
    check(exchange.policy.methods, "flush()")
    exchange.to_consensus()
    waiting = may_hold_residuals([s.variables_by_name for s in exchange.states])
    specs_by_bucket = [bucket.layout.specs for bucket in exchange.schedule.buckets]
    served = sorted(
        s.position
        for specs, w in zip(specs_by_bucket, waiting, strict=True)
        for s in specs
        if w and s.position not in frozen
    )
    if not served:
        return
    step: Callable[[], None] = functools.partial(apply, served)
    if isinstance(exchange.schedule, LocalSteps):
        assert exchange.consensus is not None
        flush_changes = exchange.schedule.flush_changes
        step = functools.partial(
            flush_changes, exchange.consensus, exchange.states, exchange.network, set(served)
        )
    with exchange.agreed("deliver residuals (`flush()`)"):
        exchange.replacement = functools.partial(_totals, exchange)
        try:
            tf.function(lambda: exchange.strategy.run(step), autograph=False)()
        finally:
            exchange.replacement = None


def check(methods: Sequence[Method], caller: str) -> None:
    """Check that a step can deliver the residuals.

    Args:
        methods: The methods of the exchange.
        caller: What the user wrote, such as `"flush()"`.

    Raises:
        ValueError: If a method exchanges momenta.
    """
    of_momenta = [m for m in methods if capability(m, AdamMoments)]
    if of_momenta:
        raise ValueError(
            f"the residuals of {type(of_momenta[0]).__name__} are parts of momenta, which a step "
            f"cannot deliver as gradients. Received: {caller}. Remove it."
        )


def may_hold_residuals(states: Sequence[Mapping[str, Sequence[Any]]]) -> list[bool]:
    """Return for each bucket whether its state has residuals."""
    return [any(state.get(name) for name in UNDELIVERED) for state in states]


def _totals(
    exchange: GradientExchange,
    positions: Sequence[int],
    checks: Sequence[Any],
    zeros: Sequence[tf.Tensor],
) -> tuple[list[Any], tf.Tensor]:
    """Return the sums of the residuals in place of the sums of gradients."""
    with tf.control_dependencies(checks):
        states = [s.read() for s in exchange.states]
    outcome = exchange.schedule.flush(states, exchange.network)
    exchange.schedule.keep_absent(outcome, states, set(positions))
    skips_locally, nonfinite = exchange.schedule.skips_locally, exchange.nonfinite
    nonfinite_flags = None if skips_locally else nonfinite.nonfinite_flags(zeros)
    return exchange.store(outcome, states, positions, nonfinite_flags)
