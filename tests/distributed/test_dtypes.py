"""Batches of every dtype and kind under Keras, and the user's own reductions."""

import itertools
import json

import numpy as np
import pytest

from tests.deep import DEEP
from tests.distributed.cluster import run_workers

INTEGERS = ("uint8", "int8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
LABELS = (*INTEGERS, "bool", "float16", "float64")
# Dtypes of batches: those that TensorFlow's collectives support, and others.
BATCHED = LABELS if DEEP else ("uint8", "uint16", "bool", "float64")
# Dtypes of outputs, of sums, and of sums outside of a function: native, widened, unsupported. The
# whole table of dtypes: `test_unsupported_dtypes_travel_as_supported_dtypes`.
OUTPUTS = (*LABELS, "bfloat16", "string")
OUTPUTS = OUTPUTS if DEEP else ("uint8", "bool", "uint32", "float64", "bfloat16", "string")
REDUCED = LABELS if DEEP else ("uint8", "uint64", "int32", "float16", "bool")
EAGERLY = LABELS if DEEP else ("float16", "uint8", "bool")
WORDS = [b"red", b"", b"green", b"ultramarine"]
# Trainings without the scope, and trainings that enter it too late. All cases:
# unit/test_forgotten_scope.py.
WITHOUT_SCOPE = ("keras3", "tf_keras", "legacy") if DEEP else ("keras3",)
SCOPE_TOO_LATE = ("keras3 fit in scope", "loop") if DEEP else ("keras3 fit in scope",)
ROWS, BATCH = 11, 4  # the last batch has 2 rows for one worker and 1 for the other


def all_batches():
    """Results of every kind of batch and every reduction, under Keras 3 (and tf_keras)."""
    import keras
    import tensorflow as tf

    import tf_redsync as rs

    strategy = rs.MultiWorkerMirroredStrategy()
    results = {}
    for name, (model, x, y, metrics) in cases(keras, strategy).items():
        keras.utils.set_random_seed(7)  # of a model that is built by its first batch
        with strategy.scope():
            optimizer = rs.DistributedOptimizer(keras.optimizers.SGD(0.005), rs.TopK(density=0.5))
            model.compile(optimizer=optimizer, loss="mse", metrics=metrics)
        inputs = tf.data.Dataset.from_tensor_slices(x)
        both = tf.data.Dataset.zip((inputs, tf.data.Dataset.from_tensor_slices(y)))
        fitted = model.fit(both.batch(BATCH), epochs=2, verbose=0).history["loss"]
        # The first batch also differs in size: 2 rows on one worker, 1 on the other.
        evaluated = model.evaluate(both.take(3).batch(BATCH), verbose=0)
        predicted = model.predict(inputs.batch(2 * BATCH), verbose=0)
        results[f"{name}/loss"] = fitted
        results[f"{name}/evaluated"] = evaluated
        for key, value in (predicted if isinstance(predicted, dict) else {"": predicted}).items():
            results[f"{name}/predicted/{key}"] = np.asarray(value)
    results |= outputs(keras, strategy) | reductions(strategy)
    results["forgotten"] = json.dumps(forgotten_scopes(strategy))
    return results | (under_tf_keras(strategy) if DEEP else {})


def under_tf_keras(strategy):
    """`fit` and `predict` with labels of another dtype."""
    import os

    import tensorflow as tf

    import tf_redsync as rs

    os.environ["TF_USE_LEGACY_KERAS"] = "1"
    import tf_keras

    results = {}
    with strategy.scope():
        model = tf_keras.Sequential([tf_keras.layers.Dense(1)])
        model.compile(rs.DistributedOptimizer(tf_keras.optimizers.SGD(0.1), rs.Dense()), "mse")
    data = tf.data.Dataset.from_tensor_slices((numbers(), numbers(1)[:, 0].astype("uint8")))
    results["tf_keras/loss"] = model.fit(data.batch(BATCH), verbose=0).history["loss"]
    results["tf_keras/predicted/"] = model.predict(data.batch(BATCH), verbose=0)
    return results


def numbers(seed=0):
    """`[rows, 3]` numbers from 0 to 2."""
    return np.random.RandomState(seed).randint(0, 3, (ROWS, 3))


def cases(keras, strategy):
    """By name: a model, its inputs, its labels and metrics.

    `"inputs"` has inputs and labels of every dtype and kind that one model can have.
    """
    import tensorflow as tf

    layers = keras.layers
    keras.utils.set_random_seed(3)
    one = numbers(1)[:, :1]

    class OfRagged(keras.Model):
        def __init__(self):
            super().__init__()
            self.embedding, self.dense = layers.Embedding(3, 4), layers.Dense(1)

        def call(self, x):
            x = x.to_tensor() if isinstance(x, tf.RaggedTensor) else x
            return self.dense(tf.reduce_mean(self.embedding(x), axis=1))

    with strategy.scope():
        inputs = {
            "narrow": layers.Input((3,), dtype="uint8", name="narrow"),
            "wide": layers.Input((3,), dtype="int16", name="wide"),
            "words": layers.Input((1,), dtype="string", name="words"),
            "sparse": layers.Input((3,), sparse=True, name="sparse"),
            "floats": layers.Input((3,), name="floats"),
        }
        lookup = layers.StringLookup(vocabulary=["red", "green"])
        parts = [
            layers.Rescaling(0.5)(inputs["narrow"]),
            layers.Flatten()(layers.Embedding(3, 4)(lookup(inputs["words"]))),
            layers.Dense(2)(inputs["sparse"]),
            layers.Rescaling(1.0)(inputs["wide"]),
            inputs["floats"],
        ]
        hidden = layers.Dense(4)(layers.Concatenate()(parts))
        several = keras.Model(inputs, {name: layers.Dense(1)(hidden) for name in BATCHED})
        unbuilt = keras.Sequential([layers.Dense(2), layers.Dense(1)])
        ragged = OfRagged()
    lengths = 1 + np.arange(ROWS) % 3
    rows = tf.RaggedTensor.from_row_lengths(numbers(2).ravel()[: lengths.sum()], lengths)
    batch = {
        "narrow": numbers().astype("uint8"),
        "wide": numbers().astype("int16"),
        "words": np.array([[WORDS[i % 4]] for i in range(ROWS)]),
        "sparse": tf.sparse.from_dense(numbers().astype("float32")),
        "floats": numbers(4),
    }
    metrics = {"bool": ["mae"], "uint16": ["mae"]}
    return {
        "inputs": (several, batch, {n: one.astype(n) for n in BATCHED}, metrics),
        "ragged": (ragged, rows, one.astype("int8"), ["mae"]),
        "unbuilt": (unbuilt, numbers().astype("float32"), one[:, 0].astype("uint8"), ["mae"]),
    }


def outputs(keras, strategy):
    """`predict` of models with outputs of other dtypes."""
    import tensorflow as tf

    class Outputs(keras.Model):
        def call(self, x):
            results = {n: tf.cast(x[:, 0], n) for n in OUTPUTS if n != "string"}
            return {**results, "string": tf.gather(tf.constant(WORDS), x[:, 0])}

    with strategy.scope():
        model = Outputs()
    data = tf.data.Dataset.from_tensor_slices(numbers().astype("int32")).batch(2 * BATCH)
    predicted = model.predict(data, verbose=0)
    assert predicted["bool"].dtype == bool and predicted["uint8"].dtype == "uint8"
    return {f"outputs/{n}": v.astype("S" if n == "string" else "f8") for n, v in predicted.items()}


def reductions(strategy):
    """The user's own reductions: `[sum, mean]`, and errors.

    Outside of a function each uses a function of TensorFlow, which supports few dtypes only.
    """
    import tensorflow as tf

    def of(values):
        return strategy.experimental_distribute_values_from_function(
            lambda context: values[context.replica_id_in_sync_group]
        )

    results, errors = {}, {}
    values = {name: of([tf.cast([3, 1], name), tf.cast([4, 0], name)]) for name in REDUCED}
    summable = {name: value for name, value in values.items() if name != "bool"}

    @tf.function(autograph=False)
    def traced():
        run = {name: strategy.run(tf.identity, (value,)) for name, value in summable.items()}
        return {op: strategy.reduce(op, run, axis=None) for op in ("SUM", "MEAN")}

    reduced = traced()
    for op, (name, value) in itertools.product(("SUM", "MEAN"), values.items()):
        if name in summable:
            result = reduced[op][name]
            assert result.dtype.name == name or (op == "MEAN" and result.dtype == tf.float64)
            results[f"{op}/{name}"] = result.numpy().astype("f8")
        if name in EAGERLY:
            try:
                eager = strategy.reduce(op, {"a": [value]}, axis=None)["a"][0]
                assert result.dtype == eager.dtype and np.array_equal(result, eager)
                results[f"{op}/{name}/rows"] = float(strategy.reduce(op, value, axis=0))
            except TypeError as error:
                errors[f"{op}/{name}"] = str(error)
    rows = tf.RaggedTensor.from_row_lengths([1, 2, 3], [1, 2])
    others = {
        "string": tf.constant(["a"]),
        "ragged": rows,
        "sparse": tf.sparse.from_dense([1.0, 0.0]),
    }
    for name, value in others.items():
        try:
            strategy.reduce("SUM", of([value, value]), axis=None)
        except TypeError as error:
            errors[name] = str(error)
    try:
        strategy.reduce("SUM", of([tf.constant(200, tf.uint8)] * 2), axis=None)
    except tf.errors.InvalidArgumentError as error:
        errors["overflow"] = str(error)
    assert strategy.reduce("SUM", [None], axis=None) == [None]
    return {**results, "errors": json.dumps(errors)}


def forgotten_scopes(strategy):
    """Errors for a model or an optimizer created outside of the strategy's scope."""
    import keras
    import tensorflow as tf
    import tf_keras

    import tf_redsync as rs

    def fitted(library, inner):
        model = library.Sequential([library.layers.Input((3,)), library.layers.Dense(1)])
        model.compile(rs.DistributedOptimizer(inner, rs.Dense()), "mse")
        return lambda: model.fit(np.ones((4, 3)), np.ones((4, 1)), verbose=0)

    def in_scope(train):
        with strategy.scope():
            train()

    def loop():
        weight = tf.Variable([1.0])
        optimizer = rs.DistributedOptimizer(tf_keras.optimizers.SGD(0.1), rs.Dense())
        strategy.run(lambda: optimizer.apply_gradients([(tf.constant([1.0]), weight)]))

    def train_with_metric():
        with strategy.scope():
            model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", metrics=["mae", keras.metrics.AUC()])

    legacy = tf_keras.optimizers.legacy
    trainings = {
        "keras3": fitted(keras, keras.optimizers.SGD(0.1)),
        "tf_keras": fitted(tf_keras, tf_keras.optimizers.SGD(0.1)),
        "legacy": fitted(tf_keras, legacy.SGD(0.1)),
        "keras3 fit in scope": lambda: in_scope(fitted(keras, keras.optimizers.SGD(0.1))),
        "loop": loop,
        "metric": train_with_metric,
    }
    errors = {}
    for name in (*WITHOUT_SCOPE, *SCOPE_TOO_LATE, "metric"):
        try:
            trainings[name]()
        except ValueError as error:
            errors[name] = str(error)
    return errors


@pytest.fixture(scope="module")
def results():
    first, second = run_workers(all_batches, timeout=280)
    assert set(first) == set(second)
    for name, value in first.items():
        np.testing.assert_array_equal(value, second[name], err_msg=name)
    return first


@pytest.mark.parametrize("name", ["inputs", "ragged", "unbuilt"])
def test_batches_of_every_kind(results, name):
    loss = results[f"{name}/loss"]
    assert np.isfinite(loss).all() and loss[1] < loss[0]
    assert np.isfinite(results[f"{name}/evaluated"]).all()
    predicted = [v for n, v in results.items() if n.startswith(f"{name}/predicted/")]
    assert predicted and all(p.shape == (ROWS, 1) for p in predicted)


@pytest.mark.deep  # the strategy distributes the batches, for either Keras
def test_tf_keras(results):
    assert np.isfinite(results["tf_keras/loss"]).all()
    assert results["tf_keras/predicted/"].shape == (ROWS, 1)


@pytest.mark.parametrize("name", OUTPUTS)
def test_outputs_of_every_dtype(results, name):
    column = numbers()[:, 0]
    expected = {"string": np.array(WORDS)[column], "bool": column > 0}.get(name, column)
    np.testing.assert_array_equal(results[f"outputs/{name}"], expected)


@pytest.mark.parametrize("name", [n for n in REDUCED if n != "bool"])
def test_sums_and_means_of_numbers(results, name):
    np.testing.assert_array_equal(results[f"SUM/{name}"], [7, 1])
    np.testing.assert_array_equal(results[f"MEAN/{name}"], [3.5, 0.5])
    if name in EAGERLY:
        assert (results[f"SUM/{name}/rows"], results[f"MEAN/{name}/rows"]) == (8, 2)


def test_unsupported_dtypes_travel_as_supported_dtypes():
    import tensorflow as tf

    from tf_redsync.network import dtypes

    supported = ("float16", "float32", "float64", "int32", "int64")

    def gather(value):
        assert value.dtype.name in supported
        return tf.concat([value, value], 0)

    def add(value):
        assert value.dtype.name in (*supported, "bfloat16")
        return value + value

    for name in (*LABELS, "float32", "bfloat16", "complex64", "complex128"):
        part = tf.cast([3, 0, 1], name)
        if "complex" in name:
            part *= 1 + 2j
        rows = dtypes.gathered(gather, lambda f, v: f(v), part, part)
        assert rows.dtype == part.dtype and rows.numpy().tolist() == 2 * part.numpy().tolist()
        if name != "bool" and "complex" not in name:
            total = dtypes.summed(add, lambda f, v: f(v), part, part)
            assert total.dtype == part.dtype and total.numpy().tolist() == [6, 0, 2]


def test_values_without_sum_raise(results):
    errors = json.loads(results["errors"])
    kinds = {"SUM/bool": "bool", "MEAN/bool": "bool", "string": "string"}
    kinds |= {"ragged": "RaggedTensor", "sparse": "SparseTensor"}
    assert set(errors) == {*kinds, "overflow"}
    for name, kind in kinds.items():
        assert "`strategy.reduce`" in errors[name] and f"value of {kind}" in errors[name]
    assert "overflows uint8" in errors["overflow"]


@pytest.mark.parametrize("name", WITHOUT_SCOPE)
def test_training_without_scope_raises(results, name):
    error = json.loads(results["forgotten"])[name]
    assert "TF_CONFIG names 2 workers" in error and "was not built in its scope" in error


@pytest.mark.parametrize("name", SCOPE_TOO_LATE)
def test_variables_from_outside_scope_raise(results, name):
    assert "in the strategy's scope" in json.loads(results["forgotten"])[name]


def test_metric_from_outside_scope_raises(results):
    error = json.loads(results["forgotten"])["metric"]
    assert "`metrics`" in error and "AUC" in error
