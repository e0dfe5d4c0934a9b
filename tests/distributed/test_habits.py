"""Common user code around an optimizer, on two real workers: loops, several optimizers, dtypes.

No test calls `optimizer.build`: a plain optimizer does not need it. One pair of workers runs all
scenarios and returns the results or the traceback of each.
"""

import numpy as np
import pytest

from tests.deep import DEEP
from tests.distributed.cluster import run_workers

STEPS = 3


def run_all(names):
    """Run scenarios; `NAME.error` is the scenario's traceback, or empty."""
    import traceback

    import tf_redsync as rs

    strategy = rs.MultiWorkerMirroredStrategy()
    results = {}
    for name in names:
        try:
            found, error = SCENARIOS[name](strategy), ""
        except Exception:  # reported by the test
            found, error = {}, traceback.format_exc()
        results |= {f"{name}.{key}": value for key, value in found.items()}
        results[f"{name}.error"] = error
    return results


def loop(strategy, model, optimizer, mode):
    """A custom loop without `build`; returns weight hashes of every step."""
    import tensorflow as tf

    from tests.distributed import problems

    def replica_step(batch):
        x, y = batch
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x, training=True) - y) ** 2) / 2
            if loss > 1e3:  # AutoGraph converts it
                loss = tf.sqrt(loss)
        variables = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss

    run = tf.function(replica_step) if mode == "decorated" else replica_step

    def step(batch):
        return strategy.reduce("SUM", strategy.run(run, args=(batch,)), axis=None)

    def epoch(batches):
        for batch in batches:
            step(batch)

    traced = tf.function(step)
    data = strategy.experimental_distribute_dataset(problems.dataset(16 * STEPS, 16))
    digests = []
    if mode == "epoch":  # the loop over the data is in the graph
        tf.function(epoch)(data)
        return [problems.digest(model)]
    for batch in data:
        (traced if mode == "traced" else step)(batch)
        digests.append(problems.digest(model))
    return digests


def looped(mode, family="keras", method="redsync", dtype=None):
    """Scenario: a custom loop of a family."""

    def scenario(strategy):
        import keras
        import tf_keras

        import tf_redsync as rs
        from tests.distributed import problems

        library = keras if family == "keras" else tf_keras
        optimizers = tf_keras.optimizers.legacy if family == "legacy" else library.optimizers
        with strategy.scope():
            model = problems.network(library)
            optimizer = rs.DistributedOptimizer(
                optimizers.SGD(0.05, momentum=0.5),
                None if method == "auto" else rs.RedSync(density=0.1, dense_below=16),
            )
        digests = loop(strategy, model, optimizer, mode)
        return {"digests": digests, "step": int(optimizer.exchange.step.numpy())}

    return scenario


