"""Snapshots on replicas of one process: bitwise restore, sums, and errors."""

import dataclasses
import io
import json
import re
import warnings
import zipfile

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_redsync as rs
from benchmarks import method_settings
from tests.loops import loop
from tf_redsync.auto import auto
from tf_redsync.config import registered
from tf_redsync.exchange.layout import TensorSpec, make_buckets
from tf_redsync.state import restore
from tf_redsync.state.saveable_exchange import SaveableExchange
from tf_redsync.state.snapshot import Entry, needs_several_workers
from tf_redsync.step.builder import ExchangeBuilder
from tf_redsync.step.exchange_schedule import ExchangeSchedule
from tf_redsync.step.local_steps import LocalSteps
from tf_redsync.step.streaming import Streaming

SHAPES = {"kernel": (30, 20), "bias": (20,), "out": (20, 11)}
METHODS = {
    "redsync": rs.RedSync(density=0.05, dense_below=0, threshold_above=0, momentum=0.9),
    "power": rs.PowerSGD(rank=2, min_compression_rate=0),
    "ok_topk": rs.contrib.OkTopk(density=0.1, dense_below=0),
}


def build(strategy, policy=METHODS["redsync"], filled=True, bucket_bytes=None):
    """Returns an exchange with a nonzero state, as after some steps."""
    if isinstance(policy, rs.methods.Method):
        policy = rs.Policy(default=policy)
    with strategy.scope(), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        variables = [tf.Variable(tf.zeros(s), name=n) for n, s in SHAPES.items()]
        exchange = ExchangeBuilder(policy, kind=SaveableExchange, bucket_bytes=bucket_bytes).build(
            variables
        )
    if filled:
        generator = np.random.default_rng(3)
        for state in exchange.states:
            for name, group in state.variables_by_name.items():
                for variable in group:
                    copies = strategy.experimental_local_results(variable)
                    rows = generator.standard_normal((len(copies), *variable.shape))
                    if state.kinds[name] == "shared":
                        rows[:] = rows[0]
                    for copy, row in zip(copies, rows, strict=True):
                        copy.assign(tf.cast(row, copy.dtype))
        exchange.step.assign(13)
        exchange.skipped.assign(2)
    return exchange


def split_replicas(part):
    """Returns the parts that as many processes with one replica each would have saved."""
    kinds = json.loads(part["about"].tobytes())["kinds"]
    return [
        {n: a if kinds.get(n, "shared") == "shared" else a[r : r + 1] for n, a in part.items()}
        | {"rank": np.int64(r), "rows": np.int64(1)}
        for r in range(int(part["rows"]))
    ]


def sums(parts):
    """Returns totals over all parts, by name: sums of additive state, means of the rest."""
    kinds = json.loads(parts[0]["about"].tobytes())["kinds"]
    total = {}
    for name, kind in kinds.items():
        rows = [a.astype(np.float64) for p in parts for a in (p[name] if kind != "shared" else [])]
        total[name] = parts[0][name] if kind == "shared" else sum(rows)
        if kind == "mean":
            total[name] = total[name] / len(rows)
    return total


def assert_equal_parts(first, second, passing=("about",)):
    assert first.keys() == second.keys()
    for name in first.keys() - set(passing):
        assert first[name].tobytes() == second[name].tobytes(), name


@pytest.mark.parametrize("name", METHODS)
def test_equal_number_of_workers_restores_bitwise(mirrored, name):
    saved = build(mirrored(2), METHODS[name]).worker_state()
    assert all(isinstance(a, np.ndarray) and a.dtype.kind in "biuf" for a in saved.values())
    assert (int(saved["rank"]), int(saved["workers"]), int(saved["step"])) == (0, 2, 13)
    for parts in ([saved], split_replicas(saved), split_replicas(saved)[::-1]):
        other = build(mirrored(2), METHODS[name], filled=False)
        other.restore_worker_states(parts)
        assert_equal_parts(other.worker_state(), saved)
        assert not other.fresh


