"""SparDL: conservation and size of the total by worker count, quality, volume, bad input."""

import numpy as np
import pytest
import tensorflow as tf

import tf_redsync as rs
from tests.loops import loop
from tests.oracle.spardl import SparDLOracle, paper_rounds
from tests.oracle.sparse import count
from tf_redsync.exchange import driver, loopback
from tf_redsync.exchange.layout import BucketLayout, TensorSpec

SHAPES = ((30, 40), (70, 10), (97,))
SIZE = 1200 + 700 + 97
WORKERS = (1, 2, 3, 4, 5, 6, 7, 8, 14)
all_workers = loop("workers", WORKERS)


def specs_of(shapes):
    return tuple(TensorSpec(f"v{i}", s, position=i) for i, s in enumerate(shapes))


def draw(rng, workers, shapes=SHAPES):
    """Returns gradients `[worker][tensor]` with a common component, as in training."""
    common = [rng.standard_t(3, s) for s in shapes]
    return [[np.float32(c + rng.standard_t(3, c.shape)) for c in common] for _ in range(workers)]


def constants(arrays):
    return tf.nest.map_structure(tf.constant, arrays)


def train(method, grads_of_steps, shapes=SHAPES):
    """Yields gradients, old states and the result of every step."""
    workers = len(grads_of_steps[0])
    layout = BucketLayout(specs_of(shapes), workers)
    states = loopback.initial_states(method, layout)
    for number, grads in enumerate(grads_of_steps):
        step = loopback.run_step(method, layout, constants(grads), states, number)
        yield grads, states, step
        states = step.states


def vector(tensors):
    return np.concatenate([np.float64(t).reshape(-1) for t in tensors])


def in_blocks(vectors, workers):
    """Reshapes `[n]` to `[workers, length]`."""
    return np.pad(vectors, (0, -len(vectors) % workers)).reshape(workers, -1)


