"""Variables that hold the states of methods.

A state is a dict from a name to a list of tensors. `Traits.state_kinds` declares the kind of each
name:

* `"sum"`: every worker has its own value (residuals, velocities), and only the *total* over workers
  matters. If the number of workers changes, each worker receives an equal share of the total.
* `"mean"`: every worker has its own value, and the mean is a valid initial value (thresholds).
* `"shared"`: equal on all workers.

If a worker is a replica, each replica has its own variables. If a worker is a host with several
replicas, the host has one variable on its first device, and the other devices use no memory. Both
are saved in the same format (`state/snapshot.py`), so that each can restore files of the other.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from typing import Any

import tensorflow as tf

from tf_redsync.exchange.layout import TensorSpec
from tf_redsync.network import collectives, initial_values

_PER_WORKER = {
    "sum": tf.VariableAggregation.SUM,
    "mean": tf.VariableAggregation.MEAN,
}
# Creates a variable from its initial value, its kind and a name; see `replica_variable`.
Create = Callable[[tf.Tensor, str, str], Any]


class StateVariables(tf.Module):
    """Variables of one bucket's state.

    Args:
        values: The initial state.
        kinds: The kind of every name in the state.
        index: The index of the bucket.
        create: Creates a variable: `replica_variable`, or `workers.HostWorker.variable`.

    Raises:
        ValueError: If a name has a `.` or `/`, which separate names in files.
    """

    def __init__(
        self,
        values: dict[str, list[tf.Tensor]],
        kinds: dict[str, str],
        index: int,
        create: Create,
    ):
        super().__init__(name=f"bucket_{index}")
        for name in values:
            if "." in name or "/" in name:
                raise ValueError(
                    "names in a method's state must not have '.' or '/', which separate names in "
                    f"files. Received: {name!r} in `init` or `Traits.state_kinds`"
                )
        self.kinds = dict(kinds)
        self.variables_by_name: dict[str, list[Any]] = {
            name: [create(value, kinds[name], f"{name}_{i}") for i, value in enumerate(group)]
            for name, group in values.items()
        }

    def read(self, names: Collection[str] | None = None) -> dict[str, list[tf.Tensor]]:
        """Return this worker's state as tensors, restricted to `names` if given."""
        groups = self.variables_by_name.items()
        wanted = self.variables_by_name if names is None else names
        return {n: list(map(tf.convert_to_tensor, v)) for n, v in groups if n in wanted}

    def shared(self) -> list[Any]:
        """Return the variables that are equal on all workers."""
        groups = self.variables_by_name.items()
        return [v for name, group in groups if self.kinds[name] == "shared" for v in group]

    def assign(self, state: dict[str, Any]) -> None:
        """Store this worker's new state, in the structure of `read`; some names may be absent."""
        for name, values in state.items():
            for variable, value in zip(self.variables_by_name[name], values, strict=True):
                variable.assign(value, read_value=False)

    def changed(self, state: dict[str, Any], old: dict[str, Any]) -> list[tuple[Any, tf.Tensor]]:
        """Return the variables whose values differ between two states, with their new values.

        If the others are not written, later reads and writes in the step do not depend on this one.

        Args:
            state: The new values, in the structure of `old`.
            old: The result of `read`. Tensors that are the same objects in `state` are unchanged.
        """
        names, groups = self.variables_by_name, state.items()
        rows = (row for n, v in groups for row in zip(names[n], v, old[n], strict=True))
        return [(variable, value) for variable, value, was in rows if value is not was]


