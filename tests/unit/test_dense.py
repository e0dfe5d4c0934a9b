"""Dense and NoExchange: hyper-parameters, the scale, and local totals."""

import numpy as np
import pytest
import tensorflow as tf

import tf_redsync as rs
from tf_redsync.exchange.context import Context
from tf_redsync.exchange.layout import BucketLayout, TensorSpec
from tf_redsync.exchange.loopback import run_step
from tf_redsync.exchange.requests import AllReduce

SPECS = (TensorSpec("a", (3, 2)), TensorSpec("b", ()))


def gradients(step, workers):
    rng = np.random.default_rng(step)
    return [[rng.standard_normal(s.shape).astype("f4") for s in SPECS] for _ in range(workers)]


def test_scale_is_applied_before_the_sum():
    method, layout = rs.Dense(), BucketLayout(SPECS, 2)
    grads = [tf.constant(g) for g in gradients(0, 1)[0]]
    ctx = Context(layout, 0, tf.constant(0, tf.int64), scale=tf.constant(0.25))
    exchange = method.exchange(grads, method.init(layout), ctx)
    request = next(exchange)
    assert isinstance(request, AllReduce)
    for sent, g in zip(request.tensors, grads, strict=True):
        np.testing.assert_array_equal(sent, 0.25 * g)


def test_no_exchange_returns_local_gradients():
    method, layout = rs.NoExchange(), BucketLayout(SPECS, 2)
    grads = gradients(0, 2)
    step = run_step(method, layout, [[tf.constant(g) for g in w] for w in grads], [{}, {}], 0)
    for totals, own in zip(step.totals, grads, strict=True):
        for total, g in zip(totals, own, strict=True):
            np.testing.assert_array_equal(total, g)
    assert not method.traits.conserves and method.describe(SPECS[0]) == "nothing is sent"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"momentum": -0.1}, ["`momentum`", "momentum=-0.1"]),
        ({"momentum": 1.0}, ["`momentum`", "momentum=1.0"]),
        ({"momentum": "0.9"}, ["`momentum`", "momentum='0.9'"]),
        ({"nesterov": True}, ["nesterov=True", "momentum=0.0"]),
        ({"momentum": 0.9, "nesterov": "False"}, ["`nesterov`", "nesterov='False'"]),
    ],
)
def test_bad_input(options, words):
    with pytest.raises(ValueError) as error:
        rs.Dense(**options)
    for word in words:
        assert word in str(error.value)
