"""Trains on workers that Ray Train starts: Ray sets TF_CONFIG, so the loop is that of any script.

    pip install "ray[train]"
    python examples/cluster/ray_train.py --workers=2 --run_dir=/shared/ray

After a failure Ray starts all workers again, and they go on from the last checkpoint: --run_dir
has to be a folder that all machines see. Ray runs the loop in a thread, so a signal does not make
the workers save.
"""

import os
import secrets

import ray.train
from absl import app, flags
from ray.train.tensorflow import TensorflowTrainer

FLAGS = flags.FLAGS
flags.DEFINE_integer("workers", 2, "Number of workers.")
flags.DEFINE_bool("use_gpu", False, "Whether each worker gets a GPU.")
flags.DEFINE_string("run_dir", "runs/ray", "For checkpoints, records and Ray's results.")
flags.DEFINE_integer("epochs", 5, "Passes over the training set, in all.")
flags.DEFINE_integer("batch_size", 32, "Examples per worker and step.")


def train(config):
    """Runs on each worker."""
    # Ray sets it for Keras 2; with it, `tf.keras` is tf_keras.
    os.environ.pop("TF_USE_LEGACY_KERAS", None)
    import keras
    import tensorflow as tf
    from sklearn.datasets import load_digits

    import tf_redsync as rs

    strategy = rs.MultiWorkerMirroredStrategy()
    workers = strategy.num_replicas_in_sync
    keras.utils.set_random_seed(1)
    images, labels = load_digits(return_X_y=True)
    data = tf.data.Dataset.from_tensor_slices((images / 16.0, labels))
    batch = config["batch_size"] * workers  # of all workers
    data = data.shuffle(len(labels), seed=1).batch(batch, drop_remainder=True)
    with strategy.scope():
        hidden = keras.layers.Dense(256, "relu")
        model = keras.Sequential([keras.Input([64]), hidden, keras.layers.Dense(10, "softmax")])
        sgd = keras.optimizers.SGD(0.02 * workers)
        optimizer = rs.DistributedOptimizer(sgd, rs.CodedGMC(momentum=0.9))
        model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
    history = model.fit(
        data,
        epochs=config["epochs"],
        callbacks=[
            rs.callbacks.Checkpoint(os.path.join(config["run_dir"], "checkpoints")),
            rs.callbacks.CompressionMetrics(config["run_dir"]),
        ],
        verbose=2 if rs.rank() == 0 else 0,
    )
    last = {name: float(values[-1]) for name, values in history.history.items()}
    ray.train.report({**last, "workers": workers})


def main(argv):
    """Starts the workers and waits for them."""
    run_dir = os.path.abspath(FLAGS.run_dir)
    secret = os.environ.get("TF_REDSYNC_JOB") or secrets.token_hex(16)
    result = TensorflowTrainer(
        train,
        train_loop_config={
            "epochs": FLAGS.epochs,
            "batch_size": FLAGS.batch_size,
            "run_dir": run_dir,
        },
        scaling_config=ray.train.ScalingConfig(num_workers=FLAGS.workers, use_gpu=FLAGS.use_gpu),
        run_config=ray.train.RunConfig(
            storage_path=os.path.join(run_dir, "ray"),
            failure_config=ray.train.FailureConfig(max_failures=3),
            worker_runtime_env={"env_vars": {"TF_REDSYNC_JOB": secret}},
        ),
    ).fit()
    print(result.metrics)


if __name__ == "__main__":
    app.run(main)
