"""Measures training steps with several methods, on your workers and network.

The function build_model of train.py takes no arguments and returns a built Keras model, or
(model, (inputs, labels)), or (model, (inputs, labels), loss), as for `tf-redsync plan`. Each round
trains the model for some steps with each method in turn, so that other load on the machines affects
all methods alike. Worker 0 prints medians, the hours of a whole training, each method's known loss
of accuracy, and a recommendation. The flags for workers are those of `tf-redsync launch`.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Sequence

from tf_redsync.cli import launch, options
from tf_redsync.cli.command_line import Command, Flag, Parser, check_installation

METHODS = (
    "Dense()",
    "HalfPrecision()",
    "BlockQuantized(bits=4)",
    "CodedGMC(momentum=0.9)",
    "CodedAdam()",
    "NoExchange()",
)
EXAMPLE = "tf_redsync.cli.bench_worker:example"

_FLAGS: tuple[Flag, ...] = (
    (
        ("--model",),
        {"default": EXAMPLE, "metavar": "MODULE:FUNCTION", "help": "builds the model (default: "
         "dense layers with 10.2 million weights)"},
    ),
    (
        ("--methods",),
        {"nargs": "+", "default": list(METHODS), "metavar": "METHOD", "help": "as in Python: "
         f"RedSync, or 'RedSync(density=0.01)' (default: {' '.join(METHODS)})"},
    ),
    (
        ("--batch-size",),
        {"type": int, "help": "examples per worker of a synthetic batch (default: 32)"},
    ),
    (("--steps",), {"type": int, "default": 10, "help": "steps per round, rounded up to "
     "whole rounds of local steps (10)"}),
    (("--rounds",), {"type": int, "default": 5, "help": "rounds after a warm-up round (5)"}),
    (
        ("--training-steps",),
        {"type": int, "default": 100_000, "help": "steps of the whole training, for the hours "
         "(100000)"},
    ),
    (
        ("--plot",),
        {"metavar": "FILE.html", "help": "also write a picture of the hours; needs plotly"},
    ),
    (("--json",), {"metavar": "FILE", "help": "also write the times to a file of worker 0"}),
)  # fmt: skip


def _configure(parser: Parser) -> None:
    parser.flags(_FLAGS)
    options.configure_workers(parser)


def _check(args: argparse.Namespace) -> None:
    for name in ("batch_size", "steps", "rounds", "training_steps"):
        value = getattr(args, name)
        if value is not None and value < 1:
            flag = name.replace("_", "-")
            raise ValueError(f"`--{flag}` must be at least 1. Received: --{flag}={value}")
    if args.plot and not args.plot.endswith(".html"):
        raise ValueError(f"`--plot` must end in .html. Received: --plot={args.plot}")
    if args.plot and importlib.util.find_spec("plotly") is None:
        raise ValueError(
            f"`--plot` needs plotly: pip install 'tf_redsync[report]'. Received: --plot={args.plot}"
        )


def _worker_flags(args: argparse.Namespace) -> list[str]:
    flags = [f"--model={args.model}", f"--steps={args.steps}", f"--rounds={args.rounds}"]
    flags.append(f"--training-steps={args.training_steps}")
    if args.batch_size:
        flags.append(f"--batch-size={args.batch_size}")
    if args.plot:
        flags.append(f"--plot={args.plot}")
    if args.json:
        flags.append(f"--json={args.json}")
    return [*flags, "--methods", *args.methods]


def _run(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    over_ssh = args.hosts or args.hostfile
    if not over_ssh and importlib.util.find_spec("tensorflow") is None:
        check_installation(parser)  # imports TensorFlow, so it is called for its error only
    try:
        _check(args)
        command = [sys.executable, "-m", "tf_redsync.cli.bench_worker", *_worker_flags(args)]
        return launch.run_command(command, args)
    except ValueError as error:
        parser.error(str(error))


COMMAND = Command(
    "bench",
    "measure training steps with several methods on your workers",
    __doc__ or "",
    (
        ("-n 2", "two workers on this machine, an example model"),
        ("--hosts a,b --model train:build_model", "one worker on each of two machines"),
        ("-n 2 --methods Dense 'RedSync(density=0.01)'", "two methods"),
    ),
    _configure,
    _run,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the measurement; return the exit code of the workers."""
    return COMMAND.main(argv)
