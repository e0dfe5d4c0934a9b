"""Sparse totals and updates by them: native, TensorFlow's scatter, and numpy."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tf_redsync import ops
from tf_redsync.ops import selection, sparse

SIZES = ((7, 30), (400,), (3, 5, 11))
FORM = {"selectors": ("exact", "threshold", "trimmed"), "quantized": (False, True, False)}
K = [10, 40, 1]


@pytest.fixture(params=["native", "tensorflow"])
def backend(request):
    try:
        ops.set_backend(request.param)
    except ops.NativeLibraryError as error:
        pytest.skip(f"no native library: {error}")
    yield request.param
    ops.set_backend(None)


def floats(words):
    """Bit-casts words to floats."""
    return tf.bitcast(tf.constant(words, tf.int32), tf.float32)


def messages(workers=3):
    rows = []
    for rank in range(workers):
        generator = np.random.RandomState(rank)
        grads = [tf.constant(generator.randn(*s), tf.float32) for s in SIZES]
        zeros = [tf.zeros(s) for s in SIZES]
        chosen = ops.accumulate_and_select(
            grads, zeros, [], tf.constant(K), tf.fill([3], -1.0), **FORM
        )
        rows.append(chosen.message)
    return tf.stack(rows)


def test_sparse_totals_sum_to_the_decoded_total(backend):
    received, layout = messages(), ops.MessageLayout.of(K, FORM["quantized"])
    like = [tf.zeros(s) for s in SIZES]
    dense = ops.decode(received, layout, like)
    found = selection.sparse_totals(received, layout)
    for total, expected in zip(found, dense, strict=True):
        summed = np.zeros(expected.shape.num_elements(), np.float32)
        np.add.at(summed, total.indices.numpy().view(np.int32), total.values.numpy())
        np.testing.assert_array_equal(summed.reshape(expected.shape), expected.numpy())
        assert np.count_nonzero(summed) > 0


def expected_descent(shape, indices, values, rate):
    """Applies the entries one by one in float32."""
    expected = np.arange(np.prod(shape), dtype=np.float32)
    for i, value in zip(indices, values, strict=True):
        expected[i] -= np.float32(rate) * value
    return expected.reshape(shape)


@pytest.mark.parametrize("shape", [(50,), (5, 10), (2, 5, 5)])
def test_descend_applies_one_entry_after_the_other(backend, shape):
    generator = np.random.RandomState(0)
    indices = generator.randint(0, 50, 200).astype(np.int32)  # every position several times
    values = generator.randn(200).astype(np.float32)
    variable = tf.Variable(tf.reshape(tf.range(50, dtype=tf.float32), shape))
    before = variable.read_value()
    total = sparse.SparseTotal(floats(indices), tf.constant(values))

    @tf.function
    def step():
        sparse.descend(variable, total, tf.constant(0.1))

    step()
    np.testing.assert_array_equal(variable.numpy(), expected_descent(shape, indices, values, 0.1))
    # A value read before the update must not change.
    np.testing.assert_array_equal(before.numpy().ravel(), np.arange(50))


@pytest.mark.parametrize("shape", [(50,), (2, 5, 5)])
def test_tensor_and_variable_descend_equally(backend, shape):
    generator = np.random.RandomState(1)
    indices = generator.randint(0, 50, 200).astype(np.int32)
    values = generator.randn(200).astype(np.float32)
    total = sparse.SparseTotal(floats(indices), tf.constant(values))
    expected = expected_descent(shape, indices, values, -0.3)
    start = tf.reshape(tf.range(50, dtype=tf.float32), shape)

    @tf.function
    def both(start):
        own = start + 0.0  # no other reference, so the result may reuse its memory
        return sparse.descended(own, total, -0.3), sparse.descended(start, total, -0.3)

    for result in both(start):
        np.testing.assert_array_equal(result.numpy(), expected)
    np.testing.assert_array_equal(start.numpy().ravel(), np.arange(50))
    with pytest.raises(tf.errors.InvalidArgumentError):
        sparse.descended(start, sparse.SparseTotal(floats([50]), tf.constant([1.0])), 0.1)


@pytest.mark.parametrize("graph", [False, True])
def test_scalars(backend, graph):
    variable = tf.Variable(10.0)
    total = sparse.SparseTotal(floats([[0], [0]]), tf.constant([[1.0], [2.0]]))

    def step(total):
        result = sparse.descended(variable.read_value(), total, 0.5)
        sparse.descend(variable, total, tf.constant(0.5))
        return result

    step = tf.function(step) if graph else step
    assert step(total).numpy() == 8.5 and variable.numpy() == 8.5
    with pytest.raises(tf.errors.InvalidArgumentError):
        step(sparse.SparseTotal(floats([1]), tf.constant([1.0])))
    assert variable.numpy() == 8.5


def test_no_entries(backend):
    variable = tf.Variable([1.0, 2.0])
    empty = sparse.SparseTotal(tf.zeros([0]), tf.zeros([0]))
    sparse.descend(variable, empty, tf.constant(0.1))
    np.testing.assert_array_equal(variable.numpy(), [1.0, 2.0])


@pytest.mark.parametrize("index", [-1, 2, 2**31 - 1])
def test_out_of_range_index_raises(backend, index):
    variable = tf.Variable([1.0, 2.0])
    total = sparse.SparseTotal(floats([0, index]), tf.constant([1.0, 1.0]))
    with pytest.raises(tf.errors.InvalidArgumentError):
        sparse.descend(variable, total, tf.constant(0.1))
    if backend == "native":  # checked before any write
        np.testing.assert_array_equal(variable.numpy(), [1.0, 2.0])


def test_shapes_are_checked():
    if ops.backend() != "native":
        pytest.skip("no native library")
    variable = tf.Variable([1.0, 2.0])
    total = sparse.SparseTotal(floats([0, 1]), tf.constant([1.0]))
    with pytest.raises(
        (tf.errors.InvalidArgumentError, ValueError), match="same shape|must be equal"
    ):
        sparse.descend(variable, total, tf.constant(0.1))


def ascending_runs(generator, size, runs, slots):
    """Returns entries as `sparse_totals` does: ascending runs, each with unused slots."""
    indices, values = np.zeros([runs, slots], np.int32), np.zeros([runs, slots], np.float32)
    for run in range(runs):
        count = generator.randint(slots // 2, slots + 1)
        indices[run, :count] = np.sort(generator.choice(size, count, replace=False))
        values[run, :count] = generator.randn(count)
    return indices, values


@pytest.mark.parametrize("runs", [1, 4, 1100])  # few, and more than are sorted at once
def test_runs_over_many_spans(backend, runs):
    """The order of entries defines the rounding of sums, for any number of threads."""
    size, generator = 300_000, np.random.RandomState(runs)
    indices, values = ascending_runs(generator, size, runs, 40_000 if runs < 9 else 30)
    expected = generator.randn(size).astype(np.float32)
    variable = tf.Variable(expected)
    sparse.descend(
        variable, sparse.SparseTotal(floats(indices), tf.constant(values)), tf.constant(0.3)
    )
    rate = np.float32(0.3)
    for i, value in zip(indices.ravel(), values.ravel(), strict=True):
        expected[i] -= rate * value
    np.testing.assert_array_equal(variable.numpy(), expected)
    if backend == "native":  # the bad index is the first one in its run, or the last
        for at in (0, indices.size - 1):
            wrong = indices.copy()
            wrong.flat[at] = size + 5
            total = sparse.SparseTotal(floats(wrong), tf.constant(values))
            named = rf"indices\[{at}\]={size + 5}"
            with pytest.raises(tf.errors.InvalidArgumentError, match=named):
                sparse.descend(variable, total, tf.constant(0.3))
        np.testing.assert_array_equal(variable.numpy(), expected)


@pytest.mark.parametrize("shape", [(), (5, 1001)])
def test_descends_by_a_dense_total_as_sgd_does(shape):
    start, total = (tf.random.stateless_normal(shape, (seed, 2)) for seed in (1, 2))
    variable, expected = tf.Variable(start), keras.Variable(start)
    keras.optimizers.SGD(0.3).apply([total], [expected])
    sparse.descend(variable, total, tf.constant(0.3))
    assert not np.array_equal(variable, start)
    np.testing.assert_array_equal(variable, expected.value)
