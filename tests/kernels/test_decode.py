"""decode: native, reference and numpy oracle give equal bits, and reject the same messages."""

import numpy as np
import pytest
import tensorflow as tf

from tests.kernels.common import (
    SIZES,
    assert_same_bits,
    decode,
    make_inputs,
    make_k,
    needs_native,
    select,
)
from tests.loops import loop
from tests.oracle.redsync import decode_numpy

BACKENDS = ("native", "tensorflow")


def make_messages(k, sizes, ranks: int, **options):
    rows = []
    for rank in range(ranks):
        inputs = make_inputs("normal", sizes, seed=rank)
        rows.append(select("tensorflow", inputs, k, [-1.0] * len(sizes), **options).message)
    return np.stack(rows)


@needs_native
@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("selector", ["exact", "threshold"])
@pytest.mark.parametrize("ranks", [1, 3])
def test_backends_and_oracle_agree(ranks, selector, quantized):
    sizes = (*SIZES, 150_000)  # several shards
    k = make_k(sizes, first=1)
    options = {"selectors": [selector] * len(sizes), "quantized": [quantized] * len(sizes)}
    messages = make_messages(k, sizes, ranks, **options)
    like = [np.full(n, np.nan, np.float32) for n in sizes]  # shapes only
    expected = decode_numpy(messages, k, [(n,) for n in sizes], **options)
    for backend in BACKENDS:
        assert_same_bits(decode(backend, messages, k, like, **options), expected, backend)


@needs_native
def test_flag_zero_contributes_nothing():
    sizes, k = (1000, 31), [10, 3]
    options = {"selectors": ["exact"] * 2, "quantized": [False, True]}
    messages = make_messages(k, sizes, 2, **options)
    messages[1, 1:] = 123456789  # must not be read
    messages[1, 0] = 0
    like = [np.zeros(n, np.float32) for n in sizes]
    for backend in BACKENDS:
        both = decode(backend, messages, k, like, **options)
        assert_same_bits(both, decode(backend, messages[:1], k, like, **options), backend)


@needs_native
@pytest.mark.parametrize("backend", BACKENDS)
@loop(
    ("word", "value", "names"),
    [
        (0, 7, ["flag", "7"]),
        (0, -1, ["flag", "-1"]),
        (1, 4, ["count", "tensor 0", "4"]),
        (1, -2, ["count", "tensor 0", "-2"]),
        (2, -5, ["index", "tensor 0", "-5"]),
        (4, 31, ["index", "tensor 0", "31"]),
        (8, 99, ["count", "tensor 1", "99"]),
        (10, 1000, ["index", "tensor 1", "1000"]),
        (3, 0, ["index", "tensor 0", "0"]),  # not ascending
        (5, 0x7FC00000, ["value", "tensor 0", str(0x7FC00000)]),  # NaN
        (6, 0x7F800000, ["value", "tensor 0", str(0x7F800000)]),  # infinity
        (9, -0x800000, ["mean", "tensor 1", str(-0x800000)]),  # minus infinity
    ],
)
def test_corrupted_message(backend, word, value, names):
    sizes, k = (31, 1000), [3, 10]
    options = {"selectors": ["exact"] * 2, "quantized": [False, True]}
    messages = make_messages(k, sizes, 2, **options)
    messages[1, word] = value
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        decode(backend, messages, k, [np.zeros(n, np.float32) for n in sizes], **options)
    for name in names:
        assert name in str(caught.value)


@needs_native
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("words", [-1, 1])
def test_wrong_length(backend, words):
    sizes, k = (31,), [3]
    options = {"selectors": ["exact"], "quantized": [False]}
    messages = make_messages(k, sizes, 2, **options)
    messages = messages[:, :-1] if words < 0 else np.pad(messages, [(0, 0), (0, 1)])
    match = r"(?s)`messages` must.*\b8\b"
    with pytest.raises((tf.errors.InvalidArgumentError, ValueError), match=match):
        decode(backend, messages, k, [np.zeros(31, np.float32)], **options)
