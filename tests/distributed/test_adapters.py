"""Every optimizer family trains on two real workers, with `fit` and with a custom loop."""

import numpy as np
import pytest

from tests.distributed.cluster import LEGACY, run_workers


def train_family(family, fit_on_plain_strategy):
    """Train with `fit` and with a loop; return losses and the weights' hashes after every step."""

    import tensorflow as tf

    import tf_redsync as rs
    from tests.distributed import problems

    if fit_on_plain_strategy:
        strategy = tf.distribute.MultiWorkerMirroredStrategy()
    else:
        strategy = rs.MultiWorkerMirroredStrategy()
    if family == "keras3":
        import keras
    else:
        import tf_keras as keras

    def optimizer():
        if family == "keras3":
            inner = keras.optimizers.Adam(0.02)
        elif family == "tf_keras":
            inner = keras.optimizers.SGD(0.05)
        elif family == "Lookahead":
            inner = rs.addons.load().optimizers.Lookahead(keras.optimizers.legacy.SGD(0.05))
        elif family == "SGDW":
            inner = rs.addons.load().optimizers.SGDW(weight_decay=1e-4, learning_rate=0.05)
        else:
            inner = getattr(rs.addons.load().optimizers, family)(0.02)
        return rs.DistributedOptimizer(inner, rs.RedSync(density=0.1, dense_below=16))

    digests = []

    class Digest(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            digests.append(problems.digest(self.model))

    with strategy.scope():
        model = problems.network(keras, normalized=True)
        model.compile(optimizer=optimizer(), loss="mse")
    # 59 rows in global batches of 16: the last batch is short, and odd for two workers.
    data = problems.dataset(59, 16).repeat(3)
    history = model.fit(data, epochs=2, verbose=0, callbacks=[Digest()])
    fit_loss = history.history["loss"]

    with strategy.scope():
        looped = problems.network(keras)
        loop_optimizer = optimizer()
    data = problems.dataset(64, 16)
    loop_loss, loop_digests = problems.train_loop(strategy, looped, loop_optimizer, data, 6)
    config = loop_optimizer.get_config()
    clone = type(loop_optimizer).from_config(config)
    return {
        "fit_loss": fit_loss,
        "loop_loss": loop_loss,
        "digests": digests + loop_digests,
        "steps": int(model.optimizer.exchange.step.numpy()),
        "skipped": int(model.optimizer.exchange.skipped.numpy()),
        "iterations": int(model.optimizer.iterations.numpy()),
        "bytes": model.optimizer.bytes_per_step(),
        "config_round_trip": clone.get_config() == config,
    }


@pytest.mark.parametrize(
    ("family", "plain"),
    [
        ("keras3", False),
        ("tf_keras", True),
        pytest.param("tf_keras", False, marks=pytest.mark.deep),
        ("LAMB", False),
        pytest.param("SGDW", False, marks=pytest.mark.deep),
        pytest.param("LazyAdam", False, marks=pytest.mark.deep),
        ("Lookahead", True),
    ],
)
def test_family_trains_with_equal_weights_on_all_workers(family, plain):
    env = None if family == "keras3" else LEGACY
    first, second = run_workers(train_family, args=(family, plain), env=env, timeout=240)
    assert list(first["digests"]) == list(second["digests"])
    assert len(set(first["digests"])) == len(first["digests"])  # every step changed the weights
    np.testing.assert_array_equal(first["fit_loss"], second["fit_loss"])
    for losses in (first["fit_loss"], first["loop_loss"]):
        assert np.isfinite(losses).all()
        assert losses[-1] < 0.6 * losses[0]
    assert first["steps"] == first["iterations"] == 2 * 3 * 4
    assert first["skipped"] == 0
    assert first["bytes"] > 0
    assert first["config_round_trip"]
