"""The one module that turns a method's state into variables.

A state is a dict from a name to a list of tensors. `Method.state_kinds` says what each name is:

* `"sum"`: every worker has its own (residuals, velocities) and the *total* over workers is what
  matters. Where the number of workers changes, it is given to them in equal shares, so that nothing
  is lost.
* `"mean"`: every worker has its own, and an average will do as a start (thresholds).
* `"shared"`: equal on all workers.

Where a worker is a replica, each replica has its own variables. Where a worker is a host with
several replicas, the host has one variable, on the first of its devices: no memory is spent on the
others. Both are saved in the same form (`state/capture.py`), so either restores what the
other one has saved.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from typing import Any

import tensorflow as tf

from tf_redsync.cluster import agreement
from tf_redsync.exchange.driver import Network
from tf_redsync.exchange.layout import TensorSpec
from tf_redsync.network import collectives

_PER_WORKER = {
    "sum": tf.VariableAggregation.SUM,
    "mean": tf.VariableAggregation.MEAN,
}
# Makes a variable from its first value, its kind and a name: see `replica_variable`.
Create = Callable[[tf.Tensor, str, str], Any]
_CHECKPOINT_KEY = "VARIABLE_VALUE"  # under which TensorFlow saves variables


class StateVariables(tf.Module):
    """Variables that hold one bucket's state.

    Args:
        values: The initial state.
        kinds: For every name in it, its kind.
        index: Of the bucket.
        create: Makes a variable: `replica_variable`, or `workers.Host.variable`.
    """

    def __init__(
        self,
        values: dict[str, list[tf.Tensor]],
        kinds: dict[str, str],
        index: int,
        create: Create,
    ):
        super().__init__(name=f"bucket_{index}")
        self.kinds = dict(kinds)
        self.variables_by_name: dict[str, list[Any]] = {
            name: [create(value, kinds[name], f"{name}_{i}") for i, value in enumerate(group)]
            for name, group in values.items()
        }

    def read(self, names: Collection[str] | None = None) -> dict[str, list[tf.Tensor]]:
        """Return this worker's state as tensors: all of it, or what has one of some names."""
        found = {}
        for name, variables in self.variables_by_name.items():
            if names is None or name in names:
                found[name] = [v.read_value() for v in variables]
        return found

    def assign(self, state: dict[str, Any], old: dict[str, Any] | None = None) -> None:
        """Store what is in `state`, of the structure of `read`'s result, for this worker.

        Args:
            state: The new values, perhaps of some names only.
            old: What `read` returned. Tensors that are still the same are not written: what reads
                or writes these variables later in the step need not wait for this.
        """
        for name, values in state.items():
            before = values if old is None else old[name]
            pairs = zip(self.variables_by_name[name], values, before, strict=True)
            for variable, value, was in pairs:
                if old is None or value is not was:
                    variable.assign(value, read_value=False)


class HostVariable(collectives.OneDeviceVariable):
    """A variable of which each host has its own, for all of its replicas.

    Args:
        value: Its first value.
        kind: `"sum"`, `"mean"` or `"shared"`.
        name: For TensorFlow.
        network: What adds up over the hosts.
        strategy: Theirs.
    """

    def __init__(
        self,
        value: tf.Tensor,
        kind: str,
        name: str,
        network: Network,
        strategy: tf.distribute.Strategy,
    ):
        super().__init__(value, trainable=False, name=name)
        self._kind, self._network, self._strategy, self._title = kind, network, strategy, name

    def total(self) -> tf.Tensor:
        """Return the sum or mean over the hosts. All of them must call it."""
        if self._kind == "shared":
            return self.read_value()
        if tf.executing_eagerly():
            agreement.agree(self._strategy, f"save the exchange's {self._title}")
        total = self._network.all_reduce([self.read_value()])[0]
        return total if self._kind == "sum" else self._share(total)

    def restore_total(self, total: tf.Tensor) -> tf.Operation | None:
        """Set this host's value to its share of what `total` returned."""
        value = self._share(total) if self._kind == "sum" else total
        return self.assign(value, read_value=False)

    def _share(self, total: tf.Tensor) -> tf.Tensor:
        return tf.cast(total / self._network.workers, self.dtype)

    def _serialize_to_tensors(self) -> dict[str, Any]:
        return {_CHECKPOINT_KEY: collectives.when_saved(self.total, self)}

    def _restore_from_tensors(self, tensors: dict[str, tf.Tensor]) -> Any:
        return self.restore_total(tensors[_CHECKPOINT_KEY])


