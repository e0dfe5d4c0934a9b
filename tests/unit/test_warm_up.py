"""A common dense warm-up of all methods: its length, its steps, and the steps after it."""

import dataclasses
import json
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import tf_redsync as rs
from tests.loops import loop
from tests.unit.test_gradient_exchange import build, gradients, make_step
from tests.unit.test_programs import SPECS, Echo, plain_variable
from tf_redsync.exchange.capabilities import dense_start
from tf_redsync.exchange.layout import TensorSpec, make_buckets
from tf_redsync.keras import training_length
from tf_redsync.methods import from_config, serialize
from tf_redsync.ops.sparse import SparseTotal
from tf_redsync.step import state_variables
from tf_redsync.step.exchange_schedule import Inputs
from tf_redsync.step.fit_steps import WarmUp
from tf_redsync.step.local_steps import LocalSteps
from tf_redsync.step.schedule_choice import for_buckets
from tf_redsync.step.trial import Trial

ONE_WORKER = "ignore:tf_redsync. there is one worker"


# ------------------------------------------------------------------------------------- lengths


def test_length():
    assert [rs.DenseWarmUp(7).length(total) for total in (3, 1000)] == [7, 7]
    fraction = rs.DenseWarmUp(fraction=0.05)
    assert [fraction.length(total) for total in (1, 25, 30, 1000)] == [1, 1, 2, 50]  # 1.25, 1.5


def test_config_and_text():
    for given in (rs.DenseWarmUp(3), rs.DenseWarmUp(fraction=0.25)):
        assert from_config(json.loads(json.dumps(serialize(given)))) == given
    assert from_config({"class_name": "DenseWarmUp", "config": {"steps": 3}}) == rs.DenseWarmUp(3)
    assert repr(rs.DenseWarmUp(3)) == "DenseWarmUp(steps=3)"
    assert repr(rs.DenseWarmUp(fraction=0.25)) == "DenseWarmUp(fraction=0.25)"


def wrap(**options):
    return rs.DistributedOptimizer(keras.optimizers.SGD(0.1), rs.TopK(), **options)


@loop(
    ("make", "words"),
    [
        (lambda: rs.DenseWarmUp(), "`steps` must be an integer >= 1. Received: steps=None"),
        (lambda: rs.DenseWarmUp(3, 0.1), "`steps` and `fraction`.*steps=3, fraction=0.1"),
        (lambda: rs.DenseWarmUp(fraction=0), r"`fraction` must be in \(0, 1\). .*fraction=0"),
        (lambda: rs.DenseWarmUp(fraction=1.0), r"`fraction` must be in \(0, 1\)"),
        (lambda: rs.DenseWarmUp(fraction="5 %"), "fraction='5 %'"),
        (lambda: wrap(warm_up=100), "`warm_up` must be None, DenseWarmUp.*warm_up=100"),
        (
            lambda: rs.DistributedOptimizer(
                keras.optimizers.SGD(0.1), rs.SignSGD(), warm_up=rs.DenseWarmUp(3)
            ),
            "`warm_up` .* with SignSGD.*DenseWarmUp.steps=3",
        ),
        (lambda: wrap(warm_up=rs.ExponentialWarmUp(9)), "`warm_up` must be None, DenseWarmUp"),
        (
            lambda: rs.RedSync(warm_up=rs.DenseWarmUp(fraction=0.1)),
            "`warm_up`.*DistributedOptimizer.*warm_up=DenseWarmUp.fraction=0.1",
        ),
        (lambda: rs.CDSGD(warm_up=rs.DenseWarmUp(fraction=0.1)), "`warm_up`.*fraction=0.1"),
    ],
)
def test_bad_arguments(make, words):
    with pytest.raises(ValueError, match=words):
        make()


# ------------------------------------------------------------------------------------ programs


class Stages(rs.TopK):
    """Records its own step numbers; dense in its first two, in a phase until 4."""

    sync_schedule = dataclasses.replace(
        rs.TopK().sync_schedule, warm_up_steps=2, phases=((4, "training_exchange"),)
    )

    def training_exchange(self, grads, state, ctx):
        totals, state = yield from self.exchange(grads, state, ctx)
        doubled = [t._replace(values=2 * t.values) for t in totals if isinstance(t, SparseTotal)]
        return doubled or [2 * t for t in totals], state


