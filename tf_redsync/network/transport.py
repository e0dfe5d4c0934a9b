"""Which library carries collectives between GPUs: NCCL, or TensorFlow's ring over gRPC.

TensorFlow takes NCCL for the hint "nccl" only, and its own choice, AUTO, never comes to it. NCCL
needs GPUs on all workers, and each of them in one process only.
"""

from __future__ import annotations

import ctypes
import json
import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

Options = tf.distribute.experimental.CommunicationOptions
Implementation = tf.distribute.experimental.CommunicationImplementation

_logger = logging.getLogger("tf_redsync")
_DRIVER = "libcuda.so.1"
_UUID_BYTES = 16


def copied(options: Any) -> Any:
    """Return options that `choose` may change, equal to the user's."""
    if options is None:
        return Options()
    return Options(options.bytes_per_pack, options.timeout_seconds, options.implementation)


def described(options: Any) -> str:
    """Return what has to be equal on all workers."""
    return f"bytes_per_pack={options.bytes_per_pack}, {options.implementation}"


def own_gpus(driver: str = _DRIVER) -> list[str]:
    """Return this process's GPUs: the UUID of each, or "" where the driver does not tell.

    Slices of one GPU have the same, because NCCL takes them for one too.

    Args:
        driver: NVIDIA's library.
    """
    numbers = [int(device.name.rsplit(":", 1)[1]) for device in _visible()]
    if not numbers:
        return []
    try:
        cuda = ctypes.CDLL(driver)
    except OSError:  # GPUs of another make
        return ["" for _ in numbers]
    cuda.cuInit.argtypes = [ctypes.c_uint]
    cuda.cuDeviceGetUuid.argtypes = [ctypes.c_char_p, ctypes.c_int]
    if cuda.cuInit(0):
        return ["" for _ in numbers]
    return [_uuid(cuda, number) for number in numbers]


def _visible() -> list[Any]:
    return tf.config.get_visible_devices("GPU")


def _uuid(cuda: ctypes.CDLL, number: int) -> str:
    uuid = ctypes.create_string_buffer(_UUID_BYTES)
    return "" if cuda.cuDeviceGetUuid(uuid, number) else uuid.raw.hex()


def told(gpus: Sequence[str]) -> str:
    """Return the text by which a worker tells the others of its GPUs."""
    return json.dumps(list(gpus))


def choose(options: Any, all_told: Sequence[str]) -> None:
    """Put into `options` what carries the collectives, the same on all workers.

    Args:
        options: Of the strategy; all its launchers hold this object.
        all_told: What `told` of every worker returned, by rank.

    Raises:
        ValueError: if some workers have more GPUs than others, or none, or if NCCL is asked for
            where it cannot be.
    """
    gpus: list[list[str]] = [json.loads(text) for text in all_told]
    counts = [len(of_worker) for of_worker in gpus]
    if len(set(counts)) > 1:
        raise ValueError(
            "all workers must have the same number of GPUs, or none. Received: "
            + ", ".join(f"worker {rank}: {count}" for rank, count in enumerate(counts))
            + ". Choose by CUDA_VISIBLE_DEVICES which ones a worker sees; -1 hides all."
        )
    shared = _shared(gpus)
    problem = "" if counts[0] else "the workers have no GPUs"
    if shared:
        problem = f"workers {', '.join(map(str, shared))} share a GPU, which NCCL refuses"
    if options.implementation is Implementation.NCCL and problem:
        raise ValueError(
            "`communication_options` must not ask for NCCL here: "
            f"{problem}. Received: implementation=NCCL. Leave it out, or take RING."
        )
    if options.implementation is not Implementation.AUTO:
        return
    if not problem:
        options.implementation = Implementation.NCCL
    elif shared:
        _logger.warning("collectives go over gRPC and not by NCCL: %s", problem)


def _shared(gpus: Sequence[Sequence[str]]) -> list[int]:
    """Return the ranks of workers with a GPU that another one has too."""
    times = Counter(gpu for of_worker in gpus for gpu in of_worker if gpu)
    return [r for r, of_worker in enumerate(gpus) if any(times[gpu] > 1 for gpu in of_worker)]


def by_nccl(options: Any, device: str) -> bool:
    """Whether NCCL carries the collectives of `device`; on CPUs the hint means nothing."""
    return options.implementation is Implementation.NCCL and "GPU" in device.upper()


def carrier(options: Any, device: str) -> str:
    """Return what carries the collectives of `device`, in words."""
    return "NCCL" if by_nccl(options, device) else "TensorFlow's ring, over gRPC"
