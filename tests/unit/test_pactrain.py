"""PacTrain: mask tracker, capacity for masks, ternary values, bad input."""

import warnings

import numpy as np
import pytest
import tensorflow as tf

import tf_redsync as rs
from tests.loops import loop
from tests.oracle.pactrain import PrunedOracle, capacity
from tests.unit.test_gradient_exchange import SHAPES, build, gradients, make_step
from tf_redsync.exchange import loopback
from tf_redsync.exchange.layout import BucketLayout, TensorSpec
from tf_redsync.methods.common.sparsifier import kept_elements
from tf_redsync.step import masks

PRUNED = ("embedding", "kernel", "out")  # of SHAPES, in the order of the positions
POSITIONS = [i for i, name in enumerate(SHAPES) if name in PRUNED]


def random_masks(sparsity, seed=0, more=0):
    """Returns masks by position; every variable keeps its capacity plus `more`."""
    rng, found = np.random.default_rng(seed), {}
    for position in POSITIONS:
        shape = list(SHAPES.values())[position]
        mask = np.zeros(np.prod(shape), bool)
        mask[rng.permutation(mask.size)[: capacity(sparsity, mask.size) + more]] = True
        found[position] = mask.reshape(shape)
    return found


def write(strategy, exchange, found):
    with strategy.scope():
        masks.write(exchange, found)


def step_bytes(sparsity=None, workers=2):
    """Returns the bytes of a step, dense or compact; biases and scales are always dense."""
    sizes = {name: int(np.prod(shape)) for name, shape in SHAPES.items()}
    compact = {n: capacity(sparsity, sizes[n]) for n in PRUNED} if sparsity is not None else {}
    return 2 * (workers - 1) / workers * 4 * sum((sizes | compact).values())


def complete_masks(found):
    """Returns masks of all variables that keep everything."""
    return [found.get(i, np.ones(shape, bool)) for i, shape in enumerate(SHAPES.values())]


def test_all_workers_switch_in_the_same_step(mirrored):
    """Dense, then masked, and T steps later compact; a non-finite step does not count."""
    method = rs.contrib.PacTrain(sparsity=0.6, stable_steps=2, dense_below=0)
    strategy = mirrored(2)
    exchange = build(strategy, method)
    exchange.expects_pruning = True
    step, found = make_step(strategy, exchange), random_masks(0.6)
    # The test writes masks before steps 1 and 6; step 2 is not finite.
    dense = [True, True, True, True, False, False, True, True, False]
    for number, is_dense in enumerate(dense):
        if number == 1:
            write(strategy, exchange, found)
        if number == 6:
            found = random_masks(0.7, seed=1)
            write(strategy, exchange, found)
        grads = gradients(number, 2)
        if number == 2:
            grads[1][0].flat[0] = np.nan
        totals, finite = step(grads)
        assert finite == (number != 2)
        assert float(exchange.bytes_sent.numpy()) == step_bytes(None if is_dense else 0.6), number
        if finite:
            expected = PrunedOracle(complete_masks(found if number else {})).step(grads)
            for own in totals:
                for total, wanted in zip(own, expected, strict=True):
                    np.testing.assert_array_equal(total, wanted)
    assert exchange.bytes_per_step() == step_bytes(0.6)


def test_other_methods_of_a_policy_continue_while_it_waits(mirrored):
    policy = rs.Policy(
        default=rs.contrib.PacTrain(sparsity=0.5, stable_steps=1, dense_below=0),
        rules=(rs.Rule(pattern="^kernel", method=rs.TopK(density=0.1, dense_below=0)),),
    )
    strategy = mirrored(2)
    exchange = build(strategy, policy)
    with pytest.warns(UserWarning, match="PacTrain exchanges densely"):
        step = make_step(strategy, exchange)
        totals, _ = step(gradients(0, 2))
    assert np.count_nonzero(totals[0][1]) <= 2 * 60
    assert all(np.all(t) for i, t in enumerate(totals[0]) if i != 1)
    found = {p: m for p, m in random_masks(0.5).items() if p != 1}
    write(strategy, exchange, found)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # warned once
        for number in (1, 2):
            totals, _ = step(gradients(number, 2))
            for position, mask in found.items():
                np.testing.assert_array_equal(totals[0][position] != 0, mask)


