"""A worker whose input stalls is named in a warning, and the job does not hang."""

import re
import time

import pytest

from tests.distributed.cluster import LEGACY, fail_workers


def stall(family, amount, loop):
    """Train until worker 1's input pipeline blocks, as with an unreachable file server."""
    import keras
    import tensorflow as tf
    import tf_keras

    import tf_redsync as rs
    from tests.distributed import problems
    from tf_redsync.cluster import watchdog

    watchdog._STUCK_SECONDS = 3.0
    library = keras if family == "keras3" else tf_keras
    steps_done = []
    strategy = rs.MultiWorkerMirroredStrategy(timeout_seconds=60)

    def step_ended():
        watchdog.start(strategy, 8.0)  # after tracing, which may take longer on one worker
        steps_done.append(1)

    def wait(row):
        while steps_done and problems.rank() == 1:
            time.sleep(1)
        return row

    rows = tf.data.Dataset.from_tensor_slices(problems.regression(800))

    def waited(x, y):
        return tf.ensure_shape(tf.py_function(wait, [x], tf.float32), [12]), y

    rows = rows.map(waited)
    data = problems.sharded(rows.batch(4))
    data = data.repeat() if amount == "infinite" else data
    with strategy.scope():
        model = problems.network(library)
        inner = library.optimizers.SGD(0.01)
        optimizer = rs.DistributedOptimizer(inner, rs.RedSync(density=0.1, dense_below=16))
        model.compile(optimizer=optimizer, loss="mse")
    if loop == "fit":
        start = library.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: step_ended()
        )
        model.fit(data, steps_per_epoch=200, verbose=0, callbacks=[start])
        return
    step = problems.step_of(strategy, model, optimizer)
    iterator = iter(strategy.experimental_distribute_dataset(data))
    step(next(iterator))

    @tf.function
    def steps(iterator):
        for _ in tf.range(199):
            step.python_function(next(iterator))

    step_ended()
    steps(iterator)


@pytest.mark.parametrize(
    ("family", "amount", "loop"),
    [
        ("keras3", "finite", "fit"),
        pytest.param("keras3", "infinite", "fit", marks=pytest.mark.deep),
        pytest.param("keras3", "finite", "loop", marks=pytest.mark.deep),
        pytest.param("tf_keras", "finite", "fit", marks=pytest.mark.deep),
    ],
)
def test_worker_with_stalled_data_is_named_and_ends(family, amount, loop):
    env = LEGACY if family == "tf_keras" else None
    outputs = fail_workers(stall, args=(family, amount, loop), env=env, timeout=90)
    for output in outputs:
        assert "worker 1 did not reach the others within 8 s; worker 1 waited for" in output
    for output in outputs:
        warned = re.search(r"worker 1 has waited (\d+) s for data", output)
        assert warned, output
        # warned from a quarter of the limit on; a busy machine is late
        assert 2 <= int(warned[1]) < 8