class Consensus(tf.Module):
    """The weights that all workers agree on, while each worker's model has its own weights.

    Args:
        weights: The model's variables. Every process must have one replica.

    Attributes:
        own: This worker's copies of the model's variables.
        agreed: Variables of the same shapes, equal on all workers. They are stale while `steps` is
            0: the model's variables are then the consensus, so that a restored checkpoint, for
            example, takes effect.
        steps: int64 variable, steps since the model's variables were the consensus.
        rounds: int64 variable, number of exchanges of weight changes so far. Non-finite ones count,
            and with fragments each fragment's exchange counts.
    """

    def __init__(self, weights: Sequence[tf.Variable]):
        super().__init__(name="consensus")
        strategy = tf.distribute.get_strategy()
        variables = tuple(strategy.experimental_local_results(v)[0] for v in weights)
        # `tf.Module` would track and save a list, but the model already saves its variables.
        self._own: Callable[[], tuple[Any, ...]] = lambda: variables
        with initial_values.own():  # no broadcast, because the values are stale
            self.agreed = [
                tf.Variable(v.read_value(), trainable=False, name=f"agreed_{i}")
                for i, v in enumerate(variables)
            ]
        self.steps = counter("steps_since_consensus")
        self.rounds = counter("consensus_rounds")

    @property
    def own(self) -> tuple[tf.Variable, ...]:
        """This worker's copies of the model's variables."""
        return self._own()

    def changes(self, specs: Sequence[TensorSpec]) -> list[tf.Tensor]:
        """Return this worker's weights minus the agreed weights, float32, for each of `specs`."""
        return [
            tf.cast(self.own[p], tf.float32) - tf.cast(self.agreed[p], tf.float32)
            for p in (s.position for s in specs)
        ]

    def capture(self) -> None:
        """Copy the model's variables to `agreed` if they are the consensus."""

        def copy() -> None:
            for agreed, own in zip(self.agreed, self.own, strict=True):
                agreed.assign(own.read_value(), read_value=False)

        tf.cond(tf.equal(self.steps, 0), copy, lambda: None)

    def restore(self) -> None:
        """Set the model's variables to the consensus."""
        for agreed, own in zip(self.agreed, self.own, strict=True):
            own.assign(agreed.read_value(), read_value=False)


class StepTimes:
    """Variables with the durations of a trial's steps and its verdict.

    A run that resumes with the same number of workers keeps them.

    Args:
        length: The number of steps to keep.
        create: See `StateVariables`.

    Attributes:
        count: int64 variable, number of steps so far, equal on all workers.
        last: float64 variable, the start of this worker's last step, in seconds since the epoch.
        seconds: float64 variable `[length]`, this worker's durations in seconds.
        verdict: int64 variable, the outcome of the trial, equal on all workers; see `trial.py`.
        delivered: int64 variable, 1 if the residuals are empty; equal on all workers.
        interrupted: int64 variable, whether the last step is to be measured again, equal on all
            workers; see `trial.py`.
        begun: int64 variable, the last step by `step_counters.begun`; not saved.
    """

    def __init__(self, length: int, create: Create):
        self.count = counter("trial_count")
        self.verdict = counter("trial_verdict")
        self.delivered = counter("trial_delivered")
        self.interrupted = counter("trial_interrupted")
        self.begun = counter("trial_begun")
        self.last = create(tf.zeros([], tf.float64), "mean", "trial_last")
        self.seconds = create(tf.zeros([length], tf.float64), "mean", "trial_seconds")


def copies(variable: Any, strategy: tf.distribute.Strategy) -> tuple[tf.Variable, ...]:
    """Return this process's copies of a variable, one per local replica."""
    return tuple(strategy.experimental_local_results(variable))


def counter(name: str, start: int = 0) -> tf.Variable:
    """Create an int64 variable that is equal on all replicas."""
    return _create_equal(tf.constant(start, tf.int64), name)


def counters(name: str, size: int) -> tf.Variable:
    """Create an int64 variable `[size]` that starts at 0 and is equal on all replicas."""
    return _create_equal(tf.zeros([size], tf.int64), name)


def random_number(name: str) -> tf.Variable:
    """Create an int64 variable with a random number in [0, 2^56), broadcast by the chief."""
    number = int.from_bytes(os.urandom(7), "little")
    return tf.Variable(tf.constant(number, tf.int64), trainable=False, name=name)


def float_counter(name: str) -> tf.Variable:
    """Create a float64 variable that is equal on all replicas and starts at 0."""
    return _create_equal(tf.zeros([], tf.float64), name)


def _create_equal(value: tf.Tensor, name: str) -> tf.Variable:
    """Create a variable whose initial value is equal on all workers, without a broadcast."""
    with initial_values.own():
        return tf.Variable(value, trainable=False, name=name)


def process_variable(value: tf.Tensor) -> Any:
    """Create a variable outside of graphs that belongs to this process only."""
    with tf.init_scope():
        return collectives.OneDeviceVariable(value, trainable=False)


def replica_variable(value: tf.Tensor, kind: str, name: str) -> tf.Variable:
    """Create a per-replica variable; call it in the strategy's scope.

    Args:
        value: The initial value. If `kind` is `"shared"`, the chief broadcasts it unless it is
            zero: workers may round random values differently.
        kind: `"sum"`, `"mean"` or `"shared"`.
        name: The name in TensorFlow.
    """
    if kind == "shared":  # every replica computes and assigns the same value: no aggregation
        with initial_values.own(only_zeros=True):
            return tf.Variable(value, trainable=False, name=name)
    with initial_values.own():
        return tf.Variable(
            value,
            trainable=False,
            name=name,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=_PER_WORKER[kind],
        )
