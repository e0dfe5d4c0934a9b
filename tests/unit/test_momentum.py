"""Momentum of each optimizer: the advice in the error or warning leads to a working setting."""

import re
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import tf_redsync as rs
from tests.loops import loop
from tests.optimizers import FAMILIES, all_of, library_of
from tf_redsync.keras import momentum, slots

LATE = rs.CodedTopK(density=0.03, dense_below=0)
IN_EXCHANGE = rs.CodedGMC(density=0.03, dense_below=0)
LEGACY = tf_keras.optimizers.legacy
# Keras before 3.14 has none: another one without momentum.
SCHEDULE_FREE = getattr(keras.optimizers, "ScheduleFreeAdamW", keras.optimizers.Adagrad)
ONE_WORKER = "ignore:tf_redsync. there is one worker"


def momentum_advice(make, method):
    """Returns the text of the error or warnings about momentum; may be empty."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        try:
            rs.DistributedOptimizer(make(), method)
        except ValueError as error:
            return str(error)
    return " ".join(str(w.message) for w in caught if "momentum" in str(w.message))


def apply_advice(make, advice):
    """Creates the optimizer as the advice says: `Adam(beta_1=0.0)`."""
    kind, arguments = re.search(r"(\w+)\(((?:\w+=0\.0(?:, )?)+)\)", advice).groups()
    inner = make()
    changes = dict.fromkeys(re.findall(r"(\w+)=0\.0", arguments), 0.0)
    if type(inner).__name__ != kind:  # another optimizer is recommended
        assert "another optimizer" in advice
        return getattr(keras.optimizers, kind)(**changes)
    config = inner.get_config()
    assert changes.keys() <= config.keys()
    return type(inner).from_config({**config, **changes})


def apply_advice_on_exchange(make, advice, library):
    """Returns a function that makes the advised optimizer, and the method."""
    if "use SGD with CodedAdam()" in advice:
        return library.optimizers.SGD, rs.CodedAdam()
    return lambda: apply_advice(make, advice), IN_EXCHANGE


def train(library, optimizer, steps=2):
    """Trains on one worker; returns whether weights are finite, and whether they changed."""
    library.utils.set_random_seed(1)
    layer = library.layers.Dense(4)
    layer.build((8, 6))
    before = layer.get_weights()
    x, y = np.random.default_rng(0).normal(size=(2, 8, 6)).astype("float32")
    for _ in range(steps):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((layer(x) - y[:, :4]) ** 2)
        variables = layer.trainable_variables
        gradients = tape.gradient(loss, variables)
        optimizer.apply_gradients(list(zip(gradients, variables, strict=True)))
    after = layer.get_weights()
    assert all(np.isfinite(w).all() for w in after)
    assert not np.allclose(before[0], after[0])


@pytest.mark.filterwarnings(ONE_WORKER)
@loop(("family", "name"), [(f, n) for f in FAMILIES for n in all_of(f)])
def test_optimizer_after_the_advice_trains(family, name):
    """Covers delayed momentum and momentum on both sides."""
    make = all_of(family)[name]
    assert momentum.of(make()).known, "not in the table of momentum.py"
    late, twice = momentum_advice(make, LATE), momentum_advice(make, IN_EXCHANGE)
    assert bool(late) == bool(twice) == bool(momentum.of(make()).values)
    if late:
        assert momentum_advice(lambda: apply_advice(make, late), LATE) == ""
    if twice or name == "ScheduleFreeAdamW":
        library = keras if "another optimizer" in twice else library_of(family)
        advised, method = make, IN_EXCHANGE
        if twice:
            advised, method = apply_advice_on_exchange(make, twice, library)
        assert momentum_advice(advised, method) == ""
        train(library, rs.DistributedOptimizer(advised(), method))


@loop(
    ("make", "values"),
    [
        (SCHEDULE_FREE, {}),
        (lambda: keras.optimizers.Muon(), {"momentum": 0.95, "adam_beta_1": 0.9}),
        (lambda: keras.optimizers.Lion(), {"beta_1": 0.9}),
        (lambda: keras.optimizers.SGD(momentum=0.8), {"momentum": 0.8}),
        (lambda: keras.optimizers.RMSprop(momentum=0.3), {"momentum": 0.3}),
        (lambda: keras.optimizers.Adafactor(), {}),
        (lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adamax()), {"beta_1": 0.9}),
        (lambda: all_of("addons")["Yogi"](), {"beta1": 0.9}),
        (lambda: rs.addons.load().optimizers.Lookahead(LEGACY.Adam(beta_1=0.7)), {"beta_1": 0.7}),
    ],
)
def test_momentum_of_known_optimizers(make, values):
    """From the papers and the sources of the optimizers."""
    assert momentum.of(make()).values == pytest.approx(values)


class OwnScheduleFree(SCHEDULE_FREE):
    """A user's subclass."""


