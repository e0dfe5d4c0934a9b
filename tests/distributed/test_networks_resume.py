"""`Checkpoint` on typical networks: killed within an epoch, training resumes bit for bit.

One job of workers trains to the end, then trains again until it is killed. Another job resumes.
"""

import hashlib
import json
import pathlib
import shutil
import time

import numpy as np
import pytest

from tests.distributed import cluster
from tests.distributed.cluster import LEGACY, run_workers

EPOCHS, STEPS, EVERY = 2, 6, 4
DIES_AFTER = (1, 3)  # epoch and batch, from 0: two steps after the second checkpoint
CLASSES, TOKENS = 4, 3000


def residual_network(keras, rs):
    """With BatchNormalization: each worker updates its own statistics."""
    model = keras.applications.ResNet50(
        weights=None, input_shape=(32, 32, 3), classes=CLASSES, classifier_activation=None
    )
    return model, keras.optimizers.SGD(0.01), rs.RedSync(density=0.01, momentum=0.9)


def attention(keras, rs):
    """With dropout, layer norms and AdamW, and several steps in one execution."""
    layers = keras.layers
    tokens = layers.Input([12], dtype="int32")
    x = layers.Embedding(TOKENS, 16)(tokens)
    for _ in range(2):
        attended = layers.MultiHeadAttention(2, 8, dropout=0.1)(x, x)
        x = layers.LayerNormalization()(x + layers.Dropout(0.1)(attended))
        x = layers.LayerNormalization()(x + layers.Dense(16, activation="gelu")(x))
    logits = layers.Dense(CLASSES)(layers.GlobalAveragePooling1D()(x))
    optimizer = keras.optimizers.AdamW(0.003, weight_decay=0.05, clipnorm=1.0)
    return keras.Model(tokens, logits), optimizer, rs.PowerSGD(rank=2, min_compression_rate=0)


def embedding(keras, rs):
    """A few rows are looked up many times in each step, most rows never."""
    layers = keras.layers
    rows = layers.Input([12], dtype="int32")
    x = layers.GlobalAveragePooling1D()(layers.Embedding(TOKENS, 16)(rows))
    logits = layers.Dense(CLASSES)(layers.Dense(16, activation="relu")(x))
    method = rs.contrib.OkTopk(
        density=0.002, threshold_interval=3, partition_interval=5, dense_below=64
    )
    return keras.Model(rows, logits), keras.optimizers.Adam(0.01), method


def mixed_precision(keras, rs):
    """With a loss scale that overflows in some steps, which are skipped."""
    keras.mixed_precision.set_global_policy("mixed_float16")
    layers = keras.layers
    x = layers.Input([12])
    hidden = layers.BatchNormalization()(layers.Dense(32, activation="relu")(x))
    model = keras.Model(x, layers.Dense(CLASSES, dtype="float32")(hidden))
    inner = keras.optimizers.SGD(0.05, momentum=0.9)
    optimizer = keras.optimizers.LossScaleOptimizer(
        inner, initial_scale=2.0**19, dynamic_growth_steps=2
    )
    return model, optimizer, rs.HalfPrecision(method=rs.TopK(density=0.1, dense_below=16))


def small(keras, rs):
    """A network for many workers, or for data of unknown size."""
    layers = keras.layers
    model = keras.Sequential(
        [layers.Input([12]), layers.Dense(16, activation="relu"), layers.Dense(CLASSES)]
    )
    method = rs.contrib.OkTopk(
        density=0.1, threshold_interval=3, partition_interval=5, dense_below=16
    )
    return model, keras.optimizers.Adam(0.01), method


def with_global_momentum(build):
    """The same network; `CodedGMC` applies the momentum instead of Adam."""

    def build_changed(keras, rs):
        model, optimizer, _ = build(keras, rs)
        if hasattr(optimizer, "beta_1"):
            optimizer = keras.optimizers.AdamW(0.01, weight_decay=0.05, beta_1=0.0)
        return model, optimizer, rs.CodedGMC(dense_below=16)

    return build_changed


def with_method(build, method, optimizer=None):
    """The same network with another method and optionally another optimizer."""

    def build_changed(keras, rs):
        model, own, _ = build(keras, rs)
        chosen = own if optimizer is None else optimizer(keras.optimizers)
        return model, chosen, eval(method, {"rs": rs})

    return build_changed


def sgd(optimizers):
    return optimizers.SGD(0.001)


def adam(optimizers):
    return optimizers.Adam(0.01)


