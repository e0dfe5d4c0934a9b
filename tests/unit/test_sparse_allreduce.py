"""gTop-k, SparCML, Ok-Topk: the papers' guarantees, volume, conservation, bad input."""

import math

import numpy as np
import pytest
import tensorflow as tf

import tf_redsync as rs
from tests.loops import loop
from tests.oracle.ok_topk import OkTopkOracle
from tests.oracle.sparse import count
from tests.oracle.trees import GTopKOracle, SparCMLOracle, largest, paper_tree
from tf_redsync.contrib import ok_topk
from tf_redsync.exchange import driver, loopback
from tf_redsync.exchange.layout import BucketLayout, TensorSpec

SHAPES = ((30, 40), (70, 10), (97,))
SIZE = 1200 + 700 + 97
METHODS = (rs.contrib.GTopK, rs.contrib.SparCML, rs.contrib.OkTopk)
every_method = loop("cls", METHODS)


def draw(rng, workers, shapes=SHAPES):
    """Returns gradients `[worker][tensor]` with a common component, as in training."""
    common = [rng.standard_t(3, s) for s in shapes]
    return [[np.float32(c + rng.standard_t(3, c.shape)) for c in common] for _ in range(workers)]


def constants(arrays):
    return tf.nest.map_structure(tf.constant, arrays)


def train(method, grads_of_steps, shapes=SHAPES, traced=False):
    """Yields gradients, old states and the result of every step."""
    specs = tuple(TensorSpec(f"v{i}", s, position=i) for i, s in enumerate(shapes))
    layout = BucketLayout(specs, len(grads_of_steps[0]))
    run = loopback.traced_step(method, layout) if traced else None
    states = loopback.initial_states(method, layout)
    for number, grads in enumerate(grads_of_steps):
        if traced:
            step = run(constants(grads), states, number)
        else:
            step = loopback.run_step(method, layout, constants(grads), states, number)
        yield grads, states, step
        states = step.states


def vector(tensors):
    return np.concatenate([np.float64(t).reshape(-1) for t in tensors])


def conservation_error(grads, old, step):
    """Returns the largest |sum(gradient + old residual) - total - sum(new residual)|."""
    put_in = sum(vector(g) + vector(s["residual"]) for g, s in zip(grads, old, strict=True))
    kept = sum(vector(s["residual"]) for s in step.states)
    return np.abs(put_in - vector(step.totals[0]) - kept).max()


ORACLES = {
    rs.contrib.GTopK: lambda workers: GTopKOracle(SHAPES, workers, 0.03),
    rs.contrib.SparCML: lambda workers: SparCMLOracle(SHAPES, workers, 0.03),
    rs.contrib.OkTopk: lambda workers: OkTopkOracle(SHAPES, workers, 0.03, 32, 64),
}


@every_method
@pytest.mark.parametrize("workers", [6, 13])
def test_equals_the_oracle_and_conserves_gradients(cls, workers):
    """Worker counts that the conformance tests omit."""
    rng, reference = np.random.default_rng(workers), ORACLES[cls](workers)
    for grads, old, step in train(cls(density=0.03), [draw(rng, workers) for _ in range(2)]):
        assert conservation_error(grads, old, step) < 1e-5 * workers
        for found, expected in zip(step.totals[-1], reference.step(grads), strict=True):
            np.testing.assert_array_equal(found, expected)
        for state, residuals in zip(step.states, reference.residuals, strict=True):
            for found, expected in zip(state["residual"], residuals, strict=True):
                np.testing.assert_array_equal(found, expected)


# ----------------------------------------------------------------------------------- gTop-k


@pytest.mark.parametrize("workers", [2, 4, 8, 16])
def test_gtopk_equals_the_papers_tree(workers):
    ((grads, _, step),) = train(
        rs.contrib.GTopK(density=0.05), [draw(np.random.default_rng(workers), workers)]
    )
    k = count(0.05, SIZE)
    sent = [largest(np.concatenate([t.ravel() for t in g]), k) for g in grads]
    total = np.concatenate([np.ravel(t) for t in step.totals[0]])
    np.testing.assert_array_equal(total, paper_tree(sent, k))
    assert np.count_nonzero(total) == k
    rounds = int(math.log2(workers))
    assert step.bytes_sent == 4 * (2 + 2 * k) * rounds  # 2 k log2(K) words, and headers


def test_gtopk_closes_the_papers_leak():
    """An element that one branch drops and another delivers is kept in the residual."""
    values = np.zeros((4, 8), np.float32)
    values[0, [0, 1]], values[1, [2, 3]] = (5, 1), (6, 7)  # element 1 is dropped here
    values[2, [1, 4]], values[3, [1, 5]] = (9, 2), (9, 3)  # and selected here
    ((grads, old, step),) = train(rs.contrib.GTopK(density=0.25), [[[v] for v in values]], ((8,),))
    total, kept = vector(step.totals[0]), [vector(s["residual"]) for s in step.states]
    np.testing.assert_array_equal(total, [0, 18, 0, 7, 0, 0, 0, 0])
    np.testing.assert_array_equal(kept[0], [5, 1, 0, 0, 0, 0, 0, 0])
    np.testing.assert_array_equal(kept[1], [0, 0, 6, 0, 0, 0, 0, 0])
    assert conservation_error(grads, old, step) == 0


