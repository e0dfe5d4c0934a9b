"""Training that is saved and resumed in other processes; imported inside the workers.

`straight` trains `STEPS` steps and saves after `SAVED` of them, in all formats. `resumed` loads in
other processes and continues. Tests compare the hashes that both return for each step.
"""

import hashlib
import json
import pathlib
import traceback
import zlib

import numpy as np

from tests.deep import DEEP

STEPS, SAVED, BATCH = 30, 13, 8
PRUNED = 4  # weights are pruned before this step
FORMATS = {
    "keras3": ("checkpoint", "keras", "weights"),
    "tf_keras": ("checkpoint", "keras", "weights", "tf_weights"),
    "legacy": ("checkpoint", "tf_weights"),
}


# Formats to test for a case; all formats if the case is missing here, or with `pytest --deep`.
SOME = {
    "redsync": ("weights",),
    "auto": ("keras",),
    "local_sgd": ("tf_weights",),
    "streaming_in_blocks": ("checkpoint",),
}


def formats(family, name):
    """The formats in which a family saves the exchange's state."""
    found = FORMATS[family]
    if name not in cases():  # a method's state is arrays in any format
        return [f for f in found if f in ("checkpoint", "weights")][: 1 + (family == "keras3")]
    return found if DEEP else [f for f in found if f in SOME.get(name, found)]


def cases():
    """One method for each kind of state and schedule."""
    import tf_redsync as rs

    small = {"dense_below": 16}
    return {
        "redsync": rs.RedSync(density=0.1, momentum=0.9, threshold_above=16, **small),
        "dense": rs.Dense(momentum=0.9),
        "power_sgd": rs.PowerSGD(rank=2, min_compression_rate=0),
        "acp_sgd": rs.ACPSGD(rank=2, min_compression_rate=0),
        "ok_topk": rs.contrib.OkTopk(
            density=0.1, threshold_interval=4, partition_interval=8, **small
        ),
        "cd_sgd": rs.CDSGD(full_every=3, warm_up=rs.DenseWarmUp(5), **small),
        "local_sgd": rs.LocalSGD(steps=4),
        # Saved while part of a message is in flight, and in either stage.
        "streaming": rs.StreamingDiLoCo(steps=6, fragments=2, overlap=3),
        "in_blocks": rs.BlockQuantized(bits=4, block=32),
        "streaming_in_blocks": rs.BlockQuantized(
            method=rs.StreamingDiLoCo(steps=6, fragments=2, overlap=3, value_bits=32), bits=2
        ),
        "one_bit_adam": rs.contrib.OneBitAdam(warm_up=rs.DenseWarmUp(8), **small),
        "adam_at_first": rs.contrib.OneBitAdam(warm_up=rs.DenseWarmUp(16), **small),
        "zero_one_adam": rs.contrib.ZeroOneAdam(
            start=9, steps=4, double_after=3, variance_updates=2
        ),
        "sbc": rs.SBC(steps=3, density=0.3, **small),
        "pruned": rs.contrib.PacTrain(stable_steps=4, **small),
        "lgc": rs.contrib.LGC(
            density=0.1,
            dense_steps=3,
            training_steps=15,
            channels=(4, 6),
            decoder_channels=(5, 3),
            code_channels=2,
            dense_ends=False,
            **small,
        ),
        "auto": rs.Auto(candidates=(rs.RedSync(density=0.1, **small),), trial_steps=2),
        "auto with local steps": rs.Auto(
            # So many trials that no measurement on a busy machine makes dense win, in either run.
            candidates=(rs.LocalSGD(steps=12),),
            max_overhead=1e-9,
            step_seconds=1e-3,
        ),
        "auto in its trial": rs.Auto(
            candidates=(rs.RedSync(density=0.1, **small),), trial_steps=20
        ),
    }


def named(name):
    """A case, or a method of the conformance table, by name."""
    from benchmarks import method_settings

    found = cases()
    if name in found:
        return found[name]
    return method_settings.make(name, threshold=0.5, density=0.1, dense_below=16)


