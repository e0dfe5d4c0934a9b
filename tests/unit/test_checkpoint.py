"""`Checkpoint` with one worker: resuming `fit` with every library and kind of data."""

import contextlib
import datetime
import hashlib
import itertools
import os
import re
import shutil
import signal
import sys
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
from tests.deep import DEEP
from tests.loops import loop
from tests.unit import checkpoint_saves
from tf_redsync import stopping
from tf_redsync.cluster import agreement
from tf_redsync.keras import fit_resume, training_state
from tf_redsync.state import checkpoint_files as saved_arrays
from tf_redsync.state.checkpoint_manifest import Manifest
from tf_redsync.state.checkpoint_store import Store

pytestmark = pytest.mark.filterwarnings("ignore:tf_redsync. there is one worker")

ROWS, BATCH, EPOCHS = 40, 4, 3  # ten steps an epoch
STEPS = ROWS // BATCH


class Interrupted(Exception):
    pass


def arrays():
    rng = np.random.default_rng(0)
    x = rng.normal(size=[ROWS, 5]).astype(np.float32)
    return x, (x @ rng.normal(size=[5, 1]) + 0.1).astype(np.float32)


def dataset():
    return tf.data.Dataset.from_tensor_slices(arrays())


# `fit`'s data, as a function, and its other arguments.
DATA = {
    "in order": (lambda: dataset().batch(BATCH), {}),
    "shuffled anew": (lambda: dataset().shuffle(20, seed=3).batch(BATCH), {}),
    "cached": (lambda: dataset().shuffle(20, seed=3).cache().batch(BATCH), {}),
    "shuffled twice": (lambda: dataset().shuffle(20, seed=3).shuffle(9, seed=4).batch(BATCH), {}),
    "shuffled once": (
        lambda: dataset().shuffle(20, seed=3, reshuffle_each_iteration=False).batch(BATCH),
        {},
    ),
    "repeated": (
        lambda: dataset().shuffle(20, seed=3).repeat().batch(BATCH),
        {"steps_per_epoch": STEPS},
    ),
    "of unknown size": (
        lambda: dataset().shuffle(20, seed=3).filter(lambda x, y: True).cache().batch(BATCH),
        {},
    ),
    "several steps at once": (
        lambda: dataset().shuffle(20, seed=3).batch(BATCH),
        {"steps_per_execution": 2},
    ),
}
FAMILIES = {
    "keras3": (keras, lambda: keras.optimizers.Adam(0.01)),
    "tf_keras": (tf_keras, lambda: tf_keras.optimizers.Adam(0.01)),
    "legacy": (tf_keras, lambda: tf_keras.optimizers.legacy.Adam(0.01)),
}


METHOD = rs.RedSync(density=0.1, dense_below=1)


def build_model(family, width=6, method=METHOD, **compiled):
    library, optimizer = FAMILIES[family]
    library.utils.set_random_seed(1)
    layers = [library.layers.Input([5]), library.layers.Dense(width, activation="relu")]
    if family == "keras3":
        layers.append(library.layers.Dropout(0.4, seed=2))
    layers += [library.layers.BatchNormalization(), library.layers.Dense(1)]
    model = library.Sequential(layers)
    wrapped = rs.DistributedOptimizer(optimizer(), method)
    model.compile(wrapped, "mse", metrics=["mae"], **compiled)
    return model


def recorder(library, at=None):
    """Returns a callback that records its arguments and interrupts after step `at`, from 1."""

    class Recorder(library.callbacks.Callback):
        def __init__(self):
            super().__init__()
            self.batches, self.epochs, self.steps = [], {}, 0

        def on_train_batch_end(self, batch, logs=None):
            self.batches.append(batch)
            self.steps += 1
            if self.steps == at:
                raise Interrupted

        def on_epoch_end(self, epoch, logs=None):
            self.epochs[epoch] = (float(logs["loss"]), float(logs["mae"]))
            if epoch == 0:
                rate = self.model.optimizer.learning_rate.numpy()
                self.model.optimizer.learning_rate = 0.4 * rate

    return Recorder()


def train(family, data, directory, at=None, every=4, epochs=EPOCHS, callbacks=(), **arguments):
    per = {k: arguments.pop(k) for k in list(arguments) if k == "steps_per_execution"}
    model = build_model(family, **per)
    seen = recorder(FAMILIES[family][0], at)
    checkpoint = rs.callbacks.Checkpoint(directory, every=every)
    every_one = [seen, *callbacks, checkpoint]
    handlers = [signal.getsignal(number) for number in stopping.SIGNALS]
    try:
        model.fit(data(), epochs=epochs, verbose=0, callbacks=every_one, **arguments)
    except Interrupted:
        assert at is not None
    # As in a notebook, whose kernel survives an error.
    assert [signal.getsignal(number) for number in stopping.SIGNALS] == handlers
    return model, seen


def equal_weights(one, other):
    pairs = itertools.zip_longest(one.get_weights(), other.get_weights())
    return all(np.array_equal(a, b) for a, b in pairs)


# In keras3, "shuffled twice" is tested with other callbacks, below.
SHORT = [
    ("keras3", "repeated"),
    ("keras3", "of unknown size"),
    ("tf_keras", "cached"),
    ("tf_keras", "in order"),
]
CASES = [case for case in itertools.product(FAMILIES, DATA) if case in SHORT or DEEP]