@pytest.mark.parametrize("name", METHODS)
def test_other_number_of_workers_preserves_the_sums(mirrored, name):
    parts = split_replicas(build(mirrored(4), METHODS[name]).worker_state())
    expected = sums(parts)
    for workers in (2, 3, 1, 4):
        other = build(mirrored(workers), METHODS[name], filled=False)
        twice = parts[1:2] if workers == 3 else []  # still counts once
        other.restore_worker_states([*parts, *twice])
        parts = [other.worker_state()]
        found = sums(parts)
        for array in expected:
            np.testing.assert_allclose(found[array], expected[array], rtol=1e-6, atol=3e-7)
        residuals = [a for n, a in parts[0].items() if "residual" in n]
        assert all(np.abs(a).max() > 0.01 for a in residuals)
        assert int(other.step.numpy()) == 13


def test_missing_parts_are_named_and_others_used_once(mirrored):
    parts = split_replicas(build(mirrored(4)).worker_state())
    other = build(mirrored(4), filled=False)
    with pytest.warns(UserWarning, match="4 workers.* ranks 1, 3 .*missing"):
        other.restore_worker_states([parts[0], parts[2]])
    found, expected = sums([other.worker_state()]), sums([parts[0], parts[2]])
    for array in expected:
        np.testing.assert_allclose(found[array], expected[array], rtol=1e-6, atol=3e-7)


@loop(
    ("method", "warns"),
    [
        (rs.DiLoCo(steps=4), True),
        (rs.CodedTopK(steps=4, warm_up=rs.DenseWarmUp(2)), True),
        (rs.LocalSGD(steps=4), False),
        (METHODS["redsync"], False),
    ],
)
def test_single_worker_warns_of_lost_rounds(mirrored, method, warns):
    exchange = build(mirrored(1), method, filled=False)
    part = exchange.worker_state() | {"workers": np.int64(2)}
    for parts in ([part, part | {"rank": np.int64(1)}], [part]):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", UserWarning)
            exchange.restore_worker_states(parts)
        # With a single part the worker probably only evaluates.
        found = ["rounds are dropped" in str(w.message) for w in caught]
        assert found == [True] * (warns and len(parts) == 2)


def gradients(step, workers):
    generator = np.random.default_rng([step, workers])
    return [
        [generator.standard_normal(s).astype(np.float32) for s in SHAPES.values()]
        for _ in range(workers)
    ]


def make_step(strategy, exchange):
    """Returns a function that runs a step and returns the first replica's totals."""

    @tf.function
    def run(per_replica):
        def replica(grads):
            totals, _ = exchange(grads, list(range(len(grads))))
            return totals

        totals = strategy.run(replica, (per_replica,))
        return [strategy.experimental_local_results(t)[0] for t in totals]

    def step(number):
        grads = gradients(number, strategy.num_replicas_in_sync)
        per_replica = [
            strategy.experimental_distribute_values_from_function(
                lambda context, i=i: tf.constant(grads[context.replica_id_in_sync_group][i])
            )
            for i in range(len(SHAPES))
        ]
        return [t.numpy().tobytes() for t in run(per_replica)]

    return step


def assert_resumes_bitwise(strategy, method):
    """Asserts that 30 steps equal 13 + 17 steps with a restore in between."""
    straight = build(strategy, method, filled=False)
    step = make_step(strategy, straight)
    for number in range(13):
        step(number)
    saved = straight.worker_state()
    expected = [step(number) for number in range(13, 30)]
    other = build(strategy, method, filled=False)
    other.restore_worker_states([saved])
    step = make_step(strategy, other)
    assert len({repr(e) for e in expected}) > 3, "the totals must vary"
    assert [step(number) for number in range(13, 30)] == expected
    assert_equal_parts(other.worker_state(), straight.worker_state())


