"""MSTop-k."""

import functools

import tensorflow as tf

import tf_redsync as rs
from tests.conformance.descriptor import Descriptor
from tests.oracle.ms_top_k import MSTopKOracle
from tests.oracle.sparse import count
from tf_redsync.exchange.requests import AllGather
from tf_redsync.methods.common.random_numbers import stream, uniform


def payload(method, specs, step):
    """A flag, then count, indices and values of each tensor."""
    return [4 * (1 + sum(1 + 2 * count(method.density, s.size) for s in specs))]


def oracle(method, specs, workers):
    """Uses the method's block starts."""

    @functools.cache
    def starts(step, worker, tensor):
        seed, number = stream(method.seed, tf.constant(step, tf.int64), specs[tensor].position)
        own = tf.stack([seed + tf.constant(worker) * 0x5851F42D, number])
        return float(uniform([], own, tf.float64))

    counts = [count(method.density, s.size) for s in specs]
    return MSTopKOracle([s.shape for s in specs], workers, counts, method.samplings, starts)


def _ms(**options):
    full = rs.contrib.MSTopK(**{**options, "density": 1.0})
    return Descriptor(
        rs.contrib.MSTopK(**options), full, True, (AllGather,), payload, oracle, steps=15
    )


TABLE = {
    "ms_topk": _ms(density=0.1, samplings=12),  # eager loops are slow
    "ms_topk_few_samplings": _ms(density=0.02, samplings=4, seed=3),
}
