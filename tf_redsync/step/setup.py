"""What an exchange is made of."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import tensorflow as tf

from tf_redsync.exchange.layout import Bucket, TensorSpec
from tf_redsync.policy import Assignment, Policy, Resolved, Undecided
from tf_redsync.step import workers
from tf_redsync.step.sync_schedules import TrainingLength, WarmUp


@dataclasses.dataclass(frozen=True)
class Setup:
    """What the workers have agreed to exchange, and how; see `ExchangeBuilder.build`.

    Attributes:
        strategy: In whose scope the exchange is built.
        worker: What a worker is, and its network.
        specs: The trainable variables, in the optimizer's order.
        policy: What was given for a policy.
        resolved: What the methods are assigned by: the policy, or what `Auto` decided.
        assignments: The variables' methods.
        buckets: Makes the buckets of assignments, in the order in which they are exchanged.
        max_skipped: See `step/nonfinite.py`; 0 for no limit.
        warm_up: A dense warm-up of all methods, if there is one.
        training: The training's length, where settings are fractions of it.
    """

    strategy: tf.distribute.Strategy
    worker: workers.Replica
    specs: tuple[TensorSpec, ...]
    policy: Policy | Undecided
    resolved: Resolved
    assignments: list[Assignment]
    buckets: Callable[[list[Assignment]], list[Bucket]]
    max_skipped: int
    warm_up: WarmUp | None = None
    training: TrainingLength | None = None