STREAMING = "rs.StreamingDiLoCo(steps=4, fragments=3, overlap=1)"
FOUR_BITS = "rs.BlockQuantized(bits=4)"
IN_FLOATS = "rs.StreamingDiLoCo(steps=4, fragments=3, overlap=1, value_bits=32)"
LOW_RANK = "rs.BlockQuantized(method=rs.PowerSGD(rank=2, min_compression_rate=0), bits=4)"
VALUES = "rs.BlockQuantized(method=rs.TopK(density=0.01, dense_below=64), bits=4)"
SPARSE = "rs.SparseLoCo(steps=3, top_k=16)"
ONE_BIT = "rs.contrib.OneBitAdam(warm_up=rs.DenseWarmUp(4), dense_below=64)"
ZERO_ONE = "rs.contrib.ZeroOneAdam(start=4, steps=2, double_after=3, variance_updates=2)"


# Network, kind of inputs, number of workers, options.
CASES = {
    "residual network": (residual_network, "images", 2, {}),
    "attention": (attention, "tokens", 2, {"compiled": {"steps_per_execution": 2}}),
    "embedding": (embedding, "tokens", 2, {}),
    "mixed precision": (mixed_precision, "numbers", 2, {"compiled": {"auto_scale_loss": False}}),
    "eleven workers": (small, "numbers", 11, {}),
    "unknown size": (small, "numbers", 2, {"every": STEPS}),
    "unknown size in tf_keras": (small, "numbers", 2, {"every": STEPS, "tf_keras": True}),
    "residual network, global momentum": (
        with_global_momentum(residual_network), "images", 2, {},
    ),
    "attention, global momentum": (
        with_global_momentum(attention), "tokens", 3, {"compiled": {"steps_per_execution": 2}},
    ),
    "embedding, global momentum": (with_global_momentum(embedding), "tokens", 2, {}),
    "eleven workers, global momentum": (with_global_momentum(small), "numbers", 11, {}),
    "residual network, streaming": (with_method(residual_network, STREAMING), "images", 2, {}),
    "residual network, 0/1 Adam": (with_method(residual_network, ZERO_ONE, adam), "images", 2, {}),
    "attention, SparseLoCo": (with_method(attention, SPARSE), "tokens", 3, {}),
    "attention, 0/1 Adam": (
        with_method(attention, ZERO_ONE), "tokens", 2, {"compiled": {"steps_per_execution": 2}},
    ),
    "embedding, DeMo": (with_method(embedding, "rs.DeMo()", sgd), "tokens", 2, {}),
    "embedding, 1-bit Adam": (with_method(embedding, ONE_BIT), "tokens", 3, {}),
    "eleven workers, streaming": (with_method(small, STREAMING), "numbers", 11, {}),
    "eleven workers, SparseLoCo": (with_method(small, SPARSE), "numbers", 11, {}),
    "eleven workers, 0/1 Adam": (with_method(small, ZERO_ONE), "numbers", 11, {}),
    "eleven workers, 1-bit Adam": (with_method(small, ONE_BIT), "numbers", 11, {}),
    "eleven workers, DeMo": (with_method(small, "rs.DeMo()", sgd), "numbers", 11, {}),
    "residual network, 4 bits": (with_method(residual_network, FOUR_BITS), "images", 2, {}),
    "attention, low rank in 4 bits": (
        with_method(attention, LOW_RANK), "tokens", 3, {"compiled": {"steps_per_execution": 2}},
    ),
    "embedding, values in 4 bits": (with_method(embedding, VALUES), "tokens", 2, {}),
    "eleven workers, 4 bits": (with_method(small, FOUR_BITS), "numbers", 11, {}),
    "eleven workers, streaming in 4 bits": (
        with_method(small, f"rs.BlockQuantized(method={IN_FLOATS}, bits=4)"), "numbers", 11, {},
    ),
}  # fmt: skip


def inputs(kind, rows):
    rng = np.random.default_rng(3)
    if kind == "images":
        return rng.normal(size=[rows, 32, 32, 3]).astype(np.float32)
    if kind == "tokens":  # by Zipf's law: two of five tokens are 1
        return np.minimum(rng.zipf(1.5, [rows, 12]), TOKENS - 1).astype(np.int32)
    return rng.normal(size=[rows, 12]).astype(np.float32)


def data(name):
    import tensorflow as tf

    _, kind, workers, options = CASES[name]
    rows = STEPS * 4 * workers
    x = inputs(kind, rows)
    y = np.random.default_rng(4).integers(0, CLASSES, [rows])
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(rows, seed=11)
    if "every" in options:
        dataset = dataset.filter(lambda x, y: True)  # its size is unknown
    return dataset.batch(4 * workers, drop_remainder=True)


def digest(array):
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()[:16]


