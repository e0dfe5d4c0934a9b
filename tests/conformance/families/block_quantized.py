"""Integers with a scale per block: dense sums, sums of factors or of a block, selected values."""

import tf_redsync as rs
from tests.conformance.descriptor import Descriptor
from tests.conformance.families.low_rank import acp_payload, power_payload
from tests.conformance.families.sparse import RANDOM, values
from tests.oracle import sparse as sparse_oracle
from tests.oracle.block_quantization import BlockOracle
from tf_redsync.exchange.requests import AllGather, AllToAll

# For the two workers of the test.
CLAIMS = {
    "(bits + 16 / block) (1 + 1 / K); K = 2: bits + 16 / block": lambda m: m.bits + 16 / m.block
}


def row_bytes(elements, bits, block):
    """A flag, two scales in a word, codes of a multiple of 32 elements."""
    elements = -(-elements // 32) * 32
    return 4 * (1 + -(-elements // (2 * block)) + elements * bits // 32)


def dense(method, specs, step):
    return [sum(s.bytes for s in specs)]


def in_blocks(payload, finer):
    """The elements of `payload`: to all workers if there are two, else in parts.

    The first `finer` sums have twice the bits, at most 8.
    """

    def payload_in_blocks(method, specs, step):
        def for_workers(workers):
            result = []
            for number, float32 in enumerate(payload(method.method, specs, step)):
                parts = 1 if workers <= 2 else workers
                bits = min(8, 2 * method.bits) if number < finer else method.bits
                size = row_bytes(-(-(float32 // 4) // parts), bits, method.block)
                result += [size] if parts == 1 else [workers * size, size]
            return result

        return for_workers

    return payload_in_blocks


def selected_message(method, specs, step):
    """A flag; a count and indices for each tensor; the values of all tensors as one row."""
    counts = [sparse_oracle.count(method.method.density, s.size) for s in specs]
    words = 1 + sum(1 + k for k in counts) - 1
    return [4 * words + row_bytes(sum(counts), method.bits, method.block)]


def oracle(method, specs, workers):
    return BlockOracle([s.shape for s in specs], workers, method.bits, method.block)


def _blocks(bits, inner=None, payload=dense, rounds=1, block=32, finer=0, **options):
    return Descriptor(
        rs.BlockQuantized(method=inner, bits=bits, block=block),
        requests=lambda workers: ((AllGather,) if workers <= 2 else (AllToAll, AllGather)) * rounds,
        payload=in_blocks(payload, finer),
        **options,
    )


TABLE = {
    "blocks_of_8_bits": _blocks(8, oracle=oracle, tolerance=1e-5, steps=15, traces=False),
    "blocks_of_4_bits": _blocks(
        4, rs.Dense(), block=64, oracle=oracle, tolerance=1e-5, steps=15, traces=False
    ),
    "blocks_of_2_bits": _blocks(2, patience=None),
    "blocks_random_block": _blocks(4, rs.RandomBlock(density=0.2), values, patience=RANDOM),
    "blocks_power_sgd": _blocks(
        4,
        rs.PowerSGD(rank=2, min_compression_rate=0),
        power_payload,
        2,
        finer=1,
        served_only=True,
        patience=None,
    ),
    "blocks_acp_sgd": _blocks(
        8,
        rs.ACPSGD(rank=2, min_compression_rate=0),
        acp_payload,
        served_only=True,
        patience=None,
    ),
    "blocks_top_k": Descriptor(
        rs.BlockQuantized(method=rs.TopK(density=0.1), bits=4, block=32),
        requests=(AllGather,),
        payload=selected_message,
    ),
    "blocks_redsync": Descriptor(
        rs.BlockQuantized(
            method=rs.RedSync(density=0.05, momentum=0.9, selection="trimmed", dense_below=0),
            bits=8,
            block=32,
        ),
        requests=(AllGather,),
        payload=selected_message,
    ),
}