def gan(strategy):
    """Keras's guide "Customizing fit": a model with two optimizers, compiled by name."""
    import keras
    import tensorflow as tf

    import tf_redsync as rs

    class Gan(keras.Model):
        def __init__(self, discriminator, generator):
            super().__init__()
            self.discriminator, self.generator = discriminator, generator
            self.seeds = keras.random.SeedGenerator(1337)

        def compile(self, d_optimizer, g_optimizer, loss_fn):
            super().compile()
            self.d_optimizer, self.g_optimizer, self.loss_fn = d_optimizer, g_optimizer, loss_fn

        def train_step(self, real):
            rows = tf.shape(real)[0]
            fake = self.generator(keras.random.normal((rows, 4), seed=self.seeds))
            labels = tf.concat([tf.ones((rows, 1)), tf.zeros((rows, 1))], axis=0)
            with tf.GradientTape() as tape:
                d_loss = self.loss_fn(labels, self.discriminator(tf.concat([fake, real], axis=0)))
            weights = self.discriminator.trainable_weights
            self.d_optimizer.apply_gradients(
                zip(tape.gradient(d_loss, weights), weights, strict=True)
            )
            with tf.GradientTape() as tape:
                generated = self.generator(keras.random.normal((rows, 4), seed=self.seeds))
                g_loss = self.loss_fn(tf.zeros((rows, 1)), self.discriminator(generated))
            weights = self.generator.trainable_weights
            self.g_optimizer.apply_gradients(
                zip(tape.gradient(g_loss, weights), weights, strict=True)
            )
            return {"d_loss": d_loss, "g_loss": g_loss}

    def dense(rows, columns):
        layers = [keras.layers.Dense(24, activation="relu"), keras.layers.Dense(columns)]
        return keras.Sequential([keras.layers.Input((rows,)), *layers])

    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = Gan(dense(6, 1), dense(4, 6))
        method = rs.RedSync(density=0.1, dense_below=16)
        model.compile(
            rs.DistributedOptimizer(keras.optimizers.Adam(3e-3), method),
            rs.DistributedOptimizer(keras.optimizers.Adam(3e-3), method),
            keras.losses.BinaryCrossentropy(from_logits=True, reduction="sum_over_batch_size"),
        )
    rows = np.random.RandomState(0).randn(16 * STEPS, 6).astype("float32")
    model.fit(tf.data.Dataset.from_tensor_slices(rows).batch(16), epochs=2, verbose=0)
    parts = (model.discriminator, model.generator)
    from tests.distributed import problems

    return {
        "digests": [problems.digest(part) for part in parts],
        "step": int(model.d_optimizer.exchange.step.numpy()),
        "g_step": int(model.g_optimizer.exchange.step.numpy()),
    }


def no_call(parts_are_built):
    """Scenario: a model with a `train_step` and without `call`, as in Keras's VAE example."""

    def scenario(strategy):
        import keras
        import tensorflow as tf

        import tf_redsync as rs
        from tests.distributed import problems

        class Autoencoder(keras.Model):
            def __init__(self, encoder, decoder):
                super().__init__()
                self.encoder, self.decoder = encoder, decoder
                self.seen = keras.metrics.Mean(name="seen")

            @property
            def metrics(self):
                return [self.seen]

            def train_step(self, rows):
                with tf.GradientTape() as tape:
                    errors = (self.decoder(self.encoder(rows)) - rows) ** 2
                    loss = tf.reduce_mean(errors) / strategy.num_replicas_in_sync
                weights = self.trainable_weights
                self.optimizer.apply_gradients(
                    zip(tape.gradient(loss, weights), weights, strict=True)
                )
                self.seen.update_state(loss)
                return {"seen": self.seen.result()}

            def test_step(self, rows):
                self.seen.update_state(tf.reduce_mean(self.decoder(self.encoder(rows)) ** 2))
                return {"seen": self.seen.result()}

        def dense(rows, columns):
            first = [keras.layers.Input((rows,))] if parts_are_built else []
            return keras.Sequential([*first, keras.layers.Dense(columns)])

        keras.utils.set_random_seed(3)
        with strategy.scope():
            model = Autoencoder(dense(6, 4), dense(4, 6))
            method = rs.RedSync(density=0.1, dense_below=16)
            optimizer = rs.DistributedOptimizer(keras.optimizers.Adam(3e-3), method)
            model.compile(optimizer=optimizer)
        rows = np.random.RandomState(0).randn(16 * STEPS, 6).astype("float32")
        data = tf.data.Dataset.from_tensor_slices(rows).batch(16)
        model.fit(data, validation_data=data, verbose=0)
        return {
            "digests": [problems.digest(model)],
            "step": int(optimizer.exchange.step.numpy()),
        }

    return scenario


