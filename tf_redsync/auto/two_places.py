"""Two places of a momentum: in the optimizer, or in the exchange, whichever takes less time.

A plain SGD's momentum may be either's; see `keras/momentum.py`. Candidates differ with it, and all
variables have it in one place, so what is compared is the whole model's exchange.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from tf_redsync.auto.decision import Decision


def better(
    inside: Decision, exchanged: Decision, momentum: float, wins: Callable[[float, float], bool]
) -> Decision:
    """Return one of two decisions, with a line about the other one.

    Args:
        inside: With the momentum in the optimizer.
        exchanged: With the momentum in the exchange.
        momentum: The momentum.
        wins: Whether the first of two times is clearly the shorter one.
    """
    here, there = (
        sum(dict(zip(c.methods, c.seconds, strict=True))[c.method] for c in decision.choices)
        for decision in (inside, exchanged)
    )
    times = f"{1e3 * there:.2f} ms, and with it in the optimizer {1e3 * here:.2f} ms"
    if not inside.choices:
        return inside
    if wins(there, here):
        return dataclasses.replace(
            exchanged,
            left_out=(f"momentum={momentum:.4g} is applied in the exchange: {times}",),
        )
    rejected = f"not chosen: momentum={momentum:.4g} in the exchange, as by CodedGMC: {times}"
    return dataclasses.replace(inside, left_out=(rejected, *inside.left_out))