class Training:
    """One model with its optimizer on this worker, and a record of every step."""

    def __init__(self, strategy, family, name, load=None):
        """`load(training)` is called between compilation and the first step."""
        import tensorflow as tf

        import tf_redsync as rs
        from benchmarks import method_settings
        from tests.distributed import problems

        keras = library(family)
        self.strategy, self.keras, self.name = strategy, keras, name
        self.seed = zlib.crc32(name.encode()) % 1000
        method = named(name)
        rate = 0.02
        if name not in cases():
            rate = method_settings.learning_rate(method, dense=0.02, votes=0.005)
        is_method = isinstance(method, rs.Method)
        momentum = 0.0 if is_method and method.traits.momentum_in_exchange else 0.5
        optimizers = keras.optimizers.legacy if family == "legacy" else keras.optimizers
        if type(method).__name__ == "CompAMS" and family == "keras3":
            inner = lambda: rs.AMSGrad(0.01)  # noqa: E731
        elif type(method).__name__ == "CompAMS":
            inner = lambda: optimizers.Adam(0.01, amsgrad=True)  # noqa: E731
        elif type(method).__name__ in ("OneBitAdam", "ZeroOneAdam"):
            inner = lambda: optimizers.Adam(0.01)  # noqa: E731
        else:
            inner = lambda: optimizers.SGD(rate, momentum=momentum)  # noqa: E731
        if load is None or not load.makes_the_model:
            with strategy.scope():
                self.model = problems.network(keras)
                inner_optimizer = inner()
                self.model.compile(rs.DistributedOptimizer(inner_optimizer, method), "mse")
                # Keras 3 loads variables into an optimizer without slots before it is built.
                slots = family != "keras3" or momentum or type(inner_optimizer).__name__ != "SGD"
                if load is None or load.form != "weights" or slots:
                    self.model.optimizer.build(self.model.trainable_variables)
        if load is not None:
            load(self)
        model, optimizer = self.model, self.model.optimizer

        def replica_step(x, y):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
                loss = loss / strategy.num_replicas_in_sync
            grads = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))

        self._step = tf.function(lambda x, y: strategy.run(replica_step, (x, y)), autograph=False)
        self.rank = problems.rank()

    def train(self, first, last):
        """Steps `first` to `last`; returns a hash of this worker's weights after each."""
        import tensorflow as tf

        digests = []
        for step in range(first, last):
            if step == PRUNED and self.name == "pruned":
                with self.strategy.scope():
                    self.model.optimizer.prune(0.5)
            generator = np.random.default_rng([self.seed, step, self.rank])
            x = generator.standard_normal((BATCH, 12)).astype(np.float32)
            y = x @ np.arange(12, dtype=np.float32)[:, None] / 12 + self.rank
            self._step(tf.constant(x), tf.constant(y.astype(np.float32)))
            digests.append(self.digest())
        return digests

    def digest(self):
        local = self.strategy.experimental_local_results
        weights = [getattr(v, "value", v) if self.is_keras3 else v for v in self.model.weights]
        data = b"".join(local(w)[0].numpy().tobytes() for w in weights)
        return hashlib.sha256(data).hexdigest()[:16]

    @property
    def is_keras3(self):
        return self.keras.__name__ == "keras"

    def state(self):
        """Hashes of this worker's part of the state, without what belongs to the run."""
        part = self.model.optimizer.exchange.worker_state()
        passing = ("about", "trial/seconds")
        return {
            name: hashlib.sha256(array.tobytes()).hexdigest()[:16]
            for name, array in part.items()
            if name not in passing
        }

    def save(self, folder, form):
        import tensorflow as tf

        path = pathlib.Path(folder) / f"{form}_{self.rank}"
        if form == "checkpoint":
            tf.train.Checkpoint(model=self.model, optimizer=self.model.optimizer).write(str(path))
        elif form == "keras":
            self.model.save(f"{path}.keras")
        else:
            self.model.save_weights(f"{path}.weights.h5" if form == "weights" else str(path))


class Load:
    """Loads files written by `Training.save`."""

    def __init__(self, folder, form):
        self.folder, self.form = folder, form
        self.makes_the_model = form == "keras"

    def __call__(self, training):
        import tensorflow as tf

        from tests.distributed import problems

        path = pathlib.Path(self.folder) / f"{self.form}_{problems.rank()}"
        if self.form == "keras":
            with training.strategy.scope():
                training.model = training.keras.models.load_model(f"{path}.keras")
        elif self.form == "checkpoint":
            model = training.model
            checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
            checkpoint.read(str(path)).assert_existing_objects_matched()
        else:
            path = f"{path}.weights.h5" if self.form == "weights" else str(path)
            training.model.load_weights(path)


def library(family):
    if family == "keras3":
        import keras
    else:
        import tf_keras as keras
    return keras


def fitted(strategy, family, folder=None, epochs=3):
    """Fits, with a backup of each epoch if `folder` is given; returns hashes."""
    from tests.distributed import problems

    training = Training(strategy, family, "redsync")
    callbacks = training.keras.callbacks
    backups = []
    if folder is not None:
        own = str(pathlib.Path(folder) / f"backup_{training.rank}")
        backups = [callbacks.BackupAndRestore(own, delete_checkpoint=False)]
    history = training.model.fit(
        problems.dataset(64, 16), epochs=epochs, verbose=0, callbacks=backups
    )
    return {
        "digest": training.digest(),
        "state": training.state(),
        "epochs": len(history.history["loss"]),
    }


