"""`CompressionMetrics`: its numbers against independent computations, and misuse."""

import csv
import itertools
import json
import math
import re
import threading
import time
import types
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import tf_redsync as rs
from tests.loops import loop
from tf_redsync.callbacks import CompressionMetrics
from tf_redsync.callbacks import metrics as metrics_module
from tf_redsync.keras.fit_hook import OfBothKeras
from tf_redsync.methods.known_losses import known_loss
from tf_redsync.metrics import outputs, page, profiler, records, sampling
from tf_redsync.step.fit_steps import WarmUp

STEPS, BATCH = 12, 8
X, Y = np.ones((STEPS * BATCH, 30), "float32"), np.ones((STEPS * BATCH, 20), "float32")
TOPK = rs.TopK(density=0.05, dense_below=0)
ALONE = tf.distribute.get_strategy()


def build_model(strategy, family, method, **options):
    with strategy.scope(), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        family.utils.set_random_seed(1)
        names = ("first", "second")
        layers = [family.layers.Input((30,))] + [family.layers.Dense(20, name=n) for n in names]
        model = family.Sequential(layers, name="small")
        model.compile(
            rs.DistributedOptimizer(family.optimizers.SGD(0.01), method), "mse", **options
        )
    return model


def fit_model(model, metrics, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", rs.AccuracyWarning)
        options = {"batch_size": BATCH, "epochs": 2, "verbose": 0} | options
        callbacks = [*options.pop("callbacks", ()), metrics]
        return model.fit(X, Y, callbacks=callbacks, **options).history


def lines(folder, kind=None):
    found = [json.loads(line) for line in (folder / "worker-0.jsonl").read_text().splitlines()]
    return [r for r in found if kind in (None, r["record"])]


def residual_norms(optimizer):
    """Returns the norms of residuals in the saved state, one row per replica."""
    part = optimizer.exchange.worker_state()
    rows = [v for n, v in sorted(part.items()) if "/residual/" in n]
    return [np.mean([np.linalg.norm(r) ** 2 for r in v]) ** 0.5 for v in rows]


@loop("family", [keras, tf_keras])
def test_metrics_match_the_saved_state(mirrored, tmp_path, family):
    folder = tmp_path / family.__name__
    model = build_model(mirrored(2), family, TOPK)
    history = fit_model(model, CompressionMetrics(folder, every=5, time_split=False))
    optimizer, explained = model.optimizer, model.optimizer.explain()
    sent, steps = explained.bytes_per_step, 2 * STEPS
    ratio = explained.dense_bytes / sent
    assert history["compression_ratio"] == pytest.approx([ratio] * 2) and ratio > 4
    assert history["bytes_per_step"] == [sent] * 2
    assert history["bytes_sent"] == [sent * STEPS, sent * steps]
    assert history["skipped_steps"] == [0, 0] and min(history["step_ms"]) > 0
    # 30 and 20 elements of the kernels, all of the biases
    assert history["density"] == pytest.approx([(30 + 20 + 40) / (600 + 400 + 40)] * 2)
    expected = residual_norms(optimizer)
    assert len(expected) == 2 and history["residual_norm"][-1] == pytest.approx(
        math.hypot(*expected), rel=1e-5
    )
    (run,) = lines(folder, "run")
    assert [v["method"] for v in run["variables"]] == ["TopK", "Dense"] * 2
    assert run["workers"] == 2 and run["dense_bytes"] == explained.dense_bytes
    samples = lines(folder, "sample")
    assert [s["step"] for s in samples] == [5, *range(8, 25)]
    assert samples[-1]["layers"]["density"] == pytest.approx([0.05, 1, 0.05, 1])
    assert [r is None for r in samples[-1]["layers"]["residual"]] == [False, True] * 2
    assert all(0 < s["logs"]["loss"] < 10 for s in samples)
    last = lines(folder, "epoch")[-1]
    assert last["step"] == steps and last["logs"]["loss"] == pytest.approx(history["loss"][-1])
    assert lines(folder)[-1]["record"] == "end"


@loop("family", [keras, tf_keras])
def test_seconds_begin_with_fit(tmp_path, family):
    """The first sample of these twelve steps follows the eighth."""
    slow = family.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: time.sleep(0.0 if epoch else 0.7)
    )
    folder = tmp_path / family.__name__
    metrics = CompressionMetrics(folder, time_split=False)
    fit_model(build_model(ALONE, family, TOPK), metrics, callbacks=[slow])
    (run,), (first, *_) = lines(folder, "run"), lines(folder, "sample")
    assert first["seconds"] == pytest.approx(first["time"] - run["time"]) and first["seconds"] > 0.7
    (worker,) = records.load(folder).workers
    assert worker.samples[0]["elapsed"] > 0.7


