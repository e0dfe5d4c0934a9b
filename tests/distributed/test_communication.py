"""The NCCL hint reaches every collective if all workers report GPUs of their own.

This needs no GPU: workers pretend to have one, and TensorFlow uses its ring on CPUs for any hint.
The tests inspect what a worker passes to TensorFlow.
"""

import pytest

from tests.distributed.cluster import fail_workers, run_workers

pytestmark = pytest.mark.distributed


# Case name: each worker's GPUs, and whether its launcher runs on one.
CASES = {
    "plain": ([[], []], False),
    "own": ([["a"], ["b"]], True),
    "shared": ([["a"], ["a"]], True),
    "missing": ([["a"], []], True),
}


def train(names):
    """Train in each case; returns the graph's hints and tokens, and `explain()`'s line about it."""
    import json
    import os

    import keras
    import numpy as np

    import tf_redsync as rs
    from tf_redsync.network import collectives, transport

    rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    by_nccl, handed, found = transport.by_nccl, [], {}
    for kind, collective in list(collectives._COLLECTIVES.items()):

        def record(value, kind=kind, collective=collective, **options):
            handed.append((kind, options["communication_hint"], options["ordering_token"].ref()))
            return collective(value, **options)

        collectives._COLLECTIVES[kind] = record
    for name in names:
        gpus, as_gpu = CASES[name]
        transport.own_gpus = lambda gpus=gpus: gpus[rank]
        # Only the device's name tells where a launcher runs.
        on = "GPU" if as_gpu else ""
        transport.by_nccl = lambda options, device, on=on: by_nccl(options, device + on)
        handed.clear()
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
        explained = [
            line for line in str(optimizer.explain()).splitlines() if "collectives:" in line
        ]
        found |= {
            f"{name}/hints": ",".join(sorted({hint for _, hint, _ in inside})),
            f"{name}/calls": len(inside),
            f"{name}/tokens": len(tokens),
            f"{name}/explained": explained[0],
            f"{name}/weights": np.concatenate([w.ravel() for w in model.get_weights()]),
        }
    return found


@pytest.fixture(scope="module")
def trained():
    return run_workers(train, args=(["plain", "own", "shared"],))


def of_case(trained, name):
    return [
        {k.split("/")[1]: v for k, v in worker.items() if k.startswith(f"{name}/")}
        for worker in trained
    ]


def test_nccl_is_requested_with_ordered_collectives(trained):
    plain, with_gpus = of_case(trained, "plain"), of_case(trained, "own")
    for found in plain:
        assert found["hints"] == "AUTO"
        assert found["tokens"] == found["calls"] > 1, "collectives over gRPC need no order"
        assert found["explained"] == "collectives: TensorFlow's ring, over gRPC"
    for found, other in zip(with_gpus, plain, strict=True):
        assert found["hints"] == "NCCL"
        assert found["tokens"] == 1, "NCCL needs one order"
        assert found["explained"] == "collectives: NCCL"
        assert (found["weights"] == other["weights"]).all()


def test_shared_gpu_uses_grpc(trained):
    for found in of_case(trained, "shared"):
        assert (found["hints"], found["explained"][-4:]) == ("AUTO", "gRPC")


def test_worker_without_gpus_is_named():
    for text in fail_workers(train, args=(["missing"],)):
        assert "worker 0: 1, worker 1: 0" in text
