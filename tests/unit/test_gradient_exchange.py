"""GradientExchange on replicas of one process: gradients in, totals and state out."""

import contextlib
import math
import types
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import tf_redsync as rs
from tests import total_state
from tests.loops import loop
from tests.oracle import redsync as oracle
from tf_redsync.cluster import agreement
from tf_redsync.exchange.driver import Outcome
from tf_redsync.exchange.layout import Bucket, BucketLayout, TensorSpec
from tf_redsync.ops import native
from tf_redsync.state.saveable_exchange import SaveableExchange
from tf_redsync.step.builder import ExchangeBuilder
from tf_redsync.step.exchange_schedule import ExchangeSchedule, Inputs
from tf_redsync.step.gradient_exchange import moves_without_gradients
from tf_redsync.step.local_steps import LocalSteps
from tf_redsync.step.nonfinite import NonFiniteCounter

SHAPES = {"embedding": (40, 5), "kernel": (30, 20), "bias": (20,), "scale": (), "out": (20, 11)}
SPARSE = rs.RedSync(density=0.05, dense_below=0, selection="exact")


def make_variables(dtype=tf.float32):
    return [
        tf.Variable(tf.zeros(shape, dtype), name=name, trainable=True)
        for name, shape in SHAPES.items()
    ]


def build(strategy, policy, variables=None, **options):
    """Returns an exchange built in `strategy`."""
    if not isinstance(policy, rs.Policy):
        policy = rs.Policy(default=policy)
    with strategy.scope(), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        unbuilt = ExchangeBuilder(policy, kind=SaveableExchange, **options)
        return unbuilt.build(make_variables() if variables is None else variables)


def make_step(strategy, exchange, traced=True):
    """Returns a function: gradients [replica][variable] to ([replica][variable] totals, finite)."""

    @tf.function
    def run(per_replica):
        def replica(grads):
            return exchange(grads, list(range(len(grads))))

        totals, finite = strategy.run(replica, args=(per_replica,))
        return tf.nest.map_structure(strategy.experimental_local_results, (totals, finite))

    def step(grads):
        per_replica = [
            strategy.experimental_distribute_values_from_function(
                lambda context, i=i: tf.constant(grads[context.replica_id_in_sync_group][i])
            )
            for i in range(len(grads[0]))
        ]
        totals, finite = run(per_replica)
        finite = {bool(f) for f in finite}
        assert len(finite) == 1, "replicas disagree on finiteness"
        return [[t[r].numpy() for t in totals] for r in range(len(grads))], finite.pop()

    return step


def gradients(number, workers, shapes=None, scale=1.0):
    rng = np.random.default_rng([number, workers])
    shapes = list(SHAPES.values()) if shapes is None else shapes
    return [
        [np.asarray(scale * rng.standard_normal(s), np.float32) for s in shapes]
        for _ in range(workers)
    ]


