"""Workers meet before TensorFlow's servers start: who is there, who is missing, who is too many.

TensorFlow waits for workers without a word, and a second process with an index that is taken ends
the job of the first one. So each worker first listens itself on its port of TF_CONFIG, the one that
TensorFlow's server gets afterwards, and tells whoever calls who it is.

They prove to each other that they know the job's secret, TF_REDSYNC_JOB (`greetings.py`).

1. Each calls its own address. If another process answers, this one is one too many.
2. Each joins the chief, which calls it back at its address of TF_CONFIG, for the same reason.
3. When all have joined, each calls all others: collectives need every pair.
4. When all have reached all, the chief says so, and all close their ports and start TensorFlow.
   While it starts, `witness.py` looks after them.

Until then everyone says whom it waits for and why. A worker that finds TensorFlow's server at the
chief's address waits too: an earlier run of the job may have to end.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from tf_redsync import environment
from tf_redsync.cluster import startup_monitor
from tf_redsync.cluster.chief import Chief
from tf_redsync.cluster.meeting import Meeting
from tf_redsync.cluster.member import Member
from tf_redsync.cluster.tasks import Cluster, hold

DEFAULT_TIMEOUT_SECONDS = 600.0
_logger = logging.getLogger("tf_redsync")


@contextmanager
def met(cluster: Cluster | None, start_timeout: float | None = None) -> Iterator[float]:
    """When all workers are there and reach each other, let TensorFlow start in this context.

    Says meanwhile who is missing, and ends the process if a worker is lost while TensorFlow starts.

    Args:
        cluster: The same tasks on all workers; `None`, or with the handshake switched off: there is
            no meeting.
        start_timeout: Seconds until it ends with an error; may be infinite. Default: the
            environment's, else 600.

    Yields:
        `start_timeout`.

    Raises:
        StartError: when the time is over, naming who is missing; or if this process is one too
            many, or of another job.
        ValueError: for a bad time.
    """
    seconds = environment.seconds("start_timeout", start_timeout, environment.START_TIMEOUT)
    seconds = seconds or DEFAULT_TIMEOUT_SECONDS
    with startup_monitor.watching(_meet(cluster, seconds), seconds):
        yield seconds


def meet(cluster: Cluster | None, start_timeout: float | None = None) -> float:
    """Meet as for `met`, without a look at what follows; return `start_timeout`."""
    with met(cluster, start_timeout) as seconds:
        return seconds


def _meet(cluster: Cluster | None, seconds: float) -> dict[str, socket.socket]:
    """Return when all are there: connections to some of them."""
    if cluster is None or not environment.switched_on(environment.HANDSHAKE):
        return {}
    hold(cluster)
    if cluster.rank == 0 and not os.environ.get(environment.JOB):
        _logger.warning(
            "%s is not set: any process that reaches a worker's port can take part in the start of "
            "this job. Set it to the same random text for all workers (docs/security.md)",
            environment.JOB,
        )
    meeting = (Chief if cluster.rank == 0 else Member)(cluster, seconds)
    _run(meeting)
    return meeting.kept


def _run(meeting: Meeting) -> None:
    """Run it in a thread: the program may have an event loop of its own in this one."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            asyncio.run(meeting.run())
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run, name="tf_redsync_rendezvous", daemon=True)
    thread.start()
    try:
        thread.join()
    except BaseException:  # Ctrl-C
        meeting.cancel()
        thread.join()
        raise
    if failures:
        raise failures[0]
