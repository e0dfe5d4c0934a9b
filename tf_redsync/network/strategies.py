"""Checks and queries of a strategy, and sums outside of a step.

Private names of TensorFlow: the launchers of a strategy's collectives, which `supports_direct`
checks, and the number and rank of its processes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.distribute import cross_device_ops as _cross_device_ops

from tf_redsync.exchange.driver import Network


def check_supported(strategy: tf.distribute.Strategy) -> None:
    """Check that `strategy` exchanges gradients by collectives between its replicas.

    Raises:
        ValueError: If `strategy` does not, for example a parameter server or TPU strategy.
    """
    default = not tf.distribute.has_strategy()
    supported = (
        tf.distribute.MirroredStrategy,
        tf.distribute.MultiWorkerMirroredStrategy,
        tf.distribute.OneDeviceStrategy,
    )
    if not default and not isinstance(strategy, supported):
        raise ValueError(
            "the strategy must be MultiWorkerMirroredStrategy (of tf_redsync or TensorFlow), "
            "MirroredStrategy, OneDeviceStrategy or none. "
            f"Received: strategy={type(strategy).__name__}"
        )


def supports_direct(strategy: tf.distribute.Strategy) -> bool:
    """Return whether the strategy supports single-round collectives.

    They need exactly one replica per process. Several replicas are traced, or run eagerly, one
    after another, so the second replica's message may depend on the first one's answer: a deadlock.
    Public collectives let all replicas of a process send first.
    """
    ops = getattr(strategy.extended, "_cross_device_ops", None)
    if not isinstance(ops, _cross_device_ops.CollectiveAllReduce):
        return False
    needed = ("_next_instance_key", "_get_ordering_token", "_group_key", "_group_size")
    launchers = getattr(ops, "_launchers", None) or []
    return len(launchers) == 1 and all(hasattr(launchers[0], name) for name in needed)


def check_one_replica(strategy: tf.distribute.Strategy, network: Network) -> None:
    """Check that every process has one replica, and that collectives may stand in branches.

    Raises:
        ValueError: If `strategy` has several replicas in a process, or `network` does not support
            collectives in branches.
    """
    if not network.in_branches or local_replicas(strategy) > 1:
        raise ValueError(
            "a method with local steps, a delay or points per worker needs one replica in every "
            "process, MultiWorkerMirroredStrategy and direct_collectives=True. Received: strategy="
            f"{type(strategy).__name__} with {type(network).__name__}. Start one process a device."
        )


def is_redsync_strategy(strategy: Any) -> bool:
    """Return whether this is a `tf_redsync.MultiWorkerMirroredStrategy`.

    Only that one has the attributes which `strategy.py` adds to TensorFlow's: it counts steps, and
    a step that is traced registers checks with it.
    """
    return hasattr(strategy, "average_statistics")


def average_statistics_when(strategy: tf.distribute.Strategy, due: Callable[[], tf.Tensor]) -> None:
    """Average BatchNormalization's statistics after this step if `due()`.

    Applies to tf_redsync's strategy only; a no-op for others.
    """
    if is_redsync_strategy(strategy):
        strategy.statistics_due = due


def average_statistics(strategy: tf.distribute.Strategy) -> None:
    """Average BatchNormalization's statistics now; a no-op for other strategies than ours."""
    if is_redsync_strategy(strategy):
        strategy.average_statistics()


def process_count(strategy: tf.distribute.Strategy) -> int:
    """Return the number of worker processes of `strategy`."""
    return getattr(strategy.extended, "_num_workers", 1)


def local_replicas(strategy: tf.distribute.Strategy) -> int:
    """Return the number of replicas in this process; it is the same in all processes."""
    return strategy.num_replicas_in_sync // process_count(strategy)


def process_rank(strategy: tf.distribute.Strategy) -> int:
    """Return this process's rank among the processes; the chief has rank 0."""
    return getattr(strategy.extended, "_id_in_cluster", 0)


def sum_over_processes(
    strategy: tf.distribute.Strategy, network: Network, array: np.ndarray
) -> np.ndarray:
    """Return the sum of an array over the processes, by a collective of all workers.

    Call it on all workers, outside of any replica.
    """
    if process_count(strategy) == 1:
        return array
    if network.in_branches:
        return network.all_reduce([tf.constant(array)])[0].numpy()
    replicas = local_replicas(strategy)

    def on_replica(values: tf.Tensor) -> tf.Tensor:
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        first = tf.equal(tf.convert_to_tensor(replica, tf.int32) % replicas, 0)
        return network.all_reduce([tf.where(first, values, tf.zeros_like(values))])[0]

    run = tf.function(lambda values: strategy.run(on_replica, (values,)), autograph=False)
    return strategy.experimental_local_results(run(tf.constant(array)))[0].numpy()