def batch_sizes(strategy):
    """Global batches that divide evenly among the workers or not, and their warnings."""
    import warnings

    import keras

    import tf_redsync as rs
    from tests.distributed import problems

    def rmse(y, p):  # NaN for no rows
        return keras.ops.sqrt(keras.ops.mean((y - p) ** 2))

    with strategy.scope():
        model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)])
        optimizer = rs.DistributedOptimizer(keras.optimizers.SGD(0.1), rs.Dense())
        model.compile(optimizer, "mse", metrics=["mae", rmse])

    def ones(rows):
        return np.ones((rows, 3), "float32"), np.ones((rows, 1), "float32")

    def run(method, rows, batch_size=16, **options):
        for noted in strategy.batch_rows.values():
            noted._warned = False
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", UserWarning)
            result = method(*ones(rows), batch_size=batch_size, verbose=0, **options)
        texts = [str(w.message) for w in caught if isinstance(w.message, rs.AccuracyWarning)]
        texts = [text for text in texts if "drop_remainder" in text]
        assert len(texts) <= 1
        return "".join(texts), result

    def fit(*sizes, **options):
        return run(model.fit, *sizes, epochs=2, **options)

    found = {f"{sizes}": fit(*sizes)[0] for sizes in ((48, 16), (40, 16), (45, 16))}
    before = int(optimizer.exchange.step.numpy())
    found["(3, 1)"], trained = fit(3, 1)
    step = (int(optimizer.exchange.step.numpy()) - before) // 2
    assert np.isnan(trained.history["rmse"]).all() and np.isfinite(trained.history["mae"]).all()
    found["validation"], trained = fit(48, validation_data=ones(17))
    assert (
        np.isnan(trained.history["val_rmse"]).all() and np.isfinite(trained.history["rmse"]).all()
    )
    for rows in (32, 19, 17):
        found[f"evaluate {rows}"], (_, mae, metric) = run(model.evaluate, rows)
        assert np.isfinite(mae) and np.isnan(metric) == (rows == 17)
    return {
        "warned": [f"{name}: {text}" for name, text in found.items()],
        "digests": [problems.digest(model)],
        "step": step,
    }


def scalar_losses(strategy):
    """Losses that return a mean instead of one value per row: gradients of equal size."""
    import keras

    import tf_redsync as rs
    from tests.distributed import problems

    def mean_of_squares(y, p):
        return keras.ops.mean((y - p) ** 2)

    class MeanOfSquares(keras.losses.Loss):
        def call(self, y, p):
            return mean_of_squares(y, p)

    found = []
    for loss in ("mse", mean_of_squares, MeanOfSquares()):
        keras.utils.set_random_seed(5)
        with strategy.scope():
            model = problems.network(keras)
            optimizer = rs.DistributedOptimizer(keras.optimizers.SGD(0.05), rs.Dense())
            model.compile(optimizer, loss)
        data = problems.dataset(16 * STEPS, 16)
        history = model.fit(data, validation_data=data, verbose=0).history
        weights = np.concatenate([w.ravel() for w in model.get_weights()])
        found.append([*history["loss"], *history["val_loss"], *weights])
    np.testing.assert_allclose(found[1:], found[:1] * 2, rtol=1e-4, atol=1e-6)
    return {"digests": [problems.digest(model)], "step": int(optimizer.exchange.step.numpy())}


def dropout(strategy):
    """A model with dropout; masks differ between workers."""
    import keras
    import tensorflow as tf

    import tf_redsync as rs
    from tests.distributed import problems

    with strategy.scope():
        layer = keras.layers.Dropout(0.5, seed=3)
        model = keras.Sequential([problems.network(keras), layer])
        optimizer = rs.DistributedOptimizer(keras.optimizers.SGD(0.05), rs.Dense())
        model.compile(optimizer, "mse")
    model.fit(problems.dataset(16 * STEPS, 16), verbose=0)
    draw = tf.function(lambda: strategy.run(lambda: layer(tf.ones((1, 64)), training=True)))
    first, second = strategy.gather(draw(), axis=0).numpy()
    assert (first != second).any()
    return {"digests": [problems.digest(model)], "step": int(optimizer.exchange.step.numpy())}


