"""GPUs of each worker on a machine: CUDA_VISIBLE_DEVICES, chosen without CUDA or TensorFlow.

TensorFlow's strategy takes every visible GPU as a replica and reserves nearly all of its memory, so
workers that see the same GPUs run out of memory.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from tf_redsync.cli import output

VARIABLE = "CUDA_VISIBLE_DEVICES"
_LIST = ("nvidia-smi", "-L")
_LIST_SECONDS = 60.0  # without NVIDIA's persistence mode a driver of eight GPUs loads in 20 s
_ENTRY = re.compile(r"\d+|(?:GPU|MIG)-\S+")


def worker_variables(
    base: Mapping[str, str],
    own: Sequence[Mapping[str, str]],
    describe: bool = True,
) -> list[dict[str, str]]:
    """Return `own` with the workers' GPUs, and report in one line how they are divided.

    A worker that is alone on the machine keeps all GPUs.

    Args:
        base: Environment of all workers.
        own: Variables of each worker on this machine. One that sets CUDA_VISIBLE_DEVICES keeps it.
        describe: Whether to report the division. A failure to count the GPUs is always reported.
    """
    variables = [dict(of_worker) for of_worker in own]
    count = len(variables)
    if count < 2 or all(VARIABLE in of_worker for of_worker in variables):
        return variables
    gpus = visible(base)
    if not gpus:
        return variables
    if describe:
        grows = base.get("TF_FORCE_GPU_ALLOW_GROWTH") == "true"
        output.say(_description(gpus, count, grows))
    return [{VARIABLE: _share(gpus, i, count)} | variables[i] for i in range(count)]


def visible(env: Mapping[str, str]) -> list[str]:
    """Return the entries of CUDA_VISIBLE_DEVICES for the GPUs that workers may use.

    Without the variable these are all GPUs of the machine. Like CUDA, drops the entries from the
    first invalid one on, such as -1.
    """
    if VARIABLE not in env:
        return [str(index) for index in range(_installed())]
    entries = [entry.strip() for entry in env[VARIABLE].split(",")]
    valid = [_ENTRY.fullmatch(entry) is not None for entry in entries]
    return entries[: [*valid, False].index(False)]


def _share(gpus: Sequence[str], place: int, count: int) -> str:
    """Return the CUDA_VISIBLE_DEVICES of worker `place` among `count` workers on a machine.

    Every worker gets as many GPUs as the others, as TensorFlow's strategy requires. If there are
    fewer GPUs than workers, each worker shares one.

    Example:
        >>> _share(["0", "1", "2", "3"], 1, 2)
        '2,3'
        >>> _share(["0"], 1, 2)
        '0'
    """
    each = max(1, len(gpus) // count)
    first = place * each % len(gpus)
    return ",".join(gpus[first : first + each])


def _installed() -> int:
    """Return the number of GPUs; 0 with a message if they exist but cannot be counted.

    `nvidia-smi` respects the limits of containers and of SLURM, unlike /proc/driver/nvidia.
    """
    try:
        code, text = _run_nvidia_smi()
        if not code:
            return sum(line.startswith("GPU ") for line in text.splitlines())
        problem = text.strip()
    except (OSError, subprocess.TimeoutExpired) as error:
        problem = str(error)
    if device_files():
        output.say(
            f"the GPUs are not divided among the workers, because `{' '.join(_LIST)}` fails "
            f"({problem}): each worker uses all of them. List them in {VARIABLE}, such as 0,1."
        )
    return 0


def _run_nvidia_smi() -> tuple[int, str]:
    """Return the exit code and the output."""
    process = subprocess.Popen(
        _LIST, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )  # fmt: skip
    try:
        text, _ = process.communicate(timeout=_LIST_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()  # and no wait: it may hang in the driver
        raise
    return process.returncode, text


def device_files() -> list[Path]:
    """Return the device files of NVIDIA GPUs that this process may see."""
    return list(Path("/dev").glob("nvidia[0-9]*"))


def _description(gpus: Sequence[str], count: int, grows: bool) -> str:
    """Return one line on how `count` workers divide `gpus`.

    Args:
        gpus: Entries of CUDA_VISIBLE_DEVICES.
        count: Number of workers.
        grows: Whether TF_FORCE_GPU_ALLOW_GROWTH is set, so that TensorFlow reserves no memory.
    """
    total = len(gpus)
    named = f"{_counted(total, 'GPU')} ({','.join(gpus)})"
    if total < count:
        memory = "" if grows else (
            "the first worker reserves its memory, and others fail unless "
            "TF_FORCE_GPU_ALLOW_GROWTH=true is set; "
        )  # fmt: skip
        return (
            f"{count} workers share {named} of this machine: {memory}collectives use gRPC instead "
            f"of NCCL. For separate GPUs start at most {_counted(total, 'worker')} here."
        )
    each, idle = divmod(total, count)
    text = f"each of {count} workers gets {each} of {named}, by {VARIABLE}"
    if idle:
        text += f"; {_counted(idle, 'GPU')} {'is' if idle == 1 else 'are'} idle"
    if each > 1:
        text += f". The GPUs of a worker sum densely; for a worker on each GPU start {total} here"
    return f"{text}."


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
