"""Streaming DiLoCo: the fragment of each variable, and the schedule."""

import functools
import time

import numpy as np
import pytest
import tensorflow as tf

import tf_redsync as rs
from tests.oracle import small_floats as oracle
from tf_redsync.exchange import loopback, traffic
from tf_redsync.exchange.layout import BucketLayout, TensorSpec, make_buckets
from tf_redsync.methods.common import small_floats
from tf_redsync.policy import Policy
from tf_redsync.step.background import Background
from tf_redsync.step.schedule_choice import for_buckets
from tf_redsync.step.streaming import Streaming, age_of

PATHS = (
    "embedding/embeddings",
    "block_0/attention/kernel",
    "block_0/attention/bias",
    "block_0/mlp/kernel",
    "block_1/attention/kernel",
    "block_1/mlp/kernel",
    "head",
)
SPECS = [TensorSpec(path, (300, 100 + i), position=i) for i, path in enumerate(PATHS)]


def fragments(method, specs=SPECS):
    return [a.spec.fragment for a in Policy(default=method).assign(specs)]


def buckets(method, workers=2):
    assigned = Policy(default=method).assign(SPECS)
    return make_buckets([(a.spec, a.method) for a in assigned], workers, bucket_bytes=8)


def test_layers_are_distributed_over_fragments_in_turn():
    assert fragments(rs.StreamingDiLoCo(fragments=4)) == [0, 1, 1, 2, 3, 0, 1]
    assert fragments(rs.StreamingDiLoCo(fragments=1)) == [0] * 7
    assert fragments(rs.StreamingDiLoCo(fragments=9)) == [0, 1, 1, 2, 3, 4, 5]
    assert fragments(rs.DiLoCo()) == [0] * 7


def test_defaults_fit_rounds_of_any_length():
    """Four fragments, five steps delay, as in the paper, if the round is long enough."""
    scaled = {
        n: (m.count, m.late)
        for n in (1, 2, 3, 8, 19, 20, 50)
        for m in [rs.StreamingDiLoCo(steps=n)]
    }
    assert scaled == {
        1: (1, 0), 2: (2, 1), 3: (3, 1), 8: (4, 2), 19: (4, 4), 20: (4, 5), 50: (4, 5),
    }  # fmt: skip
    assert rs.StreamingDiLoCo(steps=8).sync_schedule.delay == 2
    assert "2 steps late" in rs.StreamingDiLoCo(steps=8).describe(SPECS[0])
    with pytest.raises(ValueError, match=r"`overlap`.*at most 1"):
        rs.StreamingDiLoCo(steps=8, fragments=8, overlap=2)


def test_patterns_select_fragments():
    method = rs.StreamingDiLoCo(fragments=("block_1", "mlp", "."))
    assert fragments(method) == [2, 2, 2, 1, 0, 0, 2]
    spec = Policy(default=method).assign(SPECS)[4].spec
    assert "fragment 1 of 3, every 100 steps from step 100" in method.describe(spec)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"fragments": 0}, "fragments=0"),
        ({"fragments": "block"}, "fragments='block'"),
        ({"fragments": ()}, r"fragments=\(\)"),
        ({"fragments": ("block", "(")}, r"fragments='\('"),
        ({"fragments": 8, "steps": 7}, "fragments=8, steps=7"),
        ({"overlap": -1}, "overlap=-1"),
        ({"overlap": 26}, "at most 25.*overlap=26"),
        ({"fragments": 1, "steps": 8, "overlap": 8}, "at most 7.*overlap=8"),
        ({"mixing": 1.0}, "mixing=1.0"),
        ({"value_bits": 2}, "value_bits=2"),
        ({"value_bits": True}, "value_bits=True"),
    ],
)
def test_bad_arguments(given, message):
    with pytest.raises(ValueError, match=message):
        rs.StreamingDiLoCo(**given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("block", "embedding"), "variable 'head'"),
        ((".", "block"), "`fragments`.*unmatched: 'block'"),
    ],
)
def test_fragments_that_do_not_fit_the_model(given, message):
    with pytest.raises(ValueError, match=message):
        fragments(rs.StreamingDiLoCo(fragments=given))


def test_rules_need_equal_fragments():
    with pytest.raises(ValueError, match="same `fragments`"):
        rs.Policy(
            default=rs.StreamingDiLoCo(overlap=0),
            rules=(rs.Rule(pattern="head", method=rs.DiLoCo(steps=100)),),
        )


