"""`gradient_accumulation_steps`: workers exchange only in steps that update the weights.

The references are trainings without accumulation on the same rows in proportionally larger batches,
and Keras's own accumulation in one process.
"""

import shutil

import numpy as np
import pytest

from tests.deep import DEEP
from tests.distributed.cluster import run_workers

STEPS, MICRO, UPDATES, WORKERS = 3, 4, 4, 2  # steps per window; rows per worker; windows; workers


def rows():
    """Inputs and targets by window, step and worker: `[updates, steps, workers, rows]`."""
    from tests.distributed import problems

    x, y = problems.regression(UPDATES * STEPS * WORKERS * MICRO)
    shape = (UPDATES, STEPS, WORKERS, MICRO, -1)
    return x.reshape(shape), y.reshape(shape)


def batches(accumulated, rank):
    """A worker's own batches: one per step, or one per window."""
    import tensorflow as tf

    x, y = (a[:, :, rank] for a in rows())
    if accumulated:
        x, y = (a.reshape(UPDATES * STEPS, MICRO, -1) for a in (x, y))
    else:
        x, y = (a.reshape(UPDATES, STEPS * MICRO, -1) for a in (x, y))
    return tf.data.Dataset.from_tensor_slices((x, y))


def a_rate_for_each_update(keras, steps):
    """A schedule of Keras, which counts steps, with another rate for each window of `steps`."""
    last = [(update + 1) * steps - 1 for update in range(UPDATES)]
    rates = [0.02, 0.08, 0.01, 0.05]
    return keras.optimizers.schedules.PiecewiseConstantDecay(last[:-1], rates)


def make(keras, kind, steps):
    """The inner optimizer and a matching method."""
    import tf_redsync as rs

    small = {"dense_below": 16}
    options = {"gradient_accumulation_steps": steps}
    sgd = keras.optimizers.SGD(0.05, **options)
    return {
        "dense, Nadam with averages": (
            keras.optimizers.Nadam(0.01, use_ema=True, ema_momentum=0.5, **options),
            rs.Dense(),
        ),
        "redsync": (sgd, rs.RedSync(density=0.1, momentum=0.9, **small)),
        "global momentum": (sgd, rs.CodedGMC(density=0.1, **small)),
        "local steps": (sgd, rs.LocalSGD(steps=2)),
        "late": (
            keras.optimizers.SGD(a_rate_for_each_update(keras, steps or 1), **options),
            rs.CDSGD(full_every=1, warm_up=None),
        ),
        "scaled": (
            keras.optimizers.LossScaleOptimizer(sgd, initial_scale=64.0),
            rs.TopK(density=0.1, **small),
        ),
    }[kind]


USUAL = ("dense, Nadam with averages", "redsync", "late")
KINDS = (*USUAL, "global momentum", "local steps", "scaled") if DEEP else USUAL
# Accumulation steps of each run (None: whole windows at once). Averages move in every step.
WINDOWS = {kind: (STEPS, None) if DEEP or kind != USUAL[0] else (STEPS,) for kind in KINDS}


def flat(variables):
    """The values of variables as one vector."""
    return np.concatenate([np.ravel(v) for v in variables])


