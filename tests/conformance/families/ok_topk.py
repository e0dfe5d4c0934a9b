"""Ok-Topk."""

import math

import tf_redsync as rs
from tests.conformance.descriptor import Descriptor
from tests.oracle.ok_topk import OkTopkOracle
from tests.oracle.sparse import count
from tf_redsync.exchange.requests import AllGather, AllToAll


def messages(method, specs, step):
    """Flag, boundary, count, indices and values: a row for every worker, then one for all."""
    size = sum(s.size for s in specs)

    def words(workers):
        slots = math.ceil(1.25 * count(method.density, size) / workers)
        return 3 + 2 * min(size, slots)

    return [lambda workers: 4 * workers * words(workers), lambda workers: 4 * words(workers)]


def oracle(method, specs, workers):
    every = (method.threshold_interval, method.partition_interval)
    return OkTopkOracle([s.shape for s in specs], workers, method.density, *every)


def _ok_topk(density, thresholds, partitions):
    return Descriptor(
        rs.contrib.OkTopk(
            density=density, threshold_interval=thresholds, partition_interval=partitions
        ),
        # Thresholds of an earlier step would delay smaller elements.
        rs.contrib.OkTopk(density=1.0, threshold_interval=1),
        requests=(AllToAll, AllGather),
        payload=messages,
        oracle=oracle,
        steps=10,
        patience=5.0,  # the workers' elements share one message's capacity
    )


TABLE = {"ok_topk": _ok_topk(0.1, 4, 3)}