def warm_up_program(steps, *methods, sparse_totals=False):
    warm_up = WarmUp(rs.DenseWarmUp(steps))
    warm_up.create(state_variables.counter("step"))
    pairs = list(zip(SPECS, methods, strict=False))
    buckets = make_buckets(pairs, 2, 1, sparse_totals)
    return for_buckets(buckets, 2, create=plain_variable, warm_up=warm_up)


@loop(("traced", "in_branches"), [(True, True), (False, True), (True, False)])
def test_all_methods_are_dense_during_the_warm_up(traced, in_branches):
    """Their own dense steps and phases start after it."""
    program = warm_up_program(3, rs.TopK(density=0.01), Stages(density=0.01))

    def step_fn(step):
        network, buckets = Echo(2, in_branches), program.buckets
        grads = [[tf.ones(s.shape) for s in b.layout.specs] for b in buckets]
        states = [b.method.init(b.layout) for b in buckets]
        outcome = program.run(Inputs(grads, states, None, step, network))
        nonzero = [tf.math.count_nonzero(totals[0]) for totals, _ in outcome.results]
        largest = tf.reduce_max(outcome.results[0][0][0])  # the second variable comes first
        return nonzero, largest, outcome.bytes_sent

    call = tf.function(step_fn) if traced else step_fn
    found = [call(tf.constant(step, tf.int64)) for step in range(9)]
    second, first = zip(*([int(n) for n in nonzero] for nonzero, *_ in found), strict=True)
    assert first == (600,) * 3 + (6,) * 6
    assert second == (2000,) * 5 + (20,) * 4
    assert [float(largest) for _, largest, _ in found] == [1] * 5 + [4] * 2 + [2] * 2
    dense, sparse = (4 * 600, 4 * 2000), (4 * (2 + 2 * 6), 4 * (2 + 2 * 20))
    expected = [sum(dense)] * 3 + [sparse[0] + dense[1]] * 2 + [sum(sparse)] * 4
    assert [float(sent) for *_, sent in found] == expected


def test_always_dense_tensors_are_not_traced_twice():
    program = warm_up_program(3, rs.Dense(momentum=0.9), rs.TopK(density=0.01))
    assert [group.warm is None for group in program.groups] == [False, True]


def test_coordinates_after_dense_steps():
    """Two kinds: a method's own dense steps, and the common ones; a total carries its form."""
    program = warm_up_program(1, Stages(density=0.01), rs.TopK(density=0.01), sparse_totals=True)

    @tf.function
    def step_fn(step):
        buckets = program.buckets
        grads = [[tf.ones(s.shape) for s in b.layout.specs] for b in buckets]
        states = [b.method.init(b.layout) for b in buckets]
        outcome = program.run(Inputs(grads, states, None, step, Echo(2)))
        totals = [totals[0] for totals, _ in outcome.results]
        return [t.is_dense for t in totals], [tf.size(t.dense) for t in totals]

    for step in range(8):
        flags, sizes = step_fn(tf.constant(step, tf.int64))
        assert [bool(f) for f in flags] == [step < 1, step < 3]
        assert [int(n) > 0 for n in sizes] == [step < 1, step < 3]


def test_trial_starts_after_the_warm_up(monkeypatch):
    """The trial does not compare dense steps of a warm-up."""
    clock = [0.0]
    monkeypatch.setattr(tf, "timestamp", lambda: tf.constant(clock[0], tf.float64))
    method = rs.TopK(density=0.01)
    (bucket,) = make_buckets([(SPECS[1], method)], 2)
    warm_up = WarmUp(rs.DenseWarmUp(4))
    warm_up.create(state_variables.counter("step"))
    trial, phases = Trial([bucket], 2, plain_variable, warm_up), ""
    own = method.init(bucket.layout)
    for number in range(14):
        grads = [[tf.ones(SPECS[1].shape)]]
        outcome = trial.run(Inputs(grads, [own], None, tf.constant(number, tf.int64), Echo(2)))
        ((_, own),) = outcome.results
        dense = float(outcome.bytes_sent) >= SPECS[1].bytes
        phases += "d" if dense else "c"
        clock[0] += 100.0 if number < 4 else 2.0 - dense
    assert phases == "dddd" + "ccc" + "cdcd" + "ddd"


