"""DeMo and SparseLoCo: top-k of chunks."""

import math

import numpy as np
import tensorflow as tf

import tf_redsync as rs
from tests.conformance.descriptor import Descriptor
from tests.oracle.demo import DeMoOracle, divisor
from tests.oracle.sparse_loco import SparseLoCoOracle
from tf_redsync.exchange.requests import AllGather
from tf_redsync.methods import demo
from tf_redsync.methods.common import two_bit_values


def sizes(specs, side, length):
    """The number of chunks of each tensor, by the sides of the chunks."""
    found = {}
    for shape in (s.shape for s in specs):
        matrix = len(shape) > 1
        rows, columns = (math.prod(shape[:-1]), shape[-1]) if matrix else (1, math.prod(shape))
        sides = divisor(rows, side), divisor(columns, side if matrix else length)
        found.setdefault(sides, []).append(rows * columns // math.prod(sides))
    return found


def message(method, specs, step):
    """A flag; then for each size of chunks ceil(log2(n)) bits per position, and coefficients."""
    total = 1
    for sides, numbers in sizes(specs, method.chunk, method.chunk).items():
        n = math.prod(sides)
        count = sum(numbers) * min(method.top_k, n)
        total += math.ceil(count * math.ceil(math.log2(n)) / 32) + count
    return [4 * total]


def oracle(method, specs, workers):
    def transform(function):  # rounded as the method does; the oracle checks it
        return lambda blocks: np.array(function(tf.constant(blocks, tf.float32)))

    return DeMoOracle(
        [s.shape for s in specs],
        workers,
        method.decay,
        method.top_k,
        method.chunk,
        transform(demo.dct),
        transform(demo.idct),
    )


def _demo(**arguments):
    method = rs.DeMo(**arguments)
    return Descriptor(method, None, True, (AllGather,), message, oracle, steps=10, patience=None)


def loco_message(method, specs, step):
    """A flag; for each size of chunks positions, and values or codes, scales and levels.

    Two levels belong to each tensor, and a scale to each chunk.
    """
    total = 1
    for sides, numbers in sizes(specs, method.chunk, method.chunk**2).items():
        n, chunks = math.prod(sides), sum(numbers)
        count = chunks * min(method.top_k, n)
        total += math.ceil(count * math.ceil(math.log2(n)) / 32)
        total += math.ceil(2 * count / 32) + chunks if method.value_bits == 2 else count
        total += 2 * len(numbers) if method.value_bits == 2 else 0
    return [4 * total]


def two_bits(rows):
    return two_bit_values.encode(tf.constant(rows, tf.float32), [len(rows)])


def loco_oracle(method, specs, workers):
    return SparseLoCoOracle(
        [s.shape for s in specs],
        workers,
        method.decay,
        method.top_k,
        method.value_bits,
        method.divide_by,
        method.chunk,
        lambda rows: two_bits(rows).codes.numpy() >= 2,
    )


def _loco(**arguments):
    method = rs.SparseLoCo(**arguments)
    rounded = 1e-5 if method.value_bits == 2 else 0.0  # means in numpy's float64
    return Descriptor(
        method,
        None,
        True,
        (AllGather,),
        loco_message,
        loco_oracle,
        tolerance=rounded,
        patience=None,
    )


TABLE = {
    "sparse_loco": _loco(top_k=5, chunk=16),
    "sparse_loco_defaults": _loco(),
    "sparse_loco_values": _loco(top_k=5, chunk=16, value_bits=32, decay=1.0),
    "sparse_loco_senders": _loco(top_k=5, chunk=16, value_bits=32, divide_by="senders"),
    "demo": _demo(top_k=3, chunk=16),
    "demo_defaults": _demo(),
    "demo_all": _demo(top_k=64, chunk=8, decay=0.0),
}