# ---------------------------------------------------------------------------------- SparCML


@loop("workers", [2, 3, 8])
@loop("density", [0.01, 0.2, 0.7])
def test_sparcml_total_equals_top_k(workers, density):
    rng = np.random.default_rng(0)
    steps = [draw(rng, workers) for _ in range(2)]
    both = [train(cls(density=density), steps) for cls in (rs.contrib.SparCML, rs.TopK)]
    for (_, _, ours), (_, _, plain) in zip(*both, strict=True):
        for found, expected in zip(ours.totals[0], plain.totals[0], strict=True):
            scale = np.abs(expected).max()
            np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6 * scale)
            assert workers > 2 or np.array_equal(found, expected)
        for a, b in zip(ours.states, plain.states, strict=True):
            np.testing.assert_array_equal(vector(a["residual"]), vector(b["residual"]))


def test_sparcml_switches_to_dense_when_that_is_shorter():
    """At 10 % and 8 workers: 0.2 n and 0.4 n words, then 0.8 n; at 30 % 0.6 n, then n."""
    for density, lengths in ((0.1, (0.2, 0.4, 0.8)), (0.3, (0.6, 1, 1)), (0.6, (1, 1, 1))):
        ((_, _, step),) = train(
            rs.contrib.SparCML(density=density), [draw(np.random.default_rng(0), 8, ((40, 50),))],
            ((40, 50),),
        )  # fmt: skip
        words = [driver.payload_bytes(r) / 4 for r in step.requests]
        heads = [1 if length == 1 else 2 for length in lengths]
        assert words == [2000 * n + h for n, h in zip(lengths, heads, strict=True)]
        assert step.bytes_sent == 4 * sum(words)


# ---------------------------------------------------------------------------------- Ok-Topk


@pytest.mark.parametrize("workers", [2, 3, 8, 14])
def test_ok_topk_sends_less_than_6_k_words(workers):
    k = 1400
    ((_, _, step),) = train(
        rs.contrib.OkTopk(density=0.1), [draw(np.random.default_rng(0), workers, ((100, 140),))],
        ((100, 140),),
    )  # fmt: skip
    slots = math.ceil(1.25 * k / workers)
    assert step.bytes_sent == pytest.approx(4 * 2 * (workers - 1) * (3 + 2 * slots))
    assert step.bytes_sent / 4 < 6 * k * (workers - 1) / workers
    payloads = sum(int(driver.payload_bytes(r)) for r in step.requests)
    assert payloads == 4 * (workers + 1) * (3 + 2 * slots)
    assert rs.contrib.OkTopk().traits.bits == "80 density (1 + 1 / K)"


@pytest.mark.parametrize("workers", [2, 7])
def test_ok_topk_captures_as_much_as_top_k(workers):
    """Measured on the k largest sums of top-k; two of six steps evaluate thresholds."""
    rng, method = (
        np.random.default_rng(workers),
        rs.contrib.OkTopk(density=0.03, threshold_interval=5),
    )
    k, shares, counts = count(0.03, SIZE), [], []
    for grads, old, step in train(method, [draw(rng, workers) for _ in range(6)]):
        sums = [vector(g) + vector(s["residual"]) for g, s in zip(grads, old, strict=True)]
        best = largest(sum(largest(s, k) for s in sums), k)
        total = vector(step.totals[0])
        shares.append(np.square(total).sum() / np.square(best).sum())
        counts.append(np.count_nonzero(total))
    assert counts[0] == counts[5] == k  # exact where thresholds are evaluated
    assert 0.6 * k < min(counts) and max(counts) <= workers * math.ceil(1.25 * k / workers)
    assert shares[0] > 0.95 and min(shares) > 0.85


def test_ok_topk_moves_its_regions_to_the_large_elements():
    rng, workers = np.random.default_rng(0), 4
    scale = np.where(np.arange(2000) < 200, 10.0, 1.0)  # almost all selected elements are there
    steps = [
        [[np.float32(scale * rng.standard_normal(2000))] for _ in range(workers)] for _ in range(4)
    ]
    method = rs.contrib.OkTopk(density=0.05, threshold_interval=1, partition_interval=2)
    delivered, points = [], []
    for _, _, step in train(method, steps, ((2000,),)):
        delivered.append(np.count_nonzero(step.totals[0][0]))
        points.append(step.states[0]["regions"][0].numpy())
    k, slots = 100, math.ceil(1.25 * 100 / workers)
    assert delivered[0] < 1.2 * slots  # one region has them all, and its row is full
    assert delivered[1:] == [k] * 3
    assert np.array_equal(points[0], points[1]) and not np.array_equal(points[1], points[2])
    edges = ok_topk.region_edges(tf.constant(points[0]), workers).numpy()
    assert edges[0] == 0 and edges[-1] == 2000 and edges[3] < 200


