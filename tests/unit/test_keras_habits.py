"""Keras features and classes of users around a wrapped optimizer, in one process."""

import os
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import tf_redsync as rs
from tests.deep import DEEP
from tests.loops import loop
from tests.optimizers import all_of
from tests.patience import PATIENCE
from tf_redsync.keras import statistics

pytestmark = pytest.mark.filterwarnings("ignore:tf_redsync. there is one worker")
FAMILIES = {"tf_keras": tf_keras.optimizers, "legacy": tf_keras.optimizers.legacy}
every_family = pytest.mark.parametrize("family", FAMILIES)


def small_model(library, optimizer, **layer):
    layers = [library.layers.Input((4,)), library.layers.Dense(1, **layer)]
    model = library.Sequential(layers)
    model.compile(rs.DistributedOptimizer(optimizer, rs.Dense()), library.losses.MeanSquaredError())
    return model


def fit(model):
    model.fit(np.ones((8, 4), "f4"), np.ones((8, 1), "f4"), verbose=0)


@pytest.mark.parametrize("family", [keras, tf_keras])
def test_schedule_without_a_config(family, tmp_path):
    class Rate(family.optimizers.schedules.LearningRateSchedule):
        def __call__(self, step):
            return 0.1

    model = small_model(family, family.optimizers.Adam(Rate()))
    data = np.ones((8, 4), "f4"), np.ones((8, 1), "f4")
    for epochs in (1, 2):
        checkpoint = rs.callbacks.Checkpoint(str(tmp_path))
        model.fit(*data, epochs=epochs, shuffle=False, verbose=0, callbacks=[checkpoint])
    assert int(model.optimizer.iterations) == 2
    with pytest.raises(NotImplementedError):  # as without the wrapper
        model.optimizer.get_config()
    with pytest.raises(NotImplementedError):
        model.optimizer.inner_optimizer.get_config()


@every_family
def test_tensorboard_logs_the_rate_of_a_schedule(family, tmp_path):
    schedule = tf_keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)
    model = small_model(tf_keras, FAMILIES[family].SGD(schedule))
    board = tf_keras.callbacks.TensorBoard(str(tmp_path))
    model.fit(np.ones((8, 4), "f4"), np.ones((8, 1), "f4"), verbose=0, callbacks=[board])
    (path,) = (tmp_path / "train").glob("*.v2")
    events = tf.compat.v1.train.summary_iterator(str(path))
    values = {v.tag: tf.make_ndarray(v.tensor) for e in events for v in e.summary.value}
    assert values["epoch_learning_rate"] == pytest.approx(0.05)


@every_family
def test_missing_gradients_warn(family, caplog):
    """As without the wrapper."""
    optimizer = rs.DistributedOptimizer(FAMILIES[family].SGD(0.1), rs.Dense())
    used, unused = tf.Variable(1.0, name="used"), tf.Variable(1.0, name="unused")
    optimizer.apply_gradients([(tf.constant(0.5), used), (None, unused)])
    assert "Gradients do not exist for variables ['unused:0']" in caplog.text
    assert [float(v) for v in (used, unused)] == [pytest.approx(0.95), 1.0]


@pytest.mark.parametrize("rule", ["excluded names", "the user's own", "LAMB's"])
def test_addons_excludes_distributed_variables_from_weight_decay(mirrored, rule):
    strategy, addons = mirrored(2), rs.addons.load().optimizers

    class OnlyKernels(addons.SGDW):
        def _do_use_weight_decay(self, var):
            return "kernel" in var.name

    with strategy.scope():
        kernel, bias = (tf.Variable([1.0], name=name) for name in ("kernel", "bias"))
        inner = addons.SGDW(0.25, exclude_from_weight_decay=["bias"])
        if rule == "the user's own":
            inner = OnlyKernels(0.25)
        if rule == "LAMB's":  # a step of the rate times the weight's norm
            inner = addons.LAMB(0.25, weight_decay=1.0, exclude_from_weight_decay=["bias"])
        optimizer = rs.DistributedOptimizer(inner, rs.Dense())
    zero = tf.zeros([1])
    step = tf.function(lambda: optimizer.apply_gradients([(zero, kernel), (zero, bias)]))
    strategy.run(step)
    parts = [strategy.experimental_local_results(v) for v in (kernel, bias)]
    assert [[part.numpy().item() for part in p] for p in parts] == [[0.75] * 2, [1.0] * 2]


@pytest.mark.parametrize("family", [keras, tf_keras])
def test_epochs_as_numbers_of_numpy(family):
    model = small_model(family, family.optimizers.SGD(0.1))
    data = np.ones((8, 4), "f4"), np.ones((8, 1), "f4")
    model.fit(*data, epochs=np.int64(3), initial_epoch=np.int64(1), verbose=0)
    assert int(model.optimizer.iterations) == 2


@pytest.fixture
def mixed_float16():
    tf_keras.mixed_precision.set_global_policy("mixed_float16")
    yield tf_keras.mixed_precision.LossScaleOptimizer
    tf_keras.mixed_precision.set_global_policy("float32")


