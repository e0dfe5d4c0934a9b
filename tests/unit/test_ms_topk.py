"""MSTop-k sends exactly k elements, nearly the largest, for any input."""

import numpy as np
import pytest
import tensorflow as tf

import tf_redsync as rs
from tests.oracle.ms_top_k import ms_top_k

RNG = np.random.default_rng(7)
INPUTS = {
    "normal": RNG.normal(size=5000),
    "heavy": RNG.standard_t(1.5, size=5000),
    "equal": np.ones(5000),
    "zero": np.zeros(5000),
    "two values": np.repeat([1.0, 2.0], 2500),
    "one large": np.concatenate([[1e30], RNG.normal(size=4999)]),
}


def selected(x, k, samplings, u):
    method = rs.contrib.MSTopK(samplings=samplings)
    chosen = method.select(tf.abs(tf.constant(x, tf.float32)), k, tf.constant(u, tf.float64))
    return np.flatnonzero(chosen.numpy())


@pytest.mark.parametrize("name", INPUTS)
def test_selects_k_elements_as_in_the_paper(name):
    x = INPUTS[name].astype(np.float32)
    for k in (1, 7, 500, 4999, 5000):
        for samplings, u in ((1, 0.0), (3, 0.999999), (30, 0.5)):
            at = selected(x, k, samplings, u)
            assert len(at) == k
            np.testing.assert_array_equal(at, ms_top_k(x, k, samplings, u))


def test_thirty_samplings_find_nearly_the_largest_elements():
    x = np.abs(INPUTS["normal"])
    for k in (5, 50, 500):
        most = np.sort(x)[-k:].sum()
        assert x[selected(x, k, 30, 0.3)].sum() > 0.999 * most
    assert x[selected(x, 500, 1, 0.3)].sum() < 0.9 * most


def test_block_between_the_thresholds_moves_with_the_start():
    x = INPUTS["equal"]
    assert list(selected(x, 3, 30, 0.0)) == [0, 1, 2]
    assert list(selected(x, 3, 30, 0.9999999)) == [4997, 4998, 4999]