def on_replicas(name):
    """Returns whether replicas of one process can be workers of a method."""
    # The stages of `Scheduled` need collectives that run in branches.
    return name != "Scheduled" and not registered()[name]().sync_schedule.per_worker_weights


@pytest.mark.deep
@pytest.mark.timeout(1200)
@loop("name", filter(on_replicas, method_settings.names()))
def test_every_method_resumes_bitwise(mirrored, name):
    assert_resumes_bitwise(
        mirrored(2), method_settings.make(name, threshold=0.5, density=0.1, dense_below=16)
    )


def put(**values):
    return lambda parts: parts[0].update(values)


def put_about(**values):
    def change(parts):
        for part in parts[:1]:
            found = json.loads(part["about"].tobytes()) | values
            part["about"] = np.frombuffer(json.dumps(found).encode(), np.uint8)

    return change


def find_name(parts, word):
    return next(n for n in parts[0] if word in n)


def bad_number(parts):
    name = find_name(parts, "residual")
    parts[0][name] = parts[0][name].copy()
    parts[0][name].flat[3] = np.inf


def bad_dtype(parts):
    parts[0][find_name(parts, "residual")] = parts[0][find_name(parts, "residual")].astype(
        np.float64
    )


def bad_shape(parts):
    parts[0][find_name(parts, "residual")] = np.zeros((1, 7), np.float32)


REFUSED = {
    "numbers that are not finite": (bad_number, "rank 0, saved at step 13, has 1 non-finite"),
    "another dtype": (bad_dtype, "dtype float32. Received: dtype=float64"),
    "another shape": (bad_shape, "states/.*received \\(7,\\)"),
    "a negative counter": (put(step=np.int64(-1)), "'step' of a part must be an integer"),
    "a counter in float64": (put(step=np.float64(3)), "'step' of a part must be an integer"),
    "more in a row than at all": (
        lambda parts: [p.update(skipped_in_a_row=np.int64(3)) for p in parts],
        "'skipped_in_a_row' from 0 to 2. Received: 3",
    ),
    "a newer format": (put(format=np.int64(2)), "format 2.* format 1"),
    "a rank that cannot be": (put(rank=np.int64(5)), "rank=5, rows=1, workers=2"),
    "more workers than there can be": (
        lambda parts: [p.update(workers=np.int64(1 << 40)) for p in parts],
        "workers=1099511627776",
    ),
    "no number of workers": (lambda parts: parts[0].pop("workers"), "`parts`.*without workers"),
    "something else": (lambda parts: parts.__setitem__(0, {"a": 1}), "`parts`"),
    "text": (put(step=np.array("13")), "'step' of a part must be an array of numbers"),
    "objects": (put(step=np.array(13, object)), "'step' .* numbers. Received: dtype=object"),
    "no JSON": (put(about=np.arange(5, dtype=np.uint8)), "'about' of a part must be JSON"),
    "a mixture": (lambda parts: parts[0].pop(find_name(parts, "velocity")), "'about'.*Received"),
    "two saves": (put(step=np.int64(26)), "step 26.* has .*step 13"),
    "two runs": (put_about(run=5), "rank 0 on worker 0 has run 5;.*run "),
}  # fmt: skip


@pytest.fixture
def part_and_exchange(mirrored):
    """Returns a part, and an exchange to restore it to."""
    return build(mirrored(2)).worker_state(), build(mirrored(2), filled=False)


@loop("case", REFUSED)
def test_invalid_part_is_rejected_and_changes_no_state(part_and_exchange, case):
    saved, exchange = part_and_exchange
    parts, before = split_replicas(saved), exchange.worker_state()
    damage, text = REFUSED[case]
    damage(parts)
    with pytest.raises(ValueError, match=text):
        exchange.restore_worker_states(parts)
    assert_equal_parts(exchange.worker_state(), before)


