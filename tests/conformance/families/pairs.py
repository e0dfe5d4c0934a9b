"""gTop-k and SparCML: rounds between pairs of workers."""

import math

import tf_redsync as rs
from tests.conformance.descriptor import Descriptor
from tests.oracle.sparse import count
from tests.oracle.trees import GTopKOracle, SparCMLOracle
from tf_redsync.exchange.requests import PairGather


def rounds(workers):
    """Number of rounds: 1 for one worker; two more if the number is no power of two."""
    whole = int(math.log2(workers))
    return max(1, whole if workers == 2**whole else whole + 2)


def k_elements(method, specs, step):
    """Flag, count, k indices and values in every round."""
    k = count(method.density, sum(s.size for s in specs))
    return lambda workers: [4 * (2 + 2 * k)] * rounds(workers)


def union(method, specs, step):
    """Capacity for twice as many elements in each round, or all values if that is shorter."""
    sizes = [s.size for s in specs]
    k = [count(method.density, n) for n in sizes]

    def words(number):
        sparse = sum(1 + 2 * min(2**number * ki, n) for ki, n in zip(k, sizes, strict=True))
        return 1 + min(sparse, sum(sizes))

    return lambda workers: [4 * words(i) for i in range(rounds(workers))]


def _oracle(cls):
    return lambda method, specs, workers: cls([s.shape for s in specs], workers, method.density)


def _pairs(cls, density, payload, oracle):
    return Descriptor(
        cls(density=density),
        cls(density=1.0),
        requests=lambda workers: (PairGather,) * rounds(workers),
        payload=payload,
        oracle=_oracle(oracle),
        steps=10,
        patience=PATIENCE[cls],
    )


# With GTopK, the workers' elements share one message's capacity.
PATIENCE = {rs.contrib.GTopK: 5.0, rs.contrib.SparCML: 2.0}

TABLE = {
    "gtopk": _pairs(rs.contrib.GTopK, 0.05, k_elements, GTopKOracle),
    # Sparse in two rounds, then dense.
    "sparcml": _pairs(rs.contrib.SparCML, 0.2, union, SparCMLOracle),
}
