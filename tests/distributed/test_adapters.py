"""Every optimizer family trains on two real workers, with `fit` and with a custom loop."""

import numpy as np
import pytest

from tests.deep import DEEP
from tests.distributed.cluster import LEGACY, run_workers


def train_families(families, plain):
    """Train each family with `fit` and, for `plain`, a loop; returns `FAMILY.losses` and so on."""
    import tensorflow as tf

    import tf_redsync as rs

    strategy = (tf.distribute if plain else rs).MultiWorkerMirroredStrategy()
    found = {}
    for family, looped in families:
        trained = train_family(strategy, family, looped)
        found |= {f"{family}.{key}": value for key, value in trained.items()}
    if plain:
        found["disagreement"] = train_with_different_methods(strategy)
    return found


def train_family(strategy, family, looped):
    """Losses and weight hashes of every step."""
    import tf_redsync as rs
    from tests.distributed import problems

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

    digests, loop_loss = [], []

    class Digest(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            digests.append(problems.digest(self.model))

    with strategy.scope():
        model = problems.network(keras, normalized=True)
        model.compile(optimizer=optimizer(), loss="mse")
    # 59 rows in global batches of 16: the last batch is short and its rows are odd for two workers.
    data = problems.dataset(59, 16).repeat(3)
    history = model.fit(data, epochs=2, verbose=0, callbacks=[Digest()])
    if looped:
        with strategy.scope():
            other, loop_optimizer = problems.network(keras), optimizer()
        data = problems.dataset(64, 16)
        loop_loss, loop_digests = problems.train_loop(strategy, other, loop_optimizer, data, 6)
        digests += loop_digests
    config = model.optimizer.get_config()
    clone = type(model.optimizer).from_config(config)
    return {
        "losses": history.history["loss"],
        "loop_losses": loop_loss,
        "digests": digests,
        "steps": int(model.optimizer.exchange.step.numpy()),
        "skipped": int(model.optimizer.exchange.skipped.numpy()),
        "iterations": int(model.optimizer.iterations.numpy()),
        "bytes": model.optimizer.bytes_per_step(),
        "config_round_trip": clone.get_config() == config,
    }


def train_with_different_methods(strategy):
    """Error text for workers with different methods under TensorFlow's strategy."""
    import tf_keras as keras

    import tf_redsync as rs
    from tests.distributed import problems

    with strategy.scope():
        model = problems.network(keras)
        method = rs.RedSync(density=0.1 + 0.1 * problems.rank())
        optimizer = rs.DistributedOptimizer(keras.optimizers.SGD(0.1), method)
        try:
            optimizer.build(model.trainable_variables)
        except ValueError as error:
            return str(error)
    return "nothing"


LOOPED, FITTED = True, False  # more loops: test_habits.py, test_user_code.py
OURS = [(f, LOOPED) for f in ("keras3", "LAMB", "tf_keras", "SGDW", "LazyAdam")]
PLAIN = [("tf_keras", LOOPED), ("Lookahead", LOOPED if DEEP else FITTED)]


# Other tests ask the same of Keras 3: test_fit.py, test_habits.py, test_equivalence.py,
# test_user_code.py and test_methods.py.
@pytest.mark.parametrize(
    ("families", "plain"),
    [
        pytest.param(OURS, False, id="ours", marks=pytest.mark.deep),
        pytest.param(PLAIN, True, id="plain strategy"),
    ],
)
def test_families_train_with_equal_weights_on_all_workers(families, plain):
    first, second = run_workers(train_families, args=(families, plain), env=LEGACY, timeout=240)
    for family, looped in families:
        one, other = (
            {key.split(".")[1]: v for key, v in worker.items() if key.startswith(f"{family}.")}
            for worker in (first, second)
        )
        assert list(one["digests"]) == list(other["digests"]), family
        # every step changes the weights
        assert len(set(one["digests"])) == len(one["digests"]), family
        np.testing.assert_array_equal(one["losses"], other["losses"], family)
        for losses in [one["losses"], one["loop_losses"]] if looped else [one["losses"]]:
            assert np.isfinite(losses).all(), family
            assert losses[-1] < 0.6 * losses[0], family
        assert one["steps"] == one["iterations"] == 2 * 3 * 4, family
        assert one["skipped"] == 0 and one["bytes"] > 0 and one["config_round_trip"], family
    if plain:
        for worker in (first, second):
            assert "the workers disagree" in worker["disagreement"]
            assert all(text in worker["disagreement"] for text in ("0.1", "0.2"))