@every_family
def test_mixed_precision(mixed_float16, family):
    model = small_model(tf_keras, mixed_float16(FAMILIES[family].SGD(0.1), initial_scale=8.0))
    optimizer = model.optimizer
    assert isinstance(optimizer, rs.DistributedOptimizer)  # ours: `compile` has not wrapped it
    before = model.get_weights()[0]
    fit(model)
    assert not np.array_equal(model.get_weights()[0], before)
    assert float(optimizer.loss_scale) == float(optimizer.get_scaled_loss(tf.constant(1.0))) == 8.0
    again = type(optimizer).from_config(optimizer.get_config())
    assert again.get_config() == optimizer.get_config() and again.initial_scale == 8.0


@every_family
def test_loss_scale_optimizer_around_the_wrapper_moves_inside(mixed_float16, family):
    model = small_model(tf_keras, FAMILIES[family].SGD(0.1))  # `compile` wraps the optimizer
    assert isinstance(model.optimizer, rs.DistributedOptimizer)
    assert isinstance(model.optimizer, mixed_float16)  # for `compile`, and for custom loops
    fit(model)
    again = type(model.optimizer).from_config(model.optimizer.get_config())
    assert again.get_config() == model.optimizer.get_config()
    with pytest.raises(
        ValueError, match=r"DistributedOptimizer\(.*LossScaleOptimizer\(inner"
    ):  # a custom loop
        alone = rs.DistributedOptimizer(FAMILIES[family].SGD(0.1), rs.Dense())
        around, variable = mixed_float16(alone), tf_keras.layers.Dense(1)
        variable.build((None, 2))
        pairs = [(tf.ones(v.shape), v) for v in variable.trainable_variables]
        around.apply_gradients(pairs)


# These programs run in forks of a process that has imported the parts of TensorFlow and Keras 3
# that are the same for all of them; importing them takes seconds.
IMPORTS = {
    "tf_keras first": "import tf_keras, tf_redsync as rs\nscope = contextlib.nullcontext()",
    "tf_keras last": "import tf_redsync as rs\n"
    "scope = rs.MultiWorkerMirroredStrategy().scope()\nimport tf_keras",
    "tf.keras": "os.environ['TF_USE_LEGACY_KERAS'] = '1'\nimport tensorflow as tf\n"
    "import tf_redsync as rs\ntf_keras, scope = tf.keras, contextlib.nullcontext()",
}
FIRST_COMPILE = """
assert tf_keras.optimizers.SGD.__module__.startswith("tf_keras.")
tf_keras.mixed_precision.set_global_policy("mixed_float16")
with scope:
    model = tf_keras.Sequential([tf_keras.layers.Input((3,)), tf_keras.layers.Dense(1)])
    model.compile(rs.DistributedOptimizer(tf_keras.optimizers.SGD(0.1), rs.Dense()), "mse")
print(isinstance(model.optimizer, rs.DistributedOptimizer), flush=True)
"""
FORKS = """
import contextlib, os, sys, tensorflow, keras
assert not {"tf_keras", "tf_redsync"} & sys.modules.keys()
for program in sys.argv[1:]:
    child = os.fork()
    if not child:
        exec(program)
        os._exit(0)
    os.waitpid(child, 0)
"""


def test_first_compile_of_a_process_is_hooked():
    """Python looks up `model.compile` before its argument creates the first wrapper."""
    programs = [f"{imports}{FIRST_COMPILE}" for imports in IMPORTS.values()]
    # Loading TensorFlow Addons sets the variable in this process.
    env = {n: value for n, value in os.environ.items() if n != "TF_USE_LEGACY_KERAS"}
    ran = subprocess.run(
        [sys.executable, "-c", FORKS, *programs],
        env=env, capture_output=True, text=True, timeout=PATIENCE * 100,
    )  # fmt: skip
    assert ran.stdout.split() == ["True"] * len(IMPORTS), ran.stderr


