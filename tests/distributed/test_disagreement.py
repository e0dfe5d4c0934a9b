"""Disagreements between workers raise an exception on all of them, without a deadlock."""

import json
import socket
import time

import numpy as np
import pytest

from tests import total_state
from tests.distributed.cluster import fail_workers, run_workers


def build_differently(strategy, difference):
    """Build workers that differ in `difference` by rank, then try to train a step."""
    import keras
    import tensorflow as tf

    import tf_redsync as rs
    from tests.distributed import problems

    rank = problems.rank()
    width = 48 + rank if difference == "shape" else 48
    layers = (
        1 + rank if difference == "more layers" else 2 - rank if difference == "fewer layers" else 1
    )
    density = 0.1 + 0.1 * rank if difference == "method" else 0.1
    options = {}
    if difference == "collectives":  # without the variable of the comparisons
        options = {"direct_collectives": rank == 0, "check_every": None}
    tf.config.run_functions_eagerly(difference == "eager" and rank == 1)
    with strategy.scope():
        hidden = [keras.layers.Dense(width) for _ in range(layers)]
        if difference == "order":
            names = ("query", "key") if rank == 0 else ("key", "query")
            hidden += [keras.layers.Dense(48, name=name) for name in names]
        model = keras.Sequential([keras.layers.Input((12,)), *hidden, keras.layers.Dense(1)])
        method = rs.RedSync(density=density)
        optimizer = rs.DistributedOptimizer(keras.optimizers.SGD(0.1), method, **options)
    problems.train_loop(strategy, model, optimizer, problems.dataset(16, 8), 1)


def start_differently(difference):
    """The strategy or a variable's broadcast fails; the job cannot continue."""
    import tf_redsync as rs

    build_differently(rs.MultiWorkerMirroredStrategy(), difference)


@pytest.mark.parametrize(
    ("difference", "both"),
    [
        pytest.param("shape", ("(12, 48)", "(12, 49)"), marks=pytest.mark.deep),
        pytest.param("more layers", ("(48, 1)", "(48, 48)"), marks=pytest.mark.deep),
        ("fewer layers", ("(48, 1)", "(48, 48)")),
    ],
)
def test_all_workers_report_different_variables(difference, both):
    outputs = fail_workers(start_differently, args=(difference,), timeout=100)
    for output in outputs:
        assert_differ(output, both)


def assert_differ(text, both):
    assert "the workers disagree" in text
    assert "worker 0" in text and "worker 1" in text
    assert all(part in text for part in both), text


def leave_out_one_step():
    """Worker 1 stops training after two steps; worker 0 continues."""
    import keras

    import tf_redsync as rs
    from tests.distributed import problems
    from tf_redsync.cluster import agreement, watchdog

    agreement._SLICE_SECONDS = 1
    strategy = rs.MultiWorkerMirroredStrategy(timeout_seconds=60)
    with strategy.scope():
        model = problems.network(keras)
        optimizer = rs.DistributedOptimizer(keras.optimizers.SGD(0.1), rs.RedSync(dense_below=16))
    problems.train_loop(strategy, model, optimizer, problems.dataset(16, 8), 1)
    watchdog.start(strategy, 4.0)  # after tracing, which may take longer on one worker
    if problems.rank() == 1:
        time.sleep(100)
    problems.train_loop(strategy, model, optimizer, problems.dataset(16, 8), 1)


def test_missing_worker_is_named_after_timeout():
    with pytest.raises(AssertionError) as error:
        run_workers(leave_out_one_step, timeout=90, grace=1)
    text = str(error.value)
    assert "worker 0, exit code 1" in text
    assert "worker 1 did not reach the others within 4 s" in text
    assert "worker 1 is at step 2" in text
    assert "worker 0 is at step 2 and waits for all workers to: request a batch" in text


def disagree():
    """All disagreements after which a job continues, in one job; returns each worker's results."""
    import keras
    import tensorflow as tf

    import tf_redsync as rs

    strategy = rs.MultiWorkerMirroredStrategy(timeout_seconds=30)
    found = {}
    for difference in ("method", "collectives", "order", "eager"):
        try:
            build_differently(strategy, difference)
        except ValueError as error:
            found[difference] = str(error)
    tf.config.run_functions_eagerly(False)
    for difference in ("loss", "local rate", "eager fit"):
        try:
            fit_differently(strategy, difference)
        except ValueError as error:
            found[difference] = str(error)
    tf.config.run_functions_eagerly(False)
    for precision in ("float32", "mixed_float16"):
        keras.mixed_precision.set_global_policy(precision)
        seen = train_with_bad_values(strategy, precision)
        found |= {f"{precision}/{key}": value for key, value in seen.items()}
    return found


def fit_differently(strategy, difference):
    """Fit with another loss or rate on worker 1, which no collective detects, or eagerly there."""
    import keras
    import tensorflow as tf

    import tf_redsync as rs
    from tests.distributed import problems

    with strategy.scope():
        model = problems.network(keras)
        loss = keras.losses.Huber(delta=0.5 + (problems.rank() if difference == "loss" else 0))
        method = rs.LocalSGD(steps=4) if difference == "local rate" else rs.Dense()
        model.compile(rs.DistributedOptimizer(keras.optimizers.SGD(0.05), method), loss)
    if difference == "local rate":  # of a callback on one worker
        model.fit(*problems.regression(16), batch_size=16, verbose=0)
        model.optimizer.learning_rate.assign(0.05 / (1 + problems.rank()))
    if difference == "eager fit":
        model.fit(*problems.regression(16), batch_size=16, verbose=0)
        tf.config.run_functions_eagerly(problems.rank() == 1)
    model.fit(*problems.regression(16), batch_size=16, verbose=0)