@pytest.mark.parametrize(("steps", "count", "overlap"), [(100, 4, 5), (10, 3, 3), (7, 1, 6)])
def test_each_fragment_is_sent_once_per_round(steps, count, overlap):
    """At most one fragment is in flight."""
    method = rs.StreamingDiLoCo(steps=steps, fragments=count, overlap=overlap)
    found = buckets(method)
    assert len(found) == count
    ages = np.array(
        [[int(age_of(b, tf.constant(t, tf.int64))) for t in range(3 * steps)] for b in found]
    )
    turns = (ages == 0).sum(axis=1)
    offsets = [p * steps // count for p in range(count)]
    assert sorted(turns) == sorted(2 if o == 0 else 3 for o in offsets)
    assert ((ages < overlap).sum(axis=0) <= 1).all()
    assert (ages[:, 0] == steps).all()  # no fragment was sent before the first step


def test_step_waits_for_exchanges_of_all_methods_of_a_fragment():
    ended = [tf.Variable(0), tf.Variable(0)]

    def slow(variable, _):
        tf.py_function(lambda: time.sleep(0.2), [], [])
        variable.assign_add(1)
        return tf.constant(0)

    background = Background(
        tf.distribute.get_strategy(), [functools.partial(slow, v) for v in ended]
    )

    @tf.function(autograph=False)
    def begin():
        for index in range(2):
            background.begin(index, tf.constant(0, tf.int64))

    @tf.function(autograph=False)
    def wait():
        counts = []
        for variable in ended:
            with tf.control_dependencies([background.wait()]):
                counts.append(variable.read_value())
        return counts

    for rounds in (1, 2):
        begin()
        assert list(map(int, wait())) == [rounds, rounds]


def test_bytes_of_a_round_and_of_its_largest_step():
    plain = for_buckets(buckets(rs.DiLoCo(steps=100)), 2)
    same = {"steps": 100, "value_bits": 32, "fragments": 4}
    at_once = for_buckets(buckets(rs.StreamingDiLoCo(overlap=0, **same)), 2)
    late = for_buckets(buckets(rs.StreamingDiLoCo(overlap=5, **same)), 2)
    assert isinstance(late, Streaming)
    assert at_once.bytes_per_step(2) == pytest.approx(plain.bytes_per_step(2))
    assert late.bytes_per_step(2) == pytest.approx(plain.bytes_per_step(2), rel=0.01)
    few = for_buckets(buckets(rs.StreamingDiLoCo(steps=100)), 2)
    # Two rounds of 4 bits with a 32-bit scale per 256 values, instead of a 32-bit all-reduce.
    assert few.bytes_per_step(2) == pytest.approx(plain.bytes_per_step(2) * 4.125 / 32, rel=0.05)


@pytest.mark.parametrize("bits", [4, 8])
def test_values_are_rounded_to_nearest(bits):
    generator = np.random.default_rng(bits)
    runs = generator.standard_normal((50, 256)) * np.exp(3 * generator.standard_normal((50, 256)))
    runs = runs.astype(np.float32)
    runs[0] = 0.0
    runs[1, 1:] = 0.0
    runs[2] = runs[2, 0] * np.resize([1.0, 0.75, 0.375, 2.0**-7, -(2.0**-8)], 256)  # midpoints
    found = small_floats.decode(small_floats.encode(tf.constant(runs), bits), bits)
    expected = np.stack([oracle.rounded(run, bits) for run in runs])
    np.testing.assert_array_equal(found, expected)
    codes = small_floats.encode(tf.constant(runs), bits).codes.numpy()
    assert codes.min() == 0 and codes.max() == 2**bits - 1
    assert len(np.unique(codes)) == 2**bits - 1  # all but the bits of -0


@pytest.mark.parametrize("bits", [4, 8])
def test_nonfinite_values_have_no_scale(bits):
    runs = np.ones((3, 256), np.float32)
    runs[1, 7], runs[2, 9] = np.inf, np.nan
    scales = small_floats.encode(tf.constant(runs), bits).scales.numpy()
    assert np.isfinite(scales[0]) and not np.isfinite(scales[1:]).any()


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("bits", [4, 8, 16, 32])
def test_overflowing_sum_is_not_applied(bits, workers):
    """Each worker's change is a float32 but their sum overflows."""
    method = rs.StreamingDiLoCo(value_bits=bits)
    layout = BucketLayout((TensorSpec("w", (4,)),), workers)
    states = loopback.initial_states(method, layout)
    step = loopback.run_step(method, layout, [[tf.fill([4], 3e38)]] * workers, states, 0)
    assert not step.finite


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("bits", [4, 8, 16, 32])
def test_fragment_without_elements(bits, workers):
    method = rs.StreamingDiLoCo(steps=20, fragments=1, value_bits=bits)
    layout = BucketLayout((TensorSpec("empty", (0, 2)),), workers)
    states = loopback.initial_states(method, layout)
    step = loopback.run_step(method, layout, [[tf.zeros([0, 2])]] * workers, states, 0)
    assert step.finite and step.totals[0][0].shape == (0, 2)
    assert step.bytes_sent == traffic.bytes_sent(traffic.messages(method, layout))
