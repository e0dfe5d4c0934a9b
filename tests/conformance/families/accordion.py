"""Accordion."""

import dataclasses

import tf_redsync as rs
from tests.conformance.descriptor import Descriptor
from tests.oracle.accordion import AccordionOracle
from tests.oracle.sparse import count
from tf_redsync.exchange.requests import AllGather

NEVER = 1e9  # a relative change of the norm that never occurs

# For the first step of a training, which is in a critical regime.
CLAIMS = {"64 density; outside of critical regimes 64 low_density": lambda m: 64 * m.density}


def payload(method, specs, step):
    """A flag, then count, indices and values of each tensor; two intervals are always critical."""
    critical = step < 2 * method.interval
    assert critical or method.eta == NEVER, "the regime depends on the gradients"
    density = method.density if critical else method.low_density
    return [4 * (1 + sum(1 + 2 * count(density, s.size) for s in specs))]


def oracle(method, specs, workers):
    return AccordionOracle(
        [s.shape for s in specs], workers, method.density, method.low_density, method.eta,
        method.interval,
    )  # fmt: skip


def _accordion(**options):
    method = rs.contrib.Accordion(**options)
    full = dataclasses.replace(method, density=1.0, low_density=1.0)
    # Delivery is tested at density 0.05; a low density of 0.02 sends two fifths of that.
    return Descriptor(method, full, True, (AllGather,), payload, oracle, steps=20, patience=5.0)


TABLE = {
    "accordion": _accordion(density=0.1, low_density=0.02, interval=2),
    "accordion_calm": _accordion(density=0.3, low_density=0.05, eta=NEVER, interval=1),
}
