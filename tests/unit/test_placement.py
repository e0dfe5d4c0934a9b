"""Detects ops that copy between a GPU and the host."""

import numpy as np
import pytest
import tensorflow as tf

from tests.placement import crossings
from tf_redsync.network.collectives import PublicCollectives
from tf_redsync.ops import native, wire


@pytest.fixture
def on_gpus(monkeypatch):
    monkeypatch.setattr(native, "are_on_cpus", lambda tensors: False)


def crossing_ops(function, *specs):
    found = crossings(tf.function(function).get_concrete_function(*specs))
    return sorted({(c.producer, c.consumer, c.elements) for c in found})


FLOATS = tf.TensorSpec([100], tf.float32)


def test_int32_slices_are_copied_but_float_slices_are_not():
    def integers(x):
        return tf.bitcast(tf.bitcast(x, tf.int32)[3:], tf.float32)

    expected = [("Bitcast", "StridedSlice", 100), ("StridedSlice", "Bitcast", 97)]
    assert crossing_ops(integers, FLOATS) == expected
    assert crossing_ops(lambda x: tf.sqrt(x)[3:] + 1.0, FLOATS) == []


def test_moved_words_are_not_copied(on_gpus):
    def moved(x):
        kept = wire.map_words(lambda w: tf.reshape(w[4:], [2, -1]), tf.bitcast(x, tf.int32))
        return tf.bitcast(kept, tf.float32)

    assert crossing_ops(moved, FLOATS) == []


def test_moved_words_have_equal_bits(on_gpus):
    bits = tf.constant([1, -1, 0x7FC00001, -(2**31), 0x7F800001], tf.int32)  # flags, NaNs
    assert wire.map_words(lambda w: w[::-1], bits).numpy().tolist() == bits.numpy()[::-1].tolist()
    first, rest = wire.map_words(lambda w: tf.split(w, [2, 3]), bits)
    assert first.numpy().tolist() + rest.numpy().tolist() == bits.numpy().tolist()


def test_messages_between_replicas_have_equal_bits(on_gpus, mirrored):
    words, network = [1, -1, 0x7FC00001, 0x7F800001], PublicCollectives(2)

    def replica():
        message = tf.constant(words) + network.rank()
        table = tf.stack([message, message + 10])
        return (
            network.all_gather(message),
            network.all_to_all(table),
            network.pair_gather(message, 1),
        )

    strategy = mirrored(2)
    results = tf.function(lambda: strategy.run(replica), autograph=False)()
    rows = np.array([words, np.add(words, 1)])
    for rank in range(2):
        gathered, received, pair = (strategy.experimental_local_results(r)[rank] for r in results)
        np.testing.assert_array_equal(gathered, rows)
        np.testing.assert_array_equal(received, rows + 10 * rank)
        np.testing.assert_array_equal(pair, rows)


@pytest.mark.parametrize("flags", [[1, 1], [1, 0], [0, 0], [1, 2], [1, -1]])
def test_flags_are_compared_as_numbers(on_gpus, flags):
    assert bool(wire.all_ones(tf.constant(flags))) == (flags == [1, 1])


def test_messages_are_equal_on_gpus(monkeypatch):
    def made():
        parts = tf.constant([1.5, -0.0]), tf.constant([7, -7])
        return [wire.message(tf.constant(f), *parts).numpy().tolist() for f in (True, False)]

    expected = made()
    monkeypatch.setattr(native, "are_on_cpus", lambda tensors: False)
    assert made() == expected == [[1, 0x3FC00000, -(2**31), 7, -7], [0] * 5]


def test_branches_and_ops_without_a_kernel_are_inspected():
    def branch(x):
        y = tf.sqrt(x)
        return tf.cond(
            y[0] > 0.0, lambda: tf.bitcast(tf.bitcast(y, tf.int32)[1:], tf.float32), lambda: y
        )

    found = crossing_ops(branch, FLOATS)
    assert ("Bitcast", "StridedSlice", 100) in found
    assert ("Greater", "StatelessIf", 1) in found
    hashed = crossing_ops(lambda x: tf.fingerprint(tf.reshape(tf.sqrt(x), [1, -1])), FLOATS)
    assert ("Reshape", "Fingerprint", 100) in hashed
