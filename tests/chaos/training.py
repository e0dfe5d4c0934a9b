"""The training of the scenarios: small, slow on request, reports every step.

Runs inside the workers, as a script: `training.py SETTINGS`. It reports events as lines of its
output, each with the time by the clock that all processes of the machine share.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import json
import os
import sys
import time
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from benchmarks.relay import enter_namespace

MARK = "CHAOS "
WIDTH, BATCH = 12, 8  # BATCH: rows per step, of all workers together
EPOCH = 20  # steps
_DAY = datetime.timedelta(days=1).total_seconds()


@dataclasses.dataclass(frozen=True)
class Settings:
    """The training and the failures inside of a worker.

    Attributes:
        steps: Total steps, a multiple of `epoch`.
        epoch: Steps of an epoch.
        watch: Steps between reports of threads, memory, open files and step time; 0 for never. If
            set, single steps are not reported.
        pace: Seconds added to each step.
        directory: Directory of checkpoints; "" for none.
        every: Steps between two checkpoints.
        strategy: Arguments of the strategy.
        namespaces: By rank, the network namespace to enter.
        bad_steps: Steps of each epoch in which the data of `bad_rank` are NaN.
        bad_rank: See `bad_steps`.
        slow: By rank, seconds that each step takes in addition to `pace`.
        clocks: By rank, the step at which the wall clock jumps, and by how many days.
        versions: By rank, another version of tf_redsync.
        chief_only: A callback evaluates at the end of an epoch, on worker 0 alone.
        units: Of the hidden layer: more of them make messages of many packets.
        brake: A file; as long as it exists each step takes a second longer.
        states: Folder to which each worker writes its restored state; "" for none.
    """

    steps: int = 2 * EPOCH
    epoch: int = EPOCH
    watch: int = 0
    pace: float = 0.02
    directory: str = ""
    every: int = 5
    strategy: dict = dataclasses.field(default_factory=dict)
    namespaces: tuple = ()
    bad_steps: tuple = ()
    bad_rank: int = 1
    slow: dict = dataclasses.field(default_factory=dict)
    clocks: dict = dataclasses.field(default_factory=dict)
    versions: dict = dataclasses.field(default_factory=dict)
    chief_only: bool = False
    units: int = 32
    brake: str = ""
    states: str = ""

    def to_text(self) -> str:
        return json.dumps(dataclasses.asdict(self))


def tell(kind: str, **values) -> None:
    """Writes one event line for `job.py`."""
    event = {"kind": kind, "at": time.monotonic(), **values}
    os.write(1, (f"\n{MARK}{json.dumps(event)}\n").encode())


def data(settings: Settings, workers: int):
    """An epoch; every worker takes its rows of each batch."""
    import numpy as np
    import tensorflow as tf

    rng = np.random.default_rng(3)
    x = rng.standard_normal([settings.epoch, BATCH, WIDTH]).astype(np.float32)
    y = x @ rng.standard_normal([WIDTH, 1]).astype(np.float32)
    rows = BATCH // workers
    for step in settings.bad_steps:
        y[step, settings.bad_rank * rows : (settings.bad_rank + 1) * rows] = np.nan
    batches = tf.data.Dataset.from_tensor_slices((x, y))
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    options.autotune.enabled = False  # otherwise its end may take a minute after an error
    return batches.with_options(options)


def digest(model) -> str:
    """Hash of the bits of all weights."""
    import numpy as np

    bits = b"".join(np.asarray(w).tobytes() for w in model.get_weights())
    return hashlib.sha256(bits).hexdigest()[:16]


def jump_clock(days: float) -> None:
    """Shifts Python's wall clock from now on."""
    seconds, nanoseconds, offset = time.time, time.time_ns, days * _DAY
    time.time = lambda: seconds() + offset
    time.time_ns = lambda: nanoseconds() + int(offset * 1e9)


def resources() -> dict:
    """Threads, memory and open files of this process."""
    with open("/proc/self/status", encoding="ascii") as file:
        status = dict(line.split(":", 1) for line in file)
    kib = int(status["VmRSS"].split()[0])
    files = len(os.listdir("/proc/self/fd"))
    return {"threads": int(status["Threads"]), "mib": kib / 1024, "files": files}