@pytest.mark.parametrize("family", ["keras", *FAMILIES])
def test_h5_files(family, tmp_path):
    """Keras 3 drops the slots of any optimizer from such a file; tf_keras keeps them."""
    library = keras if family == "keras" else tf_keras
    inner = (keras.optimizers if family == "keras" else FAMILIES[family]).SGD(0.1, momentum=0.9)
    model = small_model(library, inner)
    fit(model)
    path = str(tmp_path / "model.h5")
    model.save(path)
    loaded = library.models.load_model(path)
    assert type(loaded.optimizer) is type(model.optimizer)
    assert loaded.optimizer.method == rs.Dense()
    assert float(loaded.optimizer.momentum) == pytest.approx(0.9)
    for a, b in zip(loaded.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
    if family == "tf_keras":
        for a, b in zip(loaded.optimizer.variables, model.optimizer.variables, strict=True):
            np.testing.assert_array_equal(a.numpy(), b.numpy())
    fit(loaded)


@pytest.mark.parametrize(("library", "steps"), [(keras, None), (keras, 2), (tf_keras, None)])
def test_apply_gradients_of_a_users_class(library, steps):
    """Such a class centralizes, scales or filters gradients."""

    class Doubled(library.optimizers.SGD):
        def apply_gradients(self, grads_and_vars, **kwargs):
            grads, variables = zip(*grads_and_vars, strict=True)
            doubled = zip([2.0 * g for g in grads], variables, strict=True)  # read only once
            return super().apply_gradients(doubled, **kwargs)

    options = {"gradient_accumulation_steps": steps} if steps else {}
    weights = []
    for wrap in (lambda inner: inner, lambda inner: rs.DistributedOptimizer(inner, rs.Dense())):
        optimizer, v = wrap(Doubled(0.1, **options)), tf.Variable([1.0])
        apply = tf.function(lambda o=optimizer, v=v: o.apply_gradients([(v.read_value(), v)]))
        counted = [int(apply()) for _ in range(2)]
        weights.append((v.numpy().tolist(), counted))
    assert weights[0] == weights[1] and weights[0][1] == [1, 2]


class OwnUpdateStep(keras.optimizers.SGD):
    """A user's class that doubles the learning rate."""

    def _backend_update_step(self, grads, trainable_variables, learning_rate):
        super()._backend_update_step(grads, trainable_variables, 2.0 * learning_rate)


ACCUMULATING = {**all_of("keras3"), "OwnUpdateStep": OwnUpdateStep}
del ACCUMULATING["LossScaleOptimizer"]  # contains the optimizer that accumulates


@loop("name", ACCUMULATING if DEEP else ("Nadam", "OwnUpdateStep"))
def test_accumulation_equals_plain_optimizer_with_larger_batch(name):
    micro = np.random.default_rng(0).standard_normal((2, 2, 2, 4)).astype("f4")  # 2 updates
    plain, accumulating = (
        ACCUMULATING[name](0.1, gradient_accumulation_steps=steps) for steps in (None, 2)
    )
    weights = []
    for optimizer, grads in (
        (plain, micro.mean(axis=1)),
        (rs.DistributedOptimizer(accumulating, rs.Dense()), micro.reshape(4, 2, 4)),
    ):
        v = keras.Variable(np.ones((2, 4), "f4"), name="kernel")
        optimizer.build([v])
        for grad in grads:
            optimizer.apply([tf.constant(grad)])
        weights.append(v.numpy())
    assert (weights[0] != 1.0).any()
    np.testing.assert_allclose(*weights, rtol=1e-5, atol=1e-6)


def test_apply_gradients_returns_iterations():
    optimizer, v = small_model(keras, keras.optimizers.Adam(0.1)).optimizer, tf.Variable([1.0])
    assert [int(optimizer.apply_gradients([(tf.ones([1]), v)])) for _ in range(2)] == [1, 2]


def test_variables_that_the_strategy_averages():
    strategy = rs.MultiWorkerMirroredStrategy()

    class Queue(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.own = keras.Variable(
                np.zeros((4, 2), "f4"),
                trainable=False,
                synchronization="on_read",
                aggregation="only_first_replica",
            )
            self.averaged = self.add_weight(shape=(2,), trainable=False)

    with strategy.scope():
        layer = keras.layers.LSTM(3, stateful=True)
        layer(np.ones((2, 5, 4), "f4"))
        queue, norm = Queue(), keras.layers.BatchNormalization()
        norm.build((None, 2))
    expected = [queue.averaged, norm.moving_mean, norm.moving_variance]
    found = filter(statistics.is_shared, strategy._statistics.values())
    assert list(map(id, found)) == [id(v.value) for v in expected]


def test_collectives_of_arrays_and_scalars():
    strategy = rs.MultiWorkerMirroredStrategy()
    for array in (np.array([1.0, 3.0]), np.array([2, 4], "uint8")):
        mean = strategy.reduce("MEAN", array, axis=None)
        assert tf.is_tensor(mean) and mean.numpy().tolist() == array.tolist()
    assert strategy.gather(np.array([True, False]), axis=0).numpy().tolist() == [True, False]
    for scalar in (3, tf.constant(0.5)):
        with pytest.raises(ValueError, match="`value` must have an axis"):
            strategy.gather(scalar, axis=0)


def test_numbers_of_distributed_variables():
    """Callbacks print `float(model.optimizer.learning_rate)`."""
    with rs.MultiWorkerMirroredStrategy().scope():
        model = small_model(keras, keras.optimizers.SGD(0.5))
    fit(model)
    assert isinstance(model.optimizer.learning_rate.value, tf.distribute.DistributedValues)
    assert float(model.optimizer.learning_rate) == 0.5
    assert int(model.optimizer.iterations) == 1
    with pytest.raises(TypeError, match="scalar"):
        float(model.layers[0].kernel)


def test_other_keras_backends_are_rejected():
    ran = subprocess.run(
        [sys.executable, "-c", "import tf_redsync"],
        env={**os.environ, "KERAS_BACKEND": "jax"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode and "tf_redsync needs Keras on TensorFlow" in ran.stderr, ran.stderr
    assert "KERAS_BACKEND=tensorflow" in ran.stderr and "'jax'" in ran.stderr