@loop("family, per_execution", [(keras, 1), (tf_keras, 3)])
def test_step_ms_is_the_mean_without_the_first_batch(monkeypatch, tmp_path, family, per_execution):
    """The first batch takes 10 s, because it traces, and every later step 0.02 s."""
    seconds = itertools.chain([10.0], itertools.repeat(0.02 * per_execution))
    readings = itertools.accumulate(s for batch in seconds for s in (0.0, batch))
    clock = types.SimpleNamespace(perf_counter=readings.__next__, time=time.time)
    monkeypatch.setattr(metrics_module, "time", clock)
    folder = tmp_path / family.__name__
    model = build_model(ALONE, family, TOPK, steps_per_execution=per_execution)
    history = fit_model(model, CompressionMetrics(folder, every=6, time_split=False))
    assert history["step_ms"] == pytest.approx([20.0] * 2)
    assert {round(s["step_ms"], 6) for s in lines(folder, "sample")} == {20.0}


class OfKeras310(CompressionMetrics):
    """Receives an execution's first batch at its end, as Keras 3.10 passes it."""

    def on_train_batch_begin(self, batch, logs=None):
        self.first = batch
        super().on_train_batch_begin(batch, logs)

    def on_train_batch_end(self, batch, logs=None):
        super().on_train_batch_end(self.first, logs)


@loop("kind", [CompressionMetrics, OfKeras310])
def test_steps_of_an_execution_are_counted(tmp_path_factory, kind):
    folder = tmp_path_factory.mktemp(kind.__name__)
    model = build_model(ALONE, keras, TOPK, steps_per_execution=3)
    fit_model(model, kind(folder, every=6, time_split=False), epochs=1)
    assert [s["step"] for s in lines(folder, "sample")] == [6, 12]


def test_skipped_batches_of_a_resumed_epoch_are_no_steps(tmp_path):
    """As of the ten that `Checkpoint` skips here; two steps are too few for a sample."""
    model, metrics = build_model(ALONE, keras, TOPK), CompressionMetrics(tmp_path, every=6)
    callbacks = keras.callbacks.CallbackList([metrics], model=model, epochs=1, steps=STEPS)
    callbacks.on_train_begin()
    callbacks.on_epoch_begin(0)
    for batch in (STEPS - 2, STEPS - 1):
        callbacks.on_train_batch_begin(batch)
        model.train_on_batch(X[:BATCH], Y[:BATCH])
        callbacks.on_train_batch_end(batch)
    assert not list(tmp_path.iterdir())
    callbacks.on_train_end()


def unknown_length():
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(BATCH)
    return data.filter(lambda x, y: True)


