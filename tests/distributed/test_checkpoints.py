"""`Checkpoint` on real workers that are killed: the resumed training has equal bits."""

import functools
import os
import pathlib
import shutil
import signal
import time

import numpy as np
import pytest

from tests.deep import DEEP
from tests.distributed import cluster
from tests.distributed.cluster import LEGACY, run_workers

EPOCHS, STEPS, BATCH = 3, 6, 12
DIES_AT = 9  # a step in the second epoch


def _family(name):
    if name == "keras3":
        import keras

        return keras
    import tf_keras

    return tf_keras


def _optimizer(keras, family):
    optimizers = keras.optimizers.legacy if family == "legacy" else keras.optimizers
    return optimizers.Adam(0.01)


def _model(family, method, strategy):
    import tf_redsync as rs

    keras = _family(family)
    keras.utils.set_random_seed(7)
    with strategy.scope():
        layers = [keras.layers.Input([12]), keras.layers.Dense(16, activation="relu")]
        if family == "keras3":  # tf_keras cannot restore a dropout's generator
            layers.append(keras.layers.Dropout(0.3, seed=5))
        layers += [keras.layers.BatchNormalization(), keras.layers.Dense(4)]
        model = keras.Sequential(layers)
        optimizer = rs.DistributedOptimizer(_optimizer(keras, family), method)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss=loss, metrics=["accuracy"])
    return keras, model


def _data():
    import tensorflow as tf

    rng = np.random.default_rng(3)
    x = rng.normal(size=[STEPS * BATCH, 12]).astype(np.float32)
    y = rng.integers(0, 4, [STEPS * BATCH])
    data = tf.data.Dataset.from_tensor_slices((x, y))
    return data.shuffle(20, seed=11).batch(BATCH, drop_remainder=True)


def _dies(keras, at, once):
    """A callback that ends all workers after step `at`, once `once()` is true."""

    class Dies(keras.callbacks.Callback):
        steps = 0

        def on_train_batch_end(self, batch, logs=None):
            self.steps += 1
            if self.steps == at:
                while not once():
                    time.sleep(0.001)
                cluster.die_together()

    return Dies()


def _stalls(number):
    """Blocks worker 1's writing thread in checkpoint `number`; returns an event-like check."""
    import threading

    from tests.distributed.problems import rank
    from tf_redsync.state import checkpoint_files

    write, reached = checkpoint_files.write_arrays, threading.Event()

    def stall(path, arrays):
        if path.parent.name != f"checkpoint-{number:06d}":
            return write(path, arrays)
        if rank() == 0:
            write(path, arrays)
        reached.set()
        return None if rank() == 0 else threading.Event().wait()

    checkpoint_files.write_arrays = stall
    return reached.is_set


def _losses(keras):
    class Losses(keras.callbacks.Callback):
        def __init__(self):
            super().__init__()
            self.batches, self.epochs, self.residuals = [], [], {}

        def on_train_begin(self, logs=None):
            part = self.model.optimizer.exchange.worker_state()
            self.residuals = {n: a for n, a in part.items() if "/residual/" in n}

        def on_train_batch_end(self, batch, logs=None):
            self.batches.append(batch)

        def on_epoch_end(self, epoch, logs=None):
            self.epochs.append([epoch, logs["loss"], logs["accuracy"]])

    return Losses()


def _fit(family, method, strategy, directory, dies=False, stalls=False):
    import tf_redsync as rs

    keras, model = _model(family, method, strategy)
    losses = _losses(keras)
    callbacks = [losses, rs.callbacks.Checkpoint(directory, every=4)]
    if dies:
        whole = pathlib.Path(directory) / "checkpoint-000002" / "manifest.json"
        callbacks.append(_dies(keras, DIES_AT, _stalls(2) if stalls else whole.exists))
    model.fit(_data(), epochs=EPOCHS, verbose=0, callbacks=callbacks)
    weights = {f"weight_{i}": np.asarray(w) for i, w in enumerate(model.get_weights())}
    notes = {"epochs": np.array(losses.epochs), "batches": np.array(losses.batches)}
    return weights | notes | losses.residuals