class OwnAdam(keras.optimizers.AdamW):
    """A user's subclass."""


class UnknownOptimizer(keras.optimizers.Optimizer):
    """An unknown optimizer whose `beta_1` may mean anything."""

    def __init__(self):
        super().__init__(learning_rate=0.1)

    def get_config(self):
        return {**super().get_config(), "beta_1": 0.9}

    def update_step(self, gradient, variable, learning_rate):
        self.assign_sub(variable, learning_rate * gradient)


def test_subclasses_inherit_their_momentum():
    assert momentum.of(OwnAdam()).values == {"beta_1": 0.9}
    assert "use OwnAdam(beta_1=0.0)" in momentum_advice(OwnAdam, LATE)
    assert (
        momentum.of(OwnScheduleFree()).known and momentum_advice(OwnScheduleFree, IN_EXCHANGE) == ""
    )


@pytest.mark.filterwarnings(ONE_WORKER)
def test_unknown_optimizers_get_no_advice():
    """They are not rejected either: their momentum is unknown."""
    for method in (LATE, IN_EXCHANGE):
        advice = momentum_advice(UnknownOptimizer, method)
        assert (
            "beta_1=0.9" in advice and "UnknownOptimizer" in advice and "beta_1=0.0" not in advice
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", rs.AccuracyWarning)
        train(keras, rs.DistributedOptimizer(UnknownOptimizer(), IN_EXCHANGE))


def test_schedule_free_points_are_not_momentum():
    """Methods with local steps clear the momentum of what they send, but not these points."""
    layer = keras.layers.Dense(4)
    layer.build((8, 6))
    found = {}
    for make in (SCHEDULE_FREE, keras.optimizers.Adamax, rs.AMSGrad):
        inner = make()
        inner.build(layer.trainable_variables)
        found[make] = list(slots.momentum_slots(inner))
    assert [len(slots) for slots in found.values()] == [0, 2, 2]


@pytest.mark.filterwarnings(ONE_WORKER)
def test_optimizer_without_a_learning_rate_trains():
    """TensorFlow Addons' COCOB: `fit` compares the workers' learning rates."""
    model = tf_keras.Sequential([tf_keras.layers.Input((3,)), tf_keras.layers.Dense(1)])
    model.compile(rs.DistributedOptimizer(all_of("addons")["COCOB"](), rs.Dense()), "mse")
    history = model.fit(np.ones([8, 3]), np.ones([8, 1]), verbose=0)
    assert np.isfinite(history.history["loss"]).all()


@pytest.mark.deep
def test_muon_takes_attention_biases_for_matrices(mirrored):
    """As docs/adaptive.md states; its recipe passes them to AdamW and trains."""
    layers, served = keras.layers, {}
    for excluded in (None, ["output_dense", "bias"]):
        keras.utils.set_random_seed(1)
        with mirrored(2).scope():
            given = keras.Input((6,))
            x = layers.Embedding(9, 8, name="embedding")(given)
            x = x + layers.MultiHeadAttention(2, 4, name="attention")(x, x)
            x = layers.Dense(8, name="hidden")(x)
            model = keras.Model(given, layers.Dense(9, name="output_dense")(x))
            inner = keras.optimizers.Muon(0.01, exclude_layers=excluded)
            model.compile(
                rs.DistributedOptimizer(inner, rs.PowerSGD(rank=2)),
                keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            )
            model.optimizer.build(model.trainable_variables)
        pairs = zip(model.trainable_variables, inner.adam_velocities, strict=True)
        served[str(excluded)] = {v.path for v, second in pairs if second is None}
    biases = {f"attention/{name}/bias" for name in ("query", "key", "value")}
    assert served["None"] == biases | {"hidden/kernel", "output_dense/kernel"}
    assert served[str(excluded)] == {"hidden/kernel"}
    tokens = np.random.default_rng(0).integers(0, 9, (16, 6))
    before = model.get_weights()
    losses = model.fit(tokens, tokens, batch_size=8, epochs=4, verbose=0).history["loss"]
    assert all(np.isfinite(w).all() for w in model.get_weights())
    assert losses[-1] < losses[0] and not np.array_equal(before[1], model.get_weights()[1])
