"""Pair exchanges of real workers: row order, and training that does not depend on the network.

Without `--deep`, test_ranks.py tests rows on eleven workers; test_methods.py trains gTop-k.
"""

import numpy as np
import pytest

from tests.distributed.cluster import run_workers

DISTANCES = (1, 2, 4)


def gather_and_train(training):
    """Rows of every round from both networks; with `training`, gTop-k's weights on each."""
    import keras
    import tensorflow as tf

    import tf_redsync as rs
    from tests.distributed import problems
    from tf_redsync.network import collectives

    strategy = rs.MultiWorkerMirroredStrategy()
    workers = strategy.num_replicas_in_sync
    networks = {
        "direct": collectives.DirectCollectives(workers, strategy),
        "public": collectives.PublicCollectives(workers),
    }
    found = {}
    for name, network in networks.items():

        @tf.function
        def rounds(network=network):
            def replica():
                rank = network.rank()
                message = tf.stack([1, 10 + rank, 20 * rank])
                return tf.stack([network.pair_gather(message, d) for d in DISTANCES])

            return strategy.run(replica)

        for _ in range(2):
            found[name] = strategy.experimental_local_results(rounds())[0].numpy()
    for name, steps in (("direct", 2), ("public", 1)) if training else ():
        with strategy.scope():
            model = problems.network(keras)
            optimizer = rs.DistributedOptimizer(
                keras.optimizers.SGD(0.05),
                rs.contrib.GTopK(density=0.1, dense_below=0),
                direct_collectives=name == "direct",
            )
            model.compile(optimizer=optimizer, loss="mse", steps_per_execution=steps)
        history = model.fit(problems.dataset(48, 12), epochs=2, verbose=0)
        found[f"{name}/loss"] = history.history["loss"]
        found[f"{name}/weights"] = np.concatenate([w.ravel() for w in model.get_weights()])
        found[f"{name}/bytes"] = float(optimizer.exchange.bytes_sent.numpy())
    return found


@pytest.mark.deep
@pytest.mark.parametrize(("workers", "training"), [(2, False), (4, True)])
def test_pairs_of_workers(workers, training):
    results = run_workers(gather_and_train, workers=workers, args=(training,), timeout=150)
    for name in ("direct", "public"):
        for rank, found in enumerate(results):
            for rows, distance in zip(found[name], DISTANCES, strict=True):
                ranks = sorted((rank, rank ^ distance))
                expected = [[1, 10 + r, 20 * r] if r < workers else [1, 0, 0] for r in ranks]
                assert rows.tolist() == expected, (name, rank, distance)
            for key in ("loss", "weights", "bytes") if training else ():
                here, there = found[f"{name}/{key}"], results[0][f"{name}/{key}"]
                np.testing.assert_array_equal(here, there, err_msg=f"{name} {key} of {rank}")
    if training:
        first = results[0]
        assert first["direct/loss"][-1] < 0.9 * first["direct/loss"][0]
        assert first["direct/bytes"] == first["public/bytes"] > 0
        # Biases are all-reduced in packs of another length, so in another order.
        np.testing.assert_allclose(
            first["direct/weights"], first["public/weights"], rtol=1e-5, atol=1e-6
        )
