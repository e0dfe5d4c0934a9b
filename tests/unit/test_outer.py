"""Outer optimizers: update rules, configs, bad input, and slots when the workers change."""

import json

import keras
import numpy as np
import pytest
import tensorflow as tf
from typing_extensions import override

import tf_redsync as rs
from tests.loops import loop
from tf_redsync.config import from_config, serialize
from tf_redsync.exchange.layout import TensorSpec, make_buckets
from tf_redsync.network.collectives import Alone
from tf_redsync.step.nonfinite import NonFiniteCounter
from tf_redsync.step.schedule_choice import for_buckets
from tf_redsync.step.state_variables import Consensus, StateVariables, replica_variable

DECAY = keras.optimizers.schedules.CosineDecay(0.7, 100)


@pytest.mark.parametrize(
    "outer",
    [
        rs.outer.SGD(),
        rs.outer.Nesterov(),
        rs.outer.Adam(),
        rs.outer.Nesterov(learning_rate=DECAY),
        None,
    ],
    ids=repr,
)
def test_configs_create_equal_methods(outer):
    method = rs.LocalSGD(steps=4, outer=outer)
    text = json.dumps(serialize(method))
    assert from_config(json.loads(text)) == method
    assert hash(from_config(json.loads(text))) == hash(method)


CHANGES = np.random.default_rng(0).standard_normal((3, 5)).astype("f4")  # of three rounds


def sgd_numpy(rate, momentum, nesterov):
    """Returns the steps of PyTorch's SGD along `CHANGES`."""
    velocity, steps = 0.0, []
    for change in np.float64(CHANGES):
        velocity = momentum * velocity + change
        steps.append(rate * (change + momentum * velocity if nesterov else velocity))
    return steps


def adam_numpy(rate, beta_1, beta_2, epsilon):
    """Returns the steps of Adam (Kingma, Ba 2015, algorithm 1) along `CHANGES`."""
    m, v, steps = 0.0, 0.0, []
    for t, change in enumerate(np.float64(CHANGES), 1):
        m = beta_1 * m + (1 - beta_1) * change
        v = beta_2 * v + (1 - beta_2) * change**2
        steps.append(rate * m / (1 - beta_1**t) / (np.sqrt(v / (1 - beta_2**t)) + epsilon))
    return steps


@loop(
    ("outer", "expected"),
    [
        (rs.outer.SGD(learning_rate=0.5, momentum=0.8), sgd_numpy(0.5, 0.8, nesterov=False)),
        (rs.outer.Nesterov(), sgd_numpy(0.7, 0.9, nesterov=True)),
        (rs.outer.Adam(learning_rate=0.1, epsilon=0.01), adam_numpy(0.1, 0.9, 0.99, 0.01)),
    ],
)
def test_steps_follow_the_published_rule(outer, expected):
    slots = {name: [tf.zeros([5])] for name in outer.slots}
    for rounds, (change, step) in enumerate(zip(CHANGES, expected, strict=True)):
        (found,), slots = outer.step([tf.constant(change)], slots, tf.constant(rounds, tf.int64))
        np.testing.assert_allclose(found, step, rtol=1e-5)


@pytest.mark.parametrize("library", ["keras", "tf_keras"])
def test_schedule_counts_rounds(library):
    schedules = __import__(library).optimizers.schedules
    decay = schedules.ExponentialDecay(0.8, decay_steps=1, decay_rate=0.5)
    outer = rs.outer.SGD(learning_rate=decay)
    changes = [tf.constant([2.0, -4.0])]
    for rounds, rate in ((0, 0.8), (2, 0.2)):
        (step,), slots = outer.step(changes, {}, tf.constant(rounds, tf.int64))
        np.testing.assert_allclose(step, [2 * rate, -4 * rate], rtol=1e-6)
        assert slots == {}


@pytest.mark.parametrize("library", ["keras", "tf_keras"])
def test_repr_shows_the_schedule(library):
    cosine = __import__(library).optimizers.schedules.CosineDecay
    texts = {repr(rs.outer.SGD(learning_rate=cosine(0.5, n))) for n in (100, 200)}
    assert len(texts) == 2
    assert any("CosineDecay(" in t and "decay_steps=100" in t for t in texts)