def test_skipped_warm_up_steps_of_local_methods_count_once():
    """All workers skip it together, so it counts like any other step and is reported in time."""
    program = warm_up_program(2, rs.LocalSGD(steps=3), rs.LocalSGD(steps=3))
    assert isinstance(program, LocalSteps)
    counted = []

    class NonFiniteCounter:
        def nonfinite_flags(self, grads):
            return tf.zeros([len(grads)])

        def count_together(self, finite, nonfinite_flags):
            counted.append(("together", bool(finite)))

        def count_local_step(self, finite, get_nonfinite_flags):
            counted.append(("here", bool(finite)))

    program.nonfinite = NonFiniteCounter()
    for step, value in ((0, 1.0), (1, np.nan), (2, np.nan), (3, 1.0)):
        grads = [[tf.fill(s.shape, value) for s in b.layout.specs] for b in program.buckets]
        outcome = program.run(Inputs(grads, [{}, {}], None, tf.constant(step, tf.int64), Echo(2)))
        assert (float(outcome.bytes_sent) > 0) == (step < 2)
    together = [("together", True), ("together", False)]
    assert counted == [*together, ("here", False), ("here", True)]


# ------------------------------------------------------------------------------------ exchange


def largest(values):
    """Returns the 5 % with the largest magnitudes, and 0 elsewhere."""
    flat = values.ravel()
    kept = np.argsort(-np.abs(flat), kind="stable")[: int(0.05 * flat.size + 0.5)]
    return np.where(np.isin(np.arange(flat.size), kept), flat, 0.0).reshape(values.shape)


def expected_accumulation(method, tensor, warm, m):
    """Returns each worker's selection input in the step after `warm` dense ones, in plain numpy."""
    grads = [[gradients(n, 2)[rank][tensor] for n in range(warm + 1)] for rank in range(2)]
    if isinstance(method, rs.RedSync):  # its own velocity
        return [sum(m ** (warm - n) * g for n, g in enumerate(own)) for own in grads]
    sums = [a + b for a, b in zip(*grads, strict=True)][:warm]
    total = sum(m ** (warm - 1 - n) * g for n, g in enumerate(sums))
    return [own[warm] + m / 2 * total for own in grads]  # its share of the total's


@loop("make", [rs.RedSync, rs.GMC])
def test_momentum_continues_after_the_warm_up(mirrored, make):
    """Dense steps equal SGD with momentum; the first sparse step starts with its velocity."""
    method, warm = make(density=0.05, momentum=0.9, dense_below=0), 3
    exchange = build(mirrored(2), method, warm_up=rs.DenseWarmUp(warm))
    step = make_step(mirrored(2), exchange)
    velocity = [0.0] * 5
    for number in range(warm + 1):
        found = step(gradients(number, 2))[0][0]
        for i, (a, b) in enumerate(zip(*gradients(number, 2), strict=True)):
            velocity[i] = 0.9 * velocity[i] + a + b
            expected = velocity[i]
            if number == warm and a.ndim == 2:
                expected = sum(largest(v) for v in expected_accumulation(method, i, warm, 0.9))
            np.testing.assert_allclose(found[i], expected, rtol=1e-5, atol=1e-6)


def test_length_is_saved(mirrored):
    """A resumed run does not warm up again, whatever its settings; nor does an older file's run."""
    strategy = mirrored(2)
    old = build(strategy, rs.TopK(), warm_up=rs.DenseWarmUp(fraction=0.1))
    with pytest.raises(ValueError, match=r"warm_up=DenseWarmUp\(fraction"):
        make_step(strategy, old)(gradients(0, 2))
    old.warm_up.begin(50, strategy)
    assert old.warm_up.steps == 5
    old.step.assign(7)
    part = old.worker_state()
    assert part["warm_up_steps"] == 5
    for setting in (rs.DenseWarmUp(900), rs.DenseWarmUp(fraction=0.5)):
        new = build(strategy, rs.TopK(), warm_up=setting)
        new.restore_worker_states([part])
        assert new.warm_up.steps == 5 and int(new.warm_up.variable.numpy()) == 5
    none = build(strategy, rs.TopK())
    none.restore_worker_states([part])
    without = none.worker_state()
    assert "warm_up_steps" not in without and without["step"] == 7
    new = build(strategy, rs.TopK(), warm_up=rs.DenseWarmUp(9))
    new.restore_worker_states([without])
    assert new.warm_up.steps == 9
    unknown = build(strategy, rs.TopK(), warm_up=rs.DenseWarmUp(fraction=0.5)).worker_state()
    assert unknown["warm_up_steps"] == 0
    new.restore_worker_states([unknown])
    assert new.warm_up.steps == 9 and int(new.warm_up.variable.numpy()) == 9


