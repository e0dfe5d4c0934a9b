"""Trains a CNN on handwritten digits by a loop of its own, which goes on where it was stopped.

    python -m tf_redsync launch -n 2 examples/custom_loop.py

What is different from a loop on one machine: the strategy and its scope, the wrapped optimizer, the
loss divided by the size of the global batch, and checkpoints of each worker. Worker 0 prints.
"""

import os

import datasets
import keras
import numpy as np
import tensorflow as tf
from absl import app, flags

import tf_redsync as rs
import tf_redsync.flags

FLAGS = flags.FLAGS
tf_redsync.flags.define(exchange="CodedGMC(momentum=0.9)", run_dir="runs/custom_loop")
flags.DEFINE_string("data_dir", None, "Folder with mnist.npz. Default: scikit-learn's digits.")
flags.DEFINE_integer("epochs", 12, "Passes over the training set, in all.")
flags.DEFINE_integer("batch_size", 32, "Examples per worker and step.", lower_bound=1)
flags.DEFINE_float(
    "learning_rate",
    0.01,
    "Of SGD, per worker: it grows with the batch. A resumed run keeps its saved rate.",
)
flags.DEFINE_integer("seed", 1, "Of the weights and the order of the examples.")


def build_model(shape, classes: int) -> keras.Model:
    """A small CNN; its outputs are logits."""
    return keras.Sequential(
        [
            keras.Input(shape),
            keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
            keras.layers.Conv2D(64, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(256, activation="relu"),
            keras.layers.Dense(classes),
        ]
    )


def newest_of_all(strategy, manager: tf.train.CheckpointManager) -> int:
    """The newest epoch of which every worker has a checkpoint; 0 if there is none.

    Workers may have been stopped while they saved, so they compare what they have.
    """
    own = max((int(path.rpartition("-")[2]) for path in manager.checkpoints), default=0)
    of_all = strategy.gather(tf.constant([own]), axis=0).numpy()
    if max(of_all) - min(of_all) > 1:  # a worker that is not new is one epoch behind at most
        raise ValueError(
            f"--run_dir holds checkpoints of other workers: the newest epochs are {of_all}. "
            f"Received: --run_dir={FLAGS.run_dir}"
        )
    return int(min(of_all))


def main(argv):
    """Trains and evaluates."""
    if len(argv) > 1:
        raise app.UsageError(f"Unknown arguments: {argv[1:]}.")
    strategy = rs.MultiWorkerMirroredStrategy()
    workers = strategy.num_replicas_in_sync
    rank = rs.rank()
    (x_train, y_train), (x_test, y_test) = datasets.digits(FLAGS.data_dir)
    batch = FLAGS.batch_size * workers
    if len(x_train) < batch:
        raise app.UsageError(
            f"--batch_size={FLAGS.batch_size} on {workers} workers is more than the "
            f"{len(x_train)} examples."
        )

    keras.utils.set_random_seed(FLAGS.seed)
    with strategy.scope():
        model = build_model(x_train.shape[1:], int(y_train.max()) + 1)
        optimizer = keras.optimizers.SGD(FLAGS.learning_rate * workers)
        optimizer = rs.DistributedOptimizer(optimizer, **tf_redsync.flags.exchange())
        model.compile(optimizer=optimizer)  # for the callbacks and `predict`
        optimizer.build(model.trainable_variables)
        # Without its own mean, which in Keras 3 is divided by the number of workers, in others not.
        loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")

    def replica_step(images, labels):
        with tf.GradientTape() as tape:
            losses = loss_of(labels, model(images, training=True))
            # By the global batch: the exchange adds up the workers' gradients.
            loss = tf.nn.compute_average_loss(losses)
            scaled = optimizer.scale_loss(loss)  # another value only with a loss scale (float16)
        gradients = tape.gradient(scaled, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    @tf.function
    def train_step(examples):
        return strategy.reduce("SUM", strategy.run(replica_step, args=examples), axis=None)

    def batches(epoch: int):
        """Global batches, which the strategy divides; in the same order on all workers."""
        data = tf.data.Dataset.from_tensor_slices((x_train, y_train))
        data = data.shuffle(len(x_train), seed=FLAGS.seed + epoch)
        data = data.batch(batch, drop_remainder=True)
        return strategy.experimental_distribute_dataset(data)

    # Each worker saves to a folder of its own: its residuals are in the optimizer's part.
    checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer)
    folder = os.path.join(FLAGS.run_dir, f"checkpoints/worker-{rank}")
    manager = tf.train.CheckpointManager(checkpoint, folder, max_to_keep=2)
    first = newest_of_all(strategy, manager)
    if first:
        checkpoint.restore(os.path.join(folder, f"ckpt-{first}"))
        if rank == 0:
            done = "is complete" if first >= FLAGS.epochs else "goes on"
            print(f"Training {done} after epoch {first}: {FLAGS.run_dir}", flush=True)

    # Keras's own way to have callbacks in a loop.
    callbacks = keras.callbacks.CallbackList(
        [rs.callbacks.CompressionMetrics(FLAGS.run_dir)],
        add_progbar=rank == 0,
        model=model,
        epochs=FLAGS.epochs,
        steps=len(x_train) // batch,
        verbose=2,
    )
    callbacks.on_train_begin()
    for epoch in range(first, FLAGS.epochs):
        callbacks.on_epoch_begin(epoch)
        losses = []
        for step, examples in enumerate(batches(epoch)):
            callbacks.on_train_batch_begin(step)
            losses.append(train_step(examples))
            callbacks.on_train_batch_end(step, {"loss": losses[-1]})
        callbacks.on_epoch_end(epoch, {"loss": np.mean(losses)})
        manager.save(checkpoint_number=epoch + 1)
    callbacks.on_train_end()

    # The last steps' gradients that still wait. Not in the checkpoint: more epochs may follow.
    optimizer.flush()
    correct = np.argmax(model.predict(x_test, verbose=0), axis=-1) == y_test
    if rank == 0:
        print(f"test accuracy: {np.mean(correct):.4f}", flush=True)


if __name__ == "__main__":
    app.run(main)
