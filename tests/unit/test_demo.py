"""DeMo: transform, chunks, an oracle from the paper's formulas, and limiting cases."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_redsync as rs
from tests.oracle import demo as oracle
from tf_redsync.exchange import loopback
from tf_redsync.exchange.layout import BucketLayout, TensorSpec
from tf_redsync.methods import demo
from tf_redsync.methods.common.chunking import Chunks, largest_divisor

RNG = np.random.default_rng(0)
SHAPES = ((), (5,), (130,), (0, 3), (3, 0), (64, 64), (96, 67), (3, 2, 40, 50), (1, 4097))


def normal(*shape):
    return RNG.standard_normal(shape).astype("f4")


# --------------------------------------------------------------------------------------- chunks


@pytest.mark.parametrize("shape", SHAPES)
def test_chunks_round_trip(shape):
    cut, tensor = Chunks.of(shape), normal(*shape)
    chunks = cut.split(tensor)
    assert chunks.shape == (cut.number, cut.height, cut.width)
    np.testing.assert_array_equal(cut.join(chunks), tensor)
    np.testing.assert_array_equal(cut.join(tf.reshape(chunks, [cut.number, cut.size])), tensor)
    if len(shape) > 1:
        matrix = oracle.as_matrix(np.ascontiguousarray(tensor))
        expected = [b for b in oracle.blocks(matrix, 64) if b.size]
        assert len(expected) == cut.number
        for found, block in zip(chunks, expected, strict=True):
            np.testing.assert_array_equal(found, block)


def test_chunk_sides():
    sizes = {
        (768, 3072): (64, 64),
        (3, 3, 16, 10): (48, 10),
        (67, 128): (1, 64),
        (8192,): (1, 4096),
    }
    for shape, sides in sizes.items():
        cut = Chunks.of(shape)
        assert (cut.height, cut.width) == sides
    assert Chunks.of((4099,)).number == 4099  # a prime: chunks of one element
    for n in range(1, 200):
        assert largest_divisor(n, 64) == oracle.divisor(n, 64)
    assert largest_divisor(0, 64) == 1


# ------------------------------------------------------------------------------------ transform


@pytest.mark.parametrize("n", [1, 2, 3, 48, 64])
def test_transform_is_orthonormal(n):
    matrix = np.float64(demo.dct_matrix(n))
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(n), atol=1e-6)
    np.testing.assert_allclose(matrix, oracle.dct_1d(np.eye(n)), atol=1e-6)


def test_block_transform_is_separable():
    blocks = normal(3, 48, 64)
    found = demo.dct(tf.constant(blocks))
    np.testing.assert_allclose(found, [oracle.dct(b) for b in blocks], atol=2e-5)
    np.testing.assert_allclose(demo.idct(found), blocks, atol=1e-5)
    assert np.square(found).sum() == pytest.approx(np.square(blocks).sum(), rel=1e-5)
    constant = np.array(demo.dct(tf.ones([1, 64, 64])))  # only its mean remains
    assert constant[0, 0, 0] == pytest.approx(64, rel=1e-6)
    assert np.abs(constant.flat[1:]).max() < 1e-4


# --------------------------------------------------------------------------------------- method


def run(method, grads, steps=1):
    """Returns totals and states of every step; `grads[step][worker]` are arrays of one shape."""
    layout = BucketLayout((TensorSpec("w", grads[0][0].shape),), len(grads[0]))
    states, results = loopback.initial_states(method, layout), []
    for number in range(steps):
        inputs = [[tf.constant(g)] for g in grads[number]]
        step = loopback.run_step(method, layout, inputs, states, number)
        states = step.states
        results.append((np.array(step.totals[0][0]), [np.array(s["velocity"][0]) for s in states]))
    return results


@pytest.mark.parametrize("shape", [(64, 96), (2, 31, 50), (200,)])
def test_matches_the_papers_formulas(shape):
    """In float64: compares signs that rounding cannot change."""
    method, workers, steps = rs.DeMo(top_k=9, chunk=32), 3, 4
    grads = [[normal(*shape) for _ in range(workers)] for _ in range(steps)]
    reference = oracle.DeMoOracle([shape], workers, 0.999, 9, 32)
    for (total, momenta), step in zip(run(method, grads, steps), grads, strict=True):
        (expected,) = reference.step([[g] for g in step])
        clear = np.abs(reference.before_sign[0]) > 1e-4
        assert clear.mean() > 0.99
        np.testing.assert_array_equal(total[clear], expected[clear])
        for found, own in zip(momenta, reference.momenta, strict=True):
            np.testing.assert_allclose(found, own[0], atol=1e-4)


def test_sending_everything_without_memory_is_the_sign_of_the_mean():
    grads = [[normal(40, 50) for _ in range(3)]]
    ((total, momenta),) = run(rs.DeMo(top_k=2000, decay=0.0), grads)
    mean = np.mean(grads[0], axis=0)
    clear = np.abs(mean) > 1e-4
    np.testing.assert_array_equal(total[clear], np.sign(mean)[clear])
    assert max(np.abs(m).max() for m in momenta) < 1e-5
    # With a memory, or a partial selection, it differs.
    assert (run(rs.DeMo(top_k=20, decay=0.0), grads)[0][0] != np.sign(mean)).mean() > 0.1


def test_coefficient_is_divided_by_its_number_of_senders():
    """One worker sends a low frequency, the other a higher one with three times the amplitude."""
    matrix = demo.dct_matrix(64)
    slow, fast = np.outer(matrix[1], matrix[0]), np.outer(matrix[5], matrix[0])
    ((total, momenta),) = run(rs.DeMo(top_k=1), [[slow + 0.5 * fast, 3 * fast + slow]])
    np.testing.assert_array_equal(total, np.sign(slow + 3 * fast))
    np.testing.assert_allclose(momenta[0], 0.5 * fast, atol=1e-6)
    np.testing.assert_allclose(momenta[1], slow, atol=1e-6)


def test_unsent_momentum_is_kept_and_decays():
    matrix = demo.dct_matrix(64)
    slow, fast = np.outer(matrix[1], matrix[0]), np.outer(matrix[5], matrix[0])
    nothing = np.zeros_like(slow)
    results = run(rs.DeMo(top_k=1, decay=0.5), [[slow + 2 * fast], [nothing]], steps=2)
    np.testing.assert_array_equal(results[0][0], np.sign(fast))
    np.testing.assert_allclose(results[0][1][0], slow, atol=1e-6)
    np.testing.assert_array_equal(results[1][0], np.sign(slow))
    np.testing.assert_allclose(results[1][1][0], 0.0, atol=1e-6)


@pytest.mark.parametrize("library", ["keras", "tf_keras"])
def test_weight_decay_matches_the_paper(library):
    """w <- (1 - r l) w - r sign, by the SGD that the method's page recommends."""
    import tf_keras

    sgd = {"keras": keras, "tf_keras": tf_keras}[library].optimizers.SGD
    start, rate, decay = normal(64, 64), 0.01, 0.3
    weights = keras.Variable(start) if library == "keras" else tf.Variable(start)
    optimizer = rs.DistributedOptimizer(
        sgd(rate, weight_decay=decay), rs.DeMo(top_k=4096, decay=0.0)
    )
    gradient = normal(64, 64)
    optimizer.apply_gradients([(tf.constant(gradient), weights)])
    clear = np.abs(gradient) > 1e-4
    expected = (1 - rate * decay) * start - rate * np.sign(gradient)
    np.testing.assert_allclose(weights.numpy()[clear], expected[clear], rtol=0, atol=5e-7)


def test_momentum_is_applied_once():
    """The method has no argument `momentum`, so the error names the optimizer's alone."""
    text = "both sides.* a momentum of 0.999 in DeMo. Instead, use SGD.momentum=0.0.\\.$"
    with pytest.raises(ValueError, match=text):
        rs.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9), rs.DeMo())


def test_explain():
    says = rs.DeMo().describe
    assert (
        says(TensorSpec("w", (3, 3, 16, 256))) == "32 of 3,072 frequencies of 12 chunks of 48 x 64"
    )
    assert says(TensorSpec("b", (100,))) == "32 of 50 frequencies of 2 chunks of 1 x 50"
    assert says(TensorSpec("prime", (67, 64))) == "32 of 64 frequencies of 67 chunks of 1 x 64"
    assert rs.DeMo().refuses(TensorSpec("bias", (5,))) is None


@pytest.mark.parametrize(
    ("name", "value"),
    [("decay", 1.0), ("decay", -0.1), ("top_k", 0), ("top_k", 1.5), ("chunk", 0), ("chunk", 257)],
)
def test_bad_input(name, value):
    with pytest.raises(ValueError, match=f"`{name}`.*Received: {name}={value!r}"):
        rs.DeMo(**{name: value})