def test_oversized_mask_is_applied_densely(mirrored):
    method = rs.contrib.PacTrain(sparsity=0.5, stable_steps=0, dense_below=0)
    strategy = mirrored(2)
    exchange = build(strategy, method)
    found = random_masks(0.5, more=5)
    with pytest.warns(UserWarning) as caught:
        write(strategy, exchange, found)
    assert len(caught) == len(PRUNED)
    texts = " ".join(str(w.message) for w in caught)
    for value in ("kernel", "305", "600", "300", "`sparsity`", "0.4916"):
        assert value in texts, value
    step = make_step(strategy, exchange)
    for number in range(2):
        totals, _ = step(gradients(number, 2))
        assert float(exchange.bytes_sent.numpy()) == step_bytes()
        for position, mask in found.items():
            np.testing.assert_array_equal(totals[0][position] != 0, mask)
    # As advised: the mask fits with this sparsity.
    again = rs.contrib.PacTrain(sparsity=0.4916, stable_steps=0, dense_below=0)
    layout = BucketLayout((TensorSpec("kernel", (30, 20)),), 2)
    assert bool(again.ready(again.with_masks(layout, [found[1]])))


def test_one_worker_prunes_without_a_network(mirrored):
    method = rs.contrib.PacTrain(sparsity=0.5, stable_steps=0, dense_below=0)
    strategy = mirrored(1)
    exchange = build(strategy, method)
    write(strategy, exchange, random_masks(0.5))
    grads = gradients(0, 1)
    totals, _ = make_step(strategy, exchange)(grads)
    expected = PrunedOracle(complete_masks(random_masks(0.5))).step(grads)
    for total, wanted in zip(totals[0], expected, strict=True):
        np.testing.assert_array_equal(total, wanted)
    assert float(exchange.bytes_sent.numpy()) == 0.0


@loop("sparsity", [0.0, 0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.29, 0.999])
def test_capacity(sparsity):
    for size in (0, 1, 2, 3, 10, 100, 999, 12_345_678):
        assert kept_elements(sparsity, size) == capacity(sparsity, size)
        assert kept_elements(np.float64(sparsity), size) == capacity(sparsity, size)


def one_step(method, mask, grads, number=0, phase="exchange"):
    """Runs one exchange of one tensor; `grads[worker]`."""
    layout = BucketLayout((TensorSpec("w", mask.shape),), len(grads))
    states = [method.with_masks(layout, [mask]) for _ in grads]
    inputs = [[tf.constant(g, tf.float32)] for g in grads]
    return loopback.run_step(method, layout, inputs, states, number, phase)


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_compact_sums_equal_dense_ones_bitwise(workers):
    rng = np.random.default_rng(workers)
    grads = [rng.standard_t(2, (40, 30)).astype("f4") for _ in range(workers)]
    mask = rng.random((40, 30)) < 0.4
    layout = BucketLayout((TensorSpec("w", mask.shape),), workers)
    inputs = [[tf.constant(g)] for g in grads]
    dense = loopback.run_step(rs.Dense(), layout, inputs, [{"velocity": []}] * workers, 0)
    for phase in ("exchange", "dense_exchange"):
        step = one_step(rs.contrib.PacTrain(sparsity=0.5), mask, grads, phase=phase)
        np.testing.assert_array_equal(step.totals[0][0], np.where(mask, dense.totals[0][0], 0))


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_ternary_is_unbiased(workers):
    """Each row is a sample of one gradient; half of its columns are pruned."""
    rng = np.random.default_rng(workers)
    row, samples = rng.standard_normal(32).astype("f4"), 4000
    mask = np.tile(np.arange(32) % 2 == 0, (samples, 1))
    row[1] = 1e6  # pruned, so it must not become the scaler
    method = rs.contrib.PacTrain(sparsity=0.5, ternary=True)
    step = one_step(method, mask, [np.tile(row, (samples, 1))] * workers)
    total = np.array(step.totals[0][0])
    assert not total[~mask].any()
    kept = total[:, ::2]
    units = kept / np.abs(row[::2]).max()
    np.testing.assert_allclose(units, np.round(units), atol=1e-5)
    error = kept - workers * row[::2]
    deviation = error.std(axis=0) / samples**0.5
    assert np.all(np.abs(error.mean(axis=0)) <= 4.5 * deviation + 1e-6)
    assert error.std() > 0.1


