"""Sparse dithering, spherical compression."""

import math

import tensorflow as tf

import tf_redsync as rs
from tests.conformance.descriptor import Descriptor
from tests.oracle.optimal import DitheringOracle, SphericalOracle
from tf_redsync.contrib.optimal_compression import FACTORS
from tf_redsync.exchange.layout import BucketLayout
from tf_redsync.exchange.requests import AllGather


def dithering_message(method, specs, step):
    """A flag; for each tensor a factor; r bits per element; a bitmap of ones and zeros."""
    r = max(1, math.ceil(math.log2(1 / math.sqrt(method.alpha))) - 1)
    n = sum(s.size for s in specs)
    zeros = sum(math.ceil(1.0001 * s.size / (2**r * math.sqrt(method.alpha))) for s in specs)
    return [4 * (1 + len(specs) + -(-r * n // 32) + -(-(n + zeros) // 32))]


def spherical_message(method, specs, step):
    """A flag; for each tensor its largest factor; the codes of all blocks."""
    blocks = sum(-(-s.size // method.block_size) for s in specs)
    return [4 * (1 + len(specs) + -(-blocks * (method.index_bits + 5) // 32))]


def dithering_oracle(method, specs, workers):
    return DitheringOracle([s.shape for s in specs], workers, method.alpha)


def spherical_oracle(method, specs, workers):
    """Uses the method's codebook; `test_spherical.py` tests it."""
    layout = BucketLayout(specs, workers)

    def codebook(step):
        return method.codebook(layout, tf.constant(step, tf.int64)).numpy()

    return SphericalOracle([s.shape for s in specs], workers, method.alpha, codebook, FACTORS)


def _optimal(method, payload, oracle, tolerance=1e-5):
    return Descriptor(
        method, None, True, (AllGather,), payload, oracle, tolerance, steps=5, patience=None
    )


TABLE = {
    "sparse_dithering": _optimal(rs.contrib.SparseDithering(), dithering_message, dithering_oracle),
    "sparse_dithering_fine": _optimal(
        rs.contrib.SparseDithering(alpha=0.003), dithering_message, dithering_oracle, 1e-4
    ),
    "spherical": _optimal(rs.contrib.SphericalCompression(), spherical_message, spherical_oracle),
    "spherical_half": _optimal(
        rs.contrib.SphericalCompression(alpha=0.5, block_size=8, index_bits=8, seed=2),
        spherical_message,
        spherical_oracle,
    ),
}
