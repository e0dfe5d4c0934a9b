"""DeMo."""

import math

import numpy as np
import tensorflow as tf

import tf_redsync as rs
from tests.conformance.descriptor import Descriptor
from tests.oracle.demo import DeMoOracle, divisor
from tf_redsync.exchange.requests import AllGather
from tf_redsync.methods import demo


def words(method, shape):
    """Of one tensor: ceil(log2(n)) bits for each of k positions in a chunk of n, and k values."""
    rows, columns = (math.prod(shape[:-1]), shape[-1]) if len(shape) > 1 else (1, math.prod(shape))
    n = divisor(rows, method.chunk) * divisor(columns, method.chunk)
    count = rows * columns // n * min(method.top_k, n)
    return math.ceil(count * math.ceil(math.log2(n)) / 32) + count


def message(method, specs, step):
    """A flag; then for each tensor positions and coefficients."""
    return [4 * (1 + sum(words(method, s.shape) for s in specs))]


def oracle(method, specs, workers):
    def transform(function):  # rounded as the method does it; the unit tests look at it
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


TABLE = {
    "demo": _demo(top_k=3, chunk=16),
    "demo_defaults": _demo(),
    "demo_all": _demo(top_k=64, chunk=8, decay=0.0),
}