def train_with_bad_values(strategy, precision):
    """Worker 1 alone gets one batch of NaN (inf in float16) in the middle of training."""
    import keras
    import tensorflow as tf

    import tf_redsync as rs
    from tests.distributed import problems

    rank = problems.rank()
    if rank == 1:
        keras.layers.Dense(1)  # the model's layers get other automatic names
    with strategy.scope():
        model = problems.network(keras)
        inner = keras.optimizers.SGD(0.05, momentum=0.9)
        if precision == "mixed_float16":
            inner = keras.optimizers.LossScaleOptimizer(inner, initial_scale=64.0)
        optimizer = rs.DistributedOptimizer(inner, rs.RedSync(density=0.2, dense_below=16))
        optimizer.build(model.trainable_variables)
    x, y = problems.regression(8)
    digests, states, losses = [], [], []

    def replica_step(bad):
        inputs = tf.where(bad, np.float32("nan"), x)
        with tf.GradientTape() as tape:
            out = tf.cast(model(inputs, training=True), tf.float32)
            loss = tf.reduce_mean((out - y) ** 2) / 2.0
            scaled = optimizer.scale_loss(loss)
        grads = tape.gradient(scaled, model.trainable_variables)
        optimizer.apply(grads, model.trainable_variables)
        return loss

    @tf.function
    def step(bad):
        return strategy.run(replica_step, args=(bad,))

    for i in range(8):
        losses.append(float(step(tf.constant(i == 3 and rank == 1))))
        digests.append(problems.digest(model))
        slots = [v.numpy() for v in optimizer.variables if "momentum" in v.path]
        state = total_state.total(optimizer.exchange)
        arrays = [state[k] for k in sorted(state) if "residual" in k] + slots
        states.append(np.concatenate([a.ravel() for a in arrays]))
    return {
        "digests": digests,
        "states": np.stack(states),
        "skipped": int(optimizer.exchange.skipped.numpy()),
        "steps": int(optimizer.exchange.step.numpy()),
        "losses": losses,
        "scale": float(inner.dynamic_scale.numpy()) if precision == "mixed_float16" else 0.0,
    }


@pytest.fixture(scope="module")
def results_of_workers():
    return run_workers(disagree, timeout=200)


def test_all_workers_report_different_methods(results_of_workers):
    for worker in results_of_workers:
        assert_differ(worker["method"], ("0.1", "0.2"))


def test_all_workers_report_different_collectives(results_of_workers):
    both = "direct_collectives=true", "direct_collectives=false"
    for worker in results_of_workers:
        assert_differ(worker["collectives"], both)


def test_all_workers_report_different_orders_of_layers(results_of_workers):
    for worker in results_of_workers:
        assert_differ(worker["order"], ("sequential/query/kernel", "sequential/key/kernel"))
        assert "over a set" in worker["order"]
        assert "dense/kernel" not in worker["order"]


def test_all_workers_report_different_losses(results_of_workers):
    for worker in results_of_workers:
        assert_differ(worker["loss"], ("compile.loss.Huber.delta=0.5", "delta=1.5"))


def test_all_workers_report_different_rates_of_local_steps(results_of_workers):
    for worker in results_of_workers:
        assert_differ(
            worker["local rate"], ('learning rate when epoch 1 begins="0.05"', '="0.025"')
        )


@pytest.mark.parametrize("case", ["eager", "eager fit"])
def test_all_workers_report_that_one_runs_functions_eagerly(results_of_workers, case):
    both = "functions_run_eagerly=false", "functions_run_eagerly=true"
    for worker in results_of_workers:
        assert_differ(worker[case], both)


def of_precision(results_of_workers, precision):
    return (
        {k.split("/")[1]: v for k, v in worker.items() if k.startswith(f"{precision}/")}
        for worker in results_of_workers
    )


def test_nan_on_one_worker_skips_step_on_all(results_of_workers):
    first, second = of_precision(results_of_workers, "float32")
    assert list(first["digests"]) == list(second["digests"])
    assert first["digests"][3] == first["digests"][2] != first["digests"][4]
    np.testing.assert_array_equal(first["states"][3], first["states"][2])
    assert np.isfinite(first["states"]).all()
    assert first["skipped"] == second["skipped"] == 1
    assert first["steps"] == 8


def test_mixed_precision_agrees_on_the_loss_scale(results_of_workers):
    first, second = of_precision(results_of_workers, "mixed_float16")
    assert list(first["digests"]) == list(second["digests"])
    assert first["digests"][3] == first["digests"][2] != first["digests"][4]
    np.testing.assert_array_equal(first["states"][3], first["states"][2])
    assert first["scale"] == second["scale"] == 32.0
    assert np.isfinite(first["losses"]).all() and first["losses"][-1] < first["losses"][0]


def make_strategy(config):
    """Only start the cluster, with a TF_CONFIG that was not written by the launcher."""
    import os

    import tf_redsync as rs

    os.environ["TF_CONFIG"] = config

    rs.MultiWorkerMirroredStrategy()


def test_port_in_use_is_named():
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]
        config = {
            "cluster": {"worker": [f"127.0.0.1:{port}", "127.0.0.1:1"]},
            "task": {"type": "worker", "index": 0},
        }
        arguments = (json.dumps(config),)
        (output,) = fail_workers(make_strategy, workers=1, args=arguments, timeout=60)
    assert f"port {port} is in use" in output
