"""The command line of `benchmarks/convergence.py`."""

from __future__ import annotations

import argparse
import dataclasses
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import arguments
from benchmarks.accuracy.tasks import OPTIMIZERS, SCHEDULES, TASKS, Settings, steps_per_epoch
from benchmarks.method_expressions import exchanged

DEFAULT_METHODS = ("Dense()", "RedSync(momentum=0.9)")


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(
        prog="convergence.py",
        description="Accuracy of compressed training, beside that of dense training.",
        allow_abbrev=False,
    )
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
    add(
        "--momentum",
        type=float,
        help="of SGD, or beta_1 of the others, where the method has none (default: the task's)",
    )
    add("--weight_decay", type=float, help="of SGD and AdamW (default: the task's)")
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
    add("--json", type=Path, help="file for the rows; a call with an existing file resumes")
    add("--save_seconds", type=float, metavar="S",
        help="keep the state of a row in --json's folder every S seconds, besides after each "
        "evaluation")  # fmt: skip
    add("--plot", help="PNG file for a picture")
    args = parser.parse_args(argv)
    try:
        _check(args)
    except ValueError as error:
        parser.error(str(error))
    return args


def _check(args: argparse.Namespace) -> None:
    arguments.check_counts(args, ("workers", "seeds", "steps", "batch", "evaluations", "threads"))
    arguments.check_positive(args, ("epochs", "learning_rate", "save_seconds"))
    arguments.check_files(args)
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
    if args.optimizer not in (None, TASKS[args.task].optimizer) and args.learning_rate is None:
        raise ValueError(
            f"`--optimizer` needs a `--learning_rate`: the task's is that of "
            f"{TASKS[args.task].optimizer}. Received: --optimizer={args.optimizer}"
        )
    if args.augment and args.task != "cifar10":
        raise ValueError(f"`--augment` is for images in colour. Received: --task={args.task}")
    if args.real and args.task == "multi30k":
        raise ValueError(f"`--real` counts padding in the loss. Received: --task={args.task}")
    if args.save_seconds is not None and args.json is None:
        raise ValueError(
            f"`--save_seconds` needs `--json`. Received: --save_seconds={args.save_seconds:g}"
        )
    for method in args.methods:
        exchanged(method)
    args.methods = list(dict.fromkeys(args.methods))
    args.seed_list = list(range(args.seeds)) if args.seed is None else [args.seed]


def settings_of(args: argparse.Namespace, examples: int) -> Settings:
    """Settings that all rows share.

    Args:
        args: The command line.
        examples: Number of training examples.

    Raises:
        ValueError: if a step needs more examples than exist.
    """
    task = TASKS[args.task]
    batch = args.batch or task.batch
    in_epoch, steps = steps_per_epoch(examples, args.workers, batch), args.steps
    if steps is None:
        epochs = task.epochs if args.epochs is None else args.epochs
        steps = max(1, round(epochs * in_epoch))
    clip = task.clip_norm if args.clip_norm is None else args.clip_norm or None
    momentum = task.momentum if args.momentum is None else args.momentum
    return Settings(
        task=args.task, model=args.model, workers=args.workers, real=args.real, steps=steps,
        batch=batch, schedule=args.schedule, clip_norm=clip, augment=args.augment,
        optimizer=args.optimizer or task.optimizer, momentum=momentum,
        weight_decay=task.weight_decay if args.weight_decay is None else args.weight_decay,
        learning_rate=task.learning_rate if args.learning_rate is None else args.learning_rate,
        evaluations=min(args.evaluations, steps),
    )  # fmt: skip


def command(args: argparse.Namespace, method: str, seed: int | None = None) -> str:
    """Returns the command that trains a single row, or a method with all its seeds."""
    parts = ["python", "benchmarks/convergence.py", "--methods", method]
    for name, value in args.flags.items():
        if value is True:
            parts.append(f"--{name}")
        elif value is not None and value is not False:
            parts += [f"--{name}", str(value)]
    parts += ["--seeds", str(args.seeds)] if seed is None else ["--seed", str(seed)]
    return shlex.join(parts)


def flags(settings: Settings) -> dict[str, Any]:
    """Returns the flags of the given settings, by name."""
    found = dataclasses.asdict(settings)
    return {**found, "clip_norm": settings.clip_norm or (0 if settings.of_task.clip_norm else None)}
