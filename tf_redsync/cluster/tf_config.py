"""TF_CONFIG: its validation, the workers that it names, and this process's rank."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import socket
from typing import Any

_TOP_LEVEL_KEYS = ("cluster", "task", "environment", "rpc_layer", "job")
_TASK_TYPES = ("chief", "worker", "evaluator", "ps")
_TRAINS = ("chief", "worker")  # in the order of ranks


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The workers that train together, and this process's rank.

    Attributes:
        addresses: "host:port" of each worker, by rank.
        tasks: Names in TF_CONFIG, such as "worker:0", by rank.
        rank: Rank of this process.
    """

    addresses: tuple[str, ...]
    tasks: tuple[str, ...]
    rank: int

    @classmethod
    def of(cls, resolver: Any) -> Cluster | None:
        """Return the cluster of a `ClusterResolver`; `None` if this process trains alone.

        Raises:
            ValueError: this process is an evaluator outside of the cluster, or the cluster has
                parameter servers.
        """
        spec = resolver.cluster_spec()
        if resolver.task_type == "evaluator" and spec.jobs and "evaluator" not in spec.jobs:
            raise ValueError(
                "an evaluator outside of the cluster works alone: use no strategy in this task."
            )
        trains = [job for job in _TRAINS if job in spec.jobs]
        if resolver.task_type not in trains:  # an evaluator
            return None
        tasks = [(job, index) for job in trains for index in spec.task_indices(job)]
        if "ps" in spec.jobs:  # TensorFlow's workers would wait for ps:0 to coordinate them
            raise ValueError(
                "MultiWorkerMirroredStrategy uses no parameter servers: remove `ps` from the "
                f"cluster. Received: ps={spec.job_tasks('ps')}"
            )
        if len(tasks) == 1:
            return None
        return cls(
            tuple(spec.task_address(*task) for task in tasks),
            tuple(f"{job}:{index}" for job, index in tasks),
            tasks.index((resolver.task_type, int(resolver.task_id))),
        )

    def name(self, rank: int) -> str:
        """Return a worker's name for messages."""
        return f"worker {rank} at {self.addresses[rank]}"


def rank() -> int:
    """Return this worker's rank: 0 for the chief if TF_CONFIG has one, then workers by `index`.

    Needs no strategy, so a script can choose files or data before it creates one.

    Returns:
        0 without TF_CONFIG.

    Raises:
        ValueError: for a malformed TF_CONFIG, or a task that does not train.

    Example:
        verbose = 2 if tf_redsync.rank() == 0 else 0
    """
    workers, task = _workers()
    if task is None:
        return 0
    if task not in workers:
        raise ValueError(
            f"only {' and '.join(_TRAINS)} tasks have a rank. Received: task {task[0]!r} "
            "in TF_CONFIG"
        )
    return workers.index(task)


def size() -> int:
    """Return the number of workers in TF_CONFIG, including the chief; 1 without TF_CONFIG.

    A worker with several GPUs counts once here, and once per GPU in
    `strategy.num_replicas_in_sync`, which divides the batches.

    Raises:
        ValueError: for a malformed TF_CONFIG.
    """
    return max(1, len(_workers()[0]))


def _workers() -> tuple[list[tuple[str, int]], tuple[str, int] | None]:
    """Return the tasks that train, by rank, and this process's task; no tasks without TF_CONFIG."""
    text = os.environ.get("TF_CONFIG")
    check_tf_config(text, serves=True)
    config = json.loads(text) if text else {}
    cluster = config.get("cluster")
    if not cluster:
        return [], None
    task = config["task"]["type"], int(config["task"]["index"])
    return [(job, i) for job in _TRAINS for i in range(len(cluster.get(job, ())))], task


def check_tf_config(text: str | None, serves: bool = False) -> None:
    """Check TF_CONFIG before TensorFlow starts a server from it.

    Args:
        text: The variable's value; `None` or empty means one worker.
        serves: Whether this process has started the server already.

    Raises:
        ValueError: with the problem and an example of a valid TF_CONFIG.
    """
    if not text:
        return
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _bad_config(f"is not valid JSON ({error})", text) from error
    if not isinstance(config, dict):
        raise _bad_config("must be a JSON object", text)
    cluster = config.get("cluster")
    if not cluster:
        unknown = sorted(set(config) - set(_TOP_LEVEL_KEYS))
        if unknown:  # most likely a misspelt `cluster`
            raise _bad_config(f"there is no `cluster`, but an unknown key {unknown[0]!r}", text)
        return
    if not isinstance(cluster, dict) or not set(cluster) <= set(_TASK_TYPES):
        raise _bad_config(f"`cluster` must map some of {_TASK_TYPES} to lists of addresses", text)
    for task_type, addresses in cluster.items():
        if not isinstance(addresses, list) or not all(_is_address(a) for a in addresses):
            raise _bad_config(
                f"`cluster.{task_type}` must be a list of 'host:port'. With an IPv6 address, write "
                "'[addr]:port'",
                text,
            )
    everyone = [address for addresses in cluster.values() for address in addresses]
    if len(set(everyone)) != len(everyone):
        raise _bad_config("an address appears twice in `cluster`", text)
    address = _own_address(config.get("task"), cluster, text)
    if address and len(everyone) > 1 and not serves:
        _check_port_is_free(address)


def _own_address(task: Any, cluster: dict[str, list[str]], text: str) -> str | None:
    """Return the address of this process's task; `None` for an evaluator outside of `cluster`.

    Raises:
        ValueError: the task is malformed.
    """
    if not isinstance(task, dict) or task.get("type") not in [*cluster, "evaluator"]:
        raise _bad_config(f"`task.type` must be one of {sorted({*cluster, 'evaluator'})}", text)
    index, addresses = task.get("index"), cluster.get(task["type"], [None])
    if isinstance(index, str) and index.isdecimal():
        index = int(index)
    if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < len(addresses):
        raise _bad_config(f"`task.index` must be in 0..{len(addresses) - 1}", text)
    return addresses[index]


def _is_address(address: Any) -> bool:
    if not isinstance(address, str):
        return False
    match = re.fullmatch(r"(?:\[[^\[\]]+\]|[^:]+):([0-9]{1,5})", address)
    return match is not None and 0 < int(match[1]) < 65536


def _bad_config(problem: str, text: str) -> ValueError:
    return ValueError(
        f"TF_CONFIG: {problem}. It should look like "
        '{"cluster": {"worker": ["host1:port", "host2:port"]}, '
        f'"task": {{"type": "worker", "index": 0}}}}. Received: TF_CONFIG={text}'
    )


def _check_port_is_free(address: str) -> None:
    host, _, port = address.rpartition(":")
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", int(port)))
        except PermissionError as error:
            raise ValueError(
                f"TF_CONFIG: this worker may not listen on port {port} ({error.strerror}). Use a "
                f"port from 1024 on. Received: address={address}"
            ) from error
        except OSError as error:
            raise ValueError(
                f"TF_CONFIG: this worker's port {port} is in use ({error.strerror}). Another "
                "worker may have been started with the same `task.index`, or an earlier run is "
                f"still alive. Received: address={address}"
            ) from error
