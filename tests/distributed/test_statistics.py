"""BatchNormalization's moving statistics are equal on all workers, however steps are run."""

import numpy as np
import pytest

from tests.distributed.cluster import run_workers

STEPS = 3


def run_in_every_way():
    """Each worker normalizes its own batches; returns its statistics and its batches' means."""
    import keras
    import tensorflow as tf

    import tf_redsync as rs
    from tests.distributed import problems

    strategy = rs.MultiWorkerMirroredStrategy()
    rank = problems.rank()

    def new_model():
        with strategy.scope():
            norm = keras.layers.BatchNormalization(momentum=0.5)
            model = keras.Sequential([keras.Input((4,)), norm, keras.layers.Dense(1)])
            model.compile(
                rs.DistributedOptimizer(keras.optimizers.SGD(0.01), rs.TopK(density=0.5)),
                loss="mse",
                run_eagerly=True,
            )
        return model

    def batch(step):
        return tf.random.stateless_normal([8, 4], [rank, step]) + tf.cast(rank, tf.float32)

    def plain(model):
        return lambda x, training: model(x, training=training)

    def conditional(model, x, training):
        return tf.cond(
            tf.reduce_sum(x) < 1e9, lambda: model(x, training=training), lambda: x[:, :1]
        )

    def in_a_function(model):
        nested = tf.function(lambda x, training: conditional(model, x, training))
        return lambda x, training: nested(x, training)

    def eager(replica_step):
        return lambda step: strategy.run(replica_step, (batch(step),))

    def eager_of_function(replica_step):
        traced = tf.function(replica_step)
        return lambda step: strategy.run(traced, (batch(step),))

    def graph(replica_step):
        return tf.function(lambda step: strategy.run(replica_step, (batch(step),)))

    def local(model):
        norm = model.layers[0]
        parts = [norm.moving_mean.value, norm.moving_variance.value]
        return [strategy.experimental_local_results(v)[0].numpy() for v in parts]

    results = {}
    ways = {"eager": eager, "eager_of_function": eager_of_function, "graph": graph}
    calls = {"plain": plain, "nested": in_a_function}
    for way, run_by in ways.items():
        for call, call_of in calls.items():
            model = new_model()
            forward = call_of(model)
            run = run_by(lambda x, forward=forward: forward(x, True))
            for step in range(STEPS):
                run(step)
            results[f"{way}/{call}"] = local(model)
            inference = run_by(lambda x, forward=forward: forward(x, False))
            inference(0)
            results[f"{way}/{call}/after"] = local(model)

    model = new_model()
    x = np.concatenate([batch(step).numpy() for step in range(STEPS)])
    data = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(16)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    model.fit(data.with_options(options), epochs=1, verbose=0)
    results["fit"] = local(model)
    results["weights"] = problems.digest(model)
    results["batches"] = np.stack([batch(step).numpy() for step in range(STEPS)])
    return results


@pytest.fixture(scope="module")
def workers():
    return run_workers(run_in_every_way, timeout=120)


def expected(workers):
    """Both moving statistics in numpy: each worker's own update, then the mean of both."""
    mean, variance = np.zeros(4), np.ones(4)
    for step in range(STEPS):
        batches = [w["batches"][step] for w in workers]
        mean = 0.5 * mean + 0.5 * np.mean([b.mean(0) for b in batches], axis=0)
        variance = 0.5 * variance + 0.5 * np.mean([b.var(0) for b in batches], axis=0)
    return [mean, variance]