METHODS = {
    "RedSync": lambda rs: rs.RedSync(density=0.05, dense_below=1),
    "LocalSGD": lambda rs: rs.LocalSGD(steps=3),  # individual weights on each worker
}


def _method(name="RedSync"):
    import tf_redsync as rs

    return METHODS[name](rs)


def trained_and_then_killed(family, method, directory):
    import tf_redsync as rs

    strategy = rs.MultiWorkerMirroredStrategy()
    cluster.save(**_fit(family, _method(method), strategy, f"{directory}/whole"))
    _fit(family, _method(method), strategy, f"{directory}/killed", dies=True)


def killed_in_stalled_save(directory):
    import tf_redsync as rs

    cluster.save()
    strategy = rs.MultiWorkerMirroredStrategy()
    _fit("keras3", _method(), strategy, directory, dies=True, stalls=True)


def resumed(family, method, directory):
    import tf_redsync as rs

    return _fit(family, _method(method), rs.MultiWorkerMirroredStrategy(), directory)


def _sums_are_kept(directory, found, method):
    """Checks that the restored sums over all workers equal those in the checkpoint."""
    from tf_redsync.state.checkpoint_store import Store

    store = Store(directory)
    newest = store.numbers()[0]
    saved = [store.read_part(newest, part) for part in store.manifest(newest).parts]
    names = [n for n in found[0] if "/residual/" in n]
    assert bool(names) == (method == "RedSync")
    for name in names:
        expected = sum(np.float64(part[f"own/exchange/{name}"]) for part in saved)
        assert np.abs(expected).max() > 0
        total = sum(np.float64(after[name]) for after in found)
        np.testing.assert_allclose(total, expected, rtol=0, atol=3e-7 * np.abs(expected).max())


def _environment(family):
    return LEGACY if family != "keras3" else None


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """Trains and kills workers, once per family and method.

    Returns:
        A function of family and method that returns the results of the whole training and the
        folder of the killed one.
    """

    @functools.cache
    def run(family, method):
        folder = tmp_path_factory.mktemp("job")
        arguments = (family, method, str(folder))
        env = _environment(family)
        whole = cluster.kill_workers(trained_and_then_killed, args=arguments, env=env)
        return whole, folder / "killed"

    return run


@pytest.mark.parametrize(
    ("family", "method"),
    [
        ("keras3", "RedSync"),
        pytest.param("tf_keras", "RedSync", marks=pytest.mark.deep),
        pytest.param("legacy", "RedSync", marks=pytest.mark.deep),
        pytest.param("keras3", "LocalSGD", marks=pytest.mark.deep),
    ],
)
def test_killed_run_resumes_bit_for_bit(killed, family, method, tmp_path):
    env = _environment(family)
    whole, directory = killed(family, method)
    if DEEP:
        for workers in (1, 3):
            shutil.copytree(directory, tmp_path / str(workers))
            others = (family, method, str(tmp_path / str(workers)))
            found = run_workers(resumed, workers=workers, args=others, env=env)
            _sums_are_kept(directory, found, method)
            for after in found:
                assert after["batches"].tolist()[:5] == [2, 3, 4, 5, 0]
                assert np.isfinite(after["epochs"]).all()
    rest = run_workers(resumed, args=(family, method, str(directory)), env=env)
    for before, after in zip(whole, rest, strict=True):
        for name in before:
            if name.startswith("weight"):
                np.testing.assert_array_equal(before[name], after[name], name)
        first = 1 if family == "keras3" else 2  # tf_keras does not restore metrics
        np.testing.assert_array_equal(before["epochs"][first:], after["epochs"][first - 1 :])
        assert after["batches"].tolist()[:5] == [2, 3, 4, 5, 0]  # after 8 steps


