"""`BlockQuantized` on three real workers: all-to-all of parts, then an all-gather of sums."""

import numpy as np
import pytest

from tests.deep import DEEP
from tests.distributed.cluster import run_workers

STEPS, BATCH = 40, 24
METHODS = {
    "dense, 8 bits": "rs.BlockQuantized()",
    "dense, 2 bits": "rs.BlockQuantized(method=rs.Dense(), bits=2, block=64)",
    "factors": "rs.BlockQuantized(method=rs.PowerSGD(rank=2, min_compression_rate=0), bits=4)",
    "factors in turn": (
        "rs.BlockQuantized(method=rs.ACPSGD(rank=2, min_compression_rate=0), bits=4)"
    ),
    "selected": "rs.BlockQuantized(method=rs.TopK(density=0.2, dense_below=0), bits=4)",
    "RedSync": (
        "rs.BlockQuantized(method=rs.RedSync(density=0.2, momentum=0.9, dense_below=0), bits=8)"
    ),
    "a block": "rs.BlockQuantized(method=rs.RandomBlock(density=0.3, dense_below=0), bits=4)",
    "changes": "rs.BlockQuantized(method=rs.DiLoCo(steps=4), bits=4)",
    "averages": "rs.BlockQuantized(method=rs.LocalSGD(steps=4), bits=2)",
    "fragments": (
        "rs.BlockQuantized(method=rs.StreamingDiLoCo(steps=4, fragments=2, overlap=2, "
        "value_bits=32), bits=4)"
    ),
}
if not DEEP:  # gradients, factors, selected values; test_own_weights.py has weight changes
    METHODS = {n: METHODS[n] for n in ("dense, 2 bits", "factors", "RedSync")}


def train(methods):
    """Train a regression with each method; return losses and, at the end, all weights."""
    import keras

    import tf_redsync as rs
    from tests.distributed import problems

    strategy = rs.MultiWorkerMirroredStrategy()
    x, y = problems.regression(3 * BATCH)
    own = slice(problems.rank() * BATCH, (problems.rank() + 1) * BATCH)
    results = {}
    for name, text in methods.items():
        with strategy.scope():
            model = problems.network(keras)
            optimizer = rs.DistributedOptimizer(keras.optimizers.SGD(0.02), eval(text, {"rs": rs}))
            optimizer.build(model.trainable_variables)
        step = problems.step_of(strategy, model, optimizer)
        losses = [float(step((x[own], y[own]))) for _ in range(STEPS)]
        optimizer.exchange.to_consensus()
        results |= {f"{name}/losses": losses, f"{name}/weights": problems.digest(model)}
        results[f"{name}/skipped"] = int(optimizer.exchange.skipped.numpy())
    return results


@pytest.fixture(scope="module")
def trained():
    return run_workers(train, workers=3, args=(METHODS,), timeout=280)


@pytest.mark.parametrize("name", METHODS)
def test_trains_with_equal_weights_on_all_workers(trained, name):
    assert len({worker[f"{name}/weights"] for worker in trained}) == 1
    assert not any(worker[f"{name}/skipped"] for worker in trained)
    losses = np.mean([worker[f"{name}/losses"] for worker in trained], axis=0)
    assert losses[-5:].mean() < 0.3 * losses[0]
