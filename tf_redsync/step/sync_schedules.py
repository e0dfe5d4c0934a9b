"""When to exchange what.

* `EveryStep`: gradients, in every step;
* `Trial`: the same, with a trial of whether dense steps are faster;
* `LocalSteps`: the changes of the weights, every k steps;
* `Streaming`: the same for one fragment of the model after another, perhaps late;
* `ZeroOne`: momenta, in every step, and after a while the changes of the weights, ever more rarely;
* `PerturbedPoint`: gradients, in every step or one step late, at a point of each worker's own.

Each of them may begin with a dense warm-up of all methods, `WarmUp`.
"""

from __future__ import annotations

from collections.abc import Sequence

from tf_redsync.exchange.driver import Network
from tf_redsync.exchange.layout import Bucket
from tf_redsync.step.dense_warm_up import WarmUp
from tf_redsync.step.every_step import EveryStep
from tf_redsync.step.fit_steps import TrainingLength
from tf_redsync.step.local_steps import LocalSteps
from tf_redsync.step.meter import Meter
from tf_redsync.step.perturbed_point import PerturbedPoint
from tf_redsync.step.state_variables import Create, replica_variable
from tf_redsync.step.streaming import Streaming
from tf_redsync.step.trial import Trial
from tf_redsync.step.zero_one import ZeroOne

__all__ = [
    "EveryStep",
    "LocalSteps",
    "PerturbedPoint",
    "Streaming",
    "TrainingLength",
    "Trial",
    "WarmUp",
    "ZeroOne",
    "for_buckets",
    "meter_of",
]


def for_buckets(
    buckets: Sequence[Bucket],
    workers: int,
    trial_steps: int = 0,
    create: Create = replica_variable,
    warm_up: WarmUp | None = None,
    training: TrainingLength | None = None,
) -> EveryStep:
    """Return the program that the buckets' methods ask for; `Policy` ensures that they agree.

    Args:
        buckets: The buckets.
        workers: Number of workers.
        trial_steps: Steps of either kind, dense and compressed, in a trial; 0 for none.
        create: Makes a variable of which each worker has its own; see `step/state_variables.py`.
        warm_up: A dense warm-up of all methods, if there is one.
        training: The training's length, where settings are fractions of it.
    """
    if workers > 1 and trial_steps:
        return Trial(buckets, trial_steps, create, warm_up)
    cadences = [b.method.cadence for b in buckets]
    if workers > 1 and cadences and cadences[0].local_steps:
        if cadences[0].intervals:
            return ZeroOne(buckets, cadences[0].local_steps, warm_up, training)
        program = Streaming if cadences[0].fragments else LocalSteps
        return program(buckets, cadences[0].local_steps, warm_up)
    if workers > 1 and any(c.own_point or c.delay for c in cadences):
        return PerturbedPoint(buckets, cadences[0].delay, warm_up)
    return EveryStep(buckets, warm_up)


def meter_of(program: EveryStep, network: Network, create: Create) -> Meter | None:
    """Return what notes how many elements a program sends, if it can be told.

    Where collectives cannot stand in branches all of a step's plans run, and one is kept.

    Args:
        program: The program.
        network: What carries requests.
        create: See `for_buckets`.
    """
    dense_at_times = any(b.method.cadence.may_be_dense for b in program.buckets)
    if not network.in_branches and (program.warm_up or dense_at_times):
        return None
    return Meter(program.buckets, create)
