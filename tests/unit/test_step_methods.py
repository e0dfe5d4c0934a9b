"""Methods of the step benchmarks, and their settings."""

import types

import keras
import pytest

import tf_redsync as rs
from benchmarks.step import step_methods, step_report
from tests.loops import loop
from tests.methods import METHODS
from tf_redsync.exchange.layout import TensorSpec, make_buckets
from tf_redsync.step.schedule_choice import for_buckets


def test_every_method_has_a_name():
    covered = {step_methods.ALIASES.get(name, name) for name in METHODS}
    assert covered <= set(step_methods.names())
    assert step_methods.parse("all") == step_methods.names()


def test_expressions_among_names():
    text = "none, DiLoCo(steps=50, outer=outer.SGD()),redsync"
    assert step_methods.parse(text) == ["none", "DiLoCo(steps=50, outer=outer.SGD())", "redsync"]
    with pytest.raises(ValueError, match="SparseLoCo"):
        step_methods.parse("none,SparseLoCo(steps=0)")


def test_warm_up_is_one_step_unless_given():
    optimizer = step_methods.optimizer_for("OneBitAdam(dense_below=1024)", 0.01)
    assert optimizer.exchange.warm_up.wanted == rs.DenseWarmUp(steps=1)
    optimizer = step_methods.optimizer_for("OneBitAdam(warm_up=DenseWarmUp(steps=7))", 0.01)
    assert optimizer.exchange.warm_up.wanted == rs.DenseWarmUp(steps=7)


def test_names_are_case_insensitive():
    assert step_methods.parse("none, dense,topk ,SparDL,localsgd") == [
        "none", "dense", "TopK", "SparDL", "LocalSGD",
    ]  # fmt: skip
    # In lower case, `dense` is TensorFlow's; the classes are those of this library.
    assert step_methods.parse("Dense,NoExchange,redsync") == ["rs_dense", "none", "redsync"]
    assert step_methods.parse("noexchange") == ["none"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "must be different names"),
        ("dense,dense", "must be different names"),
        ("redsync,RedSync", "must be different names"),
        ("topk,TopK", "must be different names"),
        ("redsync,best", "with the unknown best"),
    ],
)
def test_bad_names(text, words):
    with pytest.raises(ValueError, match=words):
        step_methods.parse(text)


@loop("name", [n for n in step_methods.names() if n not in step_methods.PLAIN])
def test_every_method_is_created_and_wrapped(name):
    method = step_methods.method_for(name, 0.125)
    if isinstance(method, rs.Method):
        assert getattr(method, "density", 0.125) == 0.125
        assert method.sync_schedule.warm_up_steps == 0  # the measured steps follow it
    else:
        assert isinstance(method, rs.Auto) and method.density == 0.125
    optimizer = step_methods.optimizer_for(name, 0.125, 4096)
    assert optimizer.inner_optimizer.learning_rate > 0
    variable = keras.Variable([[1.0, 2.0]] * 512)
    optimizer.build([variable])
    assert step_methods.period_of(optimizer) >= 1


def test_uncompressed_baseline_has_the_same_momentum():
    for name, momentum in (("dense", 0.0), ("dense_momentum", 0.9)):
        optimizer = step_methods.optimizer_for(name, None)
        assert type(optimizer) is keras.optimizers.SGD and optimizer.momentum == momentum
    for name, momentum in (("none", 0.0), ("none_momentum", 0.9), ("CodedGMC", 0.0)):
        assert step_methods.optimizer_for(name, None).inner_optimizer.momentum == momentum


def test_settings():
    assert step_methods.method_for("redsync", 0.01) == rs.RedSync(density=0.01, momentum=0.9)
    assert step_methods.method_for("redsync_m0", 0.01) == rs.RedSync(density=0.01)
    assert step_methods.method_for("none", 0.01) == rs.NoExchange()
    assert step_methods.method_for("CDSGD", 0.01).warm_up is None
    assert isinstance(step_methods.optimizer_for("CompAMS", 0.01).inner_optimizer, rs.AMSGrad)
    assert type(step_methods.optimizer_for("dense", 0.01)) is keras.optimizers.SGD


def with_schedule(method, **options):
    """A stand-in for the optimizer of two workers."""
    buckets = make_buckets([(TensorSpec("w", (64, 64)), method)], 2)
    schedule = for_buckets(buckets, 2, **options)
    return types.SimpleNamespace(exchange=types.SimpleNamespace(schedule=schedule))


@pytest.mark.parametrize(("name", "period"), [("LocalSGD", 8), ("SBC", 10), ("CDSGD", 5)])
def test_periods(name, period):
    optimizer = with_schedule(step_methods.method_for(name, 0.01))
    assert step_methods.period_of(optimizer) == period
    assert step_methods.trial_steps(optimizer) == 0


def test_periods_beyond_the_longest_are_ignored():
    periods = [step_methods.period_of(with_schedule(rs.DiLoCo(steps=n))) for n in (50, 250, 251)]
    assert periods == [50, 250, 1]


def test_trial_steps():
    trial = with_schedule(rs.RedSync(), trial_steps=5)
    assert step_methods.period_of(trial) == 1
    assert step_methods.trial_steps(trial) > 3 + 2 * 5
    plain = keras.optimizers.SGD()
    assert step_methods.period_of(plain) == 1 and step_methods.trial_steps(plain) == 0


def test_bar_below_no_exchange_is_called_noise():
    from matplotlib.figure import Figure

    for step_ms, noise in ((70.0, True), (80.0, False)):
        axes = Figure().subplots()
        rows = {"none": {"step_ms": 75.0}, "TopK": {"step_ms": step_ms}}
        report = {"model": "mlp", "workers": 2, "rate": "1gbit", "methods": rows}
        step_report._bars(axes, report, list(rows))
        assert ("noise" in axes.get_xlabel()) == noise
