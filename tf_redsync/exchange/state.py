"""The one module that turns a method's state into variables.

A state is a dict from a name to a list of tensors. `Method.state_kinds` says what each name is:

* `"sum"`: every worker has its own (residuals, velocities) and the *total* over workers is what
  matters. Saved as the total, restored in equal shares, so that nothing is lost when the number
  of workers changes.
* `"mean"`: every worker has its own, and an average will do as a start (thresholds).
* `"shared"`: equal on all workers.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

_PER_WORKER = {
    "sum": tf.VariableAggregation.SUM,
    "mean": tf.VariableAggregation.MEAN,
}


class StateVariables(tf.Module):
    """Variables that hold one bucket's state.

    Args:
        method: The bucket's method; its `init` gives the initial values.
        layout: The bucket's layout.
    """

    def __init__(self, method, layout):
        super().__init__(name=f"bucket_{layout.index}")
        self.variables_by_name: dict[str, list[tf.Variable]] = {
            name: [
                _create(value, method.state_kinds[name], f"{name}_{i}")
                for i, value in enumerate(values)
            ]
            for name, values in method.init(layout).items()
        }

    def read(self) -> dict[str, list[tf.Tensor]]:
        """Return this replica's state as tensors."""
        return {n: [v.read_value() for v in vs] for n, vs in self.variables_by_name.items()}

    def assign(self, state: dict[str, Any]) -> None:
        """Store `state`, which has the structure of `read`'s result, for this replica."""
        for name, variables in self.variables_by_name.items():
            for variable, value in zip(variables, state[name], strict=True):
                variable.assign(value, read_value=False)


def counter(name: str) -> tf.Variable:
    """An int64 variable that is equal on all replicas and starts at 0."""
    return tf.Variable(tf.zeros([], tf.int64), trainable=False, name=name)


def float_counter(name: str) -> tf.Variable:
    """A float64 variable that is equal on all replicas and starts at 0."""
    return tf.Variable(tf.zeros([], tf.float64), trainable=False, name=name)


def _create(value: tf.Tensor, kind: str, name: str) -> tf.Variable:
    if kind == "shared":  # every replica computes and assigns the same value: no aggregation
        return tf.Variable(value, trainable=False, name=name)
    return tf.Variable(
        value,
        trainable=False,
        name=name,
        synchronization=tf.VariableSynchronization.ON_READ,
        aggregation=_PER_WORKER[kind],
    )
