"""Predicts, in one process and without a cluster, whether compression will pay.

The function build_model of train.py takes no arguments and returns a built Keras model, or
(model, (inputs, labels)), or (model, (inputs, labels), loss). Measured on this machine: the forward
and backward pass, what the methods compute, and how much of the gradient they deliver. Calculated:
the exchange, by the cost model that `tf_redsync.Auto` decides with. docs/plan.md says more.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tf_redsync.cli.command_line import Command, Flag, Parser
from tf_redsync.cli.units import bytes_per_second, milliseconds, share_of
from tf_redsync.planning import PlanError

if TYPE_CHECKING:
    from tf_redsync.auto import Auto
    from tf_redsync.auto.decision import Measured
    from tf_redsync.exchange.method import Method
    from tf_redsync.planning.prediction import Plan
    from tf_redsync.planning.subject import Subject
    from tf_redsync.policy import Policy

# What a method does with every worker's message is the slope between these numbers of workers.
MEASURED_WORKERS = (2, 8)

_FLAGS: list[Flag] = [
    (("--model",), {"required": True, "metavar": "MODULE:FUNCTION", "help": "makes the model"}),
    (("--workers",), {"type": int, "required": True, "help": "number of workers, at least 2"}),
    (("--rate",), {"required": True, "help": "what the network carries from and to every worker, "
     "such as 10gbit"}),
    (("--latency",), {"type": milliseconds, "default": 0.2, "metavar": "MS", "help": "of a "
     "round trip between two workers, as ping shows it, such as 50 or 50ms (default: 0.2)"}),
    (("--method",), {"default": "Auto", "help": "Auto (default), or one method for all layers: "
     "RedSync, or 'RedSync(density=0.01)'"}),
    (("--max-overhead",), {"metavar": "PERCENT", "help": "propose the method that costs the "
     "least accuracy, of those whose exchange makes a step longer by 10%% at most, or another "
     "percentage"}),
    (("--density",), {"type": float, "help": "density of the method"}),
    (("--step-ms",), {"type": float, "metavar": "MS", "help": "computation of a step "
     "where you will train (default: forward and backward pass, measured here)"}),
    (("--batch-size",), {"type": int, "help": "of a synthetic batch (default: 32)"}),
    (("--json",), {"metavar": "FILE", "help": "write the plan"}),
    (("--plot",), {"metavar": "FILE.png", "help": "draw the layers; needs matplotlib"}),
]  # fmt: skip


def say(text: str) -> None:
    """Report progress on stderr."""
    print(f"tf-redsync plan: {text}", file=sys.stderr, flush=True)


def make(subject: Subject, policy: Policy | Auto, args: argparse.Namespace) -> Plan:
    """Measure on this device, and predict.

    Args:
        subject: The model.
        policy: What to plan.
        args: The command line.
    """
    from tf_redsync.planning import prediction
    from tf_redsync.planning import subject as subjects

    compute = _compute(subject, args)
    say("computing a gradient")
    grads = subjects.gradient(subject)
    measured = _measured(getattr(policy, "considered", policy.methods), args)
    say("predicting the exchange")
    return prediction.make(policy, subject.specs, grads, measured, compute)


def _compute(subject: Subject, args: argparse.Namespace) -> float:
    """Seconds of a step without an exchange."""
    from tf_redsync.planning import subject as subjects

    if args.step_ms is not None:
        return args.step_ms / 1e3
    say("measuring the forward and backward pass")
    return subjects.compute_seconds(subject)


def _measured(methods: Sequence[Method], args: argparse.Namespace) -> Measured:
    """What methods compute on this device, on the network of the command line."""
    from tf_redsync.auto import cost, probe
    from tf_redsync.auto.decision import Measured
    from tf_redsync.methods.dense import Dense

    work = {}
    for method in methods:
        if not isinstance(method, Dense):
            say(f"measuring what {type(method).__name__} computes")
            work[method] = probe.work(method, MEASURED_WORKERS)
    link = cost.Link.with_round_trips(bytes_per_second(args.rate), args.latency / 1e3)
    return Measured(args.workers, link, work)


def propose(subject: Subject, args: argparse.Namespace) -> str:
    """Return what fits the budget of the command line."""
    from tf_redsync.auto.candidates import candidates
    from tf_redsync.planning import proposals

    compute = _compute(subject, args)
    measured = _measured([c.method for c in candidates()], args)
    found = proposals.propose(subject.specs, measured, compute)
    return proposals.render(found, share_of(args.max_overhead), compute)


def _check(args: argparse.Namespace) -> None:
    bytes_per_second(args.rate)
    if args.max_overhead is not None:
        share_of(args.max_overhead)
        for name in ("method", "json", "plot", "density"):
            if getattr(args, name) not in (None, "Auto"):
                raise PlanError(
                    f"`--{name}` is for the plan of a method, and `--max-overhead` proposes one. "
                    f"Received: --{name}={getattr(args, name)}"
                )
    for name, low in (("workers", 2), ("batch_size", 1)):
        value = getattr(args, name)
        if value is not None and value < low:
            flag = name.replace("_", "-")
            raise PlanError(f"`--{flag}` must be at least {low}. Received: --{flag}={value}")
    for name in ("latency", "step_ms"):
        value = getattr(args, name)
        if value is not None and not 0.0 <= value < float("inf"):
            flag = name.replace("_", "-")
            raise PlanError(f"`--{flag}` must be at least 0. Received: --{flag}={value}")
    for name in ("json", "plot"):
        path = getattr(args, name)
        if path and not Path(path).absolute().parent.is_dir():
            raise PlanError(
                f"`--{name}` must be a file in a directory that exists. Received: --{name}={path}"
            )
    if args.plot and Path(args.plot).suffix != ".png":
        raise PlanError(f"`--plot` must be a file that ends in .png. Received: --plot={args.plot}")
    if args.plot and importlib.util.find_spec("matplotlib") is None:
        raise PlanError(
            "`--plot` needs matplotlib, which is not installed: pip install matplotlib, or leave "
            f"--plot out. Received: --plot={args.plot}"
        )


def _configure(parser: Parser) -> None:
    parser.flags(_FLAGS)


def _run(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    if os.environ.pop("TF_CONFIG", None):
        say("TF_CONFIG is set and ignored: one process, and --workers counts")
    try:
        _check(args)
        from tf_redsync.planning import choice, report
        from tf_redsync.planning import subject as subjects

        method = choice.parse(args.method, args.density)
        say(f"making the model by {args.model}")
        returned = subjects.load(args.model)
        subject = subjects.subject(returned, args.batch_size)
        if args.max_overhead is not None:
            print(propose(subject, args))
            return 0
        policy = choice.suited(method, subject.optimizer, lambda text: say(f"warning: {text}"))
        plan = make(subject, policy, args)
    except PlanError as error:
        parser.error(str(error))
    advice = report.advise(plan)
    print(report.render(plan), report.notes(args, subject.synthetic), advice.text, sep="\n\n")
    if advice.code:
        print(f"\n    {advice.code}")
    if args.json:
        found = report.as_json(plan, advice) | {"synthetic": subject.synthetic, "rate": args.rate}
        Path(args.json).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if args.plot:
        from tf_redsync.planning import picture

        picture.draw(plan, args.plot)
    return 0


COMMAND = Command(
    "plan",
    "predict, without a cluster, whether compression will pay",
    __doc__,
    (
        ("--model train:build_model --workers 8 --rate 10gbit", "build_model of train.py"),
        ("--model train:build_model --workers 8 --rate 1gbit --plot plan.png", "and a picture"),
        (
            "--model train:build_model --workers 8 --rate 50mbit --latency 50ms --max-overhead 10%",
            "a method",
        ),
    ),
    _configure,
    _run,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the plan; returns the exit code, 2 for what cannot be planned."""
    return COMMAND.main(argv)


if __name__ == "__main__":
    sys.exit(main())
