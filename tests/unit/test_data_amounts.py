"""Amounts of data that would make one worker wait for another."""

import types

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from keras.src.trainers.epoch_iterator import EpochIterator
from tensorflow.python.framework import random_seed

import tf_redsync as rs
from tf_redsync.keras import data_amounts, first_batch, fit_resume
from tf_redsync.keras.data_amounts import conflict
from tf_redsync.network import strategies

INFINITE, UNKNOWN = -1, -2


@pytest.mark.parametrize(
    "amounts",
    [
        [(10, 10)] * 3,
        [(None, UNKNOWN)] * 2,  # each step asks whether any worker still has data
        [(5, INFINITE)] * 2,
        [(4, 10), (4, 8)],  # two epochs of 4 steps need 8 batches
        [(4, 10), (4, UNKNOWN)],
        [(7, None)] * 2,  # under a TensorFlow strategy
    ],
)
def test_amounts_that_end_together(amounts):
    assert conflict(amounts, 2, "fit") is None


@pytest.mark.parametrize(
    "amounts",
    [
        [(10, 10), (8, 8)],
        [(5, 10), (5, 8)],
        [(10, 10), (10, INFINITE)],
        [(10, UNKNOWN), (10, INFINITE)],
        [(10, 10), (None, UNKNOWN)],
        [(3, INFINITE), (4, INFINITE)],
        [(7, None), (8, None)],
    ],
)
def test_amounts_that_end_apart(amounts):
    found = conflict(amounts, 2, "fit")
    assert found is not None and "`steps_per_epoch`" in found
    assert "\nworker 0: " in found and "\nworker 1: " in found


def test_message_names_each_amount_and_how_to_trim():
    text = conflict([(10, 10)] * 60 + [(8, 8)] * 2, 1, "evaluate")
    assert "dataset.take(8)" in text and "the same `steps`" in text
    assert "worker 60, 61: 8 batches" in text
    assert len(conflict([(n, n) for n in range(1, 100)], 1, "fit").splitlines()) < 25


@pytest.mark.filterwarnings("ignore:tf_redsync. there is one worker")
def test_epoch_without_an_end_warns(recwarn):
    strategy = rs.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile(rs.DistributedOptimizer(keras.optimizers.SGD(0.1), rs.Dense()), "mse")
    data = tf.data.Dataset.from_tensors((tf.ones((4, 3)), tf.ones((4, 1)))).repeat()

    def stop(batch, logs):
        raise KeyboardInterrupt

    def warnings_of(**options):
        recwarn.clear()
        end = keras.callbacks.LambdaCallback(on_train_batch_end=stop)
        with pytest.raises(KeyboardInterrupt):
            model.fit(data, verbose=0, callbacks=[end], **options)
        return [str(w.message) for w in recwarn if "never ends" in str(w.message)]

    (text,) = warnings_of()
    assert "`steps_per_epoch`" in text and "repeat()" in text
    assert warnings_of(steps_per_epoch=3) == []


@pytest.mark.parametrize("family", [keras, tf_keras], ids=["keras3", "tf_keras"])
def test_first_epoch_of_a_fit(family):
    model = family.Sequential([family.layers.Input((2,)), family.layers.Dense(1)])
    model.compile("sgd", "mse")
    found = []
    note = family.callbacks.LambdaCallback(
        on_train_begin=lambda logs: found.append(fit_resume.initial_epoch(model))
    )
    for options in ({}, {"initial_epoch": 2}):
        model.fit(
            np.ones((4, 2)), np.ones((4, 1)), epochs=3, verbose=0, callbacks=[note], **options
        )
    assert [*found, fit_resume.initial_epoch(model)] == [0, 2, 0]


def test_smallest_batch_of_a_fit_is_recorded():
    rows = data_amounts.BatchRows()
    assert rows.as_text() == ""  # no step yet
    for number in (8, 3, 8):
        rows.note({"scale": tf.constant(2.0), "x": tf.zeros([number, 2])})
    assert rows.as_text() == "3"
    rows.begin()
    assert rows.as_text() == ""


def test_different_row_counts_warn_once(recwarn):
    rows = data_amounts.BatchRows()
    for equal in (["4", "4"], ["4", ""]):  # the second worker has made no step
        rows.compare(equal)
    assert not recwarn.list
    rows.compare(["7", "6"])
    rows.compare(["7", "5"])  # the next epoch
    assert ["worker 0: 7, worker 1: 6" in str(w.message) for w in recwarn.list] == [True]


