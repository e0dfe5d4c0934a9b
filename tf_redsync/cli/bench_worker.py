"""What each worker of `tf-redsync bench` runs: one model, trained by each method in turn.

All workers train on the same batch, so that their weights agree by every method, `NoExchange` too,
and one method's steps do not disturb the next one's. The update is that of SGD, which costs all of
them the same.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tf_redsync import tables
from tf_redsync.planning import PlanError

LEARNING_RATE = 1e-3
_WIDTH = 2_000


@dataclasses.dataclass
class Timing:
    """One method's steps.

    Attributes:
        method: As it was written.
        optimizer: What it is trained with.
        step: One step; returns the loss.
        times: Seconds of a step, one for each round.
        bytes: Sent by a worker in a step.
    """

    method: str
    optimizer: Any
    step: Callable[[], Any]
    times: list[float] = dataclasses.field(default_factory=list)
    bytes: float = 0.0

    def run(self, steps: int) -> float:
        """Trains; returns the seconds of a step."""
        started = time.perf_counter()
        for _ in range(steps):
            loss = self.step()
        float(loss)  # it is there when the last step is done
        return (time.perf_counter() - started) / steps

    @property
    def milliseconds(self) -> float:
        """Median of a step."""
        return 1e3 * statistics.median(self.times)


def example() -> Any:
    """Returns the model that is measured where none is given."""
    import keras

    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(_WIDTH, activation="relu") for _ in range(3)]
    return keras.Sequential([keras.layers.Input((1_000,)), *layers, keras.layers.Dense(100)])


def prepare(strategy: Any, text: str, found: Any, subject: Any) -> Timing:
    """Returns the training of a model by the method that an expression describes.

    Args:
        strategy: Of all workers.
        text: The expression.
        found: What it describes.
        subject: Model, batch and loss.
    """
    import tensorflow as tf

    from tf_redsync.keras import training_length
    from tf_redsync.keras.slots import tf_variable
    from tf_redsync.optimizer import DistributedOptimizer

    variables = subject.model.trainable_variables
    with strategy.scope():
        inner = _library(subject.model).optimizers.SGD(LEARNING_RATE)
        optimizer = DistributedOptimizer(inner, found.method, **found.options)
        optimizer.build(variables)
    training_length.forget(optimizer.exchange)  # it measures, and is not to learn anything
    loss_and_gradient = subject.loss_and_gradient_function()

    def replica_step() -> Any:
        loss, grads = loss_and_gradient()
        optimizer.apply_gradients(zip(grads, [tf_variable(v) for v in variables], strict=True))
        return loss

    @tf.function
    def step() -> Any:
        return strategy.run(replica_step)

    return Timing(text, optimizer, lambda: strategy.experimental_local_results(step())[0])


def measure(
    timings: Sequence[Timing], model: Any, rounds: int, steps: int, say: Callable[[str], None]
) -> None:
    """Trains by each method in each round; the first round is not counted."""
    start = model.get_weights()
    for number in range(rounds + 1):
        for timing in timings:
            model.set_weights(start)
            seconds = timing.run(steps)
            if number:
                timing.times.append(seconds)
            what = f"round {number} of {rounds}" if number else "warming up"
            say(f"{what}: {timing.method}: {1e3 * seconds:.1f} ms a step")
    for timing in timings:
        timing.bytes = float(timing.optimizer.bytes_per_step())


def table(timings: Sequence[Timing]) -> str:
    """Returns the measurement for people: with speeds over `Dense`, where it was measured."""
    dense = next((t for t in timings if t.method in ("Dense", "Dense()")), None)
    rows = [["method", "ms a step", "fastest", "slowest", "bytes sent a step"]]
    for t in timings:
        low, high = 1e3 * min(t.times), 1e3 * max(t.times)
        rows.append(
            [t.method, f"{t.milliseconds:.1f}", f"{low:.1f}", f"{high:.1f}", f"{t.bytes:,.0f}"]
        )
    if dense is not None:
        ratios = [f"{dense.milliseconds / t.milliseconds:.2f}x" for t in timings]
        rows = [[*row, more] for row, more in zip(rows, ["speed", *ratios], strict=True)]
    return "\n".join(tables.aligned(rows, right=range(1, len(rows[0]))))


def _library(model: Any) -> Any:
    import keras

    if isinstance(model, keras.Model):
        return keras
    import tf_keras

    return tf_keras


def _parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--json")
    parser.add_argument("--methods", nargs="+", required=True)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """A worker; worker 0 prints."""
    args = _parsed(argv)
    from tf_redsync import expressions
    from tf_redsync.network import collectives
    from tf_redsync.planning import subject as subjects
    from tf_redsync.strategy import MultiWorkerMirroredStrategy

    try:
        found = [expressions.evaluate(expressions.called(text)) for text in args.methods]
    except ValueError as error:
        print(error, file=sys.stderr, flush=True)
        return 2
    strategy = MultiWorkerMirroredStrategy()
    first = collectives.worker_rank(strategy) == 0

    def say(text: str) -> None:
        if first:
            print(text, file=sys.stderr, flush=True)

    try:
        with strategy.scope():
            made = subjects.subject(subjects.load(args.model), args.batch_size)
        timings = [
            prepare(strategy, text, what, made)
            for text, what in zip(args.methods, found, strict=True)
        ]
    except (PlanError, ValueError) as error:
        print(error, file=sys.stderr, flush=True)
        return 2
    say(f"{made.model.count_params():,} weights, {strategy.num_replicas_in_sync} replicas")
    measure(timings, made.model, args.rounds, args.steps, say)
    if first:
        print(f"\n{table(timings)}", flush=True)
        if args.json:
            rows = [{"method": t.method, "seconds": t.times, "bytes": t.bytes} for t in timings]
            Path(args.json).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
