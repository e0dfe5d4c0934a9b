"""Tests and measures the CUDA core on the installed GPU, in ten minutes.

    tools/gpu_check.sh                    # results into $OUT, or into gpu_check/
    tools/gpu_check.sh --only build tests # some steps
    tools/gpu_check.sh --emulate          # the steps that need no GPU

Builds `custom_ops/core/gpu` without TensorFlow, compares it with the numpy oracles, runs it under
compute-sanitizer, repeats a selection, builds it as PTX only, measures it, and profiles three of
its kernels with ncu. If TensorFlow is installed, two processes exchange through the real ops. Each
step is "passed", "failed" or "left out", with a reason; the exit code is 1 if one failed.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np

from tests.gpu import device as d

BUDGET = 570.0  # seconds
TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
QUICK = "chunks or checksum or ties or batch or bad"  # tests to run under a sanitizer
KERNELS = ("Accumulate", "SelectCandidates", "AddRanks")
# Maximum ratio to the plain pass, by the exponent of the size; and to a copy's speed.
LIMITS = {24: 1.45, 26: 1.2}
PASS_OF_COPY = 0.85
BENCHMARK = ["benchmarks/selection/selection.py", "--device", "gpu", "--inputs", "normal"]
PYTEST = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/gpu"]


class LeftOutError(Exception):
    """A step does not apply here; the text gives the reason."""


@dataclasses.dataclass
class Check:
    """State shared by all steps.

    Attributes:
        out: Folder of the results.
        emulate: Whether the kernels run on the CPU.
        library: The core, once it is built.
        end: Deadline.
        results: By step: state, text, seconds.
    """

    out: pathlib.Path
    emulate: bool
    end: float
    library: pathlib.Path | None = None
    results: dict[str, dict] = dataclasses.field(default_factory=dict)

    def run(self, command, seconds: float = 300.0, log: str | None = None, **env: str) -> str:
        """Run a program; return its output, or raise `RuntimeError` with the end of it.

        On failure, the whole output is written to the file `log`, if one is named.
        """
        left = min(seconds, self.end - time.monotonic())
        if left < 5:
            raise LeftOutError("the time is over")
        try:
            done = subprocess.run(
                [str(word) for word in command], cwd=d.ROOT, env={**os.environ, **env},
                capture_output=True, text=True, timeout=left,
            )  # fmt: skip
        except FileNotFoundError:
            raise LeftOutError(f"there is no {command[0]}") from None
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"{command[0]} took more than {left:.0f} s") from None
        said = done.stdout + done.stderr
        if done.returncode and log:
            (self.out / log).write_text(said)
        if done.returncode:
            raise RuntimeError("\n".join(said.strip().splitlines()[-15:]))
        return said

    def on_device(self) -> None:
        """Raises unless there is a GPU."""
        if self.emulate:
            raise LeftOutError("emulated")

    def environment(self, library: pathlib.Path) -> dict[str, str]:
        """Environment variables for tests of a library."""
        kind = "emulated" if self.emulate else "cuda"
        return {"REDSYNC_GPU_LIBRARY": str(library), "REDSYNC_GPU_LIBRARY_KIND": kind}

    def device(self):
        """The library's device, for calls from this process."""
        return (d.Emulated if self.emulate else d.Cuda)(self.library)


def describe(check: Check) -> str:
    """Describes the machine."""
    check.on_device()
    query = "--query-gpu=name,driver_version,compute_cap,memory.total,clocks.max.sm"
    gpus = check.run(["nvidia-smi", query, "--format=csv,noheader"]).strip()
    return f"{gpus}; {check.run([d.nvcc() or 'nvcc', '--version']).strip().splitlines()[-1]}"


def build(check: Check) -> str:
    """Builds with nvcc for this GPU."""
    if check.emulate:
        check.library = d.build("emulated", check.out)
    else:
        library = check.out / "libredsync_gpu.so"
        check.library = d.compile_cuda(library, "-arch=native", "-lineinfo")
    problem = check.device().library.redsync_gpu_problem(0).decode()
    if problem:
        raise RuntimeError(problem)
    return f"{check.library.stat().st_size / 2**20:.1f} MiB"


def run_tests(check: Check, name: str, library: pathlib.Path, expression: str, *before) -> str:
    """Runs tests that compare with the oracles; returns their last line. `name` is the step's."""
    which = "emulated" if check.emulate else "cuda"
    command = [*before, *PYTEST, "-k", f"({expression}) and {which} and not benchmark"]
    hidden = {} if check.emulate else {"CUDA_VISIBLE_DEVICES": "0"}
    log = f"{name}.log"
    said = check.run(command, log=log, **check.environment(library), **hidden)
    summary = said.strip().splitlines()[-1]
    if " passed" not in summary:
        raise RuntimeError(f"no test ran: {summary}")
    return summary


def tests(check: Check) -> str:
    """Runs all tests."""
    return run_tests(check, "tests", check.library, QUICK if check.emulate else "not sanitizers")


def sanitizer(tool: str) -> Callable[[Check], str]:
    """Returns a step that runs one of compute-sanitizer's tools."""

    def step(check: Check) -> str:
        check.on_device()
        words = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9"]
        return run_tests(check, tool, check.library, QUICK, *words)

    return step


