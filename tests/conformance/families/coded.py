"""Coded messages of sparsifiers: every coding of positions and of values, one mean, blocks."""

import numpy as np
import tensorflow as tf

import tf_redsync as rs
from tests.conformance.descriptor import Descriptor
from tests.oracle import deep_reduce
from tests.oracle import sparse as sparse_oracle
from tests.oracle.codings import code_of
from tf_redsync import codings
from tf_redsync.exchange.requests import AllGather, AllToAll
from tf_redsync.methods.common.random_numbers import stream


def slots(method, specs):
    return [sparse_oracle.count(method.method.density, s.size) for s in specs]


def filters(method, specs):
    rate, counts = method.indices.false_positive_rate, slots(method, specs)
    return [deep_reduce.BloomFilter(s.size, k, rate) for s, k in zip(specs, counts, strict=True)]


def index_words(method, sizes, k):
    """Words of the positions, and slots for values of each tensor."""
    if isinstance(method.indices, rs.contrib.codings.Bloom):
        blooms = [deep_reduce.BloomFilter(n, m, None) for n, m in zip(sizes, k, strict=True)]
        words = sum(b.words for b in blooms)
        if method.indices.policy == "p0":
            return words, [b.positives_capacity for b in blooms]
        return len(k) + words, k
    return code_of(type(method.indices).__name__, sizes, k).words, k


def value_words(method, k):
    """Words of the given number of values of each tensor."""
    coding = method.values
    if isinstance(coding, rs.contrib.codings.QSGDValues):
        return deep_reduce.qsgd_words(k, coding.levels, coding.bucket_size)
    return {
        "Float32": sum(k),
        "Half": sum(-(-n // 2) for n in k),
        "PolynomialFit": sum(deep_reduce.polynomial_words(n, 0) for n in k),
        "DoubleExponentialFit": sum(deep_reduce.exponential_words(n, 0) for n in k),
    }[type(coding).__name__]


def message(method, specs, step):
    """A flag, positions, and values."""
    words, k = index_words(method, [s.size for s in specs], slots(method, specs))
    return [4 * (1 + words + value_words(method, k))]


def means(method, specs, step):
    """A flag, positions, and a mean for each tensor, values of the output layer."""
    words, k = index_words(method, [s.size for s in specs], slots(method, specs))
    own = [n for n, s in zip(k, specs, strict=True) if s.output_layer]
    return [4 * (1 + words + len(k) - len(own) + value_words(method, own))]


def blocks(method, specs, step):
    """A flag, positions and values of a block: a row for every block, then one block."""

    def words(workers):
        length = -(-sum(s.size for s in specs) // workers)
        k = sparse_oracle.count(method.method.density, length)
        positions, received = index_words(method, [length], [k])
        return 1 + positions + value_words(method, received)

    return [lambda workers: 4 * workers * words(workers), lambda workers: 4 * words(workers)]


def with_false_positives(choose, method, specs):
    """The filter's positives for chosen positions; `choose` as in `MemoryOracle`."""
    blooms = filters(method, specs)

    def positives(values, step):
        seeds = stream(method.seed, tf.constant(step, tf.int64), specs[0].position).numpy()
        seed = int(seeds.sum(dtype=np.int32))
        chosen = zip(blooms, choose(values, step), strict=True)
        return [np.int64(b.positives(b.build(np.int64(at), seed), seed)) for b, at in chosen]

    return positives


def oracle(method, specs, workers):
    choose = sparse_oracle.top_k_by_layer(method.method.density)
    if isinstance(method.indices, rs.contrib.codings.Bloom):
        choose = with_false_positives(choose, method, specs)
    rounded = {"rounded": lambda v: v}
    if isinstance(method.values, codings.Half):
        numbers = tf.as_dtype(method.values.dtype).as_numpy_dtype
        rounded = {"rounded": lambda v: v.astype(numbers).astype(np.float32)}
    return sparse_oracle.MemoryOracle([s.shape for s in specs], workers, choose, **rounded)


def _coded(indices=None, values=None, *, inside=None, form=message, exact=True, **options):
    chosen = {"indices": indices, "values": values, "method": inside or rs.TopK(density=0.1)}
    method = rs.Coded(**{name: c for name, c in chosen.items() if c is not None})
    forms = {"requests": (AllGather,), "payload": form, "oracle": oracle if exact else None}
    return Descriptor(method, **{**forms, **options})


# Two tensors, or only the largest, since eager steps are slow. `tests/unit` tests small ones.
FEW, ONE = {"dense_below": 3000}, {"dense_below": 5000}
TABLE = {
    "coded": _coded(),
    "coded_raw": _coded(codings.RawIndices(), codings.Float32()),
    "coded_golomb_half": _coded(
        codings.Golomb(), codings.Half(dtype="float16"), inside=rs.TopK(density=0.03)
    ),
    "coded_huffman": _coded(
        codings.Huffman(), inside=rs.TopK(density=0.05, **FEW), served_only=True, steps=2
    ),
    "coded_bloom": _coded(
        rs.contrib.codings.Bloom(), inside=rs.TopK(density=0.05, **FEW), served_only=True, steps=2
    ),
    "coded_bitmap_polynomial": _coded(
        codings.Bitmap(),
        rs.contrib.codings.PolynomialFit(least=0),
        inside=rs.TopK(density=0.3, **ONE),
        served_only=True,
        exact=False,
    ),
    "coded_run_length_exponential": _coded(
        codings.RunLength(),
        rs.contrib.codings.DoubleExponentialFit(least=0),
        inside=rs.TopK(density=0.1, **ONE),
        served_only=True,
        exact=False,
    ),
    "coded_dgc": _coded(
        codings.DeltaPacking(),
        rs.contrib.codings.QSGDValues(),
        inside=rs.DGC(density=0.1, sample_ratio=0.1, **FEW),
        served_only=True,
        exact=False,
    ),
    "deep_reduce": Descriptor(
        rs.contrib.DeepReduce(method=rs.TopK(density=0.1, **FEW)),
        requests=(AllGather,),
        payload=message,
        served_only=True,
    ),
    "coded_redsync_quantized": _coded(
        inside=rs.RedSync(density=0.1, quantized=True, selection="exact"), form=means, exact=False
    ),
    "coded_redsync_momentum": _coded(
        codings.EliasFano(),
        codings.Half(),
        inside=rs.RedSync(density=0.1, momentum=0.9, selection="exact"),
        exact=False,
    ),
    "coded_spardl": _coded(
        patience=5.0,
        values=codings.Half(),
        inside=rs.contrib.SparDL(density=0.1),
        form=blocks,
        exact=False,
        requests=(AllToAll, AllGather),
    ),
}
