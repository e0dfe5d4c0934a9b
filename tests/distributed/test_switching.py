"""`disable()` and `enable()` switch between dense and compressed training in one process."""

import numpy as np
import pytest

from tests.distributed.cluster import LEGACY, run_workers

METHODS = ("RedSync", "CodedGMC", "LocalSGD", "CDSGD")
FAMILIES = ("keras3", "tf_keras", "legacy")


def train_with_switches(cases):
    """By family and method: weights of dense steps and of `Dense`, and bytes sent."""
    import keras
    import tensorflow as tf
    import tf_keras

    import tf_redsync as rs
    from tests.distributed import problems

    strategy, found = rs.MultiWorkerMirroredStrategy(), {}
    methods = {
        "RedSync": lambda: rs.RedSync(density=0.1, momentum=0.9, dense_below=16),
        "CodedGMC": lambda: rs.CodedGMC(dense_below=16),
        "LocalSGD": lambda: rs.LocalSGD(steps=3),
        "CDSGD": lambda: rs.CDSGD(warm_up=None, dense_below=16),
        "Dense": lambda: rs.Dense(momentum=0.9),
        "plain": lambda: rs.Dense(),
    }
    data = problems.dataset(64, 16)

    def compiled(family, name):
        library = keras if family == "keras3" else tf_keras
        optimizers = library.optimizers.legacy if family == "legacy" else library.optimizers
        with strategy.scope():
            model = problems.network(library)
            model.compile(rs.DistributedOptimizer(optimizers.SGD(0.05), methods[name]()), "mse")
        return library, model

    def weights(model):
        return np.concatenate([np.ravel(w) for w in model.get_weights()])

    def residual(model):
        local = strategy.experimental_local_results
        states = [s.variables_by_name.get("residual", ()) for s in model.optimizer.exchange.states]
        own = [np.ravel(local(v)[0]) for group in states for v in group]
        return np.concatenate([np.zeros(0), *own])

    for family, name in cases:
        library, model = compiled(family, name)
        momentum = name in ("RedSync", "CodedGMC")
        _, dense = compiled(family, "Dense" if momentum else "plain")
        if family == "keras3":
            model.build((None, problems.WIDTH))
        with strategy.scope():
            model.optimizer.build(model.trainable_variables)
        model.optimizer.disable()  # before the first step
        sent = []

        class Switch(library.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None, sent=sent):
                sent.append(float(self.model.optimizer.exchange.bytes_sent.numpy()))
                if batch == 1:  # in the middle of an epoch
                    self.model.optimizer.enable()

        key = f"{family}, {name}"
        found[f"{key}, explained"] = "dense until `enable()`" in str(model.optimizer.explain())
        found[f"{key}, predicted"] = model.optimizer.bytes_per_step()
        model.fit(data, epochs=1, verbose=0, steps_per_epoch=2)
        dense.fit(data, epochs=1, verbose=0, steps_per_epoch=2)
        found[f"{key}, dense"] = np.abs(weights(model) - weights(dense)).max()
        model.fit(data, verbose=0, callbacks=[Switch()])
        model.optimizer.disable()
        model.fit(data, epochs=1, verbose=0, steps_per_epoch=1)
        found[f"{key}, residual"] = residual(model)
        at = weights(model)
        model.optimizer.flush()
        found[f"{key}, flushed"] = np.abs(weights(model) - at).max()
        model.fit(data, verbose=0)
        found[f"{key}, sent"] = sent
        found[f"{key}, after"] = float(model.optimizer.exchange.bytes_sent.numpy())
        found[f"{key}, dense bytes"] = 4 * sum(s.size for s in model.optimizer.exchange.specs)
        found[f"{key}, weights"] = weights(model)

    # A custom loop must trace its step again.
    _, model = compiled("keras3", "RedSync")
    step = problems.step_of(strategy, model, model.optimizer)
    batches = iter(strategy.experimental_distribute_dataset(data))
    step(next(batches))
    model.optimizer.disable()
    try:
        step(next(batches))
    except tf.errors.InvalidArgumentError as error:
        found["stale"] = str(error)
    step = problems.step_of(strategy, model, model.optimizer)
    step(next(batches))
    found["loop"] = float(model.optimizer.exchange.bytes_sent.numpy())
    return found