ORACLES = {
    "dense": (rs.Dense(momentum=0.9), {"selectors": ["dense"] * 5, "momentum": 0.9}),
    "sparse": (SPARSE, {"selectors": ["exact", "exact", "dense", "dense", "exact"]}),
    "everything": (
        rs.RedSync(
            density=0.05, dense_below=500, threshold_above=1000, momentum=0.9, nesterov=True,
            clip_norm=3.0, warm_up=rs.DenseWarmUp(4), search_interval=3,
        ),
        {
            "selectors": ["trimmed", "threshold", "dense", "dense", "trimmed"], "momentum": 0.9,
            "nesterov": True, "clip_norm": 3.0, "warm_up": oracle.DenseWarmUp(4),
            "search_interval": 3,
        },
    ),
    "quantized": (
        rs.RedSync(density=0.05, dense_below=0, selection="trimmed", quantized=True, momentum=0.5),
        {
            "selectors": ["trimmed", "trimmed", "dense", "dense", "trimmed"], "quantized": True,
            "output_layer": 4, "momentum": 0.5,
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "workers", "options"),
    [
        ("dense", 2, {}),
        ("sparse", 3, {"direct_collectives": False, "bucket_bytes": 1000}),
        ("sparse", 1, {}),
        ("everything", 2, {"bucket_bytes": 1000}),
        pytest.param(
            "everything", 4, {"direct_collectives": False, "bucket_bytes": 1000},
            marks=pytest.mark.deep,
        ),
        ("quantized", 2, {}),
    ],
)  # fmt: skip
def test_equals_the_oracle(mirrored, name, workers, options):
    method, arguments = ORACLES[name]
    strategy = mirrored(workers)
    if workers == 1:  # no compression with one worker
        arguments = {"selectors": ["dense"] * 5}
    reference = oracle.RedSyncOracle(list(SHAPES.values()), workers, 0.05, **arguments)
    exchange = build(strategy, method, **options)
    step = make_step(strategy, exchange)
    for number in range(12):
        grads = gradients(number, workers)
        found, finite = step(grads)
        expected = reference.step(grads)
        assert finite
        for i, total in enumerate(expected):
            # Clipping and dense sums may round differently; the selection must not.
            np.testing.assert_allclose(found[0][i], total, rtol=1e-5, atol=1e-5)
            np.testing.assert_array_equal(found[0][i] != 0, total != 0)
            for replica in found[1:]:
                assert replica[i].tobytes() == found[0][i].tobytes()
    assert exchange.step.numpy() == 12 and exchange.skipped.numpy() == 0
    if workers > 1 and name != "dense":
        state = total_state.total(exchange)
        residuals = sum(a.sum() for n, a in state.items() if "/residual/" in n)
        expected = sum(r.sum() for w in reference.residuals for r in w if r is not None)
        np.testing.assert_allclose(residuals, expected, rtol=1e-3, atol=1e-3)


def own_method(end):
    """Returns a TopK whose exchange returns `end(totals, old state, new state)`."""

    class Own(rs.TopK):
        def exchange(self, grads, state, ctx):
            totals, new = yield from super().exchange(grads, state, ctx)
            return end(totals, state, new)

    return Own(density=0.1, dense_below=0)


def test_state_changed_in_place_is_stored(mirrored):
    def end(totals, old, new):
        old["residual"][0] = new["residual"][0]
        old["residual"][1:] = new["residual"][1:]
        return totals, old

    steps = [
        make_step(mirrored(2), build(mirrored(2), method))
        for method in (own_method(end), rs.TopK(density=0.1, dense_below=0))
    ]
    for number in range(2):
        found, expected = (step(gradients(number, 2)) for step in steps)
        tf.nest.map_structure(np.testing.assert_array_equal, found, expected)


def test_wrong_result_of_an_exchange_raises(mirrored):
    step = make_step(mirrored(2), build(mirrored(2), own_method(lambda t, old, new: (t, {}))))
    with pytest.raises(ValueError, match="Own must return .*'residual'.*Received"):
        step(gradients(0, 2))


def test_missing_gradients_are_zeros_and_order_is_kept(mirrored):
    strategy = mirrored(2)
    exchange = build(strategy, rs.Dense())

    @tf.function
    def run():
        def replica():
            rank = tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.float32)
            grads = [tf.fill(SHAPES["out"], rank + 1.0), tf.fill(SHAPES["bias"], rank)]
            return exchange(grads, [4, 2])[0]

        return strategy.run(replica)

    out, bias = tf.nest.map_structure(strategy.experimental_local_results, run())
    for replica in range(2):
        np.testing.assert_array_equal(out[replica], np.full((20, 11), 3.0))
        np.testing.assert_array_equal(bias[replica], np.full((20,), 1.0))


