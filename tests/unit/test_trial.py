"""The dense step of a trial delivers the residual, for every method that may be tried."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

import tf_redsync as rs
from tests.loops import loop
from tests.unit.test_optimizer_errors import assert_raises
from tf_redsync.cluster import step_counters
from tf_redsync.config import registered
from tf_redsync.exchange import loopback
from tf_redsync.exchange.layout import BucketLayout, TensorSpec, make_buckets
from tf_redsync.exchange.traffic import DryRun
from tf_redsync.step.exchange_schedule import Inputs
from tf_redsync.step.schedule_choice import for_buckets
from tf_redsync.step.trial import COMPRESSED, DENSE, _with_residual

WORKERS, SHAPE = 3, (40, 30)
LAYOUT = BucketLayout((TensorSpec("a", SHAPE), TensorSpec("b", (60, 20), position=1)), WORKERS)


def candidates():
    """Returns all default methods of `Auto`, some also with momentum."""
    found = []
    for cls in registered().values():
        if issubclass(cls, rs.Method):
            try:
                rs.Auto(candidates=(cls(),), momentum=cls().traits.momentum_in_exchange)
            except ValueError:
                continue
            found.append(cls())
    return [*found, rs.RedSync(momentum=0.9), rs.DGC(momentum=0.9, nesterov=True)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Delivering(rs.Method):
    """Runs the dense step under test as a method's exchange."""

    of: rs.Method

    def exchange(self, grads, state, ctx):
        run = self.of.dense_exchange(grads, state, ctx)
        return (yield from _with_residual(run, state["residual"], tf.constant(False)))


def test_candidates_exist():
    names = {type(m).__name__ for m in candidates()}
    assert {"RedSync", "ACPSGD", "HalfPrecision", "DGC", "TopK", "PowerSGD"} <= names
    assert not {"Dense", "SBC", "LocalSGD", "CDSGD", "SignSGD", "NoExchange"} & names


@loop("method", candidates())
def test_dense_step_delivers_all_gradients(method):
    rng = np.random.default_rng(0)

    def gradients():
        return [
            [tf.constant(rng.normal(size=s.shape), tf.float32) for s in LAYOUT.specs]
            for _ in range(WORKERS)
        ]

    states = loopback.initial_states(method, LAYOUT)
    for number in range(3):
        states = loopback.run_step(method, LAYOUT, gradients(), states, number).states
    waiting = [np.sum([s["residual"][i] for s in states], axis=0) for i in range(2)]
    assert all(np.abs(w).max() > 0.0 for w in waiting)
    grads = gradients()
    plain = loopback.run_step(method, LAYOUT, grads, states, 3, "dense_exchange")
    both = loopback.run_step(Delivering(of=method), LAYOUT, grads, states, 3)
    for i, more in enumerate(waiting):
        np.testing.assert_allclose(both.totals[0][i], plain.totals[0][i] + more, atol=1e-4)
    for with_residual, without in zip(both.states, plain.states, strict=True):
        assert set(with_residual) == set(without)
        assert not any(np.any(r) for r in with_residual["residual"])
        if isinstance(method, (rs.GMC, rs.CodedGMC)):
            continue  # their momentum depends on the totals, which differ
        for name in set(without) - {"residual"}:
            tf.nest.map_structure(np.testing.assert_array_equal, with_residual[name], without[name])


@pytest.mark.parametrize(
    "method", [rs.SBC(), rs.CDSGD(), rs.LocalSGD(), rs.SignSGD(), rs.NoExchange()], ids=repr
)
def test_method_without_a_dense_step_is_rejected(method):
    assert_raises(
        ValueError, lambda: rs.Auto(candidates=(method,)), "candidate", type(method).__name__
    )


def test_arguments():
    assert_raises(ValueError, lambda: rs.Auto(candidates=("redsync",)), "`candidates`", "'redsync'")
    assert_raises(ValueError, lambda: rs.Auto(trial_steps=-1), "`trial_steps`", "-1")
    assert_raises(ValueError, lambda: rs.Auto(momentum=1.0), "`momentum`", "1.0")
    assert_raises(ValueError, lambda: rs.Auto(density=0.0), "`density`", "0.0")
    both = (rs.RedSync(momentum=0.9), rs.ACPSGD())
    assert_raises(ValueError, lambda: rs.Auto(candidates=both, momentum=0.9), "momentum", "ACPSGD")
    for ramp in (rs.DenseWarmUp(3), rs.ExponentialWarmUp(3)):
        warm = rs.RedSync(warm_up=ramp)
        assert_raises(ValueError, lambda c=warm: rs.Auto(candidates=(c,)), "warm-up", "RedSync")


