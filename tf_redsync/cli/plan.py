"""Predicts, in one process and without a cluster, whether compression will pay.

The function build_model of train.py takes no arguments and returns a built Keras model, or
(model, (inputs, labels)), or (model, (inputs, labels), loss). The command measures on this machine:
the forward and backward pass, the methods' computation, and the share of the gradient that they
deliver. It calculates the exchange with the cost model of `tf_redsync.Auto`. See docs/plan.md.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tf_redsync.cli.command_line import (
    Command,
    Flag,
    Parser,
    check_installation,
    check_output_file,
)
from tf_redsync.planning import PlanError

if TYPE_CHECKING:
    from tf_redsync.auto import Auto
    from tf_redsync.auto.decision import Measured
    from tf_redsync.exchange.method import Method
    from tf_redsync.planning.prediction import Plan
    from tf_redsync.planning.subject import Subject
    from tf_redsync.policy import Policy


_UNITS = {"k": 1e3, "m": 1e6, "g": 1e9}


def bytes_per_second(rate: str) -> float:
    """Return a rate such as `"10gbit"` in bytes per second.

    Raises:
        PlanError: if it is not a positive number with kbit, mbit or gbit.

    Example:
        >>> bytes_per_second("2.5gbit")
        312500000.0
    """
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([kmg])bit", rate)
    if match is None or float(match[1]) == 0.0:
        raise PlanError(
            "`--rate` must be a number with kbit, mbit or gbit, such as 10gbit. "
            f"Received: --rate={rate}"
        )
    return float(match[1]) * _UNITS[match[2]] / 8.0


def share_of(percent: str) -> float:
    """Return a percentage such as `"10%"` as a fraction.

    Raises:
        PlanError: if it is not a positive number with a percent sign.

    Example:
        >>> share_of("10%")
        0.1
    """
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)%", percent)
    if match is None or float(match[1]) == 0.0:
        raise PlanError(
            "`--max-overhead` must be a number above 0 with a percent sign, such as 10%. "
            f"Received: --max-overhead={percent}"
        )
    return float(match[1]) / 100.0


def milliseconds(text: str) -> float:
    """Return a time such as `"50ms"` or `"50"` in milliseconds.

    Raises:
        ValueError: if it is not a number.

    Example:
        >>> milliseconds("0.2ms")
        0.2
    """
    return float(text.removesuffix("ms"))


# The slope between these numbers of workers is the cost of decoding one worker's message.
MEASURED_WORKERS = (2, 8)

_FLAGS: list[Flag] = [
    (("--model",), {"required": True, "metavar": "MODULE:FUNCTION", "help": "builds the model"}),
    (("--workers",), {"type": int, "required": True, "help": "number of workers, at least 2"}),
    (("--rate",), {"required": True, "help": "bandwidth of every worker's network link, such as "
     "10gbit"}),
    (("--latency",), {"type": milliseconds, "default": 0.2, "metavar": "MS", "help": "round-trip "
     "time between two workers, as ping reports it, such as 50 or 50ms (default: 0.2)"}),
    (("--method",), {"default": "Auto", "help": "Auto (default), or one method for all layers: "
     "RedSync, or 'RedSync(density=0.01)'"}),
    (("--max-overhead",), {"metavar": "PERCENT", "help": "propose the method with the least loss "
     "of accuracy whose exchange makes a step at most PERCENT longer, such as 10%%"}),
    (("--density",), {"type": float, "help": "density of the method"}),
    (("--step-ms",), {"type": float, "metavar": "MS", "help": "computation time of a step on the "
     "training machines (default: forward and backward pass, measured on this machine)"}),
    (("--batch-size",), {"type": int, "help": "size of a synthetic batch (default: 32)"}),
    (("--json",), {"metavar": "FILE", "help": "write the plan as JSON"}),
    (("--plot",), {"metavar": "FILE.png", "help": "plot the layers; needs matplotlib"}),
]  # fmt: skip


def say(text: str) -> None:
    """Print progress to stderr."""
    print(f"tf-redsync plan: {text}", file=sys.stderr, flush=True)


def make(subject: Subject, policy: Policy | Auto, args: argparse.Namespace) -> Plan:
    """Return a plan from measurements on this device.

    Args:
        subject: Model, batch and loss.
        policy: Methods to plan.
        args: Parsed command line.
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
    """Return the computation time of a step without an exchange, in seconds."""
    from tf_redsync.planning import subject as subjects

    if args.step_ms is not None:
        return args.step_ms / 1e3
    say("measuring the forward and backward pass")
    return subjects.compute_seconds(subject)