@pytest.mark.parametrize("method", [SPARSE, rs.TopK(density=0.02, scope="model")])
def test_partial_steps_keep_other_residuals(mirrored, method):
    """Two functions train parts of a model in turn; residuals are neither lost nor sent."""
    strategy = mirrored(2)
    exchange = build(strategy, method)
    full = make_step(strategy, exchange)
    full(gradients(0, 2))

    @tf.function
    def partly():
        def replica():
            return exchange([tf.fill(SHAPES["out"], 0.01)], [4])[0]

        return strategy.run(replica)

    state = total_state.total(exchange)
    name = next(n for n, a in state.items() if "/residual/" in n and a.shape == SHAPES["kernel"])
    before = state[name]
    assert before.any()
    for _ in range(3):
        total = strategy.experimental_local_results(partly())[0][0]
        if method is not SPARSE:  # the selection from all variables has only elements of this one
            sizes = [math.prod(shape) for shape in SHAPES.values()]
            assert np.count_nonzero(total) >= round(0.02 * sum(sizes))
    np.testing.assert_array_equal(total_state.total(exchange)[name], before)


def test_counters_of_a_bucket_run_on_without_its_gradients():
    layout = BucketLayout((TensorSpec("kernel", (30, 20), position=0),), 2)
    schedule = ExchangeSchedule([Bucket(rs.contrib.PacTrain(sparsity=0.5), layout)])
    old, _ = schedule.init(schedule.buckets[0])
    new = {"mask": [tf.zeros((30, 20), tf.bool)], "stable": [tf.constant(1, tf.int64)]}
    outcome = Outcome([([], {**old, **new})], tf.constant(True), 0.0)
    schedule.keep_absent(outcome, [old], set())
    kept = outcome.results[0][1]
    assert kept["mask"][0] is old["mask"][0] and kept["stable"] is new["stable"]


def test_indexed_slices_with_duplicates(mirrored):
    """Duplicate rows of an embedding's gradient are summed before the selection."""
    strategy = mirrored(2)
    exchange = build(strategy, rs.RedSync(density=1.0, dense_below=0))

    @tf.function
    def run():
        def replica():
            rank = tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.float32)
            values = tf.reshape(tf.range(15.0), [3, 5]) + rank
            slices = tf.IndexedSlices(values, tf.constant([7, 3, 7]), tf.constant([40, 5]))
            return exchange([slices], [0])[0]

        return strategy.run(replica)

    (total,) = tf.nest.map_structure(strategy.experimental_local_results, run())
    expected = np.zeros((40, 5), np.float32)
    for rank in range(2):
        values = np.arange(15.0).reshape(3, 5) + rank
        np.add.at(expected, [7, 3, 7], values)
    for replica in total:
        np.testing.assert_array_equal(replica, expected)


@pytest.mark.parametrize("dtype", [tf.bfloat16, tf.float16])
def test_half_precision_accumulates_in_float32(mirrored, dtype):
    strategy = mirrored(2)
    with strategy.scope():
        variables = make_variables(dtype)
    exchange = build(strategy, rs.RedSync(density=0.02, dense_below=0), variables)

    @tf.function
    def run():
        def replica():
            return exchange([tf.fill(SHAPES["kernel"], tf.constant(0.1, dtype))], [1])[0]

        return strategy.run(replica)

    one = np.float32(dtype.as_numpy_dtype(0.1))
    for number in range(3):
        (total,) = tf.nest.map_structure(strategy.experimental_local_results, run())
        assert total[0].dtype == dtype
        sent = np.float32(total[0].numpy())
        assert np.count_nonzero(sent) == 12
        # Unsent elements stay in a float32 residual, which is rounded once at the end.
        expected = dtype.as_numpy_dtype(2 * (number + 1) * one)
        np.testing.assert_array_equal(sent[sent != 0], np.float32(expected))
    state = [v for s in exchange.states for group in s.variables_by_name.values() for v in group]
    assert len(state) == 4 and all(v.dtype == tf.float32 for v in state)


