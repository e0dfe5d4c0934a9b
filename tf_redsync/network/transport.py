"""Chooses the transport of collectives between GPUs: NCCL, or TensorFlow's ring over gRPC.

TensorFlow uses NCCL for the hint "nccl" only; its AUTO never chooses NCCL. NCCL needs GPUs on all
workers, and no GPU may be shared by two processes.
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
    """Return a copy of the user's options, which `choose` may change."""
    if options is None:
        return Options()
    return Options(options.bytes_per_pack, options.timeout_seconds, options.implementation)


def described(options: Any) -> str:
    """Return the settings that must be equal on all workers, as text."""
    return f"bytes_per_pack={options.bytes_per_pack}, {options.implementation}"


def own_gpus(driver: str = _DRIVER) -> list[str]:
    """Return the UUIDs of this process's GPUs; "" for a GPU whose UUID is unknown.

    Slices of one GPU have the same UUID, and NCCL also treats them as one GPU.

    Args:
        driver: The file name of NVIDIA's driver library.
    """
    numbers = [int(device.name.rsplit(":", 1)[1]) for device in _visible_gpus()]
    if not numbers:
        return []
    try:
        cuda = ctypes.CDLL(driver)
    except OSError:  # GPUs of another vendor
        return ["" for _ in numbers]
    cuda.cuInit.argtypes = [ctypes.c_uint]
    cuda.cuDeviceGetUuid.argtypes = [ctypes.c_char_p, ctypes.c_int]
    if cuda.cuInit(0):
        return ["" for _ in numbers]
    return [_uuid(cuda, number) for number in numbers]


def _visible_gpus() -> list[Any]:
    return tf.config.get_visible_devices("GPU")


def _uuid(cuda: ctypes.CDLL, number: int) -> str:
    uuid = ctypes.create_string_buffer(_UUID_BYTES)
    return "" if cuda.cuDeviceGetUuid(uuid, number) else uuid.raw.hex()


def as_text(gpus: Sequence[str]) -> str:
    """Return a worker's GPUs as text for the other workers."""
    return json.dumps(list(gpus))


def choose(options: Any, gpu_texts: Sequence[str]) -> None:
    """Set the transport in `options`, the same on all workers.

    Args:
        options: The strategy's options, an object that all its launchers hold.
        gpu_texts: By rank, the results of `as_text`.

    Raises:
        ValueError: If the workers have different numbers of GPUs, or `options` request NCCL and it
            cannot run.
    """
    gpus: list[list[str]] = [json.loads(text) for text in gpu_texts]
    counts = [len(of_worker) for of_worker in gpus]
    if len(set(counts)) > 1:
        raise ValueError(
            "all workers must have the same number of GPUs, or none. Received: "
            + ", ".join(f"worker {rank}: {count}" for rank, count in enumerate(counts))
            + ". Set CUDA_VISIBLE_DEVICES to the GPUs of each worker; -1 hides all."
        )
    shared = _shared(gpus)
    _warn_of_shared_replicas(shared, counts[0])
    problem = "" if counts[0] else "the workers have no GPUs"
    if shared:
        problem = f"workers {', '.join(map(str, shared))} share a GPU, which NCCL refuses"
    if options.implementation is Implementation.NCCL and problem:
        raise ValueError(
            "`communication_options` must not request NCCL here: "
            f"{problem}. Received: implementation=NCCL. Omit it, or pass RING."
        )
    if options.implementation is not Implementation.AUTO:
        return
    if not problem:
        options.implementation = Implementation.NCCL
    elif shared:
        _logger.warning("collectives use gRPC instead of NCCL: %s", problem)


def _shared(gpus: Sequence[Sequence[str]]) -> list[int]:
    """Return the ranks of workers that share a GPU with another worker."""
    times = Counter(gpu for of_worker in gpus for gpu in of_worker if gpu)
    return [r for r, of_worker in enumerate(gpus) if any(times[gpu] > 1 for gpu in of_worker)]


def _warn_of_shared_replicas(shared: Sequence[int], count: int) -> None:
    """Warn if the workers `shared` use the same GPUs and have `count` > 1 replicas each."""
    if count > 1 and len(shared) > 1:
        _logger.warning(
            "workers %s share GPUs, and each of them has a replica on all %d that it sees: the "
            "GPUs may run out of memory. Set CUDA_VISIBLE_DEVICES to different GPUs for each "
            "worker, or start the workers of a machine by one `tf-redsync launch`, which does so",
            ", ".join(map(str, shared)),
            count,
        )


def by_nccl(options: Any, device: str) -> bool:
    """Return whether collectives of `device` use NCCL; CPUs ignore the hint."""
    return options.implementation is Implementation.NCCL and "GPU" in device.upper()


def carrier(options: Any, device: str) -> str:
    """Return the transport of the collectives of `device`, as text."""
    return "NCCL" if by_nccl(options, device) else "TensorFlow's ring, over gRPC"