# ------------------------------------------------------------------------------------------ fit


@loop(
    ("method", "total", "words"),
    [
        (
            rs.contrib.PostLocalSGD(start=1000),
            80,
            ["compression begins after 1,000", "start=1000", "such as PostLocalSGD(start=0.05)"],
        ),
        (
            rs.contrib.OneBitAdam(warm_up=rs.DenseWarmUp(90)),
            80,
            ["after 90", "such as OneBitAdam(warm_up=DenseWarmUp(fraction=0.05))"],
        ),
        (
            rs.CDSGD(),
            80,
            [
                "compression of CDSGD begins after 1,000",
                "ends after 80",
                "Use warm_up=None in the method, and DistributedOptimizer(..., warm_up=",
            ],
        ),
        (rs.contrib.LGC(), 80, ["compression of LGC begins after", "Use a smaller `dense_steps`"]),
        (rs.contrib.ZeroOneAdam(), 12_000, ["local steps of ZeroOneAdam begin", "start=0.1"]),
        (rs.contrib.ZeroOneAdam(), 40_000, ["rounds of more than one local step", "45,268"]),
        (rs.contrib.LGC(), 450, ["the last stage of LGC", "500"]),
        (rs.RedSync(warm_up=rs.ExponentialWarmUp(50)), 150, ["the density of RedSync", "200"]),
        (
            rs.Scheduled(method=rs.TopK(), stages=rs.DensityStages((0, 99), (0.1, 0.01))),
            80,
            ["the last stage of TopK begins after 99"],
        ),
        (rs.contrib.ZeroOneAdam(start=0.1, double_after=0.2), 10, []),
        (rs.contrib.PostLocalSGD(start=0.1), 10, []),
        (rs.contrib.LGC(), 501, []),
        (rs.CodedTopK(), 1, []),
    ],
)
def test_compression_that_never_starts_warns(method, total, words):
    specs = [TensorSpec(name, (300, 300), position=i) for i, name in enumerate("abc")]
    start = dense_start(method)
    warm_up = None if start is None else WarmUp(start)
    if warm_up is not None and not warm_up.steps:
        warm_up.steps = start.length(total)
    assigned = rs.Policy(default=method).assign(specs)
    exchange = SimpleNamespace(warm_up=warm_up, workers=2, assignments=assigned)
    text = training_length.never_begins(exchange, total)
    assert (text is not None) == bool(words)
    assert all(word in text for word in words)


def test_fraction_of_the_training_is_saved():
    """With 0/1 Adam, whose intervals are not a warm-up."""
    method = rs.contrib.ZeroOneAdam(start=0.25, double_after=0.5)
    for bad in (0, 1.0, 1.5, 0.0, -3, True, "10 %"):
        with pytest.raises(ValueError, match="`start` must be"):
            rs.contrib.ZeroOneAdam(start=bad)
        with pytest.raises(ValueError, match="`start` must be"):
            rs.contrib.PostLocalSGD(start=bad)
    assert from_config(json.loads(json.dumps(serialize(method)))) == method
    assert rs.contrib.PostLocalSGD(start=0.25).dense_start == rs.DenseWarmUp(fraction=0.25)
    assert rs.contrib.PostLocalSGD(start=25).dense_start == rs.DenseWarmUp(steps=25)
    made = method.sync_schedule.intervals.of(10)
    assert (made.local_start, made.local_double_after) == (3, 5)
    traced = method.sync_schedule.intervals.of(tf.constant(10, tf.int64))
    assert (int(traced.local_start), int(traced.local_double_after)) == (3, 5)
    strategy = tf.distribute.get_strategy()
    exchange = build(strategy, method)
    with pytest.raises(ValueError, match=r"start=0.25.* fraction of"):
        exchange.lengths[0].check_known()
    exchange.training.begin(40, strategy)
    again = build(strategy, method)
    again.restore_worker_states([exchange.worker_state()])
    assert again.training.steps == int(again.training.variable.numpy()) == 40
    assert build(strategy, rs.contrib.ZeroOneAdam()).lengths == ()


