"""Rounding to 16 bits: native, TensorFlow's casts, and numpy's."""

import numpy as np
import pytest
import tensorflow as tf

from tests.kernels.common import assert_same_bits, both, needs_native, on
from tf_redsync.ops import wire

DTYPES = (tf.float16, tf.bfloat16)
BACKENDS = ("native", "tensorflow")


def rounded(x, dtype):
    """The nearest 16-bit numbers, half to even, as float32."""
    if dtype == tf.float16:
        with np.errstate(over="ignore"):
            return x.astype(np.float16).astype(np.float32)
    bits = x.view(np.uint32).astype(np.uint64)
    up = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16
    return up.astype(np.uint32).view(np.float32)


def message_words(x, dtype):
    """A flag, and two numbers in a word, the first one low."""
    value = rounded(x, dtype)
    if dtype == tf.float16:
        codes = value.astype(np.float16).view(np.uint16)
    else:
        codes = (value.view(np.uint32) >> 16).astype(np.uint16)
    flags = np.ones([len(x), 1], np.int32)
    return np.concatenate([flags, np.ascontiguousarray(codes).view(np.int32)], axis=1)


def values(rows, size, seed=0):
    """Of all magnitudes that float16 has, its smallest ones and ties among them."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, size)) * 2.0 ** rng.integers(-30, 15, (rows, size))
    ties = (2 * rng.integers(0, 2**10, (rows, size)) + 1) * 2.0**-25  # between the smallest ones
    return np.where(rng.random((rows, size)) < 0.1, ties, x).astype(np.float32)


@needs_native
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 0), (1, 2), (2, 50), (3, 40_002)])
def test_messages_errors_and_sums(dtype, shape):
    x = values(*shape)
    expected, value = message_words(x, dtype), rounded(x, dtype)
    for backend, (message, errors) in both(lambda: wire.half_encode(tf.constant(x), dtype)).items():
        assert_same_bits(message, expected, backend)
        assert_same_bits(errors, x - value, backend)
    for backend, got in both(lambda: wire.half_decode(tf.constant(expected), dtype)).items():
        assert_same_bits(got, value, backend)
    total = value[0]
    for row in value[1:]:
        total = total + row
    run = both(lambda: wire.half_decode(tf.constant(expected), dtype, add=True))
    for backend, got in run.items():
        assert_same_bits(got, total, backend)


@needs_native
def test_every_float16_and_what_is_next_to_it():
    codes = np.arange(2**16, dtype=np.uint16)
    exact = codes.view(np.float16).astype(np.float32)
    exact = exact[np.isfinite(exact)]
    middles = (exact[:-1] + exact[1:]) / 2
    near = [np.nextafter(middles, np.float32(s * np.inf), dtype=np.float32) for s in (-1, 1)]
    x = np.concatenate([exact, middles, *near])
    x = x[np.abs(x) < 65520][None]
    x = x[:, : x.size // 2 * 2]
    message, errors = on("native", lambda: wire.half_encode(tf.constant(x), tf.float16))
    assert_same_bits(message, message_words(x, tf.float16), "message")
    assert_same_bits(errors, x - rounded(x, tf.float16), "errors")
    back = on("native", lambda: wire.half_decode(message, tf.float16))
    assert_same_bits(back, rounded(x, tf.float16), "back")


@needs_native
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("dtype", "bad"),
    [
        (tf.float16, 65520.0), (tf.float16, -1e6), (tf.float16, np.nan), (tf.float16, -np.inf),
        (tf.bfloat16, 3.4e38), (tf.bfloat16, np.inf), (tf.bfloat16, -np.nan),
    ],
)  # fmt: skip
def test_what_is_not_finite_is_not_sent(backend, dtype, bad):
    x = values(2, 70)
    x[1, 69] = bad
    message, _ = on(backend, lambda: wire.half_encode(tf.constant(x), dtype))
    assert not message.any()
    x[1, 69] = 65519.0
    message, _ = on(backend, lambda: wire.half_encode(tf.constant(x), dtype))
    assert message[:, 0].tolist() == [1, 1]


@needs_native
def test_a_nan_of_any_bits_is_not_sent():
    for bits in (0x7F800001, 0x7FFFFFFF, 0xFF800001, 0xFFFFFFFF, 0x7FC00000):
        x = np.array([[bits, 0]], np.uint32).view(np.float32)
        for dtype in DTYPES:
            message, _ = on("native", lambda: wire.half_encode(tf.constant(x), dtype))  # noqa: B023
            assert not message.any(), (hex(bits), dtype)


@needs_native
def test_shapes():
    @tf.function(input_signature=[tf.TensorSpec([2, None], tf.float32)])
    def encode(rows):
        message, errors = wire.half_encode(rows, tf.float16)
        return wire.half_decode(message, tf.float16, add=True), errors

    total, errors = on("native", lambda: encode(tf.ones([2, 6])))
    assert total.tolist() == [2.0] * 6 and errors.shape == (2, 6)
    for wrong in (tf.zeros([3]), tf.zeros([1, 3])):
        with pytest.raises((ValueError, tf.errors.InvalidArgumentError)):
            on("native", lambda: wire.half_encode(wrong, tf.float16))  # noqa: B023
