"""The workers that TF_CONFIG names, and this process's place among them."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import sys
from typing import Any

from tf_redsync.errors import DistributedError

_held: dict[tuple[int, str], socket.socket] = {}  # by process and port, see `hold`


class StartError(DistributedError):
    """The workers did not find each other, or one is there twice."""


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The workers that train together, and which of them this process is.

    Attributes:
        addresses: "host:port", by rank.
        tasks: Their names in TF_CONFIG, as "worker:0", by rank.
        rank: This process's.
    """

    addresses: tuple[str, ...]
    tasks: tuple[str, ...]
    rank: int

    @classmethod
    def of(cls, resolver: Any) -> Cluster | None:
        """Return that of a `ClusterResolver`; `None` where this process trains alone."""
        spec = resolver.cluster_spec()
        trains = [job for job in ("chief", "worker") if job in spec.jobs]
        if resolver.task_type not in trains:  # an evaluator
            return None
        tasks = [(job, index) for job in trains for index in spec.task_indices(job)]
        if len(tasks) == 1:
            return None
        return cls(
            tuple(spec.task_address(*task) for task in tasks),
            tuple(f"{job}:{index}" for job, index in tasks),
            tasks.index((resolver.task_type, int(resolver.task_id))),
        )

    def name(self, rank: int) -> str:
        """Return what people call a worker."""
        return f"worker {rank} at {self.addresses[rank]}"


def hold(cluster: Cluster) -> None:
    """Keep other processes of this machine from this worker's place, for the process's life.

    The port itself is free for an instant, between our socket and TensorFlow's.
    """
    if not sys.platform.startswith("linux"):
        return
    port = cluster.addresses[cluster.rank].rpartition(":")[2]
    if (os.getpid(), port) in _held:
        return
    place = socket.socket(socket.AF_UNIX)
    try:
        place.bind(f"\0tf_redsync/port/{port}")  # as a port, in this network namespace
    except OSError:
        place.close()
        raise taken(cluster, "another process of this machine has its port") from None
    _held[os.getpid(), port] = place


def listener(cluster: Cluster) -> socket.socket:
    """Listen where TensorFlow's server will."""
    address = cluster.addresses[cluster.rank]
    port = int(address.rpartition(":")[2])
    try:
        if socket.has_dualstack_ipv6():
            with contextlib.suppress(OSError):  # switched off, or in use as well
                return socket.create_server(
                    ("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024
                )
        return socket.create_server(("", port), backlog=1024)
    except OSError as error:
        raise taken(cluster, f"its port {port} is in use ({error.strerror})") from None


def taken(cluster: Cluster, how: str) -> StartError:
    """Return the error of a process whose place another one has."""
    return StartError(
        f"{cluster.name(cluster.rank)} is running already: {how}. Two processes were started with "
        "the same task, or an earlier run has not ended; this process ends, the other one goes on. "
        f"Received: task={cluster.tasks[cluster.rank]} in TF_CONFIG"
    )