def final_state(model):
    """Hashes of all state that training has changed, by name, on this worker."""
    from tf_redsync.keras import training_state

    state = training_state.per_worker(model, with_metrics=False)
    shared = {name: read() for name, read in training_state.shared(model).items()}
    if model.optimizer.exchange.own_variables:  # individual weights are in the worker's state
        shared = {n: a for n, a in shared.items() if not n.startswith("optimizer/")}
    return {n: digest(a) for n, a in {**shared, **state}.items() if n != "exchange/about"}


def fit(name, strategy, directory, killed=False):
    """Trains and returns hashes of the final state; with `killed` it ends by SIGKILL."""
    import tf_redsync as rs

    build, _, _, options = CASES[name]
    if "tf_keras" in options:
        import tf_keras as keras
    else:
        import keras
    keras.utils.set_random_seed(7)
    with strategy.scope():
        model, optimizer, method = build(keras, rs)
        model.compile(
            rs.DistributedOptimizer(optimizer, method),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
            **options.get("compiled", {}),
        )

    every = options.get("every", EVERY)
    saves = (DIES_AFTER[0] * STEPS + DIES_AFTER[1]) // every
    last = pathlib.Path(directory) / f"checkpoint-{saves:06d}" / "manifest.json"

    class Recorder(keras.callbacks.Callback):
        epoch, batches, epochs = 0, (), ()

        def on_epoch_begin(self, epoch, logs=None):
            self.epoch = epoch

        def on_train_batch_end(self, batch, logs=None):
            self.batches += (batch,)
            if killed and (self.epoch, batch) >= DIES_AFTER:
                while not last.exists():
                    time.sleep(0.01)
                cluster.die_together()

        def on_epoch_end(self, epoch, logs=None):
            self.epochs += ([epoch, float(logs["loss"]), float(logs["accuracy"])],)

    recorder = Recorder()
    checkpoint = rs.callbacks.Checkpoint(directory, every=every)
    model.fit(data(name), epochs=EPOCHS, verbose=0, callbacks=[recorder, checkpoint])
    exchange = model.optimizer.exchange
    own = exchange.worker_state().items()
    residuals = [a for n, a in own if n.split("/")[1:2] in (["residual"], ["velocity"])]
    return {
        "final_state": json.dumps(final_state(model)),
        "batches": list(recorder.batches),
        "epochs": np.array(recorder.epochs),
        "residual": max((float(np.abs(a).max(initial=0.0)) for a in residuals), default=0.0),
        "skipped": int(exchange.skipped.numpy()),
    }


def train_then_die(name, directory):
    import tf_redsync as rs

    strategy = rs.MultiWorkerMirroredStrategy()
    cluster.save(**fit(name, strategy, f"{directory}/whole"))
    fit(name, strategy, f"{directory}/killed", killed=True)


def resume(name, directory):
    import tf_redsync as rs

    return fit(name, rs.MultiWorkerMirroredStrategy(), f"{directory}/killed")


@pytest.mark.deep
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("name", CASES)
def test_killed_network_resumes_bit_for_bit(name, tmp_path):
    _, _, workers, options = CASES[name]
    job = {
        "workers": workers,
        "args": (name, str(tmp_path)),
        "env": LEGACY if "tf_keras" in options else None,
        "timeout": 700,
    }
    whole = cluster.kill_workers(train_then_die, **job)
    rest = run_workers(resume, **job)
    shutil.rmtree(tmp_path)  # gigabytes
    at_end = "every" in options  # an epoch of unknown size is repeated from its start
    for before, after in zip(whole, rest, strict=True):
        expected, found = json.loads(before["final_state"]), json.loads(after["final_state"])
        assert expected.keys() == found.keys()
        assert [n for n in expected if expected[n] != found[n]] == []
        steps = 6 if at_end else 4
        per = options.get("compiled", {}).get("steps_per_execution", 1)
        np.testing.assert_array_equal(after["batches"], before["batches"][-steps // per :])
        np.testing.assert_array_equal(after["epochs"], before["epochs"][0 if at_end else 1 :])
        assert np.isfinite(before["epochs"]).all()
        assert name == "attention" or "streaming" in name or before["residual"] > 0
        assert (before["skipped"] > 0) == (name == "mixed precision")
    weights = [
        {n: h for n, h in json.loads(w["final_state"]).items() if "@" not in n} for w in rest
    ]
    own = {n for n in weights[0] if any(w[n] != weights[0][n] for w in weights)}
    assert all(n.startswith("exchange/") for n in own), own
    if "streaming" not in name:  # with streaming, everything has arrived
        assert any(n.startswith("exchange/states/") for n in own), "no worker has its own state"
