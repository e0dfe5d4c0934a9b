"""Pruning: selected weights and slots, which stay 0; the callback in `fit`; misuse."""

import contextlib
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import tf_redsync as rs
from tests import total_state
from tests.distributed import problems
from tests.loops import loop
from tests.optimizers import has_muon
from tests.oracle.pactrain import capacity, masks_by_magnitude
from tests.unit.test_optimizer_errors import assert_raises
from tf_redsync.keras.pruning import magnitude_masks

METHOD = rs.contrib.PacTrain(sparsity=0.5, stable_steps=2, dense_below=16)
SHAPES = [(16, 8), (8,), (8, 8), (8, 8)]


@pytest.mark.parametrize("scope", ["layer", "model"])
@pytest.mark.parametrize("sparsity", [0.1, 0.5, 0.8])
def test_largest_weights_are_kept(scope, sparsity):
    """With ties, zeros, and empty tensors."""
    rng = np.random.default_rng(0)
    weights = [
        rng.standard_normal((13, 7)),
        rng.integers(-2, 3, (9, 5)),
        np.zeros((4, 4)),
        np.zeros((0, 3)),
        100 * rng.standard_normal((3, 2, 4)),
    ]
    weights = [np.asarray(w, np.float32) for w in weights]
    found = magnitude_masks(dict(enumerate(weights)), sparsity, scope)
    for i, expected in enumerate(masks_by_magnitude(weights, sparsity, scope)):
        np.testing.assert_array_equal(found[i], expected)


class Pushing(keras.optimizers.SGD):
    """Changes every weight, whatever its gradient."""

    def update_step(self, gradient, variable, learning_rate):
        variable.assign_add(tf.ones_like(variable))


OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": lambda: keras.optimizers.Adam(0.1, weight_decay=0.01, amsgrad=True),
    "adam_ema": lambda: keras.optimizers.Adam(0.1, use_ema=True, ema_overwrite_frequency=2),
    "rmsprop": lambda: keras.optimizers.RMSprop(0.1, momentum=0.9, centered=True),
    "ftrl": lambda: keras.optimizers.Ftrl(0.1),
    "adafactor": lambda: keras.optimizers.Adafactor(0.1),
    "lion": lambda: keras.optimizers.Lion(0.1),
    "muon": lambda: keras.optimizers.Muon(0.1),
    "amsgrad": lambda: rs.AMSGrad(0.1),
    "scaled": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.1)),
    "pushing": lambda: Pushing(0.1),
    "tf_keras adam": lambda: tf_keras.optimizers.Adam(0.1, weight_decay=0.01),
    "tf_keras sgd": lambda: tf_keras.optimizers.SGD(0.1, momentum=0.9, use_ema=True),
    "legacy adam": lambda: tf_keras.optimizers.legacy.Adam(0.1),
    "legacy sgd": lambda: tf_keras.optimizers.legacy.SGD(0.1, momentum=0.9),
}
if not has_muon():
    del OPTIMIZERS["muon"]
# The number of slots of each variable that have its shape and stay 0 where its weights are 0.
SLOTS = {"sgd": 1, "adam": 3, "adam_ema": 3, "rmsprop": 3, "ftrl": 2, "lion": 1, "scaled": 2,
         "amsgrad": 3, "tf_keras adam": 2, "tf_keras sgd": 2, "legacy adam": 2,
         "legacy sgd": 1}  # fmt: skip


