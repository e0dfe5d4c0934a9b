"""bfloat16 gradients: ops read them directly where possible and otherwise sum in float32."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_redsync as rs
from tf_redsync.exchange.layout import TensorSpec
from tf_redsync.ops.wire import before_cast, widened
from tf_redsync.step.gradient_exchange import as_dense


def in_a_graph(make):
    """Traces `make` and returns its symbolic tensors."""
    found = []

    @tf.function
    def traced(x):
        found.append(make(x))

    traced.get_concrete_function(tf.TensorSpec([3], tf.bfloat16))
    return found[0]


def test_cast_from_bfloat16_is_detected():
    x, found = in_a_graph(lambda x: (x, before_cast(tf.cast(x, tf.float32))))
    assert found is x


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x,
        lambda x: 2.0 * tf.cast(x, tf.float32),
        lambda x: tf.cast(tf.cast(x, tf.float16), tf.float32),
        lambda x: tf.cast(tf.cast(x, tf.float32), tf.bfloat16),
        lambda x: tf.cast(x, tf.float64),
        lambda x: tf.bitcast(tf.constant([1, 2, 3]), tf.float32),
    ],
)
def test_other_casts_are_kept(make):
    tensor, found = in_a_graph(lambda x: (t := make(x), before_cast(t)))
    assert found is tensor


def test_eager_casts_are_not_detected():
    tensor = tf.cast(tf.constant([1.0], tf.bfloat16), tf.float32)
    assert before_cast(tensor) is tensor


@pytest.mark.parametrize("shape", [None, [3, 2]])
def test_embedding_rows_are_summed_in_float32(shape):
    """A row occurs 1,000 times; a bfloat16 sum would stop growing long before."""
    shape = None if shape is None else tf.constant(shape)
    rows = tf.IndexedSlices(tf.ones([1_000, 2], tf.bfloat16), [1] * 1_000, shape)
    dense = as_dense(rows, TensorSpec("table", (3, 2), "bfloat16"))
    assert dense.dtype == tf.float32
    np.testing.assert_array_equal(dense, [[0, 0], [1_000, 1_000], [0, 0]])


@pytest.mark.filterwarnings("ignore:tf_redsync. there is one worker")
def test_embedding_rows_are_summed_in_float32_with_a_constant_loss_scale():
    table = keras.Variable(np.zeros((3, 2)), dtype="bfloat16")
    optimizer = rs.DistributedOptimizer(keras.optimizers.SGD(1.0, loss_scale_factor=1.0))
    optimizer.build([table])
    rows = tf.IndexedSlices(tf.ones([1_000, 2], tf.bfloat16), [1] * 1_000, tf.constant([3, 2]))
    optimizer.apply([rows], [table])
    np.testing.assert_array_equal(table.numpy(), [[0, 0], [-1_000, -1_000], [0, 0]])


@pytest.mark.parametrize(
    ("dtype", "kept"),
    [(tf.float32, tf.float32), (tf.float16, tf.float32), (tf.bfloat16, tf.bfloat16)],
)
def test_dense_gradients(dtype, kept):
    dense = as_dense(tf.ones([2], dtype), TensorSpec("v", (2,)))
    assert dense.dtype == kept
    assert [t.dtype for t in widened([dense])] == [tf.float32]