@loop(
    "method",
    [
        rs.Dense(),
        rs.TopK(density=0.05, dense_below=0),
        rs.TopK(density=0.9, dense_below=0),
        rs.BlockQuantized(bits=8),
        rs.GMC(density=0.05, dense_below=0),
    ],
)
def test_total_overflowing_float16_skips_the_step(mirrored, method):
    """Gradients are finite in float16, and so is their float32 sum, but not the float16 sum."""
    strategy = mirrored(2)
    with strategy.scope():
        variables = make_variables(tf.float16)
    exchange = build(strategy, method, variables)
    step = make_step(strategy, exchange)
    for size, finite in ((60_000.0, False), (30_000.0, True)):
        grads = [np.full(s, size, np.float16) for s in SHAPES.values()]
        totals, found = step([grads, grads])
        assert found == finite, size
        assert not finite or all(np.isfinite(t).all() for own in totals for t in own)
    assert int(exchange.skipped.numpy()) == 1


def test_local_gradient_overflowing_float16_skips_the_step():
    layout = BucketLayout((TensorSpec("w", (3,), "float16"),), workers=2)
    network = types.SimpleNamespace(workers=2)  # Keras divides the gradient by their number
    counter = NonFiniteCounter(["w"], network, 0)
    schedule = LocalSteps([Bucket(rs.LocalSGD(steps=2), layout)], 2, counter)
    for size, finite in ((40_000.0, False), (30_000.0, True)):
        grads = [[tf.fill([3], size)]]
        inputs = Inputs(grads, [{}], None, tf.constant(0, tf.int64), network)
        assert bool(schedule.run(inputs).finite) == finite, size


@loop("dtype", [tf.bfloat16, tf.float16])
@pytest.mark.parametrize("family", ["keras3", "tf_keras", "legacy"])
def test_totals_for_float32_variables_are_float32(mirrored, family, dtype):
    """The sum of 16-bit gradients has more bits."""
    library = keras if family == "keras3" else tf_keras
    home = library.optimizers.legacy if family == "legacy" else library.optimizers
    strategy, shape = mirrored(2), (30, 20)
    with strategy.scope(), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        make = keras.Variable if family == "keras3" else tf.Variable
        variable = make(np.zeros(shape, np.float32))
        optimizer = rs.DistributedOptimizer(home.SGD(1.0), rs.Dense())
        optimizer.build([variable])
    grads = [np.random.default_rng(r).standard_normal(shape) for r in range(2)]
    narrow = [tf.cast(g, dtype) for g in grads]
    own = strategy.experimental_distribute_values_from_function(
        lambda context: narrow[context.replica_id_in_sync_group]
    )
    apply = lambda g: optimizer.apply_gradients([(g, variable)])  # noqa: E731
    tf.function(lambda g: strategy.run(apply, (g,)), autograph=False)(own)
    expected = -sum(np.asarray(tf.cast(g, tf.float32)) for g in narrow)
    np.testing.assert_allclose(tf.convert_to_tensor(variable), expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("dtype", [tf.float64, tf.int32, tf.complex64, tf.bool])
def test_other_dtypes(mirrored, dtype):
    with pytest.raises(TypeError) as error:
        build(mirrored(2), rs.Dense(), [tf.Variable(tf.zeros([2, 3], dtype), name="odd")])
    for word in ("'odd", "float32, bfloat16 or float16", f"dtype={dtype.name}"):
        assert word in str(error.value)
    exchange = build(mirrored(1), rs.Dense())
    with pytest.raises(TypeError) as error:
        exchange([tf.zeros(SHAPES["out"], dtype)], [4])
    for word in ("'out", "float32, bfloat16 or float16", f"dtype={dtype.name}"):
        assert word in str(error.value)


def test_gradient_of_wrong_shape_raises(mirrored):
    exchange = build(mirrored(1), rs.Dense())
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError), match=r"\[3,3\].*\[20,11\]"):
        exchange([tf.zeros([3, 3])], [4])


def test_several_gradients_of_a_variable_raise(mirrored):
    exchange = build(mirrored(1), rs.Dense())
    out = tf.zeros(SHAPES["out"])
    with pytest.raises(ValueError, match=r"one gradient for each variable.*'out"):
        exchange([out, out], [4, 4])


