"""The hint for NCCL reaches every collective where all workers tell of GPUs of their own.

There is no GPU here: workers say that they have one, and TensorFlow takes its ring on CPUs for any
hint. What a worker hands to TensorFlow is what is looked at.
"""

import pytest

from tests.distributed.cluster import fail_workers, run_workers

pytestmark = pytest.mark.distributed


def train(gpus, as_gpu):
    """Trains; returns the hints and tokens of what is in the step's graph, and what is said."""
    import json
    import os

    import keras
    import numpy as np

    import tf_redsync as rs
    from tf_redsync.network import collectives, transport

    rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    transport.own_gpus = lambda: gpus[rank]
    if as_gpu:  # the device's name is all that says where a launcher runs
        by_nccl = transport.by_nccl
        transport.by_nccl = lambda options, device: by_nccl(options, device + "GPU")
    handed = []
    for kind, collective in list(collectives._COLLECTIVES.items()):

        def record(value, kind=kind, collective=collective, **options):
            handed.append((kind, options["communication_hint"], options["ordering_token"].ref()))
            return collective(value, **options)

        collectives._COLLECTIVES[kind] = record
    strategy = rs.MultiWorkerMirroredStrategy()
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential([keras.layers.Input((8,)), keras.layers.Dense(64)])
        method = rs.RedSync(density=0.1, dense_below=128)  # the biases are summed
        optimizer = rs.DistributedOptimizer(keras.optimizers.SGD(0.1), method)
        model.compile(optimizer, "mse")
    x = np.ones((16, 8), "float32")
    model.fit(x, np.ones((16, 64), "float32"), batch_size=8, epochs=2, verbose=0)
    inside = [h for h in handed if h[0] in ("gather", "reduce")]
    tokens = {reference for _, _, reference in inside}
    said = [line for line in str(optimizer.explain()).splitlines() if "collectives:" in line]
    return {
        "hints": ",".join(sorted({hint for _, hint, _ in inside})),
        "calls": len(inside),
        "tokens": len(tokens),
        "said": said[0],
        "weights": np.concatenate([w.ravel() for w in model.get_weights()]),
    }


def test_nccl_is_asked_for_and_chained():
    plain = run_workers(train, args=([[], []], False))
    with_gpus = run_workers(train, args=([["a"], ["b"]], True))
    for found in plain:
        assert found["hints"] == "AUTO"
        assert found["tokens"] == found["calls"] > 1, "over gRPC every collective is on its own"
        assert found["said"] == "collectives: TensorFlow's ring, over gRPC"
    for found, other in zip(with_gpus, plain, strict=True):
        assert found["hints"] == "NCCL"
        assert found["tokens"] == 1, "NCCL wants one order"
        assert found["said"] == "collectives: NCCL"
        assert (found["weights"] == other["weights"]).all()


def test_a_gpu_that_two_workers_share():
    for found in run_workers(train, args=([["a"], ["a"]], True)):
        assert (found["hints"], found["said"][-4:]) == ("AUTO", "gRPC")


def test_a_worker_without_gpus_is_named():
    for text in fail_workers(train, args=([["a"], []], True)):
        assert "worker 0: 1, worker 1: 0" in text
