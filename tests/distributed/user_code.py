"""Typical Keras user code, row by row; test_user_code.py runs the rows on real workers.

A row is a function of a `Trainer` with code that a user would write: a model, data, and training.
The `Trainer` knows the library, the way (`fit`, a custom `train_step` or a loop), and the
optimizer's wrapper. A row lists the libraries and ways that it supports.
"""

import functools
import inspect

import numpy as np
import tensorflow as tf

from tests.distributed import problems

# By name: function, libraries, ways, and extra options.
ROWS = {}
BATCH, BATCHES = 16, 4
PASSES = 3  # passes over the data per epoch: starting an epoch takes as long as twenty steps


def row(function=None, *, libraries=("keras3", "tf_keras", "addons"), fit_only=False, **extra):
    """Register a row.

    Args:
        function: The row.
        libraries: Supported libraries.
        fit_only: Whether the row needs `fit`.
        extra: `slow`: only with `--deep`. `alone`: no comparison with the plain optimizer, because
            of random numbers or because Keras alone fails. `falls`: whether the loss must fall.
    """
    if function is None:
        return functools.partial(row, libraries=libraries, fit_only=fit_only, **extra)
    ways = ("fit",) if fit_only else ("fit", "train_step", "loop")
    ROWS[function.__name__] = (function, libraries, ways, extra)
    return function


class Trainer:
    """Builds, wraps and trains, in one library and one way.

    Args:
        strategy: The library's strategy.
        library: `"keras3"`, `"tf_keras"` or `"addons"`.
        way: `"fit"`, `"train_step"` or `"loop"`.
        wrap: Function that wraps an optimizer.
    """

    def __init__(self, strategy, library, way, wrap):
        import keras
        import tf_keras

        import tf_redsync as rs

        self.strategy, self.way, self.wrap = strategy, way, wrap
        self.name = library
        self.keras = keras if library == "keras3" else tf_keras
        self.layers, self.optimizers = self.keras.layers, self.keras.optimizers
        if library == "addons":
            self.optimizers = rs.addons.load().optimizers
        self.models = []

    def adam(self, **options):
        """An optimizer of Adam's kind."""
        kind = "LazyAdam" if self.name == "addons" else "Adam"
        return getattr(self.optimizers, kind)(0.01, **options)

    def regression(self):
        """Inputs and targets."""
        return problems.regression(BATCH * BATCHES)

    def train(self, build, data, loss="mse", optimizer=None, epochs=2, options=None, **fit):
        """Build and train a model; returns the loss of each epoch.

        Args:
            build: Returns the inputs and outputs of a model; or a model.
            data: Arrays, by rows: inputs, targets, and optionally weights.
            loss: For `compile`.
            optimizer: Makes the optimizer; the default is `adam`.
            epochs: Number of epochs.
            options: Further arguments of `compile`.
            fit: Further arguments of `fit`.
        """
        with self.strategy.scope():
            network = build()
            if not isinstance(network, self.keras.Model):
                model_class = self._own_train_step() if self.way == "train_step" else None
                network = (model_class or self.keras.Model)(*network)
            self.compile(network, loss, optimizer, options)
        return self.go_on(network, data, loss, epochs, **fit)

    def compile(self, model, loss="mse", optimizer=None, options=None):
        """Compile with a new optimizer."""
        with self.strategy.scope():
            wrapped = self.wrap((optimizer or self.adam)())
            model.compile(wrapped, loss=loss, **(options or {}))

    def go_on(self, model, data, loss="mse", epochs=2, **fit):
        """Train a compiled model."""
        if model not in self.models:
            self.models.append(model)
        dataset = tf.data.Dataset.from_tensor_slices(data).batch(BATCH).repeat(PASSES)
        dataset = problems.sharded(dataset)
        if self.way == "loop":
            return self._loop(model, dataset, self.keras.losses.get(loss), epochs)
        return model.fit(dataset, epochs=epochs, verbose=0, **fit).history["loss"]

    def _loop(self, model, dataset, loss_of, epochs):
        """A loop as in TensorFlow's tutorial, without `build`."""
        replicas = self.strategy.num_replicas_in_sync

        def replica_step(x, y):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(loss_of(y, model(x, training=True)))
                loss = (loss + sum(model.losses)) / replicas
            gradients = tape.gradient(loss, model.trainable_variables)
            pairs = zip(gradients, model.trainable_variables, strict=True)
            model.optimizer.apply_gradients([(g, v) for g, v in pairs if g is not None])
            return loss

        @tf.function
        def step(batch):
            return self.strategy.reduce("SUM", self.strategy.run(replica_step, batch), axis=None)

        distributed = self.strategy.experimental_distribute_dataset(dataset)
        return [
            float(np.mean([float(step(batch)) for batch in distributed])) for _ in range(epochs)
        ]

    def _own_train_step(self):
        """A model class with the train step of Keras's guide."""
        keras3 = self.name == "keras3"

        class Own(self.keras.Model):
            def train_step(self, data):
                x, y, weight = (*data, None)[:3]
                with tf.GradientTape() as tape:
                    predicted = self(x, training=True)
                    loss = self.compute_loss(x, y, predicted, weight)
                variables = self.trainable_variables
                gradients = tape.gradient(loss, variables)
                self.optimizer.apply_gradients(zip(gradients, variables, strict=True))
                if not keras3:
                    return self.compute_metrics(x, y, predicted, weight)
                for metric in self.metrics:
                    if metric.name == "loss":
                        metric.update_state(
                            loss * tf.distribute.get_strategy().num_replicas_in_sync
                        )
                    else:
                        metric.update_state(y, predicted)
                return {m.name: m.result() for m in self.metrics}

        return Own

    def mlp(self, *extra, inputs=12, units=48, head=None, **dense):
        """A function that returns inputs and outputs of a small network."""

        def build():
            x = self.keras.Input((inputs,))
            hidden = self.layers.Dense(units, activation="relu", **dense)(x)
            for layer in extra:
                hidden = layer(hidden)
            return x, (head or self.layers.Dense(1))(hidden)

        return build


