"""Workers that run different steps raise an error that lists all of them, without a deadlock."""

import os
import re
import signal
import time

import pytest

from tests import total_state
from tests.deep import DEEP
from tests.distributed.cluster import LEGACY, fail_workers, run_workers

# An action of worker 0 alone, and part of its error text. The text of worker 1 must merely differ:
# Keras reads a metric before its next callback, for example.
CASES = {
    "sums by the chief": "save the exchange's state at step 4",
    "sums after `fit`": "save the exchange's state at step 4",
    "unequal epochs": "begin `fit` of 2 epochs",
    "early stopping": "end `fit` at step 8",
    "evaluate in a callback": "evaluate at step 4",
    "predict by the chief": "predict at step 4",
    "steps per execution": "steps_per_execution=1",
    "reduce": "reduce float32 by SUM",
    "restore": "restore the exchange's state at step 4",
}
# One for each detection: in a request of all workers, at a `fit` marker, by its arguments.
SHORT = ["sums by the chief", "early stopping", "steps per execution", "reduce"]
FEWER_STEPS = "fewer batches"


def run_cases(family, cases):
    """Worker 0 does something in each case that worker 1 does not; returns each worker's error."""
    import keras
    import tensorflow as tf
    import tf_keras

    import tf_redsync as rs
    from tests.distributed import problems
    from tf_redsync.cluster import stall_detector

    library = keras if family == "keras3" else tf_keras
    rank = problems.rank()
    chief = rank == 0
    strategy = rs.MultiWorkerMirroredStrategy(timeout_seconds=60)
    data = problems.dataset(64, 16)
    callbacks = library.callbacks

    def compiled(**options):
        with strategy.scope():
            model = problems.network(library)
            inner = library.optimizers.SGD(0.01)
            optimizer = rs.DistributedOptimizer(inner, rs.RedSync(density=0.1, dense_below=16))
            model.compile(optimizer=optimizer, loss="mse", **options)
        return model

    def only_chief(event, call):
        return [callbacks.LambdaCallback(**{event: call})] if chief else []

    def stop_after(batch, model):
        model.stop_training = batch == 1

    def run(case):
        options = {"steps_per_execution": 1 + rank} if case == "steps per execution" else {}
        model = compiled(**options)

        def fit(epochs=2, **more):
            model.fit(data, epochs=epochs, verbose=0, **more)

        if case == "sums by the chief":
            states = [lambda *_: total_state.total(model.optimizer.exchange)]
            fit(callbacks=only_chief("on_epoch_end", states[0]))
        elif case == "early stopping":
            stop = callbacks.EarlyStopping("loss", patience=0, mode="max")
            fit(epochs=3, callbacks=[stop] if chief else [])
        elif case == "evaluate in a callback":
            once = only_chief("on_epoch_end", lambda *_: model.evaluate(data, verbose=0))
            fit(callbacks=once)
        elif case == "unequal epochs":
            fit(epochs=2 + rank)
        elif case == FEWER_STEPS:
            early = only_chief("on_train_batch_end", lambda batch, logs: stop_after(batch, model))
            fit(callbacks=early)
        elif case == "reduce":
            strategy.reduce("SUM" if chief else "MEAN", tf.ones([2]), axis=None)
        elif case == "steps per execution":
            fit()
        else:
            fit(epochs=1)
            if not chief:
                fit() if case == "predict by the chief" else model.evaluate(data, verbose=0)
            elif case == "predict by the chief":
                model.predict(data.map(lambda x, y: x), verbose=0)
            elif case == "restore":
                total_state.restore(model.optimizer.exchange, {})
            else:
                total_state.total(model.optimizer.exchange)

    def slow():
        """Worker 1 is late but no worker is ahead: no error."""
        stall_detector.STALLED_SECONDS, before = 1.0, stall_detector.STALLED_SECONDS
        try:
            late = callbacks.LambdaCallback(on_epoch_end=lambda *_: time.sleep(4 * rank))
            compiled().fit(data, epochs=1, verbose=0, callbacks=[late])
        finally:
            stall_detector.STALLED_SECONDS = before

    result = {}
    slow()
    for case in (*cases, FEWER_STEPS):
        if case == FEWER_STEPS:  # detected by a timeout
            stall_detector.STALLED_SECONDS = 4.0
        try:
            run(case)
        except Exception as error:
            result[case] = f"{type(error).__name__}: {error}"
        else:
            result[case] = "no error"
    return result


@pytest.mark.parametrize(
    ("family", "cases"),
    [
        ("keras3", list(CASES) if DEEP else SHORT),
        pytest.param("tf_keras", ["sums by the chief", "early stopping"], marks=pytest.mark.deep),
    ],
)
def test_action_of_one_worker_raises_on_all(family, cases):
    both = run_workers(run_cases, args=(family, cases), env=LEGACY, timeout=200)
    for case in cases:
        for seen in both:
            text = seen[case]
            assert text.startswith("Disagreement: the workers disagree"), f"{case}: {text}"
            chief, other = text.split("\nworker 0: ")[1].split("\nworker 1: ")
            assert CASES[case] in chief, f"{case}: {text}"
            assert other != chief
    for seen in both:
        text = seen[FEWER_STEPS]
        assert "the workers do different things: worker 0 is about to: " in text, text
        assert "; worker 1 has entered a further step" in text


def stop_one():
    """Worker 2 of three is stopped (SIGSTOP), as by a debugger, in the middle of training."""
    import keras
    import tensorflow as tf

    import tf_redsync as rs
    from tests.distributed import problems
    from tf_redsync.cluster import watchdog

    strategy = rs.MultiWorkerMirroredStrategy(timeout_seconds=60)
    with strategy.scope():
        model = problems.network(keras)
        model.compile(rs.DistributedOptimizer(keras.optimizers.SGD(0.1), rs.RedSync()), "mse")

    def act(batch, logs):
        if batch == 2:  # not earlier: on a busy machine workers finish tracing at different times
            watchdog.start(strategy, 6.0)
        if batch == 5 and problems.rank() == 2:
            print("stopped", os.getpid(), flush=True)
            os.kill(os.getpid(), signal.SIGSTOP)

    # An iterator that is deleted while tf.data tunes may wait a minute after the error.
    options = tf.data.Options()
    options.autotune.enabled = False
    data = problems.dataset(60, 15).repeat().with_options(options)
    model.fit(
        data,
        steps_per_epoch=20,
        verbose=0,
        callbacks=[keras.callbacks.LambdaCallback(on_train_batch_end=act)],
    )


def test_stopped_worker_is_named():
    with pytest.raises(AssertionError) as error:
        # The launcher ends the stopped worker by SIGKILL; the others end one after the other.
        fail_workers(stop_one, workers=3, env=LEGACY, timeout=150, grace=15)
    texts = str(error.value).split("--- worker ")[1:]
    for rank, text in enumerate(texts[:2]):
        assert text.startswith(f"{rank}, exit code 1")
        assert "worker 2 does not answer" in text, text
        assert re.search(r"worker 2 is at step 6\b.*\b\d+ s ago", text), text
        assert "worker 0 is at step 7" in text and "worker 1 is at step 7" in text, text
    assert texts[2].startswith("2, exit code -9")
