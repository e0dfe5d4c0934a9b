"""Initial values that the chief broadcasts, and those that each worker creates locally."""

import pytest

from tests.distributed.cluster import run_workers

pytestmark = pytest.mark.distributed


def created():
    """Values of variables whose initial value is the worker's rank, or zeros of the state."""
    import json
    import os

    import keras
    import tensorflow as tf

    import tf_redsync as rs
    from tf_redsync.network import initial_values
    from tf_redsync.step.state_variables import replica_variable

    rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    strategy = rs.MultiWorkerMirroredStrategy()
    sent = []  # number of elements of each broadcast
    for name in ("broadcast_send", "broadcast_recv"):
        count_elements(name, sent)

    def value(dtype):
        return tf.fill([1000], tf.constant(rank + 1, dtype))

    with strategy.scope():
        found = {"mirrored": tf.Variable(value(tf.float32))}
        found |= {kind: replica_variable(value(tf.float32), kind, kind) for kind in ("sum", "mean")}
        found["shared"] = replica_variable(value(tf.bfloat16), "shared", "shared")
        found["complex"] = tf.Variable(1j * value(tf.complex64))
        del sent[:]
        initial_values._MOST = 1200  # bytes
        found["sliced"] = tf.Variable(tf.reshape(value(tf.float32), [100, 10]))
        slices = " ".join(map(str, sent))
        initial_values._MOST = 2**30
        with initial_values.own():
            found["own"] = tf.Variable(value(tf.bfloat16))
        keras.Variable(tf.zeros([0]))
        found = {n: strategy.experimental_local_results(v)[0] for n, v in found.items()}
        found = {name: int(abs(v.numpy().flat[-1])) for name, v in found.items()}
        found["slices"] = slices
        found["broadcasts of no element"] = sent.count(0)  # may crash TensorFlow
        # One tensor with a residual, one exchanged densely with a shared velocity.
        weights = [keras.Variable(tf.zeros([300, 300])), keras.Variable(tf.zeros([30]))]
        for method in (rs.RedSync(momentum=0.9), rs.GMC()):
            optimizer = rs.DistributedOptimizer(keras.optimizers.SGD(0.1), method)
            del sent[:]
            optimizer.build(weights)
            found[type(method).__name__] = max(sent)
        for family in ("keras", "tf_keras", "legacy"):
            variable = keras.Variable if family == "keras" else tf.Variable
            weights = [variable(tf.zeros([300, 300])), variable(tf.zeros([30]))]
            optimizer = rs.DistributedOptimizer(inner(family), rs.CodedTopK())
            del sent[:]
            optimizer.build(weights)
            found[family] = max(sent, default=0)
    return found


def large():
    """Broadcasts of large values, and the values: equal ones, different ones, equal ones again."""
    import json
    import os

    import numpy as np
    import tensorflow as tf

    import tf_redsync as rs

    rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    strategy, sent, values = rs.MultiWorkerMirroredStrategy(), [], []
    for name in ("broadcast_send", "broadcast_recv"):
        count_elements(name, sent)
    shape = [512, 512]  # a MiB of float32
    same = np.random.RandomState(0).normal(size=shape)
    other = np.where(np.arange(512) < 511, same, same + rank)

    def drawn(dtype):
        return lambda: tf.constant(same, dtype)

    with strategy.scope():
        for value in (drawn(tf.float32), drawn(tf.float64), other.astype("f"), drawn("float32")):
            values.append(tf.Variable(value))
    parts = [strategy.experimental_local_results(v)[0].numpy() for v in values]
    equal = [bool(np.all(part == same.astype(part.dtype))) for part in parts]
    return {"sent": sent, "equal": equal}


def test_large_values_are_broadcast_only_if_they_differ():
    """The last value is equal again, but after a difference values are no longer compared."""
    for found in run_workers(large):
        assert list(found["sent"]) == [512 * 512, 512 * 512]
        assert list(found["equal"]) == [True] * 4


def inner(family):
    """An optimizer whose slots start at zero, and one slot that starts at one."""
    import importlib

    optimizers = importlib.import_module("tf_keras" if family == "legacy" else family).optimizers
    if family == "legacy":
        return optimizers.legacy.Adam()
    if family == "tf_keras":
        return optimizers.Adam()

    class WithOnes(optimizers.Adam):
        def build(self, variables):
            super().build(variables)
            self.ones = [self.add_variable([7], initializer="ones")]

    return WithOnes()


def count_elements(name, sent):
    """Record the number of elements of each broadcast of one kind."""
    import math

    from tensorflow.python.ops import collective_ops

    original = getattr(collective_ops, name)

    def counted(*args, **kwargs):
        sent.append(math.prod(args[1 if name == "broadcast_send" else 0]))
        return original(*args, **kwargs)

    setattr(collective_ops, name, counted)


def test_zero_state_is_not_broadcast():
    """Residuals, velocities and slots start at zero, so no broadcast is needed."""
    first, second = run_workers(created)
    sent = {"RedSync": 1, "GMC": 1, "tf_keras": 1, "legacy": 1}  # scalars
    sent |= {"keras": 7}  # the slot of ones
    sent |= {"broadcasts of no element": 0, "slices": "300 300 300 100"}
    equal = dict.fromkeys(("mirrored", "shared", "complex", "sliced"), 1)
    assert first == {**equal, "sum": 1, "mean": 1, "own": 1, **sent}
    assert second == {**equal, "sum": 2, "mean": 2, "own": 2, **sent}
