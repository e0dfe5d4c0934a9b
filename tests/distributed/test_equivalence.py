"""On two real workers: equal to the plain optimizer at density 1, deterministic, transport-free.

unit/test_mirrored.py covers the cases of `--deep` on replicas of one process.
"""

import numpy as np
import pytest

from tests.deep import DEEP
from tests.distributed.cluster import run_workers

PLAIN = ("sgd", "momentum", "adam") if DEEP else ("adam",)


def train_pairs():
    """Train plain, wrapped at density 1, and variants, from the same seed; return the weights."""
    import keras

    import tf_redsync as rs
    from tests.distributed import problems
    from tf_redsync.ops import native

    class OtherSGD(keras.optimizers.SGD):
        """The same rule in a class that is not known as plain SGD, so it gets dense totals."""

    strategy = rs.MultiWorkerMirroredStrategy()
    inner = {
        "sgd": lambda: keras.optimizers.SGD(0.05),
        "momentum": lambda: keras.optimizers.SGD(0.02, momentum=0.9, nesterov=True),
        "adam": lambda: keras.optimizers.Adam(0.02),
        "other_sgd": lambda: OtherSGD(0.05),
    }

    def everything(**options):
        return rs.RedSync(density=1.0, dense_below=0, **options)

    def train(optimizer):
        with strategy.scope():
            model = problems.network(keras)
            built = optimizer()
        problems.train_loop(strategy, model, built, problems.dataset(32, 8), 4)
        return np.concatenate([w.ravel() for w in model.get_weights()])

    def wrap(name, method, **options):
        return lambda: rs.DistributedOptimizer(inner[name](), method, **options)

    runs = {}
    for name in PLAIN:
        runs[f"{name}_plain"] = inner[name]
        runs[f"{name}_wrapped"] = wrap(name, everything())
    sparse = rs.RedSync(density=0.1, dense_below=16, momentum=0.5)
    runs["sparse_buckets"] = wrap("sgd", sparse, bucket_bytes=64)
    runs["sparse_public"] = wrap("sgd", sparse, direct_collectives=False)
    # So sparse that plain SGD gets sparse totals, after two dense steps.
    switching = rs.RedSync(density=0.01, dense_below=16, warm_up=rs.DenseWarmUp(steps=2))
    runs["switching"] = wrap("sgd", switching)
    runs["switching_dense"] = wrap("other_sgd", switching)
    if DEEP:
        runs["corrected"] = wrap("sgd", everything(momentum=0.9))
        runs["heavy_ball"] = lambda: keras.optimizers.SGD(0.05, momentum=0.9)
        runs["sparse"] = wrap("sgd", sparse)
        runs["sparse_again"] = wrap("sgd", sparse)
        runs["warm_up"] = wrap(
            "sgd", rs.RedSync(density=0.05, dense_below=16, warm_up=rs.DenseWarmUp(steps=1000))
        )
        runs["switching_public"] = wrap("sgd", switching, direct_collectives=False)
    trained = {name: train(optimizer) for name, optimizer in runs.items()}
    if problems.rank() == 1:  # as on a GPU without kernels, where sparse totals have no order
        native.runs_natively = native.are_on_cpus = lambda tensors: False
    return trained | {"unordered": train(wrap("sgd", rs.RedSync(density=0.05, dense_below=16)))}


@pytest.fixture(scope="module")
def weights():
    first, second = run_workers(train_pairs, timeout=300)
    for name in first:
        np.testing.assert_array_equal(first[name], second[name], err_msg=name)
    return first


@pytest.mark.parametrize("name", PLAIN)
def test_density_one_is_the_plain_optimizer(weights, name):
    plain, wrapped = weights[f"{name}_plain"], weights[f"{name}_wrapped"]
    np.testing.assert_allclose(wrapped, plain, rtol=2e-4, atol=2e-5)


def test_public_collectives_and_bucket_size_keep_all_bits(weights):
    np.testing.assert_array_equal(weights["sparse_buckets"], weights["sparse_public"])


def test_totals_switch_from_dense_to_sparse(weights):
    np.testing.assert_allclose(
        weights["switching"], weights["switching_dense"], rtol=1e-5, atol=1e-6
    )


@pytest.mark.deep
def test_momentum_correction_without_masking_is_heavy_ball(weights):
    np.testing.assert_allclose(weights["corrected"], weights["heavy_ball"], rtol=2e-4, atol=2e-5)


@pytest.mark.deep
def test_dense_warm_up_is_the_plain_optimizer(weights):
    np.testing.assert_allclose(weights["warm_up"], weights["sgd_plain"], rtol=2e-4, atol=2e-5)
    assert np.abs(weights["switching"] - weights["warm_up"]).max() > 1e-3


@pytest.mark.deep
def test_same_seed_same_bits(weights):
    np.testing.assert_array_equal(weights["sparse"], weights["sparse_again"])
    np.testing.assert_array_equal(weights["sparse"], weights["sparse_public"])
    np.testing.assert_array_equal(weights["switching"], weights["switching_public"])


@pytest.mark.deep
def test_sparse_differs_from_dense(weights):
    assert np.abs(weights["sparse"] - weights["sgd_plain"]).max() > 1e-3