def repetitions(check: Check) -> str:
    """Compares messages of the same input, which must be equal each time."""
    from benchmarks.selection.gpu import Arrays

    device, found = check.device(), []
    for exponent, times in ((14, 5), (16, 20)) if check.emulate else ((24, 5), (26, 300)):
        g = np.random.default_rng(exponent).standard_t(3, 2**exponent).astype(np.float32)
        select = Arrays(device, g, 0.001, 0.9, None).select("exact")
        hashes = set()
        for _ in range(times):
            select()
            hashes.add(hashlib.sha256(device.get(select.message).tobytes()).hexdigest())
        if len(hashes) != 1:
            raise RuntimeError(f"{len(hashes)} different messages of {times} at 2^{exponent}")
        found.append(f"2^{exponent}: {times} equal")
    return ", ".join(found)


def ptx(check: Check) -> str:
    """Builds PTX for the oldest architecture, which the driver compiles for this GPU."""
    check.on_device()
    code = "-gencode=arch=compute_75,code=compute_75"
    library = d.compile_cuda(check.out / "libptx.so", code)
    return run_tests(check, "ptx", library, QUICK)


def speed(check: Check) -> str:
    """Runs the benchmark and checks its limits."""
    check.on_device()
    path = check.out / "selection.json"
    sizes = ",".join(map(str, LIMITS))
    words = ["--log2_sizes", sizes, "--densities", "0.001,0.01,0.03", "--json", path]
    check.run([sys.executable, *BENCHMARK, *words], CUDA_VISIBLE_DEVICES="0")
    found = json.loads(path.read_text())
    rows = {(r["n"], r["op"]): r for r in found if r["density"] == 0.001}
    said, missed = [], []
    for exponent, limit in LIMITS.items():
        exact, plain = rows[2**exponent, "exact"], rows[2**exponent, "accumulate"]
        ratio, share = exact["ratio_to_accumulate"], plain["fraction_of_copy"]
        said.append(f"2^{exponent}: exact {ratio:.2f} of the pass, the pass {share:.2f} of a copy")
        if ratio > limit:
            missed.append(f"exact at 2^{exponent}: {ratio:.2f}, at most {limit} wanted")
        if share < PASS_OF_COPY:
            missed.append(f"pass at 2^{exponent}: {share:.2f} of a copy, {PASS_OF_COPY} wanted")
    if missed:
        raise RuntimeError("; ".join([*said, *missed]))
    return "; ".join(said)


def kernels(check: Check) -> str:
    """Profiles three kernels with ncu."""
    check.on_device()
    words = ["ncu", "--clock-control", "none", "--set", "basic", "-c", "12"]
    words += ["-k", f"regex:{'|'.join(KERNELS)}", sys.executable, *BENCHMARK]
    words += ["--log2_sizes", "24", "--densities", "0.001"]
    said = check.run(words, CUDA_VISIBLE_DEVICES="0")
    (check.out / "ncu.txt").write_text(said)
    return "ncu.txt"


def exchange(check: Check) -> str:
    """Exchanges between two processes through TensorFlow's ops; with NCCL if there are two GPUs."""
    check.on_device()
    if importlib.util.find_spec("tensorflow") is None:
        raise LeftOutError("TensorFlow is not installed")
    said = check.run([sys.executable, "-m", "tf_redsync", "doctor", "--check", "--json"])
    (check.out / "doctor.json").write_text(said[said.index("{") :])
    return "doctor.json"


STEPS: dict[str, Callable[[Check], str]] = {
    "machine": describe,
    "build": build,
    "tests": tests,
    "repetitions": repetitions,
    "speed": speed,
    **{tool: sanitizer(tool) for tool in TOOLS},
    "ptx": ptx,
    "ncu": kernels,
    "exchange": exchange,
}


def run_step(check: Check, name: str) -> dict:
    """Runs one step; returns its result."""
    start = time.monotonic()
    try:
        if name != "build" and check.library is None and name != "machine":
            raise LeftOutError("nothing is built")
        state, text = "passed", STEPS[name](check)
    except LeftOutError as reason:
        state, text = "left out", str(reason)
    except Exception as error:  # after any error, the other steps are still useful
        state, text = "failed", str(error)
    return {"state": state, "text": text, "seconds": round(time.monotonic() - start, 1)}


def write(check: Check) -> None:
    """Writes the results so far, as JSON and as a table."""
    (check.out / "gpu_check.json").write_text(json.dumps(check.results, indent=1) + "\n")
    lines = ["| step | state | seconds | |", "|---|---|---|---|"]
    for name, result in check.results.items():
        text = result["text"].replace("\n", "<br>").replace("|", "\\|")
        lines.append(f"| {name} | {result['state']} | {result['seconds']} | {text} |")
    (check.out / "gpu_check.md").write_text("\n".join(lines) + "\n")


def main(arguments=None) -> int:
    """Runs the steps; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("gpu_check"))
    parser.add_argument("--only", nargs="+", choices=list(STEPS), default=list(STEPS))
    parser.add_argument("--emulate", action="store_true", help="run the steps that need no GPU")
    args = parser.parse_args(arguments)
    args.out.mkdir(parents=True, exist_ok=True)
    problem = None if args.emulate else d.cuda_problem()
    if problem:
        raise SystemExit(f"there is nothing to check: {problem}. --emulate tries what it can.")
    check = Check(args.out.resolve(), args.emulate, time.monotonic() + BUDGET)
    for name in STEPS:
        if name in args.only or name == "build":
            check.results[name] = result = run_step(check, name)
            print(f"{name:14}{result['state']:10}{result['seconds']:7.1f} s  {result['text']}",
                  flush=True)  # fmt: skip
            write(check)
    for path in check.out.glob("*.so"):  # keeps the results small
        path.unlink()
    return int(any(r["state"] == "failed" for r in check.results.values()))


if __name__ == "__main__":
    sys.exit(main())
