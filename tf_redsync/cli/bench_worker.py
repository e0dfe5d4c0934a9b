"""The worker program of `tf-redsync bench`: trains one model with each method in turn.

All workers train on the same batch. Their weights therefore agree with every method, including
`NoExchange`, and one method's steps do not affect the next one's. The optimizer is SGD, whose
update costs the same for all methods.
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
    """Measured steps of one method.

    Attributes:
        method: The method's expression, as given.
        optimizer: The wrapped optimizer.
        step: Runs one step; returns the loss.
        times: Mean seconds per step, one entry for each round.
        bytes: Bytes that a worker sends per step.
    """

    method: str
    optimizer: Any
    step: Callable[[], Any]
    times: list[float] = dataclasses.field(default_factory=list)
    bytes: float = 0.0

    def run(self, steps: int) -> float:
        """Run `steps` steps; return the mean seconds per step."""
        started = time.perf_counter()
        for _ in range(steps):
            loss = self.step()
        float(loss)  # waits for the last step
        return (time.perf_counter() - started) / steps

    @property
    def milliseconds(self) -> float:
        """Median over the rounds, in milliseconds per step."""
        return 1e3 * statistics.median(self.times)


def example() -> Any:
    """Return the default model."""
    import keras

    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(_WIDTH, activation="relu") for _ in range(3)]
    return keras.Sequential([keras.layers.Input((1_000,)), *layers, keras.layers.Dense(100)])


def prepare(strategy: Any, text: str, found: Any, subject: Any) -> Timing:
    """Return a `Timing` whose step trains the model with one method.

    Args:
        strategy: The strategy of all workers.
        text: The method's expression.
        found: The evaluated expression.
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
    training_length.forget(optimizer.exchange)  # a measurement has no planned length
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
    """Run all methods in each round; the first round is a warm-up and is not counted."""
    start = model.get_weights()
    for number in range(rounds + 1):
        for timing in timings:
            model.set_weights(start)
            seconds = timing.run(steps)
            if number:
                timing.times.append(seconds)
            phase = f"round {number} of {rounds}" if number else "warm-up"
            say(f"{phase}: {timing.method}: {1e3 * seconds:.1f} ms per step")
    for timing in timings:
        timing.bytes = float(timing.optimizer.bytes_per_step())


def table(timings: Sequence[Timing]) -> str:
    """Return the results as a text table, with speed-ups over `Dense` if it was measured."""
    dense = next((t for t in timings if t.method in ("Dense", "Dense()")), None)
    rows = [["method", "ms per step", "fastest", "slowest", "bytes sent per step"]]
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
    """Run one worker; worker 0 prints the results."""
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
