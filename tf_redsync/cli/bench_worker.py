"""The worker program of `tf-redsync bench`: trains one model with each method in turn.

All workers train on the same batch. Their weights therefore agree with every method, including
`NoExchange`, and one method's steps do not affect the next one's. The optimizer is SGD, whose
update costs the same for all methods.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from tf_redsync.cli import bench_result
from tf_redsync.cli.bench_result import Measured
from tf_redsync.cli.command_line import check_output_file
from tf_redsync.methods.known_losses import known_loss
from tf_redsync.planning import PlanError

LEARNING_RATE = 1e-3
_WIDTH = 2_000


@dataclasses.dataclass(kw_only=True)
class Timing(Measured):
    """Measured steps of one method.

    Attributes:
        optimizer: The wrapped optimizer.
        step: Runs one step; returns the loss.
        barrier: Waits for all workers.
        period: Number of steps after which the exchanges repeat.
    """

    optimizer: Any
    step: Callable[[], Any]
    barrier: Callable[[], None]
    period: int = 1

    def run(self, steps: int) -> float:
        """Run at least `steps` steps, in whole periods; return the mean seconds per step.

        The time is that of the slowest worker. Without barriers the next method's steps would
        include the wait for it.
        """
        steps = -(-steps // self.period) * self.period
        self.barrier()
        started = time.perf_counter()
        for _ in range(steps):
            loss = self.step()
        float(loss)  # waits for the last step
        self.barrier()
        return (time.perf_counter() - started) / steps


def example() -> Any:
    """Return the default model."""
    import keras

    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(_WIDTH, activation="relu") for _ in range(3)]
    return keras.Sequential([keras.layers.Input((1_000,)), *layers, keras.layers.Dense(100)])


def prepare(strategy: Any, text: str, evaluated: Any, subject: Any) -> Timing:
    """Return a `Timing` whose step trains the model with one method.

    Args:
        strategy: The strategy of all workers.
        text: The method's expression.
        evaluated: The evaluated expression.
        subject: Model, batch and loss.

    Raises:
        ValueError: `DistributedOptimizer` does not accept the method or an argument.
    """
    import tensorflow as tf

    from tf_redsync.keras import training_length
    from tf_redsync.keras.slots import tf_variable
    from tf_redsync.optimizer import DistributedOptimizer

    variables = subject.model.trainable_variables
    with strategy.scope():
        inner = _library(subject.model).optimizers.SGD(LEARNING_RATE)
        try:
            optimizer = DistributedOptimizer(inner, evaluated.method, **evaluated.options)
        except TypeError as error:
            raise ValueError(f"--methods: {error} Received: {text!r}") from error
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

    return Timing(
        method=text,
        loss=known_loss(evaluated.method),
        optimizer=optimizer,
        step=lambda: strategy.experimental_local_results(step())[0],
        barrier=make_barrier(strategy),
        period=_period(optimizer.exchange.schedule.buckets),
    )


def check_begun(timing: Timing, steps: int) -> None:
    """Check that the warm-up round outlasts the method's own warm-up and stages.

    Args:
        timing: The method.
        steps: Steps per round.

    Raises:
        ValueError: it does not, so that the measured steps would not be those of the method.
    """
    from tf_redsync.keras import training_length

    exchange = timing.optimizer.exchange
    unknown = any(not length.steps for length in exchange.lengths)  # fractions of a training
    if unknown or training_length.never_begins(exchange, steps) is not None:
        raise ValueError(
            f"a warm-up or first stage must end within the first {steps} steps, which are not "
            "measured. Pass warm_up=None, a shorter warm-up, earlier stages, or more `--steps`. "
            f"Received: --methods {timing.method!r}, --steps={steps}"
        )


def make_barrier(strategy: Any) -> Callable[[], None]:
    """Return a function that waits for all workers, traced already."""
    import tensorflow as tf

    @tf.function
    def count() -> Any:
        return strategy.reduce("SUM", strategy.run(lambda: tf.ones(())), axis=None)

    def barrier() -> None:
        count().numpy()

    barrier()
    return barrier


def _period(buckets: Sequence[Any]) -> int:
    """Return the number of steps after which the exchanges of all buckets repeat."""
    schedules = [bucket.method.sync_schedule for bucket in buckets]
    steps = [s.local_steps for s in schedules] + [s.dense_every for s in schedules]
    return math.lcm(*(n for n in steps if n), *(b.method.traits.period for b in buckets))


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
                timing.seconds.append(seconds)
            phase = f"round {number} of {rounds}" if number else "warm-up"
            say(f"{phase}: {timing.method}: {1e3 * seconds:.1f} ms per step")
    for timing in timings:
        timing.bytes = float(timing.optimizer.bytes_per_step())


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
    parser.add_argument("--training-steps", type=int, required=True)
    parser.add_argument("--plot")
    parser.add_argument("--methods", nargs="+", required=True)
    return parser.parse_args(argv)


def _check_files(args: argparse.Namespace) -> None:
    for name in ("json", "plot"):
        if getattr(args, name) is not None:
            check_output_file(f"--{name}", getattr(args, name))


def main(argv: Sequence[str] | None = None) -> int:
    """Run one worker; worker 0 prints the results."""
    args = _parsed(argv)
    from tf_redsync import expressions
    from tf_redsync.network import strategies
    from tf_redsync.planning import subject as subjects
    from tf_redsync.strategy import MultiWorkerMirroredStrategy

    strategy = MultiWorkerMirroredStrategy()
    first = strategies.process_rank(strategy) == 0

    def say(text: str) -> None:
        if first:
            print(text, file=sys.stderr, flush=True)

    try:
        if first:
            _check_files(args)
        with strategy.scope():
            made = subjects.subject(subjects.load(args.model), args.batch_size)
        # After `load`, because the user's module may register methods.
        calls = [expressions.evaluate(expressions.called(text)) for text in args.methods]
        timings = [
            prepare(strategy, text, call, made)
            for text, call in zip(args.methods, calls, strict=True)
        ]
        for timing in timings:
            check_begun(timing, args.steps)
    except (PlanError, ValueError) as error:
        print(error, file=sys.stderr, flush=True)
        return 2
    say(f"{made.model.count_params():,} weights, {strategy.num_replicas_in_sync} replicas")
    measure(timings, made.model, args.rounds, args.steps, say)
    if first:
        bench_result.show(timings, args.training_steps, args.plot, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
