"""Cost of message checksums: steps with and without them alternate in the same processes.

    python benchmarks/step/checksums.py --width 900 --json checksums.json

Two workers train an MLP of six hidden layers with RedSync. The library has no switch for checksums,
so the step is traced with `DirectCollectives.checksums` set to False, and a second time as a
control. Blocks of steps alternate. The result is the median of the ratios in each round, if that of
the control is near 0. The ops alone are also timed on messages of the same sizes.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
if __name__ == "__main__" and not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from benchmarks import arguments, netlab, workers

KINDS = ("checked", "plain", "control")


def worker(args: argparse.Namespace) -> dict[str, Any]:
    """Trains alternately with and without checksums; returns seconds of blocks and of the ops."""
    from benchmarks import models
    from benchmarks.step import training
    from tf_redsync.network import collectives
    from tf_redsync.ops import wire

    known = models.WORKLOADS["mlp"]
    models.WORKLOADS["mlp"] = dataclasses.replace(known, build=_mlp(args.width))
    flags = ["--method", "redsync", "--model", "mlp", "--steps", "1", "--warmup", "1"]
    flags += ["--density", str(args.density), "--batch", str(args.batch), "--output", args.output]
    job = training.prepare(training.parser().parse_args(flags))
    sizes: list[int] = []
    sealed = wire.sealed

    def noted(messages: Any) -> Any:
        sizes.append(messages.shape[1])
        return sealed(messages)

    wire.sealed = noted
    steps = {}
    for kind in KINDS:
        collectives.DirectCollectives.checksums = kind == "checked"
        traced = len(sizes)
        strategy = job.model.distribute_strategy
        steps[kind] = training.make_step(strategy, job.model, job.optimizer, {})
        steps[kind](*job.data[0])
        if (len(sizes) > traced) != (kind == "checked"):
            raise RuntimeError(f"{len(sizes) - traced} checksums where there is {kind}")
    wire.sealed = sealed

    def block(kind: str) -> float:
        job.barrier()
        start = time.perf_counter()
        for i in range(args.block):
            steps[kind](*job.data[i % len(job.data)])
        job.barrier()
        return time.perf_counter() - start

    for kind in KINDS:
        block(kind)
    blocks = []
    for number in range(args.rounds):
        order = [KINDS[(number + i) % len(KINDS)] for i in range(len(KINDS))]
        blocks.append({kind: block(kind) for kind in order})
    return {
        "params": job.model.count_params(),
        "words": sizes,
        "blocks": blocks,
        "ops": sum(_seconds_of_ops(words, args.workers) for words in sizes),
        "skipped": job.skipped(),
    }


def _mlp(width: int) -> Any:
    """784-6xwidth-10, like `mlp`, whose width is 2048."""

    def build() -> Any:
        import keras

        hidden = [keras.layers.Dense(width, activation="relu") for _ in range(6)]
        return keras.Sequential([keras.Input((784,)), *hidden, keras.layers.Dense(10)])

    return build


def _seconds_of_ops(words: int, count: int, times: int = 200) -> float:
    """Median time to seal one message and to open those of all workers."""
    import tensorflow as tf

    from tf_redsync.ops import wire

    message = tf.concat(
        [[[1]], tf.random.uniform([1, words - 1], -(2**31), 2**31 - 1, tf.int32)], 1
    )
    rows = tf.repeat(wire.sealed(message), count, axis=0)
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        wire.sealed(message)
        wire.opened(rows, tf.range(count), tf.constant(0))
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def report(found: dict[str, Any], block: int) -> dict[str, Any]:
    """Costs of blocks and ops, in percent of a step without checksums; see `compared`."""
    step = statistics.median(one["plain"] for one in found["blocks"]) / block
    return {
        "params": found["params"],
        "message_bytes": 4 * sum(found["words"]),
        "step_ms": 1e3 * step,
        "rounds": len(found["blocks"]),
        "checked": compared(found["blocks"], "checked"),
        "control": compared(found["blocks"], "control"),
        "ops_ms": 1e3 * found["ops"],
        "ops_percent": 100 * found["ops"] / step,
    }


def compared(blocks: list[dict[str, float]], kind: str) -> list[float]:
    """Percent added to the plain steps of the same round: quartiles and median."""
    ratios = [100 * (one[kind] / one["plain"] - 1) for one in blocks]
    return statistics.quantiles(ratios, n=4)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    add = parser.add_argument
    add("--workers", type=int, default=2)
    add("--width", type=int, default=900, help="of the hidden layers; 900: 4.8 M parameters")
    add("--batch", type=int, default=16, help="examples per worker and step")
    add("--density", type=float, default=0.001)
    add("--block", type=int, default=20, help="steps of a block")
    add("--rounds", type=int, default=12, help="of a block of each kind, at least 2")
    add("--timeout", type=float, default=600, help="seconds")
    add("--json", help="file for the report")
    add("--output", help="of a worker, which this program starts itself")
    args = parser.parse_args(argv)
    try:
        arguments.check_counts(args, ("workers", "width", "batch", "block", "rounds"))
        arguments.check_positive(args, ["timeout"])
        arguments.check_files(args)
        if args.rounds < 2:
            raise ValueError(f"`--rounds` must be at least 2. Received: --rounds={args.rounds}")
    except ValueError as error:
        parser.error(str(error))
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    args = _parse(argv)
    if args.output:
        from benchmarks.step import training

        training.write(worker(args), args.output)
        return 0
    names = ("workers", "width", "batch", "density", "block", "rounds")
    flags = {name: getattr(args, name) for name in names}
    with netlab.network(args.workers, "none") as lab:
        found = workers.measure("benchmarks.step.checksums", lab, flags, args.timeout)
    result = report(found, args.block)
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=2))
    return int(found["skipped"] > 0)


if __name__ == "__main__":
    sys.exit(main())
