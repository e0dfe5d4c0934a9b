"""The order in which TensorFlow numbers the members of a group, and back."""

import random

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.distribute import cross_device_utils

from tf_redsync.exchange import groups


class Strategy:
    """What `task_names` looks at."""

    def __init__(self, cluster):
        self.extended = self
        self._num_workers = sum(map(len, cluster.values()))
        self._cluster_spec = tf.train.ClusterSpec(cluster)


def cluster(chiefs, workers):
    ports = random.Random(workers).sample(range(2000, 3000), chiefs + workers)
    hosts = [f"host:{port}" for port in ports]
    jobs = {"worker": hosts[chiefs:], "chief": hosts[:chiefs], "evaluator": ["host:1"]}
    return {job: addresses for job, addresses in jobs.items() if addresses}


@pytest.mark.parametrize(("chiefs", "workers"), [(0, 2), (0, 10), (0, 11), (1, 10), (1, 11)])
def test_rows_are_put_into_the_order_of_ranks(chiefs, workers):
    spec = cluster(chiefs, workers)
    del spec["evaluator"]
    names = groups.task_names(Strategy(spec))
    jobs = [("chief", i) for i in range(chiefs)] + [("worker", i) for i in range(workers)]
    assert names == [f"/job:{job}/replica:0/task:{i}" for job, i in jobs]
    order = groups.Order(names)
    assert order.is_that_of_ranks == (workers <= 10)
    by_row = sorted(range(len(names)), key=lambda rank: names[rank])  # as TensorFlow has it
    rows = tf.constant([[rank] for rank in by_row])
    ranks = np.arange(len(names))[:, np.newaxis]
    np.testing.assert_array_equal(order.by_rank(rows), ranks)
    np.testing.assert_array_equal(order.for_tensorflow(tf.constant(ranks)), rows)


def test_nothing_is_done_to_rows_in_order():
    rows = tf.ones([3, 2])
    order = groups.Order(["a", "b", "c"])
    assert order.by_rank(rows) is rows and order.for_tensorflow(rows) is rows


def test_evaluators_are_not_workers():
    names = groups.task_names(Strategy(cluster(1, 2)))
    assert [name.split(":")[1].split("/")[0] for name in names] == ["chief", "worker", "worker"]


def test_devices_of_a_process_are_put_into_order():
    """As if TensorFlow had put them along their links."""
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    assert groups.gather_by_rank(strategy) is None  # nothing to put into order

    class Reversed:
        num_replicas_in_sync = 3

        def experimental_distribute_values_from_function(self, function):
            return function

        def gather(self, value, axis):
            return tf.constant([2, 0, 1])

    order = groups.order_of_devices(Reversed())
    assert order.by_rank(tf.constant([2, 0, 1])).numpy().tolist() == [0, 1, 2]


def launcher(group):
    keys = cross_device_utils.CollectiveKeys(group_key_start=group)
    keys.get_group_key(["CPU:0"])
    options = tf.distribute.experimental.CommunicationOptions()
    return cross_device_utils.CollectiveReplicaLauncher(group, 1, keys, "CPU:0", options)


def traced_keys(launchers, times=1, purpose=1, shape=(3,), name="step", loop=False):
    """Return the keys that collectives get when a function is traced."""
    found = []

    def launch():
        for one in launchers:
            with groups.keys_of(one).described("gather", tf.zeros(shape), purpose):
                found.append(one._next_instance_key())

    def step():
        for _ in range(times):
            if loop:
                tf.while_loop(lambda i: i < 3, lambda i: (launch(), i + 1)[1:], [tf.constant(0)])
            else:
                launch()

    step.__name__ = name
    tf.function(step, autograph=False).get_concrete_function()
    return found


def test_a_collective_keeps_its_key_however_often_it_is_traced():
    first, again = launcher(5), launcher(5)
    groups.keys_of(again)._new_key_each_call = None  # must not be asked
    for _ in range(3):
        traced_keys([first], name="evaluation", shape=(8,))
    assert traced_keys([first], times=2) == traced_keys([again], times=2)
    assert traced_keys([first], loop=True)[0] == traced_keys([again])[0]


def test_collectives_that_differ_have_different_keys():
    one, other_group = launcher(5), launcher(6)
    keys = [
        *traced_keys([one, other_group], times=3),
        *traced_keys([one], purpose=2),
        *traced_keys([one], shape=(4,)),
        *traced_keys([one], shape=(4, 1)),
        *traced_keys([one], name="another step"),
    ]
    assert len(set(keys)) == len(keys) == 10
    assert all(2**30 <= key < 2**31 for key in keys)  # TensorFlow counts up from 100


def test_a_collective_of_unknown_size_has_a_new_key_each_call():
    one = launcher(5)
    found = []

    @tf.function(input_signature=[tf.TensorSpec([None])])
    def step(value):
        with groups.keys_of(one).described("gather", value):
            found.append(one._next_instance_key())

    step.get_concrete_function()
    assert found[0].op.type == "Placeholder"
    assert one._next_instance_key().numpy() != one._next_instance_key().numpy()  # eagerly
