"""TensorFlow's coordination service: a key-value store, liveness checks, aborted collectives.

The service runs in the chief's process. The workers reach it without collectives, so it works
while those are stuck. Private names of TensorFlow are allowed here.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import tensorflow as tf
from tensorflow.python.eager import context as _context

from tf_redsync import environment
from tf_redsync.cluster import tcp_timeout
from tf_redsync.cluster.tf_config import Cluster

ANSWER_SECONDS = 3.0
_RETRY_SECONDS = 1.1  # TensorFlow lets gRPC reconnect after one second
_REFUSED_SECONDS = 0.5  # limits the time that a stopped process delays the watchdog
_DAY_SECONDS = 24 * 3600.0
# The cluster that each process belongs to until it ends, with the arguments of `time_limits`.
_joined: dict[int, tuple[Cluster, float | None, str]] = {}


class KeyValueStore(Protocol):
    """Texts by key, shared by all workers; a key can be set once."""

    def set_config_key_value(self, key: str, value: str) -> None:
        """Publish a text."""

    def get_config_key_value(self, key: str, timeout_in_ms: int) -> str:
        """Wait for a text."""

    def delete_config_key_value(self, key: str) -> None:
        """Delete a key, and all keys below it."""


def key_value_store() -> KeyValueStore:
    """Return the store of the coordination service."""
    store: KeyValueStore = _context.context()
    return store


def abort_collectives(message: str) -> None:
    """End all collectives of this process, now and from now on, with an error.

    Args:
        message: Text of the `tf.errors.AbortedError` that the main thread gets.
    """
    _context.context().abort_collective_ops(tf.errors.ABORTED, message)


def is_alive(task: str) -> bool:
    """Return whether a worker's process is alive: its server answers even while Python is busy."""
    return _ask(task, ANSWER_SECONDS) is None


def is_gone(task: str) -> bool | None:
    """Return whether a worker's process has ended: its machine refuses connections to its port.

    It asks twice, because gRPC returns the error of a failed attempt again until it reconnects.
    `None` if there is no answer.
    """
    refuses = _refuses(task)
    if not refuses:
        return refuses
    time.sleep(_RETRY_SECONDS)
    return _refuses(task)


def _refuses(task: str) -> bool | None:
    error = _ask(task, _REFUSED_SECONDS)
    return False if error is None else "Connection refused" in error.message or None


def _ask(task: str, seconds: float) -> tf.errors.OpError | None:
    try:
        _context.context().check_collective_ops_peer_health(task, int(1000 * seconds))
    except tf.errors.OpError as error:
        return error
    return None


def joined() -> bool:
    """Return whether this process has started TensorFlow's server, which later strategies share."""
    return os.getpid() in _joined


@contextmanager
def time_limits(
    cluster: Cluster | None, heartbeat: float | None, start: float, settings: str
) -> Iterator[None]:
    """Context in which a strategy starts the service with these time limits.

    Later strategies of the process share the service, its cluster and its limits.

    Args:
        cluster: The workers; `None` for one worker.
        heartbeat: Seconds without a heartbeat of some process after which TensorFlow itself aborts
            the collectives of all workers, with a message that names no steps. `None`: never.
            TensorFlow's default is 10 s.
        start: Seconds to wait for all processes to start. TensorFlow's default is one hour.
        settings: The user's arguments that determine `heartbeat`, for the error message.

    Raises:
        ValueError: if the cluster or `heartbeat` differs from the first strategy's.
    """
    if joined():
        _check_same(cluster, heartbeat, settings)
    environment.bypass_proxy(() if cluster is None else cluster.addresses)
    runtime = _context.context()
    runtime.configure_coordination_service = functools.partial(
        runtime.configure_coordination_service,
        heartbeat_timeout_in_ms=int(1000 * min(heartbeat or _DAY_SECONDS, _DAY_SECONDS)),
        cluster_register_timeout_in_ms=int(1000 * min(start, _DAY_SECONDS)),
    )
    try:
        yield
    finally:
        del runtime.configure_coordination_service
    if cluster is not None and not joined():
        port = int(cluster.addresses[cluster.rank].rpartition(":")[2])
        tcp_timeout.keep(port, min(heartbeat or _DAY_SECONDS, _DAY_SECONDS))
        _joined[os.getpid()] = cluster, heartbeat, settings


def _check_same(cluster: Cluster | None, heartbeat: float | None, settings: str) -> None:
    first, running, given_first = _joined[os.getpid()]
    if cluster != first:
        raise ValueError(
            f"a process belongs to one cluster until it ends: this process is worker {first.rank} "
            f"of {', '.join(first.addresses)}. Start another process for another TF_CONFIG. "
            f"Received: {cluster}"
        )
    if heartbeat != running:
        raise ValueError(
            "`heartbeat_seconds`, and a `timeout_seconds` of None or below 30, belong to the first "
            "strategy of a process: they configure TensorFlow's service, which later strategies "
            f"share. The first one had {given_first}. Pass the same values, or restart the process "
            f"(the kernel of a notebook). Received: {settings}"
        )