def compile_model(family, gradient_accumulation_steps=None, **options):
    layers = [family.layers.Input((4,)), family.layers.Dense(8), family.layers.Dense(1)]
    model = family.Sequential(layers)
    every = gradient_accumulation_steps
    accumulation = {} if every is None else {"gradient_accumulation_steps": every}
    optimizer = rs.DistributedOptimizer(
        family.optimizers.SGD(0.01, **accumulation), rs.TopK(density=0.1, dense_below=0), **options
    )
    model.compile(optimizer, "mse")
    return model


@pytest.mark.filterwarnings(ONE_WORKER)
def test_fraction_counts_updates_with_gradient_accumulation():
    model = compile_model(
        keras, warm_up=rs.DenseWarmUp(fraction=0.25), gradient_accumulation_steps=3
    )
    model.optimizer.build(model.trainable_variables)
    model.other_optimizer = wrap(warm_up=rs.DenseWarmUp(fraction=0.25))  # accumulates nothing
    x, y = np.ones((40, 4), "float32"), np.ones((40, 1), "float32")
    model.fit(x, y, batch_size=2, epochs=3, verbose=0)  # 60 steps, 20 updates
    assert model.optimizer.exchange.warm_up.steps == 5
    assert model.other_optimizer.exchange.warm_up.steps == 15


@pytest.mark.parametrize("per_epoch", [None, 4], ids=["one pass", "steps_per_epoch"])
@pytest.mark.filterwarnings("ignore:Your input ran out of data")  # Keras counts batches
def test_replicas_take_the_batches_of_a_shard_in_turn(mirrored, per_epoch):
    strategy = mirrored(2)
    with strategy.scope():
        model = compile_model(keras, warm_up=rs.DenseWarmUp(fraction=0.25))
        model.optimizer.build(model.trainable_variables)
    rows = np.ones((28, 4), "float32"), np.ones((28, 1), "float32")
    data = tf.data.Dataset.from_tensor_slices(rows).batch(4).repeat(-1 if per_epoch else 1)
    data, steps = rs.already_sharded(data, strategy), []
    count = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: steps.append(batch)
    )
    options = {"steps_per_epoch": per_epoch, "initial_epoch": 2, "verbose": 0}
    model.fit(data, epochs=5, callbacks=[count], **options)
    assert steps == 3 * [0, 1, 2, 3] and model.optimizer.exchange.warm_up.steps == 3


@pytest.mark.filterwarnings(ONE_WORKER)
@pytest.mark.parametrize("family", [keras, tf_keras], ids=["keras3", "tf_keras"])
def test_fit_defines_the_length(family):
    x, y = np.ones((40, 4), "float32"), np.ones((40, 1), "float32")
    model = compile_model(family, warm_up=rs.DenseWarmUp(fraction=0.25))
    config = model.optimizer.get_config()
    again = type(model.optimizer).from_config(json.loads(json.dumps(config)))
    assert again.get_config()["warm_up"] == config["warm_up"] is not None
    with pytest.raises(ValueError, match="warm_up=DenseWarmUp.*is a fraction"):
        compile_model(family, warm_up=rs.DenseWarmUp(fraction=0.25)).train_on_batch(x, y)
    model.optimizer.build(model.trainable_variables)
    assert "dense at first, for 0.25 of the steps of the first `fit`" in str(
        model.optimizer.explain()
    )
    endless = tf.data.Dataset.from_tensors((x, y)).repeat()
    unknown = endless.filter(lambda *_: True)
    with pytest.raises(
        ValueError, match="fraction of the steps of `fit`.*steps=None.*steps_per_epoch"
    ):
        model.fit(unknown, epochs=1, verbose=0)
    model.fit(x, y, batch_size=10, epochs=5, initial_epoch=2, verbose=0)  # 12 steps
    warm_up = model.optimizer.exchange.warm_up
    assert warm_up.steps == 3 and int(warm_up.variable.numpy()) == 3
    model.fit(x, y, batch_size=1, epochs=5, verbose=0)
    assert warm_up.steps == 3
    assert "dense for the first 3 steps, 0.25 of the steps" in str(model.optimizer.explain())
