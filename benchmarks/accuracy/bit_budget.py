"""`rs.BitBudget` in this process: errors are measured on gradients of a short dense training.

The network, the optimizer and the statistics are restored afterwards, so the row begins in the same
state as the rows of other methods.
"""

from __future__ import annotations

import dataclasses
import types
from typing import Any

import tensorflow as tf

from tf_redsync.auto.bit_budget import BitBudget

DENSE_STEPS = 50  # before the measured gradients
MEASURED_STEPS = 8


def resolved(policy: Any, training: Any, specs: Any) -> Any:
    """Returns the choice of a `BitBudget`; other policies are returned unchanged."""
    if not isinstance(policy, BitBudget):
        return policy
    found = gradients(training)
    one = types.SimpleNamespace(workers=1)  # all workers see the same errors
    policy = dataclasses.replace(policy, gradients=lambda: found)
    return policy.resolve(specs, tf.distribute.get_strategy(), one, 0, lambda method: False)


def gradients(training: Any) -> list[list[tf.Tensor]]:
    """Returns worker 0's gradients of some steps after some dense ones, and undoes these steps."""
    held = [*training.variables, *training.statistics, *training.optimizer.variables]
    before = [tf.identity(tf.convert_to_tensor(v)) for v in held]
    found = []
    for number in range(DENSE_STEPS + MEASURED_STEPS):
        _, of_workers, statistics = training.compute(*training.examples(number))
        if number >= DENSE_STEPS:
            found.append(list(of_workers[0]))
        totals = [tf.add_n(parts) for parts in zip(*of_workers, strict=True)]
        training.apply(totals, statistics)
    for variable, value in zip(held, before, strict=True):
        variable.assign(value)
    return found