def within_a_window(directory, epochs):
    """Trains to within a window of accumulated gradients; returns what it begins and ends with."""
    import keras

    import tf_redsync as rs
    from tf_redsync.state.checkpoint_store import Store

    keras.utils.set_random_seed(7)
    with rs.MultiWorkerMirroredStrategy().scope():
        model = keras.Sequential([keras.layers.Input([12]), keras.layers.Dense(4)])
        inner = keras.optimizers.SGD(0.05, gradient_accumulation_steps=4)
        model.compile(rs.DistributedOptimizer(inner, _method()), loss="mse")
    found, read_part = {"read": 0}, Store.read_part

    def counted(*args):
        found["read"] += 1
        return read_part(*args)

    def record(when):
        part = model.optimizer.exchange.worker_state()
        found.update({f"{when} {n}": a for n, a in part.items() if "/residual/" in n})
        for variable in inner.variables:
            if "accumulator" in variable.path:
                found[f"{when} {variable.path}"] = np.asarray(variable)

    Store.read_part = counted
    begins = keras.callbacks.LambdaCallback(on_train_begin=lambda logs: record("begin"))
    data = _data().map(lambda x, y: (x, x[:, :4]))
    callbacks = [rs.callbacks.Checkpoint(directory), begins]
    model.fit(data, epochs=epochs, verbose=0, callbacks=callbacks)
    record("end")
    return found


def test_other_numbers_of_workers_read_their_share_and_keep_all_sums(tmp_path):
    before = run_workers(within_a_window, workers=3, args=(str(tmp_path), 1))
    # Of two workers the second reads two parts; of three two have the same part.
    for epochs, reads in ((3, [1, 3]), (5, [1, 1, 2])) if DEEP else ((3, [1, 3]),):
        after = run_workers(within_a_window, workers=len(reads), args=(str(tmp_path), epochs))
        assert [int(worker["read"]) for worker in after] == reads
        names = [n.removeprefix("begin ") for n in after[0] if n.startswith("begin ")]
        assert any("residual" in n for n in names) and any("accumulator" in n for n in names)
        for name in names:
            expected = sum(np.float64(worker[f"end {name}"]) for worker in before)
            total = sum(np.float64(worker[f"begin {name}"]) for worker in after)
            assert np.abs(expected).max() > 0, name
            bound = 3e-7 * np.abs(expected).max()
            np.testing.assert_allclose(total, expected, rtol=0, atol=bound, err_msg=name)
        before = after


def test_workers_killed_in_stalled_save_resume_from_previous_bit_for_bit(killed, tmp_path):
    """Worker 0 has written its part, worker 1 has not."""
    from tf_redsync.state.checkpoint_store import Store

    whole, _ = killed("keras3", "RedSync")
    cluster.kill_workers(killed_in_stalled_save, args=(str(tmp_path),))
    store = Store(tmp_path)
    assert store.numbers() == [1]
    assert [p.name for p in store.path(2).iterdir()] == ["part-00000.npz"]
    rest = run_workers(resumed, args=("keras3", "RedSync", str(tmp_path)))
    for before, after in zip(whole, rest, strict=True):
        assert after["batches"].tolist()[:3] == [4, 5, 0]
        for name in [n for n in before if n.startswith("weight")]:
            np.testing.assert_array_equal(before[name], after[name], name)
    assert store.numbers()[0] > 2 and not store.path(2).exists()


# -------------------------------------------------------------------------- failures of one worker


def _warned(action):
    """Warnings and the exception of an action."""
    import warnings

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always", UserWarning)
        try:
            action()
            error = ""
        except (Exception, SystemExit) as raised:
            error = f"{type(raised).__name__} {raised}"
    return "\n".join(str(w.message) for w in warned), error