@pytest.mark.parametrize("name", METHODS)
def test_file_without_a_part_sets_the_initial_state(mirrored, name):
    exchange = build(mirrored(2), METHODS[name])
    restore.restore_or_warn(exchange, list)
    expected = build(mirrored(2), METHODS[name], filled=False).worker_state()
    assert_equal_parts(exchange.worker_state(), expected, passing=("about", "skipped"))
    assert exchange.fresh


@loop("name", ["extra.a", "extra/a"])
def test_names_that_files_cannot_hold_are_rejected(mirrored, name):
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Named(rs.TopK):
        @property
        def traits(self):
            kinds = {"residual": "sum", name: "mean"}
            return dataclasses.replace(super().traits, state_kinds=kinds)

    with pytest.raises(ValueError, match=f"Received: '{name}'"):
        build(mirrored(2), Named(dense_below=0))


def test_counters_may_start_below_zero(mirrored):
    """PacTrain's does, which waits for weights to be pruned."""
    saved = build(mirrored(2), rs.contrib.PacTrain(dense_below=0), filled=False).worker_state()
    assert any(not a.shape and a < 0 for a in saved.values())
    other = build(mirrored(2), rs.contrib.PacTrain(dense_below=0), filled=False)
    other.restore_worker_states([saved])
    assert_equal_parts(other.worker_state(), saved)


@pytest.mark.parametrize("name", ["power", "coded_gmc"])
def test_states_of_tensors_load_into_other_buckets(mirrored, name):
    methods = {**METHODS, "coded_gmc": rs.CodedGMC(dense_below=0)}
    one, several = (
        build(mirrored(2), methods[name], filled, size)
        for filled, size in ((True, None), (False, 4))
    )
    assert len(one.states) < len(several.states)
    saved = one.worker_state()
    several.restore_worker_states([saved])
    assert_equal_parts(several.worker_state(), saved)


def test_part_of_another_method_or_none_is_rejected(mirrored):
    saved = build(mirrored(2)).worker_state()
    other = build(mirrored(2), rs.Dense(momentum=0.9))
    with pytest.raises(ValueError, match="states/ratios/bucket_0/0: expected"):
        other.restore_worker_states([saved])
    with pytest.raises(ValueError, match="`parts`.*Received"):
        other.restore_worker_states([])
    unbuilt = ExchangeBuilder(rs.Policy(default=rs.Dense()))
    with pytest.raises(RuntimeError, match="`worker_state`.*build"):
        unbuilt.worker_state()


@loop(
    "version, words",
    [
        ("0.0.1", rf"tf_redsync '0\.0\.1' and not '{re.escape(rs.__version__)}'"),
        (rs.__version__, "^(?!.*tf_redsync)"),
        ("\x1b" * 1000, rf"tf_redsync '[\\x1b]{{,19}} and not '{re.escape(rs.__version__)}'"),
    ],
)
def test_part_of_another_version_names_both(part_and_exchange, version, words):
    saved, exchange = part_and_exchange
    about = json.loads(saved["about"].tobytes())
    assert about.pop("version") == rs.__version__
    about["version"] = version
    good = saved | {"about": np.frombuffer(json.dumps(about).encode(), np.uint8)}
    about["kinds"]["states/new/0"] = "sum"
    extra = {"about": np.frombuffer(json.dumps(about).encode(), np.uint8)}
    with pytest.raises(restore.IncompatibleState, match=words) as error:
        exchange.restore_worker_states([good | extra | {"states/new/0": np.zeros([2, 3])}])
    assert "states/new/0" in str(error.value)
    exchange.restore_worker_states([good])
    assert_equal_parts(exchange.worker_state(), good)


AUTO = rs.Auto(candidates=(METHODS["redsync"],), trial_steps=0, momentum=0.9)