def two_optimizers(library, folder, epochs, place="attribute", builds=True):
    """Trains a model whose two layers have separate optimizers, as a GAN does.

    The first is in an attribute of the model, or compiled into a model that is one.
    """

    class Two(library.Model):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape(persistent=True) as tape:
                loss = tf.reduce_mean((self(x) - y) ** 2)
            for layer, optimizer in zip(self.layers[1:3], wrapped, strict=True):
                variables = layer.trainable_variables
                gradients = tape.gradient(loss, variables)
                optimizer.apply_gradients(zip(gradients, variables, strict=True))
            return {"loss": loss}

    library.utils.set_random_seed(1)
    inputs = library.layers.Input([5])
    model = Two(inputs, library.layers.Dense(1)(library.layers.Dense(6)(inputs)))
    method = rs.RedSync(momentum=0.9, dense_below=1)  # one worker keeps a velocity as well
    wrapped = [rs.DistributedOptimizer(library.optimizers.SGD(0.01), method) for _ in range(2)]
    if place == "attribute":
        model.others = [wrapped[0]] if library is keras else {"other": wrapped[0]}
    else:
        model.inside = library.Sequential([library.layers.Input([5]), model.layers[1]])
        model.inside.compile(wrapped[0])
    for layer, built in zip(model.layers[1:3], wrapped, strict=True):
        if builds or built is wrapped[1]:
            built.build(layer.trainable_variables)
    model.compile(wrapped[1])
    model.fit(
        dataset().batch(BATCH),
        epochs=epochs,
        verbose=0,
        callbacks=[rs.callbacks.Checkpoint(folder)],
    )
    return model


