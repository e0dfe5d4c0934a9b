"""`AccuracyWarning`: the settings that raise it, and how to filter it."""

import json
import re
import sys
import warnings
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import tf_redsync as rs
from tests.loops import loop
from tf_redsync.exchange.layout import TensorSpec
from tf_redsync.keras import accuracy, training_length
from tf_redsync.step.fit_steps import WarmUp

ONE_WORKER = "ignore:tf_redsync. there is one worker"
SGD = keras.optimizers.SGD
MOMENTUM = {"momentum": 0.9}


def accuracy_warnings(action):
    """Returns the texts of all `AccuracyWarning`s that `action` raises."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        action()
    found = [w for w in caught if issubclass(w.category, rs.AccuracyWarning)]
    return [str(w.message) for w in found]


QUANTIZED = rs.RedSync(quantized=True)
IN_A_RULE = rs.Policy(default=rs.Dense(), rules=(rs.Rule(pattern="a", method=QUANTIZED),))


@loop(
    ("inner", "method", "words"),
    [
        ({}, QUANTIZED, ["quantized=True of RedSync drops"]),
        ({}, IN_A_RULE, ["quantized=True of RedSync drops"]),
        (MOMENTUM, rs.SBC.preset(3), ["SBC .* every 100 steps"]),
        (
            MOMENTUM,
            rs.TopK(density=0.03),
            ["momentum=0.9 of the inner.*TopK sends them 33 steps late"],
        ),
        (MOMENTUM, rs.Coded(method=rs.TopK()), ["momentum=0.9 .* Coded sends them 100 steps late"]),
        (MOMENTUM, QUANTIZED, ["momentum=0.9 .* 1,000 steps late", "quantized=True"]),
    ],
)
def test_costly_settings_warn(inner, method, words):
    texts = accuracy_warnings(lambda: rs.DistributedOptimizer(SGD(0.1, **inner), method))
    assert len(texts) == len(words)
    for text, pattern in zip(texts, words, strict=True):
        assert "\n" not in text
        assert re.search(pattern, text)


NESTEROV = {m: rs.outer.Nesterov(learning_rate=0.7, momentum=m) for m in (0.4, 0.5, 0.9)}


@loop(
    ("method", "figure"),
    [
        # docs/benchmarks.md, "Bytes for perplexity", four workers.
        (rs.DiLoCo(), "9.14 with DiLoCo(steps=250) with an outer momentum of 0.9"),
        (rs.DiLoCo(steps=15), "11.06 with DiLoCo(steps=15)"),
        (rs.DiLoCo(steps=4), "11.06 with DiLoCo(steps=15)"),
        (rs.DiLoCo(steps=60), "9.41 with DiLoCo(steps=50)"),
        (rs.DiLoCo(steps=15, outer=NESTEROV[0.5]), "7.36 with DiLoCo(steps=15)"),
        (rs.DiLoCo(steps=500, outer=NESTEROV[0.4]), "7.88 with DiLoCo(steps=50)"),
        (rs.DiLoCo(steps=50, outer=None), "7.89 with LocalSGD(steps=50)"),
        (rs.LocalSGD(steps=16), "7.45 with LocalSGD(steps=15)"),
        (rs.LocalSGD(steps=16, outer=NESTEROV[0.9]), "11.06 with DiLoCo(steps=15)"),
        (rs.contrib.PostLocalSGD(steps=32), "7.89 with LocalSGD(steps=50)"),
        (rs.StreamingDiLoCo(), "7.96 with StreamingDiLoCo(steps=50)"),
        (rs.SparseLoCo(), "9.1 with SparseLoCo(steps=50, top_k=128)"),
        (rs.SparseLoCo(steps=15, top_k=40), "9.25 with SparseLoCo(steps=15, top_k=32)"),
        (rs.SparseLoCo(steps=15, top_k=128), "8.16 with SparseLoCo(steps=15, top_k=128)"),
    ],
)
def test_long_rounds_quote_the_nearest_measured_setting(method, figure):
    (text,) = accuracy_warnings(lambda: rs.DistributedOptimizer(SGD(0.1), method))
    assert figure in text and "6.49 in dense training" in text
    assert f"every {method.steps} steps" in text
    assert ("momentum=0.5" in text) == ("of 0.9" in text)  # recommended where it would help


@loop(
    ("inner", "method", "figures"),
    [
        # docs/accuracy.md and docs/warm-up.md, CIFAR-10, three epochs.
        (MOMENTUM, rs.RedSync(), ["60.8 %", "61.7 %", "64.0 %", "density 0.1 %"]),
        (MOMENTUM, rs.TopK(density=0.02), ["66.8 %", "67.9 %", "69.2 %", "density 3 %"]),
        ({}, QUANTIZED, ["58.1 % instead of 63.7 %", "density 0.1 %"]),
    ],
)
def test_quoted_losses_match_the_density(inner, method, figures):
    (text,) = accuracy_warnings(lambda: rs.DistributedOptimizer(SGD(0.1, **inner), method))
    assert all(figure in text for figure in figures)


@loop(
    ("method", "figures"),
    [
        # docs/adaptive.md, characters, 600 steps.
        (rs.CodedTopK(density=0.03), ["10.2 instead of 7.3", "density 3 %"]),
        (rs.CodedTopK(density=0.011), ["12.2 instead of 8.4", "density 1 %"]),
        (rs.PowerSGD(), ["8.7 instead of 7.6"]),
        (rs.ACPSGD(), ["10.4 instead of 7.6"]),
    ],
)
def test_quoted_losses_with_adam_match_the_method(method, figures):
    adam = keras.optimizers.Adam(1e-3)
    (text,) = accuracy_warnings(lambda: rs.DistributedOptimizer(adam, method))
    assert all(figure in text for figure in figures)


@loop(
    ("inner", "method"),
    [
        ({}, rs.LocalSGD(steps=10)),
        ({}, rs.DiLoCo(steps=8, outer=None)),
        ({}, rs.DiLoCo(steps=10, outer=NESTEROV[0.5])),
        ({}, rs.StreamingDiLoCo(steps=8, fragments=2, overlap=1)),
        ({}, rs.RedSync(momentum=0.9)),
        ({}, rs.TopK(density=0.001)),
        ({}, rs.GMC(density=0.01)),
        (MOMENTUM, rs.TopK(density=0.1)),
        (MOMENTUM, rs.SBC(steps=10)),
        (MOMENTUM, rs.CodedTopK(steps=10)),
        (MOMENTUM, rs.Dense()),
        (MOMENTUM, rs.contrib.Wangni(density=0.01)),  # no element is delayed
        (MOMENTUM, rs.contrib.EF21(density=0.01)),  # every step sends all elements
        (MOMENTUM, rs.PowerSGD()),
        (MOMENTUM, None),
    ],
)
def test_harmless_settings_do_not_warn(inner, method):
    assert not accuracy_warnings(lambda: rs.DistributedOptimizer(SGD(0.1, **inner), method))


@loop(
    ("beta_1", "method", "words"),
    [
        (
            0.9,
            rs.CodedTopK(density=0.03),
            ["beta_1=0.9 of the inner.*CodedTopK sends them 33 steps"],
        ),
        (
            0.9,
            rs.CodedTopK(density=0.001),
            ["CodedTopK sends an element every 1000 steps"],
        ),  # the second call does not warn again
        (0.9, rs.PowerSGD(), ["PowerSGD with an adaptive optimizer"]),
        (0.0, rs.ACPSGD(), ["ACPSGD with an adaptive optimizer"]),
        (0.0, rs.CodedTopK(), ["CodedTopK with value_bits=1 and Adam: 24.8 BLEU"]),
        (0.9, rs.CodedTopK(density=0.1), ["CodedTopK with value_bits=1 and Adam"]),
        (0.0, rs.CodedTopK(value_bits=4), []),
        (0.0, rs.CodedTopK(steps=10), []),
        (0.9, rs.HalfPrecision(), []),
        (0.9, None, []),
        (0.0, rs.CodedGMC(), ["CodedGMC with value_bits=1 and Adam: 2.1 BLEU"]),
        (0.0, rs.CodedGMC(momentum=0.0), ["CodedGMC with value_bits=1 and Adam: 24.8 BLEU"]),
        (0.0, rs.CodedGMC(value_bits=4), []),
    ],
)
def test_adaptive_optimizers(beta_1, method, words):
    adam = keras.optimizers.Adam(1e-3, beta_1=beta_1)
    texts = accuracy_warnings(lambda: rs.DistributedOptimizer(adam, method))
    assert len(texts) == len(words)
    for text, pattern in zip(texts, words, strict=True):
        assert re.search(pattern, text)


def moved(inner, dtype):
    """Returns the change of a weight in 30 steps of a plain Keras optimizer."""
    weight = keras.Variable(np.zeros(2), dtype=dtype)
    inner.build([weight])
    for _ in range(30):
        inner.apply([keras.ops.ones(2, dtype)], [weight])
    return float(weight[0])


@loop(
    ("name", "options", "dtype", "stops"),
    [
        ("Adam", {}, "bfloat16", True),
        ("AdamW", {"beta_2": 0.9981}, "bfloat16", True),
        ("Lamb", {}, "bfloat16", True),
        ("Nadam", {}, "bfloat16", True),
        ("ScheduleFreeAdamW", {}, "bfloat16", True),
        ("Muon", {}, "bfloat16", True),
        ("Adam", {"beta_2": 0.9999}, "float16", True),
        ("Adam", {"beta_2": 0.998}, "bfloat16", False),
        ("Muon", {"adam_beta_2": 0.99}, "bfloat16", False),
        ("Adamax", {}, "bfloat16", False),
        ("SGD", {}, "bfloat16", False),
        ("Adam", {}, "float16", False),
        ("Adam", {}, "float32", False),
    ],
)
def test_adam_that_does_not_move_16_bit_weights(name, options, dtype, stops):
    """If `moved` differs, Keras has changed: correct docs/mixed-precision.md and the warning."""
    if not hasattr(keras.optimizers, name):
        return  # an older Keras
    kind = getattr(keras.optimizers, name)
    with np.errstate(all="ignore"):
        change = moved(kind(0.01, **options), dtype)
    assert stops == (change == 0.0 or np.isnan(change))
    optimizer = rs.DistributedOptimizer(kind(0.01, **options), rs.Dense())
    weight = keras.Variable(np.zeros(2), dtype=dtype)
    texts = accuracy_warnings(lambda: optimizer.build([weight]))
    assert tuple(texts) == optimizer.explain().hints and len(texts) == stops
    assert all(f"rounds to 1 in {dtype}" in text and name in text for text in texts)


def test_warns_once_and_honors_filters():
    def several():
        optimizer = rs.DistributedOptimizer(SGD(0.1, momentum=0.9), rs.TopK())
        optimizer.nesterov = True  # checks the inner optimizer again

    assert len(accuracy_warnings(several)) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", rs.AccuracyWarning)
        several()


@pytest.mark.parametrize("family", [keras, tf_keras, None], ids=["keras3", "tf_keras", "legacy"])
def test_warning_points_at_the_users_line(family):
    family = tf_keras.optimizers.legacy if family is None else family.optimizers
    with pytest.warns(rs.AccuracyWarning) as caught:
        rs.DistributedOptimizer(family.SGD(0.1, momentum=0.9), rs.TopK())
    assert [w.filename for w in caught] == [__file__]


def test_explain_includes_the_warnings(mirrored):
    """Only methods that serve a variable are included; the config has no warnings."""
    with mirrored(2).scope(), warnings.catch_warnings():
        warnings.simplefilter("ignore", rs.AccuracyWarning)
        weights = [tf.Variable(tf.zeros([n, 4])) for n in (100, 8)]
        shown = []
        for below in (0, 9999):
            method = rs.TopK(density=0.01, dense_below=below)
            optimizer = rs.DistributedOptimizer(SGD(0.1, momentum=0.9), method)
            optimizer.build(weights)
            shown.append(optimizer.explain())
    (hint,) = shown[0].hints
    assert "TopK sends them 100 steps late" in hint and f"\naccuracy: {hint}" in str(shown[0])
    assert shown[1].hints == () and "accuracy:" not in str(shown[1])


@loop(
    ("method", "words"),
    [
        (rs.RedSync(), ["momentum correction", "dense first epoch", "RedSync.preset"]),
        (rs.RedSync(momentum=0.9), ["without a dense first epoch"]),
        (rs.RedSync.preset(9), []),
        (rs.RedSync.preset(9, recurrent=True), []),
        (rs.Coded(method=rs.RedSync(warm_up=rs.DenseWarmUp(9))), ["momentum correction"]),
        (rs.DGC(), ["ExponentialWarmUp"]),
        (rs.DGC(warm_up=rs.ExponentialWarmUp(9)), []),
        (rs.CodedGMC(density=1.0), ["sign compression", "one of 1 magnitudes"]),
        (rs.CodedTopK(density=1.0, value_bits=3), ["sign compression", "one of 4 magnitudes"]),
        (rs.CodedGMC(density=1.0, value_bits=16), []),
        (rs.CodedGMC(), []),
    ],
)
def test_explain_notes_limits_of_a_method(mirrored, method, words):
    with mirrored(2).scope():
        optimizer = rs.DistributedOptimizer(SGD(0.1), method)
        optimizer.build([tf.Variable(tf.zeros([300, 300])) for _ in range(2)])
    notes = [x for x in str(optimizer.explain()).splitlines() if x.startswith("note: ")]
    assert len(notes) == bool(words) and all(w in notes[0] for w in words)


def test_redsync_with_the_papers_settings():
    preset = rs.RedSync.preset(390)
    assert (preset.density, preset.momentum, preset.masks, preset.clip_norm) == (
        0.001,
        0.9,
        True,
        None,
    )
    assert preset.sync_schedule.warm_up_steps == 390 and not preset.quantized
    lstm = rs.RedSync.preset(390, recurrent=True, quantized=True)
    assert (lstm.momentum, lstm.clip_norm, lstm.quantized) == (0.0, 0.25, True)
    assert rs.RedSync.preset(390, momentum=0.5).momentum == 0.5
    with pytest.raises(ValueError, match="recurrent"):
        rs.RedSync.preset(390, recurrent="lstm")


# ------------------------------------------------------------------------------- too short a run


def build_model(family, method, **options):
    layers = family.layers
    model = family.Sequential([layers.Input((20,)), layers.Dense(50), layers.Dense(1)])
    optimizer = rs.DistributedOptimizer(family.optimizers.SGD(0.01), method, **options)
    model.compile(optimizer, "mse")
    return model


def fit(model, epochs=2, data=None, **options):
    x, y = np.ones((40, 20), "float32"), np.ones((40, 1), "float32")
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(10) if data is None else data
    return lambda: model.fit(data, epochs=epochs, verbose=0, **options)  # 4 steps an epoch


@pytest.mark.deep
@loop("family", [keras, tf_keras])
def test_density_below_one_over_steps_warns(mirrored, family):
    with mirrored(2).scope():
        model = build_model(family, rs.TopK(density=0.01, dense_below=0))
    (text,) = accuracy_warnings(fit(model))
    assert "TopK sends an element of " in text and "every 100 steps on average" in text
    assert "(density 0.01), but this training has 8 of them" in text
    # Of 1101 elements 51 are biases, which are sent densely.
    assert "95% of the weights" in text and "Set a density of 0.12 or more" in text
    assert not accuracy_warnings(fit(model))  # warns once


def test_unknown_length_or_one_worker_does_not_warn(mirrored):
    method = rs.TopK(density=0.01, dense_below=0)
    with mirrored(2).scope():
        model = build_model(keras, method)
    data = tf.data.Dataset.from_tensors((tf.ones([10, 20]), tf.ones([10, 1])))
    unknown = data.repeat(3).filter(lambda *_: True)
    (text,) = accuracy_warnings(fit(model, 2, unknown))
    # The first epoch defines the length. It may include the step in which the data end.
    per_epoch = int(model.optimizer.exchange.step.numpy()) / 2
    (steps,) = map(int, re.findall(r"has (\d+) of them", text))
    assert per_epoch > 2 and steps % 2 == 0 and abs(steps // 2 - per_epoch) <= 1
    assert not accuracy_warnings(fit(model, 1, data.repeat(), steps_per_epoch=2))
    assert not accuracy_warnings(fit(build_model(keras, method), 1))


def run_custom_loop(strategy, method, steps=2):
    """Returns an optimizer after a custom loop."""
    with strategy.scope():
        weights = [tf.Variable(tf.zeros([10, 10]), name=n) for n in "ab"]
        optimizer = rs.DistributedOptimizer(SGD(0.1), method)
        optimizer.build(weights)
    step = tf.function(
        lambda: strategy.run(lambda: optimizer.apply([tf.ones([10, 10])] * 2, weights))
    )
    for _ in range(steps):
        step()
    return optimizer


def test_custom_loops_are_checked_at_exit(mirrored, monkeypatch):
    end, late = training_length.warn_of_loops, rs.TopK(density=0.01, dense_below=0)
    end()  # left by other tests
    optimizer = run_custom_loop(mirrored(2), late)
    (text,) = accuracy_warnings(end)
    assert "TopK sends an element" in text and "has 2 of them" in text
    assert not accuracy_warnings(end)
    run_custom_loop(mirrored(2), rs.TopK(density=0.5, dense_below=0))
    run_custom_loop(mirrored(2), late, steps=0)
    run_custom_loop(mirrored(2), late).flush()  # no element is delayed
    assert not accuracy_warnings(end)
    with mirrored(2).scope():
        model = build_model(keras, late)
    assert accuracy_warnings(fit(model))
    assert not accuracy_warnings(end)  # warns once
    for _ in range(20):  # the registry keeps little memory, and no weights
        optimizer = run_custom_loop(mirrored(2), late, steps=0)
    kept = list(training_length._watched.values())
    assert len(kept) < 10 and not any(k is optimizer.exchange for k in kept)
    run_custom_loop(mirrored(2), late)
    monkeypatch.setattr(sys, "last_value", ValueError(), raising=False)
    assert not accuracy_warnings(end)  # the loop ended with an error


def advice(method, epochs, steps, warm_up=None, so_far=0):
    """Returns the warning for a model with one matrix and one bias on two workers."""
    specs = [TensorSpec("kernel", (1000, 10)), TensorSpec("bias", (10,))]
    assigned = rs.Policy(default=method).assign(specs)
    exchange = SimpleNamespace(warm_up=warm_up, workers=2, assignments=assigned)
    return accuracy.of_length(exchange, so_far, epochs, steps)


def test_dense_or_frequent_exchanges_do_not_warn():
    hundredth = rs.TopK(density=0.01)
    assert advice(hundredth, 10, 10) is None and "has 99 of them" in advice(hundredth, 1, 99)
    assert advice(hundredth, 1, 99, so_far=1) is None
    assert advice(rs.Dense(), 1, 1) is None
    assert advice(rs.TopK(density=0.01, dense_below=99999), 1, 9) is None
    small = rs.CodedTopK(density=0.001, dense_below=99999, small_density=0.2)
    assert advice(small, 1, 5) is None and "every 5 steps" in advice(small, 1, 4)
    assert "every 1,000 steps" in advice(rs.Coded(method=rs.TopK(density=0.001)), 1, 999)
    warm_up = WarmUp(rs.DenseWarmUp(50))
    assert advice(hundredth, 1, 150, warm_up) is None
    assert "has 99 of them" in advice(hundredth, 1, 149, warm_up)
    assert advice(hundredth, 1, 50, warm_up) is None  # all steps are dense


def test_length_counts_rounds_not_steps():
    sbc = rs.SBC(steps=10, density=0.01)  # an element waits for up to 100 rounds
    assert "every 100 rounds of 10 steps" in advice(sbc, 1, 900)
    assert "training has 90 of them" in advice(sbc, 1, 900)
    assert (
        advice(sbc, 1, 1000) is None and advice(sbc, 100, 5) is None
    )  # a round ends with the epoch
    assert advice(rs.LocalSGD(steps=500), 1, 100) is None
    own = rs.RedSync(density=0.01, dense_below=0, warm_up=rs.DenseWarmUp(50))
    assert advice(own, 1, 150) is None and "has 99 of them" in advice(own, 1, 149)
    assert advice(own, 1, 50) is None  # all steps are dense


def test_own_moments_of_many_workers():
    def texts(method, workers):
        spec = SimpleNamespace(dtype="float32")
        assignments = [SimpleNamespace(method=method)] * 3
        built = SimpleNamespace(workers=workers, assignments=assignments, specs=[spec])
        return accuracy.of_exchange(SGD(0.1), built)

    (text,) = texts(rs.CodedAdam(), 16)
    assert "1 / 16 of the examples" in text and "average_every=100" in text
    assert len(texts(rs.CodedAdam(), 8)) == 1
    assert texts(rs.CodedAdam(), 4) == texts(rs.CodedAdam(average_every=100), 16) == ()
    assert texts(rs.CodedTopK(), 16) == ()


@pytest.mark.filterwarnings(ONE_WORKER)
def test_loaded_optimizer_warns_again():
    with pytest.warns(rs.AccuracyWarning):
        optimizer = rs.DistributedOptimizer(SGD(0.1, momentum=0.9), rs.TopK())
    config = json.loads(json.dumps(optimizer.get_config()))
    with pytest.warns(rs.AccuracyWarning, match="momentum=0.9"):
        type(optimizer).from_config(config)
