"""QSGD, TernGrad, 2-bit."""

import math

import numpy as np
import tensorflow as tf

import tf_redsync as rs
from tests.conformance.descriptor import Descriptor
from tests.oracle import quantized as oracle
from tf_redsync.exchange.requests import AllGather, AllReduce
from tf_redsync.methods.common import quantizer
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

    qsgd = isinstance(method, rs.QSGD)
    options = (
        {"levels": method.levels, "bucket_size": method.bucket_size}
        if qsgd
        else {"shared": method.shared_scaler}
    )
    if qsgd and method.norm == "l2":
        options |= {"scale": oracle.l2_norm, "as_rounded": in_float32(quantizer.l2_norm)}
    elif not qsgd and method.clip is not None:
        options |= deviations(method.clip)
    return oracle.StochasticOracle([s.shape for s in specs], own_stream, **options)


def in_float32(function):
    return lambda rows: np.array(function(tf.constant(rows, tf.float32)))


def deviations(number):
    """Some standard deviations of a row, at most its maximum: in numpy, and in float32."""

    @in_float32
    def as_rounded(rows):
        return tf.minimum(number * quantizer.rms(rows, rows.shape[1]), quantizer.largest(rows))

    return {"scale": oracle.deviations(number), "as_rounded": as_rounded}


def threshold_oracle(method, specs, workers):
    def constant(rows):
        return np.full(len(rows), method.threshold, np.float32)

    scales = {"scale": constant, "as_rounded": constant}
    if method.unit == "rms":
        scales = deviations(method.threshold)
    return oracle.ThresholdOracle([s.shape for s in specs], workers, **scales)


def _gathers(method, payload, reference, requests=(AllGather,)):
    return Descriptor(method, None, True, requests, payload, reference, steps=10)


TABLE = {
    "qsgd": _gathers(rs.QSGD(), qsgd_message, stochastic_oracle),
    "qsgd_max": _gathers(
        rs.QSGD(levels=5, bucket_size=64, norm="max", seed=2), qsgd_message, stochastic_oracle
    ),
    "tern_grad": _gathers(rs.TernGrad(), two_bits, stochastic_oracle),
    "tern_grad_no_clip": _gathers(rs.TernGrad(clip=None, seed=1), two_bits, stochastic_oracle),
    "tern_grad_shared": _gathers(
        rs.TernGrad(shared_scaler=True),
        scalers_and_sums,
        stochastic_oracle,
        (AllGather, AllReduce),
    ),
    "two_bit": _gathers(rs.contrib.TwoBit(), two_bits, threshold_oracle),
    "two_bit_absolute": _gathers(
        rs.contrib.TwoBit(threshold=0.5, unit="absolute"), two_bits, threshold_oracle
    ),
}
