"""A dense warm-up of all methods on real workers equals dense training; state after it."""

import numpy as np
import pytest

from tests import total_state
from tests.distributed.cluster import run_workers

WARM, AFTER, RATE = 4, 4, 0.02


def train_all():
    """Each method in turn: weights and bytes of every step, in a custom loop."""
    import keras

    import tf_redsync as rs
    from tests.distributed import problems

    strategy, small = rs.MultiWorkerMirroredStrategy(), {"dense_below": 16}
    data = problems.dataset(16 * (WARM + AFTER), 16)
    top_k = rs.TopK(density=0.1, **small)
    methods = {
        "plain": rs.Dense(),
        "policy": rs.Policy(
            default=top_k,
            rules=(rs.Rule(pattern=r"_\d*[02468]/kernel", method=rs.Coded(method=top_k)),),
        ),
        "sbc": rs.SBC(steps=2, density=0.1, dense_below=16),
        "cd_sgd": rs.CDSGD(warm_up=None, full_every=4, **small),
    }
    results = {}
    for name, method in methods.items():
        with strategy.scope():
            model = problems.network(keras)
            warm_up = None if name == "plain" else rs.DenseWarmUp(steps=WARM)
            sgd = keras.optimizers.SGD(RATE)
            optimizer = rs.DistributedOptimizer(sgd, method, warm_up=warm_up)
        weights, sent = [], []
        step = problems.step_of(strategy, model, optimizer)
        for batch in strategy.experimental_distribute_dataset(data):
            step(batch)
            local = strategy.experimental_local_results
            own = [local(v.value)[0].numpy().ravel() for v in model.trainable_variables]
            weights.append(np.concatenate(own))
            sent.append(float(optimizer.exchange.bytes_sent.numpy()))
        results[f"{name}/weights"], results[f"{name}/sent"] = weights, sent
        optimizer.exchange.to_consensus()
        left = sum_of_residuals(optimizer)
        before = [local(v.value)[0].numpy() for v in model.trainable_variables]
        optimizer.flush()
        after = [local(v.value)[0].numpy() for v in model.trainable_variables]
        for i, (a, b) in enumerate(zip(before, after, strict=True)):
            results[f"{name}/moved/{i}"] = b - a
        results[f"{name}/flushed"] = problems.digest(model)
        results[f"{name}/left"] = left
        results[f"{name}/after"] = sum_of_residuals(optimizer)
        results[f"{name}/explained"] = "dense for the first 4 steps" in str(optimizer.explain())
    return {**results, **of_fit(strategy)}


def sum_of_residuals(optimizer):
    """Sum over all residual state of all workers, including signs."""
    total = total_state.total(optimizer.exchange)
    waiting = [v for n, v in total.items() if "/residual/" in n or "/pending/" in n]
    return [float(np.sum(v)) for v in waiting]


def of_fit(strategy):
    """A fraction of the steps of `fit`, on which workers with different amounts of data agree."""
    import keras

    import tf_redsync as rs
    from tests.distributed import problems

    class Sent(keras.callbacks.Callback):
        bytes: list = []

        def on_train_batch_end(self, batch, logs=None):
            self.bytes.append(float(self.model.optimizer.exchange.bytes_sent.numpy()))

    with strategy.scope():
        model = problems.network(keras)
        method = rs.LocalSGD(steps=3)
        optimizer = rs.DistributedOptimizer(
            keras.optimizers.SGD(0.02), method, warm_up=rs.DenseWarmUp(fraction=0.25)
        )
        model.compile(optimizer, "mse")
    data = problems.dataset(64, 16)  # 4 steps per epoch
    for epochs in (4, 2):  # a second `fit` does not warm up again
        model.fit(data, epochs=epochs, verbose=0, callbacks=[Sent()])
    return {"fit/sent": Sent.bytes, "fit/steps": optimizer.exchange.warm_up.steps}


@pytest.mark.deep
def test_warm_up_is_dense_training():
    first, second = run_workers(train_all, timeout=200)
    names = sorted({key.split("/")[0] for key in first} - {"plain", "fit"})
    assert len(names) == 3
    dense = first["plain/weights"]
    for name in names:
        for worker in (first, second):
            found, sent = worker[f"{name}/weights"], worker[f"{name}/sent"]
            np.testing.assert_allclose(found[:WARM], dense[:WARM], rtol=1e-5, atol=1e-6)
            assert np.abs(found[-1] - dense[-1]).max() > 1e-4, name
            assert list(sent[:WARM]) == [first["plain/sent"][0]] * WARM, name
            assert min(sent[WARM:]) < sent[0] / 2, name
            assert worker[f"{name}/explained"], name
        apart = [
            not np.array_equal(a, b)
            for a, b in zip(first[f"{name}/weights"], second[f"{name}/weights"], strict=True)
        ]
        assert not any(apart[:WARM]), name
        expected = {
            "sbc": [True, False, True, False],
            "cd_sgd": [True] * AFTER,
        }
        assert apart[WARM:] == expected.get(name, [False] * AFTER), name
        for worker in (first, second):
            assert not np.any(worker[f"{name}/after"]), name
        assert first[f"{name}/flushed"] == second[f"{name}/flushed"], name
        moved = sum(np.sum(v) for n, v in first.items() if n.startswith(f"{name}/moved/"))
        rate = 1.0 if name == "sbc" else -RATE  # changes of weights, or gradients
        np.testing.assert_allclose(moved, rate * np.sum(first[f"{name}/left"]), atol=1e-4)
        assert np.any(first[f"{name}/left"]), name
    # A round of local steps ends with an epoch.
    rounds = [0, 0, 1, 0] * 3 + [0, 0, 1, 0] * 2
    assert first["fit/steps"] == second["fit/steps"] == 4
    assert [int(s > 0) for s in first["fit/sent"]] == [1] * 4 + rounds
