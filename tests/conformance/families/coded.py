"""Coded messages of sparsifiers: Golomb codes, halves, both, one mean, blocks."""

import numpy as np
import tensorflow as tf

import tf_redsync as rs
from tests.conformance.descriptor import Descriptor
from tests.oracle import sparse as sparse_oracle
from tests.oracle.coded import GolombLength, golomb_prefix
from tf_redsync import codings
from tf_redsync.exchange.requests import AllGather, AllToAll


def slots(method, specs):
    return [sparse_oracle.count(method.method.density, s.size) for s in specs]


def index_words(method, specs, k):
    """Words of the positions."""
    if isinstance(method.indices, codings.RawIndices):
        return len(k) + sum(k)
    return 2 + GolombLength([s.size for s in specs], k).words


def message(method, specs, step):
    """A flag, positions, and values."""
    k = slots(method, specs)
    per_value = 2 if isinstance(method.values, codings.Half) else 1
    return [4 * (1 + index_words(method, specs, k) + sum(-(-n // per_value) for n in k))]


def means(method, specs, step):
    """A flag, positions, and a mean for each tensor, values of the output layer."""
    k = slots(method, specs)
    values = sum(n if s.output_layer else 1 for n, s in zip(k, specs, strict=True))
    return [4 * (1 + index_words(method, specs, k) + values)]


def oracle(method, specs, workers):
    choose = sparse_oracle.top_k_by_layer(method.method.density)
    if isinstance(method.indices, codings.Golomb):
        choose = golomb_prefix(choose, [s.size for s in specs], slots(method, specs))
    rounded = {"rounded": lambda v: v}
    if isinstance(method.values, codings.Half):
        numbers = tf.as_dtype(method.values.dtype).as_numpy_dtype
        rounded = {"rounded": lambda v: v.astype(numbers).astype(np.float32)}
    return sparse_oracle.MemoryOracle([s.shape for s in specs], workers, choose, **rounded)


def blocks(method, specs, step):
    """A flag, count, bits, code and halves: a row for every block, then one block."""

    def words(workers):
        length = -(-sum(s.size for s in specs) // workers)
        k = sparse_oracle.count(method.method.density, length)
        return 1 + 2 + GolombLength([length], [k]).words + -(-k // 2)

    return [lambda workers: 4 * workers * words(workers), lambda workers: 4 * words(workers)]


def _coded(payload=message, oracle=oracle, requests=(AllGather,), **options):
    method = rs.Coded(**options)
    return Descriptor(method, requests=requests, payload=payload, oracle=oracle)


TABLE = {
    "coded_plain": _coded(
        method=rs.TopK(density=0.1), indices=codings.RawIndices(), values=codings.Float32()
    ),
    "coded_golomb": _coded(method=rs.TopK(density=0.1)),
    "coded_golomb_half": _coded(method=rs.TopK(density=0.03), values=codings.Half(dtype="float16")),
    "coded_redsync_quantized": _coded(
        means, None, method=rs.RedSync(density=0.1, quantized=True, selection="exact")
    ),
    "coded_redsync_momentum": _coded(
        message,
        None,
        method=rs.RedSync(density=0.1, momentum=0.9, selection="exact"),
        values=codings.Half(),
    ),
    "coded_spardl": _coded(
        blocks, None, (AllToAll, AllGather), method=rs.SparDL(density=0.1), values=codings.Half()
    ),
}
