"""Accuracy warnings on two workers."""

import pytest

from tests.distributed.cluster import run_workers


def train():
    import warnings

    import keras

    import tf_redsync as rs
    from tests.distributed import problems

    strategy, texts = rs.MultiWorkerMirroredStrategy(), []
    methods = {
        "wrapped": rs.SBC(steps=16, density=0.05, dense_below=16),
        "short": rs.SBC(steps=2, density=0.05, dense_below=16),
        "enough": rs.TopK(density=0.5, dense_below=16),
    }
    found = {}
    for name, method in methods.items():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", UserWarning)
            with strategy.scope():
                model = problems.network(keras)
                model.compile(rs.DistributedOptimizer(keras.optimizers.SGD(0.02), method), "mse")
            for _ in range(2):  # 4 steps per epoch
                model.fit(problems.dataset(64, 16), epochs=2, verbose=0)
        texts = [str(w.message) for w in caught if issubclass(w.category, rs.AccuracyWarning)]
        found[name] = "\n".join(texts)
        found[f"{name}/hints"] = "\n".join(model.optimizer.explain().hints)
    return found


@pytest.mark.deep
def test_all_workers_are_warned_once():
    for found in run_workers(train, timeout=200):
        rounds, waiting = found["wrapped"].split("\n")
        assert "SBC exchanges the workers' changes every 16 steps" in rounds
        assert found["wrapped/hints"] == rounds
        # An epoch has four steps, so each round of sixteen steps ends with an epoch.
        assert "rounds of 16 steps on average" in waiting and "has 2 of them" in waiting
        (waiting,) = found["short"].split("\n")
        assert "rounds of 2 steps on average" in waiting and "has 4 of them" in waiting
        assert found["short/hints"] == found["enough"] == found["enough/hints"] == ""