@loop("library", [keras, tf_keras])
def test_model_with_two_optimizers(library, tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    two_optimizers(library, folder / "part", 1)
    assert equal_weights(
        two_optimizers(library, folder / "part", 2), two_optimizers(library, folder / "whole", 2)
    )


def test_optimizer_that_is_not_built_raises(tmp_path):
    with pytest.raises(ValueError, match="Two with others not built. Call"):
        two_optimizers(keras, tmp_path, 1, builds=False)


@loop("library", [keras, tf_keras])
def test_optimizer_of_a_model_inside_warns(library, tmp_path_factory):
    """It may be that of a trained teacher, or one that `train_step` uses."""
    with pytest.warns(UserWarning, match="models inside: inside.optimizer. If `train_step`"):
        two_optimizers(library, tmp_path_factory.mktemp("inside"), 1, place="model inside")


def decay(family):
    """A callback that decays the learning rate when an epoch begins."""
    scheduler = FAMILIES[family][0].callbacks.LearningRateScheduler
    return [scheduler(lambda epoch, rate: rate * 0.7)]


@pytest.mark.timeout(1200 if DEEP else 120)
@loop("family, kind", CASES)
def test_resume_is_bitwise_equal(family, kind, tmp_path_factory):
    data, arguments = DATA[kind]
    arguments = {**arguments, "callbacks": decay(family)}
    folder = tmp_path_factory.mktemp("checkpoints")
    whole, all_seen = train(family, data, folder / "whole", **arguments)
    at = -(-17 // arguments.get("steps_per_execution", 1))
    train(family, data, folder / "part", at=at, **arguments)  # in the second epoch
    rest, seen = train(family, data, folder / "part", **arguments)
    assert equal_weights(whole, rest)
    assert seen.batches[0] in (6, 7) and 0 not in seen.batches[:2]
    assert list(seen.epochs) == [1, 2] and seen.epochs[2] == all_seen.epochs[2]


def numbers():
    return tf.data.Dataset.range(20)


PIPELINES = {  # and the number of batches to draw from two earlier epochs
    "in order": (
        lambda: (
            numbers().map(abs, 2).filter(lambda i: i > 3).cache().batch(4).prefetch(2).repeat(2)
        ),
        [],
    ),
    "in a function": (lambda: numbers().flat_map(lambda i: numbers().shuffle(20, 3)), [0, 0]),
    "shuffled": (lambda: numbers().shuffle(20, 3).map(abs, 2).batch(4).prefetch(2), [0, 0]),
    "twice": (lambda: numbers().shuffle(20, 3).shuffle(5, 4).batch(4).prefetch(2), [1, 1]),
    "files": (
        lambda: numbers().shuffle(20, 3).interleave(lambda i: numbers().take(2)).shuffle(5, 4),
        [1, 1],
    ),
    "before the cache": (lambda: numbers().shuffle(20, 3).cache().batch(4), [sys.maxsize, 0]),
    "around the cache": (
        lambda: numbers().shuffle(20, 3).cache().shuffle(5, 4),
        [sys.maxsize, 1],
    ),
    "after the cache": (lambda: numbers().cache().shuffle(20, 3).batch(4), [0, 0]),
    "two passes": (lambda: numbers().shuffle(20, 3).repeat(2), [sys.maxsize] * 2),
    "in turn": (
        lambda: numbers().shuffle(20, 3).concatenate(numbers().shuffle(20, 4)),
        [sys.maxsize] * 2,
    ),
    "endless": (lambda: numbers().shuffle(20, 3).cache().repeat().shuffle(5, 4), [0, 0]),
}


@loop("name", PIPELINES)
def test_drawing_from_earlier_epochs_keeps_the_order(name):
    make, expected = PIPELINES[name]

    def order(draws):
        tf.random.set_seed(1)
        data = make()
        for number in draws:
            list(itertools.islice(data, number))
        return [x.numpy().tolist() for x in itertools.islice(data, 40)]

    adapter = types.SimpleNamespace(_dataset=make())
    draws = fit_resume.batches_of_past(adapter, 2, one_for_all=False)
    assert draws == expected
    assert len(fit_resume.batches_of_past(adapter, 2, one_for_all=True)) == 2
    assert name == "endless" or order(draws) == order([sys.maxsize] * 2)


@loop("shuffle, draws", [(False, []), (True, [0, 0]), ("batch", [0, 0])])
def test_arrays_need_earlier_iterators_only_if_fit_shuffles(shuffle, draws):
    adapter = types.SimpleNamespace(_shuffle=shuffle)
    assert fit_resume.batches_of_past(adapter, 2, one_for_all=False) == draws


AT_ONCE = [("keras3", 1), ("tf_keras", 1), *([("legacy", 1), ("keras3", 3)] if DEEP else [])]


@loop("family, at_once", AT_ONCE)
def test_resume_after_the_last_batch_of_unknown_size(family, at_once, tmp_path_factory):
    """The callback cannot know that a batch is the last: the epoch ends with saved metrics."""
    data, folder = DATA["of unknown size"][0], tmp_path_factory.mktemp("checkpoints")
    arguments = {"every": STEPS, "steps_per_execution": at_once, "callbacks": decay(family)}
    calls = -(-STEPS // at_once)  # steps per epoch; the last epoch may have fewer
    whole, all_seen = train(family, data, folder / "whole", **arguments)
    train(family, data, folder / "part", at=calls + 1, **arguments)
    rest, seen = train(family, data, folder / "part", **arguments)
    assert equal_weights(whole, rest)
    assert seen.batches == all_seen.batches[calls:]
    assert seen.epochs == all_seen.epochs


class OfKeras310(rs.callbacks.Checkpoint):
    """Receives an execution's first batch at its end, as Keras 3.10 passes it."""

    def on_train_batch_begin(self, batch, logs=None):
        self.first = batch
        super().on_train_batch_begin(batch, logs)

    def on_train_batch_end(self, batch, logs=None):
        super().on_train_batch_end(self.first, logs)


@loop("kind", [rs.callbacks.Checkpoint, OfKeras310])
def test_steps_of_an_execution_are_counted(kind, tmp_path_factory):
    """Of ten steps an epoch, in executions of five: a checkpoint after each epoch."""
    folder = tmp_path_factory.mktemp(kind.__name__)
    model = build_model("keras3", steps_per_execution=5)
    callback = kind(folder, every=STEPS, keep=9)
    model.fit(*arrays(), batch_size=BATCH, epochs=3, verbose=0, callbacks=[callback])
    assert len(list(folder.glob("checkpoint-*"))) == 3


def test_other_callbacks_are_saved_and_a_finished_run_stays_finished(tmp_path):
    """Keras callbacks in any order; then a finished run, one more epoch, and other callbacks."""
    data = DATA["shuffled twice"][0]

    def others(folder):
        folder.mkdir(exist_ok=True)
        return [
            keras.callbacks.ReduceLROnPlateau(monitor="loss", min_delta=9.0, patience=1),
            keras.callbacks.EarlyStopping(monitor="loss", patience=9),
            keras.callbacks.CSVLogger(str(folder / "log.csv"), append=True),
            keras.callbacks.ModelCheckpoint(str(folder / "{epoch}.keras")),
        ]

    def fit(name, **kwargs):
        folder = tmp_path / name
        return train("keras3", data, folder / "ck", callbacks=others(folder), **kwargs)

    whole, _ = fit("whole", every="epoch", epochs=2)
    fit("part", every="epoch", epochs=2, at=STEPS + 3)
    with pytest.warns(UserWarning, match="EarlyStopping and ReduceLROnPlateau"):
        rest, seen = fit("part", every="epoch", epochs=2)
    assert list(seen.epochs) == [1] and equal_weights(whole, rest)
    rates = [float(m.optimizer.learning_rate.numpy()) for m in (whole, rest)]
    assert rates == pytest.approx([0.0004, 0.004])  # `Reduce...` forgets its earlier state
    assert len((tmp_path / "part" / "log.csv").read_text().splitlines()) == 3
    assert sorted(p.name for p in (tmp_path / "part").glob("*.keras")) == ["1.keras", "2.keras"]

    with pytest.warns(UserWarning, match="nothing left to do: .*/ck .*epoch 2"):
        again, seen = fit("part", every="epoch", epochs=2)
    assert equal_weights(again, rest) and not seen.batches
    more, seen = fit("part", every=7, epochs=3)
    assert list(seen.epochs) == [2]
    names = sorted(p.name for p in (tmp_path / "part" / "ck").iterdir())
    assert len(names) == 2 and names[-1] > "checkpoint-000002"


def test_save_schedule(tmp_path):
    data, saved_calls = DATA["shuffled once"][0], []
    checkpoint = rs.callbacks.Checkpoint(tmp_path / "a", every=datetime.timedelta(seconds=0.001))
    checkpoint.save_now("before")
    checkpoint.when_saved = lambda *args: saved_calls.append(args)
    model = build_model("keras3")
    save_at_step_4 = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: batch == 4 and checkpoint.save_now("fourth")
    )
    model.fit(data(), verbose=0, callbacks=[save_at_step_4, checkpoint])
    assert saved_calls == [("before", True), ("fourth", True)]
    assert max(int(p.name[-6:]) for p in (tmp_path / "a").iterdir()) > 5  # the next save was due

    def stop(reason, saved):
        raise Interrupted(reason)

    checkpoint = rs.callbacks.Checkpoint(tmp_path / "b", every=100)
    checkpoint.when_saved = stop
    with pytest.raises(Interrupted, match="fourth"):
        model.fit(data(), verbose=0, callbacks=[save_at_step_4, checkpoint])

    checkpoint = rs.callbacks.Checkpoint(tmp_path / "c", every=100)
    signals = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: batch == 2 and os.kill(os.getpid(), signal.SIGTERM)
    )
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(stopping.Stopped) as raised:
        model.fit(dataset().repeat().batch(2), steps_per_epoch=5000, verbose=0,
                  callbacks=[signals, checkpoint])  # fmt: skip
    assert raised.value.code == 75 and Store(tmp_path / "c").numbers() == [1]
    assert signal.getsignal(signal.SIGTERM) is before


def test_signal_after_the_last_agreement_stops_this_worker(tmp_path, monkeypatch):
    """The other workers end `fit` without it."""
    gather = agreement.gather_texts

    def gather_before_signal(strategy, action, text):
        texts = gather(strategy, action, text)
        if action == "end `Checkpoint`":
            os.kill(os.getpid(), signal.SIGTERM)
        return texts

    monkeypatch.setattr(agreement, "gather_texts", gather_before_signal)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(stopping.Stopped):
        train("keras3", DATA["shuffled once"][0], tmp_path, epochs=1)
    assert signal.getsignal(signal.SIGTERM) is before


@loop(
    "every, days, saves",
    [(datetime.timedelta(microseconds=1), -1, STEPS), (datetime.timedelta(hours=1), 1, 1)],
)
def test_wall_clock_that_jumps_does_not_move_saves(every, days, saves, tmp_path_factory):
    """Back, while a save is due after every step; forward, while none is due before the end."""
    folder, clock = tmp_path_factory.mktemp("clock"), time.time
    with pytest.MonkeyPatch.context() as patch:

        def step(done):
            if done == 4:
                patch.setattr(time, "time", lambda: clock() + 86_400 * days)

        checkpoint = rs.callbacks.Checkpoint(folder, every=every, keep=99)
        callbacks = [checkpoint, at_the_end_of_steps(step)]
        build_model("keras3").fit(DATA["shuffled once"][0](), verbose=0, callbacks=callbacks)
    assert len(Store(folder).numbers()) == saves


def test_no_save_is_due_by_the_clock_after_a_requested_one(tmp_path):
    """Of the same step."""
    checkpoint = rs.callbacks.Checkpoint(tmp_path, every=datetime.timedelta(hours=1), keep=99)

    def step(done):
        if done == 4:
            checkpoint.save_now("now")
            checkpoint._next_time = time.monotonic()

    callbacks = [checkpoint, at_the_end_of_steps(step)]
    build_model("keras3").fit(DATA["shuffled once"][0](), verbose=0, callbacks=callbacks)
    store = Store(tmp_path)
    assert [store.manifest(n).reason for n in store.numbers()] == ["the end of `fit`", "now"]


def test_full_disk_warns_and_keeps_the_last_checkpoint(tmp_path, monkeypatch):
    from tf_redsync.state import checkpoint_files

    model, replace, calls = build_model("keras3"), os.replace, []

    def full(source, target):
        calls.append(target)
        if "checkpoint-000002" in str(target):
            raise OSError(28, "No space left on device")
        replace(source, target)

    monkeypatch.setattr(checkpoint_files.os, "replace", full)
    checkpoint = rs.callbacks.Checkpoint(tmp_path, every=4, keep=1)
    words = r"checkpoint-000002 .* step 8\. .*-000001\.(.|\n)*disk is full"
    with pytest.warns(UserWarning, match=words):
        model.fit(DATA["shuffled once"][0](), verbose=0, callbacks=[checkpoint])
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint-000003"]


@loop("names", [["part-00000.npz", "manifest.json"], ["part-00000.npz.part"], []])
def test_a_checkpoint_of_another_job_in_the_same_directory_stays(names, tmp_path_factory):
    """The other job has completed the checkpoint, is writing its part, or is about to."""
    folder = tmp_path_factory.mktemp("shared")
    other = folder / "checkpoint-000002"
    files = {other / name: b"another job's" for name in names}

    def other_job(done):
        if done == 5:
            other.mkdir()
            for path, data in files.items():
                path.write_bytes(data)

    checkpoint = rs.callbacks.Checkpoint(folder, every=4)
    callbacks = [checkpoint, at_the_end_of_steps(other_job)]
    with pytest.warns(UserWarning, match=r"checkpoint-000002 .* step 8(.|\n)*Another job"):
        data = DATA["shuffled once"][0]()
        build_model("keras3").fit(data, epochs=1, verbose=0, callbacks=callbacks)
    assert {path: path.read_bytes() for path in other.iterdir()} == files
    assert Store(folder).numbers() == ([3, 2, 1] if "manifest.json" in names else [3, 1])


def test_removed_folder_fails_the_save(tmp_path, monkeypatch):
    """Another job that begins takes the folder for a leftover."""
    before_each_part(monkeypatch, lambda number, values: number == 2 and Store(tmp_path).remove(2))
    checkpoint = rs.callbacks.Checkpoint(tmp_path, every=4)
    with pytest.warns(UserWarning, match=r"checkpoint-000002 .* step 8(.|\n)*another job"):
        data = DATA["shuffled once"][0]()
        build_model("keras3").fit(data, epochs=1, verbose=0, callbacks=[checkpoint])
    assert sorted(p.name[-1] for p in tmp_path.iterdir()) == ["1", "3"]


# ---------------------------------------------------------------------------- during training


def before_each_part(monkeypatch, act):
    """Calls `act(number, values)` in the writing thread, before it writes."""
    write_part = Store.write_part

    def write(store, number, rank, values, whole):
        assert threading.current_thread() is not threading.main_thread()
        act(number, values)
        return write_part(store, number, rank, values, whole)

    monkeypatch.setattr(Store, "write_part", write)


def at_the_end_of_steps(act):
    return keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: act(batch + 1))