def test_bits_of_the_ternary_form():
    """K = 4 workers: 7 codes in a float32, below 2^24, or 32 / 7 bits per kept element."""
    size = 70_000
    mask = np.arange(size).reshape(700, 100) % 5 == 0
    step = one_step(
        rs.contrib.PacTrain(sparsity=0.8, ternary=True), mask, [np.ones((700, 100))] * 4
    )
    assert step.bytes_sent == 3 * 4 * 2 + 1.5 * 4 * (size // 5) / 7


@pytest.mark.parametrize("ternary", [False, True])
@pytest.mark.parametrize("phase", ["exchange", "dense_exchange"])
def test_nonfinite_value_under_the_mask_skips_the_step(ternary, phase):
    mask = np.arange(40).reshape(8, 5) % 2 == 0
    grads = [np.ones((8, 5)), np.ones((8, 5))]
    method = rs.contrib.PacTrain(ternary=ternary)
    assert one_step(method, mask, grads, phase=phase).finite
    grads[1][0, 1] = np.inf
    assert not mask[0, 1]
    step = one_step(method, mask, grads, phase=phase)
    assert not step.finite and int(step.states[0]["stable"][0]) == 0


@pytest.mark.parametrize("ternary", [False, True])
@pytest.mark.parametrize("shape", [(), (1,), (0, 3)])
def test_scalars_and_empty_tensors(shape, ternary):
    for kept in (True, False):
        mask = np.full(shape, kept)
        step = one_step(rs.contrib.PacTrain(ternary=ternary), mask, [np.full(shape, 2.0)] * 3)
        np.testing.assert_array_equal(step.totals[0][0], np.full(shape, 6.0 if kept else 0.0))
        assert step.finite


def test_compressed_tensors_and_explain():
    method = rs.contrib.PacTrain(sparsity=0.75)
    assert "rank 1" in method.refuses(TensorSpec("bias", (5000,)))
    assert "dense_below" in method.refuses(TensorSpec("w", (31, 33)))
    assert method.refuses(TensorSpec("w", (32, 32))) is None and method.dense() == rs.Dense()
    assert method.describe(TensorSpec("w", (100, 100))) == "once pruned, k = 2,500"
    assert "ternary" in rs.contrib.PacTrain(ternary=True).describe(TensorSpec("w", (100, 100)))
    assert "tf_redsync.callbacks.Prune" in method.sync_schedule.waits_for
    assert rs.Dense().sync_schedule.waits_for == ""


@loop(
    ("name", "value"),
    [
        ("sparsity", 1.0),
        ("sparsity", -0.1),
        ("sparsity", float("nan")),
        ("sparsity", None),
        ("stable_steps", -1),
        ("stable_steps", 2.5),
        ("ternary", 1),
        ("seed", -1),
        ("dense_below", -1),
    ],
)
def test_bad_input(name, value):
    with pytest.raises(ValueError, match=f"`{name}` must be .*Received: {name}="):
        rs.contrib.PacTrain(**{name: value})