def build_optimizer(optimizer, method=METHOD):
    """Returns a built, wrapped optimizer, its variables, and a step."""
    rng = np.random.default_rng(3)
    arrays = [rng.standard_normal(s).astype(np.float32) for s in SHAPES]
    if isinstance(optimizer, keras.optimizers.Optimizer):
        variables = [keras.Variable(a) for a in arrays]
    else:
        variables = [tf.Variable(a, name=f"v{i}") for i, a in enumerate(arrays)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # one worker
        wrapped = rs.DistributedOptimizer(optimizer, method)
        wrapped.build(variables)

    def step(number):
        rng = np.random.default_rng(number)
        grads = [tf.constant(rng.standard_normal(s), tf.float32) for s in SHAPES]
        wrapped.apply_gradients(list(zip(grads, variables, strict=True)))

    return wrapped, variables, step


@loop("name", OPTIMIZERS)
def test_pruned_weights_stay_zero(name):
    wrapped, variables, step = build_optimizer(OPTIMIZERS[name]())
    for number in range(3):
        step(number)
    before = [v.numpy().copy() for v in variables]
    wrapped.prune(0.5)
    kept = masks_by_magnitude(before, 0.5, "layer")
    kept[1] = np.ones(SHAPES[1], bool)  # a bias
    for v, b, mask in zip(variables, before, kept, strict=True):
        np.testing.assert_array_equal(v.numpy(), np.where(mask, b, 0))
    slots = wrapped._adapter.access.slots(wrapped._adapter._variables)
    if name in SLOTS:
        assert len(slots) == SLOTS[name]
    for round_ in (0, 1):
        for kind in slots:
            for slot, mask in zip(kind, kept, strict=True):
                if name in SLOTS:
                    assert not np.any(slot.numpy()[~mask])
        if round_ == 0:
            for number in range(3, 7):
                step(number)
    for v, b, mask in zip(variables, before, kept, strict=True):
        after = v.numpy()
        assert np.isfinite(after).all() and not after[~mask].any()
        assert np.any(after[mask] != b[mask])


def test_slots_of_kept_weights_and_biases_are_unchanged():
    wrapped, variables, step = build_optimizer(keras.optimizers.Adam(0.1))
    step(0)
    inner = wrapped.inner_optimizer
    before = [v.numpy().copy() for v in inner.variables]
    wrapped.prune(0.5)
    kept = [v.numpy() != 0 for v in variables]
    assert int(inner.iterations.numpy()) == 1 and float(inner.learning_rate.numpy()) > 0
    changed = [np.any(v.numpy() != b) for v, b in zip(inner.variables, before, strict=True)]
    assert sum(changed) == 2 * 3  # both moments of the three kernels
    for kind in wrapped._adapter.access.slots(wrapped._adapter._variables):
        for slot, mask in zip(kind, kept, strict=True):
            assert np.all(slot.numpy()[mask] != 0)


def test_scope_model_prunes_smaller_tensors_more():
    wrapped, variables, _ = build_optimizer(keras.optimizers.SGD(0.1))
    variables[2].assign(1e6 * variables[2].numpy())
    with pytest.warns(UserWarning, match="of the 64 weights"):
        wrapped.prune(0.5, scope="model")
    weights = [v.numpy() for i, v in enumerate(variables) if i != 1]
    assert sum(np.count_nonzero(w) for w in weights) == capacity(0.5, 256)
    assert np.count_nonzero(weights[1]) == 64


def small_model(library, strategy, optimizer, method=METHOD, **options):
    with strategy.scope(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = problems.network(library)
        model.compile(rs.DistributedOptimizer(optimizer(), method), "mse", **options)
    return model


@contextlib.contextmanager
def warnings_as_errors():
    """Turns warnings into errors, except one of Keras about datasets."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "`shuffle=True` was passed")
        yield


class Bytes(keras.callbacks.Callback):
    """Records the bytes sent in each step, or in the last step of an execution."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append(float(self.model.optimizer.exchange.bytes_sent.numpy()))


def kernels(model):
    return [w for w in model.get_weights() if w.ndim == 2]


def step_bytes(sparsity):
    """Returns the bytes of a step of two workers: kernels (12, 48) and (48, 1), dense biases."""
    return 4 * (capacity(sparsity, 576) + capacity(sparsity, 48) + 49)


DENSE = 4 * (576 + 48 + 49)


def test_fit_prunes_switches_saves_and_resumes(mirrored, tmp_path):
    strategy = mirrored(2)
    model = small_model(keras, strategy, lambda: keras.optimizers.Adam(0.01))
    seen = Bytes()
    prune = rs.callbacks.Prune(0.5, at_step=3)
    with warnings_as_errors():
        model.fit(problems.dataset(64, 8), verbose=0, callbacks=[prune, seen])
    assert seen.seen == [DENSE] * 5 + [step_bytes(0.5)] * 3
    for kernel in kernels(model):
        assert np.count_nonzero(kernel) == capacity(0.5, kernel.size)
    path = tmp_path / "model.keras"
    model.save(path)
    with strategy.scope():
        loaded = keras.saving.load_model(path)
    again = Bytes()
    with warnings_as_errors():
        loaded.fit(problems.dataset(32, 8), verbose=0, callbacks=[prune, again])
    assert again.seen == [step_bytes(0.5)] * 4
    for kernel, old in zip(kernels(loaded), kernels(model), strict=True):
        np.testing.assert_array_equal(kernel != 0, old != 0)
        assert np.any(kernel != old)
    # A checkpoint has them, too.
    prefix = tf.train.Checkpoint(model=model, optimizer=model.optimizer).save(str(tmp_path / "c"))
    fresh = small_model(keras, strategy, lambda: keras.optimizers.Adam(0.01))
    with strategy.scope():
        fresh.optimizer.build(fresh.trainable_variables)
    tf.train.Checkpoint(model=fresh, optimizer=fresh.optimizer).restore(prefix)
    states = [total_state.total(m.optimizer.exchange) for m in (model, fresh)]
    assert any("mask" in name for name in states[0])
    for name, value in states[0].items():
        np.testing.assert_array_equal(states[1][name], value)


def test_epochs_and_fractions(mirrored):
    """Includes a second `fit` with the same, already finished callbacks."""
    method = rs.contrib.PacTrain(sparsity=0.25, stable_steps=1, dense_below=16)
    model = small_model(keras, mirrored(2), lambda: keras.optimizers.SGD(0.01), method)
    seen = Bytes()
    prunes = [rs.callbacks.Prune(0.25, at_step=2), rs.callbacks.Prune(0.75, epoch=1)]
    model.fit(problems.dataset(32, 8), epochs=2, verbose=0, callbacks=[*prunes, seen])
    assert seen.seen == [DENSE] * 3 + [step_bytes(0.25), DENSE] + 3 * [step_bytes(0.25)]
    model.fit(
        problems.dataset(8, 8), epochs=3, initial_epoch=2, verbose=0, callbacks=[*prunes, seen]
    )
    assert seen.seen[-1] == step_bytes(0.25) and len(seen.seen) == 9
    for kernel in kernels(model):
        assert np.count_nonzero(kernel) == capacity(0.75, kernel.size)


def test_pruned_weights_are_not_pruned_again(mirrored):
    """In a later `fit` that begins at the same epoch, or before it and ends early."""
    method = rs.contrib.PacTrain(sparsity=0.25, stable_steps=1, dense_below=16)
    model = small_model(keras, mirrored(2), lambda: keras.optimizers.SGD(0.01), method)
    prunes = [rs.callbacks.Prune(0.25, epoch=0), rs.callbacks.Prune(0.6, epoch=1, scope="model")]
    model.fit(problems.dataset(16, 8), epochs=2, verbose=0, callbacks=prunes)
    kept = [k != 0 for k in kernels(model)]
    assert sum(map(np.count_nonzero, kept)) == capacity(0.6, 576 + 48)
    seen = Bytes()
    with warnings_as_errors():
        model.fit(problems.dataset(16, 8), verbose=0, callbacks=[*prunes, seen])
    assert seen.seen == [step_bytes(0.25)] * 2
    for kernel, before in zip(kernels(model), kept, strict=True):
        np.testing.assert_array_equal(kernel != 0, before)


@pytest.mark.filterwarnings("ignore:.*undelivered")
def test_weights_without_a_state_keep_the_masks(mirrored, tmp_path):
    """As when pruned weights are set back to their initial values."""
    method = rs.contrib.PacTrain(sparsity=0.5, stable_steps=1, dense_below=16)
    model = small_model(keras, mirrored(2), lambda: keras.optimizers.SGD(0.01), method)
    plain = keras.Sequential.from_config(keras.Sequential.get_config(model))
    path = str(tmp_path / "initial.weights.h5")
    plain.save_weights(path)
    model.fit(problems.dataset(16, 8), verbose=0)
    model.optimizer.prune(0.5)
    kept = [k != 0 for k in kernels(model)]
    model.load_weights(path, skip_mismatch=True)
    model.fit(problems.dataset(16, 8), verbose=0)
    for kernel, before in zip(kernels(model), kept, strict=True):
        np.testing.assert_array_equal(kernel != 0, before)


def test_tf_keras_prunes_before_its_first_step(mirrored):
    strategy = mirrored(2)
    method = rs.contrib.PacTrain(sparsity=0.5, stable_steps=0, dense_below=16)
    model = small_model(tf_keras, strategy, lambda: tf_keras.optimizers.SGD(0.01), method)
    start = kernels(model)
    sent_in = []
    count = tf_keras.callbacks.LambdaCallback(
        on_batch_end=lambda batch, logs: sent_in.append(
            float(model.optimizer.exchange.bytes_sent.numpy())
        )
    )
    prune = rs.callbacks.Prune(0.5, at_step=0)
    model.fit(problems.dataset(24, 8), verbose=0, callbacks=[prune, count])
    assert sent_in == [step_bytes(0.5)] * 3
    for kernel, mask in zip(kernels(model), masks_by_magnitude(start, 0.5, "layer"), strict=True):
        np.testing.assert_array_equal(kernel != 0, mask)


def test_misuse_of_the_callback(mirrored):
    strategy = mirrored(2)
    model = small_model(keras, strategy, lambda: keras.optimizers.SGD(0.01))
    data = problems.dataset(16, 8)
    with pytest.warns(UserWarning, match=r"pruned: .*tf_redsync\.callbacks\.Prune"):
        model.fit(data, verbose=0)
    assert_raises(
        ValueError,
        lambda: model.fit(data, verbose=0, callbacks=[rs.callbacks.Prune(0.5, at_step=1)]),
        "`at_step` of `Prune`",
        "step 2",
        "at_step=1",
    )
    late = rs.callbacks.Prune(0.5, epoch=0)
    assert_raises(
        ValueError,
        lambda: model.fit(data, epochs=2, initial_epoch=1, verbose=0, callbacks=[late]),
        "`epoch` of `Prune`",
        "epoch=0",
    )
    with pytest.warns(UserWarning, match="`fit` ended before at_step=99"):
        model.fit(data, verbose=0, callbacks=[rs.callbacks.Prune(0.5, at_step=99)])
    assert all(np.all(k) for k in kernels(model))


def fit(optimizer, callback):
    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.compile(optimizer, loss="mse")
        model.fit(np.zeros((4, 3)), np.zeros(4), verbose=0, callbacks=[callback])


@pytest.mark.parametrize("when", [{"at_step": 0}, {"epoch": 0}])
def test_unsupported_optimizers(when):
    prune = rs.callbacks.Prune(0.5, **when)
    assert_raises(ValueError, lambda: fit("sgd", prune), "`Prune` needs a model", "optimizer=SGD")

    def wrapped(method):
        return rs.DistributedOptimizer(keras.optimizers.SGD(0.1), method)

    for method in (rs.Dense(), rs.TopK()):
        assert_raises(
            ValueError,
            lambda m=method: fit(wrapped(m), prune),
            "`Prune` needs an optimizer with the method tf_redsync.contrib.PacTrain",
            f"method={type(method).__name__}",
        )
    assert_raises(
        ValueError,
        lambda: fit(wrapped(rs.contrib.PacTrain()), prune),
        "nothing can be pruned",
        "explain",
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"sparsity": 1.0, "at_step": 0}, ("`sparsity` must be in (0, 1)", "sparsity=1.0")),
        ({"sparsity": 0.0, "at_step": 0}, ("`sparsity`", "sparsity=0.0")),
        ({"sparsity": "half", "at_step": 0}, ("`sparsity`", "sparsity='half'")),
        ({"sparsity": 0.5}, ("`at_step` and `epoch`", "at_step=None, epoch=None")),
        ({"sparsity": 0.5, "at_step": 1, "epoch": 1}, ("exactly one of", "at_step=1, epoch=1")),
        ({"sparsity": 0.5, "at_step": -1}, ("`at_step`", "at_step=-1")),
        ({"sparsity": 0.5, "epoch": 1.5}, ("`epoch`", "epoch=1.5")),
        ({"sparsity": 0.5, "epoch": 1, "scope": "all"}, ("`scope`", "scope='all'")),
    ],
)
def test_bad_arguments(arguments, words):
    assert_raises(ValueError, lambda: rs.callbacks.Prune(**arguments), *words)


def test_manual_prune_checks_its_arguments():
    wrapped, variables, _ = build_optimizer(keras.optimizers.SGD(0.1))
    assert_raises(ValueError, lambda: wrapped.prune(1.5), "`sparsity`", "sparsity=1.5")
    assert_raises(ValueError, lambda: wrapped.prune(0.5, "all"), "`scope`", "scope='all'")
    variables[2].assign(np.full(SHAPES[2], np.nan))
    assert_raises(ValueError, lambda: wrapped.prune(0.5), "weights to prune must be finite")
    fresh = rs.DistributedOptimizer(keras.optimizers.SGD(0.1), METHOD)
    assert_raises(RuntimeError, lambda: fresh.prune(0.5), "`optimizer.build(variables)`")
