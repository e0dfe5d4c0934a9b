"""Stages of densities, around methods that have tests of their own."""

import tf_redsync as rs
from tests.conformance.descriptor import Descriptor
from tests.oracle import sparse as sparse_oracle
from tf_redsync.exchange.requests import AllGather

STAGES = rs.DensityStages(begins=(0, 1, 2), densities=(0.5, 0.02, 0.1))


def payload(method, specs, step) -> list[int]:
    """A flag; for each tensor a count, indices and values, as many as in the stage."""
    density = (*STAGES.densities, *[STAGES.densities[-1]] * 50)[step]
    return [4 * (1 + sum(1 + 2 * sparse_oracle.count(density, s.size) for s in specs))]


def oracle(method, specs, workers):
    def choose(values, step):
        stage = min(step, len(STAGES.densities) - 1)
        return sparse_oracle.top_k_by_layer(STAGES.densities[stage])(values, step)

    return sparse_oracle.MemoryOracle([s.shape for s in specs], workers, choose)


TABLE = {
    "scheduled": Descriptor(
        rs.Scheduled(method=rs.TopK(dense_below=0), stages=STAGES),
        requests=(AllGather,),
        payload=payload,
        oracle=oracle,
    ),
}
