"""SparDL."""

import math

import tf_redsync as rs
from tests.conformance.descriptor import Descriptor
from tests.oracle.spardl import SparDLOracle
from tests.oracle.sparse import count
from tf_redsync.exchange.requests import AllGather, AllToAll


def messages(method, specs, step):
    """Flag, count, indices and values: a row for every block, then one block."""

    def words(workers):
        k = count(method.density, math.ceil(sum(s.size for s in specs) / workers))
        return 2 + 2 * k

    return [lambda workers: 4 * workers * words(workers), lambda workers: 4 * words(workers)]


def oracle(method, specs, workers):
    return SparDLOracle([s.shape for s in specs], workers, method.density)


def _spardl(density):
    return Descriptor(
        rs.contrib.SparDL(density=density),
        rs.contrib.SparDL(density=1.0),
        requests=(AllToAll, AllGather),
        payload=messages,
        oracle=oracle,
        patience=5.0,  # the workers' elements share one message's capacity
    )


TABLE = {"spardl": _spardl(0.1), "spardl_sparse": _spardl(0.001)}