def failures_of_one_worker(directory):
    """Failures of one worker, all in one job; returns what each worker observed."""
    import tf_redsync as rs
    from tests.distributed.problems import rank
    from tf_redsync.state.checkpoint_store import Store

    strategy, task, seen = rs.MultiWorkerMirroredStrategy(), rank(), {}
    keras, model = _model("keras3", _method(), strategy)
    callbacks = keras.callbacks

    def fit(*given, epochs=1):
        return _warned(lambda: model.fit(_data(), epochs=epochs, verbose=0, callbacks=[*given]))

    def steps():
        return int(model.optimizer.exchange.step.numpy())

    # Only the chief has the callback; then one worker cannot write to the directory.
    seen["chief"] = fit(*[rs.callbacks.Checkpoint(f"{directory}/chief")][: 1 - task])[1]
    seen["proc"] = fit(rs.callbacks.Checkpoint("/proc/x" if task else f"{directory}/proc"))[1]

    # A full disk on one worker for one save. A committed checkpoint must be complete.
    write_part, replace, seen["commits"], seen["too early"] = Store.write_part, os.replace, 0, ""

    def replaced(source, target):
        replace(source, target)
        if pathlib.Path(target).name == "manifest.json":
            store, number = Store(target.parents[1]), int(target.parent.name[-6:])
            verify = lambda: store.verify(number, store.manifest(number).parts)  # noqa: E731
            seen["commits"] += 1
            seen["too early"] += _warned(verify)[1]

    def full(store, number, *args, **kwargs):
        if task and number == 2:
            raise OSError(28, f"cannot write {store.path(number)}: no space. Make room")
        return write_part(store, number, *args, **kwargs)

    Store.write_part, os.replace = full, replaced
    seen["full"], seen["full error"] = fit(rs.callbacks.Checkpoint(f"{directory}/full", every=2))
    seen["full left"] = " ".join(sorted(os.listdir(f"{directory}/full")))
    Store.write_part, os.replace = write_part, replace

    # A directory per worker, then a damaged part on one of them.
    own = f"{directory}/own{task}"
    before = steps()
    seen["own"] = "".join(fit(rs.callbacks.Checkpoint(own, every=4)))
    if task:
        os.truncate(f"{own}/checkpoint-000002/part-00001.npz", 100)
    seen["damaged"], seen["damaged error"] = fit(rs.callbacks.Checkpoint(own, every=4))
    seen["damaged steps"] = steps() - before  # 4 of 6, then the other 2 again

    # One worker requests a save from a thread; one receives a signal.
    asked, at = rs.callbacks.Checkpoint(f"{directory}/asked", every=10**6), []
    asked.when_saved = lambda reason, saved: at.append([reason, saved, steps()])

    def ask(batch, logs):
        if task and batch == 20:
            asked.save_now("worker 1 has asked")

    def kill(batch, logs):
        if task and batch == 20:
            os.kill(os.getpid(), signal.SIGUSR1)

    long = _data().repeat(100)
    first = steps()
    model.fit(
        long.take(130),
        verbose=0,
        callbacks=[asked, callbacks.LambdaCallback(on_train_batch_end=ask)],
    )
    [[seen["asked"], seen["asked saved"], step]] = at
    seen["asked step"] = step - first
    signalled = [
        rs.callbacks.Checkpoint(f"{directory}/signal", every=10**6),
        callbacks.LambdaCallback(on_train_batch_end=kill),
    ]
    first = steps()
    seen["signal"] = _warned(lambda: model.fit(long, verbose=0, callbacks=signalled))[1]
    seen["signal step"] = steps() - first

    # Saves follow the chief's clock; the other worker's clock runs ten times too fast.
    import datetime
    import time

    if task:
        time.monotonic, real = lambda: 10.0 * real(), time.monotonic
    timer = rs.callbacks.Checkpoint(f"{directory}/timer", every=datetime.timedelta(seconds=0.2))
    model.fit(long.take(150), verbose=0, callbacks=[timer])
    if task:
        time.monotonic = real

    # Keras's own callbacks.
    def backup(path):
        return callbacks.BackupAndRestore(path, delete_checkpoint=False)

    seen["backup of one"] = fit(*[backup(f"{directory}/b")][: 1 - task])[1]
    seen["backup of all"] = fit(backup(f"{directory}/b"))[1]
    seen["backup of each"] = fit(backup(f"{directory}/b{task}"))[1]
    seen["models of all"] = fit(callbacks.ModelCheckpoint(f"{directory}/m.weights.h5"))[1]
    each = callbacks.ModelCheckpoint(f"{directory}/m{task}.weights.h5", save_weights_only=True)
    seen["models of each"] = fit(each)[1]
    seen["table of all"] = fit(callbacks.CSVLogger(f"{directory}/log.csv"))[1]
    seen["table there"] = os.path.exists(f"{directory}/log.csv")
    for name in (f"{directory}/log{task}.csv", os.devnull):
        seen[f"table of each {name == os.devnull}"] = fit(callbacks.CSVLogger(name))[1]
    for name, path in {"file of all": "m.keras", "file of each": f"m{task}.keras"}.items():
        seen[name] = _warned(lambda path=path: model.save(f"{directory}/{path}"))[0]
    if not task:
        seen["file of one"] = "".join(_warned(lambda: model.save(f"{directory}/one.keras")))
    seen["table of one"] = fit(*[callbacks.CSVLogger(f"{directory}/one.csv")][: 1 - task])[1]
    if not task:  # one backup is lost, then one has other weights
        os.rename(f"{directory}/b0", f"{directory}/old")
    seen["lost"] = fit(backup(f"{directory}/b{task}"), epochs=2)[1]
    if not task:
        os.rename(f"{directory}/old", f"{directory}/b0")
        model.layers[0].kernel.assign(model.layers[0].kernel + 1)
        model.save_weights(f"{directory}/b0/latest.weights.h5")
    seen["torn"] = fit(backup(f"{directory}/b{task}"), epochs=2)[1]
    return seen


