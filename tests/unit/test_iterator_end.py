"""Iterators of distributed datasets end in a thread of their own."""

import threading
import time

import pytest
import tensorflow as tf

import tf_redsync.strategy  # noqa: F401  (importing it installs what is tested)
from tf_redsync.cluster import iterator_end

PAUSE = 3.0  # seconds that the end of an iterator takes here


@pytest.fixture
def slow():
    """A distributed dataset whose iterator, once it has started, takes PAUSE seconds to end."""

    def batches():
        yield 0
        time.sleep(PAUSE)
        yield 1

    signature = tf.TensorSpec((), tf.int64)
    data = tf.data.Dataset.from_generator(batches, output_signature=signature).prefetch(2)
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    return strategy.distribute_datasets_from_function(lambda _: data)


def _ending():
    return [t for t in threading.enumerate() if t.name == iterator_end.THREAD_NAME]


def test_a_slow_end_holds_up_nobody(slow):
    iterator = iter(slow)
    assert int(next(iterator)) == 0
    time.sleep(0.2)  # the next element is being made
    started = time.perf_counter()
    del iterator
    assert time.perf_counter() - started < PAUSE / 3
    thread = _ending()[-1]
    thread.join(iterator_end.KEPT_SECONDS + 0.5)
    assert thread.is_alive()  # it is the one that waits
    thread.join(3 * PAUSE)
    assert not thread.is_alive()


def test_the_resources_of_host_and_device_are_found(slow):
    iterator = iter(slow)
    handles = iterator_end._resources(iterator._iterators[0]._iterator)
    assert len(handles) == 2
    assert all(handle.dtype == tf.resource for handle in handles)


def test_training_in_many_epochs_leaves_no_threads():
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    with strategy.scope():
        model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    data = tf.data.Dataset.from_tensor_slices((tf.ones((8, 2)), tf.ones((8, 1)))).batch(4)
    model.fit(data, epochs=5, validation_data=data, verbose=0)
    deadline = time.monotonic() + 30
    while _ending() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not _ending()


def test_a_second_call_changes_nothing():
    owner = iterator_end.multi_device_iterator_ops.OwnedMultiDeviceIterator
    before = owner.__init__
    iterator_end.install()
    assert owner.__init__ is before
