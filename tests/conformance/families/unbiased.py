"""Natural compression, DoReFa, Wangni's sparsification, Quantized Frank-Wolfe's quantizer."""

import functools

import numpy as np
import tensorflow as tf

import tf_redsync as rs
from tests.conformance.descriptor import Descriptor
from tests.oracle.sparse import count
from tests.oracle.unbiased import QuantizedFWOracle, RoundedOracle, WangniOracle
from tf_redsync.contrib.wangni import ROUNDS
from tf_redsync.exchange.requests import AllGather, AllToAll
from tf_redsync.methods.common.random_numbers import stream, uniform


def words(bits: int) -> int:
    return -(-bits // 32)


def nine_bits(method, specs, step):
    """A flag; sign and exponent of every element."""
    return [4 * (1 + sum(words(9 * s.size) for s in specs))]


def k_bits(method, specs, step):
    """A flag; a maximum for each tensor; k bits per element."""
    return [4 * (1 + len(specs) + sum(words(method.bitwidth * s.size) for s in specs))]


def elements(method, specs, step):
    """A flag; for each tensor a count, and capacity for one element more than the average."""
    slots = [min(count(method.density, s.size) + 1, s.size) for s in specs]
    return [4 * (1 + sum(1 + 2 * k for k in slots))]


def two_phases(method, specs, step):
    """A flag; for each tensor a maximum and z(s) bits per element of a block; to owners, to all."""

    def message(workers, levels):
        z = 1 + int(np.ceil(np.log2(levels + 1)))
        return 4 * (1 + sum(1 + words(z * -(-s.size // workers)) for s in specs))

    return [
        lambda workers: workers * message(workers, method.levels),
        lambda workers: message(workers, method.sum_levels),
    ]


# The oracles use the method's random numbers; the unit tests check them.


def _streams(method, specs):
    def streams(step, worker):
        seed, number = stream(method.seed, tf.constant(step, tf.int64), specs[0].position).numpy()
        return seed, worker, number

    return streams


def natural_oracle(method, specs, workers):
    return RoundedOracle([s.shape for s in specs], _streams(method, specs), "natural")


def dorefa_oracle(method, specs, workers):
    shapes, levels = [s.shape for s in specs], 2**method.bitwidth - 1
    return RoundedOracle(shapes, _streams(method, specs), "uniform", levels)


def wangni_oracle(method, specs, workers):
    @functools.cache
    def numbers(step, worker, tensor):
        seed, number = stream(method.seed, tf.constant(step, tf.int64), specs[tensor].position)
        own = tf.stack([seed + tf.constant(worker) * 0x5851F42D, number])
        return float(uniform([], own, tf.float64))

    return WangniOracle([s.shape for s in specs], numbers, method.density, ROUNDS)


def quantized_fw_oracle(method, specs, workers):
    one = _streams(method, specs)

    def both(step, worker):
        return one(step, worker), one(step, workers + worker)

    shapes = [s.shape for s in specs]
    return QuantizedFWOracle(shapes, both, method.levels, method.sum_levels)


def _unbiased(method, payload, oracle, requests=(AllGather,), tolerance=0.0):
    return Descriptor(method, None, True, requests, payload, oracle, tolerance, steps=10)


TABLE = {
    "natural": _unbiased(rs.contrib.NaturalCompression(), nine_bits, natural_oracle),
    "dorefa": _unbiased(rs.contrib.DoReFa(), k_bits, dorefa_oracle),
    "dorefa_two_bits": _unbiased(rs.contrib.DoReFa(bitwidth=2, seed=4), k_bits, dorefa_oracle),
    "wangni": _unbiased(rs.contrib.Wangni(density=0.1), elements, wangni_oracle, tolerance=1e-6),
    "quantized_fw": _unbiased(
        rs.contrib.QuantizedFW(), two_phases, quantized_fw_oracle, (AllToAll, AllGather)
    ),
    "quantized_fw_ternary": _unbiased(
        rs.contrib.QuantizedFW(levels=1, sum_levels=20, seed=3),
        two_phases,
        quantized_fw_oracle,
        (AllToAll, AllGather),
    ),
}