def test_workers_agree_on_failure_of_one_worker(tmp_path):
    both = run_workers(failures_of_one_worker, args=(str(tmp_path),), timeout=240)
    for task, seen in enumerate(both):
        assert "worker 0: keep 2 checkpoints" in seen["chief"], seen["chief"]
        assert seen["proc"].startswith("OSError") and "cannot write /proc/x" in seen["proc"]

        assert "checkpoint-000002 could not be saved at step 4" in seen["full"]
        assert "worker 1: " in seen["full"] and "Make room" in seen["full"]
        assert seen["full error"] == "" and seen["full left"] == (
            "checkpoint-000001 checkpoint-000003"
        )
        assert seen["commits"] == 2 * (task == 0) and seen["too early"] == ""
        assert "checkpoint" not in seen["own"].lower()
        assert seen["damaged error"] == ""
        assert f"from {tmp_path}/own{task}/checkpoint-000001" in seen["damaged"]
        assert "checkpoint-000002: worker 1: part-00001.npz has 100 bytes" in seen["damaged"]

        assert seen["asked"] == "worker 1 has asked" and seen["asked saved"]
        assert 20 < seen["asked step"] < 120
        assert seen["signal"] == "Stopped 75" and 20 < seen["signal step"] < 500

        assert "only worker 0 of 2 workers have a `BackupAndRestore`" in seen["backup of one"]
        assert "workers 0, 1 would write the same file" in seen["backup of all"]
        assert seen["backup of each"] == ""
        assert "backups of different steps" in seen["lost"], seen["lost"]
        assert "not of one save" in seen["torn"], seen["torn"]
        assert "would write the same file with `ModelCheckpoint`" in seen["models of all"]
        assert seen["models of each"] == ""
        assert "workers 0, 1 would write the same file with `CSVLogger`" in seen["table of all"]
        assert not seen["table there"], "the file was opened before the error"
        for name in ("table of each False", "table of each True", "table of one"):
            assert seen[name] == ""
        assert "several" not in seen["file of each"]
    # Of two workers that save at once, the later one raises.
    assert sum("m.keras' with `save`" in s["file of all"] for s in both) == 1
    assert "overwrite" not in both[0]["file of one"]
    for name in ("asked step", "signal step", "damaged steps"):
        assert both[0][name] == both[1][name]
    # Counted at the end: the chief deletes old checkpoints while the other worker continues.
    assert len(os.listdir(tmp_path / "timer")) == 2


