"""A step that delivers what waits, and nothing else: all residuals, densely."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tf_redsync.exchange.context import Context
from tf_redsync.exchange.driver import Network, Outcome
from tf_redsync.exchange.layout import Bucket
from tf_redsync.exchange.method import Exchange, State
from tf_redsync.exchange.requests import AllReduce
from tf_redsync.step.plan import Grads, Inputs, Plan

# What may wait: of methods, and of a program with a delay.
WAITING = ("residual", "pending")


def waits(states: Sequence[dict[str, list]]) -> list[bool]:
    """Return for each bucket whether something may wait in its state."""
    return [any(state.get(name) for name in WAITING) for state in states]


def flush(buckets: Sequence[Bucket], states: Sequence[State], network: Network) -> Outcome:
    """Return as totals what waits in all states, which are then empty.

    Args:
        buckets: The buckets.
        states: Their states.
        network: What carries requests.
    """
    number = len(buckets)
    plan = Plan(tuple(buckets), (_delivered,) * number, (False,) * number, (True,) * number)
    nothing = [[tf.zeros(s.shape, tf.float32) for s in b.layout.specs] for b in buckets]
    return plan.run(Inputs(nothing, states, None, tf.constant(0, tf.int64), network))


def _delivered(nothing: Grads, state: State, ctx: Context) -> Exchange:
    """The sum over workers of what waits; zeros, and no request, where nothing can."""
    names = [name for name in WAITING if state.get(name)]
    if not names:
        return nothing, state
    contributions = [tf.add_n(list(parts)) for parts in zip(*map(state.get, names), strict=True)]
    totals = yield AllReduce(contributions)
    return totals, {**state, **{name: list(nothing) for name in names}}
