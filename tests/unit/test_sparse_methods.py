"""Top-k, random-k and random block: energy, randomness, bad input."""

import numpy as np
import pytest
import tensorflow as tf

import tf_redsync as rs
from tests.loops import loop
from tests.methods import METHODS
from tf_redsync.exchange import loopback
from tf_redsync.exchange.layout import BucketLayout, TensorSpec, make_buckets
from tf_redsync.methods.common.random_numbers import stream

SPECS = (TensorSpec("a", (30, 40), position=0), TensorSpec("b", (70, 10), position=1))


def one_step(method, scales=(1.0, 1.0), specs=SPECS):
    rng = np.random.default_rng(0)
    values = [c * rng.standard_normal(s.shape) for c, s in zip(scales, specs, strict=True)]
    grads = [[tf.constant(v, tf.float32) for v in values]]
    layout = BucketLayout(specs, 1)
    step = loopback.run_step(method, layout, grads, loopback.initial_states(method, layout), 0)
    return values, [np.array(t) for t in step.totals[0]]


def energy(arrays):
    return sum(np.square(a).sum() for a in arrays)


def best_energy(values, k):
    everything = np.sort(np.concatenate([np.abs(v).reshape(-1) for v in values]))
    return np.square(everything[-k:]).sum()


@pytest.mark.parametrize("cls", [rs.RandomK, rs.RandomBlock])
@pytest.mark.parametrize(("bad", "finite"), [(0.0, True), (np.nan, False), (np.inf, False)])
def test_only_nonfinite_elements_skip_a_step(cls, bad, finite):
    """Elements whose sum overflows do not; a non-finite element that is not selected does."""
    method, layout = cls(density=0.1, dense_below=0), BucketLayout(SPECS, 2)
    grads = [[tf.fill(s.shape, 1e35) for s in SPECS] for _ in range(2)]
    grads[1][1] = tf.tensor_scatter_nd_add(grads[1][1], [[5, 5]], [bad])
    step = loopback.run_step(method, layout, grads, loopback.initial_states(method, layout), 0)
    assert bool(step.finite) is finite


def test_top_k_captures_the_largest_energy():
    values, totals = one_step(rs.TopK(density=0.1))
    for value, total in zip(values, totals, strict=True):
        assert energy([total]) == pytest.approx(best_energy([value], value.size // 10), rel=1e-6)


def test_top_k_of_the_model_selects_from_the_larger_layer():
    values, totals = one_step(rs.TopK(density=0.1, scope="model"), scales=(10.0, 0.1))
    assert energy(totals) == pytest.approx(best_energy(values, 190), rel=1e-6)
    # small layers get no elements
    assert np.count_nonzero(totals[0]) == 190 and not totals[1].any()


def test_whole_model_is_one_bucket():
    def buckets(method):
        return make_buckets([(s, method) for s in SPECS], 2, bucket_bytes=1)

    assert len(buckets(rs.TopK())) == 2
    (bucket,) = buckets(rs.TopK(scope="model"))
    assert len(bucket.layout.specs) == 2


def choices(method, spec, steps):
    return [
        method.choose(spec, stream(method.seed, tf.constant(t, tf.int64), spec.position)).numpy()
        for t in range(steps)
    ]


@pytest.mark.parametrize("cls", [rs.RandomK, rs.RandomBlock])
def test_random_selection(cls):
    """Distinct, of the right number, uniform over elements, different in every step."""
    method, spec, steps = cls(density=0.1, seed=5), TensorSpec("w", (10, 20), position=3), 400
    chosen = choices(method, spec, steps)
    assert all(c.size == 20 and np.unique(c).size == 20 for c in chosen)
    assert all(c.min() >= 0 and c.max() < 200 for c in chosen)
    counts = np.bincount(np.concatenate(chosen), minlength=200)
    assert counts.min() > 0.4 * steps / 10 and counts.max() < 1.8 * steps / 10
    assert len({c.tobytes() for c in chosen}) > 0.3 * steps
    # Equal for every worker and run; different for another seed or tensor.
    assert all(np.array_equal(a, b) for a, b in zip(chosen, choices(method, spec, 3), strict=False))
    other_seed = choices(cls(density=0.1, seed=6), spec, 3)
    other_tensor = choices(method, TensorSpec("w", (10, 20), position=4), 3)
    for other in (other_seed, other_tensor):
        assert not all(np.array_equal(a, b) for a, b in zip(chosen, other, strict=False))


def test_block_is_contiguous_and_wraps_around():
    for chosen in choices(rs.RandomBlock(density=0.3), TensorSpec("w", (7, 3)), 40):
        assert set(np.diff(chosen)) <= {1, -20}


def test_blocks_of_large_tensors_have_positions_above_int32():
    spec = TensorSpec("w", (2**16, 2**16 - 1))
    starts = np.array([c[0] for c in choices(rs.RandomBlock(density=1e-9), spec, 20)])
    assert starts.min() >= 0 and 2**31 < starts.max() < spec.size


def test_random_selection_does_not_depend_on_the_data():
    """Workers whose gradients differ by orders of magnitude send the same elements."""
    method, layout = rs.RandomK(density=0.2), BucketLayout(SPECS, 2)
    grads = [[tf.fill(s.shape, scale) for s in SPECS] for scale in (1e-6, 1e6)]
    states = loopback.initial_states(method, layout)
    step = loopback.run_step(method, layout, grads, states, 7)
    for first, second in zip(*[s["residual"] for s in step.states], strict=True):
        np.testing.assert_array_equal(np.equal(first, 0), np.equal(second, 0))


@loop("cls", [rs.TopK, rs.RandomK, rs.RandomBlock])
@loop("options", [{"density": 0.0}, {"density": 1.5}, {"density": "x"}, {"dense_below": -1}])
def test_bad_input(cls, options):
    ((name, value),) = options.items()
    with pytest.raises(ValueError, match=f"`{name}`.*Received: {name}={value!r}"):
        cls(**options)


def test_bad_scope():
    with pytest.raises(ValueError, match="`scope` must be one of.*Received: scope='net'"):
        rs.TopK(scope="net")


def test_small_tensors_and_biases_are_rejected():
    for method in (rs.TopK(), rs.RandomK(), rs.RandomBlock()):
        assert "rank 1" in method.refuses(TensorSpec("bias", (5000,)))
        assert "dense_below" in method.refuses(TensorSpec("w", (31, 33)))
        assert method.refuses(TensorSpec("w", (32, 32))) is None
    assert rs.TopK(scope="model").refuses(TensorSpec("bias", (5,))) is None


def test_table_lists_every_method():
    listed = {e.name: e for e in rs.methods.table().entries}
    assert listed.keys() == METHODS.keys()
    text = str(rs.methods.table())
    assert all(e.paper and e.requests and e.bits and e.name in text for e in listed.values())
    assert listed["TopK"].conserves and not listed["NoExchange"].conserves
