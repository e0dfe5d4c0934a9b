"""TensorFlow's coordination service: texts by key, who still answers, and the end of collectives.

It runs in the chief's process, and every worker talks to it beside the collectives, so it works
where these are stuck. Private names of TensorFlow are allowed here.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import tensorflow as tf
from tensorflow.python.eager import context as _context

ANSWER_SECONDS = 3.0
_A_DAY = 24 * 3600.0


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


@contextmanager
def limits(heartbeat: float | None, start: float) -> Iterator[None]:
    """Within this context, let a strategy start the service with other time limits.

    Args:
        heartbeat: Seconds without a sign of life of a process, after which TensorFlow itself ends
            the collectives of all workers, by a text that says nothing of steps; `None` for a pause
            of any length. Its own limit is 10 s.
        start: Seconds that it waits for all processes to come. Its own limit is an hour.
    """
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
