"""Start of workers: a missing one, a duplicate, one that pauses."""

import dataclasses
import json
import os
import signal
import threading
import time

import pytest

from tests.distributed import cluster, forks
from tests.distributed.cluster import ENVIRONMENT, fail_workers, run_workers
from tests.patience import PATIENCE
from tests.unit.test_rendezvous import duplicate_error
from tf_redsync import launch
from tf_redsync.cluster import rendezvous
from tf_redsync.cluster.rendezvous import StartError
from tf_redsync.cluster.tf_config import Cluster

pytestmark = pytest.mark.distributed


def train(steps, folder):
    """Trains; worker 1 reports after some steps; training ends once a file "go" exists."""
    import json
    import os
    import time
    from pathlib import Path

    import keras
    import tensorflow as tf

    import tf_redsync as rs

    index = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    strategy = rs.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
        optimizer = rs.DistributedOptimizer(keras.optimizers.SGD(0.01), rs.RedSync(density=0.1))
        model.compile(optimizer, "mse")
    data = tf.data.Dataset.from_tensors((tf.ones((4, 4)), tf.ones((4, 1)))).repeat(steps)

    def pause(batch, logs):
        if batch == 5 and index == 1:
            Path(folder, "pid").write_text(f"{os.getpid()} {os.environ['TF_CONFIG']}")
        time.sleep(0.05)
        while batch == steps - 1 and not Path(folder, "go").exists():
            time.sleep(0.05)

    callback = keras.callbacks.LambdaCallback(on_train_batch_end=pause)
    model.fit(data, epochs=1, verbose=0, callbacks=[callback])
    return {"step": int(optimizer.exchange.step.numpy())}


def running(folder):
    """PID of the second worker and the cluster, once some steps have run."""
    end = time.monotonic() + PATIENCE * 60
    while not (folder / "pid").exists() or "}}" not in (folder / "pid").read_text():
        assert time.monotonic() < end, "no steps"
        time.sleep(0.05)
    pid, config = (folder / "pid").read_text().split(" ", 1)
    addresses = tuple(json.loads(config)["cluster"]["worker"])
    return int(pid), Cluster(addresses, tuple(f"worker:{i}" for i in range(len(addresses))), 0)


def job(steps, folder):
    """Runs a job in a thread; the list has its results when the thread has ended."""
    results = []
    thread = threading.Thread(
        target=lambda: results.append(run_workers(train, args=(steps, str(folder))))
    )
    thread.start()
    return thread, results


def test_duplicate_worker_ends_alone(tmp_path):
    """A duplicate of each task starts beside a job that trains."""
    thread, results = job(40, tmp_path)
    _, workers = running(tmp_path)
    for rank in (1, 0):
        text = duplicate_error(dataclasses.replace(workers, rank=rank))
        assert f"running already: TensorFlow's server answers at {workers.addresses[rank]}" in text
    # That was from another machine. On this one:
    with (
        pytest.raises(StartError, match="another process of this machine"),
        rendezvous.startup(workers, 5.0),
    ):
        pass
    assert thread.is_alive()
    (tmp_path / "go").touch()
    thread.join(PATIENCE * 60)
    assert [result["step"] for result in results[0]] == [40, 40]


def test_missing_worker_is_named_and_ends_wait():
    addresses = [f"127.0.0.1:{port}" for port in launch.free_ports(2)]
    task = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": 0}}
    own = {"TF_CONFIG": json.dumps(task), "TF_REDSYNC_START_TIMEOUT": "4"}
    command = forks.command(ENVIRONMENT, cluster.__file__, __file__, "start", "[]")
    job = launch.run(command, 1, env=ENVIRONMENT, worker_env=[own], timeout=60)
    text = job.workers[0].output
    assert job.exit_code == 1 and job.workers[0].seconds < 60, text
    missing = f"worker 1 at {addresses[1]}"
    assert f"waiting for {missing} (3 s): nothing listens there" in text
    assert f"missing:\n{missing}: nothing listens there\nStart them" in text
    assert job.message.splitlines()[-1].startswith(
        "worker 0 failed first: StartError: some workers did not start within 4 s"
    )


def use_tensorflow_first():
    import tensorflow as tf

    import tf_redsync as rs

    tf.Variable(1.0)
    rs.MultiWorkerMirroredStrategy()


def test_use_of_tensorflow_before_strategy_raises():
    for text in fail_workers(use_tensorflow_first):
        assert "MultiWorkerMirroredStrategy()` first in the program" in text


def start(broken=None):
    """Starts TensorFlow, except on one worker."""
    import tensorflow as tf

    import tf_redsync as rs
    from tests.distributed import problems

    def no_start(*_):
        raise ValueError("no GPU")

    if problems.rank() == broken:
        tf.distribute.MultiWorkerMirroredStrategy.__init__ = no_start
    rs.MultiWorkerMirroredStrategy()


def start_with_proxy():
    """Starts TensorFlow. gRPC would connect to the other worker through the proxy."""
    import os

    import tf_redsync as rs

    os.environ |= {"http_proxy": "http://127.0.0.1:9", "no_proxy": "elsewhere"}
    rs.MultiWorkerMirroredStrategy()
    return {"exempt": os.environ["no_grpc_proxy"]}


def test_proxy_is_bypassed():
    assert [out["exempt"] for out in run_workers(start_with_proxy)] == ["elsewhere,127.0.0.1"] * 2


@pytest.mark.deep
@pytest.mark.parametrize("broken", [0, 1])
def test_worker_lost_during_tensorflow_start_ends_others(broken):
    command = forks.command(ENVIRONMENT, cluster.__file__, __file__, "start", f"[{broken}]")
    job = launch.run(command, 3, env=ENVIRONMENT, timeout=100, grace=60)
    assert job.message.splitlines()[-1].startswith(f"worker {broken} failed first: ValueError: no")
    for rank in {0, 1, 2} - {broken}:
        text = job.workers[rank].output
        assert f"worker {broken} at 127.0.0.1" in text and "ended while TensorFlow start" in text
        assert job.workers[rank].returncode == -signal.SIGKILL and not job.workers[rank].killed


@pytest.mark.deep
def test_worker_may_be_stopped_for_20_seconds(tmp_path):
    thread, results = job(200, tmp_path)
    pid, workers = running(tmp_path)
    os.kill(pid, signal.SIGSTOP)
    try:
        # While it cannot answer, a duplicate waits and does no harm.
        with pytest.raises(StartError, match="start_timeout="):
            raise StartError(duplicate_error(dataclasses.replace(workers, rank=1)))
        time.sleep(15)
    finally:
        os.kill(pid, signal.SIGCONT)
    (tmp_path / "go").touch()
    thread.join(PATIENCE * 60)
    assert [result["step"] for result in results[0]] == [200, 200]
