"""The rows that each worker trains on, for generators and for datasets of a worker's own share."""

import time
import warnings

import pytest

from tests.distributed.cluster import LEGACY, run_workers

BATCHES, ROWS = 24, 4
ARRAYS = ("arrays", "seeded arrays", "own arrays", "own seeds")


def train(family):
    """Train on several kinds of data; returns the rows of each worker's steps, and the warnings."""
    import keras
    import numpy as np
    import tensorflow as tf
    import tf_keras

    import tf_redsync as rs
    from tests.distributed import problems

    library = keras if family == "keras3" else tf_keras
    rank = problems.rank()
    strategy = rs.MultiWorkerMirroredStrategy(timeout_seconds=60)
    with strategy.scope():
        model = problems.network(library)
        inner = library.optimizers.SGD(0.0)
        optimizer = rs.DistributedOptimizer(inner, rs.RedSync(density=0.1, dense_below=16))
        model.compile(optimizer=optimizer, loss="mse")
    used, step = [], model.train_step

    def train_step(data):
        tf.py_function(lambda x: used.append([int(v) for v in x[:, 0]]), [data[0]], [])
        return step(data)

    model.train_step = train_step

    def batch(i):
        return np.full((ROWS, 12), i, "float32"), np.zeros((ROWS, 1), "float32")

    def generator(offset=0):
        for i in range(BATCHES):
            time.sleep(0.01 * rank)  # workers are at different batches when one is deleted
            yield batch(i + offset)

    class Sequence(library.utils.PyDataset if family == "keras3" else library.utils.Sequence):
        def __len__(self):
            return BATCHES

        def __getitem__(self, i):
            return batch(i + 100 * rank)

    class Shuffling(Sequence):
        """Shuffles before `fit` begins, in a different order on each worker."""

        order = tuple(range(BATCHES))

        def on_epoch_end(self):
            self.order = np.random.default_rng(rank).permutation(BATCHES)

        def __getitem__(self, i):
            return batch(self.order[i])

    def share(batches):
        x = np.tile(np.arange(batches * ROWS, dtype="float32")[:, None], 12) + 1000 * rank
        data = tf.data.Dataset.from_tensor_slices((x, np.zeros((len(x), 1), "float32")))
        data = data.batch(ROWS)
        if family == "keras3":
            return {"x": rs.already_sharded(data, strategy)}
        return {"x": rs.already_sharded(data.repeat(), strategy), "steps_per_epoch": batches}

    def arrays(offset=0, seed=None):
        if seed is not None:
            keras.utils.set_random_seed(seed)
        x = np.repeat(np.arange(6 * ROWS) + offset, 12).reshape(-1, 12).astype("float32")
        options = {"batch_size": 2 * ROWS, "verbose": 0}
        return model.fit(x, x[:, :1], shuffle=seed is not None, **options)

    def in_order(seed=None):
        keras.utils.set_random_seed(1)  # `shuffle` without a seed follows it
        data = problems.dataset(64, 8).unbatch().shuffle(64, seed=seed or rank + 1).batch(8)
        return model.fit(data, verbose=0)

    cases = {
        "arrays": arrays,
        "seeded arrays": lambda: arrays(seed=1),
        "own arrays": lambda: arrays(100 * rank + 1, seed=1),
        "own seeds": lambda: arrays(seed=1 + rank),
        "own order": in_order,
        "same order": lambda: in_order(seed=1),
        "generator": lambda: model.fit(generator(), verbose=0),
        "own generator": lambda: model.fit(generator(100 * rank), verbose=0),
        "own PyDataset": lambda: model.fit(Sequence(), verbose=0),
        "shuffling PyDataset": lambda: model.fit(Shuffling(), verbose=0),
        "own rows to predict": lambda: model.predict(batch(rank)[0], verbose=0),
        "same rows to predict": lambda: model.predict(batch(1)[0], verbose=0),
        "sharded twice": lambda: model.fit(
            problems.dataset(64, 8).unbatch().shard(2, rank).batch(8), verbose=0
        ),
        "already sharded": lambda: model.fit(**share(6), epochs=2, verbose=0),
        "unequal shares": lambda: model.fit(**share(6 + rank), verbose=0),
    }
    found = {}
    for name, case in cases.items():
        used.clear()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", UserWarning)
            try:
                case()
                found[f"{name}: error"] = ""
            except rs.DistributedError as error:
                found[f"{name}: error"] = str(error)
        found[f"{name}: warnings"] = "\n".join(str(w.message) for w in caught)
        found[name] = np.array(sum(used, []))
    return found


