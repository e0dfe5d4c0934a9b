"""Every optimizer of Keras 3, tf_keras and Addons with very sparse totals, on two real workers.

At a density of 0.1 % most rows and columns of a total are zero, unlike plain gradients. `pytest
--deep` trains 300 steps instead of 12.
"""

import functools

import pytest

from tests.deep import DEEP
from tests.distributed.cluster import LEGACY, run_workers
from tests.optimizers import FAMILIES, all_of, library_of, needs

STEPS = 300 if DEEP else 12
pytestmark = pytest.mark.timeout(1600 if DEEP else 300)
ROWS, COLUMNS, BATCH = 96, 64, 4

VARIANTS = {
    "Adafactor of its own rate": lambda o: o.Adafactor(0.01, relative_step=False),
    "LossScaleOptimizer of Adafactor": lambda o: o.LossScaleOptimizer(o.Adafactor()),
}

# Optimizers trained without `--deep`: those that use whole tensors, or have parts that others lack.
# test_user_code.py trains Adam, and test_adapters.py SGD and Lookahead.
FEW = {
    "keras3": (
        "Adafactor",
        "Lamb",
        "LossScaleOptimizer of Adafactor",
        "Muon",
        "ScheduleFreeAdamW",
    ),
    "tf_keras": ("Adafactor",),
    "legacy": (),
    "addons": ("ConditionalGradient",),
}


def optimizers(family):
    """Constructors of the family's optimizers that this run trains."""
    import keras

    makers = all_of(family)
    if family == "keras3":
        makers |= {n: functools.partial(make, keras.optimizers) for n, make in VARIANTS.items()}
    return {n: m for n, m in makers.items() if DEEP or n in FEW[family]}


def train_each(families, steps):
    """Train with each optimizer of some families; returns weight hashes and non-finite names."""
    import keras
    import tensorflow as tf

    import tf_redsync as rs
    from tests.distributed import problems

    strategy = rs.MultiWorkerMirroredStrategy()
    results = {}
    for family in families:
        library = library_of(family)
        for name, make in optimizers(family).items():
            library.utils.set_random_seed(3)
            with strategy.scope():
                dense = library.layers.Dense(COLUMNS, use_bias=False)
                model = library.Sequential([library.Input((ROWS,)), dense])
                method = rs.RedSync(density=0.001, dense_below=0)
                optimizer = rs.DistributedOptimizer(make(), method)
                optimizer.build(model.trainable_variables)
            start, key = problems.digest(model), f"{family}/{name}"
            error, bad = train(tf, strategy, model, optimizer, problems.rank(), steps)
            results[f"{key}/error"] = error
            results[f"{key}/weights"] = problems.digest(model)
            results[f"{key}/moved"] = results[f"{key}/weights"] != start
            results[f"{key}/not_finite"] = bad
    if hasattr(keras.optimizers, "OptimizerMap"):
        results.update(several_optimizers(strategy, problems.rank()))
    if DEEP:
        results.update(several_of_addons(strategy, problems.rank()))
    return results


def several_optimizers(strategy, rank):
    """Keras 3's `MultiOptimizer` inside of a wrapper, and around two wrapped optimizers."""
    import keras
    import tensorflow as tf

    import tf_redsync as rs
    from tests.distributed import problems

    def wrapped(inner):
        return rs.DistributedOptimizer(inner, rs.RedSync(density=0.01, dense_below=0))

    def make_multi_optimizer(wrap):
        choice = keras.optimizers.OptimizerMap(
            wrap(keras.optimizers.SGD(0.01)), {".*kernel": wrap(keras.optimizers.Adam())}
        )
        return keras.optimizers.MultiOptimizer(choice)

    keras.utils.set_random_seed(3)
    with strategy.scope():
        wrapping_error = error_text(lambda: wrapped(make_multi_optimizer(lambda o: o)))
        optimizer = make_multi_optimizer(wrapped)
        model = keras.Sequential([keras.Input((ROWS,)), keras.layers.Dense(COLUMNS)])
        optimizer.build(model.trainable_variables)
    error, bad = train(tf, strategy, model, optimizer, rank, 3)
    parts = optimizer.optimizers
    return {
        "multi/outside": wrapping_error,
        "multi/inside": error + bad,
        "multi/skipped": skipped_in_fit(tf, strategy, model, optimizer),
        "multi/bytes": [o.exchange.bytes_sent.numpy() for o in parts],
        "multi/weights": problems.digest(model),
    }


