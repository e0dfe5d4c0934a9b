"""An error in a step says what has happened first, and to whom; TensorFlow's is its cause."""

import re
import tempfile
from pathlib import Path

import pytest

from tests.distributed import cluster

pytestmark = pytest.mark.distributed
STEP = 15
SOON = 15.0  # seconds, half of the limit for processes that are silent and have not ended


def train(victim, how):
    """Skips too many steps, then loses worker `victim` in a step; returns what the other is told.

    Args:
        victim: The worker that ends by SIGKILL after step `STEP`.
        how: By "fit" or by a "loop".
    """
    import os
    import signal
    import time

    import keras
    import numpy as np
    import tensorflow as tf

    import tf_redsync as rs
    from tests.distributed import problems

    strategy, told = rs.MultiWorkerMirroredStrategy(), {}
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
            options.autotune.enabled = False  # its end may take a minute when there was an error
            data = tf.data.Dataset.from_tensor_slices(arrays).repeat(80).batch(8)
            data = data.with_options(options)
            calls = [keras.callbacks.LambdaCallback(on_train_batch_end=after)] if after else []
            model.fit(data, steps_per_epoch=40, verbose=0, callbacks=calls)

        return fit if how == "fit" else loop

    def note(name, call):
        try:
            call()
        except tf.errors.OpError as error:
            told[name] = str(error)
            told[f"{name}/class"] = type(error).__name__
            told[f"{name}/ours"] = isinstance(error, rs.DistributedError)
            told[f"{name}/cause"] = f"{type(error.__cause__).__name__}: {error.__cause__}"

    note("skipped", lambda: training(max_skipped_steps=3)(x, bad))

    def end(number, logs):
        if number + 1 == STEP:
            told["ended"] = time.monotonic()
            if problems.rank() == victim:
                time.sleep(0.2)  # for the other one to end this step, too
                os.kill(os.getpid(), signal.SIGKILL)

    note("lost", lambda: training()(x, y, after=end))
    told["seconds"] = time.monotonic() - told["ended"]
    return told


@pytest.mark.parametrize(
    ("victim", "how"),
    [
        (0, "loop"),
        (1, "fit"),
        pytest.param(0, "fit", marks=pytest.mark.deep),
    ],
)
def test_the_message_begins_with_the_reason(victim, how):
    with tempfile.TemporaryDirectory() as folder:
        arguments = (train, 2, (victim, how), None, 120, 60, Path(folder))
        job = cluster._launch(*arguments)
        saved = Path(folder) / f"result_{1 - victim}"
        assert saved.exists(), cluster._report(job, [])
        told = cluster._load(saved)
    assert told["skipped"].startswith("3 steps in a row were skipped"), told["skipped"]
    assert told["skipped/class"] == "SkippedSteps"
    assert told["lost"].startswith(f"worker {victim} does not answer"), told["lost"]
    assert told["lost/class"] == "DistributedError"
    assert told["seconds"] < SOON, told["seconds"]
    where = re.search(rf"worker {victim} is at step (\d+)", told["lost"])
    skipped = 3  # steps of the first training; it does not ask for more
    assert int(where[1]) == skipped + STEP, told["lost"]
    for name in ("skipped", "lost"):
        assert told[f"{name}/ours"]
        assert "{{node" in told[f"{name}/cause"] or "ollective" in told[f"{name}/cause"]