def bfloat16(strategy):
    """A model whose variables are bfloat16, under `fit`."""
    import keras

    import tf_redsync as rs
    from tests.distributed import problems

    keras.config.set_dtype_policy("bfloat16")
    try:
        with strategy.scope():
            model = problems.network(keras)
            method = rs.RedSync(density=0.1, dense_below=16)
            optimizer = rs.DistributedOptimizer(keras.optimizers.SGD(0.05, momentum=0.5), method)
            model.compile(optimizer, "mse")
        model.fit(problems.dataset(16 * STEPS, 16), verbose=0)
    finally:
        keras.config.set_dtype_policy("float32")
    assert {str(v.dtype) for v in model.trainable_variables} == {"bfloat16"}
    return {"digests": [problems.digest(model)], "step": int(optimizer.exchange.step.numpy())}


def mixed_float16(module):
    """Scenario: tf_keras scales the loss, and one worker's gradients overflow once."""

    def scenario(strategy):
        import tensorflow as tf
        import tf_keras

        import tf_redsync as rs
        from tests.distributed import problems

        precision = tf_keras.mixed_precision
        optimizers = tf_keras.optimizers.legacy if module == "legacy" else tf_keras.optimizers
        precision.set_global_policy("mixed_float16")
        try:
            with strategy.scope():
                model = problems.network(tf_keras)
                optimizer = rs.DistributedOptimizer(
                    precision.LossScaleOptimizer(optimizers.SGD(0.05), initial_scale=64.0),
                    rs.RedSync(density=0.1, dense_below=16),
                )
                model.compile(optimizer, "mse")
            x, y = problems.regression(16 * STEPS)
            x[0] = 1e38  # infinite in float16: the first worker's rows of the first batch
            data = tf.data.Dataset.from_tensor_slices((x, y)).batch(16)
            model.fit(data, verbose=0)
        finally:
            precision.set_global_policy("float32")
        return {
            "digests": [problems.digest(model)],
            "step": int(optimizer.exchange.step.numpy()),
            "scale": float(optimizer.loss_scale.numpy()),
            "skipped": int(optimizer.exchange.skipped.numpy()),
            "finite": all(np.isfinite(w).all() for w in model.get_weights()),
        }

    return scenario


def forgotten_scope(strategy):
    """Optimizers with slots, created and compiled outside of the scope, and one inside."""
    import contextlib

    import keras

    import tf_redsync as rs
    from tests.distributed import problems

    digests = []
    for where in (contextlib.nullcontext, strategy.scope):
        keras.utils.set_random_seed(5)
        with strategy.scope():
            model = problems.network(keras)
        with where():
            inner = keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(0.05, STEPS))
            optimizer = rs.DistributedOptimizer(inner, rs.TopK(density=0.5))
        model.compile(optimizer, "mse")
        model.fit(problems.dataset(16 * STEPS, 16), verbose=0)
        assert int(inner.iterations.numpy()) == STEPS
        digests.append(problems.digest(model))
    assert digests[0] == digests[1]
    return {"digests": digests[:1], "step": int(optimizer.exchange.step.numpy())}


def stateful_recurrent_layer(strategy):
    """A stateful LSTM: its states belong to the rows of a worker's batches."""
    import keras

    import tf_redsync as rs
    from tests.distributed import problems

    keras.utils.set_random_seed(3)
    with strategy.scope():
        layer, head = keras.layers.LSTM(4, stateful=True), keras.layers.Dense(1)
        model = keras.Sequential([keras.Input(batch_shape=(8, 5, 2)), layer, head])
        optimizer = rs.DistributedOptimizer(keras.optimizers.SGD(0.05), rs.TopK(density=0.5))
        model.compile(optimizer, "mse")
    alone = keras.layers.LSTM(4)
    alone.build((8, 5, 2))
    alone.set_weights([w.numpy() for w in layer.trainable_weights])
    x = np.random.RandomState(0).randn(16 * STEPS, 5, 2).astype("float32")
    own_rows = x[8 * problems.rank() :][:8]
    model.evaluate(x[:16], x[:16, 0, :1], batch_size=16, verbose=0)
    np.testing.assert_allclose(layer.states[0].numpy(), alone(own_rows), rtol=1e-5, atol=1e-6)
    model.fit(x, x[:, 0, :1], batch_size=16, verbose=0)
    states = strategy.gather(layer.states[0].value, axis=0).numpy()
    assert (states[:8] != states[8:]).all()
    return {"digests": [problems.digest(head)], "step": int(optimizer.exchange.step.numpy())}