@all_workers
def test_conserves_gradients_and_sends_k_elements_per_block(workers):
    rng = np.random.default_rng(workers)
    method = rs.contrib.SparDL(density=0.05)
    k = count(0.05, -(-SIZE // workers))
    for grads, old, step in train(method, [draw(rng, workers) for _ in range(4)]):
        total = vector(step.totals[0])
        sums = [vector(g) + vector(s["residual"]) for g, s in zip(grads, old, strict=True)]
        new = [vector(s["residual"]) for s in step.states]
        scale = max(np.abs(s).max() for s in sums)
        np.testing.assert_allclose(sum(sums), total + sum(new), rtol=0, atol=1e-6 * workers * scale)
        np.testing.assert_array_equal(np.count_nonzero(in_blocks(total, workers), axis=1), k)
        for totals in step.totals[1:]:
            np.testing.assert_array_equal(vector(totals), total)
        for before, after in zip(sums, new, strict=True):  # collected, or delivered, or kept
            absent = total == 0
            np.testing.assert_allclose(after[absent], before[absent], rtol=1e-6)
            kept = np.isclose(after[~absent], before[~absent], rtol=1e-6)
            assert (kept | (after[~absent] == 0)).all()


@pytest.mark.parametrize("workers", [5, 6, 14])
def test_equals_the_oracle(workers):
    """Worker counts that the conformance tests omit."""
    rng = np.random.default_rng(workers)
    method, reference = rs.contrib.SparDL(density=0.03), SparDLOracle(SHAPES, workers, 0.03)
    for grads, _, step in train(method, [draw(rng, workers) for _ in range(5)]):
        for found, expected in zip(step.totals[-1], reference.step(grads), strict=True):
            np.testing.assert_array_equal(found, expected)
        for state, residuals in zip(step.states, reference.residuals, strict=True):
            for found, expected in zip(state["residual"], residuals, strict=True):
                np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("workers", [2, 3, 4, 5, 6, 7, 8, 14])
def test_captures_as_much_as_the_rounds_of_the_paper(workers):
    """Compares the residuals' error after a step with that of the paper's order."""
    rng = np.random.default_rng(workers)
    errors = {"paper": 0.0, "ours": 0.0, "best": 0.0}
    k = count(0.05, -(-SIZE // workers))
    for _ in range(5):
        ((grads, _, step),) = train(rs.contrib.SparDL(density=0.05), [draw(rng, workers)])
        sums = np.stack([in_blocks(vector(g), workers) for g in grads])
        paper, residuals = paper_rounds(sums, k)
        np.testing.assert_allclose(paper + residuals.sum(0), sums.sum(0), rtol=0, atol=1e-9)
        np.testing.assert_array_equal(np.count_nonzero(paper, axis=1), k)
        wanted = sums.sum(0)
        best = wanted.copy()
        np.put_along_axis(best, np.argsort(-np.abs(wanted), axis=1)[:, :k], 0.0, axis=1)
        error_vector = wanted - in_blocks(vector(step.totals[0]), workers)
        if workers == 2:  # one round with one block: the paper's is also an all-to-all
            np.testing.assert_allclose(wanted - error_vector, paper, rtol=1e-6)
            kept = np.stack([in_blocks(vector(s["residual"]), 2) for s in step.states])
            np.testing.assert_allclose(kept, residuals, rtol=1e-6)
        for name, error in (("paper", wanted - paper), ("ours", error_vector), ("best", best)):
            errors[name] += np.square(error).sum()
    assert errors["best"] < errors["ours"]
    assert 0.98 * errors["paper"] < errors["ours"] < 1.02 * errors["paper"]


@pytest.mark.parametrize("workers", [2, 3, 8])
def test_equal_gradients_deliver_the_largest_of_every_block(workers):
    rng = np.random.default_rng(0)
    grads = [draw(rng, 1)[0]] * workers
    ((_, _, step),) = train(rs.contrib.SparDL(density=0.1), [grads])
    blocks = in_blocks(vector(grads[0]), workers)
    k = count(0.1, blocks.shape[1])
    largest = np.sort(np.abs(blocks), axis=1)[:, -k:]
    found = np.sort(np.abs(in_blocks(vector(step.totals[0]), workers)), axis=1)[:, -k:]
    np.testing.assert_allclose(found, workers * largest, rtol=1e-6)


@pytest.mark.deep
def test_converges_to_the_optimum_of_all_workers():
    """Quadratics with different optima: converges to their mean like top-k with an equal total."""
    workers, shapes, steps = 4, ((20, 30),), 600
    rng = np.random.default_rng(3)
    optima = rng.standard_normal((workers, *shapes[0])).astype(np.float32)
    distances = {}
    for method in (rs.contrib.SparDL(density=0.05), rs.TopK(density=0.05 / workers), rs.Dense()):
        layout = BucketLayout(specs_of(shapes), workers)
        run = loopback.traced_step(method, layout)
        weights, states = np.zeros(shapes[0], np.float32), loopback.initial_states(method, layout)
        for number in range(steps):
            step = run(constants([[(weights - o) / workers] for o in optima]), states, number)
            weights, states = weights - 0.01 * step.totals[0][0].numpy(), step.states
        distances[type(method)] = np.linalg.norm(weights - optima.mean(0))
    far = np.linalg.norm(optima.mean(0))
    assert distances[rs.Dense] < 0.01 * far
    assert distances[rs.contrib.SparDL] < min(0.2 * far, 1.1 * distances[rs.TopK])


@pytest.mark.parametrize("workers", [2, 4, 14])
def test_volume(workers):
    """4 k (K - 1) / K words of 4 bytes, and headers of 4 words for every other worker."""
    ((_, _, step),) = train(
        rs.contrib.SparDL(density=0.05), [draw(np.random.default_rng(0), workers)]
    )
    k = workers * count(0.05, -(-SIZE // workers))
    assert step.bytes_sent == pytest.approx(4 * (workers - 1) * (4 * k / workers + 4))
    assert rs.contrib.SparDL().traits.bits == "64 density (1 + 1 / K)"
    payloads = sum(int(driver.payload_bytes(r)) for r in step.requests)
    assert payloads == 4 * (2 * k * (1 + 1 / workers) + 2 * workers + 2)


@pytest.mark.parametrize("workers", [3, 8])
@pytest.mark.parametrize("shapes", [((),), ((2,), (0, 4)), ((0,),), ((7,), (1, 1))])
def test_fewer_elements_than_workers(workers, shapes):
    rng = np.random.default_rng(0)
    for grads, old, step in train(rs.contrib.SparDL(), [draw(rng, workers, shapes)] * 3, shapes):
        assert step.finite
        put_in = sum(vector(g) + vector(s["residual"]) for g, s in zip(grads, old, strict=True))
        kept = sum(vector(s["residual"]) for s in step.states)
        np.testing.assert_allclose(put_in, vector(step.totals[0]) + kept, rtol=0, atol=1e-5)


def test_overflowing_sum_skips_the_step():
    """The selection rejects the values before they are sent."""
    grads = draw(np.random.default_rng(0), 3)
    for own in grads[:2]:
        own[0][0, 0] = 2.5e38
    ((_, old, step),) = train(rs.contrib.SparDL(density=0.05), [grads])
    assert not step.finite and step.states == old
    assert not np.any(step.requests[0].messages[:, 0])


def test_graph_mode_equals_eager_mode_bitwise():
    rng = np.random.default_rng(1)
    method, layout = rs.contrib.SparDL(density=0.05), BucketLayout(specs_of(SHAPES), 3)
    run = loopback.traced_step(method, layout)
    for grads, old, step in train(method, [draw(rng, 3) for _ in range(2)]):
        again = run(constants(grads), old, 0)
        for found, expected in ((again.totals, step.totals), (again.states, step.states)):
            for a, b in zip(tf.nest.flatten(found), tf.nest.flatten(expected), strict=True):
                np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    "options", [{"density": 0.0}, {"density": 1.5}, {"density": "x"}, {"dense_below": -1}]
)
def test_bad_input(options):
    ((name, value),) = options.items()
    with pytest.raises(ValueError, match=f"`{name}`.*Received: {name}={value!r}"):
        rs.contrib.SparDL(**options)


def test_small_tensors_and_biases_are_rejected():
    method = rs.contrib.SparDL()
    assert "rank 1" in method.refuses(TensorSpec("bias", (5000,)))
    assert "dense_below" in method.refuses(TensorSpec("w", (31, 33)))
    assert method.refuses(TensorSpec("w", (32, 32))) is None