def test_training_continues_during_a_save_and_next_save_waits(tmp_path, monkeypatch):
    model, store, go_on, log, kernels = (
        build_model("keras3"),
        Store(tmp_path),
        threading.Event(),
        [],
        {},
    )
    copy = training_state.per_worker
    checkpoint = rs.callbacks.Checkpoint(tmp_path, every=3, keep=1)

    def copies(*args, **kwargs):
        log.append("copy")
        return copy(*args, **kwargs)

    def stall(number, values):
        if number == 2:
            log.append("stalls")
            assert go_on.wait(60)
            kernels["written"] = values["shared/model/0"]
            log.append("writes")

    def step(done):
        log.append(done)
        if done == 6:
            kernels["then"] = model.layers[0].kernel.numpy()
        if done == 9:  # the save of step 6 is in flight, and another one is due
            kernels["now"] = model.layers[0].kernel.numpy()
            log.append(store.numbers())
            threading.Timer(0.3, go_on.set).start()

    monkeypatch.setattr(training_state, "per_worker", copies)
    before_each_part(monkeypatch, stall)
    callbacks = [at_the_end_of_steps(step), checkpoint]
    model.fit(DATA["shuffled once"][0](), verbose=0, callbacks=callbacks)
    assert [e for e in log if e != "stalls"] == [
        *(1, 2, 3, "copy", 4, 5, 6, "copy", 7, 8, 9, [1], "writes", "copy", 10, "copy")
    ]
    assert log.index("stalls") < log.index("writes")
    assert np.array_equal(kernels["written"], kernels["then"])
    assert not np.array_equal(kernels["now"], kernels["then"])
    assert store.numbers() == [4]  # the final save, for which `fit` waits