class Consensus(tf.Module):
    """The weights that all workers agree on, while the model's are each worker's own.

    Args:
        weights: The model's variables. With a replica in every process, which is what this needs.

    Attributes:
        own: This worker's copies of the model's variables.
        agreed: Variables of the same shapes, equal on all workers. Not up to date while `steps` is
            0: then the model's variables are the consensus, and whoever assigns to them on all
            workers, a checkpoint for example, is heard.
        steps: int64 variable, steps since the model's variables were the consensus.
        rounds: int64 variable, how often the consensus has been renewed by an exchange of changes.
    """

    def __init__(self, weights: Sequence[tf.Variable]):
        super().__init__(name="consensus")
        strategy = tf.distribute.get_strategy()
        own = tuple(strategy.experimental_local_results(v)[0] for v in weights)
        # Not a list: these are the model's, which saves them.
        self._own: Callable[[], tuple[Any, ...]] = lambda: own
        self.agreed = [
            tf.Variable(v.read_value(), trainable=False, name=f"agreed_{i}")
            for i, v in enumerate(own)
        ]
        self.steps = counter("steps_since_consensus")
        self.rounds = counter("consensus_rounds")

    @property
    def own(self) -> tuple[tf.Variable, ...]:
        """See the class."""
        return self._own()

    def changes(self, specs: Sequence[TensorSpec]) -> list[tf.Tensor]:
        """Return how far this worker's own weights are from the agreed ones, float32."""
        return [
            tf.cast(self.own[p], tf.float32) - tf.cast(self.agreed[p], tf.float32)
            for p in (s.position for s in specs)
        ]

    def capture(self) -> None:
        """Take over the model's variables if they are the consensus."""

        def take_over() -> None:
            for agreed, own in zip(self.agreed, self.own, strict=True):
                agreed.assign(own.read_value(), read_value=False)

        tf.cond(tf.equal(self.steps, 0), take_over, lambda: None)

    def restore(self) -> None:
        """Set the model's variables to the consensus."""
        for agreed, own in zip(self.agreed, self.own, strict=True):
            own.assign(agreed.read_value(), read_value=False)


class StepTimes:
    """How long steps took. Saved for a run of as many workers, which goes on with its verdict.

    Args:
        length: How many steps are to be kept.
        create: See `StateVariables`.

    Attributes:
        count: int64 variable, number of steps so far, equal on all workers.
        last: float64 variable, when this worker's last step began, in seconds.
        seconds: float64 variable `[length]`, this worker's times.
        verdict: int64 variable, for whoever judges by them; equal on all workers.
        delivered: int64 variable, 1 where nothing is in the residuals; equal on all workers.
    """

    def __init__(self, length: int, create: Create):
        self.count = counter("trial_count")
        self.verdict = counter("trial_verdict")
        self.delivered = counter("trial_delivered")
        self.last = create(tf.zeros([], tf.float64), "mean", "trial_last")
        self.seconds = create(tf.zeros([length], tf.float64), "mean", "trial_seconds")


def copies(variable: Any, strategy: tf.distribute.Strategy) -> tuple[tf.Variable, ...]:
    """Return this process's copies of a variable: one for each replica that has its own."""
    return tuple(strategy.experimental_local_results(variable))


def counter(name: str, start: int = 0) -> tf.Variable:
    """An int64 variable that is equal on all replicas."""
    return tf.Variable(tf.constant(start, tf.int64), trainable=False, name=name)


def drawn(name: str) -> tf.Variable:
    """An int64 variable with a random number that is the same on all workers: the chief's."""
    number = int.from_bytes(os.urandom(7), "little")
    return tf.Variable(tf.constant(number, tf.int64), trainable=False, name=name)


def float_counter(name: str) -> tf.Variable:
    """A float64 variable that is equal on all replicas and starts at 0."""
    return tf.Variable(tf.zeros([], tf.float64), trainable=False, name=name)


def process_variable(value: tf.Tensor) -> Any:
    """Create a variable of this process alone, outside of graphs; other workers need none."""
    with tf.init_scope():
        return collectives.OneDeviceVariable(value, trainable=False)


def replica_variable(value: tf.Tensor, kind: str, name: str) -> tf.Variable:
    """Create a variable of which each replica has its own; call it in the strategy's scope.

    Args:
        value: Its first value.
        kind: `"sum"`, `"mean"` or `"shared"`.
        name: For TensorFlow.
    """
    if kind == "shared":  # every replica computes and assigns the same value: no aggregation
        return tf.Variable(value, trainable=False, name=name)
    return tf.Variable(
        value,
        trainable=False,
        name=name,
        synchronization=tf.VariableSynchronization.ON_READ,
        aggregation=_PER_WORKER[kind],
    )
