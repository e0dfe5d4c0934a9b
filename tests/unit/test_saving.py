"""Saving and loading in one process on two replicas, as docs/saving.md promises."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import tf_redsync as rs
from tests import total_state
from tests.distributed import problems
from tests.distributed.problems import network

METHOD = rs.RedSync(density=0.1, dense_below=16)


@pytest.fixture
def strategy(mirrored):
    """Two replicas."""
    return mirrored(2)


@pytest.fixture
def train_model(strategy):
    """Returns a function that trains in the strategy and returns model and optimizer."""

    def train(library, optimizer, steps=3):
        with strategy.scope():
            model = network(library)
            inner = optimizer()
        problems.train_loop(strategy, model, inner, problems.dataset(8 * steps, 8), 1)
        return model, inner

    return train


def total_residuals(optimizer):
    state = total_state.total(optimizer.exchange)
    return {n: a for n, a in state.items() if "residual" in n}


def sum_of_residuals(optimizer):
    return sum(np.abs(a).sum() for a in total_residuals(optimizer).values())


def assert_equal_totals(a, b):
    assert a.keys() == b.keys() and a
    for name in a:
        np.testing.assert_allclose(a[name], b[name], rtol=1e-6, atol=1e-7)
    assert sum(np.abs(v).sum() for v in a.values()) > 0


def test_unwrapped_models_file_loads_into_the_wrapper(strategy, tmp_path):
    with strategy.scope():
        plain = network(keras)
        plain.compile(keras.optimizers.Adam(0.01), "mse")
    plain.fit(problems.dataset(24, 8), verbose=0)
    path = str(tmp_path / "plain.keras")
    plain.save(path)
    with strategy.scope():
        model = keras.saving.load_model(path, compile=False)
        model.compile(rs.DistributedOptimizer(keras.optimizers.Adam(0.01), METHOD), "mse")
        model.optimizer.build(model.trainable_variables)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", UserWarning)
            model.load_weights(path)
        texts = [str(w.message) for w in caught]
        assert len(texts) == 1 and "iteration 3" in texts[0] and "exchange" in texts[0]
    prefix = tf.train.Checkpoint(model=plain, optimizer=plain.optimizer).save(str(tmp_path / "c"))
    with strategy.scope():
        again = network(keras)
        wrapped = rs.DistributedOptimizer(keras.optimizers.Adam(0.01), METHOD)
        wrapped.build(again.trainable_variables)
        restored = tf.train.Checkpoint(model=again, optimizer=wrapped.inner_optimizer)
        restored.restore(prefix).assert_existing_objects_matched()
    for optimizer in (model.optimizer, wrapped):
        assert int(optimizer.iterations.numpy()) == 3
        for found, expected in zip(optimizer.variables, plain.optimizer.variables, strict=True):
            np.testing.assert_array_equal(found.numpy(), expected.numpy())


def test_other_layout_is_rejected(strategy, tmp_path):
    def compiled(method):
        with strategy.scope():
            model = network(keras)
            model.compile(rs.DistributedOptimizer(keras.optimizers.SGD(0.01), method), "mse")
            model.optimizer.build(model.trainable_variables)
        return model

    path = str(tmp_path / "a.keras")
    saved = compiled(METHOD)
    saved.save(path)
    other = compiled(rs.RedSync(density=0.1, dense_below=16, momentum=0.9))
    other.fit(problems.dataset(24, 8), verbose=0)
    assert sum_of_residuals(other.optimizer) > 0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        other.load_weights(path)  # weights and optimizer variables only
    texts = [str(w.message) for w in caught]
    assert len(texts) == 1 and "exchange" in texts[0] and "velocity" in texts[0], texts
    assert sum_of_residuals(other.optimizer) == int(other.optimizer.exchange.step.numpy()) == 0
    total = total_state.total(saved.optimizer.exchange)
    with pytest.raises(ValueError, match="another model or method") as error:
        total_state.restore(other.optimizer.exchange, total)
    assert "velocity" in str(error.value)


def test_exchange_starts_anew_with_an_optimizer_that_keras_does_not_load(strategy, tmp_path):
    """Its schedule begins at step 0, so the residual and the counters of the file do not apply."""

    def compiled(rate):
        with strategy.scope():
            model = network(keras)
            model.compile(rs.DistributedOptimizer(keras.optimizers.SGD(rate), METHOD), "mse")
            model.optimizer.build(model.trainable_variables)
        return model

    saved = compiled(0.01)
    saved.fit(problems.dataset(24, 8), verbose=0)
    assert sum_of_residuals(saved.optimizer) > 0
    path = str(tmp_path / "a.keras")
    saved.save(path)
    other = compiled(keras.optimizers.schedules.CosineDecay(0.01, 100))
    with pytest.warns(UserWarning, match="Skipping variable loading"):
        other.load_weights(path)
    np.testing.assert_array_equal(other.get_weights()[0], saved.get_weights()[0])
    assert int(tf.convert_to_tensor(other.optimizer.iterations)) == 0
    assert int(other.optimizer.exchange.step.numpy()) == 0
    assert sum_of_residuals(other.optimizer) == 0


@pytest.mark.parametrize("optimizer", [None, keras.optimizers.Adam])
def test_weights_without_a_state_start_with_empty_residuals(strategy, tmp_path, optimizer):
    with strategy.scope():
        plain, model = network(keras), network(keras)
        model.compile(rs.DistributedOptimizer(keras.optimizers.Adam(0.01), METHOD), "mse")
        model.optimizer.build(model.trainable_variables)
    if optimizer is not None:
        with strategy.scope():
            plain.compile(optimizer(0.01), "mse")
        plain.fit(problems.dataset(40, 8), verbose=0)
    path = str(tmp_path / "plain.weights.h5")
    plain.save_weights(path)
    if optimizer is None:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "the optimizer resumes")
            model.load_weights(path)
    model.fit(problems.dataset(24, 8), verbose=0)
    assert sum_of_residuals(model.optimizer) > 0
    with pytest.warns(UserWarning, match="the optimizer resumes.*undelivered gradients are lost"):
        model.load_weights(path)
    assert problems.digest(model) == problems.digest(plain)
    assert sum_of_residuals(model.optimizer) == 0


@pytest.mark.parametrize("name", ["SGD", "Adagrad"])
def test_weights_load_before_the_build(strategy, tmp_path, name):
    """Keras loads only the weights into an unbuilt optimizer with slots, and warns."""

    def compiled():
        with strategy.scope():
            model = network(keras)
            inner = getattr(keras.optimizers, name)(0.01)
            model.compile(rs.DistributedOptimizer(inner, METHOD), "mse")
        return model

    paths = [str(tmp_path / f"{i}.weights.h5") for i in range(2)]
    model, loaded, anew = compiled(), compiled(), compiled()
    model.fit(problems.dataset(24, 8), verbose=0)
    model.save_weights(paths[0])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        loaded.load_weights(paths[0])
        loaded.save_weights(paths[1])
    texts = [str(w.message)[:8] for w in caught if w.category is UserWarning]
    assert texts == ["Skipping"] * (name == "Adagrad")
    anew.set_weights(model.get_weights())
    if name == "SGD":
        first, second = map(rs.read_worker_state, paths)
        assert first.keys() == second.keys() and all((first[n] == second[n]).all() for n in first)
    for continued in (model, loaded, anew):
        continued.fit(problems.dataset(24, 8), verbose=0)
    expected = model if name == "SGD" else anew
    assert total_state.total(loaded.optimizer.exchange)["step"] == expected.optimizer.iterations
    assert problems.digest(loaded) == problems.digest(expected)
    assert problems.digest(model) != problems.digest(anew)


def test_auto_starts_with_empty_residuals_after_another_choice(strategy, train_model, tmp_path):
    saved, optimizer = train_model(
        keras, lambda: rs.DistributedOptimizer(keras.optimizers.SGD(0.05), METHOD)
    )
    arrays = total_state.total(optimizer.exchange)
    with strategy.scope():
        model = network(keras)
        model.compile(rs.DistributedOptimizer(keras.optimizers.SGD(0.05)), "mse")
        model.optimizer.build(model.trainable_variables)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        total_state.restore(model.optimizer.exchange, arrays)
    assert len(caught) == 1 and "residuals" in str(caught[0].message), caught
    assert int(model.optimizer.exchange.step.numpy()) == 3
    path = str(tmp_path / "auto.keras")
    model.save(path)
    with strategy.scope():
        loaded = keras.saving.load_model(path)
    assert loaded.optimizer.exchange.policy == rs.Auto()


def test_checkpoint_restored_after_and_before_the_build(strategy, train_model, tmp_path):
    model, optimizer = train_model(
        keras, lambda: rs.DistributedOptimizer(keras.optimizers.SGD(0.05, momentum=0.9), METHOD)
    )
    prefix = tf.train.Checkpoint(model=model, optimizer=optimizer).save(str(tmp_path / "c"))
    for before in (False, True):
        with strategy.scope():
            fresh_model = network(keras)
            fresh = rs.DistributedOptimizer(keras.optimizers.SGD(0.05, momentum=0.9), METHOD)
            if before:
                tf.train.Checkpoint(model=fresh_model, optimizer=fresh).restore(prefix)
                fresh.build(fresh_model.trainable_variables)
            else:
                fresh.build(fresh_model.trainable_variables)
                tf.train.Checkpoint(model=fresh_model, optimizer=fresh).restore(prefix)
        assert int(fresh.exchange.step.numpy()) == 3, before
        assert_equal_totals(total_residuals(optimizer), total_residuals(fresh))
        for a, b in zip(fresh.variables, optimizer.variables, strict=True):
            np.testing.assert_array_equal(a.numpy(), b.numpy())


def test_tf_keras_checkpoint(strategy, train_model, tmp_path):
    model, optimizer = train_model(
        tf_keras, lambda: rs.DistributedOptimizer(tf_keras.optimizers.Adam(0.05), METHOD)
    )
    prefix = tf.train.Checkpoint(model=model, optimizer=optimizer).save(str(tmp_path / "c"))
    with strategy.scope():
        fresh_model = network(tf_keras)
        fresh = rs.DistributedOptimizer(tf_keras.optimizers.Adam(0.05), METHOD)
        fresh.build(fresh_model.trainable_variables)
        tf.train.Checkpoint(model=fresh_model, optimizer=fresh).restore(prefix)
    assert_equal_totals(total_residuals(optimizer), total_residuals(fresh))
    for a, b in zip(fresh.variables, optimizer.variables, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())


def test_legacy_checkpoint(strategy, train_model, tmp_path):
    def make():
        return rs.DistributedOptimizer(tf_keras.optimizers.legacy.Adam(0.05), METHOD)

    model, optimizer = train_model(tf_keras, make)
    prefix = tf.train.Checkpoint(model=model, optimizer=optimizer).save(str(tmp_path / "c"))
    with strategy.scope():
        fresh_model = network(tf_keras)
        fresh = make()
        fresh.build(fresh_model.trainable_variables)
        tf.train.Checkpoint(model=fresh_model, optimizer=fresh).restore(prefix)
    assert_equal_totals(total_residuals(optimizer), total_residuals(fresh))
    assert len(fresh.variables()) == 1 + 2 * len(model.trainable_variables)
    for a, b in zip(fresh.variables(), optimizer.variables(), strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())


def test_tf_keras_models_save_and_load(strategy, tmp_path):
    with strategy.scope():
        model = network(tf_keras)
        model.compile(rs.DistributedOptimizer(tf_keras.optimizers.SGD(0.05), METHOD), "mse")
    model.fit(problems.dataset(24, 8), verbose=0)
    path = str(tmp_path / "model.keras")
    model.save(path)
    with strategy.scope():
        loaded = tf_keras.models.load_model(path)
    assert type(loaded.optimizer) is type(model.optimizer)
    assert int(loaded.optimizer.iterations.numpy()) == 3
    assert problems.digest(loaded) == problems.digest(model)
    loaded.fit(problems.dataset(24, 8), verbose=0)


def test_inner_optimizer_cannot_be_used_alone(strategy):
    with strategy.scope():
        wrapped = rs.DistributedOptimizer(keras.optimizers.SGD(0.05), METHOD)
        with pytest.raises(ValueError, match="already wrapped"):
            rs.DistributedOptimizer(wrapped.inner_optimizer, METHOD)


@pytest.mark.parametrize(
    "form", [pytest.param("keras", marks=pytest.mark.deep), "weights", "checkpoint"]
)
def test_lora_stops_after_loading_a_keras_file(strategy, tmp_path, form):
    """If Keras's files keep LoRA's factors, correct docs/saving.md and remove the warning."""

    def made():
        keras.utils.set_random_seed(0)
        with strategy.scope():
            model = network(keras)
            model.layers[0].enable_lora(2)
            model.compile(rs.DistributedOptimizer(keras.optimizers.SGD(0.01), METHOD), "mse")
            model.optimizer.build(model.trainable_variables)
        return model

    def factors(model):
        return [v.numpy() for v in model.trainable_variables if "lora_" in v.path]

    def fit(model):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model.fit(problems.dataset(24, 8), verbose=0)
        return [str(w.message) for w in caught if "LoRA factors" in str(w.message)]

    model, path = (
        made(),
        str(tmp_path / {"keras": "x.keras", "weights": "x.weights.h5"}.get(form, "x")),
    )
    assert not fit(model)
    trained = factors(model)
    assert all(np.any(factor) for factor in trained)
    if form == "checkpoint":
        tf.train.Checkpoint(model=model, optimizer=model.optimizer).write(path)
        loaded = made()
        tf.train.Checkpoint(model=loaded, optimizer=loaded.optimizer).read(path)
        np.testing.assert_equal(factors(loaded), trained)
        assert not fit(loaded)
        return
    if form == "keras":
        model.save(path)
        with strategy.scope():
            loaded = keras.models.load_model(path)
    else:
        model.save_weights(path)
        loaded = made()
        loaded.load_weights(path)
    assert not any(np.any(factor) for factor in factors(loaded))
    (text,) = fit(loaded)
    assert "lora_kernel_a" in text
    layer = loaded.layers[0]
    with strategy.scope():
        layer.lora_kernel_a.assign(trained[0])
    assert not fit(loaded) and np.any(layer.lora_kernel_b.numpy())
