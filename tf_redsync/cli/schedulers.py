"""TF_CONFIG of this machine's workers in a SLURM or Kubernetes job.

Both schedulers start one launcher on each machine and identify it by environment variables. Every
launcher derives the same addresses from them, without communication.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Mapping

from tf_redsync.cli.worker_environment import tf_config

DEFAULT_PORT = 12345
_SLURM_PORTS = range(15000, 31000)  # below the kernel's range for outgoing connections
_PORTS_OF_A_STEP = 16
_STEP_STRIDE = 97  # blocks between the ports of two steps: jobs with near numbers share nodes
_SECONDS = 30


@dataclasses.dataclass(frozen=True)
class Share:
    """This machine's share of a job.

    Attributes:
        configs: TF_CONFIG of each worker on this machine.
        job: The job's name, equal on all machines.
    """

    configs: tuple[str, ...]
    job: str


def slurm(workers: int, port: int | None, env: Mapping[str, str] = os.environ) -> Share:
    """Return this node's share of a SLURM step with one task per node.

    Args:
        workers: Workers per node.
        port: Port of a node's first worker; `None` derives it from the numbers of job and step.
        env: Environment variables, as set by `srun`.

    Raises:
        ValueError: `env` is not that of `srun`, or the step has several tasks per node.
    """
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or ""
    names = host_names(nodes) if nodes else []
    job = env.get("SLURM_JOB_ID")
    in_step = len(names) == 1 or env.get("SLURM_STEP_NODELIST")
    if not in_step or not job or "SLURM_NODEID" not in env:
        raise ValueError(
            "`--slurm` needs the variables SLURM_JOB_ID, SLURM_NODEID and SLURM_STEP_NODELIST. "
            "Start the launcher with `srun --ntasks-per-node=1 tf-redsync launch --slurm ...`."
        )
    tasks = env.get("SLURM_STEP_NUM_TASKS") or env.get("SLURM_NTASKS") or str(len(names))
    if tasks != str(len(names)):
        raise ValueError(
            f"`--slurm` needs one task per node: pass --ntasks-per-node=1 to srun, and -n to the "
            f"launcher for more workers. Received: {tasks} tasks on {len(names)} nodes ({nodes})"
        )
    number = env["SLURM_NODEID"]
    node = int(number) if number.isdecimal() else len(names)
    if node >= len(names):
        raise ValueError(
            f"SLURM_NODEID must be below the number of nodes, {len(names)} ({nodes}). Received: "
            f"SLURM_NODEID={number}"
        )
    step = env.get("SLURM_STEP_ID", "0")
    if port is None:
        port = _slurm_port(job, step)
    return _share(names, node, workers, port, f"slurm-{job}.{step}")


def _slurm_port(job: str, step: str) -> int:
    """Return the first of `_PORTS_OF_A_STEP` ports that other steps on a node hardly take."""
    job_number, step_number = (int("".join(re.findall(r"\d", text)) or 0) for text in (job, step))
    block = (job_number + _STEP_STRIDE * step_number) % (len(_SLURM_PORTS) // _PORTS_OF_A_STEP)
    return _SLURM_PORTS[block * _PORTS_OF_A_STEP]


def kubernetes(
    pods: int, workers: int, port: int | None, env: Mapping[str, str] = os.environ
) -> Share:
    """Return this pod's share of an indexed Job.

    Args:
        pods: The Job's `completions`.
        workers: Workers per pod.
        port: Port of a pod's first worker; `None` for `DEFAULT_PORT`.
        env: Environment variables, as set by the kubelet.

    Raises:
        ValueError: `env` is not that of an indexed Job, or the pods have no host names in a
            subdomain.
    """
    index = env.get("JOB_COMPLETION_INDEX", "")
    if not index.isdecimal():
        raise ValueError(
            "`--kubernetes` needs the variable JOB_COMPLETION_INDEX. Set `completionMode: Indexed` "
            f"in the Job. Received: JOB_COMPLETION_INDEX={index!r}"
        )
    if int(index) >= pods:
        raise ValueError(
            f"`--kubernetes` must equal the Job's `completions`. Received: --kubernetes {pods}, in "
            f"the pod with JOB_COMPLETION_INDEX={index}"
        )
    host, _, domain = (env.get("HOSTNAME") or socket.gethostname()).partition(".")
    domain = domain or socket.getfqdn(host).partition(".")[2]
    job, _, number = host.rpartition("-")
    if number != index or not job or not domain:
        raise ValueError(
            "the pods of the Job cannot resolve each other's names. Set `subdomain` in its pod "
            "template and create a headless Service of that name (docs/launching.md). Received: "
            f"host name {host!r} in domain {domain!r}, JOB_COMPLETION_INDEX={index}"
        )
    names = [f"{job}-{i}.{domain}" for i in range(pods)]
    return _share(names, int(index), workers, port or DEFAULT_PORT, f"kubernetes-{job}.{domain}")


def _share(names: list[str], index: int, workers: int, port: int, job: str) -> Share:
    addresses = [f"{name}:{port + i}" for name in names for i in range(workers)]
    first = index * workers
    return Share(tuple(tf_config(addresses, first + i) for i in range(workers)), job)


def host_names(nodes: str) -> list[str]:
    """Return the names in a SLURM node list, such as `node[01-03,7],login`.

    Prefers SLURM's `scontrol`, which containers may lack.

    Raises:
        ValueError: for a malformed list.
    """
    if shutil.which("scontrol"):
        try:
            ran = subprocess.run(
                ["scontrol", "show", "hostnames", nodes],
                capture_output=True, text=True, timeout=_SECONDS, check=True,
            )  # fmt: skip
            return ran.stdout.split()
        except (OSError, subprocess.SubprocessError):
            pass  # scontrol fails without SLURM's configuration
    return expand(nodes)


def expand(nodes: str) -> list[str]:
    """Return the names in a node list, without `scontrol`.

    Raises:
        ValueError: for a malformed list.

    Example:
        >>> expand("node[01-03,7],login")
        ['node01', 'node02', 'node03', 'node7', 'login']
    """
    parts = re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", nodes)
    if ",".join(parts) != nodes or not parts:
        raise ValueError(f"the node list is malformed. Received: {nodes!r}")
    return [name for part in parts for name in _names(part)]


def _names(part: str) -> list[str]:
    head, bracket, rest = part.partition("[")
    if not bracket:
        return [part]
    inside, _, tail = rest.partition("]")
    names = []
    for piece in inside.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", piece)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise ValueError(f"the node list is malformed. Received: {part!r}")
        numbers = range(int(match[1]), int(match[2] or match[1]) + 1)
        names += [f"{head}{number:0{len(match[1])}}" for number in numbers]
    return [name + end for name in names for end in _names(tail)] if tail else names
