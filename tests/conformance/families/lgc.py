"""LGC's third stage with a small autoencoder; `tests/unit/test_lgc.py` tests the second stage."""

import tf_redsync as rs
from tests.conformance.descriptor import Descriptor
from tests.oracle.lgc import LGCOracle, Network
from tests.oracle.sparse import count
from tf_redsync import codings
from tf_redsync.exchange.requests import AllGather, AllReduce

SMALL = {"channels": (4, 6), "decoder_channels": (5, 3), "code_channels": 2}
STRIDE = 4


def selected(method, specs) -> int:
    """Positions that the leader selects."""
    return sum(count(method.density, s.size) for s in specs)


def code_size(method, specs) -> int:
    return -(-selected(method, specs) // STRIDE) * SMALL["code_channels"]


def raw_words(method, specs) -> int:
    """A count for each tensor, then positions."""
    return len(specs) + selected(method, specs)


def broadcast(words) -> int:
    """Three words hold four numbers of 24 bits."""
    return 4 * 4 * -(-words // 3)


def ring_payload(method, specs, step):
    """Positions; codes and a scale; shares."""
    code = code_size(method, specs)
    return [broadcast(raw_words(method, specs)), 4 * (code + 1), 4]


def server_payload(method, specs, step):
    """Positions and a code; then a flag, a share, and values and positions of an innovation."""
    words = raw_words(method, specs) + code_size(method, specs)
    return [broadcast(words), 4 * (2 + 2 * innovation(method, specs))]


def innovation(method, specs) -> int:
    return count(method.innovation, sum(s.size for s in specs))


def oracle(method, specs, workers):
    """Starts from the method's own initial parameters; everything else is numpy."""
    parameters = method.autoencoder.initial(method.seed).numpy()
    server = method.variant == "server"
    network = Network(parameters, *SMALL.values(), server)
    size = innovation(method, specs) if server else None
    return LGCOracle([s.shape for s in specs], workers, network, method.density, size)


def _lgc(requests, payload, **options):
    method = rs.contrib.LGC(
        density=0.1, dense_ends=False, indices=codings.RawIndices(), **SMALL, **options
    )
    return Descriptor(method, None, True, requests, payload, oracle, 1e-4, steps=4, patience=None)


TABLE = {
    "lgc_ring": _lgc((AllReduce, AllReduce, AllReduce), ring_payload),
    "lgc_server": _lgc(
        (AllReduce, AllGather),
        server_payload,
        variant="server",
        innovation=0.01,
    ),
}
