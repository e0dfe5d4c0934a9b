"""Block quantization: native, reference and oracle agree; messages have the documented layout."""

import os
import subprocess
import sys

import hypothesis.strategies as st
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings

from tests.kernels.common import KINDS, assert_same_bits, both, needs_native, on
from tests.loops import loop
from tests.oracle import block_quantization as oracle
from tf_redsync.ops.block_quantization import block_dequantize, block_quantize, block_words

BACKENDS = [pytest.param("native", marks=needs_native), "tensorflow"]
FORMATS = [(bits, block) for bits in (8, 4, 2) for block in (32, 96, 256, 1024)]


def check(rows, bits, block, what=""):
    """Compares with the oracle up to rounding; both backends agree bitwise and conserve."""
    number, size = rows.shape
    results = both(lambda: block_quantize(rows, bits=bits, block=block))
    for backend, (messages, errors) in results.items():
        where = f"{backend}, {what}, {bits} bits, block {block}"
        assert messages.shape == (number, block_words(size, bits=bits, block=block))
        decoded = on(backend, lambda: block_dequantize(messages, size, bits=bits, block=block))  # noqa: B023
        for row, message, error, values in zip(rows, messages, errors, decoded, strict=True):
            flag, codes, scales = oracle.message_parts(message, size, bits, block)
            assert flag == 1, where
            expected, sent, exact = oracle.quantized(row, bits, block)
            units = np.repeat(np.float64(sent) / oracle.LEVELS[bits][-1], block)[:size]
            if bits > 2:  # with 2 bits, two scales may have equal errors up to rounding
                np.testing.assert_array_equal(scales, sent, where)
            # A tie in float32 may be none in float64: then both levels are equally near.
            again = np.abs(np.float64(row) - np.float64(values))
            assert np.all(again <= np.abs(row - exact) + 4e-5 * units) or bits == 2, where
            lost = np.square(again).sum()
            assert lost <= np.square(row - exact).sum() * (1 + 1e-4) + 1e-60, where
            np.testing.assert_array_equal(error, row - values, where)
            assert np.abs(codes).max(initial=0) <= oracle.LEVELS[bits][-1]
            if bits > 2:
                places = np.searchsorted(oracle.LEVELS[bits], [codes, expected])
                assert np.abs(places[0] - places[1]).max(initial=0) <= 1, where
    native, reference = results.get("native"), results["tensorflow"]
    if native is not None:
        assert_same_bits(native, reference, f"{what}, {bits} bits, block {block}")


@needs_native
@loop("kind", [kind for kind in KINDS if kind != "denormal"])
def test_equals_the_oracle(kind):
    rng = np.random.default_rng(0)
    for bits, block in FORMATS:
        for size in (32, 256, 480):
            rows = np.stack([KINDS[kind](rng, size) for _ in range(2)]).astype(np.float32)
            check(rows, bits, block, f"{kind}, size {size}")


@needs_native
@pytest.mark.parametrize("bits", [8, 4, 2])
def test_many_rows_on_several_threads(bits):
    rng = np.random.default_rng(bits)
    rows = rng.standard_t(3, (5, 70_016)).astype(np.float32)
    results = both(lambda: block_quantize(rows, bits=bits, block=256))
    assert_same_bits(results["native"], results["tensorflow"], f"{bits} bits")
    messages = results["native"][0]
    for add in (False, True):
        found = both(lambda: [block_dequantize(messages, 70_016, bits=bits, block=256, add=add)])  # noqa: B023
        assert_same_bits(found["native"], found["tensorflow"], f"add={add}")
    relative = np.square(results["native"][1]).sum() / np.square(rows).sum()
    assert {8: 1e-5, 4: 3e-3, 2: 0.05}[bits] < relative < {8: 5e-4, 4: 0.08, 2: 0.5}[bits]


@pytest.mark.parametrize("backend", BACKENDS)
def test_sums_follow_the_order_of_the_rows(backend):
    rows = np.float32([[2.0**25] * 32, [1.0] * 32, [-(2.0**25)] * 32])
    messages, _ = on(backend, lambda: block_quantize(rows, bits=8, block=32))
    got = on(backend, lambda: block_dequantize(messages, 32, bits=8, block=32, add=True))
    values = on(backend, lambda: block_dequantize(messages, 32, bits=8, block=32))
    assert_same_bits([got], [(values[0] + values[1]) + values[2]], backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 2.0**126])
