"""A training that is stopped by a signal, fails, and is restarted, on real workers."""

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from tests.distributed import cluster, forks
from tf_redsync import launch, stopping
from tf_redsync.state.checkpoint_store import Store

pytestmark = pytest.mark.distributed
STEPS, EPOCHS = 12, 2


def train(folder, failure, number):
    """Trains; in the first attempt worker 1 fails after a step ("raise") or in it ("in a step").

    After the seventh step worker 1 receives the signal `number`, if not 0.
    """
    import os

    import keras
    import numpy as np
    import tensorflow as tf

    import tf_redsync as rs

    index = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    keras.utils.set_random_seed(0)
    strategy = rs.MultiWorkerMirroredStrategy()
    with strategy.scope():
        checked = keras.layers.Lambda(lambda x: tf.debugging.check_numerics(x, "bad batch"))
        model = keras.Sequential([keras.layers.Input((8,)), checked, keras.layers.Dense(4)])
        optimizer = rs.DistributedOptimizer(
            keras.optimizers.SGD(0.05, momentum=0.9), rs.RedSync(density=0.2)
        )
        model.compile(optimizer, "mse")
    rng = np.random.default_rng(index)
    x, y = rng.normal(size=(4 * STEPS, 8)), rng.normal(size=(4 * STEPS, 4))
    first = os.environ["TF_REDSYNC_RESTART"] == "0"
    if failure == "in a step" and index == 1 and first:
        x[2 * 4] = np.inf  # in the fifth step: two rows of each batch belong to this worker
    data = tf.data.Dataset.from_tensor_slices((x.astype("f4"), y.astype("f4"))).batch(4)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    options.autotune.enabled = False  # otherwise it may take a minute to end after an error
    began = []

    def act(batch, logs):
        step = int(optimizer.exchange.step.numpy())
        began.append(step)
        if index == 1 and number and step == 7:
            os.kill(os.getpid(), number)
        if number and step in (7, 8):
            time.sleep(0.5)  # the request reaches all workers before the next step ends
        if index == 1 and failure == "raise" and step == 15 and first:
            raise ValueError("bad batch")

    callbacks = [
        rs.callbacks.Checkpoint(folder, every=4),
        keras.callbacks.LambdaCallback(on_train_batch_end=act),
    ]
    model.fit(data.with_options(options), epochs=EPOCHS, verbose=0, callbacks=callbacks)
    weights = np.concatenate([w.numpy().ravel() for w in model.trainable_variables])
    return {"weights": weights, "first": began[0], "last": began[-1]}


def job(tmp_path, folder, failure, number=0, grace=3, **kwargs):
    """Runs the job; returns its result, and what worker 1 has saved if it finished."""
    own = [{cluster.RESULT_VARIABLE: str(tmp_path / f"{failure}_{i}")} for i in range(2)]
    arguments = json.dumps([str(tmp_path / folder), failure, number])
    command = forks.command(cluster.ENVIRONMENT, cluster.__file__, __file__, "train", arguments)
    result = launch.run(
        command, 2, env=cluster.ENVIRONMENT, worker_env=own, timeout=100, grace=grace, **kwargs
    )
    saved = tmp_path / f"{failure}_1"
    return result, cluster._load(saved) if saved.exists() else None


def test_signal_to_one_worker_stops_both_after_same_step(tmp_path):
    stopped, _ = job(tmp_path, "run", "signal", int(signal.SIGTERM))
    assert [worker.returncode for worker in stopped.workers] == 2 * [stopping.EXIT_CODE], (
        stopped.message
    )
    store = Store(tmp_path / "run")
    found = store.manifest(store.numbers()[0])
    assert found.reason == "signal SIGTERM" and 7 < found.step <= 9


@pytest.mark.deep
def test_worker_that_fails_in_step_ends_waiting_worker(tmp_path):
    logs = tmp_path / "logs"
    ended, found = job(tmp_path, "run", "in a step", grace=30, max_restarts=1, log_dir=logs)
    assert ended.exit_code == 0 and ended.restarts == 1 and found["first"] == 5, ended.message
    assert "worker 1 failed first: InvalidArgumentError: " in ended.message
    log = (logs / "worker_0.log").read_text()
    assert "worker 1 has failed: InvalidArgumentError: " in log and "bad batch" in log


