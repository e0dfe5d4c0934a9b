"""A second strategy in one process shares the cluster that the first one has started."""

import pytest

from tests.distributed.cluster import run_workers

pytestmark = pytest.mark.distributed


def train_twice():
    """Trains as a cell that runs twice, then trains other models."""
    import json
    import os

    import keras

    import tf_redsync as rs
    from tests.distributed import problems

    def cell(method, units=48, **options):
        strategy = rs.MultiWorkerMirroredStrategy(**options)
        with strategy.scope():
            model = problems.network(keras)
            if units != 48:  # collectives of other shapes than those of the first strategy
                keras.utils.set_random_seed(8)
                model = keras.Sequential(
                    [
                        keras.layers.Input((12,)),
                        keras.layers.Dense(units),
                        keras.layers.BatchNormalization(),
                        keras.layers.Dense(1),
                    ]
                )
            optimizer = rs.DistributedOptimizer(keras.optimizers.SGD(0.05), method)
            model.compile(optimizer, "mse")
        model.fit(problems.dataset(64, 16), epochs=2, verbose=0)
        return model

    def error_text(**options):
        try:
            rs.MultiWorkerMirroredStrategy(**options)
        except ValueError as error:
            return str(error)
        return ""

    def elsewhere():
        before = os.environ["TF_CONFIG"]
        config = json.loads(before)
        config["cluster"]["worker"].append("127.0.0.1:1")
        os.environ["TF_CONFIG"] = json.dumps(config)
        try:
            return error_text()
        finally:
            os.environ["TF_CONFIG"] = before

    first = cell(rs.RedSync(density=0.1))
    found = {"first": problems.digest(first)}
    found["again"] = problems.digest(cell(rs.RedSync(density=0.1), timeout_seconds=300))
    found["other"] = problems.digest(cell(rs.Dense(), units=20))
    first.fit(problems.dataset(64, 16), epochs=1, verbose=0)
    found["continued"] = problems.digest(first)
    found["step"] = int(first.optimizer.exchange.step.numpy())
    found["heartbeat"] = error_text(heartbeat_seconds=40)
    found["for_ever"] = error_text(timeout_seconds=None)
    found["cluster"] = elsewhere()
    found["last"] = problems.digest(cell(rs.RedSync(density=0.1)))
    return found


def test_both_strategies_train():
    one, other = run_workers(train_twice)
    for name in ("first", "again", "other", "continued", "last", "step"):
        assert one[name] == other[name]
    assert one["first"] == one["again"] == one["last"]
    assert one["step"] == 12 and one["continued"] != one["first"]
    for found in (one, other):
        assert "heartbeat_seconds=40" in found["heartbeat"]
        assert "timeout_seconds=None" in found["for_ever"]
        assert "127.0.0.1:1" in found["cluster"]
