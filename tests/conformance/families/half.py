"""16-bit sums: of dense gradients, of a random block, of low-rank factors."""

import tf_redsync as rs
from tests.conformance.descriptor import Descriptor
from tests.conformance.families.low_rank import acp_payload, power_payload
from tests.conformance.families.sparse import values
from tests.oracle.half import HalfOracle
from tf_redsync.exchange.requests import AllGather, AllReduce, AllToAll


def dense(method, specs, step):
    return [sum(s.bytes for s in specs)]


def in_blocks(payload):
    """A flag and half of the bytes of `payload`, in blocks: to K workers, then to all."""

    def payload_in_blocks(method, specs, step):
        result = []
        for float32 in payload(method.method, specs, step):

            def block(workers, elements=float32 // 4):
                return 4 * (1 + -(-elements // (2 * workers)))

            result += [lambda workers, block=block: workers * block(workers), block]
        return result

    return payload_in_blocks


def half_of_dense(method, specs, step):
    return [sum(s.bytes for s in specs) // 2]


def oracle(method, specs, workers):
    return HalfOracle([s.shape for s in specs], workers, method.dtype)


def _half(dtype, inner=None, payload=dense, rounds=1, **options):
    return Descriptor(
        rs.HalfPrecision(method=inner, dtype=dtype),
        requests=(AllToAll, AllGather) * rounds,
        payload=in_blocks(payload),
        oracle=None if inner else oracle,
        steps=15,
        **options,
    )


TABLE = {
    "half_float16": _half("float16"),
    "half_bfloat16": _half("bfloat16"),
    "half_no_feedback": Descriptor(
        rs.HalfPrecision(dtype="bfloat16", error_feedback=False),
        requests=(AllReduce,),
        payload=half_of_dense,
    ),
    "half_random_block": _half("float16", rs.RandomBlock(density=0.2), values),
    "half_power_sgd": _half(
        "float16", rs.PowerSGD(rank=2, min_compression_rate=0), power_payload, 2, served_only=True
    ),
    "half_acp_sgd": _half(
        "bfloat16", rs.ACPSGD(rank=2, min_compression_rate=0), acp_payload, served_only=True
    ),
}