def test_buckets_start_with_the_last_layer(mirrored):
    strategy = mirrored(2)
    exchange = build(strategy, SPARSE, bucket_bytes=1000)
    layout = [[s.position for s in b.layout.specs] for b in exchange.schedule.buckets]
    # out (880 bytes) and kernel (2400) fill a bucket; embedding (800) and the dense ones remain.
    assert layout == [[4, 1], [3, 2], [0]]
    rows = {row.name.split(":")[0]: row for row in exchange.explain().rows}
    assert list(rows) == list(SHAPES)
    assert [rows[n].bucket for n in SHAPES] == [2, 0, 1, 1, 0]
    assert [rows[n].method for n in SHAPES] == ["RedSync", "RedSync", "Dense", "Dense", "RedSync"]
    assert [rows[n].elements for n in SHAPES] == [200, 600, 20, 1, 220]


def test_explain_matches_the_bytes_of_a_step(mirrored):
    for workers, method in ((2, SPARSE), (3, rs.Dense()), (3, rs.RedSync(dense_below=0))):
        strategy = mirrored(workers)
        exchange = build(strategy, method)
        make_step(strategy, exchange)(gradients(0, workers))
        table = exchange.explain()
        assert table.workers == workers
        assert table.dense_bytes == 2 * (workers - 1) / workers * 4 * (200 + 600 + 20 + 1 + 220)
        assert table.bytes_per_step == exchange.bytes_per_step() == exchange.bytes_sent.numpy()
        if method is SPARSE:  # k = 10, 30, 11: flag, counts, indices and values; two sums of 21
            assert table.bytes_per_step == 4 * (1 + 3 + 2 * (10 + 30 + 11)) + 4 * 21
        assert f"{workers} workers" in str(table)


def test_ramp_changes_the_bytes(mirrored):
    strategy = mirrored(2)
    ramp = rs.ExponentialWarmUp(2, (0.5, 0.1))
    exchange = build(strategy, rs.RedSync(density=0.01, dense_below=0, warm_up=ramp))
    step = make_step(strategy, exchange)
    sent = []
    for number in range(6):
        step(gradients(number, 2))
        sent.append(float(exchange.bytes_sent.numpy()))

    def expected(*k):
        return 4 * (1 + 3 + 2 * sum(k)) + 4 * 21

    ramp = [expected(100, 300, 110), expected(20, 60, 22), expected(2, 6, 2)]
    assert sent == [ramp[0], ramp[0], ramp[1], ramp[1], ramp[2], ramp[2]]
    assert exchange.bytes_per_step() == ramp[2]


def test_nonfinite_step_is_counted_and_changes_no_state(mirrored):
    strategy = mirrored(2)
    exchange = build(strategy, rs.RedSync(density=0.05, dense_below=0, momentum=0.9))
    step = make_step(strategy, exchange)
    # A sparse and a dense variable.
    cases = [(variable, bad) for variable in (1, 2) for bad in (np.nan, np.inf)]
    for skipped, (variable, bad) in enumerate(cases):
        assert step(gradients(2 * skipped, 2))[1]
        assert exchange.step.numpy() == 2 * skipped + 1 and exchange.skipped.numpy() == skipped
        before = per_worker_state(strategy, exchange)
        grads = gradients(2 * skipped + 1, 2)
        grads[1][variable].flat[3] = bad
        assert not step(grads)[1]
        after = per_worker_state(strategy, exchange)
        assert before.keys() == after.keys()
        for name in before:
            np.testing.assert_array_equal(before[name], after[name])
        assert exchange.step.numpy() == 2 * skipped + 2
        assert exchange.skipped.numpy() == skipped + 1
    assert step(gradients(9, 2))[1]
    assert (exchange.step.numpy(), exchange.skipped.numpy()) == (9, 4)


def per_worker_state(strategy, exchange):
    return {
        (bucket, name, i, replica): value.numpy()
        for bucket, states in enumerate(exchange.states)
        for name, group in states.variables_by_name.items()
        for i, variable in enumerate(group)
        for replica, value in enumerate(strategy.experimental_local_results(variable))
    }


