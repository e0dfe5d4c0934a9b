"""A bit flipped between two workers ends the training and names the sender."""

import sys

import numpy as np
import pytest

from tests.distributed.cluster import run_workers

GOOD_STEPS, STEPS = 5, 10


def train(kind, victim, sender, checked):
    """Trains until a bit flips in a message of `sender` to `victim`; returns weights and errors."""
    import keras
    import tensorflow as tf

    import tf_redsync as rs
    from tests.distributed import problems
    from tf_redsync.network import collectives

    rank, network = problems.rank(), collectives.DirectCollectives
    strategy = rs.MultiWorkerMirroredStrategy()
    flips = tf.Variable(0)
    original, network.checksums = getattr(network, kind), checked

    def faulty(self, messages, *distance):
        rows = original(self, messages, *distance)
        bit = tf.scatter_nd([[sender, rows.shape[1] - 1]], [1 << 20], rows.shape)
        return tf.bitwise.bitwise_xor(rows, flips.read_value() * bit)

    setattr(network, kind, faulty)
    method = {
        "all_gather": rs.TopK(density=0.2, dense_below=1),
        "all_to_all": rs.contrib.OneBitSGD(dense_below=1),
        "pair_gather": rs.contrib.GTopK(density=0.2, dense_below=1),
    }[kind]
    with strategy.scope():
        model = problems.network(keras)
        optimizer = rs.DistributedOptimizer(keras.optimizers.SGD(0.1), method)
        optimizer.build(model.trainable_variables)

    def replica_step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
        grads = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))

    def weights():
        return np.concatenate([w.ravel() for w in model.get_weights()])

    step = tf.function(lambda *a: strategy.run(replica_step, args=a))
    found, error_text = [], "nothing"
    try:
        while len(found) < STEPS:
            if rank == victim and len(found) == GOOD_STEPS:
                flips.assign(1)
            step(*problems.regression(8, seed=10 * len(found) + rank))
            found.append(weights())
    except tf.errors.OpError as error:
        error_text = f"{type(error).__name__}: {error}"
        # as if the error was not caught: this worker tells the others when it ends
        sys.last_value = error
    return {"error_text": error_text, "steps": np.stack(found), "end": weights()}


deep = pytest.mark.deep


@pytest.mark.parametrize(
    ("kind", "workers", "sender"),
    [
        ("all_gather", 2, 0),
        pytest.param("all_gather", 3, 2, marks=deep),
        pytest.param("all_to_all", 2, 0, marks=deep),
        pytest.param("pair_gather", 2, 0, marks=deep),
    ],
)
def test_corrupted_message_stops_worker_before_update(kind, workers, sender):
    """The others end as well, at most one step later, because they cannot continue without it."""
    found = run_workers(train, workers, args=(kind, 1, sender, True))
    victim = found[1]
    assert (
        "corrupted message" in victim["error_text"]
        and f"by worker 1 from worker {sender}." in (victim["error_text"])
    )
    assert len(victim["steps"]) == GOOD_STEPS
    np.testing.assert_array_equal(victim["end"], victim["steps"][-1])
    for other in found:
        assert "Error" in other["error_text"] and len(other["steps"]) <= GOOD_STEPS + 1
        common = other["steps"][:GOOD_STEPS]
        np.testing.assert_array_equal(common, victim["steps"][: len(common)])


@deep
def test_without_checksums_workers_diverge_silently():
    """They differ silently until weights are compared; shows that the test above can fail."""
    one, other = run_workers(train, args=("all_gather", 1, 0, False))
    assert one["error_text"] == other["error_text"] == "nothing"
    same = [np.array_equal(a, b) for a, b in zip(one["steps"], other["steps"], strict=True)]
    assert same == [True] * GOOD_STEPS + [False] * (STEPS - GOOD_STEPS)
