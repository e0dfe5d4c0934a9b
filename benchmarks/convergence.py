"""Accuracy of training with compressed exchanges, compared with dense training.

    python benchmarks/convergence.py --task digits --seeds 3 --json digits.json \
        --methods "Dense()" "RedSync(density=0.01, momentum=0.9, dense_below=4096)"

trains each method from the same weights, with the same examples in the same order and the same
learning rate, once for each seed. The workers are simulated in this process or, with --real, are
processes. benchmarks/README.md describes the columns and the layout of --data_dir.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import math
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
if __name__ == "__main__" and not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.accuracy import command_line, report
from benchmarks.accuracy.data import Data
from benchmarks.accuracy.progress import Progress
from benchmarks.accuracy.tasks import TASKS, Settings

INTERRUPTED = 130


def train(args: argparse.Namespace, settings: Settings, found: Data, kept: report.Report) -> None:
    """Trains the rows that the report lacks."""
    wanted = [(method, seed) for seed in args.seed_list for method in args.methods]
    missing = [w for w in wanted if "metric" not in (kept.row(*w) or {})]
    if len(missing) < len(wanted):
        print(f"{len(wanted) - len(missing)} rows are in {kept.path} already", flush=True)
    if not missing:
        return
    if kept.saved is not None and kept.saved.exists():
        # First, because the state of another row would replace its state.
        begun = report.state_of(kept.saved)["name"]
        missing.sort(key=lambda wanted: _name(*wanted) != begun)
    progress = Progress(len(missing), settings.steps)
    for method, seed in missing:
        row = {
            "method": method, "seed": seed, "command": command_line.command(args, method, seed),
            "date": time.strftime("%Y-%m-%d"), "versions": _versions(), "commit": _commit(),
            "device": _device(),
        }  # fmt: skip
        try:
            if settings.real:
                results = _real(args, settings, method, seed, progress)
            else:
                results = _loopback(args, settings, found, row, kept, progress)
        except (RuntimeError, ValueError) as error:
            results = {"error": str(error)}
            print(f"[{progress.row}/{progress.rows}] {_name(method, seed)}: {error}", flush=True)
        kept.add({**row, **results})
        if kept.saved is not None:
            kept.saved.unlink(missing_ok=True)


def _name(method: str, seed: int) -> str:
    return f"{method}, seed {seed}"


def _loopback(args, settings, found, row, kept, progress) -> dict[str, Any]:
    import keras

    from benchmarks.accuracy import local_training
    from benchmarks.method_expressions import exchanged

    keras.backend.clear_session()
    method, seed = row["method"], row["seed"]
    training = local_training.make(settings, found, exchanged(method), seed)
    name = _name(method, seed)
    if kept.saved is not None and kept.saved.exists() and training.restore(kept.saved, name):
        begun = kept.row(method, seed) or row  # a state saved without its commits
        training.commits = training.commits or [begun["commit"]]
    training.commits = list(dict.fromkeys(filter(None, [*training.commits, row["commit"]])))
    row["commit"] = ", ".join(training.commits) or None
    progress.begin(name, training.number)
    if training.number:
        print(f"{name}: resumes at step {training.number}", flush=True)

    def evaluated(training: local_training.Training) -> None:
        kept.add({**row, "curve": training.curve})
        progress(training)

    return training.run(kept.saved, evaluated, name, args.save_seconds or math.inf)


def _real(args, settings, method, seed, progress) -> dict[str, Any]:
    from benchmarks.accuracy import worker

    progress.begin(_name(method, seed), 0)
    print(f"[{progress.row}/{progress.rows}] {progress.name}", flush=True)
    return worker.run(settings, method, seed, args.data_dir)


def main(argv: Sequence[str] | None = None) -> int:
    """Trains, prints, writes; returns the exit code."""
    args = command_line.parse(argv)
    _set_threads(args.threads or os.cpu_count() or 1, args.workers)
    try:
        found = TASKS[args.task].load(args.data_dir)
        settings = command_line.settings_of(args, len(found.train[1]))
        kept = report.Report(settings.common(found), args.json)
    except ValueError as error:
        print(f"convergence.py: {error}", file=sys.stderr)
        return 2
    args.flags = {
        **command_line.flags(settings),
        "data_dir": args.data_dir,
        "threads": args.threads,
    }
    metric = settings.of_task.metric
    try:
        train(args, settings, found, kept)
    except KeyboardInterrupt:
        print("\ninterrupted; the same command resumes" if args.json else "\ninterrupted")
        return INTERRUPTED
    rows = [r for m in args.methods for s in args.seed_list if (r := kept.row(m, s))]
    title = f"{args.task}, {args.model}, {args.workers} workers, {settings.steps} steps"
    print(f"\n{title}")
    print(report.table(rows, metric))
    print("\nOne row again:")
    for method in args.methods:
        print(f"  {command_line.command(args, method, args.seed)}")
    if args.plot:
        report.plot(rows, metric, title, args.plot)
    return int(any("error" in row for row in rows))


def _versions() -> dict[str, str]:
    distributions = importlib.metadata.packages_distributions()  # of TensorFlow also tensorflow-cpu
    names = ("tensorflow", "keras", "numpy")
    return {name: importlib.metadata.version(distributions[name][0]) for name in names}


def _device() -> str:
    """Returns the name of the GPU that trains, or "CPU"."""
    import tensorflow as tf

    gpus = tf.config.get_visible_devices("GPU")
    return tf.config.experimental.get_device_details(gpus[0])["device_name"] if gpus else "CPU"


def _commit() -> str | None:
    """Returns the commit of this checkout, or `None` outside of a repository."""
    folder = Path(__file__).parent
    asked = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True, check=False
    )
    return asked.stdout.strip() or None


def _set_threads(threads: int, workers: int) -> None:
    """Divides threads among the workers, whose gradients are computed concurrently.

    One thread per worker takes less processor time than several threads for one worker after
    another.
    """
    import tensorflow as tf

    # TensorFlow has started already, which the library expects only after its own start
    with contextlib.suppress(RuntimeError):
        tf.config.threading.set_inter_op_parallelism_threads(min(threads, workers))
        tf.config.threading.set_intra_op_parallelism_threads(max(1, threads // workers))


if __name__ == "__main__":
    sys.exit(main())
