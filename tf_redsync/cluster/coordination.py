"""TensorFlow's coordination service: texts by key, who still answers, and the end of collectives.

It runs in the chief's process, and every worker talks to it beside the collectives, so it works
where these are stuck. Private names of TensorFlow are allowed here.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager

import tensorflow as tf
from tensorflow.python.eager import context as _context

from tf_redsync.cluster import connections
from tf_redsync.cluster.tasks import Cluster

ANSWER_SECONDS = 3.0
_A_DAY = 24 * 3600.0
# The cluster that a process takes part in until its end, with `limits` of it; by process.
_joined: dict[int, tuple[Cluster, float | None, str]] = {}


def key_value_store():
    """The coordination service, as an object that sets and gets texts by key."""
    return _context.context()


def abort_collectives(message: str) -> None:
    """End all collectives of this process, now and from now on, with an error.

    Args:
        message: Its text; the main thread gets it in a `tf.errors.AbortedError`.
    """
    _context.context().abort_collective_ops(tf.errors.ABORTED, message)


def answers(task: str) -> bool:
    """Whether a worker's process answers: its server does so beside all that Python does."""
    try:
        _context.context().check_collective_ops_peer_health(task, int(1000 * ANSWER_SECONDS))
    except tf.errors.OpError:
        return False
    return True


def joined() -> bool:
    """Whether a strategy of this process has started TensorFlow's server, which the next share."""
    return os.getpid() in _joined


@contextmanager
def limits(
    cluster: Cluster | None, heartbeat: float | None, start: float, given: str
) -> Iterator[None]:
    """Within this context, let a strategy start the service with other time limits.

    A later strategy of the process shares the service, and so the cluster and the limits.

    Args:
        cluster: The workers; `None` for one.
        heartbeat: Seconds without a sign of life of a process, after which TensorFlow itself ends
            the collectives of all workers, by a text that says nothing of steps; `None` for a pause
            of any length. Its own limit is 10 s.
        start: Seconds that it waits for all processes to come. Its own limit is an hour.
        given: What `heartbeat` follows from, as the user knows it.

    Raises:
        ValueError: for another cluster or `heartbeat` than the first strategy's.
    """
    if joined():
        _check_same(cluster, heartbeat, given)
    runtime = _context.context()
    runtime.configure_coordination_service = functools.partial(
        runtime.configure_coordination_service,
        heartbeat_timeout_in_ms=int(1000 * min(heartbeat or _A_DAY, _A_DAY)),
        cluster_register_timeout_in_ms=int(1000 * min(start, _A_DAY)),
    )
    try:
        yield
    finally:
        del runtime.configure_coordination_service
    if cluster is not None and not joined():
        port = int(cluster.addresses[cluster.rank].rpartition(":")[2])
        connections.keep(port, min(heartbeat or _A_DAY, _A_DAY))
        _joined[os.getpid()] = cluster, heartbeat, given


def _check_same(cluster: Cluster | None, heartbeat: float | None, given: str) -> None:
    first, running, given_first = _joined[os.getpid()]
    if cluster != first:
        raise ValueError(
            "a process takes part in one cluster until it ends: this one is worker "
            f"{first.rank} of {', '.join(first.addresses)}. Start another process for another "
            f"TF_CONFIG. Received: {cluster}"
        )
    if heartbeat != running:
        raise ValueError(
            "`heartbeat_seconds` and a `timeout_seconds` of None or below 30 must be given to the "
            "first strategy of a process: TensorFlow's service, which the others share, runs with "
            f"what follows from them. The first one had {given_first}. Restart the process (the "
            f"kernel of a notebook), or leave them as they are. Received: {given}"
        )
