"""Decision of `Auto`: measurements, choices and their table; see `auto.py`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from typing_extensions import override

from tf_redsync import checks
from tf_redsync.auto import cost
from tf_redsync.auto.candidates import names
from tf_redsync.config import from_config, serialize
from tf_redsync.exchange.layout import BucketLayout, TensorSpec
from tf_redsync.exchange.method import Method
from tf_redsync.policy import Assignment, Policy, or_dense
from tf_redsync.tables import aligned

# A trial needs a prediction above CERTAIN of the all-reduce's time. Below, its verdict matters
# little: even an all-reduce that hides behind the backward pass fits into a step, of which the
# exchange then takes at most this fraction.
CERTAIN = 0.05
MOST_OVERHEAD = 5.0  # larger values are percentages by mistake


@dataclasses.dataclass(frozen=True)
class Measured:
    """Measurements that predictions are based on.

    Attributes:
        workers: Number of workers.
        link: The network.
        work: Computation of each method.
    """

    workers: int
    link: cost.Link
    work: dict[Method, cost.Work]

    @property
    def known(self) -> bool:
        """Whether the network was measured, or described by the user."""
        return math.isfinite(self.link.all_reduce.rate)

    def seconds(self, method: Method, specs: Sequence[TensorSpec]) -> float:
        """Return the predicted seconds per step for tensors, including those `method` refuses.

        With local steps, this is the mean over a round.
        """
        served = [s for s in specs if method.refuses(s) is None]
        refused = [s for s in specs if method.refuses(s) is not None]
        total = 0.0
        for m, part in ((method, served), (method.dense(), refused)):
            layout = BucketLayout(tuple(part), self.workers)
            total += cost.exchange_seconds(m, layout, self.link, self.work.get(m, cost.NO_WORK))
        return total / max(1, method.sync_schedule.local_steps)


@dataclasses.dataclass(frozen=True)
class Choice:
    """Choice for a bucket: its tensors, the predicted seconds of all methods, the chosen method."""

    specs: tuple[TensorSpec, ...]
    methods: tuple[Method, ...]
    seconds: tuple[float, ...]
    method: Method


@dataclasses.dataclass(frozen=True)
class Decision:
    """A decision of `Auto`; `str` returns its table.

    Attributes:
        choices: One for each bucket, last layers first.
        measured: Measurements of the predictions.
        trial: `Auto.trial_steps`.
        reason: Reason for the buckets' methods, as text.
        budget: Budget and predicted time, as text.
        left_out: Lines about candidates that were not considered.
    """

    choices: tuple[Choice, ...]
    measured: Measured
    trial: int
    reason: str = "predicted to be the fastest"
    budget: str = ""
    left_out: tuple[str, ...] = ()

    @property
    def trial_steps(self) -> int:
        """Number of trial steps; 0 if all buckets are dense, or if the prediction is certain.

        See `tf_redsync.policy.Resolved`.
        """
        compresses = any(c.method is not c.methods[0] for c in self.choices)
        return self.trial if compresses and self.relative_seconds > CERTAIN else 0

    @property
    def relative_seconds(self) -> float:
        """The predicted time of the exchange, as a fraction of the all-reduce's."""
        chosen = sum(c.seconds[c.methods.index(c.method)] for c in self.choices)
        dense = sum(c.seconds[0] for c in self.choices)
        return chosen / dense if dense else 1.0

    def assign(self, specs: Sequence[TensorSpec]) -> list[Assignment]:
        """Return the method of each of `specs`; see `Policy.assign`."""
        chosen = {s.position: (s, c.method) for c in self.choices for s in c.specs}
        reason = self.reason if self.measured.known else "dense without measurements"
        return [or_dense(*chosen[s.position], reason) for s in specs]

    @override
    def __str__(self) -> str:
        link, workers = self.measured.link, self.measured.workers
        if not self.measured.known:
            number = "1 worker" if workers == 1 else f"{workers} workers"
            return f"tf_redsync.Auto, {number}: dense exchanges, without measurements"
        lines = [
            f"tf_redsync.Auto, {workers} workers: "
            + ", ".join(
                f"{kind.replace('_', '-')} {1e3 * line.latency:.2f} ms per hop and "
                f"{line.rate / 1e6:.1f} MB/s"
                for kind, line in vars(link).items()
            )
        ]
        methods = self.choices[0].methods if self.choices else ()
        name = dict(zip(methods, names(methods), strict=True))
        head = ["bucket", "tensors", "elements", *(f"{n} ms" for n in name.values()), "chosen"]
        rows = [head]
        for i, c in enumerate(self.choices):
            times = [f"{1e3 * s:.2f}" for s in c.seconds]
            elements = sum(s.size for s in c.specs)
            row = [str(i), str(len(c.specs)), f"{elements:,}", *times, name[c.method]]
            rows.append(row)
        notes = [self.budget] if self.budget else []
        if self.trial and self.relative_seconds <= CERTAIN:
            notes.append(
                f"no trial: predicted {self.relative_seconds:.1%} of the all-reduce's time"
            )
        return "\n".join([*lines, *aligned(rows, range(len(head))), *notes, *self.left_out])


