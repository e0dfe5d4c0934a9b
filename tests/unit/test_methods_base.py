"""Members that all methods inherit: config, registry, the dense exchange."""

import dataclasses
import json

import numpy as np
import pytest
import tensorflow as tf

import tf_redsync as rs
from tests.loops import loop
from tf_redsync.config import registered
from tf_redsync.exchange.capabilities import (
    Waiting,
    at_step,
    capability,
    clipping,
    dense_start,
    required,
)
from tf_redsync.exchange.context import Context
from tf_redsync.exchange.layout import BucketLayout, TensorSpec
from tf_redsync.exchange.loopback import run_step
from tf_redsync.exchange.method import initial_state
from tf_redsync.methods import SyncSchedule, Traits, from_config, serialize
from tf_redsync.methods.common.random_numbers import stream, uniform


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plain(rs.Method):
    """A method that adds no members to the base class."""


SPEC = TensorSpec("v", (2, 2))


def test_defaults():
    method = Plain()
    assert method.traits == Traits() and method.sync_schedule == SyncSchedule()
    assert method.traits.conserves and method.traits.momentum_in_exchange == 0.0
    assert method.refuses(SPEC) is None and method.describe(SPEC) == "Plain"
    assert clipping(method) is None and dense_start(method) is None
    assert at_step(method, 7) is method and capability(method, Waiting) is None
    assert method.init(BucketLayout((SPEC,), 2)) == {} and method.traits.state_kinds == {}
    with pytest.raises(NotImplementedError):
        method.dense()
    with pytest.raises(NotImplementedError):
        method.exchange([], {}, Context(BucketLayout((SPEC,), 2), 0, tf.constant(0, tf.int64)))


@loop(
    ("traits", "init", "named"),
    [
        ({"state_kinds": {}}, {"u": []}, r"`init` .*\[\].*'u'"),
        ({"state_kinds": {"u": "sum"}}, {}, r"`init` .*'u'.*\[\]"),
        ({"state_kinds": {"u": "max"}}, {"u": []}, "state_kinds.*'sum'.*'u'.*'max'"),
        ({"state_kinds": {"u": "sum"}}, {"u": tf.zeros([2])}, "lists.*'u'"),
        ({"momentum_in_exchange": 0.5}, {}, "`dense_exchange`.*momentum_in_exchange=0.5"),
    ],
)
def test_declarations_are_checked_when_the_state_is_created(traits, init, named):
    class Bad(Plain):
        pass

    Bad.traits, Bad.init = Traits(**traits), lambda self, layout: init
    with pytest.raises(ValueError, match=named) as raised:
        initial_state(Bad(), BucketLayout((SPEC,), 2))
    assert "Bad" in str(raised.value)


def test_momentum_of_a_wrapped_method_is_checked():
    class Bad(Plain):
        traits = Traits(momentum_in_exchange=0.5, rounds_values=True)

    with pytest.raises(ValueError, match="Bad .*`dense_exchange`"):
        initial_state(rs.HalfPrecision(method=Bad()), BucketLayout((SPEC,), 2))


def test_initial_state_consists_of_tensors():
    class Numpy(Plain):
        traits = Traits(state_kinds={"u": "sum"})

        def init(self, layout):
            return {"u": (np.ones(2, np.float32),)}

    (u,) = initial_state(Numpy(), BucketLayout((SPEC,), 2))["u"]
    assert tf.is_tensor(u) and u.dtype == tf.float32 and u.shape == [2]


def test_base_class_is_small():
    """A member that few methods need belongs to `exchange/capabilities.py` or `Traits`."""
    public = {name for name in vars(rs.Method) if not name.startswith("_")}
    assert {"traits", "exchange"} < public and len(public) <= 10, public


def test_capability_implied_by_the_schedule_is_required():
    class Unready(Plain):
        sync_schedule = SyncSchedule(waits_for="something")

    with pytest.raises(TypeError, match="Unready.*Waiting"):
        required(Unready(), Waiting)


def test_inherited_dense_exchange_is_a_scaled_sum():
    layout = BucketLayout((SPEC,), 2)
    grads = [[tf.fill([2, 2], 1.0)], [tf.fill([2, 2], 2.0)]]
    step = run_step(Plain(), layout, grads, [{}, {}], 0, "dense_exchange")
    np.testing.assert_array_equal(step.totals[1][0], np.full((2, 2), 3.0))
    ctx = Context(layout, 1, tf.constant(0, tf.int64), scale=tf.constant(0.5))
    exchange = Plain().dense_exchange(grads[1], {}, ctx)
    np.testing.assert_array_equal(next(exchange).tensors[0], np.full((2, 2), 1.0))


def test_methods_take_keywords_only():
    with pytest.raises(TypeError):
        rs.RedSync(0.001)


@pytest.mark.parametrize("name", ["Nope", None, "redsync"])
def test_unknown_class(name):
    with pytest.raises(ValueError, match=rf"`class_name` must be one of.*class_name={name!r}"):
        from_config({"class_name": name, "config": {}})


def test_every_public_configurable_is_registered():
    known = registered()
    for cls in (rs.Dense, rs.NoExchange, rs.RedSync, rs.Policy, rs.Rule):
        assert known[cls.__name__] is cls
    assert known["DenseWarmUp"] is rs.DenseWarmUp
    assert known["ExponentialWarmUp"] is rs.ExponentialWarmUp


def test_numpy_hyper_parameters_are_serialized_as_json():
    """They often come from a sweep; other workers receive the config as JSON."""
    method = rs.RedSync(
        density=np.float32(0.25),
        momentum=np.float64(0.5),
        masking=np.bool_(False),
        dense_below=np.int64(10),
        warm_up=rs.DenseWarmUp(np.int32(3)),
    )
    assert from_config(json.loads(json.dumps(serialize(method)))) == method


def test_streams_differ_by_seed_step_and_position():
    """Each number differs between streams, and the mean of all is 1/2."""
    keys = [(seed, step, at) for seed in (0, 1, 7) for step in range(10) for at in range(-1, 9)]
    draws = [
        uniform([50], stream(seed, tf.constant(step, tf.int64), at)).numpy()
        for seed, step, at in keys
    ]
    numbers = np.concatenate(draws)
    assert numbers.min() >= 0 and numbers.max() < 1
    assert np.unique(numbers).size > 0.99 * numbers.size  # of 2^23
    assert numbers.mean() == pytest.approx(0.5, abs=4 / np.sqrt(12 * numbers.size))
    correlation = np.corrcoef(draws) - np.eye(len(draws))
    assert np.abs(correlation).max() < 6 / np.sqrt(50)
    np.testing.assert_array_equal(
        draws[keys.index((1, 3, 2))],
        uniform([50], stream(1, tf.constant(3, tf.int64), 2)),
    )