def several_of_addons(strategy, rank):
    """Addons's `MultiOptimizer` through the shim, in the same two ways."""
    import tensorflow as tf
    import tf_keras

    import tf_redsync as rs
    from tests.distributed import problems

    def wrapped(inner):
        return rs.DistributedOptimizer(inner, rs.RedSync(density=0.01, dense_below=0))

    addons = rs.addons.load().optimizers
    tf_keras.utils.set_random_seed(3)
    with strategy.scope():
        layers = [
            tf_keras.Input((ROWS,)),
            tf_keras.layers.Dense(80),
            tf_keras.layers.Dense(COLUMNS),
        ]
        model = tf_keras.Sequential(layers)

        def make_multi_optimizer(wrap):
            parts = [wrap(addons.LAMB(0.01)), wrap(tf_keras.optimizers.legacy.Adam())]
            pairs = list(zip(parts, model.layers, strict=True))
            return parts, addons.MultiOptimizer(pairs)

        wrapping_error = error_text(lambda: wrapped(make_multi_optimizer(lambda o: o)[1]))
        parts, optimizer = make_multi_optimizer(wrapped)
    error, bad = train(tf, strategy, model, optimizer, rank, 3)
    return {
        "multi_addons/outside": wrapping_error,
        "multi_addons/inside": error + bad,
        "multi_addons/skipped": skipped_in_fit(tf, strategy, model, optimizer),
        "multi_addons/bytes": [part.exchange.bytes_sent.numpy() for part in parts],
        "multi_addons/weights": problems.digest(model),
    }


def error_text(make):
    """The error text of `make()`, or an empty string."""
    try:
        make()
    except ValueError as error:
        return str(error)
    return ""


def skipped_in_fit(tf, strategy, model, optimizer):
    """`skipped_steps` that `fit` logs for three steps; the second has a NaN on one worker."""
    x = tf.random.stateless_normal([6 * BATCH, ROWS], [1, 2]).numpy()
    x[2 * BATCH, 0] = float("nan")
    with strategy.scope():
        model.compile(optimizer, "mse")
    data = tf.data.Dataset.from_tensor_slices((x, x[:, :COLUMNS])).batch(2 * BATCH)
    return model.fit(data, verbose=0).history["skipped_steps"]


def train(tf, strategy, model, optimizer, rank, steps):
    """Trains on this worker's own batches; returns an error text and non-finite variables."""

    def replica_step(step):
        seed = tf.stack([rank, step])
        x = tf.random.stateless_normal([BATCH, ROWS], seed)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - x[:, :COLUMNS]) ** 2) / 2.0
            scaled = optimizer.scale_loss(loss) if hasattr(optimizer, "scale_loss") else loss
        gradients = tape.gradient(scaled, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    @tf.function
    def run(steps):
        for step in tf.range(steps):
            strategy.run(replica_step, (step,))

    try:
        run(tf.constant(steps))
    except (ValueError, TypeError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"[-600:], ""
    variables = optimizer.variables
    slots = variables() if callable(variables) else variables
    bad = []
    for variable in [*model.trainable_variables, *slots]:
        value = strategy.experimental_local_results(getattr(variable, "value", variable))[0]
        value = tf.convert_to_tensor(value() if callable(value) else value)
        if value.dtype.is_floating and not bool(tf.reduce_all(tf.math.is_finite(value))):
            bad.append(variable.name)
    return "", " ".join(bad)


@pytest.fixture(scope="module")
def trained():
    limit = 1500 if DEEP else 200
    return run_workers(train_each, args=(FAMILIES, STEPS), env=LEGACY, timeout=limit)


def test_weights_stay_finite_and_equal(trained):
    first, second = trained
    names = [key.removesuffix("/error") for key in first if key.endswith("/error")]
    assert len(names) >= (45 if DEEP else 5)
    wrong = {}
    for name in names:
        found = [first[f"{name}/error"], first[f"{name}/not_finite"]]
        if first[f"{name}/weights"] != second[f"{name}/weights"]:
            found.append("weights differ")
        if not first[f"{name}/moved"]:
            found.append("weights do not change")
        if any(found):
            wrong[name] = " ".join(filter(None, found))
    assert wrong == {}


@needs("OptimizerMap")
def test_multi_optimizer(trained):
    """Wrapping a `MultiOptimizer` raises; a `MultiOptimizer` of wrapped optimizers trains."""
    for make_multi_optimizer in ("multi", "multi_addons") if DEEP else ("multi",):
        for worker in trained:
            assert (
                "Wrap each of its optimizers instead" in worker[f"{make_multi_optimizer}/outside"]
            )
            assert worker[f"{make_multi_optimizer}/inside"] == ""
            assert worker[f"{make_multi_optimizer}/skipped"] == [1]
            assert min(worker[f"{make_multi_optimizer}/bytes"]) > 0
        assert (
            trained[0][f"{make_multi_optimizer}/weights"]
            == trained[1][f"{make_multi_optimizer}/weights"]
        )