@pytest.fixture
def of_another_choice(mirrored, monkeypatch):
    """A part of a run in which `AUTO` has chosen its candidate."""
    with monkeypatch.context() as patched:
        patched.setattr(
            rs.Auto,
            "_choice",
            lambda self, s, m: auto.Choice(s, self.methods, (1, 0), self.methods[1]),
        )
        return build(mirrored(2), AUTO).worker_state()


def test_autos_choice_is_kept(mirrored, of_another_choice):
    """The measurement would now choose another method; traced steps cannot change it."""
    policy, saved = AUTO, of_another_choice
    other = build(mirrored(2), policy, filled=False)
    assert "RedSync" not in {r.method for r in other.explain().rows}
    other.restore_worker_states([saved])
    assert "RedSync" in {r.method for r in other.explain().rows}
    assert_equal_parts(other.worker_state(), saved)
    late = build(mirrored(2), policy)
    late.called = True
    with pytest.warns(UserWarning, match="Auto .*methods.*residuals.*dropped"):
        late.restore_worker_states([saved])
    assert int(late.step.numpy()) == 13
    assert not any(np.any(a) for n, a in late.worker_state().items() if n.startswith("states/"))


def test_kept_choice_has_the_optimizer_and_stays_disabled(mirrored, of_another_choice, monkeypatch):
    exchange, attached = build(mirrored(2), AUTO, filled=False), []
    monkeypatch.setattr(ExchangeSchedule, "attach_optimizer", lambda *given: attached.append(given))
    exchange.attach_optimizer((), {}, None)
    exchange.switch(off=True)
    before = exchange.schedule
    exchange.restore_worker_states([of_another_choice])
    assert exchange.schedule is not before and exchange.schedule.off
    assert attached == [(before, {}, None), (exchange.schedule, {}, None)]


# ------------------------------------------------------------------------------ files, one process