def own_logs(strategy):
    """A `train_step` that sets the learning rate and logs it, with sparse inputs in `fit`."""
    import keras
    import tensorflow as tf

    import tf_redsync as rs
    from tests.distributed import problems

    class Logging(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(1)
            self.dense.build((None, 3))

        def call(self, x):
            return self.dense(x)

        def train_step(self, data):
            self.optimizer.learning_rate = 0.5 / (tf.cast(self.optimizer.iterations, "float32") + 2)
            logs = super().train_step(data)
            return logs | {"rate": self.optimizer.learning_rate, "half": 0.5, "three": 3}

    with strategy.scope():
        model = Logging()
        optimizer = rs.DistributedOptimizer(keras.optimizers.SGD(0.5), rs.TopK(density=0.5))
        model.compile(optimizer, "mse")
    x = np.random.RandomState(0).randn(16 * STEPS, 3).astype("float32")
    history = model.fit(tf.sparse.from_dense(x), x[:, :1], batch_size=16, verbose=0).history
    rate = 0.5 / (STEPS + 1)
    np.testing.assert_allclose(history["rate"] + [float(optimizer.learning_rate)], rate, rtol=1e-6)
    assert (history["half"], history["three"]) == ([0.5], [3.0])
    return {"digests": [problems.digest(model)], "step": int(optimizer.exchange.step.numpy())}


def branching_layer(strategy):
    """A layer of tf_keras with a Python `if` on a tensor, which AutoGraph converts, under `fit`."""
    import tensorflow as tf
    import tf_keras

    import tf_redsync as rs
    from tests.distributed import problems

    class Branching(tf_keras.layers.Layer):
        def call(self, x):
            if tf.reduce_mean(x) > 0.0:
                return 2.0 * x
            return x

    with strategy.scope():
        model = tf_keras.Sequential([Branching(), problems.network(tf_keras)])
        optimizer = rs.DistributedOptimizer(tf_keras.optimizers.SGD(0.01), rs.TopK(density=0.5))
        model.compile(optimizer, "mse")
    model.fit(problems.dataset(16 * STEPS, 16), verbose=0)
    return {"digests": [problems.digest(model)], "step": int(optimizer.exchange.step.numpy())}


def several_trainings(strategy):
    """tf_keras models without input shapes: with individual weights, then regular."""
    import tf_keras

    import tf_redsync as rs
    from tests.distributed import problems

    digests = []
    for method in (rs.LocalSGD(steps=2), rs.TopK(density=0.5)):
        with strategy.scope():
            layers = tf_keras.layers
            model = tf_keras.Sequential([layers.Dense(8), layers.BatchNormalization()])
            model.add(layers.Dense(1))
            optimizer = rs.DistributedOptimizer(tf_keras.optimizers.SGD(0.01), method)
            model.compile(optimizer, "mse")
        model.fit(problems.dataset(16 * STEPS, 16), verbose=0)
        digests.append(problems.digest(model))
    return {"digests": digests, "step": int(optimizer.exchange.step.numpy())}


def rounds_beside_steps(strategy):
    """A model with one optimizer of every step and one of rounds, in one function or in two.

    Within a round the workers' statistics differ, and the first optimizer must not compare them.
    """
    import keras
    import tensorflow as tf

    import tf_redsync as rs
    from tests.distributed import problems

    methods, digests = (rs.TopK(density=0.5), rs.LocalSGD(steps=STEPS + 1)), []
    for functions in (((0, 1),), ((0,), (1,))):
        keras.utils.set_random_seed(5)
        with strategy.scope():
            model = problems.network(keras, normalized=True)
            parts = [layer.trainable_variables for layer in model.layers[:2]]
            optimizers = [
                rs.DistributedOptimizer(keras.optimizers.SGD(0.01), method, check_every=1)
                for method in methods
            ]

        def replica_step(served, x, model=model, parts=parts, optimizers=optimizers):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(model(x, training=True) ** 2)
            grads = tape.gradient(loss, [parts[i] for i in served])
            for i, own in zip(served, grads, strict=True):
                optimizers[i].apply_gradients(zip(own, parts[i], strict=True))

        steps = [
            tf.function(lambda x, s=s, run=replica_step: strategy.run(run, (s, x)))
            for s in functions
        ]
        for number in range(STEPS):
            for step in steps:
                step(problems.regression(8, seed=2 * number + problems.rank())[0])
        optimizers[1].exchange.to_consensus()
        digests.append(problems.digest(model))
    return {"digests": digests, "step": int(optimizers[0].exchange.step.numpy())}


SCENARIOS = {
    "bfloat16": bfloat16,
    "mixed tf_keras": mixed_float16("tf_keras"),
    "mixed legacy": mixed_float16("legacy"),
    "traced": looped("traced"),
    "epoch": looped("epoch"),
    "decorated": looped("decorated"),
    "eager": looped("eager"),
    "auto": looped("traced", method="auto"),
    "tf_keras": looped("traced", "tf_keras"),
    "tf_keras eager": looped("eager", "tf_keras"),
    "legacy": looped("traced", "legacy"),
    "branching layer": branching_layer,
    "stateful": stateful_recurrent_layer,
    "own logs": own_logs,
    "forgotten scope": forgotten_scope,
    "gan": gan,
    "rows": batch_sizes,
    "scalar losses": scalar_losses,
    "dropout": dropout,
    "several trainings": several_trainings,
    "rounds beside steps": rounds_beside_steps,
    "no call": no_call(True),
    "no call, unbuilt parts": no_call(False),
}
# Covered by test_bfloat16.py and test_auto.py; loops without `build` by test_statistics.py.
ONLY_DEEP = (
    "bfloat16",
    "mixed legacy",
    "traced",
    "eager",
    "auto",
    "tf_keras",
    "tf_keras eager",
    "legacy",
    "no call, unbuilt parts",
)
if not DEEP:
    for name in ONLY_DEEP:
        del SCENARIOS[name]


@pytest.fixture(scope="module")
def workers():
    return run_workers(run_all, args=(list(SCENARIOS),), timeout=240)


@pytest.mark.parametrize("name", SCENARIOS)
def test_trains_with_equal_weights(workers, name):
    for result in workers:
        assert not result[f"{name}.error"], result[f"{name}.error"]
    first, second = (list(result[f"{name}.digests"]) for result in workers)
    assert first == second and len(set(first)) == len(first)
    assert workers[0][f"{name}.step"] == (2 * STEPS if name == "gan" else STEPS)


@pytest.mark.parametrize("name", [name for name in SCENARIOS if name.startswith("mixed")])
def test_overflow_on_one_worker_halves_scale_on_all(workers, name):
    for result in workers:
        assert result[f"{name}.scale"] == 32.0 and result[f"{name}.finite"]
        assert result[f"{name}.skipped"] == 1


def test_uneven_batches_warn(workers):
    for result in workers:
        even, short, uneven, less_than_workers, validation, *evaluated = result["rows.warned"]
        assert even == "(48, 16): " and short == "(40, 16): ", (even, short)
        assert "worker 0: 7, worker 1: 6" in uneven and "gradient of 0" not in uneven
        assert "worker 0: 1, worker 1: 0" in less_than_workers
        assert "gradient of 0" in less_than_workers and "NaN" in less_than_workers
        assert evaluated[:2] == ["evaluate 32: ", "evaluate 19: "]
        for text in (validation, evaluated[2]):
            assert "`evaluate`" in text and "NaN" in text and "worker 0: 1, worker 1: 0" in text
