"""Collectives of dynamic shapes in Keras's loop over the steps of an execution."""

import numpy as np
import pytest

from tests.distributed.cluster import run_workers

ROWS = 7  # batches of 2, 2, 2 and 1 on each of two workers


def fit_gathering_model(direct):
    """`fit` with a `train_step` that gathers embeddings; the second traces on the chief alone."""
    import keras
    import tensorflow as tf

    import tf_redsync as rs
    from tests.distributed import problems

    strategy = rs.MultiWorkerMirroredStrategy()

    class Gathering(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(3)

        def call(self, x):
            return self.dense(x)

        def train_step(self, data):
            (x,) = data
            with tf.GradientTape() as tape:
                embeddings = self(x, training=True)
                context = tf.distribute.get_replica_context()
                everywhere = context.all_gather(embeddings, axis=0)
                loss = tf.reduce_mean((embeddings - tf.reduce_mean(everywhere, axis=0)) ** 2)
            weights = self.trainable_variables
            self.optimizer.apply(tape.gradient(loss, weights), weights)
            return {"rows": tf.shape(everywhere)[0]}

    rows = np.random.RandomState(0).randn(2 * ROWS, 5).astype(np.float32)
    data = tf.data.Dataset.from_tensor_slices((rows,)).batch(4)
    with strategy.scope():
        model = Gathering()
        model.build((None, 5))
        topk = rs.TopK(density=0.5, dense_below=0)
        optimizer = rs.DistributedOptimizer(
            keras.optimizers.SGD(0.1), topk, direct_collectives=direct
        )
        model.compile(optimizer, steps_per_execution=2)
    metrics = [rs.callbacks.CompressionMetrics(time_split=False)] if problems.rank() == 0 else []
    for callbacks in ([], metrics):
        model.fit(data, epochs=2, verbose=0, callbacks=callbacks)
    return {"digest": problems.digest(model)}


@pytest.mark.parametrize("direct", [True, False])
def test_gathers_of_any_rows_in_a_loop(direct):
    first, second = run_workers(fit_gathering_model, args=(direct,), timeout=120)
    assert first["digest"] == second["digest"]


def gather_rows_of_unequal_width():
    import tensorflow as tf

    import tf_redsync as rs
    from tests.distributed import problems

    strategy = rs.MultiWorkerMirroredStrategy()

    @tf.function(input_signature=[tf.TensorSpec([None, None])])
    def gather(x):
        def everywhere(x):
            return tf.distribute.get_replica_context().all_gather(tf.identity(x), axis=0)

        return strategy.run(everywhere, args=(x,))

    rows = [gather(tf.zeros([2 + problems.rank(), width])).shape[0] for width in (3, 4)]
    try:
        gather(tf.zeros([2, 3 + problems.rank()]))
    except tf.errors.OpError as error:
        return {"rows": rows, "error": error.message}
    return {"rows": rows, "error": ""}


def test_gather_of_unequal_widths_raises():
    """It does not wait forever, though each worker's key depends on sizes."""
    for worker in run_workers(gather_rows_of_unequal_width, timeout=60):
        assert list(worker["rows"]) == [5, 5]
        assert "Shape mismatch" in str(worker["error"])
