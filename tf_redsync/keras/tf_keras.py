"""Adapter for tf_keras (Keras 2) optimizers.

Names of the inner *instance* used here: `aggregate_gradients(grads_and_vars)`, public, sums over
replicas; `_distributed_apply_gradients_fn(strategy, grads_and_vars)`, private, applies the sums.
"""

from __future__ import annotations

import copy
from typing import Any

import tensorflow as tf
import tf_keras

from tf_redsync.keras.seam import Seam


@tf_keras.saving.register_keras_serializable(package="tf_redsync", name="DistributedOptimizer")
class TfKerasOptimizer(tf_keras.optimizers.Optimizer):
    """A tf_keras optimizer whose gradients are exchanged by a tf_redsync method.

    Made by `tf_redsync.DistributedOptimizer`, which documents the arguments.

    Attributes:
        inner_optimizer: The wrapped optimizer.
        exchange: The `GradientExchange`; counters `step`, `skipped`, `bytes_sent`.
    """

    def __init__(self, inner_optimizer, method=None, *, name: str | None = None, **options):
        super().__init__(name=name or f"distributed_{inner_optimizer.name}", jit_compile=False)
        self.inner_optimizer = inner_optimizer
        self._options = dict(options)
        self._seam = Seam(inner_optimizer, method, **options)
        self.exchange = self._seam.exchange
        inner_optimizer.jit_compile = False  # the update shares a function with collectives
        inner_optimizer.aggregate_gradients = self._seam.aggregate
        inner_optimizer._distributed_apply_gradients_fn = self._seam.guarded(
            inner_optimizer._distributed_apply_gradients_fn,
            otherwise=lambda: inner_optimizer.iterations,
        )

    def build(self, var_list) -> None:
        """Create the inner optimizer's variables and the exchange's state."""
        self.inner_optimizer.build(var_list)
        self._seam.build(var_list)

    def apply_gradients(
        self, grads_and_vars, name=None, skip_gradients_aggregation=False, **kwargs
    ):
        """Exchange the gradients and update the variables; see Keras.

        Raises:
            ValueError: for `skip_gradients_aggregation=True`, since aggregation is what the
                wrapper is for.
        """
        if skip_gradients_aggregation or not kwargs.get("experimental_aggregate_gradients", True):
            raise ValueError(
                "`skip_gradients_aggregation=True` would skip the exchange. Apply aggregated "
                "gradients with `optimizer.inner_optimizer` of an unwrapped optimizer instead."
            )
        grads_and_vars = list(grads_and_vars)
        with tf.init_scope():
            self.build([v for _, v in grads_and_vars])
        return self.inner_optimizer.apply_gradients(grads_and_vars, name=name, **kwargs)

    @property
    def variables(self):
        """The inner optimizer's variables."""
        return self.inner_optimizer.variables

    @property
    def iterations(self):
        """The inner optimizer's step counter."""
        return self.inner_optimizer.iterations

    @iterations.setter
    def iterations(self, value):
        self.inner_optimizer.iterations = value

    @property
    def learning_rate(self):
        """The inner optimizer's learning rate."""
        return self.inner_optimizer.learning_rate

    @learning_rate.setter
    def learning_rate(self, value):
        self.inner_optimizer.learning_rate = value

    lr = learning_rate

    def finalize_variable_values(self, var_list) -> None:
        """Let the inner optimizer write its moving averages into the variables."""
        self.inner_optimizer.finalize_variable_values(var_list)

    def explain(self):
        """Return a table of what happens to every variable; see `GradientExchange.explain`."""
        return self.exchange.explain()

    def bytes_per_step(self) -> float:
        """Bytes this worker sends in a step; see `GradientExchange.bytes_per_step`."""
        return self.exchange.bytes_per_step()

    def get_config(self) -> dict[str, Any]:
        """Return the config: inner optimizer, policy, options."""
        return {
            "name": self.name,
            "inner_optimizer": tf_keras.saving.serialize_keras_object(self.inner_optimizer),
            "method": self._seam.policy.get_config(),
            **self._options,
        }

    @classmethod
    def from_config(cls, config, custom_objects=None):
        """Rebuild the optimizer from `get_config`'s result."""
        config = copy.deepcopy(config)  # some optimizers take theirs apart
        inner = tf_keras.saving.deserialize_keras_object(
            config.pop("inner_optimizer"), custom_objects=custom_objects
        )
        return cls(inner, config.pop("method"), **config)