def classes(rows=BATCH * BATCHES, count=4, dtype="int64"):
    """Inputs `[rows, 12]` and class labels."""
    x, _ = problems.regression(rows)
    return x, (np.argmax(x[:, :count], axis=1)).astype(dtype)


# ------------------------------------------------------------------------------------- labels


def _labels(dtype):
    def labels(t):
        loss = "sparse_categorical_crossentropy"
        head = t.layers.Dense(4, activation="softmax")
        return t.train(t.mlp(head=head), classes(dtype=dtype), loss=loss)

    labels.__name__ = f"labels_{dtype}"
    return labels


for _dtype in ("int32", "int64", "float32", "float64"):
    row(_labels(_dtype))


@row
def one_hot_labels(t):
    x, y = classes()
    head = t.layers.Dense(4, activation="softmax")
    hot = np.eye(4, dtype="float32")[y]
    return t.train(t.mlp(head=head), (x, hot), "categorical_crossentropy")


@row(fit_only=True)
def metrics_and_weights_of_classes(t):
    head = t.layers.Dense(4, activation="softmax")
    return t.train(
        t.mlp(head=head),
        classes(),
        "sparse_categorical_crossentropy",
        options={"metrics": ["accuracy"]},
        class_weight={0: 1.0, 1: 2.0, 2: 0.5, 3: 1.0},
    )


# ------------------------------------------------------------------------------------- models


@row
def attention(t):
    def build():
        x = t.keras.Input((6, 8))
        attended = t.layers.MultiHeadAttention(2, 4)(x, x)
        normed = t.layers.LayerNormalization()(t.layers.Add()([x, attended]))
        mixed = t.layers.Dense(16, activation="relu")(normed)
        return x, t.layers.Dense(1)(t.layers.GlobalAveragePooling1D()(mixed))

    x = np.random.RandomState(0).randn(64, 6, 8).astype("float32")
    return t.train(build, (x, x.mean(1)[:, :1] + x[:, 0, 1:2]))


@row
def zipf_embedding(t):
    """Word frequencies as in a text: most rows never occur."""
    generator = np.random.RandomState(0)
    words = np.minimum(generator.zipf(1.3, (64, 8)), 499)

    def build():
        x = t.keras.Input((8,), dtype="int32")
        embedded = t.layers.Embedding(500, 8)(x)
        return x, t.layers.Dense(1)(t.layers.Flatten()(embedded))

    return t.train(build, (words, (words % 3 - 1.0).mean(1, keepdims=True).astype("float32")))


