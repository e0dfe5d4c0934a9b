"""A `LossScaleOptimizer` may be inside or outside of the wrapper."""

import itertools

import numpy as np
import pytest

from tests.distributed.cluster import LEGACY, run_workers

ORDERS = ("inside", "around", "by compile")


def train(families):
    """By family and order: weights after a few steps, one of which is non-finite on worker 1."""
    import keras
    import tensorflow as tf
    import tf_keras

    import tf_redsync as rs
    from tests.distributed import problems

    strategy, found = rs.MultiWorkerMirroredStrategy(), {}
    x, y = (a.copy() for a in problems.regression(64))
    x[24:32] = 1e30  # worker 1's rows of the second batch
    data = problems.sharded(tf.data.Dataset.from_tensor_slices((x, y)).batch(16))
    for family in families:
        library = keras if family == "keras3" else tf_keras
        library.mixed_precision.set_global_policy("mixed_float16")
        optimizers = library.optimizers.legacy if family == "legacy" else library.optimizers
        scale = {"keras3": optimizers, "tf_keras": library.mixed_precision}.get(
            family, library.mixed_precision
        )

        def make_optimizer(order, library=library, optimizers=optimizers, scale=scale):
            inner = optimizers.SGD(0.05)
            method = rs.RedSync(density=0.1, dense_below=16)
            if order == "inside":
                inner = scale.LossScaleOptimizer(inner)
            wrapped = rs.DistributedOptimizer(inner, method)
            return wrapped, scale.LossScaleOptimizer(wrapped) if order == "around" else wrapped

        for order in ORDERS:
            key = f"{family}, {order}"
            with strategy.scope():
                model = problems.network(library)
                wrapped, given = make_optimizer(order)
                model.compile(given, "mse")
            assert model.optimizer is wrapped, key
            model.fit(data, epochs=2, verbose=0, shuffle=False)
            weights = np.concatenate([np.ravel(w) for w in model.get_weights()])
            found[key] = weights
            found[f"{key}, inside"] = type(wrapped.inner_optimizer).__name__
            found[f"{key}, skipped"] = int(wrapped.exchange.skipped.numpy())
            found[f"{key}, sent"] = float(wrapped.exchange.bytes_sent.numpy())
        library.mixed_precision.set_global_policy("float32")
    return found


@pytest.mark.parametrize(
    # tf_keras's own loss scale: test_habits.py
    "families",
    [["keras3"], pytest.param(["tf_keras", "legacy"], marks=pytest.mark.deep)],
)
def test_both_orders_train_alike(families):
    for seen in run_workers(train, args=(families,), env=LEGACY, timeout=200):
        for family in families:
            for order in ORDERS:
                key = f"{family}, {order}"
                np.testing.assert_array_equal(seen[key], seen[f"{family}, inside"])
                assert "LossScale" in str(seen[f"{key}, inside"])
                assert np.isfinite(seen[key]).all() and seen[f"{key}, sent"] > 0
                assert seen[f"{key}, skipped"] == 2  # of 8 steps


def train_methods_with_own_points():
    """Weights with and without a loss scale, and whether each step moved them."""
    import keras
    import tensorflow as tf

    import tf_redsync as rs
    from tests.distributed import problems

    strategy, found = rs.MultiWorkerMirroredStrategy(), {}
    warm = {"warm_up": rs.DenseWarmUp(2)}
    cases = {
        "CDSGD": (rs.CDSGD(warm_up=None, dense_below=16), {}),
        "GMCPlus": (rs.contrib.GMCPlus(dense_below=16), warm),
    }

    def fit(x, y, model, *callbacks):
        data = problems.sharded(tf.data.Dataset.from_tensor_slices((x, y)).batch(16))
        model.fit(data, verbose=0, shuffle=False, callbacks=list(callbacks))
        return np.concatenate([np.ravel(w) for w in model.get_weights()])

    for name, (method, options) in cases.items():
        for scaled in (False, True):
            inner = keras.optimizers.SGD(0.05)
            if scaled:
                inner = keras.optimizers.LossScaleOptimizer(inner, initial_scale=64.0)
            with strategy.scope():
                model = problems.network(keras)
                model.compile(rs.DistributedOptimizer(inner, method, **options), "mse")
            x, y = problems.regression(80)
            found[f"{name}, {scaled}"] = fit(x, y, model)
        points = []

        class RecordWeights(keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None, points=points):
                own = [keras.ops.convert_to_numpy(v) for v in self.model.trainable_variables]
                points.append(np.concatenate(list(map(np.ravel, own))))

        x[56:64] = np.inf  # worker 1's rows of the fourth batch
        found[f"{name}, end"] = fit(x, y, model, RecordWeights())
        found[f"{name}, moved"] = [bool(np.any(a != b)) for a, b in itertools.pairwise(points)]
    return found


def test_methods_with_own_points():
    """The points depend on gradients, which the LossScaleOptimizer computes in a branch."""
    both = run_workers(train_methods_with_own_points)
    for seen in both:
        for name in ("CDSGD", "GMCPlus"):
            np.testing.assert_array_equal(seen[f"{name}, True"], seen[f"{name}, False"], name)
            assert list(seen[f"{name}, moved"]) == [True, True, False, True]
            assert np.isfinite(seen[f"{name}, end"]).all()
            np.testing.assert_array_equal(seen[f"{name}, end"], both[0][f"{name}, end"], name)