def test_nonfinite_values_invalidate_the_message(backend, bad):
    rows = np.ones((3, 544), np.float32)
    rows[1, 543] = bad
    messages, _ = on(backend, lambda: block_quantize(rows, bits=4, block=256))
    assert not messages.any()
    values = on(backend, lambda: block_dequantize(messages, 544, bits=4, block=256, add=True))
    assert not values.any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_tiny_blocks_are_sent_as_zeros_and_stay_in_the_errors(backend):
    rows = np.float32([[2.0**-101] * 32 + [2.0**-99] * 32])
    messages, errors = on(backend, lambda: block_quantize(rows, bits=8, block=32))
    values = on(backend, lambda: block_dequantize(messages, 64, bits=8, block=32))
    assert not values[0, :32].any() and values[0, 32:].all()
    np.testing.assert_array_equal(errors[0, :32], rows[0, :32])


@needs_native
@settings(max_examples=60, deadline=None, database=None)
@given(
    st.lists(st.floats(-(2.0**125), 2.0**125, width=32), min_size=32, max_size=32),
    st.sampled_from([8, 4, 2]),
)
def test_arbitrary_floats(values, bits):
    rows = np.float32([values])
    results = both(lambda: block_quantize(rows, bits=bits, block=32))
    assert_same_bits(results["native"], results["tensorflow"], f"{bits} bits")


@needs_native
@settings(max_examples=60, deadline=None, database=None)
@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=6, max_size=6))
def test_arbitrary_words_are_decoded(words):
    messages = np.array([words, words[::-1]], np.int32)
    for add in (False, True):
        found = both(lambda: block_dequantize(messages, 32, bits=4, block=32, add=add))  # noqa: B023
        # Scales may be infinite: all NaNs count as equal.
        found = {
            backend: np.where(np.isnan(v), np.float32(np.nan), v) for backend, v in found.items()
        }
        assert_same_bits([found["native"]], [found["tensorflow"]], f"add={add}")


@needs_native
def test_graph_of_unknown_shape():
    rows = np.random.default_rng(1).standard_normal((3, 320)).astype(np.float32)

    def run():
        def there_and_back(given):
            messages, _ = block_quantize(given, bits=4, block=64)
            size = tf.shape(given, tf.int64)[1]
            return block_dequantize(messages, size, bits=4, block=64)

        traced = tf.function(there_and_back, input_signature=[tf.TensorSpec([None, None])])
        return [traced(rows)]

    results = both(run)
    assert_same_bits(results["native"], results["tensorflow"], "a graph")
    assert np.square(results["native"][0] - rows).sum() < 0.03 * np.square(rows).sum()


@pytest.mark.parametrize("backend", BACKENDS)
def test_empty_input(backend):
    messages, errors = on(backend, lambda: block_quantize(tf.zeros([3, 0]), bits=4, block=32))
    np.testing.assert_array_equal(messages, np.ones((3, 1)))
    assert errors.shape == (3, 0)
    assert on(backend, lambda: block_dequantize(messages, 0, bits=4, block=32)).shape == (3, 0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_bad_input(backend):
    for keywords, match in (
        ({"bits": 3, "block": 32}, r"`bits`.*bits=3"),
        ({"bits": 8, "block": 48}, r"`block`.*block=48"),
        ({"bits": 8, "block": 2**31}, r"`block`.*at most.*block=2147483648"),
    ):
        with pytest.raises(ValueError, match=match):
            on(backend, lambda: block_quantize(tf.zeros([1, 32]), **keywords))  # noqa: B023
    with pytest.raises(TypeError, match=r"`rows`.*float64"):
        on(backend, lambda: block_quantize(tf.zeros([1, 32], tf.float64), bits=8, block=32))
    for shape in ([32], [1, 33]):
        with pytest.raises(ValueError, match=r"`rows`.*shape"):
            on(backend, lambda: block_quantize(tf.zeros(shape), bits=8, block=32))  # noqa: B023
    with pytest.raises((tf.errors.InvalidArgumentError, ValueError)):
        on(backend, lambda: block_dequantize(tf.zeros([2, 5], tf.int32), 64, bits=8, block=32))


PLAIN = """
import numpy as np
from tests.kernels.common import assert_same_bits, both
from tf_redsync.ops.block_quantization import block_quantize
rows = np.random.default_rng(0).laplace(size=(3, 1056)).astype(np.float32)
for bits in (8, 4, 2):
    found = both(lambda: block_quantize(rows, bits=bits, block=256))
    assert_same_bits(found["native"], found["tensorflow"], f"{bits} bits")
print("equal")
"""


@needs_native
@pytest.mark.deep
@pytest.mark.parametrize("simd", ["plain", "avx2"])
def test_without_wide_vectors(simd):
    env = {**os.environ, "TF_REDSYNC_SIMD": simd}
    result = subprocess.run(
        [sys.executable, "-c", PLAIN], env=env, capture_output=True, text=True, timeout=120
    )
    assert result.stdout == "equal\n", result.stderr[-2000:]
