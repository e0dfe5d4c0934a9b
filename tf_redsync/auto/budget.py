"""A choice by a budget: the exchange may make a step longer by so much, and no more."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tf_redsync import checks
from tf_redsync.auto.decision import Choice, Decision, Measured


def check(max_overhead: float | None, step_seconds: float | None, momentum: float) -> None:
    """Check the arguments of `Auto`.

    Raises:
        ValueError: for one without the other, for values that are not positive, and for momentum.
    """
    if (max_overhead is None) != (step_seconds is None):
        raise ValueError(
            "`max_overhead` is in units of `step_seconds`: give both, or none. Received: "
            f"max_overhead={max_overhead}, step_seconds={step_seconds}"
        )
    if max_overhead is None:
        return
    for name, value in (("max_overhead", max_overhead), ("step_seconds", step_seconds)):
        checks.real(name, value, low=0.0, high=float("inf"), low_open=True, high_open=True)
    if momentum:
        raise ValueError(
            "with `max_overhead` momentum is the optimizer's: not all candidates apply one. "
            f"Received: momentum={momentum}"
        )


def fitting(
    choices: Sequence[Choice], measured: Measured, max_overhead: float, step_seconds: float
) -> Decision:
    """Return the decision for the first method that fits, or for the fastest one if none does.

    Args:
        choices: The buckets, with the predicted seconds of the same methods.
        measured: What these are made of.
        max_overhead: See `Auto`.
        step_seconds: See `Auto`.
    """
    if not choices:
        return Decision((), measured, 0)
    totals = [sum(times) for times in zip(*(c.seconds for c in choices), strict=True)]
    most = max_overhead * step_seconds
    fits = [i for i, seconds in enumerate(totals) if seconds <= most]
    found = fits[0] if fits else min(range(len(totals)), key=totals.__getitem__)
    method = choices[0].methods[found]
    asked = f"{1e3 * most:.4g} ms, {max_overhead:.4g} of a step of {1e3 * step_seconds:.4g} ms"
    said = f"{method!r} is predicted to take {1e3 * totals[found]:.4g} ms of a step"
    if fits:
        said += f", of at most {asked}: all variables go by it."
        reason = "the first that fits the budget"
    else:
        said += f", the least, and no method fits {asked}. More local steps need less."
        reason = "the fastest one: none fits the budget"
    served = tuple(dataclasses.replace(c, method=method) for c in choices)
    return Decision(served, measured, 0, reason, said)