@pytest.mark.parametrize("library", ["keras", "tf_keras"])
def test_users_own_schedule(library):
    keras_module = __import__(library)

    class Halves(keras_module.optimizers.schedules.LearningRateSchedule):
        def __call__(self, step):
            return 0.5 ** tf.cast(step, tf.float32)

        def get_config(self):
            return {}

    with pytest.raises(ValueError, match=f"{library}.saving.register_keras_serializable.*Halves"):
        rs.outer.SGD(learning_rate=Halves())
    keras_module.saving.register_keras_serializable(package=f"outer_{library}")(Halves)
    outer = rs.outer.SGD(learning_rate=Halves())
    assert float(outer.rate(tf.constant(3, tf.int64))) == 0.125
    assert from_config(serialize(outer)) == outer


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: rs.DiLoCo(outer=keras.optimizers.SGD(0.7)),
            "`outer` must be None or",
        ),
        (lambda: rs.DiLoCo(outer=rs.outer.Nesterov), "Nesterov()"),
        (lambda: rs.outer.SGD(learning_rate=0.0), "`learning_rate` must be"),
        (lambda: rs.outer.Nesterov(learning_rate=float("inf")), "must be in (0, inf)"),
        (lambda: rs.outer.Adam(epsilon=float("inf")), "`epsilon` must be in (0, inf)"),
        (lambda: rs.outer.Nesterov(momentum=1.0), "`momentum` must be in"),
        (lambda: rs.outer.SGD(nesterov=1), "`nesterov` must be"),
        (lambda: rs.outer.SGD(learning_rate=type(DECAY)), "CosineDecay(...)"),
        (lambda: rs.outer.KerasSchedule(text="x"), "text='x'"),
        (lambda: rs.outer.KerasSchedule(text='{"library": "keras"}'), "KerasSchedule.of"),
        (lambda: rs.outer.Adam(beta_2=1.5), "`beta_2` must be in"),
        (lambda: rs.CodedTopK(outer=rs.outer.SGD()), "Received: outer=SGD("),
        (lambda: rs.contrib.PostLocalSGD(start=0), "`start` must be a number of steps"),
    ],
)  # fmt: skip
def test_bad_input(make, message):
    with pytest.raises(ValueError) as error:
        make()
    assert message in str(error.value)


def test_only_one_dense_warm_up():
    optimizer = rs.DistributedOptimizer(keras.optimizers.SGD(), rs.contrib.PostLocalSGD(start=7))
    assert optimizer.exchange.warm_up.wanted == rs.DenseWarmUp(steps=7)
    again = type(optimizer).from_config(optimizer.get_config())
    assert again.exchange.warm_up.wanted == rs.DenseWarmUp(steps=7)
    with pytest.raises(ValueError, match="PostLocalSGD has .* dense start.*warm_up=None"):
        rs.DistributedOptimizer(
            keras.optimizers.SGD(), rs.contrib.PostLocalSGD(), warm_up=rs.DenseWarmUp(5)
        )
    with pytest.raises(ValueError, match="the same dense start in all methods"):
        rule = rs.Rule(pattern="x", method=rs.contrib.PostLocalSGD(start=8))
        policy = rs.Policy(default=rs.contrib.PostLocalSGD(start=7), rules=(rule,))
        rs.DistributedOptimizer(keras.optimizers.SGD(), policy)


def test_slots_are_shared_state():
    def state(method):
        buckets = make_buckets([(TensorSpec("x", (3, 2)), method)], 2)
        return for_buckets(buckets, 2).init(buckets[0])

    values, kinds = state(rs.DiLoCo())
    assert {n: [v.shape.as_list() for v in vs] for n, vs in values.items()} == {
        "outer_momentum": [[3, 2]],
        "outer_steps": [[]],
    }
    assert kinds == {"outer_momentum": "shared", "outer_steps": "shared"}
    values, kinds = state(rs.SBC(dense_below=0, outer=rs.outer.Adam()))
    assert set(kinds) == {"residual", "outer_momentum", "outer_velocity", "outer_steps"}
    assert state(rs.LocalSGD())[0] == {}


class OneOfFour(Alone):
    """The network of a worker whose three others do not change their weights."""

    workers = 4

    @override
    def all_gather(self, message):
        return tf.pad(super().all_gather(message), [[0, 3], [0, 0]])


ULP = {"bfloat16": 2.0**-7, "float16": 2.0**-10}  # of 1


@loop(
    ("method", "dtype"),
    [
        *((rs.LocalSGD(steps=1), dtype) for dtype in ULP),
        (rs.DiLoCo(steps=1, outer=rs.outer.SGD(learning_rate=1.0)), "bfloat16"),
        (
            rs.StreamingDiLoCo(
                steps=1, fragments=1, overlap=0, mixing=0, value_bits=32, outer=None
            ),
            "bfloat16",
        ),
    ],
)
def test_changes_below_the_resolution_of_the_weights_add_up(method, dtype):
    """One of four workers moves a weight by its smallest step in each round, so W by a quarter."""
    weight = tf.Variable(tf.ones([8], dtype), name="x")
    buckets = make_buckets([(TensorSpec("x", (8,), dtype), method)], 4)
    network = OneOfFour()
    schedule = for_buckets(buckets, 4, nonfinite=NonFiniteCounter(["x"], network, 0))
    states = [StateVariables(*schedule.init(buckets[0]), 0, replica_variable)]
    consensus = Consensus([weight])
    for _ in range(40):
        schedule.before_update(consensus)
        weight.assign_add(tf.fill([8], tf.cast(ULP[dtype], dtype)))
        schedule.after_update(consensus, states, tf.constant(0.0), network)
    np.testing.assert_array_equal(tf.cast(weight, tf.float32), [1.0 + 10 * ULP[dtype]] * 8)


def test_table_names_the_outer_optimizer():
    spec = TensorSpec("x", (3, 2))
    assert rs.DiLoCo(steps=50).describe(spec) == (
        "all-reduce every 50 steps, then Nesterov(learning_rate=0.7, momentum=0.9, nesterov=True)"
    )
    assert "in 1000 steps, then all-reduce every 8" in rs.contrib.PostLocalSGD().describe(spec)
