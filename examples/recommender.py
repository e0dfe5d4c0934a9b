"""Trains a recommender of KerasRS on ratings: two large embeddings and a deep and cross network.

    python -m tf_redsync launch -n 2 examples/recommender.py
    ... --data_dir=ml-100k --run_dir=runs/ml-100k
    ... --exchange=Dense --beta_1=0.9 --run_dir=runs/dense

--data_dir is a folder of MovieLens with u.data or ratings.dat. Without it, the ratings are made up
of the moods of users and the fames of movies. Started again, it goes on from its last checkpoint.
"""

import os

import keras
import keras_rs
import numpy as np
import tensorflow as tf
from absl import app, flags
from keras import layers

import tf_redsync as rs
import tf_redsync.flags

FLAGS = flags.FLAGS
tf_redsync.flags.define(
    exchange="CodedTopK(density=0.01, value_bits=4)", run_dir="runs/recommender"
)
flags.DEFINE_string("data_dir", None, "Folder with u.data or ratings.dat.")
flags.DEFINE_integer("ratings", 100_000, "Number of made-up ratings.")
flags.DEFINE_integer("width", 32, "Of an embedding.")
flags.DEFINE_integer("epochs", 5, "Passes over the training set, in all.")
flags.DEFINE_integer("batch_size", 256, "Ratings per worker and step.")
flags.DEFINE_float("learning_rate", 0.002, "Of Adam.")
flags.DEFINE_float("beta_1", 0.0, "Of Adam.")
flags.DEFINE_integer("seed", 1, "Of the weights, the ratings and their order.")


def load_data():
    """Returns users and movies, int32 [n], and ratings up to 5, float32 [n]."""
    rng = np.random.default_rng(FLAGS.seed)
    if FLAGS.data_dir:
        names = ("u.data", "ratings.dat")
        paths = [p for n in names if os.path.exists(p := os.path.join(FLAGS.data_dir, n))]
        if len(paths) != 1:
            raise app.UsageError(
                f"--data_dir must hold either {names[0]} or {names[1]} of MovieLens. "
                f"Received: --data_dir={FLAGS.data_dir}, which holds {paths or 'neither'}"
            )
        with open(paths[0], encoding="latin-1") as file:
            rows = np.array([line.replace("::", "\t").split("\t")[:3] for line in file], float)
        users, movies, ratings = rng.permutation(rows).T  # ratings of MovieLens 10M have halves
    else:
        users = rng.integers(0, 3000, FLAGS.ratings)
        movies = (1500 * rng.random(FLAGS.ratings) ** 2).astype(int)  # some are seen more often
        moods, fames = rng.normal(scale=0.7, size=3000), rng.normal(scale=0.7, size=1500)
        noise = rng.normal(scale=0.5, size=FLAGS.ratings)
        ratings = np.clip(np.rint(3 + moods[users] + fames[movies] + noise), 1, 5)
    return users.astype("int32"), movies.astype("int32"), ratings.astype("float32")


def build_model(users: int, movies: int) -> keras.Model:
    """From the numbers of a user and a movie to a rating."""
    inputs = {name: keras.Input([], dtype="int32", name=name) for name in ("user", "movie")}
    x = layers.Concatenate()(
        [
            layers.Embedding(users, FLAGS.width)(inputs["user"]),
            layers.Embedding(movies, FLAGS.width)(inputs["movie"]),
        ]
    )
    for _ in range(2):
        x = keras_rs.layers.FeatureCross()(x)
    x = layers.Dense(128, "relu")(x)
    return keras.Model(inputs, layers.Dense(1)(x))


def main(argv):
    """Trains on the workers of TF_CONFIG; alone without one."""
    if len(argv) > 1:
        raise app.UsageError(f"Unknown arguments: {argv[1:]}.")
    strategy = rs.MultiWorkerMirroredStrategy()
    first = rs.rank() == 0
    keras.utils.set_random_seed(FLAGS.seed)
    users, movies, ratings = load_data()
    cut = len(ratings) * 9 // 10
    batch = FLAGS.batch_size * strategy.num_replicas_in_sync  # of all workers
    data = tf.data.Dataset.from_tensor_slices(({"user": users, "movie": movies}, ratings))
    train = data.take(cut).shuffle(cut, seed=FLAGS.seed)

    with strategy.scope():
        model = build_model(int(users.max()) + 1, int(movies.max()) + 1)
        # Gradients that wait in a sparsifier's residual take the place of Adam's momentum.
        inner = keras.optimizers.Adam(FLAGS.learning_rate, beta_1=FLAGS.beta_1)
        optimizer = rs.DistributedOptimizer(inner, **tf_redsync.flags.exchange())
        error = keras.metrics.RootMeanSquaredError(name="rmse")
        model.compile(optimizer, "mse", metrics=[error])

    model.fit(
        train.batch(batch, drop_remainder=True),
        epochs=FLAGS.epochs,
        validation_data=data.skip(cut).batch(batch),
        callbacks=[
            rs.callbacks.Checkpoint(os.path.join(FLAGS.run_dir, "checkpoints")),
            rs.callbacks.CompressionMetrics(FLAGS.run_dir),
        ],
        shuffle=False,  # the dataset does
        verbose=2 if first else 0,
    )


if __name__ == "__main__":
    app.run(main)