@pytest.mark.parametrize(
    "cases",
    [
        [("keras3", "RedSync"), ("keras3", "CodedGMC"), ("keras3", "LocalSGD")],
        pytest.param([(f, m) for f in FAMILIES for m in METHODS], marks=pytest.mark.deep),
    ],
)
def test_disable_and_enable(cases):
    both = run_workers(
        train_with_switches,
        args=([list(c) for c in cases],),
        env=LEGACY,
        timeout=150 + 30 * len(cases),
    )
    for seen in both:
        for family, name in cases:
            key = f"{family}, {name}"
            dense = seen[f"{key}, dense bytes"]
            assert seen[f"{key}, dense"] < 1e-6 and seen[f"{key}, explained"], key
            sent = seen[f"{key}, sent"]
            assert (sent[:2] == dense).all(), (key, sent)
            assert (sent[2:] < 0.5 * dense).any(), (key, sent)
            assert seen[f"{key}, after"] == seen[f"{key}, predicted"] == dense, key
            assert (seen[f"{key}, flushed"] > 0) == (name in ("RedSync", "CodedGMC")), key
            np.testing.assert_array_equal(seen[f"{key}, weights"], both[0][f"{key}, weights"])
            # The first dense step of `CodedGMC` delivers its residual and leaves the momentum.
            own, first = (part[f"{key}, residual"] for part in both)
            assert np.array_equal(own, first) == (name != "RedSync"), key
        assert "traced before compression was" in str(seen["stale"])
        assert seen["loop"] > 1000


def local_steps(folder):
    """Weights after dense steps between rounds, and weights loaded in the middle of a round."""
    import os

    import keras

    import tf_redsync as rs
    from tests.distributed import problems

    strategy, found = rs.MultiWorkerMirroredStrategy(), {}
    data = problems.dataset(64, 16)
    batches = iter(strategy.experimental_distribute_dataset(data.repeat()))

    def make_training(method, inner):
        with strategy.scope():
            model = problems.network(keras)
            optimizer = rs.DistributedOptimizer(inner, method)
            optimizer.build(model.trainable_variables)
        return model, optimizer, problems.step_of(strategy, model, optimizer)

    def weights(model):
        return np.concatenate([np.ravel(w) for w in model.get_weights()])

    for name, method, inner in (
        ("momentum", rs.LocalSGD(steps=4), keras.optimizers.SGD(0.05, momentum=0.9)),
        ("Adam", rs.DiLoCo(steps=4), keras.optimizers.Adam(0.05)),
    ):
        model, optimizer, step = make_training(method, inner)
        for _ in range(6):
            step(next(batches))
        optimizer.disable()
        step = problems.step_of(strategy, model, optimizer)
        for _ in range(3):
            step(next(batches))
        found[f"{name}, off"] = weights(model)
        optimizer.enable()
        step = problems.step_of(strategy, model, optimizer)
        for _ in range(4):
            step(next(batches))
        found[f"{name}, on"] = weights(model)

    model, optimizer, step = make_training(rs.DiLoCo(steps=4), keras.optimizers.SGD(0.05))
    path = os.path.join(folder, f"{problems.rank()}.weights.h5")
    plain = problems.network(keras)
    plain.set_weights(model.get_weights())
    plain.save_weights(path)
    for _ in range(6):
        step(next(batches))
    model.load_weights(path)
    optimizer.exchange.to_consensus()
    found["loaded"], found["saved"] = weights(model), weights(plain)
    return found


