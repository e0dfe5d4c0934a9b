"""Without `to_consensus()`, Keras still sees equal weights on all workers."""

import pytest

from tests.deep import DEEP
from tests.distributed.cluster import LEGACY, run_workers

STEPS = 7  # steps per epoch; a round has 4
CASES = ["keras3 LocalSGD", "tf_keras SBC", *(["legacy LocalSGD"] if DEEP else [])]


def train_and_save(folder, cases):
    """Fit, stop early, save and evaluate as with any other optimizer, in each case."""
    import pathlib

    import keras
    import tf_keras

    import tf_redsync as rs
    from tests.distributed import problems

    strategy = rs.MultiWorkerMirroredStrategy()
    results = {}
    for case in cases:
        family, method = case.split()
        own_folder = pathlib.Path(folder) / f"{family}_{method}_{problems.rank()}"
        own_folder.mkdir()
        library = keras if family == "keras3" else tf_keras
        optimizers = library.optimizers.legacy if family == "legacy" else library.optimizers
        if method == "LocalSGD":
            method = rs.LocalSGD(steps=4)
        else:
            method = rs.SBC(steps=4, dense_below=16)
        with strategy.scope():
            model = problems.network(library, normalized=True)
            wrapped = rs.DistributedOptimizer(optimizers.SGD(0.02, momentum=0.5), method)
            model.compile(wrapped, loss="mse")
        found = train_case(library, strategy, model, own_folder)
        results.update({f"{case}/{key}": value for key, value in found.items()})
    return results


def train_case(keras, strategy, model, own_folder):
    """One case of `train_and_save`; returns this worker's results."""
    import tensorflow as tf

    from tests.distributed import problems

    train = problems.dataset(STEPS * 16, 16)
    results = {}
    copy = problems.network(keras, normalized=True)

    def digest_of(path):
        if not path.exists():  # tf_keras's ModelCheckpoint writes on the chief alone
            return ""
        copy.load_weights(str(path))
        return problems.digest(copy)

    class StopAfterSecondEpoch(keras.callbacks.EarlyStopping):
        """Stops after the second epoch and restores the weights of the first."""

        def _is_improvement(self, value, reference):
            return self.best_weights is None

    def saver(name, **options):
        return keras.callbacks.ModelCheckpoint(
            str(own_folder / f"{name}.weights.h5"), save_weights_only=True, **options
        )

    class Saver(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 4:
                self.model.save_weights(str(own_folder / "own.weights.h5"))

    stop = StopAfterSecondEpoch("loss", patience=1, restore_best_weights=True)
    callbacks = [stop, saver("epoch_{epoch}"), saver("batch", save_freq=2), Saver()]
    history = model.fit(train, epochs=4, verbose=0, callbacks=callbacks).history
    results["epochs"] = len(history["loss"])
    results["stopped"] = problems.digest(model)
    for name in ("epoch_1", "batch", "own"):
        results[name] = digest_of(own_folder / f"{name}.weights.h5")
    model.fit(train, epochs=1, steps_per_epoch=1, verbose=0)
    results["next_fit"] = problems.digest(model)

    loop = make_loop(tf, strategy, model, train)
    loop(2)
    results["evaluated"] = model.evaluate(train, verbose=0)
    results["evaluated_weights"] = problems.digest(model)
    loop(3)
    results["apart"] = problems.digest(model)
    model.save_weights(str(own_folder / "loop.weights.h5"))
    results["saved_in_a_loop"] = digest_of(own_folder / "loop.weights.h5")
    loop(1)
    model.save(str(own_folder / "loop.keras"))
    results["saved_model"] = problems.digest(model)
    loop(1)
    model.export(str(own_folder / "exported"))
    results["exported"] = problems.digest(model)
    loop(1)
    try:
        keras.models.save_model(model, str(own_folder / "function.keras"))
    except ValueError as error:
        results["save_model"] = str(error)
    model.compile("sgd", loss="mse")  # replaces the exchange that knows of the difference
    results["compiled_again"] = problems.digest(model)
    return results


def make_loop(tf, strategy, model, data):
    """A custom loop over a compiled model, as a function of the number of steps."""

    def replica_step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x, training=True) - y) ** 2) / 2.0
        gradients = tape.gradient(loss, model.trainable_variables)
        model.optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    step = tf.function(lambda batch: strategy.run(replica_step, batch), autograph=False)
    distributed = strategy.experimental_distribute_dataset(data)

    def loop(steps):
        for _, batch in zip(range(steps), distributed, strict=False):
            step(batch)

    return loop


@pytest.fixture(scope="module")
def workers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    return run_workers(train_and_save, args=(str(folder), CASES), env=LEGACY, timeout=200)


@pytest.mark.parametrize("case", CASES)
def test_keras_sees_equal_weights_on_all_workers(workers, case):
    first, second = (
        {k.split("/")[1]: v for k, v in worker.items() if k.startswith(f"{case}/")}
        for worker in workers
    )
    assert first["epochs"] == 2
    same = "stopped own next_fit evaluated evaluated_weights saved_in_a_loop saved_model".split()
    same += ["exported", "compiled_again"]
    if "keras3" in case:
        same += ["epoch_1", "batch"]
        assert "to_consensus()" in first["save_model"]
    assert [key for key in same if first[key] != second[key]] == []
    assert first["apart"] != second["apart"]  # otherwise the test is void
    assert first["stopped"] == first["epoch_1"]
    assert first["next_fit"] != first["stopped"]
