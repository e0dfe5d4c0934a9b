"""`gradient_accumulation_steps` of Keras 3: the exchange in the branch of the steps that update.

Keras updates, and clears its sums, in one branch of a conditional and adds to them in the other.
The number of the step decides, which is equal on all workers. Inside, TensorFlow lets no replicas
meet, as Keras does for every assignment. With one replica in a process there is nobody to meet.

Private names used here, on the *instance* of the inner optimizer: `_backend_update_step(grads,
variables, learning_rate)` sums over replicas and applies the sums, and
`_backend_increment_gradient_accumulators(grads, sums)` and `_backend_reset_gradient_accumulators()`
are the rest of the branches. Of `tf.distribute.ReplicaContext`: `_merge_call(function, args,
kwargs)`, what `merge_call` does for a single replica.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tf_redsync.keras.slots import tf_variable


def install(inner: Any, finish_step: Callable[[], None]) -> None:
    """Let an optimizer that accumulates gradients update in a branch.

    Args:
        inner: The optimizer that applies the sums over workers.
        finish_step: What comes after an update, in a replica context.
    """
    reset = inner._backend_reset_gradient_accumulators

    def update(grads: Sequence[Any], variables: Sequence[Any], learning_rate: Any) -> None:
        own = [tf_variable(v) for v in variables]
        totals = inner._all_reduce_sum_gradients(list(zip(grads, own, strict=True)))
        _alone(lambda strategy: inner._distributed_tf_update_step(strategy, totals, learning_rate))
        finish_step()

    def increment(grads: Sequence[Any], sums: Sequence[Any]) -> None:
        def add(strategy: tf.distribute.Strategy) -> None:
            for grad, total in zip(grads, sums, strict=True):
                variable = tf_variable(total)
                strategy.extended.update(variable, _add, args=(grad,), group=False)

        _alone(add)

    inner._backend_update_step = update
    inner._backend_increment_gradient_accumulators = increment
    inner._backend_reset_gradient_accumulators = lambda: _alone(lambda strategy: reset())


def _alone(function: Callable[[tf.distribute.Strategy], None]) -> None:
    """Call what needs a cross-replica context, as the only replica of this process."""
    context = tf.distribute.get_replica_context()
    tf.distribute.ReplicaContext._merge_call(context, function, (), {})


def _add(variable: tf.Variable, grad: Any) -> None:
    variable.assign(variable + grad)
