"""`Auto` on two real workers: all families build it, the trial keeps or drops compression."""

import numpy as np
import pytest

from tests.distributed.cluster import run_workers

LEARNING_RATE = 0.01
STEPS = 15


def fit_with_auto(family):
    """Fit a small model with the default method, and with a dense exchange, from one seed."""
    import os

    if family != "keras3":
        os.environ["TF_USE_LEGACY_KERAS"] = "1"
    import tensorflow as tf

    import tf_redsync as rs
    from tests.distributed import problems

    if family == "tf_keras":
        strategy = tf.distribute.MultiWorkerMirroredStrategy()
    else:
        strategy = rs.MultiWorkerMirroredStrategy()
    if family == "keras3":
        import keras
    else:
        import tf_keras as keras
    sgd = keras.optimizers.legacy.SGD if family == "legacy" else keras.optimizers.SGD

    def fit(method):
        with strategy.scope():
            model = problems.network(keras)
            model.compile(optimizer=rs.DistributedOptimizer(sgd(0.05), method), loss="mse")
        model.fit(problems.dataset(64, 16), epochs=2, verbose=0)
        return model

    auto, dense = fit(None), fit(rs.Dense())
    return {
        "auto": np.concatenate([w.ravel() for w in auto.get_weights()]),
        "dense": np.concatenate([w.ravel() for w in dense.get_weights()]),
        "table": str(auto.optimizer.exchange.settled),
        "explained": str(auto.optimizer.explain()),
    }


@pytest.mark.parametrize("family", ["keras3", "tf_keras", "legacy"])
def test_a_small_model_stays_dense(family):
    first, second = run_workers(fit_with_auto, args=(family,), timeout=240)
    for result in (first, second):
        np.testing.assert_array_equal(result["auto"], result["dense"])
    assert first["table"] == second["table"]
    assert "2 workers" in first["table"] and "MB/s" in first["table"]
    assert "RedSync ms" in first["table"]
    assert "RedSync" not in first["explained"]