def test_total_state_round_trip(mirrored):
    """The sum over workers is preserved and shared evenly; training resumes from it."""
    strategy, method = mirrored(2), rs.RedSync(density=0.05, dense_below=0, momentum=0.9)
    first = build(strategy, method)
    step = make_step(strategy, first)
    for number in range(3):
        step(gradients(number, 2))
    saved = total_state.total(first)
    locally = per_worker_state(strategy, first)
    for (bucket, name, i, _), value in locally.items():
        total = saved[f"bucket_{bucket}/{name}/{i}"]
        parts = [locally[bucket, name, i, r] for r in range(2)]
        kind = first.schedule.buckets[bucket].method.traits.state_kinds[name]
        expected = {"sum": sum(parts), "mean": sum(parts) / 2, "shared": value}[kind]
        np.testing.assert_allclose(total, expected, rtol=1e-6)
    for workers in (2, 4, 1):
        other = build(mirrored(workers), method)
        total_state.restore(other, saved)
        again = total_state.total(other)
        assert again.keys() == saved.keys()
        for name, value in saved.items():
            np.testing.assert_allclose(again[name], value, rtol=1e-6, err_msg=name)
        assert other.step.numpy() == 3
        parts = per_worker_state(mirrored(workers), other)
        residual = next(k for k in parts if k[1] == "residual")
        for replica in range(workers):
            np.testing.assert_array_equal(parts[(*residual[:3], replica)], parts[residual])


def test_state_of_another_model_raises(mirrored):
    saved = total_state.total(build(mirrored(2), rs.RedSync(dense_below=0)))
    other = build(mirrored(2), rs.Dense())
    with pytest.raises(ValueError, match="another model or method.*Expected.*Received"):
        total_state.restore(other, saved)


@pytest.mark.parametrize("method", [rs.RedSync(dense_below=0), rs.LocalSGD(steps=2)])
def test_state_agreement_takes_one_round(monkeypatch, method):
    """Our strategy needs a round per variable that no other round covers."""
    rounds, created = [], []

    @contextlib.contextmanager
    def agreed(strategy, what):
        rounds.append(what)
        yield
        rounds.append("end")

    def create(next_creator, **kwargs):
        created.append(len(rounds))
        return next_creator(**kwargs)

    monkeypatch.setattr(agreement, "agreed", agreed)
    with tf.variable_creator_scope(create):
        ExchangeBuilder(rs.Policy(default=method)).build(
            [tf.Variable(tf.zeros([30, 40]), name="w")]
        )
    assert created[0] == 0 and set(created[1:]) == {1} and len(created) > 5
    assert rounds == ["create the state of the exchange", "end"]


@pytest.mark.parametrize(
    ("accepted", "dtype", "steps", "sparse"),
    [
        (lambda method: True, tf.float32, 1, True),
        (lambda method: False, tf.float32, 1, False),
        (None, tf.float32, 1, False),
        (lambda method: True, tf.bfloat16, 1, False),
        (lambda method: True, tf.float32, 4, False),  # exchanges changes, not gradients
    ],
    ids=["accepted", "refused", "not asked", "bfloat16", "local steps"],
)
def test_sparse_totals_are_allowed_if_accepted(accepted, dtype, steps, sparse):
    policy = rs.Policy(default=rs.CodedTopK(density=0.03, steps=steps))
    exchange = ExchangeBuilder(policy).build(make_variables(dtype), accepted)
    assert {b.layout.sparse_totals for b in exchange.schedule.buckets} == {sparse}


def test_totals_are_dense_where_updates_have_no_order(monkeypatch):
    monkeypatch.setattr(native, "adds_in_order", lambda variables: False)
    policy = rs.Policy(default=rs.CodedTopK(density=0.03))
    exchange = ExchangeBuilder(policy).build(make_variables(), lambda method: True)
    assert not any(b.layout.sparse_totals for b in exchange.schedule.buckets)


@loop(
    ("use", "arguments"),
    [
        ("explain", {}),
        ("bytes_per_step", {}),
        ("worker_state", {}),
        ("restore_worker_states", {"parts": []}),
    ],
)
def test_before_build(use, arguments):
    exchange = ExchangeBuilder(rs.Policy(default=rs.Dense()))
    assert not hasattr(exchange, use)
    with pytest.raises(RuntimeError, match=f"`{use}`.*build"):
        getattr(exchange, use)(**arguments)


