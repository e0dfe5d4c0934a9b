"""The iterators on a device have no autotuner, and end before the dataset that they draw from."""

import subprocess
import sys
import weakref

import pytest
import tensorflow as tf

import tf_redsync.strategy  # noqa: F401  (the import installs the patch)
from tests.deep import DEEP
from tf_redsync.cluster import device_iterators

DATA = tf.data.Dataset.range(10).map(lambda i: i + 1, num_parallel_calls=tf.data.AUTOTUNE)


@pytest.fixture
def distributed():
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    return strategy.distribute_datasets_from_function(lambda _: DATA)


def test_device_iterator_has_no_autotuner(distributed):
    owner = iter(distributed)._iterators[0]
    (on_device,) = owner._iterator._device_iterators
    assert on_device._dataset.options().autotune.enabled is False
    assert owner._dataset.options().autotune.enabled is None  # TensorFlow's default: autotuning


def test_batches_are_unchanged(distributed):
    assert [int(i) for i in distributed] == [int(i) for i in DATA]


def test_dataset_is_freed_after_the_iterators(distributed, monkeypatch):
    operations = device_iterators.multi_device_iterator_ops.gen_dataset_ops
    begin, ended, drawn_from = operations.multi_device_iterator_init, [], []

    def recording(dataset, resource, **arguments):
        drawn_from.append(dataset)
        return begin(dataset, resource, **arguments)

    monkeypatch.setattr(operations, "multi_device_iterator_init", recording)
    iterator = iter(distributed)
    assert int(next(iterator)) == 1
    owner = iterator._iterators[0]._iterator
    assert owner._redsync_dataset._variant_tensor is drawn_from.pop()
    weakref.finalize(owner._redsync_dataset, ended.append, "dataset")
    weakref.finalize(owner._device_iterators[0], ended.append, "iterator")
    del owner, iterator
    assert ended == ["iterator", "dataset"]


# The native iterator is destroyed while a thread draws from the dataset. Without the patch, this
# ended after 50 to 700 rounds.
DROPPED_EARLY = """
import keras, numpy as np, tensorflow as tf
import tf_redsync.strategy
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
arrays = np.zeros([640, 2000], np.float32), np.zeros(640, np.uint8)
data = ArrayDataAdapter(*arrays, batch_size=64).get_tf_dataset()
distributed = tf.distribute.MirroredStrategy(["CPU:0"]).experimental_distribute_dataset(data)
for _ in range(2000):
    next(iter(distributed))
"""


@pytest.mark.skipif(not DEEP, reason="2,000 iterators take minutes")
@pytest.mark.timeout(900)
def test_iterators_that_are_dropped_early_do_not_crash():
    subprocess.run([sys.executable, "-c", DROPPED_EARLY], check=True, timeout=800)


def test_second_call_is_a_noop():
    module = device_iterators.multi_device_iterator_ops
    owner = module.OwnedMultiDeviceIterator
    before = module._create_device_dataset, owner.__init__
    device_iterators.install()
    assert (module._create_device_dataset, owner.__init__) == before


def test_missing_private_name_is_ignored(monkeypatch):
    module = device_iterators.multi_device_iterator_ops
    monkeypatch.delattr(module, "_create_device_dataset")
    device_iterators.install()
    assert not hasattr(module, "_create_device_dataset")
