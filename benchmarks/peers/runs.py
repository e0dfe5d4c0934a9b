"""Starts the workers of all libraries, one method after the other, in rounds."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import tf_redsync
from benchmarks import netlab, workers
from benchmarks.peers import common, environments, horovod_tf, mwms, pytorch_ddp, report
from benchmarks.step import step_time
from tf_redsync import launch

OWN = "tf_redsync"
OWN_METHODS = (  # at the users' defaults
    "none", "Dense()", "HalfPrecision()", "PowerSGD(rank=4)", "RedSync(momentum=0.9)",
    "CodedTopK()", "CodedGMC()",
)  # fmt: skip
OTHERS = {peer.name: peer for peer in (mwms.peer(), pytorch_ddp.peer(), horovod_tf.peer())}
PEERS = (OWN, *OTHERS)


@dataclasses.dataclass(frozen=True)
class Library:
    """Measurements of a library.

    Attributes:
      methods: in the order of the table.
      measure: (network, method) -> worker 0's measurements of one run.
      versions: None: those that the worker reports.
    """

    methods: tuple[str, ...]
    measure: Callable[[netlab.Lab, str], dict[str, Any]]
    versions: dict[str, str] | None = None


def command(
    python: Path, peer: common.Peer, method: str, args: argparse.Namespace, output: str
) -> list[str]:
    """Returns the command of a worker, equal for all of them."""
    words = [str(python), "-m", peer.module, "--method", method, "--output", output]
    for name in ("model", "steps", "warmup", "batch"):
        value = getattr(args, name)
        words += [] if value is None else [f"--{name}", str(value)]
    return words


def measure(
    python: Path, peer: common.Peer, args: argparse.Namespace, lab: netlab.Lab, method: str
) -> dict[str, Any]:
    """Starts the workers of another library once and returns worker 0's measurements.

    Raises:
      MeasurementError: a worker failed or timed out; with its last lines.
      DisagreementError: the workers' weights differ.
    """
    env = {
        # Only this checkout: no package from here may reach the other environment.
        "PYTHONPATH": str(workers.ROOT),
        "CUDA_VISIBLE_DEVICES": "-1",
        "TF_CPP_MIN_LOG_LEVEL": os.environ.get("TF_CPP_MIN_LOG_LEVEL", "2"),
        common.INTERFACE_VARIABLE: lab.interface or "",
    }
    with tempfile.TemporaryDirectory() as folder:
        job = launch.run(
            command(python, peer, method, args, folder),
            args.workers,
            env=env,
            timeout=args.timeout,
            grace=5,
            addresses=lab.addresses,
            wrappers=lab.wrappers,
        )
        if job.exit_code:
            raise workers.MeasurementError(job.message)
        files = [Path(folder) / f"worker_{rank}.json" for rank in range(args.workers)]
        results = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    return report.collect(method, results)


def own(args: argparse.Namespace) -> Library:
    """Returns tf_redsync, measured by the worker of `benchmarks/step/step_time.py`."""
    versions = {OWN: tf_redsync.__version__, **mwms.versions()}
    return Library(
        tuple(args.methods),
        lambda lab, method: step_time.measure(lab, args.model, method, args),
        versions,
    )


def libraries(args: argparse.Namespace) -> dict[str, Library | str]:
    """Returns the installed libraries of `--peers`, or the reason why one cannot be installed."""
    found: dict[str, Library | str] = {}
    for name in args.peers:
        if name == OWN:
            found[name] = own(args)
            continue
        peer = OTHERS[name]
        try:
            python = environments.ensure(peer, Path(args.venvs), args.install_timeout)
            found[name] = Library(peer.methods, functools.partial(measure, python, peer, args))
        except environments.InstallError as error:
            found[name] = str(error)
            print(f"{name}: not installed: {report.reason(str(error))}", flush=True)
    return found


def rounds(
    lab: netlab.Lab, chosen: Mapping[str, Library | str], count: int
) -> dict[str, dict[str, Any]]:
    """Measures all methods in turn; returns the libraries' parts of the report.

    A method that fails is not repeated; its `error` replaces its summary.
    """
    ready = {name: library for name, library in chosen.items() if isinstance(library, Library)}
    turns = [(name, method) for name, library in ready.items() for method in library.methods]
    results: dict[tuple[str, str], list[dict[str, Any]]] = {turn: [] for turn in turns}
    errors: dict[tuple[str, str], str] = {}
    for number in range(count):
        for name, method in turns:
            if (name, method) in errors:
                continue
            print(f"round {number + 1}/{count}: {name:<11}{method:<21}", end="", flush=True)
            start = time.monotonic()
            try:
                result = ready[name].measure(lab, method)
            except (workers.MeasurementError, report.DisagreementError) as error:
                errors[name, method] = str(error)
                print(f" failed: {report.reason(str(error))}", flush=True)
                continue
            results[name, method].append(result)
            median, seconds = statistics.median(result["times_ms"]), time.monotonic() - start
            print(f"{median:9.1f} ms a step ({seconds:.0f} s in all)", flush=True)
    parts: dict[str, dict[str, Any]] = {}
    for name, library in chosen.items():
        if isinstance(library, str):
            parts[name] = {"error": library}
            continue
        own_results = {method: results[name, method] for method in library.methods}
        own_errors = {m: errors[name, m] for m in library.methods if (name, m) in errors}
        parts[name] = report.part(own_results, own_errors, library.versions)
    return parts
