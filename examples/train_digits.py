"""Trains a small CNN on handwritten digits, on one or several workers.

    python -m tf_redsync launch -n 2 examples/train_digits.py
    python -m tf_redsync launch -n 2 examples/train_digits.py --exchange=Dense --optimizer=momentum

On several machines start the same script under a TF_CONFIG on each (docs/launching.md). Alone it
trains on one worker. Every worker reads its own share of the training set. Worker 0 prints the
progress and, with --out, writes its measurements as JSON.
"""

from __future__ import annotations

import json
import pathlib
import time

import keras
import numpy as np
import tensorflow as tf
from absl import app, flags

import tf_redsync as rs
import tf_redsync.flags

FLAGS = flags.FLAGS

tf_redsync.flags.define(exchange="RedSync(density=0.01, momentum=0.9)")
flags.DEFINE_enum(
    "optimizer",
    "sgd",
    ["sgd", "momentum", "adam"],
    "Inner optimizer. `momentum` is SGD with momentum 0.9, for exchanges without one.",
)
flags.DEFINE_float("learning_rate", 0.05, "Learning rate.")
flags.DEFINE_integer("epochs", 15, "Passes over the training set.")
flags.DEFINE_integer("batch_size", 32, "Examples per worker and step.", lower_bound=1)
flags.DEFINE_integer("seed", 1, "Seed of the weights and of the order of the examples.")
flags.DEFINE_string(
    "data_dir",
    None,
    "Folder with one .npz file, or the file itself: images x_train and x_test, [n, height, width] "
    "or [n, height, width, channels]; integer labels y_train and y_test, [n]. MNIST as Keras "
    "stores it will do. Default: the 8x8 digits that come with scikit-learn.",
)
flags.DEFINE_string("out", None, "JSON file for worker 0 to write the results to.")


