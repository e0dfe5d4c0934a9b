"""Report on an installation: versions, libraries, devices and the implementation of every op.

With `--check`, two local workers run every collective of the library, and the exit code is 1 if
something does not work. Without `--check` the exit code is 0.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.metadata
import importlib.util
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from tf_redsync.cli import self_test
from tf_redsync.cli.command_line import Command, Parser, check_installation
from tf_redsync.cluster.tf_config import check_tf_config
from tf_redsync.version import __version__

PACKAGES = ("tensorflow", "tensorflow-cpu", "keras", "tf_keras", "tensorflow-addons", "numpy")
OPS = (
    "accumulate_and_select", "decode", "descend", "descended", "quantize", "dequantize_sum",
    "sparse_merge", "golomb_encode", "golomb_decode", "bloom_build", "bloom_query", "chunked_top_k",
    "block_quantize", "block_dequantize", "select_and_code", "uncode", "seal", "open",
    "seal_variables", "all_finite", "half_encode", "half_reduce", "half_decode", "pack_bits",
    "unpack_bits", "write_bits", "bitmap", "set_bits", "rice_encode", "rice_decode",
)  # fmt: skip
_CUDA_FOLDER = "/usr/local/cuda"  # as in `custom_ops/installed.py`


def versions() -> dict[str, str | None]:
    """Return the versions of Python, tf_redsync and related packages; `None` if not installed."""
    installed: dict[str, str | None] = {
        "python": platform.python_version(),
        "tf_redsync": __version__,
    }
    for name in PACKAGES:
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            installed[name] = None
    return installed


def compiler() -> str:
    """Return the first line of the C++ compiler's `--version`, or the reason for its absence."""
    command = shlex.split(os.environ.get("CXX") or "g++")
    try:
        run = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"none ({' '.join(command)}: {error})"
    return (run.stdout.splitlines() or [f"{command[0]} printed nothing"])[0]


def cuda_compiler() -> str:
    """Return the last line of `nvcc --version`, or the reason for its absence.

    It is the nvcc of the build, which `custom_ops/installed.py` finds.
    """
    home = os.environ.get("CUDA_HOME")
    folders = f"{home}/bin" if home else f"{os.environ.get('PATH', '')}:{_CUDA_FOLDER}/bin"
    command = shutil.which("nvcc", path=folders)
    if command is None:
        return f"none (no nvcc in {f'{home}/bin' if home else f'PATH and {_CUDA_FOLDER}/bin'})"
    try:
        run = subprocess.run([command, "--version"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"none ({command}: {error})"
    return (run.stdout.splitlines() or [f"{command} printed nothing"])[-1]


def bytecode() -> str:
    """Return whether Python finds Keras's bytecode, or compiles Keras at every start, as text."""
    import keras

    if not sys.dont_write_bytecode or os.path.exists(
        importlib.util.cache_from_source(keras.__file__)
    ):
        return "compiled once"
    folder = os.path.dirname(os.path.dirname(keras.__file__))
    return (
        "compiled anew at every start, which takes some 10 s: PYTHONDONTWRITEBYTECODE is set. Run "
        f"{shlex.join([sys.executable, '-m', 'compileall', '-q', folder])} once"
    )


def library() -> dict[str, Any]:
    """Return the native library's path, TensorFlow version, instruction set, GPUs, problem."""
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
    """Return the backend and its reason for every op and type of device."""
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
    """Return the backend on this machine's GPUs; without a GPU, that of the library's build."""
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
    """Return a summary of TF_CONFIG."""
    text = os.environ.get("TF_CONFIG", "")
    if not text:
        return {"set": False}
    try:
        check_tf_config(text, serves=True)
    except ValueError as error:
        problem = str(error).removeprefix("TF_CONFIG: ")
        return {"set": True, "problem": f"TF_CONFIG is malformed: {problem}"}
    config = json.loads(text)
    jobs = {job: len(tasks) for job, tasks in (config.get("cluster") or {}).items()}
    return {"set": True, "jobs": jobs, "task": config.get("task")}


def devices() -> dict[str, int]:
    """Return the number of devices that TensorFlow sees, by type."""
    import tensorflow as tf

    count: dict[str, int] = {}
    for device in tf.config.list_physical_devices():
        count[device.device_type] = count.get(device.device_type, 0) + 1
    return count


def carrier(gpus: int) -> str:
    """Return the transport of the collectives for workers with `gpus` GPUs each."""
    ring = "TensorFlow's ring, over gRPC"
    return f"NCCL if each worker has GPUs of its own, else {ring}" if gpus else ring


def examine() -> dict[str, Any]:
    """Return the whole report as a structure that can be written as JSON."""
    device_counts = devices()
    return {
        "versions": versions(),
        "compiler": compiler(),
        "cuda_compiler": cuda_compiler(),
        "bytecode": bytecode(),
        "library": library(),
        "ops": backends(),
        "devices": device_counts,
        "collectives": carrier(device_counts.get("GPU", 0)),
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
    """Return the report of `examine` as text."""
    lines = [f"{name:22}{version or '-'}" for name, version in report["versions"].items()]
    lines.append(f"{'compiler':22}{report['compiler']}")
    lines.append(f"{'CUDA compiler':22}{report['cuda_compiler']}")
    lines.append(f"{'bytecode':22}{report['bytecode']}")
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
    for kind, problems in report.get("check", {}).items():
        for name, problem in problems.items():
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
                    "help": "run every collective on two local workers, on the CPU and on any "
                    "GPUs; the exit code is 1 if a check fails",
                },
            ),
        ]
    )


def _run(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    check_installation(parser)
    report = examine()
    if args.check:
        os.environ.pop("TF_CONFIG", None)  # the self-test sets it for its workers
        report["check"] = self_test.run(report["devices"].get("GPU", 0))
    print(json.dumps(report, indent=2) if args.json else render(report))
    problems = [p for checks in report.get("check", {}).values() for p in checks.values() if p]
    problems += [p for p in (report["library"]["problem"],) if p and args.check]
    return int(bool(problems))


COMMAND = Command(
    "doctor",
    "report on the installation",
    "Reports the installed versions and libraries, and the implementation of every op.",
    (
        ("", "as text, for bug reports"),
        ("--json", "as JSON"),
        ("--check", "also test two local workers; exit code 1 if a check fails"),
    ),
    _configure,
    _run,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report; return the exit code."""
    return COMMAND.main(arguments)
