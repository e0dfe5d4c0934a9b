"""Candidates of `Auto`, with the accuracy that each of them reached in a measurement.

Accuracy cannot be predicted. The measurement is the final perplexity of a small character-level
transformer on four workers, after 1,000 steps of AdamW at one learning rate, mean of three seeds,
relative to dense exchanges (docs/benchmarks.md, "Bytes for perplexity"). The order may differ for
other models.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence

from tf_redsync import checks, outer
from tf_redsync.exchange.capabilities import dense_start
from tf_redsync.exchange.method import Method
from tf_redsync.methods.block_quantized import BlockQuantized
from tf_redsync.methods.coded_topk import CodedTopK
from tf_redsync.methods.demo import DeMo
from tf_redsync.methods.dense import Dense, NoExchange
from tf_redsync.methods.half import HalfPrecision
from tf_redsync.methods.local_sgd import DiLoCo, LocalSGD
from tf_redsync.methods.low_rank import PowerSGD
from tf_redsync.methods.sparse_loco import SparseLoCo


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A method with its measured accuracy.

    Attributes:
        method: The method.
        perplexity: Final perplexity relative to `Dense`.
        remark: Optimizer of the measurement, if it differs from the common one.
    """

    method: Method
    perplexity: float
    remark: str = ""


def candidates() -> tuple[Candidate, ...]:
    """Return the candidates in the order of their perplexity."""
    short = outer.Nesterov(learning_rate=0.7, momentum=0.5)
    entries = (
        Candidate(CodedTopK(density=0.03, value_bits=4), 0.92, "no momentum (beta_1 = 0)"),
        Candidate(Dense(), 1.0),
        Candidate(HalfPrecision(), 1.0),
        Candidate(BlockQuantized(bits=8), 1.0),
        Candidate(BlockQuantized(bits=4), 1.01),
        Candidate(DeMo(), 1.03, "SGD, at Adam's learning rate"),
        Candidate(DiLoCo(steps=15, outer=short), 1.13),
        Candidate(PowerSGD(), 1.15),
        Candidate(LocalSGD(steps=15), 1.15),
        Candidate(DiLoCo(steps=50, outer=short), 1.21),
        Candidate(SparseLoCo(steps=15, top_k=128), 1.26),
        Candidate(SparseLoCo(steps=50, top_k=128), 1.40),
    )
    return tuple(sorted(entries, key=lambda c: c.perplexity))


def chosen_from(density: float) -> tuple[Method, ...]:
    """Return the methods, besides `Dense`, that work with any optimizer and learning rate.

    Args:
        density: Density of `CodedTopK`.
    """
    methods = (c.method for c in candidates() if not isinstance(c.method, Dense))
    suitable = (m for m in methods if dense_start(m) is None and not m.traits.votes)
    return tuple(
        dataclasses.replace(m, density=density) if isinstance(m, CodedTopK) else m for m in suitable
    )


def every_step(density: float) -> tuple[Method, ...]:
    """Return the default candidates of `Auto` without momentum and without a budget.

    Args:
        density: Density of `CodedTopK`.
    """
    return (
        CodedTopK(density=density),
        PowerSGD(),
        BlockQuantized(bits=4),
        BlockQuantized(bits=8),
        HalfPrecision(),
    )


def for_adaptive(method: Method) -> Method:
    """Return a default candidate with the arguments that suit Adam and its like."""
    if isinstance(method, CodedTopK):
        return dataclasses.replace(method, value_bits=4)
    return method


def names(methods: Sequence[Method]) -> list[str]:
    """Return the names of methods: the class, and the arguments in which equal classes differ."""
    classes = collections.defaultdict(list)
    for method in methods:
        classes[type(method)].append(method)
    return [_name(m, classes[type(m)]) for m in methods]


def _name(method: Method, others: Sequence[Method]) -> str:
    differing = {}
    for field in dataclasses.fields(method):
        value = getattr(method, field.name)
        if value is not None and any(getattr(m, field.name) != value for m in others):
            differing[field.name] = type(value).__name__ if isinstance(value, Method) else value
    arguments = ", ".join(f"{name}={value}" for name, value in differing.items())
    return type(method).__name__ + (f"({arguments})" if arguments else "")


def _check_adaptation(method: Method) -> None:
    if method.traits.needs_sgd:
        raise ValueError(
            "`candidates` must send gradients, as the all-reduce does, not updates of Adam. "
            f"Received: {method!r} in candidates. Use it without Auto."
        )


def check_candidate(method: Method, momentum: float, alone: bool) -> None:
    """Check a candidate.

    Args:
        method: The candidate.
        momentum: Momentum of the all-reduce of `Auto`.
        alone: Whether one method serves all variables in the whole training.

    Raises:
        ValueError: `Auto` cannot choose `method`; the message has the reason.
    """
    if not isinstance(method, Method):
        raise ValueError(
            f"`candidates` must be tf_redsync methods. Received: {method!r} in candidates"
            f"{checks.class_hint(method)}"
        )
    _check_adaptation(method)
    schedule = method.sync_schedule
    phases = schedule.warm_up_steps or schedule.dense_every or schedule.changes
    begins = phases or method.traits.density_changes or dense_start(method) is not None
    if alone:
        turns = schedule.fragments or schedule.intervals
        never = isinstance(method, NoExchange)
        if begins or turns or never or schedule.delay or schedule.own_point:
            raise ValueError(
                "`candidates` must exchange gradients in every step, or weight changes after a "
                "constant number of local steps, without warm-up or phases. Received: "
                f"{method!r} in candidates"
            )
        if method.traits.momentum_in_exchange or method.traits.votes:
            raise ValueError(
                "`candidates` with `max_overhead` must apply no momentum and send no votes, since "
                "the all-reduce, which may be chosen instead, does neither. Set momentum in the "
                f"optimizer. Received: {method!r} in candidates"
            )
        return
    if schedule.per_worker_weights or begins or "residual" not in method.traits.state_kinds:
        raise ValueError(
            "`candidates` must exchange gradients in every step, without warm-up or phases, and "
            "keep a residual that a dense step can deliver, such as RedSync, DGC, TopK, PowerSGD, "
            f"ACPSGD, EFSignSGD and HalfPrecision. Received: {method!r} in candidates"
        )
    exchanged = method.traits.momentum_in_exchange
    if exchanged != momentum:
        raise ValueError(
            f"`momentum` must be equal in Auto and its candidates. Received: momentum={momentum} "
            f"in Auto, and {exchanged} in {type(method).__name__}. Use "
            f"Auto(momentum={exchanged}, candidates=...) or another candidate."
        )
