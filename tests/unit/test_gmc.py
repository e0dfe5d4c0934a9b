"""GMC and GMC+: units, momentum, the evaluation point of GMC+, and convergence on quadratics."""

import functools

import numpy as np
import pytest
import tensorflow as tf

import tf_redsync as rs
from tests.oracle.gmc import GMCOracle
from tests.oracle.sparse import top_k_by_layer
from tf_redsync.exchange import loopback
from tf_redsync.exchange.layout import BucketLayout, TensorSpec

WORKERS, SIZE, STEPS, RATE = 8, 200, 1500, 0.01
SPEC = TensorSpec("w", (10, 20))


@functools.cache
def excess_loss(method) -> float:
    """Returns the mean excess loss over the last 100 of 1500 steps, as one graph.

    The loss is the mean of 8 quadratics, one per worker, whose minima lie 20 apart, with noisy
    gradients.
    """
    rng = np.random.default_rng(0)
    curvature = np.exp(rng.uniform(np.log(0.5), 0.0, (WORKERS, *SPEC.shape)))
    minima = 20.0 * rng.standard_normal((WORKERS, *SPEC.shape))
    best = (curvature * minima).sum(0) / curvature.sum(0)
    layout = BucketLayout((SPEC,), WORKERS)
    curvature, minima = tf.constant(curvature, tf.float32), tf.constant(minima, tf.float32)

    def loss(weights):
        return 0.5 * tf.reduce_sum(curvature * (weights - minima) ** 2) / WORKERS

    def body(step, weights, states, late):
        points = [
            method.point([weights], [], s, tf.constant(RATE), WORKERS)[0]
            if method.sync_schedule.own_point
            else weights
            for s in states
        ]
        noise = tf.random.stateless_normal(
            [WORKERS, *SPEC.shape], tf.stack([step, 7]), alg="philox"
        )
        grads = (curvature * (tf.stack(points) - minima) + noise) / WORKERS
        step_grads = [[g] for g in tf.unstack(grads)]
        totals, states, *_ = loopback._exchange(
            method, layout, step_grads, states, step, "exchange"
        )
        late += tf.where(step >= STEPS - 100, loss(weights) / 100, 0.0)
        return step + 1, weights - RATE * totals[0][0], states, late

    @tf.function(autograph=False)
    def train():
        start = (tf.constant(0, tf.int64), tf.zeros(SPEC.shape))
        states = loopback.initial_states(method, layout)
        *_, late = tf.while_loop(lambda step, *_: step < STEPS, body, (*start, states, 0.0))
        return late - loss(tf.constant(best, tf.float32))

    return float(train())


SPARSE = {"density": 0.05, "momentum": 0.9}
LOCAL = rs.RedSync(selection="exact", masking=False, **SPARSE)


@pytest.mark.deep
def test_global_momentum_beats_local_on_unequal_data():
    """The paper's ordering: local momentum, DGC's masked momentum, GMC, GMC+."""
    local, dgc = excess_loss(LOCAL), excess_loss(rs.DGC(**SPARSE))
    gmc, plus = excess_loss(rs.GMC(**SPARSE)), excess_loss(rs.contrib.GMCPlus(**SPARSE))
    assert local > 1.3 * dgc
    assert dgc > 5 * gmc
    assert gmc > plus > 0


def test_random_blocks_need_the_detached_point():
    gmc = excess_loss(rs.GMC(selection="random_block", **SPARSE))
    plus = excess_loss(rs.contrib.GMCPlus(selection="random_block", **SPARSE))
    assert gmc > 5 * plus
    assert plus < excess_loss(rs.contrib.GMCPlus(**SPARSE))  # no worse than top-k


@pytest.mark.parametrize("momentum", [0.0, 0.875])
def test_units_of_the_paper_bitwise(momentum):
    """All factors are powers of 2, so only the order of operations could differ."""
    shapes, workers = [(30, 7), (13,), ()], 4
    specs = tuple(TensorSpec(f"v{i}", s, position=i) for i, s in enumerate(shapes))
    reference = GMCOracle(shapes, workers, top_k_by_layer(0.1), momentum, rate=2.0**-6)
    method, layout = rs.GMC(density=0.1, momentum=momentum), BucketLayout(specs, workers)
    states, rng = loopback.initial_states(method, layout), np.random.default_rng(1)
    for number in range(30):
        grads = [
            [np.asarray(rng.standard_normal(s), np.float32) for s in shapes] for _ in range(workers)
        ]
        inputs = [[tf.constant(g) for g in own] for own in grads]
        step = loopback.run_step(method, layout, inputs, states, number)
        states = step.states
        for found, expected in zip(step.totals[0], reference.step(grads), strict=True):
            np.testing.assert_array_equal(found, expected)
        for state, residuals in zip(states, reference.residuals, strict=True):
            for found, expected in zip(state["residual"], residuals, strict=True):
                np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("selection", ["top_k", "random_block"])
def test_momentum_follows_the_total(selection):
    """A worker with zero gradients sends the common momentum; the sum is beta times it."""
    method = rs.GMC(density=1.0, momentum=0.5, selection=selection)
    layout = BucketLayout((SPEC,), 4)
    states, total = loopback.initial_states(method, layout), np.ones(SPEC.shape)
    for number, gradient in enumerate((0.25, 0.0, 0.0)):
        grads = [[tf.fill(SPEC.shape, gradient)]] * 4
        step = loopback.run_step(method, layout, grads, states, number)
        states = step.states
        np.testing.assert_allclose(step.totals[0][0], 0.5**number * total)
        np.testing.assert_array_equal(states[0]["before"][0], step.totals[0][0])


def test_evaluation_point_of_gmc_plus():
    """w - lambda e, the residual in updates: learning rate times workers times the state's."""
    method = rs.contrib.GMCPlus(detached=0.5)
    state = {"residual": [tf.constant([2.0, -1.0])], "before": [tf.zeros([2])]}
    (point,) = method.point([tf.constant([10.0, 20.0])], [], state, tf.constant(0.1), 4)
    np.testing.assert_allclose(point, [10.0 - 0.5 * 0.1 * 4 * 2.0, 20.0 + 0.5 * 0.1 * 4 * 1.0])
    assert method.sync_schedule.own_point and not rs.GMC().sync_schedule.own_point


def test_dense_tensors_get_the_same_momentum():
    assert rs.GMC(momentum=0.7).dense() == rs.Dense(momentum=0.7)
    assert rs.GMC(momentum=0.7).traits.momentum_in_exchange == 0.7
    assert "rank 1" in rs.GMC().refuses(TensorSpec("bias", (5000,)))
    assert rs.GMC().describe(TensorSpec("w", (100, 100))) == "top_k, 100 elements"


@pytest.mark.parametrize("cls", [rs.GMC, rs.contrib.GMCPlus])
@pytest.mark.parametrize(
    "options", [{"density": 0.0}, {"momentum": 1.0}, {"selection": "random_k"}, {"seed": -1}]
)
def test_bad_input(cls, options):
    ((name, value),) = options.items()
    with pytest.raises(ValueError, match=f"`{name}`.*Received: {name}={value!r}"):
        cls(**options)


def test_bad_detached():
    with pytest.raises(ValueError, match="`detached` must be in \\[0, 1\\).*detached=1.0"):
        rs.contrib.GMCPlus(detached=1.0)
