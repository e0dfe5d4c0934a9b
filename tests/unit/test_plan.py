"""`python -m tf_redsync plan`: model, captured energy, prediction, advice, command line."""

import collections
import dataclasses
import functools
import json
import os
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import tf_redsync as rs
from tests.loops import loop
from tf_redsync import config
from tf_redsync.auto import cost, probe
from tf_redsync.auto.candidates import candidates, names
from tf_redsync.auto.decision import Measured
from tf_redsync.cli import plan
from tf_redsync.exchange.layout import BucketLayout, TensorSpec
from tf_redsync.planning import PlanError, prediction, report
from tf_redsync.planning import subject as subjects
from tf_redsync.planning.prediction import captured_energy
from tf_redsync.policy import Policy

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(6, 5)).astype("float32"), RNG.normal(size=(6, 3)).astype("float32")


def linear(family=keras, **options):
    keras_layers = family.layers
    return family.Sequential(
        [keras_layers.Input((5,)), keras_layers.Dense(3, use_bias=False, **options)]
    )


def squared(labels, outputs):
    return tf.reduce_sum((outputs - labels) ** 2, axis=-1)


# ----------------------------------------------------------------------------------- the model


@pytest.mark.parametrize("family", [keras, tf_keras])
def test_gradient_of_a_given_batch_and_loss(family):
    model = linear(family)
    subject = subjects.subject((model, (X, Y), squared), None)
    w = np.array(model.get_weights()[0])
    (found,) = subjects.gradient(subject)
    np.testing.assert_allclose(found, X.T @ (2 * (X @ w - Y)) / len(X), rtol=1e-4, atol=1e-6)
    assert not subject.synthetic
    assert [s.shape for s in subject.specs] == [(5, 3)] and "kernel" in subject.specs[0].name


@pytest.mark.parametrize("family", [keras, tf_keras])
def test_compiled_model_uses_its_own_loss_and_regularizers(family):
    model = linear(family, kernel_regularizer=family.regularizers.L2(0.1))
    model.compile(family.optimizers.SGD(), family.losses.MeanSquaredError())
    w = np.array(model.get_weights()[0])
    (found,) = subjects.gradient(subjects.subject((model, (X, Y)), None))
    expected = X.T @ (2 * (X @ w - Y)) / Y.size + 0.2 * w
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)
    (again,) = subjects.gradient(
        subjects.subject((model, (X, Y), lambda a, b: squared(a, b) / 3), None)
    )
    np.testing.assert_allclose(again, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("family", [keras, tf_keras])
def test_model_without_data_gets_a_random_batch(family):
    subject = subjects.subject(linear(family), 7)
    assert (
        subject.synthetic and subject.inputs.shape == (7, 5) and subject.labels[0].shape == (7, 3)
    )
    (found,) = subjects.gradient(subject)
    assert float(tf.norm(found)) > 0
    assert subjects.subject(linear(family), None).inputs.shape == (32, 5)


def test_random_batch_of_integers_and_floats():
    words, numbers = keras.Input((4,), dtype="int32"), keras.Input((2,))
    both = [keras.layers.Embedding(3, 2)(words), keras.layers.Dense(2)(numbers)[:, None]]
    model = keras.Model([words, numbers], keras.layers.Concatenate(axis=1)(both))
    subject = subjects.subject(model, 50)
    assert set(np.unique(subject.inputs[0])) == {0, 1, 2} and subject.inputs[1].dtype == tf.float32
    assert [tuple(g.shape) for g in subjects.gradient(subject)] == [(2, 2), (2,), (3, 2)]


def test_model_built_by_its_batch_and_a_variable_without_gradient():
    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.used, self.unused = keras.layers.Dense(2), keras.layers.Dense(3)

        def call(self, inputs):
            self.unused(inputs)
            return self.used(inputs)

    subject = subjects.subject((Model(), (X, Y[:, :2]), squared), None)
    grads = subjects.gradient(subject)
    assert [g is None for g in grads] == [False, False, True, True]
    assignments = Policy(default=rs.Dense()).assign(subject.specs)
    assert captured_energy(assignments, grads) == [1.0, 1.0, None, None]


@loop(
    ("returned", "words"),
    [
        ({"model": 1}, "must return a built Keras model.*Received: dict"),
        ((), "Received: tuple of nothing"),
        (("model", 1, 2, 3), "Received: tuple of str, int, int, int"),
        (lambda: (linear(), X), r"batch must be \(inputs, labels\). Received: ndarray"),
        (lambda: (linear(), (X, Y)), "loss is missing"),
        (lambda: (linear(), (X, Y), "mse"), "function of labels and outputs.*'mse'"),
        (lambda: keras.Sequential([keras.layers.Dense(3)]), "keras.Input"),
        (lambda: keras.Sequential([keras.Input((None, 3)), keras.layers.Dense(3)]), "None, None"),
        (lambda: keras.Sequential([keras.Input((2,)), keras.layers.Flatten()]), "trainable"),
        (
            lambda: keras.Sequential([keras.Input((4,)), keras.layers.Embedding(1, 2)]),
            "random inputs",
        ),
    ],
)  # fmt: skip
def test_invalid_results_of_a_function(returned, words):
    value = returned() if callable(returned) else returned
    with pytest.raises(PlanError, match=f"(?s){words}"):
        subjects.subject(value, None)


def test_batch_size_of_given_data():
    with pytest.raises(PlanError, match="Received: --batch-size=8"):
        subjects.subject((linear(), (X, Y), squared), 8)


def test_nonfinite_gradient():
    subject = subjects.subject((linear(), (X, Y * np.inf), squared), None)
    with pytest.raises(PlanError, match="kernel is non-finite"):
        subjects.gradient(subject)


def test_compute_seconds_measures():
    assert 0 < subjects.compute_seconds(subjects.subject(linear(), 2)) < 10


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("here.py", "must be module:function"),
        ("here.py:make", "must be module:function"),
        (":make", "must be module:function"),
        ("nowhere:make", "'nowhere' does not exist"),
        ("here.within:make", "'here.within' does not exist"),
        ("here:missing", "function 'missing'"),
        ("here:NUMBER", "function 'NUMBER'"),
        ("here:wants", "without arguments.*'size'"),
    ],
)
def test_unresolvable_names(target, words, tmp_path, monkeypatch):
    write_module(tmp_path, monkeypatch, "NUMBER = 1\ndef wants(size): return size\n")
    with pytest.raises(PlanError, match=words):
        subjects.load(target)


