"""Chooses the sync schedule, which determines the tensors and steps of exchanges.

docs/architecture.md lists the schedules. Each may begin with a dense warm-up of all methods,
`WarmUp`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tf_redsync.exchange.layout import Bucket
from tf_redsync.step.changing_steps import ChangingSteps
from tf_redsync.step.exchange_schedule import ExchangeSchedule
from tf_redsync.step.fit_steps import TrainingLength, WarmUp
from tf_redsync.step.local_steps import LocalSteps
from tf_redsync.step.perturbed_point import PerturbedPoint
from tf_redsync.step.state_variables import Create, replica_variable
from tf_redsync.step.streaming import Streaming
from tf_redsync.step.trial import Trial
from tf_redsync.step.zero_one import ZeroOne


def for_buckets(
    buckets: Sequence[Bucket],
    workers: int,
    *,
    trial_steps: int = 0,
    create: Create = replica_variable,
    warm_up: WarmUp | None = None,
    training: TrainingLength | None = None,
    nonfinite: Any = None,
    clock: Any = None,
) -> ExchangeSchedule:
    """Return the schedule that the buckets' methods declare.

    `Policy` ensures that the methods' schedules are compatible.

    Args:
        buckets: The buckets.
        workers: Number of workers.
        trial_steps: Number of dense and of compressed steps in a trial; 0 for no trial.
        create: Creates a per-worker variable; see `step/state_variables.py`.
        warm_up: A dense warm-up of all methods, or `None`.
        training: The length of the training, or `None` if no setting is a fraction of it.
        nonfinite: Counter of skipped steps; `None` outside of training.
        clock: int64 variable, number of steps so far; `None` outside of training.
    """
    if workers > 1 and trial_steps:
        return Trial(buckets, trial_steps, create, warm_up)
    schedules = [b.method.sync_schedule for b in buckets]
    if workers > 1 and schedules and schedules[0].local_steps:
        if schedules[0].intervals:
            return ZeroOne(buckets, schedules[0].local_steps, nonfinite, warm_up, training, clock)
        local = Streaming if schedules[0].fragments else LocalSteps
        return local(buckets, schedules[0].local_steps, nonfinite, warm_up)
    if workers > 1 and any(c.own_point or c.delay for c in schedules):
        return PerturbedPoint(buckets, schedules[0].delay, warm_up)
    if workers > 1 and (warm_up or any(c.may_be_dense or c.changes for c in schedules)):
        return ChangingSteps(buckets, warm_up)
    return ExchangeSchedule(buckets)