# ------------------------------------------------------------------------------ at random moments

LONG = 40  # epochs of `STEPS` steps


def save_after_chief_has_ended(directory):
    """Builds a model on all workers; worker 1 saves it after the chief's process has ended."""
    import json
    import socket
    import time

    import tf_redsync as rs
    from tests.distributed.problems import rank

    _, model = _model("keras3", _method(), rs.MultiWorkerMirroredStrategy())
    if rank() == 1:
        host, port = json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"][0].split(":")
        for _ in range(600):
            try:
                socket.create_connection((host, int(port)), 1).close()
            except OSError:
                break
            time.sleep(0.1)
        else:
            raise TimeoutError("the chief has not ended")
        model.save(os.path.join(directory, "late.keras"))
    return {f"{i}": weight for i, weight in enumerate(model.get_weights())}


def test_worker_saves_after_chief_has_ended(tmp_path):
    import keras

    workers = run_workers(save_after_chief_has_ended, args=(str(tmp_path),), grace=100)
    loaded = keras.saving.load_model(tmp_path / "late.keras", compile=False).get_weights()
    for worker in workers:
        assert len(worker) == len(loaded)
        for i, weight in enumerate(loaded):
            np.testing.assert_array_equal(worker[f"{i}"], weight)


def die_at_random(directory, seed):
    """Saves after each step, and is killed at a random moment in one of the first fifty."""
    import random
    import threading

    import tf_redsync as rs
    from tests.distributed.problems import rank

    keras, model = _model("keras3", _method(), rs.MultiWorkerMirroredStrategy())
    chance = random.Random(f"{seed} {rank()}")
    after = chance.randrange(1, 50)
    killer = threading.Timer(chance.uniform(0.0, 0.2), os.kill, (os.getpid(), signal.SIGKILL))
    killer.daemon = True

    class Dies(keras.callbacks.Callback):
        steps = 0

        def on_train_batch_end(self, batch, logs=None):
            self.steps += 1
            if seed is not None and self.steps == after:
                killer.start()

    every = 1 if seed is not None else 10**6
    checkpoint = rs.callbacks.Checkpoint(directory, every=every)
    model.fit(_data(), epochs=LONG, verbose=0, callbacks=[checkpoint, Dies()])
    return {f"weight_{i}": np.asarray(w) for i, w in enumerate(model.get_weights())}


@pytest.mark.deep
@pytest.mark.timeout(900)
def test_workers_killed_at_random_moments_of_200_saves(tmp_path):
    """A complete checkpoint always exists, and the final weights are equal."""
    from tf_redsync.state.checkpoint_store import Store

    store, saves, kills = Store(tmp_path / "killed"), 0, 0
    while saves < 200 or not kills:
        (tmp_path / str(kills)).mkdir()
        job = cluster._launch(
            die_at_random, 2, (str(store.directory), kills), None, 100, 1, tmp_path / str(kills)
        )
        if not any(worker.returncode for worker in job.workers):
            break
        assert any(worker.returncode == -signal.SIGKILL for worker in job.workers), job.message
        numbers = store.numbers()
        assert numbers and numbers[0] >= saves, "a checkpoint is lost"
        for number in numbers:
            found = store.manifest(number)
            store.verify(number, found.parts)
            assert {
                int(store.read_part(number, part)["own/exchange/step"]) for part in found.parts
            } == {found.step}
        saves, kills = numbers[0], kills + 1
    print(f"{kills} kills in {saves} saves")
    rest = run_workers(die_at_random, args=(str(store.directory), None))
    whole = run_workers(die_at_random, args=(str(tmp_path / "whole"), None))
    for name, value in whole[0].items():
        np.testing.assert_array_equal(rest[0][name], value, name)
        np.testing.assert_array_equal(rest[1][name], value, name)
