"""ChangingSteps: the phase of each step, for one worker and for many, and bytes of a dry run."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

import tf_redsync as rs
from tf_redsync.exchange.layout import TensorSpec, make_buckets
from tf_redsync.exchange.traffic import DryRun
from tf_redsync.methods import SyncSchedule
from tf_redsync.step.changing_steps import ChangingSteps
from tf_redsync.step.exchange_schedule import Inputs
from tf_redsync.step.schedule_choice import for_buckets
from tf_redsync.step.trial import DENSE, Trial

SPECS = [TensorSpec("a", (20, 30), position=0), TensorSpec("b", (40, 50), position=1)]


class Echo:
    """A network of equal workers that records the names of its requests."""

    checksums = False

    def __init__(self, workers, in_branches=True):
        self.workers, self.in_branches, self.log = workers, in_branches, []

    def rank(self):
        return tf.constant(self.workers - 1)

    def all_gather(self, message):
        self.log.append("gather")
        return DryRun(self.workers).all_gather(message)

    def all_reduce(self, tensors):
        self.log.append("reduce")
        return DryRun(self.workers).all_reduce(tensors)


def program(*methods):
    return ChangingSteps(make_buckets(list(zip(SPECS, methods, strict=False)), 2, 1))


def run(schedule, network, step, scale=None):
    buckets = schedule.buckets
    grads = [[tf.ones(s.shape) for s in b.layout.specs] for b in buckets]
    states = [b.method.init(b.layout) for b in buckets]
    return schedule.run(Inputs(grads, states, scale, tf.cast(step, tf.int64), network))


def test_one_request_for_each_bucket_in_order():
    network = Echo(2)
    outcome = run(program(rs.Dense(), rs.RedSync()), network, 0)
    assert network.log == ["gather", "reduce"]  # last layer first
    (sparse, _), (dense, _) = outcome.results
    assert sparse[0].shape == (40, 50) and dense[0].shape == (20, 30)
    assert outcome.finite


def test_one_worker_does_not_compress():
    network = Echo(1)
    warm = rs.RedSync(warm_up=rs.DenseWarmUp(3))
    buckets = program(warm, rs.RedSync(density=0.1)).buckets
    outcome = run(for_buckets(buckets, 1), network, 0)
    assert network.log == ["reduce", "reduce"]
    for totals, _ in outcome.results:
        np.testing.assert_array_equal(totals[0], np.ones(totals[0].shape))
    assert outcome.bytes_sent == 0


@pytest.mark.parametrize("in_branches", [True, False])
@pytest.mark.parametrize("traced", [True, False])
def test_dense_warm_up_by_step(traced, in_branches):
    """A bucket without a warm-up keeps its exchange."""
    warm, cold = rs.RedSync(warm_up=rs.DenseWarmUp(3)), rs.RedSync(density=0.5)
    schedule = program(cold, warm)

    def step_fn(step):
        network = Echo(2, in_branches)
        buckets = schedule.buckets
        grads = [[tf.ones(s.shape) for s in b.layout.specs] for b in buckets]
        states = [b.method.init(b.layout) for b in buckets]
        outcome = schedule.run(Inputs(grads, states, None, step, network))
        nonzero = [tf.math.count_nonzero(totals[0]) for totals, _ in outcome.results]
        residuals = [tf.reduce_sum(state["residual"][0]) for _, state in outcome.results]
        return nonzero, residuals, outcome.finite, outcome.bytes_sent

    call = tf.function(step_fn) if traced else step_fn
    for step in range(5):
        nonzero, residuals, finite, sent = call(tf.constant(step, tf.int64))
        assert finite
        dense = step < 3
        assert nonzero[0] == (2000 if dense else 2)
        assert nonzero[1] == 300
        assert residuals[0] == (0 if dense else 1998)
        # Message: flag, count, k indices, k values. Sum: 2 m (P - 1) / P of 2000 floats.
        assert sent == 4 * (1 + 1 + 2 * 300) + (8000 if dense else 4 * (1 + 1 + 2 * 2))


class Mixed(rs.TopK):
    """Dense until step 3, then sparse."""

    sync_schedule = SyncSchedule(phases=((3, "dense_exchange"),))


@pytest.mark.parametrize("traced", [True, False])
def test_phases_by_step(traced):
    buckets = make_buckets([(SPECS[0], Mixed(density=0.01))], 2, sparse_totals=True)
    schedule = ChangingSteps(buckets)

    def step_fn(step):
        outcome = run(schedule, Echo(2), step)
        (total,), state = outcome.results[0]
        dense = total.is_dense if traced else tf.constant(isinstance(total, tf.Tensor))
        return dense, tf.reduce_sum(state["residual"][0]), outcome.bytes_sent

    call = tf.function(step_fn) if traced else step_fn
    for step in range(5):
        dense, left, sent = call(tf.constant(step, tf.int64))
        assert (bool(dense), float(left)) == ((True, 0) if step < 3 else (False, 594))
        assert sent == (2400 if step < 3 else 4 * (2 + 2 * 6))


def test_total_forms_inside_a_warm_up():
    """Two branches; the inner one returns dense or sparse totals."""

    class Twice(Mixed):
        sync_schedule = dataclasses.replace(Mixed.sync_schedule, warm_up_steps=1)

    schedule = ChangingSteps(make_buckets([(SPECS[0], Twice(density=0.01))], 2, sparse_totals=True))

    @tf.function
    def step_fn(step):
        outcome = run(schedule, Echo(2), step)
        (total,), _ = outcome.results[0]
        return total.is_dense, tf.size(total.dense), tf.size(total.sparse.indices)

    for step in range(5):
        found = [int(n) for n in step_fn(tf.constant(step, tf.int64))]
        assert found == ([1, 600, 0] if step < 3 else [0, 0, 12])


@pytest.mark.parametrize(
    ("methods", "workers", "expected"),
    [
        ((rs.Dense(), rs.Dense()), 2, 2600 * 4),
        ((rs.Dense(), rs.Dense()), 1, 0),
        ((rs.NoExchange(), rs.NoExchange()), 4, 0),
        ((rs.Dense(), rs.RedSync(density=0.01)), 4, 1.5 * 2400 + 3 * 4 * (2 + 40)),
        # After the warm-up, and at the last density of a ramp.
        ((rs.RedSync(density=0.01, warm_up=rs.DenseWarmUp(9)),), 2, 4 * (2 + 12)),
        ((rs.RedSync(density=0.01, warm_up=rs.ExponentialWarmUp(9)),), 2, 4 * (2 + 12)),
        # A threshold selects at most k. Quantized: one mean instead of the values.
        ((rs.RedSync(density=0.01, selection="threshold"),), 2, 4 * (2 + 12)),
        ((rs.RedSync(density=0.01, quantized=True),), 2, 4 * (3 + 6)),
    ],
)
def test_bytes_per_step(methods, workers, expected):
    assert program(*methods).bytes_per_step(workers) == expected


def test_scale_reaches_every_bucket():
    outcome = run(program(rs.Dense(), rs.RedSync(density=1)), Echo(2), 0, tf.constant(0.25))
    (sparse, _), (dense, _) = outcome.results
    np.testing.assert_array_equal(sparse[0], np.full((40, 50), 0.5))  # two workers' messages
    np.testing.assert_array_equal(dense[0], np.full((20, 30), 0.25))


# --------------------------------------------------------------------------------- the trial


def plain_variable(value, kind, name):
    return tf.Variable(value, trainable=False, name=name)


def follow_trial(monkeypatch, method, steps, trial_steps, seconds, interrupted=()):
    """Runs a trial with a simulated clock: step `number` takes `seconds(number, dense)`.

    Returns:
        For every step "c" or "d", and the sum of total minus input.
    """
    clock = [0.0]
    monkeypatch.setattr(tf, "timestamp", lambda: tf.constant(clock[0], tf.float64))
    (bucket,) = make_buckets([(SPECS[1], method)], 2)
    trial = Trial([bucket], trial_steps, plain_variable)
    state, phases = method.init(bucket.layout), ""
    network = Echo(2)
    for number in range(steps):
        grads = [[tf.random.stateless_normal(SPECS[1].shape, (number, 0), alg="philox")]]
        outcome = trial.run(Inputs(grads, [state], None, tf.constant(number, tf.int64), network))
        ((_, state),) = outcome.results
        dense = float(outcome.bytes_sent) >= SPECS[1].bytes
        assert dense == (not np.any(state["residual"][0]))
        phases += "d" if dense else "c"
        clock[0] += seconds(number, dense)
        if number in interrupted:
            trial.interrupt()
            clock[0] += 1000.0
    return phases


@pytest.mark.parametrize(("dense", "verdict", "slow"), [(4.0, "d", 5), (6.0, "c", 3)])
def test_trial_covers_whole_periods(monkeypatch, dense, verdict, slow):
    """P steps take one second and Q steps nine: five on average. The median ignores a slow one."""
    phases = follow_trial(
        monkeypatch,
        rs.ACPSGD(),
        18,
        trial_steps=5,
        seconds=lambda number, is_dense: (
            (dense if is_dense else 1.0 + 8.0 * (number % 2 == 0)) + 100.0 * (number == slow)
        ),
    )
    assert phases == "ccc" + "ccdd" * 3 + verdict * 3


@pytest.mark.parametrize(("dense", "verdict"), [(1.0, "d"), (3.0, "c")])
def test_interrupted_trial_step_is_repeated(monkeypatch, dense, verdict):
    phases = follow_trial(
        monkeypatch,
        rs.TopK(),
        15,
        trial_steps=3,
        seconds=lambda number, is_dense: dense if is_dense else 2.0,
        interrupted=(1, 4, 6),
    )
    assert phases == "ccc" + "ccc" + "dd" + "cdcd" + verdict * 3


@pytest.mark.parametrize("per_epoch", [1, 2, 4])
@pytest.mark.parametrize(("dense", "verdict"), [(1.0, "d"), (3.0, "c")])
def test_trial_ignores_ends_of_epochs(monkeypatch, dense, verdict, per_epoch):
    """With one step per epoch, every measured step has the same work after it."""
    phases = follow_trial(
        monkeypatch,
        rs.TopK(),
        33,
        trial_steps=5,
        seconds=lambda number, is_dense: dense if is_dense else 2.0,
        interrupted=range(per_epoch - 1, 33, per_epoch),
    )
    assert phases.endswith(verdict * 5)


def test_nonfinite_dense_step_leaves_the_residual_to_the_next_step():
    (bucket,) = make_buckets([(SPECS[1], rs.TopK())], 2)
    trial = Trial([bucket], 1, plain_variable)
    trial.times.verdict.assign(DENSE)
    state, totals = {"residual": [tf.fill(SPECS[1].shape, 5.0)]}, []
    for value in (np.nan, 1.0, 1.0):
        grads = [[tf.fill(SPECS[1].shape, value)]]
        outcome = trial.run(Inputs(grads, [state], None, tf.constant(0, tf.int64), Echo(2)))
        if outcome.finite:
            (((total,), state),) = outcome.results
            totals.append(float(tf.reduce_mean(total)))
    assert totals == [6.0, 1.0]


def test_always_dense_tensors_are_outside_the_branches():
    """Biases and norms, mostly: their number does not change the graph of a trial or warm-up."""

    def nodes(program, biases):
        specs = [TensorSpec(f"bias_{i}", (64,), position=i) for i in range(biases)]
        specs.append(TensorSpec("kernel", (400, 500), position=biases))
        assigned = [(a.spec, a.method) for a in rs.Policy(default=rs.RedSync()).assign(specs)]
        buckets = make_buckets(assigned, 2)
        with tf.Graph().as_default() as graph:
            grads = [[tf.zeros(s.shape) for s in b.layout.specs] for b in buckets]
            states = [b.method.init(b.layout) for b in buckets]
            step = tf.compat.v1.placeholder(tf.int64, [])
            program(buckets).run(Inputs(grads, states, None, step, Echo(2)))
            definition = graph.as_graph_def()
        functions = definition.library.function
        return len(definition.node) + sum(len(f.node_def) for f in functions)

    for program in (
        lambda b: Trial(b, 5, plain_variable),
        lambda b: ChangingSteps([with_warm_up(x) for x in b]),
    ):
        added = [nodes(program, n) - nodes(ChangingSteps, n) for n in (100, 200)]
        assert 0 < added[0] == added[1]


def with_warm_up(bucket):
    """Returns the bucket with three dense steps if it is compressed."""
    if not isinstance(bucket.method, rs.RedSync):
        return bucket
    return dataclasses.replace(bucket, method=rs.RedSync(warm_up=rs.DenseWarmUp(3)))
