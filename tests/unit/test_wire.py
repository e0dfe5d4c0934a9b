"""Words, flags and bytes against literal numbers."""

import numpy as np
import pytest
import tensorflow as tf

from tests.loops import loop
from tf_redsync.exchange import driver
from tf_redsync.exchange.requests import AllGather, AllReduce, AllToAll, PairGather
from tf_redsync.ops import native, wire
from tf_redsync.ops.message_layout import MessageLayout


def test_words_keep_every_bit():
    bits = np.array([0, 1, -(2**31), 0x3FC00000, 0x7F800001, 0x7FC12345, 2**24 + 1], np.int32)
    words = wire.to_words(wire.from_words(tf.constant(bits)))
    np.testing.assert_array_equal(words, bits)
    np.testing.assert_array_equal(
        wire.to_words(tf.constant([1.5, -3.0])), [0x3FC00000, -0x3FC00000]
    )


@pytest.mark.parametrize("on_cpus", [True, False])
def test_moved_constants_keep_every_bit(monkeypatch, on_cpus):
    """As floats they are denormals, which Grappler flushes in functions that are not inlined."""
    monkeypatch.setattr(native, "are_on_cpus", lambda words: on_cpus)

    @tf.function(autograph=False, experimental_attributes={"_noinline": True})
    def message(words):
        layout = MessageLayout.of([2, 1])
        counts = tf.constant([2, 1])
        plain = layout.message(tf.reduce_all(words > 0), counts, [words, words[:1]], [
            tf.bitcast(words, tf.float32), tf.zeros([1])])  # fmt: skip
        return plain, wire.joined(tf.ones([1], tf.int32), words, tf.constant([7]))

    plain, joined = tf.function(lambda words: message(words))(tf.constant([3, 4]))
    assert plain.numpy().tolist() == [1, 2, 3, 4, 3, 4, 1, 3, 0]
    assert joined.numpy().tolist() == [1, 3, 4, 7]


@pytest.mark.parametrize(("finite", "flag"), [(True, 1), (False, 0)])
def test_header(finite, flag):
    message = wire.with_header(tf.constant(finite), tf.constant([5, 6]))
    assert message.dtype == tf.int32 and message.numpy().tolist() == [flag, 5, 6]


MESSAGE = tf.TensorSpec([10], tf.int32)


@pytest.mark.parametrize(
    ("request_", "workers", "expected"),
    [
        (AllGather(MESSAGE), 4, 120),  # m (P - 1)
        (AllGather(MESSAGE), 1, 0),
        (AllReduce([MESSAGE]), 4, 60),  # 2 m (P - 1) / P
        (AllReduce([MESSAGE]), 1, 0),
        (AllToAll(MESSAGE), 4, 30),  # m (P - 1) / P
        (PairGather(MESSAGE, 2), 4, 40),  # m
        (PairGather(MESSAGE, 1), 1, 0),
        (AllReduce([tf.TensorSpec([2, 3], tf.float32), tf.TensorSpec([], tf.bfloat16)]), 2, 26),
    ],
)
def test_sent_bytes(request_, workers, expected):
    assert driver.sent_bytes(request_, workers) == expected


def test_bytes_of_a_length_that_depends_on_the_step():
    @tf.function(input_signature=[tf.TensorSpec([None], tf.int32)])
    def sent(message):
        return driver.payload_bytes(AllGather(message)), driver.sent_bytes(AllGather(message), 3)

    payload, total = sent(tf.zeros([7], tf.int32))
    assert payload.dtype == tf.int64 and payload == 28
    assert total.dtype == tf.float64 and total == 56.0


@loop(
    ("request_", "reply", "finite"),
    [
        (AllGather(None), [[1, 7], [1, 0]], True),
        (AllGather(None), [[1, 7], [0, 0]], False),
        (AllToAll(None), [[0, 0], [1, 0]], False),
        (PairGather(None, 1), [[1, 7], [1, 0]], True),
        (PairGather(None, 1), [[1, 7], [0, 0]], False),
        (AllReduce(None), [[1.0, 2.0], [3.0]], True),
        (AllReduce(None), [[1.0, 2.0], [np.inf]], False),
        (AllReduce(None), [[1.0, np.nan], [0.0]], False),
        (AllReduce(None), [[], []], True),
    ],
)
def test_is_finite(request_, reply, finite):
    if isinstance(request_, AllReduce):
        reply = [tf.constant(r, tf.float32) for r in reply]
    else:
        reply = tf.constant(reply)
    assert bool(driver.COLLECTIVES[type(request_)].finite(reply)) == finite
