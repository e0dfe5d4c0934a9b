"""EF21."""

import tf_redsync as rs
from tests.conformance.descriptor import Descriptor
from tests.oracle.ef21 import EF21Oracle
from tests.oracle.sparse import count
from tf_redsync.exchange.requests import AllGather


def payload(method, specs, step):
    """A flag, then count, indices and values of each tensor."""
    return [4 * (1 + sum(1 + 2 * count(method.density, s.size) for s in specs))]


def oracle(method, specs, workers):
    return EF21Oracle([s.shape for s in specs], workers, method.density)


def _ef21(full=None, tolerance=0.0, **options):
    requests = (AllGather,)
    return Descriptor(rs.contrib.EF21(**options), full, True, requests, payload, oracle, tolerance)


TABLE = {
    "ef21": _ef21(density=0.1),
    # Estimates approach a gradient with two roundings; a difference to an earlier one has one.
    "ef21_full": _ef21(full=rs.contrib.EF21(density=1.0), tolerance=1e-5, density=0.3),
}
