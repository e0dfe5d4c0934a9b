"""An error in a step begins with its reason and the worker; TensorFlow's error is its cause."""

import re
import tempfile
from pathlib import Path

import pytest

from tests.distributed import cluster

pytestmark = pytest.mark.distributed
STEP = 15
MAX_SECONDS = 15.0  # seconds, half of the limit for silent processes that have not ended


def train(victim, api):
    """Skips too many steps, then loses worker `victim`; returns the other worker's errors.

    Args:
        victim: The worker that ends by SIGKILL after step `STEP`.
        api: "fit" or "loop".
    """
    import os
    import signal
    import time

    import keras
    import numpy as np
    import tensorflow as tf

    import tf_redsync as rs
    from tests.distributed import problems

    strategy, errors = rs.MultiWorkerMirroredStrategy(), {}
    x, y = problems.regression(4)
    bad = np.full_like(y, np.nan) if problems.rank() == 1 else y

    def training(**options):
        with strategy.scope():
            model = problems.network(keras)
            inner = keras.optimizers.SGD(0.01)
            optimizer = rs.DistributedOptimizer(inner, rs.TopK(density=0.2), **options)
            model.compile(optimizer, "mse")

        def replica_step(x, y):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
            grads = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))

        step = tf.function(lambda *a: strategy.run(replica_step, args=a), autograph=False)

        def loop(*arrays, after=None):
            for number in range(40):
                step(*arrays)
                if after is not None:
                    after(number, {})

        def fit(*arrays, after=None):
            options, policy = tf.data.Options(), tf.data.experimental.AutoShardPolicy
            options.experimental_distribute.auto_shard_policy = policy.OFF
            options.autotune.enabled = False  # otherwise it may take a minute to end after an error
            data = tf.data.Dataset.from_tensor_slices(arrays).repeat(80).batch(8)
            data = data.with_options(options)
            calls = [keras.callbacks.LambdaCallback(on_train_batch_end=after)] if after else []
            model.fit(data, steps_per_epoch=40, verbose=0, callbacks=calls)

        return fit if api == "fit" else loop

    def record_error(name, call):
        try:
            call()
        except tf.errors.OpError as error:
            errors[name] = str(error)
            errors[f"{name}/class"] = type(error).__name__
            errors[f"{name}/ours"] = isinstance(error, rs.DistributedError)
            errors[f"{name}/cause"] = f"{type(error.__cause__).__name__}: {error.__cause__}"

    record_error("skipped", lambda: training(max_skipped_steps=3)(x, bad))

    def end(number, logs):
        if number + 1 == STEP:
            errors["ended"] = time.monotonic()
            if problems.rank() == victim:
                time.sleep(1.0)  # lets the other worker end this step too
                os.kill(os.getpid(), signal.SIGKILL)

    record_error("lost", lambda: training()(x, y, after=end))
    errors["seconds"] = time.monotonic() - errors["ended"]
    return errors


@pytest.mark.parametrize(
    ("victim", "api"),
    [
        (0, "loop"),
        (1, "fit"),
        pytest.param(0, "fit", marks=pytest.mark.deep),
    ],
)
def test_message_begins_with_reason(victim, api):
    with tempfile.TemporaryDirectory() as folder:
        arguments = (train, 2, (victim, api), None, 120, 60, Path(folder))
        job = cluster._launch(*arguments)
        saved = Path(folder) / f"result_{1 - victim}"
        assert saved.exists(), cluster._report(job, [])
        errors = cluster._load(saved)
    assert errors["skipped"].startswith("3 steps in a row were skipped"), errors["skipped"]
    assert errors["skipped/class"] == "SkippedSteps"
    assert errors["lost"].startswith(f"worker {victim} does not answer"), errors["lost"]
    assert errors["lost/class"] == "DistributedError"
    assert errors["seconds"] < MAX_SECONDS, errors["seconds"]
    where = re.search(rf"worker {victim} is at step (\d+)", errors["lost"])
    skipped = 3  # only steps of the first training are skipped
    assert int(where[1]) == skipped + STEP, errors["lost"]
    for name in ("skipped", "lost"):
        assert errors[f"{name}/ours"]
        assert "{{node" in errors[f"{name}/cause"] or "ollective" in errors[f"{name}/cause"]