def keep_states(settings: Settings, rank: int, model) -> None:
    """Writes this worker's restored state; the chief also copies the checkpoint's states."""
    import numpy as np

    exchange = model.optimizer.exchange
    attempt, step = os.environ["TF_REDSYNC_RESTART"], int(exchange.step.numpy())
    folder = Path(settings.states)
    np.savez(folder / f"{attempt}-restored-{rank}.npz", **exchange.worker_state())
    manifests = sorted(Path(settings.directory).glob("checkpoint-*/manifest.json"))
    found = [m.parent for m in manifests if json.loads(m.read_text())["step"] == step]
    if rank == 0 and found:
        for part in found[-1].glob("part-*.npz"):
            (folder / f"{attempt}-saved-{part.name}").write_bytes(part.read_bytes())
    tell("restored", rank=rank, step=step, attempt=int(attempt))


def callbacks(settings: Settings, rank: int, model):
    """Callbacks that report each step and inject failures."""
    import keras
    import numpy as np

    import tf_redsync as rs

    class ReportSteps(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            if settings.states:
                keep_states(settings, rank, model)

        def on_train_batch_begin(self, batch, logs=None):
            step = int(model.optimizer.exchange.step.numpy())
            jump = settings.clocks.get(str(rank))
            if jump and step == jump[0]:
                jump_clock(jump[1])

        def on_train_batch_end(self, batch, logs=None):
            tell("step", step=int(model.optimizer.exchange.step.numpy()))
            time.sleep(settings.pace + settings.slow.get(str(rank), 0.0))
            if settings.brake and os.path.exists(settings.brake):
                time.sleep(1.0)

    class ReportResources(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            self.times = []

        def on_train_batch_begin(self, batch, logs=None):
            self.began = time.perf_counter()

        def on_train_batch_end(self, batch, logs=None):
            self.times.append(time.perf_counter() - self.began)
            step = int(model.optimizer.exchange.step.numpy())
            if step % settings.watch == 0:
                tell(
                    "watch",
                    rank=rank,
                    step=step,
                    **resources(),
                    median=float(np.median(self.times)),
                )
                self.times = []

    class EvaluateAlone(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            tell("fault")
            model.evaluate(data(settings, 1).take(2), verbose=0)

    found = [ReportResources() if settings.watch else ReportSteps()]
    if settings.chief_only and rank == 0:
        found.append(EvaluateAlone())
    if settings.directory:
        found.append(rs.callbacks.Checkpoint(settings.directory, every=settings.every))
    return found


def train(settings: Settings, rank: int, workers: int) -> None:
    import keras

    import tf_redsync as rs

    if str(rank) in settings.versions:
        rs.__version__ = settings.versions[str(rank)]
    strategy = rs.MultiWorkerMirroredStrategy(**settings.strategy)
    tell("met")
    keras.utils.set_random_seed(7)
    with strategy.scope():
        # Without a bias: a large one would be all-reduced, without a checksum.
        hidden = keras.layers.Dense(settings.units, activation="relu", use_bias=False)
        layers = [keras.layers.Input([WIDTH]), hidden]
        model = keras.Sequential([*layers, keras.layers.Dense(1)])
        method = rs.RedSync(density=0.05, momentum=0.9, dense_below=16)
        optimizer = rs.DistributedOptimizer(
            keras.optimizers.SGD(0.02), method, max_skipped_steps=15
        )
        model.compile(optimizer, "mse")
    model.fit(
        data(settings, workers),
        epochs=settings.steps // settings.epoch,
        verbose=0,
        callbacks=callbacks(settings, rank, model),
    )
    exchange = model.optimizer.exchange
    skipped = int(exchange.skipped.numpy())
    tell("end", digest=digest(model), step=int(exchange.step.numpy()), skipped=skipped)


def main(text: str) -> None:
    settings = Settings(**json.loads(text))
    task = json.loads(os.environ["TF_CONFIG"])
    rank, workers = task["task"]["index"], len(task["cluster"]["worker"])
    tell("start", pid=os.getpid())
    if settings.namespaces:
        enter_namespace(settings.namespaces[rank])
    try:
        train(settings, rank, workers)
    except SystemExit as stop:
        tell("stopped", code=stop.code)
        raise
    except BaseException as error:
        tell("error", text=f"{type(error).__name__}: {error}")
        raise


if __name__ == "__main__":
    main(sys.argv[1])
