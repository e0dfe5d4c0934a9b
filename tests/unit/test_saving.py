"""Saving and loading in one process, on two replicas: what docs/saving.md promises."""

import os
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

from tests.distributed import forks
from tests.distributed.cluster import ENVIRONMENT

PROGRAM = """
import sys, os
import numpy as np
import tensorflow as tf
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2)
import keras, tf_keras
import tf_redsync as rs
from tests.distributed import problems

folder = sys.argv[1]
strategy = tf.distribute.MirroredStrategy(["cpu:0", "cpu:1"])
METHOD = rs.RedSync(density=0.1, dense_below=16)


def network(library):
    return problems.network(library)


def trained(library, optimizer, steps=3):
    with strategy.scope():
        model = network(library)
        made = optimizer()
    problems.train_loop(strategy, model, made, problems.dataset(8 * steps, 8), 1)
    return model, made


def total(optimizer):
    state = optimizer.exchange.total_state()
    return {n: a for n, a in state.items() if "residual" in n}


def same(a, b):
    assert a.keys() == b.keys() and a
    for name in a:
        np.testing.assert_allclose(a[name], b[name], rtol=1e-6, atol=1e-7)
    assert sum(np.abs(v).sum() for v in a.values()) > 0
"""

CASES = {
    "plain file loads into the wrapper": """
with strategy.scope():
    plain = network(keras)
    plain.compile(keras.optimizers.Adam(0.01), "mse")
plain.fit(problems.dataset(24, 8), verbose=0)
path = os.path.join(folder, "plain.keras")
plain.save(path)
with strategy.scope():
    model = keras.saving.load_model(path, compile=False)
    model.compile(rs.DistributedOptimizer(keras.optimizers.Adam(0.01), METHOD), "mse")
    model.optimizer.build(model.trainable_variables)
    import warnings
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.load_weights(path)
    texts = [str(w.message) for w in caught]
    assert len(texts) == 1 and "at iteration 3, but what was loaded has nothing of the" in texts[0]
assert int(model.optimizer.iterations.numpy()) == 3
for mine, theirs in zip(model.optimizer.variables, plain.optimizer.variables, strict=True):
    np.testing.assert_array_equal(mine.numpy(), theirs.numpy())
""",
    "another layout is refused": """
def compiled(method):
    with strategy.scope():
        model = network(keras)
        model.compile(rs.DistributedOptimizer(keras.optimizers.SGD(0.01), method), "mse")
        model.optimizer.build(model.trainable_variables)
    return model

path = os.path.join(folder, "a.keras")
saved = compiled(METHOD)
saved.save(path)
other = compiled(rs.RedSync(density=0.1, dense_below=16, momentum=0.9))
import warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    other.load_weights(path)  # weights and optimizer variables only
texts = [str(w.message) for w in caught]
assert len(texts) == 1 and "begins anew" in texts[0] and "velocity" in texts[0], texts
try:
    other.optimizer.exchange.restore_total_state(saved.optimizer.exchange.total_state())
    raise AssertionError("loaded")
except ValueError as error:
    assert "another model or method" in str(error) and "velocity" in str(error), error
""",
    "Auto starts with empty residuals where it chooses otherwise": """
import warnings
saved, optimizer = trained(
    keras, lambda: rs.DistributedOptimizer(keras.optimizers.SGD(0.05), METHOD))
arrays = optimizer.exchange.total_state()
with strategy.scope():
    model = network(keras)
    model.compile(rs.DistributedOptimizer(keras.optimizers.SGD(0.05)), "mse")
    model.optimizer.build(model.trainable_variables)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    model.optimizer.exchange.restore_total_state(arrays)
assert len(caught) == 1 and "residuals" in str(caught[0].message), caught
assert int(model.optimizer.exchange.step.numpy()) == 3
path = os.path.join(folder, "auto.keras")
model.save(path)
with strategy.scope():
    loaded = keras.saving.load_model(path)
assert loaded.optimizer.exchange.policy == rs.Auto()
""",
    "checkpoint, keras, restored after and before the build": """
model, optimizer = trained(
    keras, lambda: rs.DistributedOptimizer(keras.optimizers.SGD(0.05, momentum=0.9), METHOD))
prefix = tf.train.Checkpoint(model=model, optimizer=optimizer).save(os.path.join(folder, "c"))
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
    same(total(optimizer), total(fresh))
    for a, b in zip(fresh.variables, optimizer.variables, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())
""",
    "checkpoint, tf_keras": """
model, optimizer = trained(
    tf_keras, lambda: rs.DistributedOptimizer(tf_keras.optimizers.Adam(0.05), METHOD))
prefix = tf.train.Checkpoint(model=model, optimizer=optimizer).save(os.path.join(folder, "c"))
with strategy.scope():
    fresh_model = network(tf_keras)
    fresh = rs.DistributedOptimizer(tf_keras.optimizers.Adam(0.05), METHOD)
    fresh.build(fresh_model.trainable_variables)
    tf.train.Checkpoint(model=fresh_model, optimizer=fresh).restore(prefix)
same(total(optimizer), total(fresh))
for a, b in zip(fresh.variables, optimizer.variables, strict=True):
    np.testing.assert_array_equal(a.numpy(), b.numpy())
""",
    "checkpoint, legacy": """
def make():
    return rs.DistributedOptimizer(tf_keras.optimizers.legacy.Adam(0.05), METHOD)

model, optimizer = trained(tf_keras, make)
prefix = tf.train.Checkpoint(model=model, optimizer=optimizer).save(os.path.join(folder, "c"))
with strategy.scope():
    fresh_model = network(tf_keras)
    fresh = make()
    fresh.build(fresh_model.trainable_variables)
    tf.train.Checkpoint(model=fresh_model, optimizer=fresh).restore(prefix)
same(total(optimizer), total(fresh))
assert len(fresh.variables()) == 1 + 2 * len(model.trainable_variables)
for a, b in zip(fresh.variables(), optimizer.variables(), strict=True):
    np.testing.assert_array_equal(a.numpy(), b.numpy())
""",
    "tf_keras models save and load": """
with strategy.scope():
    model = network(tf_keras)
    model.compile(rs.DistributedOptimizer(tf_keras.optimizers.SGD(0.05), METHOD), "mse")
model.fit(problems.dataset(24, 8), verbose=0)
path = os.path.join(folder, "model.keras")
model.save(path)
with strategy.scope():
    loaded = tf_keras.models.load_model(path)
assert type(loaded.optimizer) is type(model.optimizer)
assert int(loaded.optimizer.iterations.numpy()) == 3
assert problems.digest(loaded) == problems.digest(model)
loaded.fit(problems.dataset(24, 8), verbose=0)
""",
    "the inner optimizer cannot be used alone": """
with strategy.scope():
    model = network(keras)
    wrapped = rs.DistributedOptimizer(keras.optimizers.SGD(0.05), METHOD)
    try:
        rs.DistributedOptimizer(wrapped.inner_optimizer, METHOD)
        raise AssertionError("wrapped twice")
    except ValueError as error:
        assert "wrapped already" in str(error), error
""",
}


@pytest.mark.parametrize("case", CASES)
def test_saving(case, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM + CASES[case])
    ran = subprocess.run(
        forks.command(ENVIRONMENT, program, str(tmp_path)),
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_the_file_of_one_worker_loads_without_the_library(tmp_path):
    """Weights load with `compile=False` in a process that never imports tf_redsync."""
    import keras

    import tf_redsync as rs

    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(3)])
    with pytest.warns(UserWarning, match="one worker"):
        model.compile(rs.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
        model.fit(tf.ones([8, 4]), tf.ones([8, 3]), verbose=0)
    path = tmp_path / "model.keras"
    model.save(path)
    np.save(tmp_path / "kernel.npy", model.layers[0].kernel.numpy())
    program = (
        "import keras, numpy as np, sys\n"
        f"model = keras.saving.load_model({str(path)!r}, compile=False)\n"
        f"kernel = np.load({str(tmp_path / 'kernel.npy')!r})\n"
        "assert np.array_equal(model.layers[0].kernel.numpy(), kernel)\n"
        "assert 'tf_redsync' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
