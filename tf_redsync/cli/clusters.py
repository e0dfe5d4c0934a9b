"""Which worker this machine has in a job of SLURM or Kubernetes, as TF_CONFIG.

Both start one launcher on each machine and say which one it is by environment variables. Addresses
have to come out the same everywhere, without a word between the machines.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Mapping

from tf_redsync.cli.surroundings import tf_config

DEFAULT_PORT = 12345
_SLURM_PORTS = range(15000, 31000)  # below those that the kernel takes for outgoing connections
_PORTS_OF_A_JOB = 16
_SECONDS = 30


@dataclasses.dataclass(frozen=True)
class Share:
    """This machine's part of a job.

    Attributes:
        configs: TF_CONFIG of each worker here.
        job: A name that is the same on all machines.
    """

    configs: tuple[str, ...]
    job: str


def slurm(workers: int, port: int | None, env: Mapping[str, str] = os.environ) -> Share:
    """Returns the share of this node in a step of SLURM, started once on each node.

    Args:
        workers: On each node.
        port: Of a node's first worker; `None`: by the job's number.
        env: What `srun` has set.

    Raises:
        ValueError: outside of `srun`, or with several tasks on a node.
    """
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST")
    job = env.get("SLURM_JOB_ID")
    if not nodes or not job or "SLURM_NODEID" not in env:
        raise ValueError(
            "`--slurm` needs what srun sets: SLURM_JOB_ID, SLURM_NODEID and SLURM_STEP_NODELIST. "
            "Start it by `srun --ntasks-per-node=1 tf-redsync launch --slurm ...`."
        )
    names = host_names(nodes)
    tasks = env.get("SLURM_STEP_NUM_TASKS") or env.get("SLURM_NTASKS") or str(len(names))
    if tasks != str(len(names)):
        raise ValueError(
            f"`--slurm` wants one task on each node: srun --ntasks-per-node=1, and -n for several "
            f"workers on each. Received: {tasks} tasks on {len(names)} nodes ({nodes})"
        )
    node = int(env["SLURM_NODEID"])
    if node >= len(names):
        raise ValueError(f"SLURM_NODEID={node} is none of the {len(names)} nodes {nodes}")
    if port is None:
        digits = int("".join(re.findall(r"\d", job)) or 0)
        port = _SLURM_PORTS[digits * _PORTS_OF_A_JOB % (len(_SLURM_PORTS) - _PORTS_OF_A_JOB)]
    step = env.get("SLURM_STEP_ID", "0")
    return _share(names, node, workers, port, f"slurm-{job}.{step}")


def kubernetes(
    pods: int, workers: int, port: int | None, env: Mapping[str, str] = os.environ
) -> Share:
    """Returns the share of this pod in an indexed Job.

    Args:
        pods: The Job's `completions`.
        workers: In each pod.
        port: Of a pod's first worker; `None` for `DEFAULT_PORT`.
        env: What the kubelet has set.

    Raises:
        ValueError: in a pod of another kind, or without a name that the others know.
    """
    index = env.get("JOB_COMPLETION_INDEX", "")
    if not index.isdecimal():
        raise ValueError(
            "`--kubernetes` needs the variable JOB_COMPLETION_INDEX, which pods of a Job with "
            f"`completionMode: Indexed` have. Received: JOB_COMPLETION_INDEX={index!r}"
        )
    if int(index) >= pods:
        raise ValueError(
            f"`--kubernetes` must be the Job's number of `completions`. Received: --kubernetes "
            f"{pods}, in the pod with JOB_COMPLETION_INDEX={index}"
        )
    own, _, domain = (env.get("HOSTNAME") or socket.gethostname()).partition(".")
    domain = domain or socket.getfqdn(own).partition(".")[2]
    job, _, number = own.rpartition("-")
    if number != index or not job or not domain:
        raise ValueError(
            "the pods of the Job do not know each other by name: give its template a `subdomain`, "
            "and make a headless Service of this name (docs/launching.md). Received: the host "
            f"name {own!r} in the domain {domain!r}, JOB_COMPLETION_INDEX={index}"
        )
    names = [f"{job}-{i}.{domain}" for i in range(pods)]
    return _share(names, int(index), workers, port or DEFAULT_PORT, f"kubernetes-{job}.{domain}")


def _share(names: list[str], own: int, workers: int, port: int, job: str) -> Share:
    addresses = [f"{name}:{port + i}" for name in names for i in range(workers)]
    first = own * workers
    return Share(tuple(tf_config(addresses, first + i) for i in range(workers)), job)


def host_names(nodes: str) -> list[str]:
    """Returns the names in a node list of SLURM, such as `node[01-03,7],login`.

    SLURM's own `scontrol` knows best. In a container it may be missing.

    Raises:
        ValueError: for a list that is none.
    """
    if shutil.which("scontrol"):
        try:
            ran = subprocess.run(
                ["scontrol", "show", "hostnames", nodes],
                capture_output=True, text=True, timeout=_SECONDS, check=True,
            )  # fmt: skip
            return ran.stdout.split()
        except (OSError, subprocess.SubprocessError):
            pass  # without its configuration it says nothing
    return expand(nodes)


def expand(nodes: str) -> list[str]:
    """Returns the names in a node list, as `host_names` without `scontrol`.

    Raises:
        ValueError: for a list that is none.

    Example:
        >>> expand("node[01-03,7],login")
        ['node01', 'node02', 'node03', 'node7', 'login']
    """
    parts = re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", nodes)
    if ",".join(parts) != nodes or not parts:
        raise ValueError(f"this is no list of nodes. Received: {nodes!r}")
    return [name for part in parts for name in _names(part)]


def _names(part: str) -> list[str]:
    head, bracket, rest = part.partition("[")
    if not bracket:
        return [part]
    inside, _, tail = rest.partition("]")
    found = []
    for piece in inside.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", piece)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise ValueError(f"this is no list of nodes. Received: {part!r}")
        numbers = range(int(match[1]), int(match[2] or match[1]) + 1)
        found += [f"{head}{number:0{len(match[1])}}" for number in numbers]
    return [name + end for name in found for end in _names(tail)] if tail else found