@dataclasses.dataclass(frozen=True)
class SavedDecision:
    """Decision of an earlier run, restored from a saved model.

    Attributes:
        methods: Methods of the variables, by position.
        trial_steps: See `tf_redsync.policy.Resolved`.
        output_layer: See `Policy`.
    """

    methods: tuple[Method, ...]
    trial_steps: int
    output_layer: str | None = None

    def assign(self, specs: Sequence[TensorSpec]) -> list[Assignment]:
        """Return the method of each of `specs`; see `Policy.assign`.

        Raises:
            ValueError: the decision is for another number of variables than `specs`.
        """
        if len(specs) != len(self.methods):
            raise ValueError(
                f"the saved decision of Auto has {len(self.methods)} variables, but the model has "
                f"{len(specs)}. Load it into the model that was saved."
            )
        policy = Policy(default=self.methods[0], output_layer=self.output_layer)
        marked = policy.mark_output_layer(specs)
        reason = "as in the saved run"
        return [or_dense(s, m, reason) for s, m in zip(marked, self.methods, strict=True)]

    @override
    def __str__(self) -> str:
        return "tf_redsync.Auto: the decision of the saved run"


def described(assignments: Sequence[Assignment], trial_steps: int) -> dict[str, Any]:
    """Return a decision as a structure that can be written as JSON; see `saved_decision`."""
    methods = [serialize(a.method) for a in assignments]
    return {"methods": methods, "trial_steps": trial_steps}


def saved_decision(serialized: dict[str, Any], output_layer: str | None = None) -> SavedDecision:
    """Return the decision that `described` has serialized.

    Args:
        serialized: The result of `described`.
        output_layer: See `Policy`.

    Raises:
        ValueError: the structure is malformed or has an unknown method.
    """
    try:
        methods = tuple(map(from_config, serialized["methods"]))
        steps = int(serialized["trial_steps"])
    except (KeyError, TypeError) as error:
        raise ValueError(
            "a saved decision of Auto must have 'methods' and 'trial_steps'. Received: "
            f"{serialized!r}"
        ) from error
    if not methods:
        raise ValueError(f"a saved decision of Auto must have a method. Received: {serialized!r}")
    return SavedDecision(methods, steps, output_layer)


def check_budget(max_overhead: float | None, step_seconds: float | None, momentum: float) -> None:
    """Check the budget's arguments of `Auto`.

    Raises:
        ValueError: one of `max_overhead` and `step_seconds` is given without the other or is out
            of range, or `momentum` is given with them.
    """
    if (max_overhead is None) != (step_seconds is None):
        raise ValueError(
            "`max_overhead` and `step_seconds` must be given together. Received: "
            f"max_overhead={max_overhead}, step_seconds={step_seconds}"
        )
    if max_overhead is None:
        return
    for name, value in (("max_overhead", max_overhead), ("step_seconds", step_seconds)):
        checks.positive(name, value)
    if max_overhead > MOST_OVERHEAD:
        raise ValueError(
            f"`max_overhead` must be at most {MOST_OVERHEAD:g}, as a fraction: 0.1 is 10 %. "
            f"Received: max_overhead={max_overhead!r}"
        )
    if momentum:
        raise ValueError(
            "`momentum` must be 0 with `max_overhead`, because not all candidates apply momentum. "
            f"Set it in the optimizer. Received: momentum={momentum}"
        )