def _measured(methods: Sequence[Method], args: argparse.Namespace) -> Measured:
    """Return the methods' computation on this device, with the network of the command line."""
    from tf_redsync.auto import cost, probe
    from tf_redsync.auto.decision import Measured
    from tf_redsync.methods.dense import Dense

    work = {}
    for method in methods:
        if not isinstance(method, Dense):
            say(f"measuring the computation of {type(method).__name__}")
            work[method] = probe.work(method, MEASURED_WORKERS)
    link = cost.Link.with_round_trips(bytes_per_second(args.rate), args.latency / 1e3)
    return Measured(args.workers, link, work)


def propose(subject: Subject, args: argparse.Namespace) -> str:
    """Return the proposal for the overhead of the command line, as text."""
    from tf_redsync.auto.candidates import candidates
    from tf_redsync.planning import proposals
    from tf_redsync.planning import subject as subjects

    compute = _compute(subject, args)
    measured = _measured([c.method for c in candidates()], args)
    unsuited = subjects.unsuited(subject.optimizer)
    proposal = proposals.propose(subject.specs, measured, compute, unsuited)
    return proposals.render(proposal, share_of(args.max_overhead), compute)


def _check(args: argparse.Namespace) -> None:
    bytes_per_second(args.rate)
    if args.max_overhead is not None:
        share_of(args.max_overhead)
        for name in ("method", "json", "plot", "density"):
            if getattr(args, name) not in (None, "Auto" if name == "method" else None):
                raise PlanError(
                    f"`--{name}` cannot be combined with `--max-overhead`, which proposes a "
                    f"method. Received: --{name}={getattr(args, name)}"
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
    if args.max_overhead is not None and args.step_ms == 0.0:
        raise PlanError(
            "`--step-ms` must be above 0 with `--max-overhead`, which is a share of it. "
            f"Received: --step-ms={args.step_ms}"
        )
    for name in ("json", "plot"):
        path = getattr(args, name)
        if path is not None:
            try:
                check_output_file(f"--{name}", path)
            except ValueError as error:
                raise PlanError(str(error)) from error
    if args.plot and Path(args.plot).suffix != ".png":
        raise PlanError(f"`--plot` must end in .png. Received: --plot={args.plot}")
    if args.plot and importlib.util.find_spec("matplotlib") is None:
        raise PlanError(
            "`--plot` needs matplotlib, which is not installed. Run `pip install matplotlib`, or "
            f"omit --plot. Received: --plot={args.plot}"
        )


def _configure(parser: Parser) -> None:
    parser.flags(_FLAGS)


def _run(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    if os.environ.pop("TF_CONFIG", None):
        say("ignoring TF_CONFIG: --workers gives the number of workers")
    try:
        _check(args)
        check_installation(parser)
        from tf_redsync.planning import report
        from tf_redsync.planning import subject as subjects

        say(f"building the model with {args.model}")
        returned = subjects.load(args.model)  # may register methods
        method = subjects.parse_method(args.method, args.density)
        subject = subjects.subject(returned, args.batch_size)
        if args.max_overhead is not None:
            print(propose(subject, args))
            return 0
        policy = subjects.suited(method, subject.optimizer, lambda text: say(f"warning: {text}"))
        subjects.check_patterns(policy, subject.specs)
        plan = make(subject, policy, args)
        advice = report.advise(plan)
        print(report.render(plan), report.notes(args, subject.synthetic), advice.text, sep="\n\n")
        if advice.code:
            print(f"\n    {advice.code}")
        document = report.as_json(plan, advice)
        document |= {"synthetic": subject.synthetic, "rate": args.rate}
        _write(plan, document, args)
    except PlanError as error:
        parser.error(str(error))
    return 0


def _write(plan: Plan, document: dict[str, Any], args: argparse.Namespace) -> None:
    from tf_redsync.planning import report

    try:
        if args.json:
            Path(args.json).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        if args.plot:
            report.draw(plan, args.plot)
    except OSError as error:
        raise PlanError(f"`--json` or `--plot` cannot be written: {error}") from error


COMMAND = Command(
    "plan",
    "predict, without a cluster, whether compression will pay",
    __doc__,
    (
        ("--model train:build_model --workers 8 --rate 10gbit", "build_model of train.py"),
        ("--model train:build_model --workers 8 --rate 1gbit --plot plan.png", "with a plot"),
        (
            "--model train:build_model --workers 8 --rate 50mbit --latency 50ms --max-overhead 10%",
            "propose a method",
        ),
    ),
    _configure,
    _run,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the plan; return the exit code, 2 for an invalid argument or model."""
    return COMMAND.main(argv)