@row
def recurrent(t):
    def build():
        x = t.keras.Input((5, 4))
        return x, t.layers.Dense(1)(t.layers.LSTM(8)(x))

    x = np.random.RandomState(0).randn(64, 5, 4).astype("float32")
    return t.train(build, (x, x[:, :, 0].mean(1, keepdims=True)))


@row(libraries=("keras3", "tf_keras"), alone=True)
def batch_normalization_and_dropout(t):
    extra = (t.layers.BatchNormalization(), t.layers.Dropout(0.1))
    return t.train(t.mlp(*extra), t.regression())


@row
def regularizers_and_add_loss(t):
    class Penalty(t.layers.Layer):
        def call(self, inputs):
            self.add_loss(1e-2 * tf.reduce_mean(inputs**2))
            return inputs

    return t.train(
        t.mlp(Penalty(), kernel_regularizer="l2", activity_regularizer="l1"), t.regression()
    )


@row(fit_only=True)
def several_outputs(t):
    def build():
        x = t.keras.Input((12,))
        hidden = t.layers.Dense(32, activation="relu")(x)
        value = t.layers.Dense(1, name="value")(hidden)
        kind = t.layers.Dense(4, activation="softmax", name="kind")(hidden)
        return x, {"value": value, "kind": kind}

    (x, kind), (_, value) = classes(), t.regression()
    return t.train(
        build,
        (x, {"value": value, "kind": kind}),
        {"value": "mse", "kind": "sparse_categorical_crossentropy"},
        options={"loss_weights": {"value": 0.5, "kind": 1.0}},
    )


@row(fit_only=True)
def sample_weights(t):
    x, y = t.regression()
    weights = np.linspace(0.0, 2.0, len(x)).astype("float32")
    return t.train(t.mlp(), (x, y, weights))


@row
def a_layer_without_a_gradient(t):
    class Idle(t.layers.Layer):
        def build(self, shape):
            self.idle = self.add_weight(shape=(40,), name="idle", initializer="ones")

        def call(self, inputs):
            return inputs

    return t.train(t.mlp(Idle()), t.regression())


def _application(name, size, **options):
    def application(t):
        def build():
            make = getattr(t.keras.applications, name)
            return make(weights=None, input_shape=(size, size, 3), classes=4, **options)

        generator = np.random.RandomState(0)
        kind = generator.randint(0, 4, 16)
        x = generator.randn(16, size, size, 3) + kind[:, None, None, None]
        data = (x.astype("float32"), kind)
        return t.train(build, data, "sparse_categorical_crossentropy", epochs=3)

    application.__name__ = name
    return application


_LARGE = {"fit_only": True, "slow": True, "alone": True, "falls": False}  # trained for three steps
row(_application("MobileNetV2", 32, alpha=0.35), **_LARGE)
row(_application("ResNet50", 32), **_LARGE)


# --------------------------------------------------------------------------------- optimizers


@row
def ema(t):
    if t.name == "addons":
        legacy = t.keras.optimizers.legacy
        return t.train(
            t.mlp(),
            t.regression(),
            optimizer=lambda: t.optimizers.MovingAverage(legacy.SGD(0.05), average_decay=0.5),
        )
    options = {"use_ema": True, "ema_momentum": 0.5}
    return t.train(t.mlp(), t.regression(), optimizer=lambda: t.adam(**options))


@row(libraries=("keras3", "tf_keras"), alone=True)
def ema_in_the_weights(t):
    """Keras 3 alone fails: it aggregates the replicas in a branch."""
    options = {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 3}
    return t.train(t.mlp(), t.regression(), optimizer=lambda: t.adam(**options))


@row(libraries=("keras3",), fit_only=True)
def ema_weights_swapped(t):
    swap = t.keras.callbacks.SwapEMAWeights(swap_on_epoch=True)
    return t.train(
        t.mlp(),
        t.regression(),
        optimizer=lambda: t.adam(use_ema=True, ema_momentum=0.5),
        callbacks=[swap],
        validation_data=problems.dataset(16, 16),
    )


@row
def weight_decay(t):
    def optimizer():
        if t.name == "addons":
            return t.optimizers.AdamW(weight_decay=1e-3, learning_rate=0.01)
        return t.optimizers.AdamW(0.01, weight_decay=0.1)

    return t.train(t.mlp(), t.regression(), optimizer=optimizer)