def test_local_steps(tmp_path):
    """Each worker has its own momentum in local steps; dense steps use one momentum."""
    first, second = run_workers(local_steps, args=(str(tmp_path),), env=LEGACY, timeout=150)
    for name in ("momentum, off", "momentum, on", "Adam, off", "Adam, on"):
        np.testing.assert_array_equal(first[name], second[name], name)
    for seen in (first, second):
        np.testing.assert_array_equal(seen["loaded"], seen["saved"])


def disable_on_one_worker():
    """Only worker 0 disables compression."""
    import keras

    import tf_redsync as rs
    from tests.distributed import problems

    strategy = rs.MultiWorkerMirroredStrategy(timeout_seconds=30)
    with strategy.scope():
        model = problems.network(keras)
        model.compile(rs.DistributedOptimizer(keras.optimizers.SGD(0.1), rs.RedSync()), "mse")
    data = problems.dataset(64, 16)
    model.fit(data, verbose=0)
    try:
        if problems.rank() == 0:
            model.optimizer.disable()
        model.fit(data, verbose=0)
    except Exception as error:
        return {"text": f"{type(error).__name__}: {error}"}
    return {"text": "nothing"}


def test_disable_on_one_worker_raises():
    for seen in run_workers(disable_on_one_worker, env=LEGACY, timeout=100):
        text = str(seen["text"])
        assert "Disagreement" in text and "disable compression" in text, text


def collectives_before_the_check():
    """Collectives of a stale step that do not wait for its check."""
    import keras

    import tf_redsync as rs
    from tests.distributed import problems
    from tests.distributed.graphs import Step

    strategy, found = rs.MultiWorkerMirroredStrategy(), {}
    batch = next(iter(strategy.experimental_distribute_dataset(problems.dataset(64, 16))))
    for name, method, off in (
        ("compressed", rs.RedSync(density=0.1, dense_below=100, clip_norm=1.0), False),
        ("disabled", rs.CodedGMC(dense_below=100), True),
        ("local steps", rs.LocalSGD(steps=3), False),
    ):
        with strategy.scope():
            model = problems.network(keras, normalized=True)
            optimizer = rs.DistributedOptimizer(keras.optimizers.SGD(0.1), method)
            optimizer.build(model.trainable_variables)
        if off:
            optimizer.disable()
        step = Step(problems.step_of(strategy, model, optimizer).get_concrete_function(batch))
        checks = {o for o in step.operations if o.type == "Assert" and "assert_equal" in o.name}
        early = [o.name for o in step.collectives if not checks & step.waits_for(o)]
        found |= {name: len(step.collectives), f"{name}, early": ", ".join(early)}
    return found


def test_stale_step_sends_nothing():
    """Otherwise the message of a worker with a late check would match those of the next step."""
    for seen in run_workers(collectives_before_the_check, timeout=100):
        for name in ("compressed", "disabled", "local steps"):
            assert seen[name] > 1 and not str(seen[f"{name}, early"]), (name, seen)


@pytest.mark.parametrize("method", ["Dense()", "CodedTopK(density=0.5)"])
def test_stale_step_of_single_worker_changes_nothing(method):
    import keras
    import tensorflow as tf

    import tf_redsync as rs
    from tests.distributed import problems

    model = problems.network(keras)
    optimizer = rs.DistributedOptimizer(keras.optimizers.SGD(0.1), eval(f"rs.{method}"))
    optimizer.build(model.trainable_variables)
    x, y = np.ones([4, *model.input_shape[1:]], "f4"), np.ones([4, 1], "f4")

    @tf.function(autograph=False)
    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - y) ** 2)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    step()
    optimizer.disable()
    before = [v.numpy() for v in model.trainable_variables]
    for _ in range(20):
        with pytest.raises(rs.DistributedError, match="^this step was traced before compression"):
            step()
    for old, new in zip(before, model.trainable_variables, strict=True):
        np.testing.assert_array_equal(old, new)