@pytest.mark.parametrize(
    ("texts", "metrics", "warns"),
    [
        (["1", "0"], {"loss": float("nan")}, True),
        (["1", "0"], {"own": np.array([1.0, np.nan])}, True),
        (["1", "0"], {"loss": 0.5, "note": "text"}, False),  # such as a mean over all rows
        (["1", "0"], {}, False),  # a callback list of a custom loop
        (["2", "1"], {"loss": float("nan")}, False),
    ],
)
def test_evaluation_warns_if_empty_batches_made_nan(recwarn, texts, metrics, warns):
    data_amounts.BatchRows().compare(texts, metrics)
    assert ["`evaluate`" in str(w.message) for w in recwarn] == [True] * warns


@pytest.mark.parametrize(
    ("seeds", "warns"),
    [((None, None), False), ((7, 7), False), ((0, 0), False), ((7, 8), True), ((-1, -1), True)],
)
def test_arrays_shuffled_in_different_orders(seeds, warns):
    text = first_batch.shuffle_warning(seeds, "fit")
    assert (text is not None) == warns
    assert not warns or ("`shuffle=False`" in text and "set_random_seed" in text)


@pytest.mark.parametrize("seed", [0, 5, random_seed.DEFAULT_GRAPH_SEED])
@pytest.mark.parametrize("shuffle", [True, False])
def test_seed_by_which_keras_shuffles_arrays(seed, shuffle):
    """TensorFlow's default counts as no seed."""
    iterator = EpochIterator(np.ones((5, 2)), np.ones((5, 1)), batch_size=2, shuffle=shuffle)
    keras.utils.set_random_seed(seed)
    before = tf.random.uniform(())
    keras.utils.set_random_seed(seed)
    found = first_batch.shuffle_seed(iterator)
    assert tf.random.uniform(()) == before  # no number was drawn
    expected = -1 if seed == random_seed.DEFAULT_GRAPH_SEED else seed
    assert found == (expected if shuffle else None)


def lines(_):
    return tf.data.TextLineDataset("file").map(tf.strings.length)


def policy(dataset, name):
    options = tf.data.Options()
    value = tf.data.experimental.AutoShardPolicy[name]
    options.experimental_distribute.auto_shard_policy = value
    return dataset.with_options(options)


NUMBERS = tf.data.Dataset.range(8)
SHUFFLED = NUMBERS.shuffle(8).map(lambda n: n + 1).batch(4).prefetch(2)


@pytest.mark.parametrize(
    ("dataset", "seeds"),
    [
        (NUMBERS.batch(4), None),
        (SHUFFLED, "none"),
        (NUMBERS.shuffle(8, seed=5).shuffle(8).batch(4), "none"),
        (policy(SHUFFLED, "DATA"), "none"),
        (policy(SHUFFLED, "FILE"), None),
        (policy(SHUFFLED, "OFF"), None),
        (tf.data.TextLineDataset("file").shuffle(8).batch(4), None),
        (tf.data.TFRecordDataset(["a", "b"]).shuffle(8).batch(4), None),
        (NUMBERS.shuffle(8).interleave(lines).batch(4), None),
        (policy(NUMBERS.interleave(lines).shuffle(8).batch(4), "DATA"), "none"),
        (NUMBERS.flat_map(tf.data.Dataset.from_tensors).shuffle(8).batch(4), "none"),
        (tf.data.Dataset.zip(NUMBERS, NUMBERS.shuffle(8)).batch(4), "none"),
    ],
)
def test_shuffles_without_a_seed(dataset, seeds):
    assert first_batch.dataset_seeds(EpochIterator(dataset)) == seeds


@pytest.mark.parametrize(
    ("dataset", "shards"),
    [
        (NUMBERS.batch(4), None),
        (NUMBERS.shard(2, 1).shuffle(8).batch(4).prefetch(1), "(2, 1)"),
        (tf.data.Dataset.from_tensors("file").shard(4, 3).interleave(lines).batch(4), "(4, 3)"),
        (policy(NUMBERS.shard(2, 1).batch(4), "FILE"), "(2, 1)"),
        (policy(NUMBERS.shard(2, 1).batch(4), "OFF"), None),
    ],
)
def test_shards_of_datasets(dataset, shards):
    assert first_batch.dataset_shards(EpochIterator(dataset)) == shards