@pytest.mark.deep
@loop("family", [keras, tf_keras])
@loop("data", [None, unknown_length])
def test_short_fit_samples_often_and_at_its_end(family, data, tmp_path_factory):
    """Of 72 steps, at the default of 100."""
    folder = tmp_path_factory.mktemp("short")
    model = build_model(ALONE, family, TOPK)
    metrics = CompressionMetrics(folder, time_split=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        given = {"x": X, "y": Y, "batch_size": BATCH} if data is None else {"x": data()}
        options = {"epochs": 6, "verbose": 0, "callbacks": [metrics], "validation_data": (X, Y)}
        history = model.fit(**given, **options).history
    samples = lines(folder, "sample")
    steps = [s["step"] for s in samples]
    assert 30 <= len(steps) <= 40 and steps == sorted(set(steps)) and steps[0] == 8
    epochs, by_step = lines(folder, "epoch"), {s["step"]: s for s in samples}
    ends = [by_step[epoch["step"]] for epoch in epochs]
    assert [s["logs"]["loss"] for s in ends] == pytest.approx(history["loss"], rel=1e-5)
    # Before the validation.
    assert all(end["time"] < epoch["time"] for end, epoch in zip(ends, epochs, strict=True))
    text = page.report(folder).read_text()
    assert f"<dt>loss</dt><dd>{history['loss'][-1]:.4g}</dd>" in text


@loop("every, epochs, first", [(2, 6, 2), (1, 3, 1)])
def test_long_fit_is_sampled_as_configured(every, epochs, first, tmp_path_factory):
    folder = tmp_path_factory.mktemp("long")
    fit_model(
        build_model(ALONE, keras, TOPK), CompressionMetrics(folder, every, False), epochs=epochs
    )
    steps = [s["step"] for s in lines(folder, "sample")]
    assert steps == list(range(first, STEPS * epochs + 1, every))


def test_epochs_of_unknown_length():
    """A custom loop must not sample every step."""
    assert [sampling.interval(100, steps) for steps in (0, 66, 300, 3000, 10**6)] == [
        1, 2, 10, 100, 100,
    ]  # fmt: skip
    metrics = CompressionMetrics(every=100)
    metrics.params, metrics._first_epoch = {}, 0
    metrics._steps, metrics._per_epoch, metrics._next_batch = 6000, 10, 10
    assert metrics._interval() == 100


@pytest.mark.deep
def test_samples_record_what_was_sent(mirrored, tmp_path):
    """A threshold that no or every element reaches: the settings alone would predict otherwise."""
    densities = {}
    for threshold in (1e-9, 1e9):
        method = rs.contrib.FixedThreshold(threshold=threshold, density=0.9, dense_below=0)
        folder = tmp_path / str(threshold)
        fit_model(build_model(mirrored(2), keras, method), CompressionMetrics(folder, 5, False))
        densities[threshold] = lines(folder, "sample")[-1]["layers"]["density"][2]
    assert densities[1e-9] > 0.5 and densities[1e9] == 0.0


@pytest.mark.deep
@loop(
    ("method", "density", "has_residual"),
    [
        (rs.Dense(), 1.0, False),
        (rs.NoExchange(), None, False),
        (rs.SignSGD(), 1.0, False),
        (rs.RedSync(density=0.05, dense_below=0, warm_up=rs.DenseWarmUp(6)), None, True),
        (rs.PowerSGD(rank=1), 1.0, True),
        (rs.Policy(default=TOPK, rules=(rs.Rule(pattern="second", method=rs.SignSGD()),)), None, 1),
    ],
)
def test_other_methods(mirrored, tmp_path, method, density, has_residual):
    folder = tmp_path / type(method).__name__
    history = fit_model(
        build_model(mirrored(2), keras, method), CompressionMetrics(folder, 4, False)
    )
    if density is not None:
        assert history["density"] == [density] * 2
    assert (history["residual_norm"][-1] > 0) == bool(has_residual)
    if isinstance(method, rs.NoExchange):
        assert history["compression_ratio"] == [math.inf] * 2 and history["bytes_sent"] == [0, 0]
        assert lines(folder, "sample")[0]["compression_ratio"] is None  # JSON has no infinity
    if method == rs.Dense():
        assert history["compression_ratio"] == pytest.approx([1.0] * 2)


@pytest.mark.deep
def test_several_steps_per_execution(mirrored, tmp_path):
    """With tf_keras; see the distributed test for Keras 3, which needs worker processes."""
    model = build_model(mirrored(2), tf_keras, TOPK, steps_per_execution=3)
    history = fit_model(model, CompressionMetrics(tmp_path, every=6, time_split=False))
    assert history["bytes_sent"][-1] == model.optimizer.bytes_per_step() * 2 * STEPS
    assert [s["step"] for s in lines(tmp_path, "sample")] == [6, 12, 18, 24]


@pytest.mark.deep
def test_keras_loggers_receive_the_metrics(mirrored, tmp_path, capfd):
    """`History`, `CSVLogger` and `TensorBoard` at any position; the progress bar stays short."""
    table, board = tmp_path / "log.csv", tmp_path / "board"
    others = [keras.callbacks.CSVLogger(str(table)), keras.callbacks.TensorBoard(str(board))]
    model = build_model(mirrored(2), keras, TOPK)
    history = fit_model(
        model,
        CompressionMetrics(tmp_path / "run", every=4),
        callbacks=others,
        verbose=1,
        validation_data=(X, Y),
    )
    rows = list(csv.DictReader(table.open()))
    assert len(rows) == 2 and {"compression_ratio", "wait_ms", "density"} < set(rows[0])
    assert float(rows[1]["bytes_sent"]) == history["bytes_sent"][1] > 0
    split = [history[f"{part}_ms"][-1] for part in ("compute", "select", "wait", "decode", "input")]
    assert all(t >= 0 for t in split) and history["exchange_ms"][-1] >= 0
    found = scalars_of(board / "train")
    assert found["epoch_compression_ratio"] == pytest.approx(history["compression_ratio"][-1])
    own, name = scalars_of(tmp_path / "run/tensorboard/worker-0"), model.weights[0].path
    assert own[f"tf_redsync/density/{name}"] == pytest.approx(0.05)
    assert own[f"tf_redsync/residual_norm/{name}"] > 0 and own["tf_redsync/time/step_ms"] > 0
    assert own[f"residual/{name}"] == 600  # elements in the histogram
    bar = capfd.readouterr().out
    assert "compression_ratio: " in bar and "_ms: " not in bar
    shown_kb = re.search(r"kB_per_step: (\d+\.\d{4})\b", bar)
    assert float(shown_kb[1]) == pytest.approx(history["bytes_per_step"][0] / 1e3, abs=1e-4)
    assert "bytes_per_step" not in bar and "skipped_steps" not in bar
    shown = [part for line in bar.splitlines() for part in line.replace("\b", "\r").split("\r")]
    assert max(map(width, shown)) < 160


def width(text):
    return len(re.sub(r"\x1b\[[0-9;]*m", "", text))


def scalars_of(folder):
    """Returns the last value of each scalar, and histogram names with their total counts."""
    found = {}
    for path in sorted(folder.rglob("*.v2")):
        for event in tf.compat.v1.train.summary_iterator(str(path)):
            for value in event.summary.value:
                if value.HasField("simple_value"):
                    found[value.tag] = value.simple_value
                array = tf.make_ndarray(value.tensor) if value.HasField("tensor") else None
                if array is not None and array.dtype.kind == "f":
                    found[value.tag] = float(array) if array.ndim == 0 else array[:, 2].sum()
    return found


@pytest.mark.deep
def test_second_fit_and_resume(mirrored, tmp_path):
    """Total bytes continue in this process, and in a new one from its file."""
    model, resumed = (build_model(mirrored(2), keras, TOPK) for _ in range(2))
    for one in (model, resumed):
        with mirrored(2).scope():
            one.optimizer.build(one.trainable_variables)
    sent = model.optimizer.bytes_per_step() * STEPS
    metrics = CompressionMetrics(tmp_path, every=6, time_split=False)
    assert fit_model(model, metrics, epochs=1)["bytes_sent"] == [sent]
    assert fit_model(model, metrics, initial_epoch=1, epochs=2)["bytes_sent"] == [2 * sent]
    resumed.optimizer.exchange.restore_worker_states([model.optimizer.exchange.worker_state()])
    (tmp_path / "worker-0.jsonl").open("a").write('{"record": "sample", "st')  # killed there
    again = CompressionMetrics(tmp_path, every=6, time_split=False)
    assert fit_model(resumed, again, initial_epoch=2, epochs=3)["bytes_sent"] == [3 * sent]
    fresh = build_model(mirrored(2), keras, TOPK)  # a new training in the same directory
    assert fit_model(fresh, again, epochs=1)["bytes_sent"] == [sent]


@loop("step, sent", [(20, 60), (40, 400), (55, 550), (60, 600)])
def test_bytes_before_a_resume_at_any_step(step, sent, tmp_path_factory):
    """A checkpoint may be saved between two samples, or before the first one."""
    folder = tmp_path_factory.mktemp("resumed")
    found = [{"record": "run", "format": 1, "step": 0, "expected_bytes": 3.0}]
    for at in (40, 60):
        sample = {"step": at, "bytes_sent": 10 * at, "bytes_per_step": 10.0}
        found.append({"record": "sample", **sample})
    (folder / "worker-0.jsonl").write_text("".join(json.dumps(r) + "\n" for r in found))
    assert outputs._bytes_before(folder, 0, step) == sent


def test_resume_reads_only_the_end_of_a_long_file(tmp_path, monkeypatch):
    """After days, a worker's file may be larger than its memory."""
    layers = {"density": [0.001] * 100, "residual": [1.0] * 100}
    found = [{"record": "sample", "step": s, "bytes_sent": s, "layers": layers} for s in range(999)]
    path = tmp_path / "worker-0.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in found) + '{"record": "sample", "st')
    monkeypatch.setattr(records, "_BLOCK", 999)  # less than a line
    assert list(records.newest_first(path)) == found[::-1]
    parsed = []
    loads = json.loads
    monkeypatch.setattr(json, "loads", lambda line: parsed.append(line) or loads(line))
    assert outputs._bytes_before(tmp_path, 0, 990) == 990
    assert len(parsed) < 20


def test_times_are_those_of_the_model_in_fit(tmp_path):
    metrics = CompressionMetrics(tmp_path)
    first, second = (build_model(ALONE, keras, TOPK) for _ in range(2))
    times = [fit_model(m, metrics, epochs=1)["compute_ms"] for m in (first, second, second)]
    assert times[0] != times[1] == times[2]
    assert len(lines(tmp_path, "split")) == 2  # profiles of a model are rare


def test_known_losses_match_the_methods_in_use(mirrored, tmp_path):
    """They do not match the last method of the same class in the policy; `Auto` has several."""
    fewer, more = rs.BlockQuantized(bits=4), rs.BlockQuantized(bits=8)
    rules = tuple(rs.Rule(pattern=name, method=fewer) for name in ("first", "second"))
    for policy, losses in (
        (rs.Policy(default=more, rules=rules), known_loss(fewer)),
        (rs.Policy(default=more, rules=rules[1:]), f"{known_loss(fewer)}; {known_loss(more)}"),
    ):
        fit_model(build_model(mirrored(2), keras, policy), CompressionMetrics(tmp_path, 9, False))
        (*_, run) = lines(tmp_path, "run")
        assert sorted(run["known_losses"]["BlockQuantized"].split("; ")) == sorted(
            losses.split("; ")
        )


def test_full_disk_warns_once(tmp_path):
    """Training continues, and so do the logs."""
    (tmp_path / "worker-0.jsonl").symlink_to("/dev/full")
    model = build_model(ALONE, keras, TOPK)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        history = fit_model(model, CompressionMetrics(tmp_path, every=2, time_split=False))
    texts = [str(w.message) for w in caught if "cannot write" in str(w.message)]
    assert len(texts) == 1 and "worker-0.jsonl" in texts[0] and "No space left" in texts[0]
    assert len(history["density"]) == 2


def test_impossible_directory_raises(tmp_path):
    (tmp_path / "file").write_text("")
    model = build_model(ALONE, keras, TOPK)
    metrics = CompressionMetrics(tmp_path / "file" / "run", every=2, time_split=False)
    with pytest.warns(UserWarning, match="cannot write.*Not a directory"):
        assert len(fit_model(model, metrics)["density"]) == 2


def test_running_profiler_warns_once(tmp_path):
    """Another profiler is active: the file notes it as well."""
    model = build_model(ALONE, keras, TOPK)
    tf.profiler.experimental.start(str(tmp_path / "other"))
    try:
        with pytest.warns(UserWarning, match="`CompressionMetrics`.*did not start") as all_:
            history = fit_model(model, CompressionMetrics(tmp_path, every=4))
    finally:
        tf.profiler.experimental.stop(save=False)
    assert len([w for w in all_ if "did not start" in str(w.message)]) == 1
    assert "wait_ms" not in history and lines(tmp_path, "no_split")


class Interrupt(OfBothKeras):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 7:  # during the first profile
            raise KeyboardInterrupt


@pytest.mark.parametrize("family", [keras, tf_keras])
def test_interrupted_fit_closes_profile_and_files(tmp_path, family, monkeypatch):
    monkeypatch.setattr(profiler.tempfile, "tempdir", str(tmp_path))
    model = build_model(ALONE, family, TOPK)
    metrics = CompressionMetrics(tmp_path / "run", every=1)
    with pytest.raises(KeyboardInterrupt):
        fit_model(model, metrics, callbacks=[Interrupt()])
    assert metrics._outputs is None and lines(tmp_path / "run", "sample")
    assert not list(tmp_path.glob("tf_redsync_profile_*"))
    assert fit_model(model, CompressionMetrics())["wait_ms"]  # of a new profile


@loop(
    ("arguments", "text"),
    [
        ({"every": 0}, "`every` must be"),
        ({"every": 2.5}, "`every` must be"),
        ({"every": "epoch"}, "`every` must be"),
        ({"run_dir": ""}, "`run_dir` must be a path"),
        ({"run_dir": 3}, "`run_dir` must be a path"),
        ({"run_dir": "s3://bucket/run1"}, "not a URL. Received: run_dir='s3://bucket/run1'"),
        ({"time_split": "yes"}, "`time_split` must be"),
    ],
)
def test_bad_arguments(arguments, text):
    with pytest.raises(ValueError, match=text):
        CompressionMetrics(**arguments)


@loop("family", [keras, tf_keras])
def test_model_without_the_wrapper_raises(family):
    plain = family.Sequential([family.layers.Input((30,)), family.layers.Dense(20)])
    plain.compile("sgd", "mse")
    with pytest.raises(ValueError, match="`CompressionMetrics` needs a model.*DistributedOptimize"):
        fit_model(plain, CompressionMetrics())


def test_one_worker_with_restoring_callbacks(tmp_path):
    """No bytes are sent; `Checkpoint` and `BackupAndRestore` do not confuse it with theirs."""
    model = build_model(ALONE, keras, TOPK)
    for number, callback in enumerate([rs.callbacks.Checkpoint, keras.callbacks.BackupAndRestore]):
        metrics = CompressionMetrics(tmp_path, every=4, time_split=False)
        history = fit_model(model, metrics, callbacks=[callback(str(tmp_path / f"{number}"))])
        assert history["compression_ratio"] == [1.0] * 2 and history["bytes_sent"] == [0.0] * 2


class WithEmptyVariable(keras.layers.Dense):
    def build(self, shape):
        super().build(shape)
        self.empty = self.add_weight(shape=(0, 4), name="empty")


def test_variable_without_elements(tmp_path):
    model = keras.Sequential([keras.Input((8,)), WithEmptyVariable(4)])
    method = rs.TopK(density=0.5, dense_below=0)
    model.compile(rs.DistributedOptimizer(keras.optimizers.SGD(0.1), method), "mse")
    metrics = CompressionMetrics(tmp_path, time_split=False)
    history = model.fit(np.ones((16, 8)), np.ones((16, 4)), verbose=0, callbacks=[metrics]).history
    assert np.isfinite(history["density"]).all() and lines(tmp_path, "end")


def test_model_before_compile():
    """A custom loop may have such a model in a `CallbackList`."""
    metrics = CompressionMetrics()
    metrics.set_model(keras.Sequential([keras.layers.Input((30,)), keras.layers.Dense(20)]))
    with pytest.raises(ValueError, match="Received: optimizer=NoneType"):
        metrics.on_train_begin()


# ------------------------------------------------------------------------------ step times


def event(name, start, end):
    return name, start, end


def profile(*events):
    """Returns an XSpace of some events, in microseconds."""
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    space = xplane_pb2.XSpace()
    plane = space.planes.add(name="/host:CPU")
    line = plane.lines.add(timestamp_ns=5_000)
    for number, (name, start, end) in enumerate(events, start=1):
        plane.event_metadata[number].name = name
        line.events.add(
            metadata_id=number, offset_ps=start * 10**6, duration_ps=(end - start) * 10**6
        )
    return space


def test_step_split_matches_manual_computation():
    """100 us: input 0-10, compute 10-50, select 40-60, exchange 55-90, decode 90-95, wait."""
    space = profile(
        (profiler.STEP, 0, 100),
        ("IteratorGetNext:IteratorGetNext", 0, 10),
        # contains other events
        ("while/body/StatefulPartitionedCall:StatefulPartitionedCall", 0, 99),
        ("gradient_tape/small/dense/MatMul:MatMul", 10, 50),
        ("sgd/redsync_select/TopKV2:TopKV2", 40, 55),
        ("RedsyncAccumulateAndSelect:RedsyncAccumulateAndSelect", 50, 60),
        ("sgd/CollectiveGatherV2:CollectiveGatherV2", 55, 90),
        ("sgd/redsync_decode/Add:AddV2", 90, 95),
        ("gradient_tape/later:MatMul", 110, 120),  # after the step
        ("ThreadpoolListener::Schedule", 0, 100),  # not an op
    )
    found = profiler.split_of(space, steps=1)
    expected = {"input": 10, "compute": 30, "select": 20, "exchange": 35, "decode": 5, "wait": 35}
    assert {n: round(1e3 * getattr(found, n), 3) for n in expected} == expected
    parts = found.compute + found.select + found.decode + found.input + found.wait
    assert parts == pytest.approx(found.step) == pytest.approx(0.1)
    assert profiler.split_of(space, steps=2).step == pytest.approx(0.05)


def test_profile_without_steps():
    with pytest.raises(profiler.NoProfile, match="no complete step"):
        profiler.split_of(profile(("a:MatMul", 0, 1)), steps=1)


def test_profile_without_a_folder(monkeypatch):
    monkeypatch.setattr(profiler.tempfile, "tempdir", "/nowhere")
    with pytest.raises(profiler.NoProfile, match="no folder for temporary files.*/nowhere"):
        profiler.Profiler().start()


def test_corrupted_profile(tmp_path):
    (tmp_path / "host.xplane.pb").write_bytes(b"\xff")
    found = profiler.Profiler()
    found._thread = threading.Thread(target=found._read, args=(str(tmp_path), 1))
    found._thread.start()
    with pytest.raises(profiler.NoProfile, match="cannot be read"):
        found.result(wait=20)


@loop("family", [keras, tf_keras])
@loop("per_execution", [1, 2, 3])
def test_profile_ends_with_the_epoch(monkeypatch, family, per_execution):
    """The end of an epoch uses new collectives, and TensorFlow may crash if they are recorded."""
    events = []

    def noting(name):
        call = getattr(tf.profiler.experimental, name)
        monkeypatch.setattr(
            tf.profiler.experimental, name, lambda *a, **k: (events.append(name), call(*a, **k))
        )

    class Ends(family.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            events.append("epoch")

    noting("start"), noting("stop")
    model = build_model(ALONE, family, TOPK, steps_per_execution=per_execution)
    fit_model(model, CompressionMetrics(), batch_size=len(X) // 4, callbacks=[Ends()])
    assert "start" in events
    assert all(events[i + 1] == "stop" for i, event in enumerate(events) if event == "start")


def test_first_profile_follows_the_warm_up(mirrored, monkeypatch):
    """By default it would begin in the middle of the first epoch."""
    method = rs.RedSync(density=0.05, dense_below=0, warm_up=rs.DenseWarmUp(15))
    model, began = build_model(mirrored(2), keras, method), []
    start = profiler.Profiler.start
    monkeypatch.setattr(
        profiler.Profiler,
        "start",
        lambda self: (began.append(int(model.optimizer.exchange.step.numpy())), start(self)),
    )
    history = fit_model(model, CompressionMetrics())
    assert began == [15] and [math.isnan(ms) for ms in history["select_ms"]] == [True, False]


@loop("step, verdict, begun", [(9, 0, False), (4, 1, False), (9, 1, True), (9, 2, True)])
def test_profiles_begin_after_trial_and_warm_up(step, verdict, begun):
    times = types.SimpleNamespace(verdict=tf.constant(verdict))
    schedule = types.SimpleNamespace(buckets=(), times=times)
    warm_up = WarmUp(rs.DenseWarmUp(5))
    exchange = types.SimpleNamespace(schedule=schedule, warm_up=warm_up, step=tf.constant(step))
    assert profiler.has_begun(exchange) == begun


@pytest.mark.parametrize("error", [None, RuntimeError("no room")])
def test_profile_is_collected_by_the_training_thread(monkeypatch, error):
    threads, stop = [], tf.profiler.experimental.stop

    def noting(save=True):
        threads.append(threading.current_thread())
        stop(save)
        if error:
            raise error

    monkeypatch.setattr(tf.profiler.experimental, "stop", noting)
    found = profiler.Profiler()
    found.start()
    with tf.profiler.experimental.Trace(profiler.STEP, step_num=0, _r=1):
        tf.function(tf.tanh)(tf.ones([4]))
    found.stop(steps=1)
    assert threads == [threading.current_thread()]
    if error:
        with pytest.raises(profiler.NoProfile, match=r"cannot be read \(no room\)"):
            found.result(wait=20)
    else:
        assert found.result(wait=20).step > 0
    assert not found.busy
