"""16 bits: sums of dense gradients, of a random block, of low-rank factors; selected values."""

import tensorflow as tf

import tf_redsync as rs
from tests.conformance.descriptor import Descriptor
from tests.conformance.families.low_rank import acp_payload, power_payload
from tests.conformance.families.sparse import RANDOM, values
from tests.oracle import sparse as sparse_oracle
from tests.oracle.half import HalfOracle
from tf_redsync.exchange.requests import AllGather, AllReduce, AllToAll


def dense(method, specs, step):
    return [sum(s.bytes for s in specs)]


def in_blocks(payload):
    """A flag and half the bytes of `payload`, in blocks: to K workers, then to all."""

    def payload_in_blocks(method, specs, step):
        result = []
        for float32 in payload(method.method, specs, step):

            def block(workers, elements=float32 // 4):
                return 4 * (1 + -(-elements // (2 * workers)))

            result += [lambda workers, block=block: workers * block(workers), block]
        return result

    return payload_in_blocks


def half_message(method, specs, step):
    """A flag; for each tensor a count, indices, and values, two of them per word."""
    counts = [sparse_oracle.count(method.method.density, s.size) for s in specs]
    return [4 * (1 + sum(1 + k + -(-k // 2) for k in counts))]


def selected_oracle(method, specs, workers):
    """Top-k with memory and rounded values; the rounding error stays in the residual."""
    choose = sparse_oracle.top_k_by_layer(method.method.density)
    numbers = tf.as_dtype(method.dtype).as_numpy_dtype
    shapes = [s.shape for s in specs]
    return sparse_oracle.MemoryOracle(shapes, workers, choose, lambda v: v.astype(numbers))


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
        traces=False,
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
    "half_random_block": _half("float16", rs.RandomBlock(density=0.2), values, patience=RANDOM),
    "half_power_sgd": _half(
        "float16",
        rs.PowerSGD(rank=2, min_compression_rate=0),
        power_payload,
        2,
        served_only=True,
        patience=None,
    ),
    "half_acp_sgd": _half(
        "bfloat16",
        rs.ACPSGD(rank=2, min_compression_rate=0),
        acp_payload,
        served_only=True,
        patience=None,
    ),
    "half_top_k": Descriptor(
        rs.HalfPrecision(method=rs.TopK(density=0.1), dtype="float16"),
        requests=(AllGather,),
        payload=half_message,
        oracle=selected_oracle,
    ),
    "half_redsync": Descriptor(
        rs.HalfPrecision(
            method=rs.RedSync(density=0.05, momentum=0.9, selection="trimmed", dense_below=0),
            dtype="bfloat16",
        ),
        requests=(AllGather,),
        payload=half_message,
    ),
}
