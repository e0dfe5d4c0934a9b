"""Prints what an installation consists of and which implementation of every op runs.

With `--check`, two workers are started here, which try every collective that the library uses; then
the exit code says whether all is well. Without, it is 0 wherever there is a report.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from tf_redsync.cli import check
from tf_redsync.cli.command_line import Command, Parser
from tf_redsync.cli.version import versions

OPS = (
    "accumulate_and_select", "decode", "descend", "quantize", "dequantize_sum", "sparse_merge",
    "golomb_encode", "golomb_decode", "bloom_build", "bloom_query", "chunked_top_k",
    "select_and_code", "uncode", "seal", "open",
    "pack_bits", "unpack_bits", "write_bits", "bitmap", "set_bits", "rice_encode", "rice_decode",
)  # fmt: skip


def compiler() -> str:
    """First line of the compiler's `--version`, or why there is none."""
    command = shlex.split(os.environ.get("CXX", "g++"))
    try:
        run = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"none ({' '.join(command)}: {error})"
    return (run.stdout.splitlines() or [f"{command[0]} says nothing"])[0]


def cuda_compiler() -> str:
    """Last line of `nvcc --version`, or why there is none."""
    home = os.environ.get("CUDA_HOME")
    command = os.path.join(home, "bin", "nvcc") if home else "nvcc"
    try:
        run = subprocess.run([command, "--version"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"none ({command}: {error})"
    return (run.stdout.splitlines() or [f"{command} says nothing"])[-1]


def library() -> dict[str, Any]:
    """The native library: path, TensorFlow it was built for, instruction set, GPUs, problem."""
    from tf_redsync.ops import native

    report: dict[str, Any] = dict.fromkeys(("path", "built_for", "simd", "gpu"))
    try:
        native.load()
        report["path"] = str(native.library())
        report["built_for"] = native.built_for(native.library())
        simd = ctypes.CDLL(report["path"]).redsync_simd
        simd.restype = ctypes.c_char_p
        report["simd"] = simd().decode()
        report["gpu"] = native.gpu_build()
        report["problem"] = None
    except (native.NativeLibraryError, OSError, ValueError) as error:
        report["problem"] = str(error)
    return report


def backends() -> dict[str, dict[str, dict[str, str]]]:
    """For every op and kind of device, which backend runs it there, and why."""
    devices = {"CPU": _backend_on_cpus()}
    devices["GPU"] = _backend_on_gpus(devices["CPU"])
    return {op: {kind: dict(on) for kind, on in devices.items()} for op in OPS}


def _backend_on_cpus() -> dict[str, str]:
    from tf_redsync import ops

    try:
        return {"backend": ops.backend(), "reason": ops.backend_reason()}
    except (ops.NativeLibraryError, ValueError) as error:
        return {"backend": "none", "reason": str(error)}


def _backend_on_gpus(on_cpus: dict[str, str]) -> dict[str, str]:
    """The library and, where there are GPUs, what they can run."""
    from tf_redsync.ops import native

    if on_cpus["backend"] != "native":
        return on_cpus
    if not native.has_gpu_kernels():
        reason = f"the library has no GPU kernels: {native.gpu_problem()}"
        return {"backend": "tensorflow", "reason": reason}
    reason = f"the library has kernels for {native.gpu_build()}"
    problem = native.gpu_problem() if devices().get("GPU") else ""
    if problem:
        return {"backend": "tensorflow", "reason": f"{reason}, but {problem}"}
    return {"backend": "native", "reason": reason}


def cluster() -> dict[str, Any]:
    """Summary of TF_CONFIG."""
    text = os.environ.get("TF_CONFIG", "")
    if not text:
        return {"set": False}
    try:
        config = json.loads(text)
        jobs = {job: len(tasks) for job, tasks in config.get("cluster", {}).items()}
        return {"set": True, "jobs": jobs, "task": config.get("task")}
    except (ValueError, AttributeError, TypeError) as error:
        return {"set": True, "problem": f"TF_CONFIG is malformed: {error}"}


def devices() -> dict[str, int]:
    """Numbers of devices that TensorFlow sees, by type."""
    import tensorflow as tf

    count: dict[str, int] = {}
    for device in tf.config.list_physical_devices():
        count[device.device_type] = count.get(device.device_type, 0) + 1
    return count


def carrier(gpus: int) -> str:
    """What carries the collectives of workers with so many GPUs each."""
    ring = "TensorFlow's ring, over gRPC"
    return f"NCCL, where each worker has GPUs of its own; else {ring}" if gpus else ring


def examine() -> dict[str, Any]:
    """All of the above as one structure that JSON can hold."""
    found = devices()
    return {
        "versions": versions(),
        "compiler": compiler(),
        "cuda_compiler": cuda_compiler(),
        "library": library(),
        "ops": backends(),
        "devices": found,
        "collectives": carrier(found.get("GPU", 0)),
        "tf_config": cluster(),
    }


def _render_ops(chosen: dict[str, dict[str, dict[str, str]]]) -> list[str]:
    lines: list[str] = []
    reasons: dict[str, str] = {}
    for op, devices in chosen.items():
        places = ", ".join(f"{on['backend']} on {kind}" for kind, on in devices.items())
        lines.append(f"{op:22}{places}")
        reasons |= {kind: on["reason"] for kind, on in devices.items()}
    return lines + [f"{f'  why on {kind}':22}{reason}" for kind, reason in reasons.items()]


def render(report: dict[str, Any]) -> str:
    """The report of `examine` as text."""
    lines = [f"{name:22}{version or '-'}" for name, version in report["versions"].items()]
    lines.append(f"{'compiler':22}{report['compiler']}")
    lines.append(f"{'CUDA compiler':22}{report['cuda_compiler']}")
    native = report["library"]
    lines.append(f"{'native library':22}{native['path'] or '-'}")
    lines.append(f"{'  built for':22}TensorFlow {native['built_for'] or '-'}")
    lines.append(f"{'  instruction set':22}{native['simd'] or '-'}")
    lines.append(f"{'  GPU kernels':22}{native['gpu'] or '-'}")
    if native["problem"]:
        lines.append(f"{'  problem':22}{native['problem']}")
    lines += _render_ops(report["ops"])
    count = ", ".join(f"{n} {kind}" for kind, n in report["devices"].items())
    lines.append(f"{'devices':22}{count}")
    lines.append(f"{'collectives':22}{report['collectives']}")
    config = report["tf_config"]
    if not config["set"]:
        text = "not set: one worker"
    elif "problem" in config:
        text = config["problem"]
    else:
        jobs = ", ".join(f"{n} {job}" for job, n in config["jobs"].items())
        text = f"{jobs or 'no cluster'}; this task: {config['task']}"
    lines.append(f"{'TF_CONFIG':22}{text}")
    for kind, found in report.get("check", {}).items():
        for name, problem in found.items():
            lines.append(f"{f'{name} on {kind}':22}{problem or 'works'}")
    return "\n".join(lines)


def _configure(parser: Parser) -> None:
    parser.flags(
        [
            (("--json",), {"action": "store_true", "help": "print JSON"}),
            (
                ("--check",),
                {
                    "action": "store_true",
                    "help": "start two workers here, which try every collective, on the CPU and on "
                    "GPUs if there are any; the exit code is 1 if something is wrong",
                },
            ),
        ]
    )


def _run(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    del parser
    report = examine()
    if args.check:
        report["check"] = check.run(report["devices"].get("GPU", 0))
    print(json.dumps(report, indent=2) if args.json else render(report))
    problems = [p for of in report.get("check", {}).values() for p in of.values() if p]
    problems += [p for p in (report["library"]["problem"],) if p and args.check]
    return int(bool(problems))


COMMAND = Command(
    "doctor",
    "report on the installation",
    "Reports what is installed, and which implementation of every op runs.",
    (
        ("", "for people, and for bug reports"),
        ("--json", "for programs"),
        ("--check", "two workers here; ends with 1 if something does not work"),
    ),
    _configure,
    _run,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the report; returns the exit code."""
    return COMMAND.main(arguments)


if __name__ == "__main__":
    sys.exit(main())