def test_weights_and_their_averages_are_not_exchanged(tmp_path):
    """`SwapEMAWeights` has the averages in the model from the end of an epoch to the next one."""

    def fit(name, at=None):
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.layers.Input([5]), keras.layers.Dense(1)])
        sgd = keras.optimizers.SGD(0.05, use_ema=True, ema_momentum=0.9)
        model.compile(rs.DistributedOptimizer(sgd, rs.Dense()), "mse", metrics=["mae"])
        swap = keras.callbacks.SwapEMAWeights(swap_on_epoch=True)
        callbacks = [recorder(keras, at), rs.callbacks.Checkpoint(tmp_path / name), swap]
        with contextlib.suppress(Interrupted):
            model.fit(dataset().batch(BATCH), epochs=3, verbose=0, callbacks=callbacks)
        return model

    fit("part", at=STEPS + 3)
    assert equal_weights(fit("whole"), fit("part"))


@loop("ends", ["an error", "when_saved", "the end"])
def test_exit_waits_for_a_running_save(ends, tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.mktemp("slow")
    store, found, go_on = Store(folder), [], threading.Event()
    before_each_part(monkeypatch, lambda number, values: go_on.wait(60))
    checkpoint = rs.callbacks.Checkpoint(folder, every=4 if ends == "an error" else 100)
    if ends == "when_saved":
        checkpoint.when_saved = lambda reason, saved: found.append([saved, store.numbers()])

    def step(done):
        if done == (10 if ends == "the end" else 5):
            assert store.numbers() == []
            threading.Timer(0.3, go_on.set).start()
        if done == 5 and ends == "an error":
            raise Interrupted
        if done == 5 and ends == "when_saved":
            checkpoint.save_now("at once")

    callbacks = [at_the_end_of_steps(step), checkpoint]
    try:
        build_model("keras3").fit(DATA["shuffled once"][0](), verbose=0, callbacks=callbacks)
    except Interrupted:
        assert ends == "an error"
    assert found == ([[True, [1]]] if ends == "when_saved" else [])
    assert store.numbers() == ([2, 1] if ends == "when_saved" else [1])
    monkeypatch.undo()


def test_error_in_the_writer_thread_is_a_warning(tmp_path, monkeypatch):
    def fail(number, values):
        if number == 2:
            raise MemoryError("no room for buffers")

    before_each_part(monkeypatch, fail)
    with pytest.warns(
        UserWarning, match=r"-000002 .* step 6\. .*-000001(.|\n)*MemoryError: no room"
    ):
        build_model("keras3").fit(DATA["shuffled once"][0](), verbose=0, callbacks=[
            rs.callbacks.Checkpoint(tmp_path, every=3)])  # fmt: skip
    assert sorted(p.name[-1] for p in tmp_path.iterdir()) == ["3", "4"]


def test_checkpoint_of_another_model_is_rejected(tmp_path):
    data = DATA["shuffled once"][0]
    train("keras3", data, tmp_path, epochs=1)
    checkpoint = rs.callbacks.Checkpoint(tmp_path)
    words = r"`Checkpoint`(.|\n)*-000003: .*another model: .*kernel .*float32"
    with pytest.raises(ValueError, match=words):
        build_model("keras3", width=7).fit(data(), verbose=0, callbacks=[checkpoint])
    assert len(list(tmp_path.iterdir())) == 2
    for path in sorted(tmp_path.iterdir())[1:]:
        (path / "part-00000.npz").write_bytes(b"")
    with pytest.warns(UserWarning, match=r"-000002 \(step 8.*\n.*-000003: .* has 0 bytes"):
        train("keras3", data, tmp_path, epochs=1)


# ------------------------------------------------------- invalid content with valid checksums


def put(name, value):
    """Writes an array, or the result of a function of the existing one, into a part."""

    def change(values):
        found = values.pop(name)
        changed = value(found) if callable(value) else value
        if changed is not None:
            values[name] = changed

    return change


def change_first(number):
    """Changes the first element of an array."""

    def change(array):
        array = np.array(array)
        array.reshape(-1)[0] = number
        return array

    return change


KERNEL, STATISTIC, SLOT = "shared/model/0", "shared/model/5", "shared/optimizer/2"
# Changes of the newest checkpoint: the change, and a word of the reason for its rejection.
# Without a word the checkpoint is used.
CHANGES = {
    "a weight is missing": (put(KERNEL, None), "lack 1 variables"),
    "the exchange is missing": (put("own/exchange/step", None), "step"),
    "a weight of another shape": (put(KERNEL, np.zeros([5, 7], np.float32)), r"model/0 must be"),
    "a weight of another type": (put(KERNEL, np.zeros([5, 6])), r"model/0 must be float32"),
    "a weight that is NaN": (
        put(KERNEL, change_first(np.nan)),
        "1 of 30 numbers .* (not |non-)finite",
    ),
    "a weight that is infinite": (
        put(KERNEL, change_first(np.inf)),
        "1 of 30 numbers .* (not |non-)finite",
    ),
    "a slot that is NaN": (put(SLOT, change_first(np.nan)), "are NaN"),
    "the exchange's rank": (put("own/exchange/rank", np.int64(-1)), "rank"),
    "the exchange's JSON": (put("own/exchange/about", np.uint8([91] * 50_000)), "JSON"),
    "a slot that is infinite": (put(SLOT, change_first(np.inf)), None),
    "a statistic that is NaN": (put(STATISTIC, change_first(np.nan)), None),
    "a metric that is NaN": (put("own/metrics/0@0", change_first(np.nan)), None),
    "a metric of another shape": (put("own/metrics/0@0", np.zeros([3], np.float32)), None),
}
IN_MANIFEST = {  # the path, the value
    "a rank that leads elsewhere": ("parts.0.rank", "../../.."),
    "an epoch that is text": ("epoch", "0"),
    "a part larger than any": ("parts.0.size", 1 << 40),
}


@pytest.fixture(scope="module")
def interrupted_in_the_second_epoch(tmp_path_factory):
    folder = tmp_path_factory.mktemp("good")
    train("keras3", DATA["shuffled anew"][0], folder, at=17, every=4)
    assert sorted(p.name[-1] for p in folder.iterdir()) == ["3", "4"]  # after 12 and 16 steps
    return folder


@pytest.fixture(scope="module")
def one_model():
    return build_model("keras3")


@loop("case", [*CHANGES, *IN_MANIFEST])
def test_invalid_content_falls_back_to_the_previous_checkpoint(
    case, interrupted_in_the_second_epoch, one_model, tmp_path_factory
):
    folder = tmp_path_factory.mktemp("changed") / "checkpoints"
    shutil.copytree(interrupted_in_the_second_epoch, folder)
    newest = folder / "checkpoint-000004"
    part, described = newest / "part-00000.npz", newest / "manifest.json"
    if case in CHANGES:
        change, words = CHANGES[case]
        values = saved_arrays.read_arrays(part, part.stat().st_size)
        change(values)
        saved_arrays.write_arrays(part, values)
        digest = hashlib.sha256(part.read_bytes()).hexdigest()
        checkpoint_saves.rewrite(described, "parts.0.size", part.stat().st_size)
        checkpoint_saves.rewrite(described, "parts.0.sha256", digest)
    else:
        place, value = IN_MANIFEST[case]
        checkpoint_saves.rewrite(described, place, value)
        words = "manifest.json" if case != "a part larger than any" else "limit"
    seen = recorder(keras)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always", UserWarning)
        one_model.fit(DATA["shuffled anew"][0](), epochs=2, verbose=0, callbacks=[
            seen, rs.callbacks.Checkpoint(folder, every=10**6)])  # fmt: skip
    assert seen.batches == list(range(6 if words is None else 2, 10))
    texts = "\n".join(str(w.message) for w in warned if "cannot be used" in str(w.message))
    if words is None:
        assert not texts
    else:
        assert re.search(rf"from .*-000003(.|\n)*-000004: .*{words}", texts), texts
        assert all(np.isfinite(w).all() for w in one_model.get_weights())


def test_nonfinite_weights_are_not_saved(tmp_path):
    model = build_model("keras3")

    def diverge(batch, logs):
        if batch == 5:
            model.layers[0].kernel.assign(model.layers[0].kernel * np.nan)

    diverges = keras.callbacks.LambdaCallback(on_train_batch_end=diverge)
    words = r"-000002 .* step 8\. .*-000001(.|\n)*(not |non-)finite"
    with pytest.warns(UserWarning, match=words):
        model.fit(DATA["shuffled once"][0](), verbose=0,
                  callbacks=[diverges, rs.callbacks.Checkpoint(tmp_path, every=4)])  # fmt: skip
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint-000001"]


WORDS = {
    "shuffled without a seed": lambda: dataset().shuffle(9).batch(4),
    "`fit` shuffles arrays": arrays,
    "Python code yields": lambda: (tuple(a[:4] for a in arrays()) for _ in range(9)),
}


def order_warning(family, model, *data):
    """The warning about the order of batches when `fit` begins."""
    library, warnings = FAMILIES[family][0], []

    class Look(library.callbacks.Callback):
        def on_train_begin(self, logs=None):
            warnings.append(fit_resume.Position(self.model).order_warning)
            raise Interrupted

    with pytest.raises(Interrupted):
        model.fit(*data, steps_per_epoch=3, verbose=0, callbacks=[Look()])
    return warnings[0]


@loop("family", ["keras3", "tf_keras"])
@loop("words", WORDS)
def test_changed_data_order_warns(family, words):
    model = build_model(family)
    tf.random.set_seed(None)  # otherwise a shuffle has a seed as well
    data = WORDS[words]()
    pair = data if isinstance(data, tuple) else (data, None)
    assert words in order_warning(family, model, *pair)
    assert order_warning(family, model, DATA["repeated"][0]()) == ""


DISTRIBUTED = {
    "by the user": rs.already_sharded,
    "by the strategy": lambda data, strategy: strategy.experimental_distribute_dataset(data),
}


@loop("family", ["keras3", "tf_keras"])
@loop("how", DISTRIBUTED)
def test_changed_order_of_distributed_data_warns(family, how):
    strategy = tf.distribute.OneDeviceStrategy("CPU:0")
    with strategy.scope():
        model = build_model(family)
    tf.random.set_seed(None)
    for seed, words in ((None, "the data are shuffled without a seed"), (1, "")):
        data = dataset().shuffle(9, seed=seed).repeat().batch(4).prefetch(1)
        assert order_warning(family, model, DISTRIBUTED[how](data, strategy)) == words


@pytest.mark.parametrize(("at", "every", "warns"), [(6, 4, True), (12, 10, False)])
def test_other_number_of_workers_within_an_epoch_warns(at, every, warns, tmp_path, monkeypatch):
    train("keras3", DATA["shuffled once"][0], tmp_path, at=at, every=every)
    monkeypatch.setattr(Manifest, "workers", 2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train("keras3", DATA["shuffled once"][0], tmp_path)
    texts = [str(w.message) for w in caught if "workers: 1, saved by 2" in str(w.message)]
    assert len(texts) == warns
    assert not warns or "next batch, 4," in texts[0]


def test_changed_options_warn_once_and_are_used(tmp_path):
    def texts(epochs, density):
        model = build_model("keras3", method=rs.RedSync(density=density, dense_below=1))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model.fit(dataset().batch(BATCH), epochs=epochs, verbose=0, callbacks=[
                rs.callbacks.Checkpoint(tmp_path)])  # fmt: skip
        assert int(model.optimizer.exchange.step.numpy()) == epochs * STEPS
        return [str(w.message) for w in caught if "other options" in str(w.message)]

    assert not texts(1, 0.1)
    (text,) = texts(2, 0.2)
    assert "RedSync.density: saved 0.1, now 0.2" in text and text.count("now") == 1
    assert not texts(3, 0.2)


@loop("library", [keras, tf_keras])
def test_changed_optimizer_or_batch_warns(library, tmp_path_factory):
    folder = tmp_path_factory.mktemp("options")

    def interrupt(batch, at):
        if batch == at:
            raise Interrupted

    def warnings_of(epochs, rate, momentum, warm_up, rows=BATCH, at=None):
        library.utils.set_random_seed(1)
        model = library.Sequential([library.layers.Input([5]), library.layers.Dense(1)])
        method, warm_up = rs.RedSync(dense_below=1), rs.DenseWarmUp(steps=warm_up)
        inner = library.optimizers.SGD(rate, momentum=momentum)
        model.compile(rs.DistributedOptimizer(inner, method, warm_up=warm_up), "mse")
        stop = library.callbacks.LambdaCallback(on_train_batch_end=lambda b, logs: interrupt(b, at))
        callbacks = [rs.callbacks.Checkpoint(folder, every=2), stop]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with contextlib.suppress(Interrupted):
                model.fit(dataset().batch(rows), epochs=epochs, verbose=0, callbacks=callbacks)
        assert float(model.optimizer.learning_rate) == 0.125  # the saved rate
        texts = [str(w.message) for w in caught]
        return [t for t in texts if "other options" in t or "values that it saved" in t]

    assert warnings_of(1, 0.125, 0.5, 5) == []
    used, kept = warnings_of(2, 0.5, 0.25, 7, rows=BATCH // 2, at=5)
    assert "optimizer.SGD.momentum: saved 0.5, now 0.25" in used and used.count("now") == 1
    assert "learning_rate: saved 0.125, now 0.5" in kept
    assert "warm_up.DenseWarmUp.steps: saved 5, now 7" in kept and kept.count("now") == 2
    (used,) = warnings_of(2, 0.5, 0.25, 7)  # in the middle of an epoch
    assert f"steps_per_epoch: saved {2 * STEPS}, now {STEPS}" in used


def test_less_data_or_executions_across_the_position_raise(tmp_path):
    train("keras3", DATA["shuffled once"][0], tmp_path, at=9, every=4)
    with pytest.raises(ValueError, match="fewer batches than .* `Checkpoint`"):
        train("keras3", lambda: dataset().take(12).batch(BATCH), tmp_path)
    with pytest.raises(ValueError, match="batch 8 .* steps_per_execution=3"):
        train("keras3", DATA["shuffled once"][0], tmp_path, steps_per_execution=3)


@loop(
    "arguments, words",
    [
        ({"directory": ""}, "`directory` must be a path. Received: directory=''"),
        ({"directory": 3}, "`directory` must be a path"),
        ({"directory": "gs://bucket/run1"}, "not a URL. Received: directory='gs://bucket/run1'"),
        ({"every": "minute"}, "Received: every='minute'"),
        ({"every": 0}, "`every` must be 'epoch', a number of steps from 1"),
        ({"every": True}, "Received: every=True"),
        ({"every": datetime.timedelta(0)}, "a positive datetime.timedelta"),
        ({"keep": 0}, "`keep` must be an integer >= 1"),
    ],
)
def test_bad_arguments(arguments, words):
    with pytest.raises(ValueError) as raised:
        rs.callbacks.Checkpoint(**{"directory": "x", **arguments})
    assert words in str(raised.value)


@loop("reason", ["signal lost", "it is time"])
def test_reasons_of_the_user_are_not_interpreted(reason, tmp_path_factory):
    checkpoint, told = rs.callbacks.Checkpoint(tmp_path_factory.mktemp("a"), every=100), []
    checkpoint.when_saved = lambda *args: told.append(args)
    ask = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: batch == 2 and checkpoint.save_now(reason)
    )
    model, data = build_model("keras3"), DATA["shuffled once"][0]
    model.fit(data(), verbose=0, callbacks=[ask, checkpoint])
    assert told == [(reason, True)] and model.optimizer.iterations.numpy() == STEPS
    assert Store(checkpoint.directory).manifest(1).reason == reason


def test_requests_after_the_last_step_are_served_at_the_end(tmp_path):
    checkpoint, told = rs.callbacks.Checkpoint(tmp_path, every=100), []
    checkpoint.when_saved = lambda *args: told.append(args)
    ask = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: checkpoint.save_now("epoch"),
        on_train_end=lambda logs: checkpoint.save_now("training"),
    )
    build_model("keras3").fit(DATA["shuffled once"][0](), verbose=0, callbacks=[checkpoint, ask])
    assert told == [("epoch", True), ("training", True)]
    assert Store(tmp_path).manifest(1).reason == "epoch"


def test_all_requests_before_fit_are_served(tmp_path):
    checkpoint, told = rs.callbacks.Checkpoint(tmp_path, every=100), []
    checkpoint.when_saved = lambda *args: told.append(args)
    for reason in ("first", "second", "first"):
        checkpoint.save_now(reason)
    build_model("keras3").fit(DATA["shuffled once"][0](), verbose=0, callbacks=[checkpoint])
    assert told == [("first", True), ("second", True)]


def test_request_during_the_last_save_is_served_by_the_next_fit(tmp_path, monkeypatch):
    checkpoint, told = rs.callbacks.Checkpoint(tmp_path, every=100), []
    checkpoint.when_saved = lambda *args: told.append(args)
    before_each_part(monkeypatch, lambda number, values: number == 1 and checkpoint.save_now("x"))
    model, data = build_model("keras3"), DATA["shuffled once"][0]
    model.fit(data(), verbose=0, callbacks=[checkpoint])
    assert not told
    model.fit(data(), epochs=2, verbose=0, callbacks=[checkpoint])
    assert told == [("x", True)]


def test_request_while_fit_begins_is_served(tmp_path):
    """Its thread has found no `fit` and continues after the beginning."""
    found, begun = threading.Event(), threading.Event()

    class Delayed(rs.callbacks.Checkpoint):
        @property
        def _at(self):
            barrier = self._barrier
            if threading.current_thread() is thread and not found.is_set():
                found.set()
                assert begun.wait(60)
            return barrier

        @_at.setter
        def _at(self, barrier):
            self._barrier = barrier

    def step(done):
        begun.set()
        thread.join(60)

    checkpoint, told = Delayed(tmp_path, every=100), []
    checkpoint.when_saved = lambda *args: told.append(args)
    thread = threading.Thread(target=checkpoint.save_now, args=("x",), daemon=True)
    thread.start()
    assert found.wait(60)
    callbacks = [checkpoint, at_the_end_of_steps(step)]
    build_model("keras3").fit(DATA["shuffled once"][0](), verbose=0, callbacks=callbacks)
    assert told == [("x", True)]


def test_callback_list_needs_the_number_of_epochs(tmp_path):
    """`fit` passes no number to a `CallbackList`; the last checkpoint needs it."""
    model, data = build_model("keras3"), DATA["shuffled once"][0]

    def fit(**params):
        checkpoint = rs.callbacks.Checkpoint(tmp_path)
        callbacks = keras.callbacks.CallbackList(
            [checkpoint], add_history=True, model=model, **params
        )
        model.fit(data(), verbose=0, callbacks=callbacks)

    with pytest.raises(ValueError, match="`epochs`"):
        fit()
    assert model.optimizer.iterations.numpy() == 0
    fit(epochs=1)
    assert Store(tmp_path).manifest(1).finished == 1


@loop("reason", ["", 5, None])
def test_reasons_are_strings(reason):
    with pytest.raises(ValueError, match="`reason` must be a non-empty string"):
        rs.callbacks.Checkpoint("x").save_now(reason)


def test_numpy_integers_are_accepted():
    assert type(rs.callbacks.Checkpoint("x", every=np.int64(3)).every) is int


@pytest.mark.parametrize("family", FAMILIES)
def test_changes_at_train_end_are_saved(family, tmp_path):
    """`EarlyStopping` restores the best weights there; `Flush` comes after the checkpoint."""
    library = FAMILIES[family][0]

    def fit():
        best = library.callbacks.EarlyStopping("loss", 1, 9.0, 0, restore_best_weights=True)
        chosen = [rs.callbacks.Flush(), best]
        return train(family, DATA["shuffled once"][0], tmp_path, callbacks=chosen)[0]

    first = fit()
    with pytest.warns(UserWarning, match="nothing left to do"):
        again = fit()
    assert equal_weights(first, again)


@pytest.mark.parametrize("family", ["keras3", "tf_keras"])
def test_fit_after_a_failed_fit_starts_at_epoch_one(family, tmp_path):
    library = FAMILIES[family][0]

    class Fails(library.callbacks.Callback):
        def on_train_begin(self, logs=None):
            raise Interrupted

    data = DATA["shuffled once"][0]
    train(family, data, tmp_path, epochs=2)
    model, _ = train(family, data, tmp_path, epochs=4, at=1, callbacks=[Fails()])
    seen = recorder(library)
    model.fit(data(), epochs=3, verbose=0, callbacks=[seen])
    assert list(seen.epochs) == [0, 1, 2]


@pytest.mark.parametrize("family", ["keras3", "tf_keras"])
def test_signal_after_the_last_step_ends_the_program(family, tmp_path):
    class Signals(FAMILIES[family][0].callbacks.Callback):
        def on_test_begin(self, logs=None):
            if self.model.optimizer.iterations.numpy() == 2 * STEPS:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(0.2)  # the thread that receives signals

    data = DATA["shuffled once"][0]
    arguments = {"epochs": 2, "validation_data": data(), "callbacks": [Signals()]}
    with pytest.raises(stopping.Stopped):
        train(family, data, tmp_path, **arguments)
    with pytest.warns(UserWarning, match="nothing left to do"):
        train(family, data, tmp_path, **arguments)


def test_unsupported_models(tmp_path):
    data = dataset().batch(4)
    checkpoint = rs.callbacks.Checkpoint(tmp_path)
    model = keras.Sequential([keras.layers.Input([5]), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="`Checkpoint` needs .* tf_redsync.DistributedOptimizer"):
        model.fit(data, verbose=0, callbacks=[checkpoint])
    model = tf_keras.Sequential([tf_keras.layers.Dense(1)])
    model.compile(rs.DistributedOptimizer(tf_keras.optimizers.SGD(0.1), rs.Dense()), "mse")
    with pytest.raises(ValueError, match="needs a model that is built when `fit` begins"):
        model.fit(data, verbose=0, callbacks=[checkpoint])
    model = keras.Sequential([keras.layers.Input([5]), keras.layers.Dense(1)])
    model.compile(rs.DistributedOptimizer(keras.optimizers.SGD(0.1), rs.Dense()), "mse")
    model.another = rs.DistributedOptimizer(keras.optimizers.SGD(0.1), rs.Dense())
    with pytest.raises(ValueError, match="with another not built"):
        model.fit(data, verbose=0, callbacks=[checkpoint])
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"/file/.*`Checkpoint`"):
        train("keras3", lambda: data, tmp_path / "file" / "x")
    backup = keras.callbacks.BackupAndRestore(str(tmp_path / "b"))
    with pytest.raises(ValueError, match="both restore when `fit` begins"):
        train("keras3", lambda: data, tmp_path / "c", callbacks=[backup])
    with pytest.raises(ValueError, match="at most one `Checkpoint`"):
        train("keras3", lambda: data, tmp_path / "c", callbacks=[checkpoint])
