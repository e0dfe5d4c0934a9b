"""Saved models load with every wrapped optimizer."""

import json

import keras
import numpy as np
import pytest

import tf_redsync as rs
from tests.loops import loop
from tests.optimizers import FAMILIES, all_of, library_of, needs
from tf_redsync.keras import momentum

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # one worker, accuracy
METHOD = rs.RedSync(density=0.1, dense_below=0)


def train_and_save(library, optimizer, path):
    """Trains one step with an optimizer and saves the model."""
    model = library.Sequential([library.layers.Input((3,)), library.layers.Dense(2)])
    model.compile(optimizer, "mse", run_eagerly=True)
    model.train_on_batch(np.ones([4, 3], "float32"), np.ones([4, 2], "float32"))
    model.save(path)
    return model


def numeric_values(config):
    """Returns the numbers of a config by name; legacy optimizers have float32 variables there."""
    return dict(momentum.config_numbers(json.loads(json.dumps(config, default=float))))


@pytest.mark.deep
@loop(("family", "name"), [(f, n) for f in FAMILIES for n in all_of(f)])
def test_round_trip_of_every_optimizer(tmp_path, family, name):
    library = library_of(family)
    path = str(tmp_path / f"{family}_{name}.keras")
    optimizer = rs.DistributedOptimizer(all_of(family)[name](), METHOD)
    model = train_and_save(library, optimizer, path)
    loaded = library.models.load_model(path)
    inner = loaded.optimizer.inner_optimizer
    assert type(inner) is type(model.optimizer.inner_optimizer)
    assert loaded.optimizer.method == METHOD
    before = numeric_values(model.optimizer.inner_optimizer.get_config())
    assert numeric_values(inner.get_config()) == pytest.approx(before, rel=1e-6) and before
    if family in ("keras3", "tf_keras"):  # tf_keras saves no variables of legacy optimizers
        assert int(loaded.optimizer.iterations.numpy()) == 1
    loaded.train_on_batch(np.ones([4, 3], "float32"), np.ones([4, 2], "float32"))


@needs("OptimizerMap")
def test_round_trip_of_several_optimizers_in_one(tmp_path):
    choice = keras.optimizers.OptimizerMap(
        rs.DistributedOptimizer(keras.optimizers.SGD(0.1), METHOD),
        {".*kernel": rs.DistributedOptimizer(keras.optimizers.Lamb(0.1), METHOD)},
    )
    path = str(tmp_path / "several.keras")
    train_and_save(keras, keras.optimizers.MultiOptimizer(choice), path)
    loaded = keras.models.load_model(path)
    inner = {type(o.inner_optimizer).__name__ for o in loaded.optimizer.optimizers}
    assert inner == {"SGD", "Lamb"}
    loaded.train_on_batch(np.ones([4, 3], "float32"), np.ones([4, 2], "float32"))
