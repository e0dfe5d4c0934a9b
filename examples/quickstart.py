"""Trains a small CNN on two workers: dense, in float16 and compressed by CodedGMC.

`examples/quickstart.sh` starts it. All runs are those of `examples/train_digits.py` from the same
seed, one after the other in two worker processes, which import TensorFlow once. Prints a table, and
writes summary.json and curves.png into --out.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import re
import shlex
import subprocess
import sys
import time

import numpy as np

WORKERS = 2
# All runs have momentum 0.9: the optimizer applies it to complete gradients; CodedGMC applies it in
# the exchange, before it selects elements.
RUNS = {
    "dense": ["--exchange=Dense", "--optimizer=momentum"],
    "HalfPrecision": ["--exchange=HalfPrecision", "--optimizer=momentum"],
    "CodedGMC": ["--exchange=CodedGMC(momentum=0.9)"],
}
LABELS = {
    "dense": "dense all-reduce",
    "HalfPrecision": "HalfPrecision, float16",
    "CodedGMC": "CodedGMC, density 0.03",
}
COLORS = {"dense": "#1f77b4", "HalfPrecision": "#2ca02c", "CodedGMC": "#d62728"}
SMOOTHING = 15  # steps
# What TensorFlow's C++ prints at every start, in some versions whatever the log level. The log
# files keep it.
NOISE = re.compile(
    r"[IW]0000 |WARNING: All log messages before|To enable the following|E0000 .*cuInit"
    # Of each strategy after the first, which shares its cluster.
    r"|WARNING:absl:Enabling collective ops after program startup"
)


def train(args: argparse.Namespace) -> dict[str, dict]:
    """Runs all trainings on two worker processes and returns what worker 0 measured.

    Raises:
      SystemExit: a worker failed or the time is over; the launcher has said which.
    """
    for name in RUNS:
        result_of(name, args.out).unlink(missing_ok=True)
    logs = args.out / "logs"
    command = [sys.executable, "-m", "tf_redsync", "launch", "-n", str(WORKERS)]
    command += [f"--timeout={args.timeout}", f"--log_dir={logs}", __file__, "--worker"]
    command += [f"--out={args.out}", f"--epochs={args.epochs}", f"--seed={args.seed}"]
    # The launcher ends the workers when their time is over, on Ctrl-C and on SIGTERM.
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(command, **pipes, text=True, errors="replace") as launcher:
        for line in launcher.stdout:
            if not NOISE.match(line):
                print(line, end="", flush=True)
    if launcher.returncode:
        raise SystemExit(f"A run failed (exit {launcher.returncode}); see {logs}.")
    return {name: json.loads(result_of(name, args.out).read_text()) for name in RUNS}


def result_of(name: str, out: pathlib.Path) -> pathlib.Path:
    """The file with what worker 0 measured."""
    return out / f"{name}.json"


def work(args: argparse.Namespace) -> None:
    """Trains all runs, in a worker."""
    import train_digits
    from absl import flags

    import tf_redsync as rs

    rank = rs.rank()
    for name, own in RUNS.items():
        words = ["examples/train_digits.py", *own, f"--epochs={args.epochs}", f"--seed={args.seed}"]
        if rank == 0:
            command = shlex.join(["tf-redsync", "launch", "-n", str(WORKERS), *words])
            print(f"\n== {name}, as by: {command}", flush=True)
        flags.FLAGS.unparse_flags()
        # Flags of the run before stay, unless they are given again.
        flags.FLAGS([words[0], "--optimizer=sgd", *words[1:], f"--out={result_of(name, args.out)}"])
        train_digits.main(words[:1])


def summarize(results: dict[str, dict]) -> dict:
    """The content of summary.json."""
    dense_bytes = results["dense"]["bytes_per_step"]
    runs = {
        name: {
            "accuracy": result["accuracy"],
            "bytes_per_step": result["bytes_per_step"],
            "step_ms": result["step_ms"],
            "ratio": dense_bytes / result["bytes_per_step"],
            "final_loss": float(np.mean(result["loss"][-SMOOTHING:])),
            "steps": result["steps"],
        }
        for name, result in results.items()
    }
    return {"workers": WORKERS, "params": results["dense"]["params"], "runs": runs}


def table(summary: dict) -> str:
    """The comparison as text."""
    lines = [
        f"{'':15}{'test':>10}{'bytes sent per':>18}{'compression':>13}{'step time':>12}",
        f"{'method':15}{'accuracy':>10}{'worker and step':>18}{'ratio':>13}{'(median)':>12}",
    ]
    for name, run in summary["runs"].items():
        lines.append(
            f"{name:15}{run['accuracy']:>10.4f}{run['bytes_per_step']:>18,}"
            f"{run['ratio']:>12.1f}x{run['step_ms']:>9.1f} ms"
        )
    width = max(map(len, lines))
    lines.insert(2, "-" * width)
    return "\n".join(lines)


def smoothed(values: list[float]) -> tuple[np.ndarray, np.ndarray]:
    """Returns (steps, mean of the last SMOOTHING values at each of these steps)."""
    window = min(SMOOTHING, len(values))
    means = np.convolve(values, np.ones(window) / window, mode="valid")
    return np.arange(window, len(values) + 1), means


def draw(results: dict[str, dict], path: pathlib.Path) -> None:
    """Draws loss against step and against bytes sent into a PNG file."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2))
    by_step, by_bytes = figure.subplots(1, 2, sharey=True)
    for name, result in results.items():
        steps, losses = smoothed(result["loss"])
        sent = steps * result["bytes_per_step"] / 1e6
        by_step.plot(steps, losses, label=LABELS[name], color=COLORS[name])
        by_bytes.plot(sent, losses, label=LABELS[name], color=COLORS[name])
    by_step.set_xlabel("training step")
    by_step.set_ylabel(f"training loss (nats, mean of {SMOOTHING} steps)")
    by_bytes.set_xlabel("sent by each worker so far (MB)")
    by_bytes.set_xscale("log")
    for axes in (by_step, by_bytes):
        axes.set_yscale("log")
        axes.grid(alpha=0.3, which="both")
    figure.suptitle(f"Handwritten digits, {WORKERS} workers, the same seed")
    # One legend above both panels: inside them it would cover a curve.
    figure.legend(
        *by_step.get_legend_handles_labels(),
        loc="upper center",
        ncol=len(results),
        bbox_to_anchor=(0.5, 0.94),
        frameon=False,
    )
    figure.tight_layout(rect=(0, 0, 1, 0.95))
    figure.savefig(path, dpi=120)


def main() -> None:
    """Trains each run, prints the table and writes both files."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("build/quickstart"))
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=600, help="seconds for all runs")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return work(args)
    args.out.mkdir(parents=True, exist_ok=True)

    started = time.perf_counter()
    results = train(args)
    summary = summarize(results)
    (args.out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    draw(results, args.out / "curves.png")
    print(f"\n{table(summary)}\n")
    print("Both workers share this machine, so these step times say nothing about a network.")
    print("benchmarks/step/step_time.py measures on a rate-limited one.")
    print(f"Wrote {args.out / 'summary.json'} and {args.out / 'curves.png'}", end=" ")
    print(f"after {time.perf_counter() - started:.0f} s.")


if __name__ == "__main__":
    main()
