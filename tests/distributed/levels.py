"""For tests of two levels: worker processes with one or two replicas, on logical CPUs."""

import functools

import numpy as np
import tensorflow as tf
from tensorflow.python.distribute import collective_all_reduce_strategy

import tf_redsync as rs
from tests.distributed import problems

HOSTS, REPLICAS, ROWS = 2, 2, 6


def start():
    """Split the CPU, before anything else; call it once."""
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration()] * REPLICAS
    )


@functools.cache
def strategy(replicas):
    """Our strategy with so many replicas in this process."""
    extended = collective_all_reduce_strategy.CollectiveAllReduceExtended
    kept = extended._initialize_local_devices

    def local_devices(self, resolver, worker_device):  # TensorFlow takes one CPU, or all GPUs
        return tuple(f"{worker_device}/device:CPU:{i}" for i in range(replicas)), "CPU"

    # Two strategies of one process must not number their groups alike, and share one server.
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
        replicas: Of this process. The batches of a host's replicas together are its batch.
        optimizer: Makes the optimizer.
        model: Makes the model.
    """

    def __init__(self, replicas, optimizer, model):
        self.strategy = strategy(replicas)
        with self.strategy.scope():
            self.model = model()
            self.optimizer = optimizer()
            self.optimizer.build(self.model.trainable_variables)
        self._step = tf.function(self._all_replicas)

    def step(self, x, y):
        """One step; returns this process's weights `[variable]`, the same on its replicas."""
        count = self.strategy.num_replicas_in_sync
        x, y = (a.reshape(count, -1, a.shape[-1]) for a in (x, y))
        values = self.strategy.experimental_distribute_values_from_function
        self._step(*(values(lambda c, a=a: a[c.replica_id_in_sync_group]) for a in (x, y)))
        return self.weights()

    def weights(self):
        """See `step`."""
        first, *others = (
            [np.asarray(v.value.values[i]) for v in self.model.trainable_variables]
            for i in range(len(self.strategy.extended.worker_devices))
        )
        for other in others:
            for a, b in zip(first, other, strict=True):
                assert a.tobytes() == b.tobytes(), "replicas have different weights"
        return first

    def _all_replicas(self, x, y):
        self.strategy.run(self._replica, args=(x, y))

    def _replica(self, x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self.model(x, training=True) - y) ** 2)
            loss = self.optimizer.scale_loss(loss / self.strategy.num_replicas_in_sync)
        variables = self.model.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
