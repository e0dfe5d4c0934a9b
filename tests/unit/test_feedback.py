"""Momentum and clipping against numpy."""

import numpy as np
import pytest
import tensorflow as tf

from tests.loops import loop
from tf_redsync.exchange import feedback


def arrays(seed, scale=1.0):
    rng = np.random.default_rng(seed)
    shapes = [(3, 4), (), (7,), (0, 2)]
    return [np.asarray(scale * rng.standard_normal(s), np.float32).reshape(s) for s in shapes]


@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum_step(nesterov):
    grads, velocities, m = arrays(0), arrays(1), np.float32(0.9)
    sent, new = feedback.momentum_step(grads, velocities, 0.9, nesterov)
    for g, u, s, n in zip(grads, velocities, sent, new, strict=True):
        expected = m * (u + g) if nesterov else (m * u) + g
        np.testing.assert_array_equal(n, expected)
        np.testing.assert_array_equal(s, expected + g if nesterov else expected)


@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0.9, False), (0.9, True)])
def test_accumulated_is_the_selections_input(momentum, nesterov):
    residuals, grads, velocities, m = arrays(2), arrays(0), arrays(1), np.float32(momentum)
    given = velocities if momentum else []
    found = feedback.accumulated(residuals, grads, given, momentum, nesterov)
    for v, g, u, f in zip(residuals, grads, velocities, found, strict=True):
        expected = (v + m * (u + g)) + g if nesterov else v + ((m * u) + g)
        np.testing.assert_array_equal(f, expected if momentum else v + g)


def test_zero_momentum_is_a_noop():
    grads = arrays(0)
    sent, new = feedback.momentum_step(grads, [], 0.0, False)
    assert sent is not grads and all(a is b for a, b in zip(sent, grads, strict=True))
    assert new == []


def test_scaled():
    grads = arrays(0)
    assert all(a is b for a, b in zip(feedback.scaled(grads, None), grads, strict=True))
    for scaled, g in zip(feedback.scaled(grads, tf.constant(0.5)), grads, strict=True):
        np.testing.assert_array_equal(scaled, np.float32(0.5) * g)


@loop("workers", [1, 4, 7])
@loop("scale", [1e-3, 1.0, 1e3])
def test_local_clip_scale(scale, workers):
    grads = arrays(2, scale)
    norm = np.sqrt(sum(np.square(g, dtype=np.float64).sum() for g in grads))
    expected = min(1.0, 2.0 / np.sqrt(workers) / norm)
    found = feedback.local_clip_scale(grads, 2.0, workers)
    assert found.dtype == tf.float32 and found.shape == []
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    if expected == 1.0:
        assert found == 1.0  # exactly 1, so that inactive clipping changes no bit


def test_clip_of_empty_tensors():
    assert feedback.local_clip_scale([np.zeros((3,), np.float32)], 1.0, 2) == 1.0


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_clipping_keeps_nonfinite_values(bad):
    """The step must remain non-finite after scaling."""
    grads = [np.array([1.0, bad, 2.0], np.float32), np.ones(3, np.float32)]
    scaled = feedback.scaled(grads, feedback.local_clip_scale(grads, 1.0, 2))
    assert not all(np.isfinite(g).all() for g in scaled)


def test_clipping_a_gradient_whose_square_overflows():
    """1e20 is a float32, its square is not: the gradient must be clipped or rejected, not lost."""
    grads = [np.array([1e20, -1e20], np.float32)]
    (scaled,) = feedback.scaled(grads, feedback.local_clip_scale(grads, 1.0, 1))
    kept = np.allclose(scaled, [2**-0.5, -(2**-0.5)], rtol=1e-5)
    assert kept or not np.isfinite(scaled).all()


@pytest.mark.parametrize("nesterov", [False, True])
def test_accumulated_is_rounded_in_order_in_graph_mode(nesterov):
    """Graph optimization must not reorder the additions."""
    draw = np.random.default_rng(0).standard_normal
    v, g, u = (draw(5000).astype(np.float32) for _ in range(3))
    graph = tf.function(lambda v, g, u: feedback.accumulated([v], [g], [u], 0.9, nesterov)[0])
    m = np.float32(0.9)
    new = m * (u + g) if nesterov else m * u + g
    expected = (v + new) + g if nesterov else v + new
    np.testing.assert_array_equal(graph(*map(tf.constant, (v, g, u))), expected)