def test_default_candidates():
    assert rs.Auto(density=0.1).methods == (
        rs.Dense(),
        rs.CodedTopK(density=0.1),
        rs.PowerSGD(),
        rs.BlockQuantized(bits=4),
        rs.BlockQuantized(bits=8),
        rs.HalfPrecision(),
    )
    with_momentum = rs.Auto(momentum=0.9).methods
    assert with_momentum == (rs.Dense(momentum=0.9), rs.CodedGMC())


def test_residual_of_a_variable_without_a_gradient_stays_to_be_delivered():
    specs = [TensorSpec(name, (8, 8), position=i) for i, name in enumerate("ab")]
    buckets = make_buckets([(spec, rs.TopK(dense_below=0)) for spec in specs], 2)
    states = [{"residual": [tf.ones([8, 8]) for _ in b.layout.specs]} for b in buckets]
    grads = [[tf.ones([8, 8]) for _ in b.layout.specs] for b in buckets]
    for present in ({0, 1}, {0}):
        trial = for_buckets(buckets, 2, trial_steps=2)
        for _ in range(5):  # the last one is dense
            inputs = Inputs(grads, states, None, tf.constant(0, tf.int64), DryRun(2))
            outcome = trial.run(inputs)
            trial.keep_absent(outcome, states, present)
        assert int(trial.times.delivered) == (present == {0, 1})
        for bucket, (_, new) in zip(buckets, outcome.results, strict=True):
            for spec, residual in zip(bucket.layout.specs, new["residual"], strict=True):
                assert np.any(residual) == (spec.position not in present)


def test_exchanges_of_one_step_are_of_one_kind_and_timed_together(monkeypatch):
    """A step with two updates, whose second one precedes the longer part of the step."""
    clock, begun = [0.0], tf.Variable(0, dtype=tf.int64)
    monkeypatch.setattr(tf, "timestamp", lambda: tf.constant(clock[0], tf.float64))
    monkeypatch.setattr(step_counters, "_counters", {step_counters.BEGUN: begun})
    buckets = make_buckets([(TensorSpec("w", (8, 8)), rs.TopK(dense_below=0))], 2)
    trial, phases = for_buckets(buckets, 2, trial_steps=2), ""
    for _ in range(9):
        begun.assign_add(1)
        for seconds in (0.0, 10.0):
            outcome = trial.run(Inputs([[tf.ones([8, 8])]], [{"residual": [tf.zeros([8, 8])]}],
                                       None, tf.constant(0, tf.int64), DryRun(2)))  # fmt: skip
            dense = float(outcome.bytes_sent) >= 8 * 8 * 4
            phases += "d" if dense else "c"
            clock[0] += seconds + (2.0 if dense else 1.0)
    assert phases == "cccccc" + "ccddccdd" + "cccc"
    np.testing.assert_array_equal(trial.times.seconds, [12.0, 14.0, 12.0, 14.0])


def test_disabled_steps_after_the_verdict_start_no_other_trial():
    """After a dense verdict, both kinds of steps of another trial would be dense."""
    buckets = make_buckets([(TensorSpec("w", (8, 8)), rs.TopK(dense_below=0))], 2)
    trial = for_buckets(buckets, 2, trial_steps=2)

    def run(steps):
        for _ in range(steps):
            trial.run(Inputs([[tf.ones([8, 8])]], [{"residual": [tf.zeros([8, 8])]}], None,
                             tf.constant(0, tf.int64), DryRun(2)))  # fmt: skip

    run(5)
    trial.off = True
    run(2)
    assert int(trial.times.count) == 0  # interrupted
    trial.off = False
    run(trial.end + 1)
    assert int(trial.times.verdict) in (COMPRESSED, DENSE)
    trial.times.verdict.assign(DENSE)
    trial.off = True
    run(3)
    trial.off = False
    run(1)
    assert int(trial.times.count) > trial.end and int(trial.times.verdict) == DENSE
