"""`two_levels` in one process, where a host with all its replicas is the only worker."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_redsync as rs

SHAPE = (8, 6)


def build(strategy, method, **options):
    """Returns a variable and its optimizer."""
    with strategy.scope():
        variable = keras.Variable(np.zeros(SHAPE, "float32"))
        optimizer = rs.DistributedOptimizer(keras.optimizers.SGD(1.0), method, **options)
        optimizer.build([variable])
    return variable, optimizer


def step(strategy, variable, optimizer, grads):
    """Runs one step with the gradients `[replica]`; returns the copies of the variable."""
    values = strategy.experimental_distribute_values_from_function(
        lambda context: tf.constant(grads[context.replica_id_in_sync_group])
    )

    @tf.function
    def run(values):
        strategy.run(lambda grad: optimizer.apply([grad], [variable]), args=(values,))

    run(values)
    return [copy.numpy() for copy in strategy.experimental_local_results(variable.value)]


def gradients(replicas):
    generator = np.random.default_rng(0)
    return generator.standard_normal((replicas, *SHAPE)).astype("float32")


def test_one_process_sums_densely_and_warns(mirrored):
    strategy, grads = mirrored(3), gradients(3)
    variable, optimizer = build(strategy, rs.TopK(density=0.1, dense_below=0), two_levels=True)
    with pytest.warns(UserWarning, match="there is one worker.*two_levels=True"):
        copies = step(strategy, variable, optimizer, grads)
    for copy in copies:
        np.testing.assert_allclose(copy, -grads.sum(axis=0), rtol=1e-6, atol=1e-6)
    assert optimizer.exchange.workers == 1 and optimizer.bytes_per_step() == 0.0
    last = str(optimizer.explain()).splitlines()[-1]
    assert last == "dense among the 3 replicas of a host, then 1 worker: nothing is sent"


@pytest.mark.parametrize("two_levels", [None, False])
def test_replicas_of_one_process_are_workers_by_default(mirrored, two_levels):
    strategy, grads = mirrored(3), gradients(3)
    variable, optimizer = build(
        strategy, rs.TopK(density=0.1, dense_below=0), two_levels=two_levels
    )
    copies = step(strategy, variable, optimizer, grads)
    assert optimizer.exchange.workers == 3 and "dense among" not in str(optimizer.explain())
    assert 0 < np.count_nonzero(copies[0]) < copies[0].size


def test_nan_on_one_replica_skips_the_step(mirrored):
    strategy, grads = mirrored(2), gradients(2)
    grads[1, 0, 0] = np.nan
    variable, optimizer = build(strategy, rs.Dense(), two_levels=True)
    with pytest.warns(UserWarning, match="one worker"):
        copies = step(strategy, variable, optimizer, grads)
    for copy in copies:
        np.testing.assert_array_equal(copy, np.zeros(SHAPE))
    assert int(optimizer.exchange.skipped.numpy()) == 1


@pytest.mark.parametrize("two_levels", [None, False, True])
def test_config(two_levels):
    optimizer = rs.DistributedOptimizer(
        keras.optimizers.SGD(0.1), rs.Dense(), two_levels=two_levels
    )
    config = optimizer.get_config()
    assert config["two_levels"] is two_levels
    assert type(optimizer).from_config(config).get_config() == config


def test_bad_value():
    with pytest.raises(ValueError, match="`two_levels` must be.*Received: two_levels='yes'"):
        rs.DistributedOptimizer(keras.optimizers.SGD(0.1), rs.Dense(), two_levels="yes")