def test_one_worker_warns_in_the_first_step(mirrored):
    """Not when it builds: Keras builds the optimizer of a loaded model that only predicts."""
    strategy = mirrored(1)
    with warnings.catch_warnings(), strategy.scope():
        warnings.simplefilter("error")
        exchange = ExchangeBuilder(rs.Policy(default=SPARSE)).build(make_variables())
    step = make_step(strategy, exchange)
    with pytest.warns(UserWarning, match="one worker.*launch -n 2.*MirroredStrategy"):
        step(gradients(0, 1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_step(strategy, exchange)(gradients(1, 1))


def test_unsupported_strategy():
    strategy = tf.distribute.experimental.CentralStorageStrategy(["CPU:0"])
    with strategy.scope(), pytest.raises(ValueError) as error:
        ExchangeBuilder(rs.Policy(default=rs.Dense())).build([])
    assert "the strategy must be MultiWorkerMirroredStrategy" in str(error.value)
    assert "Received: strategy=CentralStorageStrategy" in str(error.value)


@pytest.mark.parametrize("workers", [1, 2])
def test_jit_compile_is_rejected_while_tracing(mirrored, workers):
    strategy = mirrored(workers)
    exchange = build(strategy, rs.Dense())

    @tf.function(jit_compile=True)
    def run():
        return strategy.run(lambda: exchange([tf.ones(SHAPES["out"])], [4])[0])

    with pytest.raises(ValueError, match="`jit_compile=True` is not supported"):
        run()
    assert exchange.step.numpy() == 0


def test_no_strategy():
    exchange = ExchangeBuilder(rs.Policy(default=SPARSE)).build(make_variables())
    with pytest.warns(UserWarning, match="one worker"):
        (total,), finite = exchange([tf.fill(SHAPES["out"], 2.0)], [4])
    assert finite
    np.testing.assert_array_equal(total, np.full(SHAPES["out"], 2.0))
    assert not exchange([tf.fill(SHAPES["out"], np.nan)], [4])[1]
    assert (exchange.step.numpy(), exchange.skipped.numpy()) == (2, 1)
    assert exchange.bytes_sent.numpy() == 0.0


@pytest.mark.parametrize(
    ("method", "moves"),
    [(rs.LocalSGD(), False), (rs.DiLoCo(), True), (rs.SBC(), True), (rs.RedSync(), False)],
)
def test_methods_that_move_variables_without_gradients(method, moves):
    assert moves_without_gradients(method) == moves


def test_variables_that_lose_their_gradients_warn():
    exchange = ExchangeBuilder(rs.Policy(default=rs.DiLoCo())).build(make_variables())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        exchange._warn_of_absent({0, 1}, "They move.", [0, 2])
        exchange._warn_of_absent({0, 1}, "They move.", [0, 1, 2])
    with pytest.warns(UserWarning, match=f"{list(SHAPES)[1]}.*They move.*new optimizer"):
        exchange._warn_of_absent({0, 1}, "They move.", [0, 2])


@pytest.mark.parametrize(
    ("method", "warns"),
    [
        (rs.ACPSGD(rank=2), True),
        (rs.RedSync(quantized=True, dense_below=0), True),
        (rs.RedSync(), False),
    ],
)
def test_variables_in_two_sets_warn_if_parts_are_sent_in_turn(mirrored, method, warns):
    """A set that trains in every other exchange would always send the same part."""
    strategy = mirrored(2)
    exchange = build(strategy, method)

    @tf.function
    def step():
        def replica():
            for positions in ([0, 1], [2, 3, 4]):
                exchange([tf.ones(exchange.specs[i].shape) for i in positions], positions)

        strategy.run(replica)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        step()
    texts = [str(w.message) for w in caught]
    assert any("one optimizer for each set" in text for text in texts) == warns
