"""Dense and NoExchange."""

import tf_redsync as rs
from tests.conformance.descriptor import Descriptor

TABLE = {
    "dense": Descriptor(rs.Dense(), rs.Dense()),
    "dense_momentum": Descriptor(rs.Dense(momentum=0.9), rs.Dense(momentum=0.9)),
    "dense_nesterov": Descriptor(
        rs.Dense(momentum=0.9, nesterov=True), rs.Dense(momentum=0.9, nesterov=True)
    ),
    "no_exchange": Descriptor(
        rs.NoExchange(), agrees=False, requests=(), payload=lambda method, specs, step: []
    ),
}
