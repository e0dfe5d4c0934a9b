"""Densities in stages: boundaries, messages, errors."""

import json

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import tf_redsync as rs
from tests.loops import loop
from tests.unit.test_programs import SPECS, Echo
from tf_redsync.config import registered
from tf_redsync.exchange import loopback
from tf_redsync.exchange.layout import BucketLayout, make_buckets
from tf_redsync.methods import from_config, serialize
from tf_redsync.step.changing_steps import ChangingSteps
from tf_redsync.step.exchange_schedule import Inputs

STAGES = rs.DensityStages(begins=(0, 2, 3), densities=(0.5, 0.01, 0.1))
RAMP = rs.ExponentialWarmUp(2, (0.25, 0.05))


def grads_of(number, workers=2, specs=SPECS):
    draw = np.random.default_rng(number).standard_normal
    return [[tf.constant(draw(s.shape), tf.float32) for s in specs] for _ in range(workers)]


def run_steps(method, steps=6):
    layout = BucketLayout(tuple(SPECS), 2)
    states, results = loopback.initial_states(method, layout), []
    for number in range(steps):
        step = loopback.run_step(method, layout, grads_of(number), states, number)
        states = step.states
        results.append(step)
    return results


def test_stages_start_at_their_boundary():
    method = rs.Scheduled(method=rs.TopK(density=0.9), stages=STAGES)
    assert [method.at(step).density for step in (0, 1, 2, 3, 2**62)] == [0.5, 0.5, 0.01, 0.1, 0.1]
    assert method.at(0) == rs.TopK(density=0.5) and method.method == rs.TopK(density=0.1)
    assert method.sync_schedule.stages == method.sync_schedule.changes == (2, 3)
    text = method.describe(SPECS[0])
    assert text.endswith("; density 0.5, 0.01 from step 2 on, 0.1 from step 3 on")
    assert from_config(json.loads(json.dumps(serialize(method)))) == method


def test_masking_follows_the_density_of_the_stage():
    scheduled = rs.Scheduled(method=rs.Coded(method=rs.RedSync(momentum=0.9)), stages=STAGES)
    assert [scheduled.at(step).method.masks for step in (0, 2, 3)] == [False, True, False]
    ramp = rs.Scheduled(method=rs.RedSync(momentum=0.9), stages=RAMP)  # like the last stage
    assert [ramp.at(step).masks for step in (0, 2, 4)] == [True, True, True]
    explicit = rs.Scheduled(method=rs.RedSync(masking=True), stages=STAGES)
    assert explicit.at(0).masks


def test_exponential_warm_up_equals_explicit_stages():
    options = {"density": 0.01, "momentum": 0.9, "dense_below": 0}
    inside = rs.RedSync(warm_up=RAMP, **options)
    outside = rs.Scheduled(method=rs.RedSync(**options), stages=RAMP)
    for a, b in zip(run_steps(inside), run_steps(outside), strict=True):
        assert a.bytes_sent == b.bytes_sent
        for mine, other in zip(a.totals[0], b.totals[0], strict=True):
            np.testing.assert_array_equal(mine, other)


@loop(
    "method",
    [
        rs.CodedTopK(small_density=None, dense_below=0),
        rs.Coded(method=rs.TopK()),
        rs.HalfPrecision(method=rs.RandomBlock()),
    ],
)
def test_bytes_follow_the_stage_and_gradients_are_conserved(method):
    scheduled = rs.Scheduled(method=method, stages=STAGES)
    steps = run_steps(scheduled)
    layout = BucketLayout(tuple(SPECS), 2)
    for number, step in enumerate(steps):
        alone = scheduled.at(number)
        states = loopback.initial_states(alone, layout)
        expected = loopback.run_step(alone, layout, grads_of(number), states, number)
        assert step.bytes_sent == expected.bytes_sent
    sent = [step.bytes_sent for step in steps]
    assert sent[0] == sent[1] > sent[3] == sent[4] == sent[5] > sent[2]
    for i in range(len(SPECS)):
        put_in = sum(np.float64(g[i]) for n in range(6) for g in grads_of(n))
        delivered = sum(np.float64(step.totals[0][i]) for step in steps)
        left = sum(np.float64(state["residual"][i]) for state in steps[-1].states)
        np.testing.assert_allclose(put_in, delivered + left, atol=1e-4)


@loop("traced", [True, False])
def test_stages_in_a_program(traced):
    """Next to a method without stages; the last stages return short totals as sparse ones."""
    methods = rs.Scheduled(method=rs.TopK(), stages=STAGES), rs.TopK(density=0.01)
    program = ChangingSteps(make_buckets(list(zip(SPECS, methods, strict=True)), 2, 1, True))

    def step_fn(step):
        buckets = program.buckets
        grads = [[tf.ones(s.shape) for s in b.layout.specs] for b in buckets]
        states = [b.method.init(b.layout) for b in buckets]
        outcome = program.run(Inputs(grads, states, None, step, Echo(2)))
        left = tf.reduce_sum(outcome.results[1][1]["residual"][0])
        return outcome.bytes_sent, 600 - left

    call = tf.function(step_fn) if traced else step_fn
    for step in range(5):
        sent, delivered = call(tf.constant(step, tf.int64))
        k = (300, 300, 6, 60, 60)[step]
        assert delivered == k
        assert sent == 4 * (2 + 2 * k) + 4 * (2 + 2 * 20)
    assert program.bytes_per_step(2) == 4 * (2 + 2 * 60) + 4 * (2 + 2 * 20)