def within_budget(
    choices: Sequence[Choice], measured: Measured, max_overhead: float, step_seconds: float
) -> Decision:
    """Return the decision for the first method that fits, or for the fastest if none fits.

    Args:
        choices: Choices of the buckets, with the same methods.
        measured: Measurements of the predictions.
        max_overhead: See `Auto`.
        step_seconds: See `Auto`.
    """
    if not choices:
        return Decision((), measured, 0)
    totals = [sum(times) for times in zip(*(c.seconds for c in choices), strict=True)]
    most = max_overhead * step_seconds
    fits = [i for i, seconds in enumerate(totals) if seconds <= most]
    index = fits[0] if fits else min(range(len(totals)), key=totals.__getitem__)
    method = choices[0].methods[index]
    limit = f"{1e3 * most:.4g} ms, {max_overhead:.4g} of a step of {1e3 * step_seconds:.4g} ms"
    budget = f"{method!r} is predicted to take {1e3 * totals[index]:.4g} ms per step"
    if fits:
        budget += f", of at most {limit}: it serves all variables."
        reason = "the first that fits the budget"
    else:
        budget += f", the minimum, but no method fits {limit}. More local steps reduce the time."
        reason = "the fastest: none fits the budget"
    served = tuple(dataclasses.replace(c, method=method) for c in choices)
    return Decision(served, measured, 0, reason, budget)


@dataclasses.dataclass(frozen=True)
class LeftOut:
    """A default candidate that does not suit the optimizer.

    Attributes:
        method: The candidate.
        name: Its name among the candidates.
        reason: The reason, with a remedy.
    """

    method: Method
    name: str
    reason: str


def left_out_lines(
    left_out: Sequence[LeftOut], choices: Sequence[Choice], measured: Measured
) -> tuple[str, ...]:
    """Return a line for each reason, with the network's time; computation is not measured.

    Args:
        left_out: Candidates that were not considered.
        choices: Choices of the buckets.
        measured: Measurements of the predictions.
    """
    known = choices and measured.known
    by_reason: dict[str, list[str]] = {}
    for o in left_out:
        seconds = sum(measured.seconds(o.method, c.specs) for c in choices)
        time = f", {1e3 * seconds:.2f} ms" if known else ""
        by_reason.setdefault(o.reason, []).append(o.name + time)
    alone = " on the network alone" if known else ""
    return tuple(
        f"left out: {', '.join(methods)}{alone}: {reason}" for reason, methods in by_reason.items()
    )


def better_place(
    inside: Decision, exchanged: Decision, momentum: float, wins: Callable[[float, float], bool]
) -> Decision:
    """Return the faster of two places for a momentum, with a line about the other one.

    The momentum of a plain SGD may be in the optimizer or the exchange; see `keras/momentum.py`.
    The candidates differ, and all variables have the momentum in one place, so the whole model's
    exchanges are compared.

    Args:
        inside: Decision with the momentum in the optimizer.
        exchanged: Decision with the momentum in the exchange.
        momentum: The momentum.
        wins: Returns whether the first of two times is clearly shorter.
    """
    inner_time, exchange_time = (
        sum(dict(zip(c.methods, c.seconds, strict=True))[c.method] for c in decision.choices)
        for decision in (inside, exchanged)
    )
    times = f"{1e3 * exchange_time:.2f} ms, and with it in the optimizer {1e3 * inner_time:.2f} ms"
    if not inside.choices:
        return inside
    if wins(exchange_time, inner_time):
        return dataclasses.replace(
            exchanged,
            left_out=(f"momentum={momentum:.4g} is applied in the exchange: {times}",),
        )
    rejected = f"not chosen: momentum={momentum:.4g} in the exchange, as with CodedGMC: {times}"
    return dataclasses.replace(inside, left_out=(rejected, *inside.left_out))