def load_data(data_dir: str | None):
    """Returns ((x_train, y_train), (x_test, y_test)).

    Images are float32 [n, height, width, channels] in [0, 1], labels int32 [n].
    """
    if data_dir is None:
        from sklearn.datasets import load_digits

        digits = load_digits()
        # A fixed shuffle: --seed changes the training, never the test set.
        order = np.random.default_rng(0).permutation(len(digits.target))
        test, train = np.split(order, [len(order) // 5])
        x_train, x_test = digits.images[train], digits.images[test]
        y_train, y_test = digits.target[train], digits.target[test]
    else:
        with np.load(_npz_file(data_dir)) as data:
            x_train, y_train, x_test, y_test = (
                data[name] for name in ("x_train", "y_train", "x_test", "y_test")
            )
    scale = np.float32(x_train.max())

    def prepare(x, y):
        x = x.astype(np.float32) / scale
        return (x[..., np.newaxis] if x.ndim == 3 else x), y.astype(np.int32)

    return prepare(x_train, y_train), prepare(x_test, y_test)


def _npz_file(data_dir: str) -> pathlib.Path:
    path = pathlib.Path(data_dir).expanduser()
    files = [path] if path.is_file() else sorted(path.glob("*.npz"))
    if len(files) != 1:
        raise ValueError(
            "`--data_dir` must be a .npz file or a folder that holds exactly one. "
            f"Received: --data_dir={data_dir}, which holds {[f.name for f in files]}."
        )
    return files[0]


def build_model(image_shape, classes: int) -> keras.Model:
    """A CNN whose first dense layer holds most of the weights (4 MB for 8x8 images)."""
    return keras.Sequential(
        [
            keras.layers.Input(image_shape),
            keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
            keras.layers.Conv2D(64, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(1024, activation="relu"),
            keras.layers.Dense(classes),
        ]
    )


def build_optimizer() -> keras.optimizers.Optimizer:
    """The inner optimizer, wrapped."""
    inner = {
        "sgd": lambda: keras.optimizers.SGD(FLAGS.learning_rate),
        "momentum": lambda: keras.optimizers.SGD(FLAGS.learning_rate, momentum=0.9),
        "adam": lambda: keras.optimizers.Adam(FLAGS.learning_rate),
    }[FLAGS.optimizer]()
    return rs.DistributedOptimizer(inner, **tf_redsync.flags.exchange())


class StepRecorder(keras.callbacks.Callback):
    """Records loss and duration of every training step."""

    def __init__(self):
        super().__init__()
        self.losses: list[float] = []
        self.milliseconds: list[float] = []

    def on_epoch_begin(self, epoch, logs=None):
        """Keras averages the loss from here on."""
        self._sum = 0.0

    def on_train_batch_begin(self, batch, logs=None):
        """Starts the clock."""
        self._started = time.perf_counter()

    def on_train_batch_end(self, batch, logs=None):
        """Stops the clock and takes the loss."""
        # Reading the loss waits for the step to end, so it comes before the clock.
        total = float(logs["loss"]) * (batch + 1)
        self.milliseconds.append(1e3 * (time.perf_counter() - self._started))
        # Keras reports the mean over the epoch so far and over all workers. The batches are of one
        # size, so the difference of the sums is the loss of this step.
        self.losses.append(total - self._sum)
        self._sum = total

    def median_step_ms(self) -> float:
        """Median duration of a step, without the first ones (tracing, caches)."""
        warm_up = min(10, len(self.milliseconds) // 2)
        return float(np.median(self.milliseconds[warm_up:]))


def train_dataset(strategy, x, y, steps_per_epoch: int):
    """Batches of this worker's share of the examples, shuffled anew for every epoch."""

    def make(context):
        worker, workers = context.input_pipeline_id, context.num_input_pipelines
        shard = tf.data.Dataset.from_tensor_slices((x[worker::workers], y[worker::workers]))
        shard = shard.shuffle(len(x), seed=FLAGS.seed + worker)
        # Equal numbers of equal batches: a worker with one step less would leave the others
        # waiting.
        shard = shard.batch(FLAGS.batch_size, drop_remainder=True).take(steps_per_epoch)
        return shard.repeat().prefetch(2)

    return strategy.distribute_datasets_from_function(make)


def test_dataset(strategy, x, y):
    """The whole test set on every worker.

    Keras averages the workers' accuracies. The same examples everywhere make that average the
    accuracy on the test set, whatever its size.
    """
    return strategy.distribute_datasets_from_function(
        lambda context: tf.data.Dataset.from_tensor_slices((x, y)).batch(256)
    )


def main(argv):
    """Trains, evaluates and reports."""
    if len(argv) > 1:
        raise app.UsageError(f"Unknown arguments: {argv[1:]}.")
    tf.get_logger().setLevel("WARNING")  # the progress is easier to read without the set-up lines
    (x_train, y_train), (x_test, y_test) = load_data(FLAGS.data_dir)

    strategy = rs.MultiWorkerMirroredStrategy()
    workers = strategy.num_replicas_in_sync
    is_first = rs.rank() == 0
    steps_per_epoch = len(x_train) // workers // FLAGS.batch_size
    if not steps_per_epoch:
        raise ValueError(
            f"`--batch_size` must be at most {len(x_train) // workers}, a worker's share of the "
            f"training set. Received: --batch_size={FLAGS.batch_size}."
        )

    keras.utils.set_random_seed(FLAGS.seed)
    with strategy.scope():
        model = build_model(x_train.shape[1:], classes=int(y_train.max()) + 1)
        optimizer = build_optimizer()
        model.compile(
            optimizer=optimizer,
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    recorder = StepRecorder()
    metrics = rs.callbacks.CompressionMetrics(FLAGS.run_dir, every=20)
    started = time.perf_counter()
    model.fit(
        train_dataset(strategy, x_train, y_train, steps_per_epoch),
        epochs=FLAGS.epochs,
        steps_per_epoch=steps_per_epoch,
        callbacks=[recorder, metrics],
        shuffle=False,  # the dataset does
        verbose=2 if is_first else 0,
    )
    seconds = time.perf_counter() - started
    _, accuracy = model.evaluate(test_dataset(strategy, x_test, y_test), verbose=0)

    if is_first:
        result = {
            "exchange": repr(rs.flags.exchange()["method"]),
            "workers": workers,
            "params": model.count_params(),
            "steps": len(recorder.losses),
            "accuracy": float(accuracy),
            "bytes_per_step": int(optimizer.bytes_per_step()),
            "step_ms": recorder.median_step_ms(),
            "fit_seconds": seconds,
            "loss": recorder.losses,
            "flags": FLAGS.flags_into_string().splitlines(),
        }
        report(result)
        if FLAGS.run_dir:
            print(f"report: {rs.report(FLAGS.run_dir)}", flush=True)


def report(result) -> None:
    """Prints the result and writes it to --out."""
    print(
        f"{result['exchange']}: test accuracy {result['accuracy']:.4f}, "
        f"{result['bytes_per_step']:,} bytes sent per worker and step, "
        f"{result['step_ms']:.1f} ms per step (median)",
        flush=True,
    )
    if FLAGS.out:
        path = pathlib.Path(FLAGS.out)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    app.run(main)
