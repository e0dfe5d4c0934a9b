"""Averages of workers' states, in the steps that `SyncSchedule.averages` declares."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_redsync.exchange.driver import Network, ask, sent_bytes
from tf_redsync.exchange.layout import Bucket
from tf_redsync.exchange.requests import AllReduce
from tf_redsync.exchange.sync_schedule import SyncSchedule
from tf_redsync.step.branches import rarely
from tf_redsync.step.state_variables import StateVariables


def average_states(
    buckets: Sequence[Bucket],
    states: Sequence[StateVariables],
    step: tf.Variable,
    network: Network,
) -> Any:
    """Set the states that are due to their means over the workers.

    Args:
        buckets: The buckets.
        states: For every bucket, the variables of its state, after the state was stored.
        step: int64 variable, the number of exchanges so far, including this step's.
        network: The network that answers requests.

    Returns:
        The bytes that one worker sent: a float, or a float64 scalar.
    """
    sent: Any = 0.0
    for bucket, variables in zip(buckets, states, strict=True):
        schedule = bucket.method.sync_schedule
        if schedule.average_every and network.workers > 1:
            sent += _average_state(variables, schedule, step.read_value(), network)
    return sent


def _average_state(
    variables: StateVariables, schedule: SyncSchedule, steps: tf.Tensor, network: Network
) -> tf.Tensor:
    due = schedule.averages_after(steps)

    def average() -> tf.Tensor:
        own = variables.read(schedule.averages)
        request = AllReduce([t / network.workers for t in tf.nest.flatten(own)])
        means = tf.nest.pack_sequence_as(own, ask(network, request))
        if not network.in_branches:  # runs in every step
            means = tf.nest.map_structure(lambda mean, t: tf.where(due, mean, t), means, own)
        variables.assign(means)
        return tf.constant(sent_bytes(request, network.workers), tf.float64)

    if not network.in_branches:
        return average()
    return rarely(due, average, lambda: tf.constant(0.0, tf.float64))
