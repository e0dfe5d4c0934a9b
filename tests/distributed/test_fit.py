"""Keras 3's `fit`, `evaluate`, `predict`, saving and loading on two real workers."""

import numpy as np
import pytest

from tests import total_state
from tests.deep import DEEP
from tests.distributed.cluster import run_workers


def fit_and_save(folder):
    """Fit with a combination of common Keras features; save, load, restore."""
    import gc
    import pathlib
    import weakref

    import keras
    import tensorflow as tf

    import tf_redsync as rs
    from tests.distributed import problems

    strategy = rs.MultiWorkerMirroredStrategy()
    own_folder = pathlib.Path(folder) / f"worker_{problems.rank()}"
    own_folder.mkdir()

    def compiled(**options):
        with strategy.scope():
            model = problems.network(keras, normalized=True)
            optimizer = rs.DistributedOptimizer(
                keras.optimizers.SGD(0.05, momentum=0.5), rs.RedSync(density=0.1, dense_below=16)
            )
            model.compile(optimizer=optimizer, loss="mse", metrics=["mae"], **options)
        return model

    result = {}
    model = compiled(steps_per_execution=3)
    train, test = problems.dataset(59, 16), problems.dataset(37, 16)
    history = model.fit(train, validation_data=test, epochs=4, verbose=0)
    result["loss"], result["val_loss"] = history.history["loss"], history.history["val_loss"]
    norm = model.layers[1]
    # The local copies, not an aggregate: this worker normalizes with them.
    local = strategy.experimental_local_results(norm.moving_mean.value)[0]
    result["moving_mean"] = local.numpy()
    result["digest"] = problems.digest(model)
    evaluated = model.evaluate(test, verbose=0, return_dict=True)
    x, y = problems.regression(37)
    predicted = model.predict(problems.dataset(37, 16).map(lambda x, y: x), verbose=0)
    result["predicted"] = predicted
    result["mae"] = evaluated["mae"]
    result["mae_by_hand"] = float(np.abs(predicted - y).mean())

    path = own_folder / "model.keras"
    residual = total_state.total(model.optimizer.exchange)
    model.save(path)
    with strategy.scope():
        loaded = keras.saving.load_model(path)
    restored = total_state.total(loaded.optimizer.exchange)
    result["state_names"] = sorted(residual)
    result["residual_norm"] = float(
        sum(np.square(v).sum() for n, v in residual.items() if "residual" in n)
    )
    result["residual_error"] = max(float(np.abs(residual[n] - restored[n]).max()) for n in residual)
    result["weights_equal"] = problems.digest(loaded) == problems.digest(model)
    result["iterations"] = int(loaded.optimizer.iterations.numpy())
    first = model.optimizer.inner_optimizer.variables
    second = loaded.optimizer.inner_optimizer.variables
    result["slots_equal"] = all(
        np.array_equal(a.numpy(), b.numpy()) for a, b in zip(first, second, strict=True)
    )
    loaded.fit(train, epochs=1, verbose=0)

    checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    prefix = checkpoint.save(str(own_folder / "checkpoint"))
    fresh = compiled()
    with strategy.scope():
        fresh.optimizer.build(fresh.trainable_variables)
    restore = tf.train.Checkpoint(model=fresh, optimizer=fresh.optimizer).restore(prefix)
    restore.assert_existing_objects_matched()
    again = total_state.total(fresh.optimizer.exchange)
    result["checkpoint_error"] = max(float(np.abs(residual[n] - again[n]).max()) for n in residual)
    result["checkpoint_weights_equal"] = problems.digest(fresh) == problems.digest(model)

    exchanges = [weakref.ref(m.optimizer.exchange) for m in (model, fresh)]
    del model, loaded, fresh, checkpoint, restore, history, norm, local, first, second
    gc.collect()
    result["freed"] = [exchange() is None for exchange in exchanges]
    return result


@pytest.fixture(scope="module")
def fitted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    return folder, run_workers(fit_and_save, args=(str(folder),), timeout=300)


