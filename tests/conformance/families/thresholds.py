"""Fixed thresholds: with values, and Strom's signs."""

import tf_redsync as rs
from tests.conformance.descriptor import Descriptor
from tests.oracle.sparse import count
from tests.oracle.thresholds import ThresholdOracle
from tf_redsync.exchange.requests import AllGather


def payload(method, specs, step):
    """A flag, then for each tensor a count, and for each element one word (Strom) or two."""
    words = 1 if isinstance(method, rs.contrib.Strom) else 2
    return [4 * (1 + sum(1 + words * count(method.density, s.size) for s in specs))]


def oracle(method, specs, workers):
    capacities = [count(method.density, s.size) for s in specs]
    signs = isinstance(method, rs.contrib.Strom)
    return ThresholdOracle([s.shape for s in specs], workers, method.threshold, capacities, signs)


def _threshold(method, full=None):
    return Descriptor(method, full, True, (AllGather,), payload, oracle)


TABLE = {
    "fixed_threshold": _threshold(
        rs.contrib.FixedThreshold(threshold=1.5, density=0.2),
        rs.contrib.FixedThreshold(threshold=0.0, density=1.0),
    ),
    "strom": _threshold(rs.contrib.Strom(threshold=0.7, density=0.3)),
}
