"""SIDCo."""

import dataclasses

import tf_redsync as rs
from tests.conformance.descriptor import Descriptor
from tests.oracle.sidco import SIDCoOracle
from tests.oracle.sparse import count
from tf_redsync.exchange.requests import AllGather


def payload(method, specs, step):
    """A flag; for each tensor a count, and capacity for twice the desired indices and values."""
    slots = [min(2 * count(method.density, s.size), s.size) for s in specs]
    return [4 * (1 + sum(1 + 2 * n for n in slots))]


def oracle(method, specs, workers):
    counts = [count(method.density, s.size) for s in specs]
    shapes = [s.shape for s in specs]
    return SIDCoOracle(shapes, workers, counts, method.distribution, method.adapt_every)


def _sidco(**options):
    method = rs.contrib.SIDCo(**options)
    full = dataclasses.replace(method, density=1.0)
    return Descriptor(method, full, True, (AllGather,), payload, oracle, steps=11)


# The gamma distribution continues with generalized Pareto; `test_sidco.py` tests each.
TABLE = {
    "sidco_exponential": _sidco(density=0.1, distribution="exponential", adapt_every=2),
    "sidco_gamma": _sidco(density=0.02, distribution="gamma"),
}