def straight(folder, family, names, together):
    """Trains each case without interruption and saves on the way.

    Methods with individual weights on each worker save files of the consensus. With `together`, the
    workers synchronize at the same step.
    """
    import tf_redsync as rs
    from tf_redsync.auto import auto

    def compressed(self, specs, measured):
        methods = self.methods
        return auto.Choice(specs, methods, (1.0, 0.5), methods[1])

    auto.Auto._choice = compressed  # a method that a measurement here would not choose
    strategy = rs.MultiWorkerMirroredStrategy()

    def run(name):
        if name == "backup":
            fitted(strategy, family, folder, epochs=2)
            return fitted(strategy, family)
        training = Training(strategy, family, name)
        digests = training.train(0, SAVED)
        into = pathlib.Path(folder) / name
        into.mkdir(exist_ok=True)
        exchange = training.model.optimizer.exchange
        before = training.state()
        forms = formats(family, name)
        if together:
            exchange.to_consensus()
            before = training.state()
        elif exchange.consensus is not None:
            forms = ("checkpoint",)
        for form in forms:
            training.save(into, form)
        changed = [n for n, value in training.state().items() if before.get(n) != value]
        digests += training.train(SAVED, STEPS)
        return {"digests": digests, "state": training.state(), "changed": changed, "forms": forms}

    return _each(names, run)


def resumed(folder, family, names, forms, together):
    """Loads each case in each existing format, and continues."""
    import tf_redsync as rs

    strategy = rs.MultiWorkerMirroredStrategy()

    def run(name):
        if name == "backup":
            return fitted(strategy, family, folder)
        results = {}
        for form in forms[name]:
            load = Load(pathlib.Path(folder) / name, form)
            training = Training(strategy, family, name, load)
            digests = training.train(SAVED, STEPS)
            results[form] = {"digests": digests, "state": training.state()}
        return results

    return _each(names, run)


def _each(names, run):
    import time

    results = {}
    for name in names:
        began = time.monotonic()
        try:
            results[name] = run(name)
        except Exception:
            results[name] = {"error": traceback.format_exc()}
        print(f"{name}: {time.monotonic() - began:.1f} s", flush=True)
    return {"results": json.dumps(results)}


def alone(folder):
    """The chief saves alone; returns what each worker restored."""
    import warnings

    import tensorflow as tf

    import tf_redsync as rs
    from tests.distributed import problems

    strategy = rs.MultiWorkerMirroredStrategy()
    folder, results = pathlib.Path(folder), {}
    first = Training(strategy, "keras3", "redsync")
    keras, chief = first.keras, first.rank == 0

    def fit(training, callbacks):
        training.model.fit(
            problems.dataset(64, 16), epochs=2, verbose=0, callbacks=callbacks if chief else []
        )

    # Only the chief has saving callbacks.
    fit(
        first,
        [
            keras.callbacks.ModelCheckpoint(str(folder / "model.keras")),
            keras.callbacks.ModelCheckpoint(str(folder / "a.weights.h5"), save_weights_only=True),
        ],
    )
    optimizer = first.model.optimizer
    if chief:
        tf.train.Checkpoint(model=first.model, optimizer=optimizer).write(str(folder / "chief"))
    own = optimizer.exchange.worker_state()
    results["residuals"] = _residuals(own)
    np.savez(folder / f"part_{first.rank}.npz", **own)
    third = Training(strategy, "keras3", "local_sgd")
    fit(third, [keras.callbacks.ModelCheckpoint(str(folder / "local.keras"))])

    # Both load the chief's files: its part counts once.
    def loaded(load):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", UserWarning)
            with strategy.scope():
                model = load()
        results["warned"] = [str(w.message) for w in caught if "ranks" in str(w.message)]
        return _residuals(model.optimizer.exchange.worker_state())

    def load_model():
        return keras.saving.load_model(folder / "model.keras")

    results["loaded"] = loaded(load_model)

    # The chief has both parts, the other worker has none: they cross the network.
    second = Training(strategy, "keras3", "redsync")
    parts = [dict(np.load(folder / f"part_{r}.npz")) for r in (0, 1)] if chief else []
    second.model.optimizer.exchange.restore_worker_states(parts)
    found = second.model.optimizer.exchange.worker_state()
    results["shared"] = _residuals(found)
    results["counted"] = int(found["step"])

    # One worker's part is damaged, so no worker resumes from it.
    damaged = dict(own)
    if not chief:
        damaged["step"] = np.float32(1)
    results["damaged"] = _raised(
        lambda: second.model.optimizer.exchange.restore_worker_states([damaged])
    )
    # In the middle of a round weights differ between workers, and the chief has only its own.
    third.train(0, 1)
    results["apart"] = third.model.optimizer.exchange.weights_differ
    if chief:
        results["in a round"] = _raised(lambda: third.model.save(folder / "apart.keras"))
    else:
        results["in a round"] = _raised(
            lambda: third.model.fit(problems.dataset(64, 16), verbose=0)
        )
    return {"results": json.dumps(results)}


def _residuals(part):
    """All residuals of a part in one list."""
    names = sorted(n for n in part if "/residual/" in n)
    return np.concatenate([part[n].ravel() for n in names]).tolist()


def _raised(function):
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"
