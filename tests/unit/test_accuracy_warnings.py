"""Warnings of what is known to cost accuracy: when they come, and how they are switched off."""

import json
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import tf_redsync as rs
from tests.loops import loop

ONE_WORKER = "ignore:tf_redsync. there is one worker"
SGD = keras.optimizers.SGD
MOMENTUM = {"momentum": 0.9}


def warned(action):
    """The texts of all `AccuracyWarning`s."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        action()
    found = [w for w in caught if issubclass(w.category, rs.AccuracyWarning)]
    return [str(w.message) for w in found]


QUANTIZED = rs.RedSync(quantized=True)
IN_A_RULE = rs.Policy(default=rs.Dense(), rules=(rs.Rule(pattern="a", method=QUANTIZED),))


@loop(
    ("inner", "method", "words"),
    [
        ({}, QUANTIZED, ["quantized=True of RedSync drops"]),
        (
            {},
            rs.Policy(default=rs.Dense(), rules=(rs.Rule(pattern="a", method=QUANTIZED),)),
            ["qu"],
        ),
        ({}, rs.LocalSGD(steps=16), ["LocalSGD averages the workers' changes every 16 steps"]),
        (MOMENTUM, rs.SBC.preset(3), ["SBC averages the workers' changes every 100 steps"]),
        (MOMENTUM, rs.TopK(density=0.03), ["momentum=0.9 of the inner.*TopK sends, 33 steps late"]),
        (MOMENTUM, rs.Coded(method=rs.TopK()), ["momentum=0.9 .* Coded sends, 100 steps late"]),
        (MOMENTUM, QUANTIZED, ["quantized=True", "momentum=0.9 .* 1,000 steps late"]),
    ],
)
def test_settings_that_cost(inner, method, words):
    texts = warned(lambda: rs.DistributedOptimizer(SGD(0.1, **inner), method))
    assert len(texts) == len(words)
    for text, pattern in zip(texts, words, strict=True):
        assert "\n" not in text
        with pytest.raises(UserWarning, match=pattern):
            raise rs.AccuracyWarning(text)


@loop(
    ("inner", "method"),
    [
        ({}, rs.RedSync(momentum=0.9)),
        ({}, rs.TopK(density=0.001)),
        ({}, rs.GMC(density=0.01)),
        (MOMENTUM, rs.TopK(density=0.1)),
        (MOMENTUM, rs.SBC(steps=10)),  # README
        (MOMENTUM, rs.CodedTopK(steps=10)),
        (MOMENTUM, rs.Dense()),
        (MOMENTUM, rs.Wangni(density=0.01)),  # nothing waits
        (MOMENTUM, rs.EF21(density=0.01)),  # all of its total is in every step
        (MOMENTUM, rs.PowerSGD()),
        (MOMENTUM, None),
    ],
)
def test_settings_that_do_not(inner, method):
    assert not warned(lambda: rs.DistributedOptimizer(SGD(0.1, **inner), method))


def test_they_come_once_and_are_filtered_like_others():
    def several():
        optimizer = rs.DistributedOptimizer(SGD(0.1, momentum=0.9), rs.TopK())
        optimizer.nesterov = True  # the inner optimizer is looked at again

    assert len(warned(several)) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", rs.AccuracyWarning)
        several()


@pytest.mark.parametrize("family", [keras, tf_keras, None], ids=["keras3", "tf_keras", "legacy"])
def test_the_line_is_the_users(family):
    family = tf_keras.optimizers.legacy if family is None else family.optimizers
    with pytest.warns(rs.AccuracyWarning) as caught:
        rs.DistributedOptimizer(family.SGD(0.1, momentum=0.9), rs.TopK())
    assert [w.filename for w in caught] == [__file__]


def test_explain_says_so_of_what_is_in_use(mirrored):
    """Of methods that serve a variable, that is; and the config says nothing of it."""
    with mirrored(2).scope(), warnings.catch_warnings():
        warnings.simplefilter("ignore", rs.AccuracyWarning)
        weights = [tf.Variable(tf.zeros([n, 4])) for n in (100, 8)]
        told = []
        for below in (0, 9999):
            method = rs.TopK(density=0.01, dense_below=below)
            optimizer = rs.DistributedOptimizer(SGD(0.1, momentum=0.9), method)
            optimizer.build(weights)
            told.append(optimizer.explain())
    (hint,) = told[0].hints
    assert "TopK sends, 100 steps late" in hint and f"\naccuracy: {hint}" in str(told[0])
    assert told[1].hints == () and "accuracy:" not in str(told[1])


# ------------------------------------------------------------------------------- too short a run


def model_of(family, method, **options):
    layers = family.layers
    model = family.Sequential([layers.Input((20,)), layers.Dense(50), layers.Dense(1)])
    optimizer = rs.DistributedOptimizer(family.optimizers.SGD(0.01), method, **options)
    model.compile(optimizer, "mse")
    return model


def fit(model, epochs=2, data=None, **options):
    x, y = np.ones((40, 20), "float32"), np.ones((40, 1), "float32")
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(10) if data is None else data
    return lambda: model.fit(data, epochs=epochs, verbose=0, **options)  # 4 steps an epoch


@loop("family", [keras, tf_keras])
def test_a_density_below_one_over_the_steps(mirrored, family):
    strategy = mirrored(2)
    with strategy.scope():
        short = model_of(family, rs.TopK(density=0.01, dense_below=0))
        warm = model_of(
            family,
            rs.TopK(density=0.2, dense_below=0),
            warm_up=rs.DenseWarmUp(fraction=0.5),
        )
    (text,) = warned(fit(short))
    assert "TopK sends an element of " in text and "every 100 steps on average" in text
    assert "(density 0.01), and this training has 8 of them" in text
    # 1000 of 1101 elements: biases are dense, and of 50 elements one in 50 steps is sent.
    assert "95% of the weights" in text and "Set a density of 0.12 or more" in text
    assert not warned(fit(short))  # once
    (text,) = warned(fit(warm))
    assert "every 5 steps" in text and "has 4 of them" in text  # of 8, half are dense


@loop(
    ("method", "epochs"),
    [
        (rs.TopK(density=0.2, dense_below=0), 2),
        (rs.Dense(), 1),
        (rs.TopK(density=0.01), 1),  # all variables are small, and dense
        (rs.CodedTopK(density=0.001, dense_below=5000, small_density=0.2), 2),  # of the small ones
    ],
)
def test_long_enough(mirrored, method, epochs):
    with mirrored(2).scope():
        model = model_of(keras, method)
    assert not warned(fit(model, epochs))


def test_length_unknown_or_one_worker(mirrored):
    method = rs.TopK(density=0.01, dense_below=0)
    with mirrored(2).scope():
        model = model_of(keras, method)
    data = tf.data.Dataset.from_tensors((tf.ones([10, 20]), tf.ones([10, 1])))
    unknown = data.repeat(3).filter(lambda *_: True)
    assert not warned(fit(model, 1, unknown))
    before = int(model.optimizer.exchange.step.numpy())
    (text,) = warned(fit(model, 1, data.repeat(), steps_per_epoch=2))
    assert before > 2 and f"has {before + 2} of them" in text
    assert not warned(fit(model_of(keras, method), 1))


def test_rounds_count_not_steps(mirrored):
    """What `of_length` says of local steps, for which replicas of a process are no workers."""
    from types import SimpleNamespace

    from tf_redsync.exchange.layout import TensorSpec
    from tf_redsync.keras import accuracy
    from tf_redsync.policy import Policy

    specs = [TensorSpec("kernel", (1000, 10)), TensorSpec("bias", (10,))]

    def text(method, epochs, steps):
        assigned = Policy(default=method).assign(specs)
        exchange = SimpleNamespace(warm_up=None, workers=2, assignments=assigned)
        return accuracy.of_length(exchange, 0, epochs, steps)

    sbc = rs.SBC(steps=10, density=0.01)  # waits for 100 rounds
    assert "every 100 rounds of 10 steps" in text(sbc, 1, 900)
    assert "training has 90 of them" in text(sbc, 1, 900)
    assert text(sbc, 1, 1000) is None and text(sbc, 100, 5) is None  # a round ends with the epoch
    assert text(rs.LocalSGD(steps=500), 1, 100) is None
    own = rs.RedSync(density=0.01, dense_below=0, warm_up=rs.DenseWarmUp(50))
    assert text(own, 1, 150) is None and "has 99 of them" in text(own, 1, 149)
    assert text(own, 1, 50) is None  # all of it is dense


@pytest.mark.filterwarnings(ONE_WORKER)
def test_a_loaded_optimizer_says_it_again():
    with pytest.warns(rs.AccuracyWarning):
        optimizer = rs.DistributedOptimizer(SGD(0.1, momentum=0.9), rs.TopK())
    config = json.loads(json.dumps(optimizer.get_config()))
    with pytest.warns(rs.AccuracyWarning, match="momentum=0.9"):
        type(optimizer).from_config(config)