@pytest.mark.parametrize("call", ["plain", "nested"])
@pytest.mark.parametrize("way", ["eager", "eager_of_function", "graph"])
def test_statistics_are_averaged_however_step_runs(workers, way, call):
    first, second = (w[f"{way}/{call}"] for w in workers)
    np.testing.assert_array_equal(first, second)
    np.testing.assert_allclose(first, expected(workers), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("call", ["plain", "nested"])
@pytest.mark.parametrize("way", ["eager", "eager_of_function", "graph"])
def test_inference_keeps_statistics(workers, way, call):
    for worker in workers:
        np.testing.assert_array_equal(worker[f"{way}/{call}"], worker[f"{way}/{call}/after"])


def test_fit_run_eagerly(workers):
    first, second = workers
    np.testing.assert_array_equal(first["fit"], second["fit"])
    assert np.abs(first["fit"][0]).max() > 0
    assert first["weights"] == second["weights"]


def run_with_other_kinds(way):
    """Statistics of several dtypes, ranks and assignments; returns them and the batches."""
    import keras
    import tensorflow as tf

    import tf_redsync as rs
    from tests.distributed import problems

    class Matrix(keras.layers.Layer):
        """Its statistics are the first two examples of the last batch, some in codebooks."""

        def build(self, shape):
            def weight(name, rows, **kwargs):
                return self.add_weight(
                    shape=(rows, shape[-1]), trainable=False, name=name, **kwargs
                )

            self.last, self.large = weight("last", 2), weight("large", 2, dtype="float16")
            self.codes, self.slices = weight("codes", 3), weight("slices", 3)

        def compute_output_shape(self, shape):
            return shape  # Keras cannot assign to slices to infer it

        def call(self, x):
            self.last.assign(x[:2])
            self.large.assign(40_000 + 0 * x[:2])
            self.codes.value.scatter_update(tf.IndexedSlices(x[:2], [0, 2]))
            self.slices.value[::2].assign(x[:2])
            return x

    class Mean(keras.losses.Loss):
        """Its state is the mean of the last batch's targets."""

        def __init__(self):
            super().__init__()
            self.of_targets = keras.Variable(0.0, trainable=False)

        def call(self, targets, outputs):
            self.of_targets.assign(keras.ops.mean(targets))
            return keras.ops.mean(outputs, axis=-1)

    strategy = rs.MultiWorkerMirroredStrategy()
    rank = problems.rank()
    with strategy.scope():
        loss = Mean()
        norm = keras.layers.BatchNormalization(momentum=0.5, dtype="float64")
        matrix = Matrix()
        model = keras.Sequential([keras.Input((4,)), matrix, norm])

    def step(x):
        return strategy.run(lambda x: loss(x, model(x, training=True)), (x,))

    step = tf.function(step) if way == "graph" else step
    batches = [np.float32(np.random.RandomState([rank, i]).randn(8, 4)) for i in range(STEPS)]
    for batch in batches:
        step(tf.constant(batch))
    parts = {n: getattr(matrix, n) for n in ("last", "large", "codes", "slices")}
    found = {
        name: strategy.experimental_local_results(v.value)[0].numpy()
        for name, v in (
            *parts.items(),
            ("mean", norm.moving_mean),
            ("of_targets", loss.of_targets),
        )
    }
    return {**found, "batches": np.stack(batches)}


@pytest.mark.parametrize("way", ["eager", "graph"])
def test_statistics_of_other_kinds(way):
    first, second = run_workers(run_with_other_kinds, args=(way,))
    mean = np.zeros(4)
    for one, other in zip(first["batches"], second["batches"], strict=True):
        mean = 0.5 * mean + 0.25 * (np.float64(one).mean(0) + np.float64(other).mean(0))
    for worker in (first, second):
        assert worker["mean"].dtype == np.float64
        np.testing.assert_allclose(worker["mean"], mean, rtol=1e-12)
        last = first["batches"][-1], second["batches"][-1]
        np.testing.assert_allclose(worker["of_targets"], np.mean(last), rtol=1e-5)
        both = (first["batches"][-1][:2] + second["batches"][-1][:2]) / 2
        np.testing.assert_array_equal(worker["last"], both)
        for name in ("codes", "slices"):
            np.testing.assert_array_equal(worker[name][[0, 2]], both, err_msg=name)
        # The sum of the two workers is infinite in float16.
        np.testing.assert_array_equal(worker["large"], np.full([2, 4], 40_000, np.float16))


SKIPPED = 2  # in this step worker 1 has NaN labels


def run_unbuilt():
    """Weights after a loop, by family, way and whether the model was built before it."""
    import importlib

    import tensorflow as tf

    import tf_redsync as rs
    from tests.distributed import problems

    strategy, rank = rs.MultiWorkerMirroredStrategy(), problems.rank()

    def weights(family, way, built):
        keras = importlib.import_module(family)
        with strategy.scope():
            kernel = keras.initializers.GlorotUniform(seed=1)
            norm = keras.layers.BatchNormalization(momentum=0.5)
            layers = [keras.layers.Dense(4, kernel_initializer=kernel), norm]
            model = keras.Sequential([*([keras.Input((4,))] if built else []), *layers])
            method = rs.TopK(density=0.5, dense_below=1)
            optimizer = rs.DistributedOptimizer(keras.optimizers.SGD(0.1), method)

        def replica_step(x, y):
            with tf.GradientTape() as tape:
                error = tf.reduce_mean((model(x, training=True) - y) ** 2)
                loss = error / strategy.num_replicas_in_sync
            variables = model.trainable_variables
            optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

        def step(x, y):
            strategy.run(replica_step, (x, y))

        step = tf.function(step) if way == "graph" else step
        for number in range(STEPS + 2):
            x = tf.random.stateless_normal([8, 4], [rank, number])
            bad = number == SKIPPED and rank == 1
            step(x, x * (float("nan") if bad else 2.0))
        return np.concatenate([np.ravel(w) for w in model.get_weights()])

    return {
        f"{family}/{way}/{'built' if built else 'unbuilt'}": weights(family, way, built)
        for family in ("keras", "tf_keras")
        for way in ("graph", "eager")
        for built in (True, False)
    }


def test_layers_built_by_first_step():
    """Their statistics are averaged and restored after a skipped step too."""
    first, second = run_workers(run_unbuilt)
    for name, values in first.items():
        np.testing.assert_array_equal(values, second[name], err_msg=name)
        assert np.isfinite(values).all(), name
        built = first[name.replace("unbuilt", "built")]
        np.testing.assert_array_equal(values, built, err_msg=name)


def run_models_in_a_loop():
    """Only the chief keeps finished models, and changes them; returns the trained statistics."""
    import gc

    import keras
    import tensorflow as tf

    import tf_redsync as rs
    from tests.distributed import problems

    strategy, rank = rs.MultiWorkerMirroredStrategy(), problems.rank()
    data, kept, trained, alive = problems.dataset(64, 16), [], [], []

    def new_model(method, frozen=False):
        with strategy.scope():
            model = problems.network(keras, normalized=True)
            model.layers[1].trainable = not frozen
            model.compile(rs.DistributedOptimizer(keras.optimizers.SGD(0.01), method), "mse")
        return model

    def change_on_chief(model):
        if rank == 0:
            model.layers[1].moving_mean.assign(model.layers[1].moving_mean + 1.0)

    for method in (rs.TopK(density=0.5), rs.LocalSGD(steps=3), rs.TopK(density=0.5)):
        model = new_model(method)
        model.fit(data, verbose=0)
        moving = model.layers[1].moving_mean.value
        trained.append(strategy.experimental_local_results(moving)[0].numpy())
        alive.append(len(strategy._statistics))
        change_on_chief(model)
        kept += [model] if rank == 0 else []
        del model, moving
    gc.collect()
    alive.append(len(strategy._statistics))
    result = {"trained": np.stack(trained), "alive": alive, "error": ""}

    model = new_model(rs.TopK(density=0.5), frozen=True)
    model.fit(data, verbose=0)
    change_on_chief(model)
    try:
        model.fit(data, verbose=0)
    except tf.errors.OpError as error:
        result["error"] = str(error)
    return result


def test_models_in_a_loop():
    """Steps compare and keep only the statistics of their model; a freed model leaves none."""
    first, second = run_workers(run_models_in_a_loop)
    np.testing.assert_array_equal(first["trained"], second["trained"])
    assert [list(worker["alive"]) for worker in (first, second)] == [[2, 4, 6, 6], [2, 2, 2, 0]]
    for worker in (first, second):
        assert "drifted apart" in worker["error"] and "moving_mean" in worker["error"]