def test_fit_with_steps_per_execution_and_validation(fitted):
    first, second = fitted[1]
    assert np.isfinite(first["loss"]).all() and first["loss"][-1] < first["loss"][0]
    assert first["digest"] == second["digest"]
    np.testing.assert_array_equal(first["loss"], second["loss"])
    np.testing.assert_array_equal(first["val_loss"], second["val_loss"])


def test_models_are_freed(fitted):
    """As in a search over many models in one process; the strategy keeps the last one."""
    assert [result["freed"].tolist() for result in fitted[1]] == [[True] * 2] * 2


def test_moving_statistics_agree(fitted):
    first, second = fitted[1]
    assert np.abs(first["moving_mean"]).max() > 0
    np.testing.assert_array_equal(first["moving_mean"], second["moving_mean"])


def test_evaluate_and_predict_see_every_row_once(fitted):
    first, second = fitted[1]
    assert first["predicted"].shape == (37, 1)
    np.testing.assert_array_equal(first["predicted"], second["predicted"])
    np.testing.assert_allclose(first["mae"], first["mae_by_hand"], rtol=1e-5)


def test_keras_file_keeps_optimizer_and_residuals(fitted):
    for result in fitted[1]:
        assert result["weights_equal"] and result["slots_equal"]
        assert result["iterations"] == 4 * 4
        assert any("residual" in name for name in result["state_names"])
        assert result["residual_norm"] > 0
        assert result["residual_error"] < 1e-6


def test_checkpoint_keeps_residuals(fitted):
    for result in fitted[1]:
        assert result["checkpoint_weights_equal"]
        assert result["checkpoint_error"] < 1e-6


def test_file_loads_into_the_plain_optimizer(fitted):
    """As `docs/saving.md` says for readers without the wrapper: in one process, with one worker."""
    import keras

    path = fitted[0] / "worker_0" / "model.keras"
    model = keras.saving.load_model(path, compile=False)
    model.compile(optimizer=keras.optimizers.SGD(0.05, momentum=0.5), loss="mse")
    model.optimizer.build(model.trainable_variables)
    model.load_weights(path)
    assert int(model.optimizer.iterations.numpy()) == 4 * 4
    momentum = [v for v in model.optimizer.variables if "momentum" in v.path]
    assert momentum and all(np.abs(v.numpy()).max() > 0 for v in momentum)


LIBRARIES = ("keras", "tf_keras") if DEEP else ("keras",)


def fit_with_changing_sizes():
    """Weights and bytes of a warm-up of densities, with one and four steps per execution."""
    import importlib

    import tf_redsync as rs
    from tests.distributed import problems

    strategy = rs.MultiWorkerMirroredStrategy()
    found = {}
    for family in map(importlib.import_module, LIBRARIES):
        for steps in (1, 4):
            with strategy.scope():
                model = problems.network(family)
                method = rs.RedSync(
                    density=0.05,
                    dense_below=0,
                    warm_up=rs.ExponentialWarmUp(5, (0.5, 0.2)),
                )
                optimizer = rs.DistributedOptimizer(family.optimizers.SGD(0.05), method)
                model.compile(optimizer=optimizer, loss="mse", steps_per_execution=steps)
            model.fit(problems.dataset(48, 12), epochs=4, verbose=0)  # 16 steps
            name = f"{family.__name__}/{steps}"
            found[f"{name}/weights"] = np.concatenate([w.ravel() for w in model.get_weights()])
            found[f"{name}/bytes"] = float(optimizer.exchange.bytes_sent.numpy())
    return found


def test_message_size_changes_within_one_execution():
    first, second = run_workers(fit_with_changing_sizes, timeout=200)
    for family in LIBRARIES:
        weights = [w[f"{family}/{n}/weights"] for w in (first, second) for n in (1, 4)]
        for other in weights[1:]:
            np.testing.assert_allclose(other, weights[0], rtol=1e-5, atol=1e-6)
        assert first[f"{family}/1/bytes"] == first[f"{family}/4/bytes"] > 0
