"""Starts the worker processes of one measurement and returns the result of worker 0."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import netlab
from tf_redsync import launch

ROOT = Path(__file__).resolve().parents[1]


class MeasurementError(RuntimeError):
    """The workers of one method failed; the message has their last lines."""


def threads(count: int) -> int:
    """Returns the number of threads for each of `count` workers on this machine."""
    return int(os.environ.get("TF_NUM_INTRAOP_THREADS", 0)) or launch.default_threads(count)


def measure(
    module: str,
    lab: netlab.Lab,
    flags: Mapping[str, Any],
    timeout: float,
    env: Mapping[str, str] | None = None,
    echo: bool = False,
) -> dict[str, Any]:
    """Runs a module once on every machine of a network.

    Args:
        module: Name of the worker's module; it writes JSON to `--output`.
        lab: The network.
        flags: `--name value` for the worker; `None` values are omitted.
        timeout: Seconds until the workers are killed.
        env: Environment variables for the workers.
        echo: Whether to print the output of worker 0.

    Returns:
        The JSON result of worker 0.

    Raises:
        MeasurementError: when a worker failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "result.json"
        command = [sys.executable, "-m", module, "--output", str(output)]
        for name, value in flags.items():
            command += [] if value is None else [f"--{name}", str(value)]
        interface = {"TF_REDSYNC_BENCH_INTERFACE": lab.interface} if lab.interface else {}
        job = launch.run(
            command,
            len(lab.addresses),
            env={
                # The workers import this checkout, in any working directory.
                "PYTHONPATH": os.pathsep.join(
                    filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
                ),
                "CUDA_VISIBLE_DEVICES": "-1",
                "TF_CPP_MIN_LOG_LEVEL": os.environ.get("TF_CPP_MIN_LOG_LEVEL", "2"),
                **interface,
                **(env or {}),
            },
            timeout=timeout,
            grace=5,
            log_dir=folder if echo else None,
            echo=echo,
            addresses=lab.addresses,
            wrappers=lab.wrappers,
        )
        if job.exit_code:
            raise MeasurementError(f"`{flags.get('method', module)}` failed. {job.message}")
        return json.loads(output.read_text(encoding="utf-8"))


def reason_of(message: str) -> str:
    """Returns the line of a message that names an exception, or its first line."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    named = [line for line in lines if line.split(":")[0].endswith(("Error", "Disagreement"))]
    return named[-1] if named else lines[0]
