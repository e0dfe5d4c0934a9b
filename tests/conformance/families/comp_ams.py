"""COMP-AMS's exchange: top-k, or signs with a scale."""

import tf_redsync as rs
from tests.conformance.descriptor import Descriptor
from tests.oracle.signs import ScaledSignOracle
from tests.oracle.sparse import MemoryOracle, count, top_k_by_layer
from tf_redsync.exchange.requests import AllGather


def elements(method, specs, step):
    """A flag, then count, indices and values of each tensor."""
    return [4 * (1 + sum(1 + 2 * count(method.density, s.size) for s in specs))]


def signs(method, specs, step):
    """A flag; for each tensor a scale and one bit per element, in whole words."""
    return [4 * (1 + sum(1 + -(-s.size // 32) for s in specs))]


def top_k_oracle(method, specs, workers):
    return MemoryOracle([s.shape for s in specs], workers, top_k_by_layer(method.density))


def sign_oracle(method, specs, workers):
    return ScaledSignOracle([s.shape for s in specs], workers)


TABLE = {
    "comp_ams_top_k": Descriptor(
        rs.contrib.CompAMS(density=0.1), rs.contrib.CompAMS(density=1.0), True, (AllGather,),
        elements, top_k_oracle, steps=10,
    ),
    "comp_ams_block_sign": Descriptor(
        rs.contrib.CompAMS(compressor="block_sign"), None, True, (AllGather,), signs,
        sign_oracle, 1e-5, steps=10,
    ),
}  # fmt: skip
