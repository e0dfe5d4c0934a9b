"""QSGD, TernGrad, 2-bit."""

import math

import tensorflow as tf

import tf_redsync as rs
from tests.conformance.descriptor import Descriptor
from tests.oracle.quantized import StochasticOracle, ThresholdOracle
from tf_redsync.exchange.requests import AllGather, AllReduce
from tf_redsync.methods.common.random_numbers import stream


def words(bits: int) -> int:
    return -(-bits // 32)


def qsgd_message(method, specs, step):
    """A flag; a norm for each bucket; ceil(log2(2 s + 1)) bits per element."""
    bits = math.ceil(math.log2(2 * method.levels + 1))
    norms = [1 if not method.bucket_size else -(-s.size // method.bucket_size) for s in specs]
    return [4 * (1 + sum(norms) + sum(words(s.size * bits) for s in specs))]


def two_bits(method, specs, step):
    """A flag; a scale for each tensor; 2 bits per element."""
    return [4 * (1 + len(specs) + sum(words(2 * s.size) for s in specs))]


def scalers_and_sums(method, specs, step):
    """A flag and the scalers; then numbers of D digits in base 2 K + 1, below 2^24 in magnitude."""

    def numbers(workers):
        digits = max(d for d in range(1, 17) if ((2 * workers + 1) ** d - 1) / 2 <= 2**24)
        return 4 * -(-sum(s.size for s in specs) // digits)

    return [4 * (1 + len(specs)), numbers]


def stochastic_oracle(method, specs, workers):
    """Uses the method's random streams; `test_quantized.py` tests them."""

    def own_stream(step, worker):
        seed, number = stream(method.seed, tf.constant(step, tf.int64), specs[0].position).numpy()
        return seed, worker, number

    options = (
        {"levels": method.levels, "bucket_size": method.bucket_size}
        if isinstance(method, rs.QSGD)
        else {"shared": method.shared_scaler}
    )
    return StochasticOracle([s.shape for s in specs], own_stream, **options)


def threshold_oracle(method, specs, workers):
    return ThresholdOracle([s.shape for s in specs], workers, method.threshold)


def _gathers(method, payload, oracle=None, requests=(AllGather,)):
    return Descriptor(method, None, True, requests, payload, oracle, steps=10)


# Compared with the oracle where no rounded sum decides a code: largest elements, no clipping.
TABLE = {
    "qsgd": _gathers(rs.QSGD(), qsgd_message),
    "qsgd_max": _gathers(
        rs.QSGD(levels=5, bucket_size=64, norm="max", seed=2), qsgd_message, stochastic_oracle
    ),
    "tern_grad": _gathers(rs.TernGrad(), two_bits),
    "tern_grad_no_clip": _gathers(rs.TernGrad(clip=None, seed=1), two_bits, stochastic_oracle),
    "tern_grad_shared": _gathers(
        rs.TernGrad(clip=None, shared_scaler=True),
        scalers_and_sums,
        stochastic_oracle,
        (AllGather, AllReduce),
    ),
    "two_bit": _gathers(rs.contrib.TwoBit(), two_bits),
    "two_bit_absolute": _gathers(
        rs.contrib.TwoBit(threshold=0.5, unit="absolute"), two_bits, threshold_oracle
    ),
}
