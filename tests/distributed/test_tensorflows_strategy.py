"""Features and errors under `tf.distribute.MultiWorkerMirroredStrategy`."""

from tests.distributed.cluster import LEGACY, run_workers


def use_tensorflow_strategy():
    import keras
    import numpy as np
    import tensorflow as tf
    import tf_keras

    import tf_redsync as rs
    from tests.distributed import problems

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    x, y = np.ones((16, 3), "float32"), np.ones((16, 2), "float32")
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)
    found = {}
    for library in (keras, tf_keras):
        library.utils.set_random_seed(1)
        with strategy.scope():
            model = library.Sequential([library.layers.Input((3,)), library.layers.Dense(2)])
            inner = library.optimizers.SGD(0.1)
            model.compile(rs.DistributedOptimizer(inner, rs.TopK(dense_below=0)), "mse")
        if library is keras:
            for name in ("fit", "evaluate"):
                try:
                    getattr(model, name)(data, verbose=0)
                except Exception as error:
                    found[name] = f"{type(error).__name__} {error}"
            problems.train_loop(strategy, model, model.optimizer, data, 1)
        else:
            model.fit(data, verbose=0)
        found[f"{library.__name__}/steps"] = int(model.optimizer.iterations.numpy())
        found[f"{library.__name__}/weights"] = problems.digest(model)
    return found


def test_keras_3_error_names_our_strategy_and_others_work():
    first, second = run_workers(use_tensorflow_strategy, env=LEGACY, timeout=100)
    for worker in (first, second):
        for name in ("fit", "evaluate"):
            assert worker[name].startswith("ValueError"), worker[name]
            assert "tf_redsync.MultiWorkerMirroredStrategy" in worker[name]
            assert "strategy=" in worker[name]
    for family in ("keras", "tf_keras"):
        assert first[f"{family}/steps"] == 2
        assert first[f"{family}/weights"] == second[f"{family}/weights"]
