"""Workers meet before TensorFlow's servers start: who is there, who is missing, who is too many.

TensorFlow waits for workers without a word, and a second process with an index that is taken ends
the job of the first one. So each worker first listens itself on its port of TF_CONFIG, the one that
TensorFlow's server gets afterwards, and tells whoever calls who it is.

1. Each calls its own address. If another process answers, this one is one too many.
2. Each joins the chief, which calls it back at its address of TF_CONFIG, for the same reason.
3. When all have joined, each calls all others: collectives need every pair.
4. When all have reached all, the chief says so, and all close their ports and start TensorFlow.

Until then everyone says whom it waits for and why. A worker that finds TensorFlow's server at the
chief's address waits too: an earlier run of the job may have to end.
"""

from __future__ import annotations

import asyncio
import os
import threading

from tf_redsync import environment
from tf_redsync.exchange.chief import Chief
from tf_redsync.exchange.cluster import Cluster, hold
from tf_redsync.exchange.meeting import Meeting
from tf_redsync.exchange.member import Member

DEFAULT_TIMEOUT_SECONDS = 600.0
_met: set[tuple[int, Cluster]] = set()  # by process: TensorFlow's server has the port from then on


def meet(cluster: Cluster | None, start_timeout: float | None = None) -> float:
    """Return when all workers are there and reach each other; say meanwhile who is missing.

    A second strategy of the same process shares TensorFlow's server, and does not meet again.

    Args:
        cluster: The same tasks on all workers; `None`, or with the handshake switched off: there is
            no meeting.
        start_timeout: Seconds until it ends with an error; may be infinite. Default: the
            environment's, else 600.

    Returns:
        `start_timeout`.

    Raises:
        StartError: when the time is over, naming who is missing; or if this process is one too
            many, or of another job.
        ValueError: for a bad time.
    """
    seconds = environment.seconds("start_timeout", start_timeout, environment.START_TIMEOUT)
    seconds = seconds or DEFAULT_TIMEOUT_SECONDS
    if cluster is None or not environment.switched_on(environment.HANDSHAKE):
        return seconds
    here = os.getpid(), cluster
    if here not in _met:
        hold(cluster)
        _run((Chief if cluster.rank == 0 else Member)(cluster, seconds))
        _met.add(here)
    return seconds


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
