"""GMC and GMC+ in the paper's units; `test_gmc.py` compares bits."""

import dataclasses

import tf_redsync as rs
from tests.conformance.descriptor import Descriptor
from tests.conformance.families.sparse import RANDOM, block_of
from tests.oracle.gmc import GMCOracle
from tests.oracle.sparse import count, top_k_by_layer
from tf_redsync.exchange.requests import AllGather, AllReduce


def message(method, specs, step):
    """A flag, then count, indices and values of each tensor."""
    return [4 * (1 + sum(1 + 2 * count(method.density, s.size) for s in specs))]


def values(method, specs, step):
    """A block of each tensor: all workers know its position."""
    return [4 * sum(count(method.density, s.size) for s in specs)]


def oracle(method, specs, workers):
    blocks = method.selection == "random_block"
    choose = block_of(method, specs) if blocks else top_k_by_layer(method.density)
    return GMCOracle([s.shape for s in specs], workers, choose, method.momentum, rate=2.0**-5)


def _gmc(method, requests, payload):
    full = dataclasses.replace(method, density=1.0)
    patience = RANDOM if method.selection == "random_block" else 6.0  # momentum is sent repeatedly
    forms = {"tolerance": 1e-5, "steps": 20, "patience": patience}
    return Descriptor(method, full, True, requests, payload, oracle, **forms)


TABLE = {
    "gmc": _gmc(rs.GMC(density=0.1), (AllGather,), message),
    "gmc_block": _gmc(rs.GMC(density=0.3, selection="random_block"), (AllReduce,), values),
    "gmc_plus": _gmc(rs.contrib.GMCPlus(density=0.1, momentum=0.0), (AllGather,), message),
}