def test_shards_that_tensorflow_shards_again():
    warning = first_batch.shard_warning(["(2, 0)", "(2, 1)"], "fit")
    assert "rs.already_sharded" in warning and "(2, 0); (2, 1)" in warning
    assert first_batch.shard_warning(["(10, 0)"] * 2, "fit") is None  # a part for a test
    assert first_batch.shard_warning(["(2, 0)", None], "fit") is None
    assert first_batch.dataset_shards(EpochIterator(np.ones((4, 2)), batch_size=2)) is None
    with tf.distribute.OneDeviceStrategy("CPU:0").scope():
        own = rs.already_sharded(NUMBERS.shard(2, 1).batch(4), tf.distribute.get_strategy())
        assert first_batch.dataset_shards(EpochIterator(own)) is None


def test_seeds_of_shuffled_datasets():
    def seeds_of(*numbers):
        data = NUMBERS
        for number in numbers:
            data = data.shuffle(8, seed=number)
        return first_batch.dataset_seeds(EpochIterator(data.batch(4)))

    assert seeds_of(1, 0) == seeds_of(1, 0) != seeds_of(0, 1)
    assert first_batch.dataset_warning([seeds_of(0)] * 2, "fit") is None
    for differing in (["none"] * 2, [seeds_of(1), seeds_of(2)]):
        assert "seed=1" in first_batch.dataset_warning(differing, "fit")
    assert first_batch.dataset_warning([None, "none"], "fit") is None
    assert first_batch.dataset_seeds(EpochIterator(np.ones((4, 2)), batch_size=2)) is None


class Batches(keras.utils.PyDataset):
    """Two batches of 100 rows; `seen` counts how often Keras or the library loads the first."""

    def __init__(self, last_row=1.0):
        super().__init__()
        self.x = np.ones([100, 2], np.float32)
        self.x[-1], self.seen = last_row, 0

    def __len__(self):
        return 2

    def __getitem__(self, index):
        self.seen += index == 0
        return self.x, self.x[:, :1]


def test_digest_is_of_the_first_rows():
    first, last = Batches(), Batches(last_row=2.0)
    digests = [first_batch.first_digest(EpochIterator(data)) for data in (first, last)]
    assert digests[0] == digests[1]
    first.x[0] = 2.0
    assert first_batch.first_digest(EpochIterator(first)) != digests[0]


@pytest.mark.filterwarnings("ignore:tf_redsync. there is one worker")
def test_only_the_first_validation_of_a_fit_loads_a_batch(monkeypatch):
    with rs.MultiWorkerMirroredStrategy().scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile(rs.DistributedOptimizer(keras.optimizers.SGD(), rs.Dense()), "mse")

    def loads(processes):
        compared = types.SimpleNamespace(
            **vars(strategies) | {"process_count": lambda _: processes}
        )
        monkeypatch.setattr(data_amounts, "strategies", compared)
        data = Batches()
        model.fit(Batches(), validation_data=data, epochs=3, verbose=0)
        return data.seen

    assert loads(processes=2) == loads(processes=1) + 1


@pytest.mark.filterwarnings("ignore:tf_redsync. there is one worker")
@pytest.mark.parametrize("method", ["fit", "evaluate"])
def test_empty_data_raises(method):
    with rs.MultiWorkerMirroredStrategy().scope():
        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile(rs.DistributedOptimizer(keras.optimizers.SGD(), rs.TopK()), "mse")
    x = np.ones([4, 2], np.float32)
    data = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(8, drop_remainder=True)
    with pytest.raises(ValueError, match="the data have no batch.*drop_remainder"):
        getattr(model, method)(data, verbose=0)


def test_seeds_of_long_chains_and_shared_inputs():
    """The walk visits each dataset once, without recursion."""
    data, other = tf.data.Dataset.range(4).shuffle(4, seed=5), tf.data.Dataset.range(1)
    for _ in range(40):
        data = data.concatenate(data)
    for _ in range(1100):
        data = data.concatenate(other)
    assert first_batch.dataset_seeds(EpochIterator(data)).endswith(", 5)")
    assert not fit_resume._shuffled_without_seed(data)
