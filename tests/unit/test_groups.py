"""TensorFlow's order of group members versus the order of ranks."""

import random

import numpy as np
import pytest
import tensorflow as tf

from tf_redsync.network import groups


class Strategy:
    """Has what `task_names` reads."""

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
def test_rows_are_reordered_by_rank(chiefs, workers):
    spec = cluster(chiefs, workers)
    del spec["evaluator"]
    names = groups.task_names(Strategy(spec))
    jobs = [("chief", i) for i in range(chiefs)] + [("worker", i) for i in range(workers)]
    assert names == [f"/job:{job}/replica:0/task:{i}" for job, i in jobs]
    order = groups.Order(names)
    assert order.is_that_of_ranks == (workers <= 10)
    by_row = sorted(range(len(names)), key=lambda rank: names[rank])  # TensorFlow's order
    rows = tf.constant([[rank] for rank in by_row])
    ranks = np.arange(len(names))[:, np.newaxis]
    np.testing.assert_array_equal(order.by_rank(rows), ranks)
    np.testing.assert_array_equal(order.for_tensorflow(tf.constant(ranks)), rows)


def test_ordered_rows_are_unchanged():
    rows = tf.ones([3, 2])
    order = groups.Order(["a", "b", "c"])
    assert order.by_rank(rows) is rows and order.for_tensorflow(rows) is rows


def test_evaluators_are_not_workers():
    names = groups.task_names(Strategy(cluster(1, 2)))
    assert [name.split(":")[1].split("/")[0] for name in names] == ["chief", "worker", "worker"]


def test_devices_of_a_process_are_reordered():
    """As if TensorFlow had ordered them by their links."""
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    assert groups.gather_by_rank(strategy) is None  # already in order

    class Reversed:
        num_replicas_in_sync = 3

        def experimental_distribute_values_from_function(self, function):
            return function

        def gather(self, value, axis):
            return tf.constant([2, 0, 1])

    order = groups.order_of_devices(Reversed())
    assert order.by_rank(tf.constant([2, 0, 1])).numpy().tolist() == [0, 1, 2]
