"""Finiteness of tensors: native and TensorFlow against NumPy, for every dtype."""

import numpy as np
import pytest
import tensorflow as tf

from tests.kernels.common import both, needs_native
from tests.loops import loop
from tf_redsync.ops import native, wire

DTYPES = [tf.float32, tf.bfloat16, tf.float16, tf.float64]
BAD = (np.nan, -np.nan, np.inf, -np.inf)
BLOCK = 1 << 15  # elements per thread


def expected_flags(tensors):
    return [bool(np.isfinite(t.numpy().astype(np.float64)).all()) for t in tensors]


def assert_agree(tensors):
    expected = expected_flags(tensors)
    for backend, finite in both(lambda: wire.each_finite(tensors)).items():
        assert finite.tolist() == expected, backend
    for backend, finite in both(lambda: wire.all_finite(tensors)).items():
        assert bool(finite) == all(expected), backend
    return expected


@needs_native
@loop("dtype", DTYPES)
@loop("bad", BAD)
def test_nonfinite_element_is_detected_anywhere(dtype, bad):
    for size, at in [(1, 0), (7, 6), (BLOCK, BLOCK - 1), (2 * BLOCK + 3, 2 * BLOCK + 2)]:
        values = np.zeros(size)
        values[at] = bad
        assert assert_agree([tf.constant(values, dtype)]) == [False]


@needs_native
@loop("dtype", DTYPES)
def test_largest_and_smallest_values_are_finite(dtype):
    smallest = np.array([1], np.uint64).astype(f"u{dtype.size}")
    words = tf.constant(smallest, tf.dtypes.as_dtype(smallest.dtype))
    extremes = [float(dtype.max), float(dtype.min), 0.0, -0.0]
    found = assert_agree(
        [tf.constant(extremes, dtype), tf.bitcast(words, dtype), tf.zeros([0], dtype)]
    )
    assert found == [True, True, True]


@needs_native
def test_each_tensor_has_its_own_result():
    rng = np.random.default_rng(0)
    sized = zip((4, 9, 0, 2), DTYPES, strict=True)
    tensors = [tf.constant(rng.normal(size=[3, n]), d) for n, d in sized]
    tensors[1] = tf.tensor_scatter_nd_update(tensors[1], [[2, 8]], [tf.cast(np.inf, tf.bfloat16)])
    assert assert_agree(tensors) == [True, False, True, True]
    assert assert_agree([]) == []


@needs_native
def test_graph_has_one_op_for_all_tensors():
    @tf.function(autograph=False)
    def finite(tensors):
        return wire.all_finite(tensors)

    graph = finite.get_concrete_function([tf.zeros([3])] * 50).graph
    types = [op.type for op in graph.get_operations()]
    assert types.count("RedsyncAllFinite") == 1 and "IsFinite" not in types


def test_graph_without_the_library_has_no_native_op(monkeypatch):
    monkeypatch.setattr(native, "_forced", "tensorflow")
    assert wire.each_finite([tf.constant([np.nan]), tf.constant([1.0])]).numpy().tolist() == [
        False,
        True,
    ]


def test_integers_are_rejected():
    with pytest.raises((TypeError, tf.errors.InvalidArgumentError, ValueError)):
        wire.each_finite([tf.constant([1, 2])])