def test_collectives_that_cannot_branch_are_rejected():
    method = rs.Scheduled(method=rs.TopK(), stages=STAGES)
    program = ChangingSteps(make_buckets([(SPECS[0], method)], 2))
    with pytest.raises(ValueError, match="direct_collectives=False, or replicas of one process"):
        program.run(
            Inputs(
                [[tf.ones(SPECS[0].shape)]],
                [method.init(program.buckets[0].layout)],
                None,
                tf.constant(0, tf.int64),
                Echo(2, in_branches=False),
            )
        )


@pytest.mark.parametrize("family", [keras, tf_keras], ids=["keras3", "tf_keras"])
def test_keras_schedules(family):
    schedules = family.optimizers.schedules
    decay = schedules.PolynomialDecay(0.5, decay_steps=100, end_learning_rate=0.1)
    stages = rs.DensityStages.of(decay, begins=range(0, 150, 50))
    np.testing.assert_allclose(stages.densities, (0.5, 0.3, 0.1), rtol=1e-6)
    assert stages.begins == (0, 50, 100) and all(type(d) is float for d in stages.densities)
    assert rs.DensityStages.of(lambda step: 0.5 / (1 + step), [0, 1]).densities == (0.5, 0.25)


def test_state_has_one_form_in_all_stages():
    layout = BucketLayout(tuple(SPECS), 3)
    tried = []
    for name, cls in sorted(registered().items()):
        if not (isinstance(cls, type) and issubclass(cls, rs.Method)):
            continue
        if not cls.__module__.startswith("tf_redsync"):
            continue
        try:
            method = rs.Scheduled(method=cls(), stages=STAGES)
        except ValueError as error:
            assert f"Received: method={name}(" in str(error) or name == "Scheduled", name
            continue
        forms = [
            tf.nest.map_structure(lambda t: (tuple(t.shape), t.dtype), method.at(s).init(layout))
            for s in (0, 2, 3)
        ]
        assert forms[0] == forms[1] == forms[2], name
        tried.append(name)
    assert {"RedSync", "SBC", "OkTopk", "SparDL", "Coded", "CodedTopK", "LGC"} <= set(tried)


def scheduled(**options):
    return lambda: rs.Scheduled(**{"method": rs.TopK(), "stages": STAGES, **options})


@loop(
    ("make", "words"),
    [
        (scheduled(method=rs.PowerSGD()), "`method`.*Received: method=PowerSGD"),
        (scheduled(method=0.1), "`method`.*Received: method=0.1"),
        (scheduled(stages=0.1), "`stages` must be DensityStages.*Received: stages=0.1"),
        (
            scheduled(method=rs.RedSync(warm_up=RAMP)),
            "`method`.*Received: method=RedSync.*warm_up=None",
        ),
        (
            scheduled(method=rs.contrib.Accordion()),
            "`method` must have a constant density.*Received: method=Accordion",
        ),
        (lambda: rs.contrib.Accordion(eta=float("inf")), "`eta` must be in"),
        (scheduled(method=scheduled()()), "`method`.*Received: method=Scheduled.*`stages`"),
        (lambda: rs.DensityStages((0, 5), (0.1,)), "the same length.*begins=.0, 5."),
        (lambda: rs.DensityStages(0, 0.1), "`begins` must be a tuple"),
        (lambda: rs.DensityStages((0,), 0.1), "`densities` must be a tuple"),
        (lambda: rs.DensityStages((), ()), "`begins` and `densities`"),
        (lambda: rs.DensityStages((1, 5), (0.1, 0.2)), r"`begins`.*\(1, 5\)"),
        (lambda: rs.DensityStages((0, 5, 5), (0.1, 0.2, 0.3)), r"`begins`.*\(0, 5, 5\)"),
        (lambda: rs.DensityStages((0, 5), (0.1, 0.0)), "`densities` must be in"),
        (lambda: rs.DensityStages.of(lambda step: 0.1, (0, 99.9)), "`begins`.*begins=99.9"),
        (lambda: rs.DensityStages.of(lambda step: 0.1, (False, True)), "`begins`.*begins=False"),
        (lambda: rs.DensityStages.of(lambda step: 0.1, 500), "`begins`.*begins=500"),
        (lambda: rs.DensityStages.of(0.1, (0, 5)), "`schedule`.*LearningRateSchedule"),
        (lambda: rs.DensityStages.of(lambda step: 1 - step, (0, 1)), "`densities` must be in"),
    ],
)
def test_bad_arguments(make, words):
    with pytest.raises(ValueError, match=words):
        make()