def test_errors_of_the_users_module_are_raised(tmp_path, monkeypatch):
    write_module(tmp_path, monkeypatch, "import does_not_exist_either\n")
    with pytest.raises(ModuleNotFoundError, match="does_not_exist_either"):
        subjects.load("here:make")


def write_module(tmp_path, monkeypatch, text):
    (tmp_path / "here.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "here", raising=False)


# --------------------------------------------------------------------------------------- energy

G = RNG.laplace(size=(40, 30)).astype("float32")
SPEC = TensorSpec("kernel", G.shape)


def energy(method, grad=G):
    assignments = Policy(default=method, output_layer="nothing|kernel").assign([SPEC])
    assert assignments[0].method == method
    return captured_energy(assignments, [tf.constant(grad)])[0]


def test_each_worker_has_its_share_of_the_gradient():
    """As in training, where a threshold is compared with the gradient divided by the workers."""
    threshold = float(2 * np.abs(G).min() + np.abs(G).max()) / 2
    method = rs.contrib.FixedThreshold(threshold=threshold, density=1.0, dense_below=0)
    assert np.abs(G).max() > threshold > np.abs(G).max() / 2
    assert energy(method) == 0.0


@pytest.mark.parametrize(
    "method",
    [
        rs.TopK(density=0.05),
        rs.RedSync(density=0.05, dense_below=0, selection="exact"),
        rs.RedSync(density=0.05, dense_below=0, selection="exact", momentum=0.9, nesterov=True),
        rs.RedSync(
            density=0.05,
            dense_below=0,
            selection="exact",
            warm_up=rs.ExponentialWarmUp(steps_per_stage=100),
        ),
        rs.HalfPrecision(method=rs.TopK(density=0.05)),
    ],
    ids=lambda m: type(m).__name__,
)
def test_energy_of_the_largest_elements(method):
    squares = np.sort(np.square(G, dtype=np.float64), axis=None)
    assert energy(method) == pytest.approx(squares[-60:].sum() / squares.sum(), rel=1e-3)


def test_energy_of_signs_depends_on_the_angle():
    cosine = np.abs(G).sum() / np.sqrt(G.size * np.square(G).sum())
    assert energy(rs.SignSGD()) == pytest.approx(cosine**2, rel=1e-5)


def test_energy_of_low_rank_is_that_of_a_projection():
    thin = rs.PowerSGD(rank=2, min_compression_rate=0)
    low = (RNG.normal(size=(40, 2)) @ RNG.normal(size=(2, 30))).astype("float32")
    assert energy(thin, low) == pytest.approx(1.0, abs=1e-5)
    _, values, _ = np.linalg.svd(G)
    best = np.square(values[:2]).sum() / np.square(values).sum()
    assert 0 < energy(thin) < best


def test_energy_is_one_or_zero_in_limiting_cases():
    assert energy(rs.Dense()) == 1.0
    assert energy(rs.Dense(momentum=0.9, nesterov=True)) == pytest.approx(1.0)
    assert energy(rs.HalfPrecision()) == pytest.approx(1.0, abs=1e-6)
    assert energy(rs.HalfPrecision(), G * np.float32(1e10)) == 0.0  # too large for float16
    assert energy(rs.TopK(), np.zeros_like(G)) is None
    assert energy(rs.TopK(density=0.05), G * np.float32(1e-25)) == pytest.approx(
        energy(rs.TopK(density=0.05)), rel=1e-3
    )


# ----------------------------------------------------------------------------------- prediction

SPECS = [
    TensorSpec("a/kernel", (300, 200), position=0),
    TensorSpec("a/bias", (200,), position=1),
    TensorSpec("b/kernel", (200, 100), position=2),
]
GRADS = [tf.constant(RNG.normal(size=s.shape), tf.float32) for s in SPECS]
TOP_K = rs.TopK(density=0.02)
HALF = rs.HalfPrecision()
WORK = cost.Work(0.001, 1e-8, 1e-9)


def measurements(rate=1e6, latency=0.001, work=WORK, workers=4):
    return Measured(workers, cost.Link.of(rate, latency), {TOP_K: work, HALF: work})


@functools.cache
def predict(method=TOP_K, compute=0.1, **options):
    policy = method if isinstance(method, (Policy, rs.Auto)) else Policy(default=method)
    return prediction.make(policy, SPECS, GRADS, measurements(**options), compute)


def test_layers_sum_to_the_prediction():
    plan = predict()
    kernels = cost.exchange_seconds(
        TOP_K, BucketLayout((SPECS[2], SPECS[0]), 4), plan.measured.link, WORK
    )
    bias = 6 * 0.001 + 1.5 * 800 / 1e6
    assert plan.planned.seconds == pytest.approx(kernels + bias)
    assert sum(la.share.seconds for la in plan.layers) == pytest.approx(plan.planned.seconds)
    assert plan.layers[1].share.seconds == pytest.approx(bias)
    words = (1 + 2 * 1200) + (1 + 2 * 400)
    sent = 3 * 4 * (1 + words) + 1.5 * 800
    assert plan.planned.sent == pytest.approx(sent)
    assert sum(la.share.sent for la in plan.layers) == pytest.approx(sent)
    elements = 60_000 + 200 + 20_000
    assert plan.dense.seconds == pytest.approx(6 * 0.001 + 1.5 * 4 * elements / 1e6)
    assert sum(la.dense.seconds for la in plan.layers) == pytest.approx(plan.dense.seconds)
    assert plan.step(plan.dense) == pytest.approx(0.1 + plan.dense.seconds)
    assert [type(la.method).__name__ for la in plan.layers] == ["TopK", "Dense", "TopK"]
    assert [la.share.bucket for la in plan.layers] == [0, 1, 0]


def test_cost_of_a_local_round_is_divided_by_its_steps():
    plan, local = predict(), predict(rs.DiLoCo(steps=40))
    assert local.planned.seconds == pytest.approx(plan.dense.seconds / 40)
    assert local.planned.sent == pytest.approx(plan.dense.sent / 40)
    assert sum(la.share.sent for la in local.layers) == pytest.approx(local.planned.sent)


def test_cost_of_a_bucket_is_divided_by_bytes_and_elements():
    plan = predict(latency=0.0, work=cost.Work(0.8))
    large, small = plan.layers[0], plan.layers[2]
    computed = [0.8 * n / 80_000 for n in (60_000, 20_000)]
    network = [la.share.sent / 1e6 for la in (large, small)]
    assert large.share.seconds == pytest.approx(computed[0] + network[0])
    assert small.share.seconds == pytest.approx(computed[1] + network[1])
    assert large.share.sent / small.share.sent == pytest.approx((2 + 2400) / (2 + 800))


def test_twice_the_workers():
    plan = predict()
    again = prediction.make(Policy(default=TOP_K), SPECS, GRADS, measurements(workers=8), 0.1)
    assert plan.doubled == (again.dense, again.planned)
    planned_ms, dense_ms = (f"{1e3 * t.seconds:,.1f} ms" for t in (again.planned, again.dense))
    text = f"The exchange of 8 workers: {planned_ms} with the same choice, {dense_ms} dense."
    assert text in report.render(plan)


def test_auto_shows_its_candidates_and_its_choice():
    auto = rs.Auto(candidates=(TOP_K, HALF))
    plan = predict(auto)
    assert [t.name for t in plan.candidates] == ["TopK", "HalfPrecision"]
    assert plan.candidates[0] == dataclasses.replace(predict().planned, name="TopK")
    assert [type(la.method).__name__ for la in plan.layers] == ["TopK", "Dense", "TopK"]
    assert plan.planned.seconds == plan.candidates[0].seconds
    assert [type(la.method) for la in predict(auto, rate=1e12).layers] == [rs.Dense] * 3


@pytest.mark.parametrize(
    "method", [rs.CDSGD(), rs.NoExchange(), rs.Scheduled(), rs.contrib.ZeroOneAdam()]
)
def test_methods_with_another_sync_schedule_are_rejected(method):
    with pytest.raises(PlanError, match=f"`--method`.*Received: .*{type(method).__name__}"):
        prediction.check([method])


def total_of(method, work=cost.NO_WORK, compute=0.0):
    """Predicts on a link of 1 MB/s with hops of 1 ms, four workers."""
    given = Measured(4, cost.Link.of(1e6, 0.001), {method: work})
    return prediction.total(method, SPECS, given, compute)


def test_rounds_of_local_steps():
    """80,200 elements: six hops and 1.5 x 320,800 bytes, or 487.2 ms, once in 15 steps."""
    found = total_of(rs.DiLoCo(steps=15), cost.Work(0.03))
    assert found.sent == pytest.approx(1.5 * 320_800 / 15)
    assert found.longest == pytest.approx(0.4872 + 0.03)
    assert found.seconds == pytest.approx((0.4872 + 0.03) / 15)


def test_each_fragment_has_its_own_step():
    """The largest fragment alone is the longest step: 60,000 elements, 6 ms and 360 ms."""
    options = {"overlap": 0, "mixing": 0.0, "value_bits": 32}
    fragments = ("a/kernel", "a/bias", "b/kernel")
    found = total_of(rs.StreamingDiLoCo(steps=30, fragments=fragments, **options))
    assert found.longest == pytest.approx(0.366)
    assert found.seconds == pytest.approx((3 * 0.006 + 1.5 * 0.3208) / 30)


def test_fragment_with_a_delay():
    """80,200 elements, in whole runs of 256 for each of four workers.

    A run has a scale and 32 words of 4 bits. A message has a flag and 79 runs; it goes to three
    other workers, first directly and then around the ring.
    """
    method = rs.StreamingDiLoCo(steps=30, fragments=1, overlap=5, value_bits=4)
    found = total_of(method)
    message = 3 * 4 * (1 + 79 + 79 * 32)
    exchange = 0.001 + 0.003 + 2 * message / 1e6
    assert found.longest == pytest.approx(exchange)
    assert found.seconds == pytest.approx(exchange / 30)
    assert found.sent == pytest.approx(2 * message / 30)
    total = total_of(method, compute=0.003)
    assert total.longest == pytest.approx(exchange - 5 * 0.003)
    assert total.seconds == pytest.approx((exchange - 5 * 0.003) / 30)
    assert total.sent == found.sent
    hidden = total_of(method, cost.Work(fixed=0.004), compute=0.02)
    assert hidden.seconds == pytest.approx(0.004 / 30)


# --------------------------------------------------------------------------------------- advice


def test_advice_uses_whole_steps():
    use = report.advise(predict(compute=0.1))
    assert use.compress
    assert use.code == "optimizer = rs.DistributedOptimizer(optimizer, rs.TopK(density=0.02))"
    plan = predict(compute=0.1)
    ratio = plan.step(plan.dense) / plan.step(plan.planned)
    assert ratio > 2 and f"({ratio:.1f}x), 100.0 ms of it computation" in use.text
    stay = report.advise(predict(compute=100.0))
    assert not stay.compress and stay.code is None and stay.text.startswith("Stay dense: with rs.")


def test_advice_on_autos_choice():
    auto = rs.Auto(candidates=(TOP_K, HALF))
    assert "rs.TopK(density=0.02))" in report.advise(predict(auto)).code
    dense = report.advise(predict(auto, rate=1e12))
    assert dense.text.startswith("Stay dense") and "--method" in dense.text and not dense.code


def test_advice_on_momentum_that_moves_into_the_exchange():
    """`CodedGMC` applies it, and `DistributedOptimizer` rejects a second one in the optimizer."""
    sgd = keras.optimizers.SGD(0.1, momentum=0.9)
    auto = subjects.suited(rs.Auto(), sgd, pytest.fail)
    plan = prediction.make(auto, SPECS, GRADS, measurements(), 0.1)
    assert plan.methods == (rs.CodedGMC(momentum=0.9),)
    use = report.advise(plan)
    with pytest.raises(ValueError, match="momentum is set on both sides"):
        exec(use.code, {"rs": rs, "optimizer": sgd})
    assert "momentum=0.0" in use.code and "momentum" in use.text
    exec(use.code, {"rs": rs, "optimizer": keras.optimizers.SGD(0.1, momentum=0.0)})

    first, bias, last = plan.layers
    last = dataclasses.replace(last, method=rs.Dense(momentum=0.9))
    mixed = report.advise(dataclasses.replace(plan, layers=(first, bias, last)))
    assert mixed.code == "optimizer = rs.DistributedOptimizer(optimizer, rs.Auto())"


def test_mixed_choices_recommend_auto():
    auto = rs.Auto(candidates=(TOP_K,))
    first, bias, last = predict(auto).layers
    mixed = dataclasses.replace(
        predict(auto), layers=(first, bias, dataclasses.replace(last, method=rs.Dense()))
    )
    line = report.advise(mixed).code
    assert line == (
        "optimizer = rs.DistributedOptimizer(optimizer, "
        "rs.Auto(candidates=(rs.TopK(density=0.02),)))"
    )


METHODS = [
    rs.RedSync(),
    rs.RedSync(density=0.01, momentum=0.9, warm_up=rs.DenseWarmUp(steps=3)),
    rs.HalfPrecision(method=rs.TopK(density=0.1), dtype="bfloat16"),
    rs.Auto(candidates=(rs.RedSync(),), trial_steps=0),
    rs.HalfPrecision(method=rs.contrib.MSTopK(density=0.02)),
    rs.Coded(method=rs.TopK(), indices=rs.codings.Golomb()),
    rs.contrib.DeepReduce(method=rs.TopK(), values=rs.contrib.codings.QSGDValues(levels=7)),
    rs.Policy(default=rs.ACPSGD(rank=2), rules=(rs.Rule(pattern="a'b", method=rs.Dense()),)),
]


@pytest.mark.parametrize("method", METHODS, ids=lambda m: type(m).__name__)
def test_code_recreates_the_method(method):
    text = report.code(method)
    assert eval(text, {"rs": rs}) == method
    assert subjects.parse_method(text.replace("rs.", "")) == method


def test_code_has_no_default_arguments():
    text = "rs.Coded(method=rs.TopK(density=0.02))"
    assert report.code(rs.Coded(method=rs.TopK(density=0.02))) == text


def test_density_is_passed_to_the_method():
    assert subjects.parse_method("RedSync", 0.02) == rs.RedSync(density=0.02)
    assert subjects.parse_method("Auto", 0.02) == rs.Auto(density=0.02)
    assert subjects.parse_method(" DGC(momentum=0.9) ", 0.02) == rs.DGC(momentum=0.9, density=0.02)


@loop(
    ("text", "density"),
    [
        ("Redsync", None),
        ("RedSync(density=2)", None),
        ("RedSync(0.01)", None),
        ("RedSync(dense=0.01)", None),
        ("RedSync(density=0.01)", 0.1),
        ("ACPSGD", 0.1),
        ("DenseWarmUp(steps=3)", None),
        ("1", None),
        ("__import__('os').getcwd()", None),
        ("RedSync(", None),
    ],
)
def test_invalid_methods(text, density):
    with pytest.raises(PlanError, match="`--method` must be Auto or one of ACPSGD.*Received: "):
        subjects.parse_method(text, density)


def test_method_that_does_not_suit_the_optimizer():
    adam, sgd = keras.optimizers.Adam(), keras.optimizers.SGD(0.1, momentum=0.9)
    warned = []
    late = rs.Auto().methods[1]  # with delayed momentum
    for optimizer, unsuited in ((adam, (late, rs.PowerSGD())), (sgd, (late,))):
        kept = tuple(m for m in rs.Auto().methods[1:] if m not in unsuited)
        assert subjects.suited(rs.Auto(), optimizer, warned.append).methods[1:] == kept
    late, *others = subjects.suited(
        rs.Auto(), keras.optimizers.Adam(beta_1=0.0), warned.append
    ).methods[1:]
    assert late == rs.CodedTopK(density=0.03, value_bits=4)  # one bit loses accuracy with Adam
    assert others == [m for m in rs.Auto().methods[2:] if m != rs.PowerSGD()]
    with_momentum = rs.Auto(momentum=0.9)
    adaptive = subjects.suited(with_momentum, keras.optimizers.Adam(beta_1=0.0), warned.append)
    reasons = {line.name: line.reason for line in adaptive.left_out}
    assert reasons["CodedGMC"].startswith("one-bit values lose accuracy with Adam")
    averaging = keras.optimizers.Adam(beta_1=0.0, use_ema=True)
    budget = rs.Auto(max_overhead=0.1, step_seconds=1.0)
    (delayed, *_) = subjects.suited(budget, sgd, warned.append).left_out
    assert delayed.reason.endswith("acts on stale gradients; use SGD(momentum=0.0)")
    kept = subjects.suited(budget, averaging, warned.append)
    assert not any(m.sync_schedule.per_worker_weights for m in kept.methods)
    assert [line.reason for line in kept.left_out if line.name == "SparseLoCo(steps=15)"] == [
        "`use_ema` must be False with SparseLoCo, whose weights differ between workers. Received: "
        "use_ema=True. Use use_ema=False, or another method."
    ]
    assert subjects.suited(rs.Auto(), None, warned.append) == rs.Auto()
    assert warned == []
    subjects.suited(rs.RedSync(), rs.DistributedOptimizer(adam, rs.Dense()), warned.append)
    assert len(warned) == 1 and "Adam" in warned[0]
    with pytest.raises(PlanError, match="momentum is set on both sides"):
        subjects.suited(rs.RedSync(momentum=0.9), sgd, warned.append)


def test_last_stage_is_planned():
    stages = rs.DensityStages(begins=(0, 5), densities=(0.5, 0.02))
    staged, last, warned = rs.Scheduled(method=rs.TopK(), stages=stages), TOP_K, []
    assert subjects.suited(staged, None, warned.append) == Policy(default=last)
    policy = Policy(default=HALF, rules=(rs.Rule(pattern="a", method=staged),))
    assert subjects.suited(policy, None, warned.append).methods == (HALF, last)
    assert len(warned) == 2 and all(repr(last) in text for text in warned)
    warned.clear()
    subjects.suited(rs.BitBudget(), None, warned.append)  # has no stages, and no gradients here
    assert len(warned) == 1 and "default" in warned[0] and "stages" not in warned[0]


# --------------------------------------------------------------------------------- command line

MODULE = """
import keras
def make():
    hidden = [keras.layers.Dense(n, activation="relu") for n in (300, 200)]
    return keras.Sequential([keras.Input((100,)), *hidden, keras.layers.Dense(4)], name="m")
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    write_module(tmp_path, monkeypatch, MODULE)
    monkeypatch.setattr(probe, "work", lambda method, workers: WORK)
    return tmp_path


UNMATCHED = "Policy(default=TopK(), rules=(Rule(pattern='nowhere', method=Dense()),))"
FLAGS = ["--model", "here:make", "--workers", "4", "--rate", "8mbit"]


def test_command_line(module, capsys, monkeypatch):
    monkeypatch.setenv("TF_CONFIG", "{not json")
    assert plan.main([*FLAGS, "--json", "plan.json", "--plot", "plan.png"]) == 0
    out, err = capsys.readouterr()
    assert "ignoring TF_CONFIG" in err and "TF_CONFIG" not in os.environ
    assert "computation of CodedTopK" in err and "forward and backward" in err
    assert "random inputs" in out and "optimizer = rs.DistributedOptimizer(optimizer, rs." in out
    assert (module / "plan.png").read_bytes().startswith(b"\x89PNG")
    found = json.loads((module / "plan.json").read_text())
    elements = [100 * 300, 300, 300 * 200, 200, 200 * 4, 4]
    assert [la["elements"] for la in found["layers"]] == elements
    assert found["bytes_per_second"] == 1e6 and found["latency"] == 2e-4
    dense = 3.5 * 2e-4 + 1.5 * 4 * sum(elements) / 1e6
    assert found["dense"]["exchange_seconds"] == pytest.approx(dense)
    assert found["dense"]["step_seconds"] == pytest.approx(dense + found["compute_seconds"])
    assert sum(la["seconds"] for la in found["layers"]) == pytest.approx(
        found["planned"]["exchange_seconds"]
    )
    assert [c["name"] for c in found["candidates"]] == names(rs.Auto().methods[1:])
    assert found["synthetic"] is True and found["advice"]["compress"] is True
    assert rs.methods.from_config(found["method"]) == rs.Auto()
    rows = [line.split() for line in out.splitlines() if line.startswith("m/")]
    assert [row[0] for row in rows] == [la["name"] for la in found["layers"]]
    assert all(0 < la["captured_energy"] <= 1 for la in found["layers"])


def test_method_for_a_budget(module, capsys):
    """In each step two round trips of 50 ms are a third of it; over local steps they are less.

    An all-reduce takes 1.5 times 363 kB at 1 MB/s and 3.5 round trips: 0.72 s, 16 % of 15 steps.
    """
    flags = ["--latency", "50", "--step-ms", "300", "--max-overhead"]
    proposed = {}
    for most in ("1000%", "20%", "8%", "4%"):
        assert plan.main([*FLAGS, *flags, most]) == 0
        lines = capsys.readouterr().out.splitlines()
        (marked,) = [line for line in lines if "<- proposed" in line]
        proposed[most] = marked.split("  ")[0]
        assert f"rs.DistributedOptimizer(optimizer, {proposed[most]})" in lines[-1]
        method = eval(proposed[most], {"rs": rs})
        assert isinstance(method, rs.Method)
    names = [text.partition(",")[0] for text in proposed.values()]
    assert names == [
        "rs.CodedTopK(value_bits=4)",
        "rs.DiLoCo(steps=15",
        "rs.DiLoCo(steps=50",
        "rs.SparseLoCo(steps=15",
    ]
    assert plan.main([*FLAGS, *flags, "0.01%"]) == 0
    assert "fits 0.01%: rs.SparseLoCo(" in capsys.readouterr().out


COMPILED = """
def compiled():
    model = make()
    model.compile(keras.optimizers.OPTIMIZER, "mse")
    return model
"""


@pytest.mark.parametrize(
    ("optimizer", "unsuited", "advice"),
    [
        ("SGD(0.1)", [], []),
        ("SGD(0.1, momentum=0.9)", ["CodedTopK", "DeMo"], ["use SGD(momentum=0.0)"] * 2),
        ("Adam()", ["CodedTopK", "DeMo", "PowerSGD"], ["use Adam(beta_1=0.0)"] * 2),
    ],
)
def test_proposal_suits_the_optimizer(module, monkeypatch, capsys, optimizer, unsuited, advice):
    text = MODULE + COMPILED.replace("OPTIMIZER", optimizer)
    write_module(module, monkeypatch, text)
    flags = ["--model", "here:compiled", *FLAGS[2:], "--step-ms", "300", "--max-overhead", "1000%"]
    assert plan.main(flags) == 0
    lines = capsys.readouterr().out.splitlines()
    left_out = [line.partition("(")[0] for line in lines if line.endswith("  left out")]
    assert left_out == [f"rs.{name}" for name in unsuited]
    reasons = [line for line in lines if line.startswith("left out: ")]
    assert len(reasons) == len(unsuited) and all(map(str.__contains__, reasons, advice))
    (chosen,) = [line for line in lines if "<- proposed" in line]
    assert chosen.startswith("rs.BlockQuantized()" if unsuited else "rs.CodedTopK")


def test_perplexities_are_those_of_the_measurements():
    folder = Path(__file__).parents[2] / "docs" / "accuracy"
    measured = collections.defaultdict(list)
    parts = {"SGD": "sgd", "beta_1": "without_beta_1"}
    for part in ("adamw", *parts.values()):
        file = folder / f"charlm_1000_4_workers_{part}.json"
        for row in json.loads(file.read_text(encoding="utf-8"))["rows"]:
            measured[part, subjects.parse_method(row["method"])].append(row["metric"])
    dense = np.mean(measured["adamw", rs.Dense()])
    for candidate in candidates():
        found = [part for word, part in parts.items() if word in candidate.remark]
        part = found[0] if found else "adamw"
        values = measured[part, candidate.method]
        assert len(values) == 3
        assert candidate.perplexity == round(np.mean(values) / dense, 2), candidate


def test_method_that_the_script_registers(module, capsys, monkeypatch):
    monkeypatch.setattr(config, "_REGISTRY", config.registered())
    own = "import tf_redsync as rs\n@rs.methods.register\nclass Mine(rs.TopK):\n    pass\n"
    write_module(module, monkeypatch, own + MODULE)
    flags = ["--method", "Mine(density=0.5)", "--step-ms", "50"]
    assert plan.main([*FLAGS, *flags]) == 0
    assert "Mine(density=0.5) a step is predicted" in capsys.readouterr().out


def test_one_method_and_a_given_time(module, capsys):
    flags = ["--method", "TopK", "--density", "0.02", "--step-ms", "50", "--latency", "0"]
    assert plan.main([*FLAGS, *flags, "--json", "plan.json"]) == 0
    out, err = capsys.readouterr()
    assert "forward and backward" not in err and "50 ms" in out
    found = json.loads((module / "plan.json").read_text())
    assert found["compute_seconds"] == 0.05 and found["candidates"] == []
    words = 1 + sum(1 + 2 * round(0.02 * n) for n in (30_000, 60_000))
    assert found["planned"]["sent_bytes"] == pytest.approx(3 * 4 * words + 1.5 * 4 * (800 + 504))


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--workers", "1"], "`--workers` must be at least 2"),
        (["--rate", "10"], "`--rate` must be a number with kbit, mbit or gbit"),
        (["--rate", "0gbit"], "`--rate` must be"),
        (["--latency", "-1"], "`--latency` must be at least 0"),
        (["--step_ms", "nan"], "`--step-ms` must be at least 0"),
        (["--batch_size", "0"], "`--batch-size` must be at least 1"),
        (["--method", "None"], "`--method` must be Auto or one of"),
        (["--method", "CDSGD"], "Received: CDSGD("),
        (["--model", "nowhere:make"], "Received: --model=nowhere:make"),
        (["--max-overhead", "10"], "`--max-overhead` must be a number above 0 with a percent sign"),
        (["--max-overhead", "0%"], "Received: --max-overhead=0%"),
        (["--max-overhead", "5%", "--step-ms", "0"], "`--step-ms` must be above 0 with"),
        (["--max-overhead", "5%", "--method", "TopK"], "Received: --method=TopK"),
        (["--max-overhead", "5%", "--json", "Auto"], "Received: --json=Auto"),
        (["--plot", "plan.pdf"], "Received: --plot=plan.pdf"),
        (["--plot", "missing/plan.png"], "Received: --plot=missing/plan.png"),
        (["--json", "missing/plan.json"], "Received: --json=missing/plan.json"),
        (["--json", "."], "Received: --json=."),
        (["--plot", "folder.png"], "Received: --plot=folder.png"),
        (["--method", UNMATCHED], "Received: pattern='nowhere'"),
    ],
)
def test_bad_flags(module, capsys, monkeypatch, flags, words):
    (module / "folder.png").mkdir()
    monkeypatch.setattr(plan, "make", lambda *args: pytest.fail("measured"))
    with pytest.raises(SystemExit) as status:
        plan.main([*FLAGS, *flags])
    assert status.value.code == 2 and words in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--json=/dev/full", "--plot=full.png"])
def test_full_disk(module, capsys, flag):
    (module / "full.png").symlink_to("/dev/full")
    with pytest.raises(SystemExit) as status:
        plan.main([*FLAGS, "--step-ms", "50", "--method", "TopK", flag])
    assert status.value.code == 2 and "No space left" in capsys.readouterr().err


def test_no_matplotlib(module, capsys, monkeypatch):
    find = plan.importlib.util.find_spec
    monkeypatch.setattr(
        plan.importlib.util, "find_spec", lambda n, *a: None if n == "matplotlib" else find(n, *a)
    )
    with pytest.raises(SystemExit):
        plan.main([*FLAGS, "--plot", "plan.png"])
    assert "pip install matplotlib" in capsys.readouterr().err
