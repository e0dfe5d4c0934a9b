"""Top-k per chunk: native, reference and oracle give equal positions and bits."""

import os
import subprocess
import sys

import hypothesis.strategies as st
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import example, given, settings

from tests.kernels.common import KINDS, assert_same_bits, both, needs_native, on
from tests.loops import loop
from tests.oracle.chunks import chunked_top_k_numpy
from tf_redsync.ops.selection import chunked_top_k

BACKENDS = [pytest.param("native", marks=needs_native), "tensorflow"]
SIZES = (1, 2, 3, 15, 16, 17, 63, 64, 100, 511, 513, 1000)


def check(chunks, k, what=""):
    expected = chunked_top_k_numpy(chunks, k)
    for backend, got in both(lambda: chunked_top_k(chunks, k)).items():
        assert_same_bits(got, expected, f"{backend}, {what}, k={k}")


def counts(size):
    """Returns k for all code paths: many, some and no runs per selected element; 0 and all."""
    return sorted({0, 1, size // 33, size // 32, size // 9, size // 8, size // 2, size - 1, size})


@needs_native
@loop("kind", list(KINDS))
def test_equals_the_oracle(kind):
    rng = np.random.default_rng(0)
    for size in SIZES:
        chunks = np.stack([KINDS[kind](rng, size) for _ in range(2)]).astype(np.float32)
        for k in counts(size):
            check(chunks, k, f"{kind}, size {size}")


@needs_native
@pytest.mark.parametrize("k", [32, 128, 1000])
def test_usual_chunks(k):
    """Several per thread, of 64 x 64."""
    rng = np.random.default_rng(k)
    chunks = rng.standard_t(3, (40, 4096)).astype(np.float32)
    chunks[3] = 0.0
    chunks[4, 100:] = 0.25
    chunks[5] = rng.integers(-3, 4, 4096)
    check(chunks, k)


@needs_native
def test_nan_is_the_largest():
    chunk = np.arange(100, dtype=np.float32)[None] * [[-1]]
    chunk = chunk.astype(np.float32)
    chunk[0, [7, 20, 50]] = np.nan, -np.inf, np.inf
    check(chunk, 1)
    positions, _ = on("native", lambda: chunked_top_k(chunk, 1))
    assert positions.tolist() == [[7]]
    for k in (2, 3, 4):
        check(chunk, k)


bits = st.integers(-(2**31), 2**31 - 1) | st.sampled_from([0, -(2**31), 1, 0x3F800000, -0x40800000])


@needs_native
@settings(max_examples=60, deadline=None, database=None)
@given(st.lists(bits, min_size=1, max_size=80), st.integers(0, 80))
@example([0x7FC00000, -1, 0x7F800000], 2)
def test_arbitrary_bits(words, k):
    check(np.array([words], np.int32).view(np.float32), min(k, len(words)))


@needs_native
def test_graph_with_an_unknown_number_of_chunks():
    chunks = np.random.default_rng(1).standard_normal((6, 70)).astype(np.float32)

    def run():
        traced = tf.function(lambda c: chunked_top_k(c, 3))
        positions, values = traced(chunks)
        shape = traced.get_concrete_function(tf.TensorSpec([None, 70])).output_shapes
        assert [s.as_list() for s in shape] == [[None, 3]] * 2
        return positions, values

    for backend, got in both(run).items():
        assert_same_bits(got, chunked_top_k_numpy(chunks, 3), backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_chunks(backend):
    positions, values = on(backend, lambda: chunked_top_k(tf.zeros([0, 10]), 3))
    assert positions.shape == values.shape == (0, 3)
    positions, values = on(backend, lambda: chunked_top_k(tf.zeros([4, 0]), 0))
    assert positions.shape == values.shape == (4, 0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_bad_input(backend):
    for k in (-1, 11):
        with pytest.raises(ValueError, match=rf"`k`.*Received: .*{k}"):
            on(backend, lambda: chunked_top_k(tf.zeros([2, 10]), k))  # noqa: B023
    with pytest.raises(TypeError, match="`chunks` must be float32. Received: float64"):
        on(backend, lambda: chunked_top_k(tf.zeros([2, 10], tf.float64), 1))
    with pytest.raises(ValueError, match=r"`chunks` must have shape \[chunks, size\].*\(10,\)"):
        on(backend, lambda: chunked_top_k(tf.zeros([10]), 1))


PLAIN = """
import numpy as np
from tests.kernels.common import KINDS, assert_same_bits, on
from tests.oracle.chunks import chunked_top_k_numpy
from tf_redsync.ops.selection import chunked_top_k
for size in (64, 1000):
    for k in (1, size // 33, size // 10, size // 2):
        chunks = np.random.default_rng(k).integers(-9, 9, (3, size)).astype(np.float32)
        got = on("native", lambda: chunked_top_k(chunks, k))
        assert_same_bits(got, chunked_top_k_numpy(chunks, k), f"{size}, {k}")
print("equal")
"""


@needs_native
@pytest.mark.deep
def test_without_wide_vectors():
    env = {**os.environ, "TF_REDSYNC_SIMD": "plain"}
    result = subprocess.run(
        [sys.executable, "-c", PLAIN], env=env, capture_output=True, text=True, timeout=120
    )
    assert result.stdout == "equal\n", result.stderr[-2000:]