@row(libraries=("keras3",))
def ema_and_weight_decay(t):
    """Both change the weights without gradients."""
    options = {"weight_decay": 0.1, "use_ema": True, "ema_momentum": 0.5}
    return t.train(t.mlp(), t.regression(), optimizer=lambda: t.adam(**options))


def _clipping(name, value):
    def clipping(t):
        return t.train(t.mlp(), t.regression(), optimizer=lambda: t.adam(**{name: value}))

    clipping.__name__ = name
    return clipping


for _name, _value in (("clipnorm", 0.5), ("global_clipnorm", 0.5), ("clipvalue", 0.05)):
    row(_clipping(_name, _value))


@row
def schedule(t):
    rate = t.keras.optimizers.schedules.ExponentialDecay(0.02, 4, 0.9)

    def optimizer():
        if t.name == "addons":
            return t.optimizers.LazyAdam(rate)
        return t.optimizers.Adam(rate)

    return t.train(t.mlp(), t.regression(), optimizer=optimizer)


# ----------------------------------------------------------------------- training, step by step


@row(libraries=("keras3",))
def lora(t):
    def build():
        inputs, outputs = t.mlp()()
        model = (t._own_train_step() if t.way == "train_step" else t.keras.Model)(inputs, outputs)
        model.layers[1].enable_lora(2)
        return model

    return t.train(build, t.regression())


@row(libraries=("keras3", "tf_keras"), fit_only=True, alone=True)
def compiled_outside_of_the_scope(t):
    with t.strategy.scope():
        model = t.keras.Model(*t.mlp()())
        optimizer = t.wrap(t.adam())
    model.compile(optimizer, loss="mse")
    return t.go_on(model, t.regression())


@row
def a_frozen_layer(t):
    frozen = t.layers.Dense(24, trainable=False)
    return t.train(t.mlp(frozen), t.regression())


@row
def unfrozen_later(t):
    layer = t.layers.Dense(24, trainable=False)
    losses = t.train(t.mlp(layer), t.regression(), epochs=2)
    layer.trainable = True
    before = [np.array(w) for w in layer.get_weights()]
    t.compile(t.models[-1])
    losses = [*losses, *t.go_on(t.models[-1], t.regression())]
    assert any(np.any(a != b) for a, b in zip(before, layer.get_weights(), strict=True))
    return losses


@row(fit_only=True)
def early_stopping(t):
    stop = t.keras.callbacks.EarlyStopping("val_loss", patience=1, restore_best_weights=True)
    losses = t.train(
        t.mlp(),
        t.regression(),
        epochs=5,
        callbacks=[stop],
        validation_data=problems.dataset(16, 16),
    )
    t.train(t.mlp(), t.regression(), epochs=1)
    return losses


@row(fit_only=True)
def rate_on_a_plateau(t):
    plateau = t.keras.callbacks.ReduceLROnPlateau("loss", patience=1, min_delta=1e9, factor=0.7)
    return t.train(t.mlp(), t.regression(), callbacks=[plateau])


@row
def uneven_data(t):
    """59 rows: the last batch is short and its rows are odd for two workers."""
    return t.train(t.mlp(), problems.regression(59))


@row(fit_only=True)
def steps_per_execution(t):
    return t.train(t.mlp(), t.regression(), options={"steps_per_execution": 3})


@row(fit_only=True)
def run_eagerly(t):
    return t.train(t.mlp(), t.regression(), epochs=2, options={"run_eagerly": True})


@row(slow=True)
def three_thousand_steps(t):
    losses = t.train(t.mlp(), t.regression(), epochs=3000 // (PASSES * BATCHES))
    return [*losses[:1], *losses[-1:]]


def run(strategy, library, way, name, wrap):
    """Train a row; returns its losses, its models' weights, and an error text."""
    trainer = Trainer(strategy, library, way, wrap)
    trainer.keras.utils.set_random_seed(7)
    try:
        losses = ROWS[name][0](trainer)
    except Exception as error:
        line = inspect.trace()[-1]
        return {"error": f"{type(error).__name__} in {line.function}: {error}"[:600]}
    found = {"falls": ROWS[name][3].get("falls", True), "losses": losses, "error": ""}
    found["digests"] = [problems.digest(m) for m in trainer.models]
    weights = [np.ravel(w) for m in trainer.models for w in m.get_weights()]
    return {**found, "weights": np.concatenate(weights)}
