"""Accuracy of training with compressed exchanges, beside that of dense training.

    python benchmarks/convergence.py --task digits --seeds 3 --json digits.json \
        --methods "Dense()" "RedSync(density=0.01, momentum=0.9, dense_below=4096)"

trains each method from the same weights, with the same examples in the same order and the same
learning rate, once for each seed, by workers in this process or, with --real, by processes.
docs/benchmarks.md says what the columns mean, and how --data_dir is laid out.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.metadata
import os
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
if __name__ == "__main__" and not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks import arguments
from benchmarks.accuracy import report
from benchmarks.accuracy.data import Data
from benchmarks.accuracy.tasks import OPTIMIZERS, SCHEDULES, TASKS, Settings, steps_per_epoch

DEFAULT_METHODS = ("Dense()", "RedSync(momentum=0.9)")
INTERRUPTED = 130


class Progress:
    """Lines about where the training is, and how long it will take.

    Args:
        rows: Number of rows that are to be trained.
        steps: Of each.
    """

    def __init__(self, rows: int, steps: int):
        self.rows, self.steps, self.row, self.name = rows, steps, 0, ""
        self._started, self._before, self._done = time.monotonic(), 0, 0

    def begin(self, name: str, done: int) -> None:
        """A row begins, with some steps done in an earlier call."""
        self.row, self.name, self._done = self.row + 1, name, done
        self._before += done

    def __call__(self, training: Any) -> None:
        """After an evaluation."""
        done = (self.row - 1) * self.steps + training.number
        here = max(1, done - self._before)
        a_step = (time.monotonic() - self._started) / here
        curve = training.curve
        print(
            f"[{self.row}/{self.rows}] {self.name}: step {training.number}/{self.steps}, "
            f"training loss {curve['train_loss'][-1]:.4f}, test loss {curve['loss'][-1]:.4f}, "
            f"{training.settings.of_task.metric} {curve['metric'][-1]:.2f}; "
            f"{1e3 * a_step:.0f} ms a step, {_clock(a_step * (self.steps - training.number))} "
            f"left, {_clock(a_step * (self.rows * self.steps - done))} for all",
            flush=True,
        )


def _clock(seconds: float) -> str:
    hours, rest = divmod(int(seconds), 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}"


def train(args: argparse.Namespace, settings: Settings, found: Data, kept: report.Report) -> None:
    """Trains what is not in the report yet."""
    wanted = [(method, seed) for seed in args.seed_list for method in args.methods]
    missing = [w for w in wanted if "metric" not in (kept.row(*w) or {})]
    if len(missing) < len(wanted):
        print(f"{len(wanted) - len(missing)} rows are in {kept.path} already", flush=True)
    if not missing:
        return
    progress = Progress(len(missing), settings.steps)
    for method, seed in missing:
        row = {
            "method": method, "seed": seed, "command": command(args, method, seed),
            "date": time.strftime("%Y-%m-%d"), "versions": _versions(),
        }  # fmt: skip
        try:
            if settings.real:
                results = _real(args, settings, method, seed, progress)
            else:
                results = _loopback(settings, found, method, seed, kept, progress)
        except (RuntimeError, ValueError) as error:
            results = {"error": str(error)}
            print(f"[{progress.row}/{progress.rows}] {method}, seed {seed}: {error}", flush=True)
        kept.add({**row, **results})
        if kept.saved is not None:
            kept.saved.unlink(missing_ok=True)


def _loopback(settings, found, method, seed, kept, progress) -> dict[str, Any]:
    import keras

    from benchmarks.accuracy.training import Training
    from benchmarks.method_expressions import exchanged

    keras.backend.clear_session()
    training = Training(settings, found, exchanged(method), seed)
    name = f"{method}, seed {seed}"
    if kept.saved is not None and kept.saved.exists():
        training.restore(kept.saved, name)
    progress.begin(name, training.number)
    if training.number:
        print(f"{name}: goes on at step {training.number}", flush=True)
    return training.run(kept.saved, progress, name)


def _real(args, settings, method, seed, progress) -> dict[str, Any]:
    from benchmarks.accuracy import worker

    progress.begin(f"{method}, seed {seed}", 0)
    print(f"[{progress.row}/{progress.rows}] {progress.name}", flush=True)
    return worker.run(settings, method, seed, args.data_dir)


def command(args: argparse.Namespace, method: str, seed: int | None = None) -> str:
    """Returns the command line that trains one row alone, or a method with all its seeds."""
    parts = ["python", "benchmarks/convergence.py", "--methods", method]
    for name, value in args.flags.items():
        if value is True:
            parts.append(f"--{name}")
        elif value is not None and value is not False:
            parts += [f"--{name}", str(value)]
    parts += ["--seeds", str(args.seeds)] if seed is None else ["--seed", str(seed)]
    return shlex.join(parts)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    add = parser.add_argument
    add("--task", choices=list(TASKS), default="digits")
    add("--model", help="a network of the task (default: its first)")
    add("--methods", nargs="+", default=list(DEFAULT_METHODS), metavar="METHOD",
        help='as in a program: "RedSync(density=0.01), warm_up=DenseWarmUp(100)"')  # fmt: skip
    add("--workers", type=int, default=4)
    add("--real", action="store_true", help="worker processes in place of the loopback")
    add("--seeds", type=int, default=1, help="train with the seeds 0, 1, ... of this number")
    add("--seed", type=int, help="train with this seed alone")
    add("--epochs", type=float, help="passes over the training set (default: the task's)")
    add("--steps", type=int, help="the same in steps")
    add("--batch", type=int, help="examples per worker and step (default: the task's)")
    add("--optimizer", choices=OPTIMIZERS, help="(default: the task's)")
    add("--learning_rate", type=float, help="(default: the task's)")
    add("--momentum", type=float, help="of SGD, where the method has none (default: the task's)")
    add("--schedule", choices=SCHEDULES, default="constant", help="of the learning rate")
    add(
        "--clip_norm",
        type=float,
        help="of each worker's gradient, 0 for none (default: the task's)",
    )
    add("--augment", action="store_true", help="shift and mirror images")
    add("--evaluations", type=int, default=6, help="how often the test set is evaluated")
    add("--data_dir", type=Path, help="folder with the data, for all tasks but digits")
    add("--threads", type=int, help="of TensorFlow (default: all cores)")
    add("--json", type=Path, help="file for the rows; a call that finds it goes on")
    add("--plot", help="PNG file for a picture")
    args = parser.parse_args(argv)
    try:
        _check(args)
    except ValueError as error:
        parser.error(str(error))
    return args


def _check(args: argparse.Namespace) -> None:
    from benchmarks.method_expressions import exchanged

    arguments.check_counts(args, ("workers", "seeds", "steps", "batch", "evaluations", "threads"))
    arguments.check_plot(args)
    networks = TASKS[args.task].networks
    if args.model is None:
        args.model = next(iter(networks))
    if args.model not in networks:
        raise ValueError(
            f"`--model` must be one of {', '.join(networks)} for the task {args.task}. Received: "
            f"--model={args.model}"
        )
    if args.epochs is not None and args.steps is not None:
        raise ValueError(
            "`--epochs` and `--steps` say the same. Received: "
            f"--epochs={args.epochs} --steps={args.steps}"
        )
    if args.epochs is not None and args.epochs <= 0:
        raise ValueError(f"`--epochs` must be above 0. Received: --epochs={args.epochs}")
    optimizer = args.optimizer or TASKS[args.task].optimizer
    if args.optimizer not in (None, TASKS[args.task].optimizer) and args.learning_rate is None:
        raise ValueError(
            f"`--optimizer` needs a `--learning_rate`: the task's is that of "
            f"{TASKS[args.task].optimizer}. Received: --optimizer={args.optimizer}"
        )
    if optimizer != "sgd" and args.momentum:
        raise ValueError(
            f"`--momentum` is of SGD. Received: --momentum={args.momentum} with {optimizer}"
        )
    if args.augment and args.task != "cifar10":
        raise ValueError(f"`--augment` is for images in colour. Received: --task={args.task}")
    for method in args.methods:
        exchanged(method)
    args.methods = list(dict.fromkeys(args.methods))
    args.seed_list = list(range(args.seeds)) if args.seed is None else [args.seed]


def settings_of(args: argparse.Namespace, examples: int) -> Settings:
    """What all rows have in common.

    Args:
        args: The command line.
        examples: Number of training examples.

    Raises:
        ValueError: for more examples in a step than there are.
    """
    task = TASKS[args.task]
    batch = args.batch or task.batch
    in_epoch, steps = steps_per_epoch(examples, args.workers, batch), args.steps
    if steps is None:
        epochs = task.epochs if args.epochs is None else args.epochs
        steps = max(1, round(epochs * in_epoch))
    clip = task.clip_norm if args.clip_norm is None else args.clip_norm or None
    optimizer = args.optimizer or task.optimizer
    momentum = task.momentum if args.momentum is None else args.momentum
    return Settings(
        task=args.task, model=args.model, workers=args.workers, real=args.real, steps=steps,
        batch=batch, schedule=args.schedule, clip_norm=clip, augment=args.augment,
        optimizer=optimizer, momentum=momentum if optimizer == "sgd" else 0.0,
        learning_rate=task.learning_rate if args.learning_rate is None else args.learning_rate,
        evaluations=min(args.evaluations, steps),
    )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Trains, prints, writes; returns the exit code."""
    args = parse(argv)
    _set_threads(args.threads or os.cpu_count() or 1, args.workers)
    try:
        found = TASKS[args.task].load(args.data_dir)
        settings = settings_of(args, len(found.train[1]))
        common = {**dataclasses.asdict(settings), "data": found.source}
        kept = report.Report(common, args.json)
    except ValueError as error:
        print(f"convergence.py: {error}", file=sys.stderr)
        return 2
    args.flags = {**_flags(settings), "data_dir": args.data_dir, "threads": args.threads}
    metric = settings.of_task.metric
    try:
        train(args, settings, found, kept)
    except KeyboardInterrupt:
        print("\ninterrupted; the same command goes on" if args.json else "\ninterrupted")
        return INTERRUPTED
    rows = [r for m in args.methods for s in args.seed_list if (r := kept.row(m, s))]
    title = f"{args.task}, {args.model}, {args.workers} workers, {settings.steps} steps"
    print(f"\n{title}")
    print(report.table(rows, metric))
    print("\nOne row again:")
    for method in args.methods:
        print(f"  {command(args, method, args.seed)}")
    if args.plot:
        report.plot(rows, metric, title, args.plot)
    return int(any("error" in row for row in rows))


def _flags(settings: Settings) -> dict[str, Any]:
    flags = dataclasses.asdict(settings)
    return {**flags, "clip_norm": settings.clip_norm or (0 if settings.of_task.clip_norm else None)}


def _versions() -> dict[str, str]:
    names = ("tensorflow", "keras", "numpy")
    return {name: importlib.metadata.version(name) for name in names}


def _set_threads(threads: int, workers: int) -> None:
    """Shares threads out among the workers, whose gradients are computed side by side.

    A thread for each takes less time of the processor than several threads for one after the other.
    """
    import tensorflow as tf

    with contextlib.suppress(RuntimeError):  # TensorFlow runs already: this is no program's start
        tf.config.threading.set_inter_op_parallelism_threads(min(threads, workers))
        tf.config.threading.set_intra_op_parallelism_threads(max(1, threads // workers))


if __name__ == "__main__":
    sys.exit(main())