def predict_files():
    """Predict the lines of two files, whose values are 0 to 13; returns their order by policy."""
    import tempfile
    import warnings
    from pathlib import Path

    import keras
    import numpy as np
    import tensorflow as tf

    import tf_redsync as rs

    strategy = rs.MultiWorkerMirroredStrategy(timeout_seconds=60)
    with strategy.scope():
        model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Rescaling(1.0)])
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, values in (("a", range(7)), ("b", range(7, 14))):
            Path(folder, name).write_text("".join(f"{v}\n" for v in values))
        data = tf.data.TextLineDataset([f"{folder}/a", f"{folder}/b"])
        data = data.map(lambda line: tf.strings.to_number(line)[None]).batch(4)
        for policy in tf.data.experimental.AutoShardPolicy:
            options = tf.data.Options()
            options.experimental_distribute.auto_shard_policy = policy
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always", UserWarning)
                rows = model.predict(data.with_options(options), verbose=0)
            found[policy.name] = np.ravel(rows).astype(int)
            texts = [str(w.message) for w in caught]
            found[f"{policy.name}: warned"] = any("auto_shard_policy=" in text for text in texts)
    rank = strategy.cluster_resolver.task_id
    found["batch"] = model.predict_on_batch(np.array([[10.0 * rank], [10.0 * rank + 1]])).ravel()
    return found


def test_order_of_predicted_files():
    """tf_keras shards by rows with every policy."""
    for seen in run_workers(predict_files):
        assert list(seen["batch"]) == [0, 1, 10, 11]  # all rows of both workers
        for policy in ("AUTO", "DATA", "FILE", "OFF"):
            in_order = list(seen[policy]) == list(range(14))
            assert in_order == (policy in ("AUTO", "DATA")), (policy, seen[policy])
            assert seen[f"{policy}: warned"] == (not in_order), policy


@pytest.mark.parametrize("family", ["keras3", pytest.param("tf_keras", marks=pytest.mark.deep)])
def test_rows_of_each_worker(family):
    both = run_workers(train, args=(family,), env=LEGACY if family == "tf_keras" else None)
    for rank, seen in enumerate(both):
        assert "`dataset.shuffle(n, seed=1)`" in str(seen["own order: warnings"])
        assert "seed=" not in str(seen["same order: warnings"])
        assert {c for c in seen if "sharded twice" in str(seen[c])} == {"sharded twice: warnings"}
        # All batches of a generator, half of the rows of each.
        assert sorted(seen["generator"]) == sorted(2 * list(range(BATCHES)))
        assert "already_sharded" not in str(seen["generator: warnings"])
        for case in ("own generator", "own PyDataset", "shuffling PyDataset"):
            assert len(seen[case]) == BATCHES * ROWS / 2
            if family == "keras3":
                text = str(seen[f"{case}: warnings"])
                assert "`rs.already_sharded(dataset, strategy)`" in text, text
        if family == "keras3":
            warned = {case: str(seen[f"{case}: warnings"]) for case in ARRAYS}
            lost = "`predict` shards every batch by rows"
            assert lost in str(seen["own rows to predict: warnings"])
            assert lost not in str(seen["same rows to predict: warnings"])
            assert {c for c, t in warned.items() if "already_sharded" in t} == {"own arrays"}
            shuffles = {case for case, text in warned.items() if "`shuffle=False`" in text}
            assert shuffles == {"own seeds"}
        rows = [i + 1000 * rank for i in range(6 * ROWS)]
        assert list(seen["already sharded"]) == 2 * rows
        assert "worker 0: " in str(seen["unequal shares: error"])
        assert "worker 1: " in str(seen["unequal shares: error"])
