"""Prefetching iterators on a device have no autotuner, which could delay the end of `fit`."""

import pytest
import tensorflow as tf

import tf_redsync.strategy  # noqa: F401  (the import installs the patch)
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


def test_second_call_is_a_noop():
    module = device_iterators.multi_device_iterator_ops
    before = module._create_device_dataset
    device_iterators.install()
    assert module._create_device_dataset is before


def test_missing_private_name_is_ignored(monkeypatch):
    module = device_iterators.multi_device_iterator_ops
    monkeypatch.delattr(module, "_create_device_dataset")
    device_iterators.install()
    assert not hasattr(module, "_create_device_dataset")