def test_saved_choice_with_another_momentum_is_not_kept(mirrored):
    """It would train without the momentum of `Auto`."""
    saved = build(mirrored(2), rs.Auto()).worker_state()
    exchange = build(mirrored(2), rs.Auto(momentum=0.9), filled=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        exchange.restore_worker_states([saved])
    assert {a.method for a in exchange.assignments} == {rs.Dense(momentum=0.9)}


def network(strategy, method=METHODS["redsync"]):
    with strategy.scope():
        model = keras.Sequential([keras.layers.Input((30,)), keras.layers.Dense(20)])
        optimizer = rs.DistributedOptimizer(keras.optimizers.SGD(0.1), method)
        model.compile(optimizer, "mse")
        model.optimizer.build(model.trainable_variables)
    exchange = model.optimizer.exchange
    for copy in strategy.experimental_local_results(first_residual(exchange)):
        copy.assign(tf.fill(copy.shape, 0.25))
    exchange.step.assign(13)
    optimizer.iterations.assign(13)
    return model


def first_residual(exchange):
    return exchange.states[-1].variables_by_name["residual"][0]


def residual(model):
    exchange = model.optimizer.exchange
    local = exchange.strategy.experimental_local_results(first_residual(exchange))
    return [v.numpy() for v in local]


def test_parts_are_read_from_files(mirrored, tmp_path):
    strategy = mirrored(2)
    model = network(strategy)
    model.save(tmp_path / "a.keras")
    model.save_weights(tmp_path / "a.weights.h5")
    model.save_weights(tmp_path / "a.weights.json", max_shard_size=5e-6)  # GB
    assert len(list(tmp_path.glob("a_*.weights.h5"))) > 1
    prefix = tf.train.Checkpoint(optimizer=model.optimizer).write(str(tmp_path / "checkpoint"))
    files = [tmp_path / f"a.{suffix}" for suffix in ("keras", "weights.h5", "weights.json")]
    if keras.__version__.startswith("3.10."):  # it lists only the first of a layer's shards
        files.pop()
    for path in (*files, prefix):
        assert_equal_parts(
            rs.read_worker_state(path), model.optimizer.exchange.worker_state(), passing=()
        )
    again = network(strategy)
    for copy in strategy.experimental_local_results(first_residual(again.optimizer.exchange)):
        copy.assign(tf.zeros(copy.shape))
    again.optimizer.iterations.assign(0)
    again.load_weights(files[-1])
    np.testing.assert_array_equal(residual(again), residual(model))
    model.compile("sgd", "mse")
    model.save(tmp_path / "b.keras")
    with pytest.raises(ValueError, match=r"`path` must be a file with the state.*b\.keras' with 0"):
        rs.read_worker_state(tmp_path / "b.keras")


@loop(
    ("name", "content", "error"),
    [
        ("missing", None, OSError),
        ("missing.keras", None, OSError),
        ("other.keras", b"no archive", OSError),
        ("empty.keras", b"PK\5\6" + bytes(18), ValueError),
        ("other.weights.h5", b"no HDF5", OSError),
        ("other.weights.json", b"{}", ValueError),
    ],
)
def test_files_without_a_part_are_rejected(name, content, error, tmp_path_factory):
    path = tmp_path_factory.mktemp("files") / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(error):
        rs.read_worker_state(path)


def test_damaged_checkpoint_is_rejected(mirrored, tmp_path):
    model = network(mirrored(2))
    prefix = tf.train.Checkpoint(optimizer=model.optimizer).write(str(tmp_path / "checkpoint"))
    reader = tf.train.load_checkpoint(prefix)
    key = next(n for n in reader.get_variable_to_shape_map() if "py_state" in n)
    bomb, single, huge = io.BytesIO(), io.BytesIO(), io.BytesIO()
    np.savez_compressed(bomb, step=np.zeros(1 << 20))
    np.save(single, np.zeros(3))
    form = {"shape": (1 << 50,), "fortran_order": False, "descr": "<f8"}
    with zipfile.ZipFile(huge, "w") as archive, archive.open("step.npy", "w") as file:
        np.lib.format.write_array_header_1_0(file, form)
    made = [file.getvalue() for file in (bomb, single, huge)]
    for text in (reader.get_tensor(key)[:-300], b"", b"\x80\x04N.", *made):
        with pytest.raises(ValueError, match="corrupted"):
            model.optimizer.exchange._in_checkpoint.deserialize(text)


def test_dropped_fragment_in_flight_can_be_restored():
    """Its changes are NaN until the step that would apply them."""
    specs = [TensorSpec(n, s, position=i) for i, (n, s) in enumerate(SHAPES.items())]
    method = rs.StreamingDiLoCo(steps=4, fragments=1, overlap=1)
    (bucket,) = make_buckets([(s, method) for s in specs], 2)
    state, kinds = Streaming([bucket], 4, nonfinite=None).init(bucket)
    for name, (first, *_) in state.items():
        entry = Entry(f"states/{name}/0", kinds[name], (tf.Variable(first),))
        nan = np.full(entry.shape, np.nan).astype(entry.dtype)
        if name == "moving":
            entry.check("the part", nan)
        elif entry.dtype.kind == "f":
            with pytest.raises(ValueError, match=f"non-finite.*{name}"):
                entry.check("the part", nan)
    assert kinds["moving"] == "mean"


@pytest.mark.parametrize(
    ("schedule", "method"),
    [(LocalSteps, rs.DiLoCo(steps=4)), (Streaming, rs.StreamingDiLoCo(steps=4, fragments=1))],
)
def test_state_that_needs_several_workers_is_known(schedule, method):
    specs = [TensorSpec(n, s, position=i) for i, (n, s) in enumerate(SHAPES.items())]
    (bucket,) = make_buckets([(s, method) for s in specs], 2)
    one, _ = ExchangeSchedule([bucket]).init(bucket)
    several, _ = schedule([bucket], 4, nonfinite=None).init(bucket)
    assert several.keys() > one.keys()
    for name in several:
        assert needs_several_workers(f"states/{name}/0") == (name not in one), name
