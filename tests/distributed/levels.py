"""Helpers for tests of two levels: processes with one or two replicas on logical CPUs."""

import functools

import numpy as np
import tensorflow as tf
from tensorflow.python.distribute import collective_all_reduce_strategy

import tf_redsync as rs
from tests.distributed import problems

HOSTS, REPLICAS, ROWS = 2, 2, 6


def start():
    """Split the CPU into logical devices; call it once, before TensorFlow initializes."""
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration()] * REPLICAS
    )


@functools.cache
def strategy(replicas):
    """The library's strategy with `replicas` replicas in this process."""
    extended = collective_all_reduce_strategy.CollectiveAllReduceExtended
    kept = extended._initialize_local_devices

    def local_devices(self, resolver, worker_device):  # TensorFlow takes one CPU or all GPUs
        return tuple(f"{worker_device}/device:CPU:{i}" for i in range(replicas)), "CPU"

    # Two strategies of one process need different group keys, because they share a server.
    numbered = type(
        "Numbered", (rs.MultiWorkerMirroredStrategy,), {"_collective_key_base": 1000 * replicas}
    )
    extended._initialize_local_devices = local_devices
    try:
        made = numbered(tf.distribute.cluster_resolver.TFConfigClusterResolver())
    finally:
        extended._initialize_local_devices = kept
    extended._std_server_started = True
    return made


def batches(steps):
    """Inputs `[steps, replicas of all hosts, rows, 12]` and targets, the same on all workers."""
    x, y = problems.regression(steps * HOSTS * REPLICAS * ROWS)
    shape = (steps, HOSTS * REPLICAS, ROWS, -1)
    return x.reshape(shape), y.reshape(shape)


class Training:
    """One model and its optimizer in a custom loop.

    Args:
        replicas: Number of replicas of this process. Together they process the host's batch.
        optimizer: Returns the optimizer.
        keras: Keras 3 or tf_keras.
    """

    def __init__(self, replicas, optimizer, keras):
        self.strategy = strategy(replicas)
        with self.strategy.scope():
            self.model = problems.network(keras)
            self.optimizer = optimizer()
            self.optimizer.build(self.model.trainable_variables)
        self._step = tf.function(self._all_replicas)

    def step(self, x, y):
        """One step on `[replicas of all hosts, rows, columns]`; returns `weights`."""
        count = self.strategy.num_replicas_in_sync
        x, y = (a.reshape(count, -1, a.shape[-1]) for a in (x, y))
        values = self.strategy.experimental_distribute_values_from_function
        self._step(*(values(lambda c, a=a: a[c.replica_id_in_sync_group]) for a in (x, y)))
        return weights(self.strategy, self.model)

    def train(self, x, y):
        """Runs all steps of `batches`; returns the weights after each, `[steps, elements]`."""
        return np.stack([self.step(*pair) for pair in zip(x, y, strict=True)])

    def _all_replicas(self, x, y):
        self.strategy.run(self._replica, args=(x, y))

    def _replica(self, x, y):
        with tf.GradientTape() as tape:
            outputs = tf.cast(self.model(x, training=True), tf.float32)
            loss = tf.reduce_mean((outputs - y) ** 2) / self.strategy.num_replicas_in_sync
            scale = getattr(self.optimizer, "scale_loss", lambda loss: loss)
            loss = scale(loss)
        variables = self.model.trainable_variables
        grads = tape.gradient(loss, variables)
        self.optimizer.apply_gradients(zip(grads, variables, strict=True))


def weights(strategy, model):
    """All weights as one vector; fails if this process's replicas differ in any bit."""
    first, *others = (
        np.concatenate([np.ravel(_local(strategy, w)[i]) for w in model.weights])
        for i in range(len(strategy.extended.worker_devices))
    )
    assert all(other.tobytes() == first.tobytes() for other in others), "replicas differ"
    return first


def _local(strategy, variable):
    """The per-replica copies of a variable of Keras 3 or tf_keras."""
    variable = variable if isinstance(variable, tf.Variable) else variable.value
    return [copy.numpy() for copy in strategy.experimental_local_results(variable)]