def test_ok_topk_reuses_and_lowers_its_thresholds():
    """After an evaluation on large gradients, smaller ones are below it; it decays by 1.2 %."""
    rng = np.random.default_rng(0)
    large, small = [draw(rng, 1)[0]] * 2, [[0.01 * t for t in g] for g in draw(rng, 2)]
    method = rs.contrib.OkTopk(density=0.03, threshold_interval=4)
    found = []
    for _, _, step in train(method, [large, *[small] * 4]):
        state = step.states[0]
        found.append((float(state["own_threshold"][0]), float(state["threshold"][0])))
    assert found[1][0] == pytest.approx(found[0][0] / 1.012)
    assert found[1][1] == pytest.approx(found[0][1] / 1.012)
    assert found[2][0] == pytest.approx(found[1][0] / 1.012)
    assert found[4][0] < 0.9 * found[3][0]


@pytest.mark.parametrize("workers", [1, 3, 64, 100])
def test_regions_survive_a_change_of_worker_count(workers):
    """Equal shares of a skewed selection, computed by one number of workers, used by another."""
    positions = tf.constant(np.arange(640) ** 2, tf.int64)
    size, count_ = 640**2, tf.constant(640)
    starts = ok_topk.proposed_edges(positions, count_, 64, size)
    edges = ok_topk.region_edges(ok_topk.resampled_edges(starts, size), workers).numpy()
    assert edges.shape == (workers + 1,) and edges[0] == 0 and edges[-1] == size
    shares = np.histogram(positions, edges)[0]
    assert shares.min() >= 640 // workers - 2 and shares.max() <= -(-640 // workers) + 2


# -------------------------------------------------------------------------------------- all


@every_method
@loop("shapes", [((),), ((2,), (0, 4)), ((0,),), ((7,), (1, 1))])
def test_few_elements(cls, shapes):
    rng = np.random.default_rng(0)
    for grads, old, step in train(cls(), [draw(rng, 3, shapes)] * 3, shapes):
        assert step.finite
        if vector(grads[0]).size:
            assert conservation_error(grads, old, step) < 1e-5


@every_method
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_zero_gradients_and_then_nonfinite_ones(cls, bad):
    zeros = [[np.zeros(s, np.float32) for s in SHAPES] for _ in range(3)]
    poisoned = [[t.copy() for t in g] for g in zeros]
    poisoned[2][1][3, 3] = bad
    first, second = train(cls(density=0.05), [zeros, poisoned])
    assert first[2].finite and not vector(first[2].totals[0]).any()
    assert not second[2].finite and second[2].states == second[1]


@every_method
@loop(("workers", "other"), [(2, 1), (3, 1), (3, 2), (4, 1), (4, 3)])
def test_overflowing_sum_skips_the_step(cls, workers, other):
    """In every round: the first, the last, and where workers forward partial sums."""
    grads = draw(np.random.default_rng(0), workers)
    for own in (grads[0], grads[other]):
        own[0][0, 0] = 2.5e38
    ((_, old, step),) = train(cls(density=0.05), [grads])
    assert not step.finite and step.states == old


@every_method
@pytest.mark.parametrize("workers", [3])
def test_graph_mode_equals_eager_mode_bitwise(cls, workers):
    steps = [draw(np.random.default_rng(1), workers) for _ in range(2)]
    both = [train(cls(density=0.05), steps, traced=traced) for traced in (False, True)]
    for (_, _, eager), (_, _, graph) in zip(*both, strict=True):
        for found, expected in ((graph.totals, eager.totals), (graph.states, eager.states)):
            for a, b in zip(tf.nest.flatten(found), tf.nest.flatten(expected), strict=True):
                np.testing.assert_array_equal(a, b)
        assert graph.bytes_sent == eager.bytes_sent


@loop(
    ("cls", "options"),
    [
        *[(cls, {"density": d}) for cls in METHODS for d in (0.0, 1.5, "x")],
        *[(cls, {"dense_below": -1}) for cls in METHODS],
        (rs.contrib.OkTopk, {"threshold_interval": 0}),
        (rs.contrib.OkTopk, {"partition_interval": 2.5}),
    ],
)
def test_bad_input(cls, options):
    ((name, value),) = options.items()
    with pytest.raises(ValueError, match=f"`{name}`.*Received: {name}={value!r}"):
        cls(**options)


@every_method
def test_compressed_tensors(cls):
    assert "rank 1" in cls().refuses(TensorSpec("bias", (5000,)))
    assert "dense_below" in cls().refuses(TensorSpec("w", (31, 33)))
    with pytest.raises(ValueError, match="`method` must be"):
        rs.HalfPrecision(method=cls())