@pytest.mark.deep
@pytest.mark.parametrize("number", stopping.SIGNALS)
def test_stopped_and_failed_run_ends_like_uninterrupted_run(tmp_path, number):
    stopped, nothing = job(tmp_path, "run", "signal", int(number), max_restarts=3)
    outputs = "\n".join(worker.output for worker in stopped.workers)
    assert stopped.exit_code == stopping.EXIT_CODE == 75 and stopped.restarts == 0, outputs
    assert [worker.returncode for worker in stopped.workers] == [75, 75] and nothing is None
    assert f"{number.name}: all workers" in stopped.workers[1].output

    again, found = job(tmp_path, "run", "raise", max_restarts=1)
    assert again.exit_code == 0 and again.restarts == 1, again.message
    assert "worker 1 failed first: ValueError: bad batch" in again.message
    # from the checkpoint at step 12
    assert 12 < found["first"] <= 15 and found["last"] == STEPS * EPOCHS
    if number == signal.SIGTERM:  # bit for bit; the other signals only resume
        plain, expected = job(tmp_path, "plain", "plain")
        assert plain.exit_code == 0, plain.message
        np.testing.assert_array_equal(found["weights"], expected["weights"])


@pytest.mark.deep
def test_each_launcher_restarts_its_own_worker(tmp_path):
    """Two launchers, one worker each: both must notice a failure."""
    addresses = [f"127.0.0.1:{port}" for port in launch.free_ports(2)]
    arguments = json.dumps([str(tmp_path / "run"), "raise", 0])
    command = forks.command(cluster.ENVIRONMENT, cluster.__file__, __file__, "train", arguments)
    launchers = []
    for i in range(2):
        task = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": i}}
        environment = {
            **os.environ,
            **cluster.ENVIRONMENT,
            "TF_CONFIG": json.dumps(task),
            cluster.RESULT_VARIABLE: str(tmp_path / f"result_{i}"),
        }
        words = [sys.executable, "-m", "tf_redsync.launch", "--max-restarts", "2"]
        words += ["--timeout", "150", "--grace", "5", *command[3:]]
        log = (tmp_path / f"log_{i}").open("w")
        launchers.append(subprocess.Popen(words, env=environment, stdout=log, stderr=log))
    codes = [launcher.wait(200) for launcher in launchers]
    logs = [(tmp_path / f"log_{i}").read_text() for i in range(2)]
    assert codes == [0, 0], "\n".join(logs)
    assert "[launch] worker 1 failed first: ValueError: bad batch" in logs[1]
    for i, log in enumerate(logs):
        assert "[launch] restart 1 with 1 worker; 1 left." in log and "restart 2" not in log
        found = cluster._load(tmp_path / f"result_{i}")
        assert 12 < found["first"] <= 15 and found["last"] == STEPS * EPOCHS


PREWARMED = """
import os, sys
warm = "tensorflow" in sys.modules
if os.environ["TF_REDSYNC_RESTART"] == "0":
    sys.exit(3)
import tensorflow as tf
import tf_redsync as rs
strategy = rs.MultiWorkerMirroredStrategy()
context = tf.distribute.get_replica_context
total = strategy.run(lambda: context().all_reduce("sum", tf.constant(2.0)))
print("found", warm, rs.rank(), rs.size(), float(total))
"""


@pytest.mark.deep
def test_restart_uses_prewarmed_workers(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(PREWARMED)
    words = [sys.executable, str(path)]
    ended = launch.run(
        words, 2, env=cluster.ENVIRONMENT, timeout=100, max_restarts=1, prewarm=True, grace=30
    )
    assert ended.exit_code == 0 and ended.restarts == 1, ended.message
    for rank, worker in enumerate(ended.workers):
        assert f"found True {rank} 2 4.0" in worker.output.splitlines()
