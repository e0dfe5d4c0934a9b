"""Batches of an epoch that a worker knows it has, and steps that need not ask for them."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src.backend.tensorflow.trainer import TFEpochIterator

from tf_redsync.keras import known_batches, models
from tf_redsync.keras.known_batches import KnownBatches, in_epoch

ROWS, BATCH = 41, 8
ARRAYS = np.zeros([ROWS, 3], np.float32), np.zeros([ROWS, 1], np.float32)
POLICIES = tf.data.experimental.AutoShardPolicy


def rows():
    return tf.data.Dataset.from_tensor_slices(ARRAYS)


def lines(tmp_path, policy=None):
    """A dataset of files whose length the user asserts."""
    path = tmp_path / "lines"
    path.write_text("1\n2\n3\n", encoding="utf-8")
    data = tf.data.TextLineDataset([str(path)]).map(lambda _: (tf.zeros([3]), tf.zeros([1])))
    data = data.apply(tf.data.experimental.assert_cardinality(3)).batch(1)
    if policy is None:
        return data
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = policy
    return data.with_options(options)


def iterator(*data, **kwargs):
    return TFEpochIterator(tf.distribute.get_strategy(), *data, **kwargs)


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return 5

    def __getitem__(self, index):
        return ARRAYS


@pytest.mark.parametrize(
    ("data", "kwargs", "batches"),
    [
        (lambda _: ARRAYS, {"batch_size": BATCH}, 6),
        (lambda _: ARRAYS, {"batch_size": BATCH, "steps_per_epoch": 2}, 0),
        (lambda _: [rows().batch(BATCH)], {}, 6),
        (lambda _: [rows().batch(BATCH, drop_remainder=True)], {}, 5),
        (lambda _: [rows().batch(BATCH).repeat()], {}, 0),
        (lambda _: [rows().filter(lambda *_: True).batch(BATCH)], {}, 0),
        (lambda path: [lines(path)], {}, 0),
        (lambda path: [lines(path, POLICIES.FILE)], {}, 0),
        (lambda path: [lines(path, POLICIES.HINT)], {}, 0),
        (lambda path: [lines(path, POLICIES.DATA)], {}, 3),
        (lambda path: [lines(path, POLICIES.OFF)], {}, 0),
        (lambda _: [Batches(workers=1)], {}, 0),
    ],
)
def test_batches_in_an_epoch(tmp_path, data, kwargs, batches):
    assert in_epoch(iterator(*data(tmp_path), **kwargs)) == batches


def test_own_shards_have_a_step_for_all_replicas():
    devices = tf.config.list_logical_devices("CPU")
    strategy = tf.distribute.MirroredStrategy([device.name for device in devices[:2]])
    whole = strategy.experimental_distribute_dataset(rows().batch(BATCH))
    own = strategy.distribute_datasets_from_function(lambda _: rows().batch(BATCH))
    with strategy.scope():
        found = [in_epoch(TFEpochIterator(strategy, data)) for data in (whole, own)]
    assert found == [6, -(-6 // strategy.num_replicas_in_sync)]


def test_other_data_are_unknown():
    assert in_epoch(None) == in_epoch(object()) == 0


@pytest.fixture
def in_fit(monkeypatch):
    monkeypatch.setattr(known_batches, "_in_fit", lambda: True)


def requests(known, own, steps):
    """How often each step asks the other workers, who answer 7, and its answers."""
    asked = tf.Variable(0)

    def ask():
        asked.assign_add(1)
        return tf.constant([7], tf.int64)

    @tf.function
    def step():
        return known.with_batch(tf.constant([own], tf.int64), ask)

    answers = [int(step()[0]) for _ in range(steps)]
    return int(asked), answers


@pytest.mark.usefixtures("in_fit")
def test_steps_ask_only_after_the_known_batches():
    known = KnownBatches()
    known.begin(2)
    for _ in range(2):
        known.begin_epoch()
        assert requests(known, own=1, steps=4) == (2, [1, 1, 7, 7])
    known.begin_epoch()
    known.with_batch(tf.constant([1], tf.int64), lambda: tf.constant([7], tf.int64))  # is dropped
    assert requests(known, own=1, steps=2) == (1, [1, 7])
    known.begin_epoch()
    known.end()
    assert requests(known, own=1, steps=1) == (1, [7])


@pytest.mark.usefixtures("in_fit")
def test_missing_batch_raises():
    known = KnownBatches()
    known.begin(2)
    known.begin_epoch()
    with pytest.raises(tf.errors.InvalidArgumentError, match="fewer batches than their cardinal"):
        requests(known, own=0, steps=1)


@pytest.mark.parametrize(
    ("functions", "in_fit"),
    [
        (["multi_step_on_iterator", "fit"], True),
        (["evaluate", "fit"], False),
        (["on_train_batch_end", "fit"], False),
        (["fit", "on_epoch_end", "fit"], True),  # in a callback
        (["multi_step_on_iterator"], False),  # in a custom loop
    ],
)
def test_only_fit_itself_need_not_ask(monkeypatch, functions, in_fit):
    monkeypatch.setattr(models, "keras_functions", lambda: iter(functions))
    known = KnownBatches()
    known.begin(2)
    known.begin_epoch()
    assert requests(known, own=1, steps=1)[0] == (0 if in_fit else 1)


def test_other_iterators_ask():
    known = KnownBatches()
    known.begin(2)
    known.begin_epoch()
    assert requests(known, own=0, steps=1) == (1, [7])
