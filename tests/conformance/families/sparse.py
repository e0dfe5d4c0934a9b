"""Top-k with memory, random-k, random block."""

import functools

import numpy as np
import tensorflow as tf

import tf_redsync as rs
from tests.conformance.descriptor import Descriptor
from tests.oracle import sparse as oracle
from tf_redsync.exchange.requests import AllGather
from tf_redsync.methods.common.random_numbers import stream, uniform


def message(method, specs, step):
    """A flag, then count, indices and values of each tensor, or of the whole model."""
    sizes = [s.size for s in specs]
    if method.scope == "model":
        sizes = [sum(sizes)]
    return [4 * (1 + sum(1 + 2 * oracle.count(method.density, n) for n in sizes))]


def values(method, specs, step):
    """Only the chosen elements: all workers know their positions."""
    return [4 * sum(oracle.count(method.density, s.size) for s in specs)]


def top_k_oracle(method, specs, workers):
    by_scope = {"layer": oracle.top_k_by_layer, "model": oracle.top_k_of_model}
    choose = by_scope[method.scope](method.density)
    return oracle.MemoryOracle([s.shape for s in specs], workers, choose)


def random_k_oracle(method, specs, workers):
    """Uses the method's positions; `test_sparse_methods.py` tests them."""
    shapes = [s.shape for s in specs]
    return oracle.MemoryOracle(shapes, workers, lambda sums, step: chosen(method, specs, step))


@functools.cache
def chosen(method, specs, step):
    """Random positions of one step, equal for all workers and any number of them."""
    return [np.array(method.choose(s, seed(method, s, step))) for s in specs]


def seed(method, spec, step):
    return stream(method.seed, tf.constant(step, tf.int64), spec.position)


def block_oracle(method, specs, workers):
    return oracle.MemoryOracle([s.shape for s in specs], workers, block_of(method, specs))


def block_of(method, specs):
    """Chooses blocks in numpy, from the random numbers that the method draws."""

    def draw(tensor, step):
        return float(uniform([], seed(method, specs[tensor], step), tf.float64))

    return oracle.block_of_every_tensor(method.density, draw)


def _top_k(**options):
    full = rs.TopK(**{**options, "density": 1.0})
    return Descriptor(rs.TopK(**options), full, True, (AllGather,), message, top_k_oracle)


def _random(cls, reference, **options):
    return Descriptor(
        cls(**options), cls(density=1.0), payload=values, oracle=reference, tolerance=1e-6,
        patience=RANDOM,
    )  # fmt: skip


# Random selection has no certain bound: after 500 steps at 5 %, some element of 15,000 still waits
# with probability 1e-7.
RANDOM = 170.0

TABLE = {
    "top_k": _top_k(density=0.1),
    "top_k_model": _top_k(density=0.05, scope="model"),
    "random_k": _random(rs.RandomK, random_k_oracle, density=0.1),
    "random_block": _random(rs.RandomBlock, block_oracle, density=0.2, seed=3),
}
