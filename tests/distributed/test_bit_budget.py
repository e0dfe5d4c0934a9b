"""`BitBudget` on two real workers: all workers make one choice, and a resumed run keeps it."""

import re

import pytest

from tests.distributed.cluster import run_workers


def train(folder):
    """Train with a budget, save, and load into an optimizer that would choose differently."""
    import os

    import keras
    import numpy as np
    import tensorflow as tf

    import tf_redsync as rs
    from tests.distributed import problems

    strategy = rs.MultiWorkerMirroredStrategy()
    x, y = problems.regression(24)
    path = os.path.join(folder, f"worker-{problems.rank()}.weights.h5")

    def make_optimizer(sample, bits):
        with strategy.scope():
            model = problems.network(keras)

            def one(rows, targets):
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean((model(rows) - targets) ** 2)
                return tape.gradient(loss, [v.value for v in model.trainable_variables])

            def gradients():
                for rows in np.array_split(np.arange(len(x)), 3):
                    yield sample(strategy.run(one, (x[rows], y[rows])))

            budget = rs.BitBudget(default=method, bits=bits, gradients=gradients)
            optimizer = rs.DistributedOptimizer(keras.optimizers.SGD(0.02), budget)
            model.compile(optimizer, "mse")
            optimizer.build(model.trainable_variables)
        return model, optimizer

    method = rs.CodedTopK(density=0.03, dense_below=0)

    def chosen(optimizer):
        return repr([a.method for a in optimizer.exchange.assignments])

    # Each worker has better measurements of another part of the gradient.
    model, optimizer = make_optimizer(
        lambda g: [(1 + 9 * (problems.rank() == i % 2)) * t for i, t in enumerate(g)], 1.2
    )
    found = {"first": chosen(optimizer), "explained": optimizer.explain().decision}
    model.fit(x, y, batch_size=12, epochs=2, verbose=0, shuffle=False)
    model.save_weights(path)
    found["weights"] = problems.digest(model)

    model, optimizer = make_optimizer(lambda g: [tf.ones_like(t) for t in g], 2.2)
    found["other"] = chosen(optimizer)
    model.load_weights(path)
    found["kept"] = chosen(optimizer)
    model.fit(x, y, batch_size=12, epochs=1, verbose=0, shuffle=False)
    found["later"] = problems.digest(model)

    shapes = [(40, 30), (30,)]

    def error_of(function, **options):
        """Build with the gradients that a function of the rank returns, `None` for no function."""
        with strategy.scope():
            variables = [keras.Variable(tf.zeros(s), name=f"v{i}") for i, s in enumerate(shapes)]
            steps = function(problems.rank())
            budget = rs.BitBudget(
                default=method, bits=1.2, gradients=None if steps is None else lambda: steps
            )
            optimizer = rs.DistributedOptimizer(keras.optimizers.SGD(0.02), budget, **options)
            try:
                optimizer.build(variables)
            except (ValueError, rs.DistributedError) as error:
                return f"{type(error).__name__}: {error}"
        return chosen(optimizer)

    ones = [tf.ones(s) for s in shapes]
    found["one without"] = error_of(lambda rank: [ones] if rank else None)
    found["one empty"] = error_of(lambda rank: [] if rank else [ones])
    found["one infinite"] = error_of(lambda rank: [ones[:1] + [ones[1] / (1 - rank)]])
    found["public"] = error_of(lambda rank: [ones], direct_collectives=False)
    return found


@pytest.fixture(scope="module")
def workers(tmp_path_factory):
    return run_workers(train, args=(str(tmp_path_factory.mktemp("budget")),), timeout=200)


def test_all_workers_make_same_choice(workers):
    for key in ("first", "explained", "weights", "other", "kept", "later"):
        assert workers[0][key] == workers[1][key], key
    assert "of 1.2 bits per element" in workers[0]["explained"]


def test_resumed_run_keeps_choice(workers):
    assert workers[0]["other"] != workers[0]["first"]
    assert workers[0]["kept"] == workers[0]["first"]


def test_failure_on_one_worker_raises_on_all(workers):
    """Worker 0 would otherwise wait for worker 1 in the mean of the errors."""
    for worker in workers:
        assert re.match("Disagreement.*BitBudget", worker["one without"], re.DOTALL)
        assert "a step at least" in worker["one empty"]
        assert "finite" in worker["one infinite"] and "'v1'" in worker["one infinite"]
    assert "worker 1" in workers[0]["one empty"] and "worker 1" in workers[0]["one infinite"]


def test_public_collectives(workers):
    assert workers[0]["public"] == workers[1]["public"] and "CodedTopK" in workers[0]["public"]
