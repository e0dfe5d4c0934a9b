"""PowerSGD and ACP-SGD."""

import dataclasses

import numpy as np

import tf_redsync as rs
from tests.conformance.descriptor import Descriptor
from tests.oracle.low_rank import LowRankOracle
from tf_redsync.exchange.layout import BucketLayout
from tf_redsync.exchange.requests import AllReduce


def sides(method, specs):
    """Number of elements of all P and of all Q."""
    p = q = 0
    for spec in specs:
        n, m = sorted((int(np.prod(spec.shape[:-1])), spec.shape[-1]))
        r = min(method.rank, n, m)
        p, q = p + r * n, q + r * m
    return p, q


def power_payload(method, specs, step):
    return [4 * side for side in sides(method, specs)]


def acp_payload(method, specs, step):
    return [4 * sides(method, specs)[step % 2]]


def oracle(method, specs, workers):
    """Starts from the method's own random factors; everything else is numpy."""
    state = method.init(BucketLayout(specs, workers))
    factors = {name: [np.float64(f) for f in state.get(name, [])] for name in ("p", "q")}
    shapes = [s.shape for s in specs]
    return LowRankOracle(shapes, workers, factors["p"], factors["q"], isinstance(method, rs.ACPSGD))


def _low_rank(cls, requests, payload, rank):
    method = cls(rank=rank, min_compression_rate=0)
    # ACP-SGD's half steps are exact at full rank on one side only; see test_low_rank.py.
    full = None if cls is rs.ACPSGD else dataclasses.replace(method, rank=1000)
    return Descriptor(
        method, full, True, requests, payload, oracle, 1e-4, served_only=True, patience=None
    )


TABLE = {
    "power_sgd": _low_rank(rs.PowerSGD, (AllReduce, AllReduce), power_payload, 2),
    "power_sgd_rank_1": _low_rank(rs.PowerSGD, (AllReduce, AllReduce), power_payload, 1),
    "acp_sgd": _low_rank(rs.ACPSGD, (AllReduce,), acp_payload, 2),
}