def train():
    """Trains with and without accumulation; also the error of workers with different windows."""
    import keras
    import tensorflow as tf

    import tf_redsync as rs
    from tests.distributed import problems

    strategy, rank = rs.MultiWorkerMirroredStrategy(), problems.rank()
    found = {}
    for kind in KINDS:
        for steps in WINDOWS[kind]:
            with strategy.scope():
                model = problems.network(keras)
                inner, method = make(keras, kind, steps)
                optimizer = rs.DistributedOptimizer(inner, method)
                model.compile(optimizer, "mse", auto_scale_loss=False)
            data = batches(steps is not None, rank)
            data = strategy.distribute_datasets_from_function(lambda _, d=data: d)
            count = UPDATES * (steps or 1)
            model.fit(data, steps_per_epoch=count, epochs=1, verbose=0)
            name = f"{kind}, {'accumulated' if steps else 'at once'}"
            found[name] = np.concatenate([np.ravel(w) for w in model.get_weights()])
            found[f"{name}, exchanges"] = int(optimizer.exchange.step.numpy())
            found[f"{name}, iterations"] = int(optimizer.iterations.numpy())

    # A non-finite gradient in one step of a window on one worker skips the window.
    with strategy.scope():
        model = problems.network(keras, normalized=True)
        inner = keras.optimizers.SGD(0.05, gradient_accumulation_steps=STEPS)
        optimizer = rs.DistributedOptimizer(inner, rs.RedSync(density=0.1, dense_below=16))
        model.compile(optimizer, "mse")
    x, y = (a[:, :, rank].reshape(UPDATES * STEPS, MICRO, -1).copy() for a in rows())
    if rank == 1:
        x[STEPS + 1] = np.inf
    before, statistics = [], []

    class RecordWeights(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            before.append(flat(model.trainable_variables))
            statistics.append(flat(model.non_trainable_variables))

    data = tf.data.Dataset.from_tensor_slices((x, y))
    data = strategy.distribute_datasets_from_function(lambda _: data)
    model.fit(data, steps_per_epoch=len(x), verbose=0, callbacks=[RecordWeights()])
    for name, values in (("moved", before), ("statistics", statistics)):
        pairs = zip(values[1:], values[:-1], strict=True)
        found[name] = [bool((a != b).any()) for a, b in pairs]
    found["skipped"] = int(optimizer.exchange.skipped.numpy())
    found.update(flushed(strategy, model, data))

    with strategy.scope():
        model = problems.network(keras)
        inner = keras.optimizers.SGD(0.05, gradient_accumulation_steps=2 + rank)
        model.compile(rs.DistributedOptimizer(inner, rs.Dense()), "mse")
    try:
        model.fit(problems.dataset(16, 8), verbose=0)
    except Exception as error:
        found["other window"] = f"{type(error).__name__}: {error}"
    return found


def flushed(strategy, model, data):
    """Weights, residuals and accumulators before and after `flush()` in the middle of a window."""
    optimizer, found = model.optimizer, {}
    model.fit(data, steps_per_epoch=1, verbose=0)

    def record(when):
        exchange, residuals = optimizer.exchange, {}
        for bucket, states in zip(exchange.schedule.buckets, exchange.states, strict=True):
            own = states.variables_by_name.get("residual", ())
            for spec, variable in zip(bucket.layout.specs, own, strict=False):
                residuals[spec.position] = strategy.experimental_local_results(variable)[0].numpy()
        all_of = [residuals.get(s.position, np.zeros(s.shape)) for s in exchange.specs]
        sums = [np.ravel(v) for v in optimizer.variables if "accumulator" in v.path]
        found[f"weights {when}"] = flat(model.trainable_variables)
        found[f"residuals {when}"] = np.concatenate(list(map(np.ravel, all_of)))
        found[f"sums {when}"] = np.concatenate(sums)
        found[f"updates {when}"] = int(optimizer.iterations.numpy())
        found[f"position {when}"] = int(optimizer.variables[0].numpy()) % STEPS

    record("before")
    optimizer.flush()
    record("after")
    return found


def resumed(folder, first, reference=False):
    """A training that is stopped within a window or resumed there, and its accumulators.

    With `reference`, also an uninterrupted training, and the resumed model saved and loaded.
    """
    import keras

    import tf_redsync as rs
    from tests.distributed import problems

    strategy, found = rs.MultiWorkerMirroredStrategy(), {}

    class RecordAndStop(keras.callbacks.Callback):
        """Records the accumulators at the second step of a window, and may stop there."""

        def on_train_batch_begin(self, batch, logs=None):
            if batch == STEPS + 1 and "sums" not in found:
                sums = [v for v in self.model.optimizer.variables if "accumulator" in v.path]
                found["sums"] = np.concatenate([np.ravel(v) for v in sums])
                if first:
                    raise KeyboardInterrupt

    def trained(*callbacks):
        with strategy.scope():
            keras.utils.set_random_seed(1)
            model = problems.network(keras)
            rate = keras.optimizers.schedules.CosineDecay(0.1, 9)
            inner = keras.optimizers.SGD(rate, gradient_accumulation_steps=STEPS)
            method = rs.TopK(density=0.1, dense_below=16)
            model.compile(rs.DistributedOptimizer(inner, method), "mse")
        data = problems.dataset(UPDATES * STEPS * MICRO, MICRO)
        try:
            model.fit(data, verbose=0, callbacks=list(callbacks))
        except KeyboardInterrupt:
            pass
        return model

    model = trained(rs.callbacks.Checkpoint(folder, every=STEPS + 1), RecordAndStop())
    if not reference:
        return found
    path = f"{folder}/{problems.rank()}.keras"
    model.save(path)
    with strategy.scope():
        loaded = keras.saving.load_model(path)  # Keras's config contains the schedule
    for name, one in (("uninterrupted", trained()), ("resumed", model), ("loaded", loaded)):
        found[name] = np.concatenate([np.ravel(w) for w in one.get_weights()])
    return found


def test_checkpoint_within_window_has_sums_of_all_workers(tmp_path):
    stopped = run_workers(resumed, args=(str(tmp_path), True), timeout=120)
    assert (stopped[0]["sums"] != stopped[1]["sums"]).any()
    alone = tmp_path / "alone"
    shutil.copytree(tmp_path, alone)
    for worker in run_workers(resumed, args=(str(tmp_path), False, True), timeout=120):
        np.testing.assert_array_equal(worker["resumed"], worker["uninterrupted"])
        np.testing.assert_array_equal(worker["loaded"], worker["resumed"])
    (one,) = run_workers(resumed, workers=1, args=(str(alone), False), timeout=120)
    np.testing.assert_allclose(one["sums"], stopped[0]["sums"] + stopped[1]["sums"], rtol=1e-5)


def plain(kind):
    """Plain Keras in this process: all workers' rows of a step form one batch."""
    import keras
    import tensorflow as tf

    from tests.distributed import problems

    model = problems.network(keras)
    model.compile(make(keras, kind, STEPS)[0], "mse")
    x, y = (a.reshape(UPDATES * STEPS, WORKERS * MICRO, -1) for a in rows())
    model.fit(tf.data.Dataset.from_tensor_slices((x, y)), verbose=0)
    return np.concatenate([np.ravel(w) for w in model.get_weights()])


@pytest.fixture(scope="module")
def trained():
    return run_workers(train, timeout=200)


@pytest.mark.parametrize("kind", KINDS)
def test_window_equals_step_with_larger_batch(trained, kind):
    for worker in trained:
        accumulated = worker[f"{kind}, accumulated"]
        if kind != USUAL[0]:
            np.testing.assert_allclose(accumulated, worker[f"{kind}, at once"], atol=2e-6)
        np.testing.assert_array_equal(accumulated, trained[0][f"{kind}, accumulated"])
        for mode in ("accumulated", "at once")[: len(WINDOWS[kind])]:
            assert worker[f"{kind}, {mode}, exchanges"] == UPDATES
        assert worker[f"{kind}, accumulated, iterations"] == UPDATES  # as in Keras


def test_dense_equals_plain_keras(trained):
    kind = "dense, Nadam with averages"
    np.testing.assert_allclose(trained[0][f"{kind}, accumulated"], plain(kind), atol=2e-5)


def test_nonfinite_gradient_skips_window(trained):
    for worker in trained:
        updates = [s for s in range(1, UPDATES * STEPS) if worker["moved"][s - 1]]
        assert updates == [2, 8, 11]  # the window that ends at step 5 is skipped
        assert worker["skipped"] == 1
        restored = [s for s in range(1, UPDATES * STEPS) if not worker["statistics"][s - 1]]
        assert restored == [5]  # only the step of the skipped update


def test_flush_within_a_window(trained):
    waiting = sum(worker["residuals before"] for worker in trained)
    assert np.abs(waiting).max() > 0.1
    for worker in trained:
        delivered = worker["weights before"] - worker["weights after"]
        np.testing.assert_allclose(delivered, 0.05 * waiting, atol=1e-6)
        assert not worker["residuals after"].any()
        assert worker["sums before"].any()
        np.testing.assert_array_equal(worker["sums after"], worker["sums before"])
        assert worker["position after"] == worker["position before"] == 1
        assert worker["updates after"] == worker["updates before"] + 1


def test_windows_must_be_equal(trained):
    for worker in trained:
        text = str(worker["other window"])
        assert "gradient_accumulation_steps" in text and "disagree" in text, text
