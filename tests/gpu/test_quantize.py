"""CUDA quantization: the numpy oracle's bits, and bad messages."""

import numpy as np
import pytest

from tests.gpu.codec_calls import dequantize_sum, quantize
from tests.gpu.inputs import assert_same_bits, make_inputs
from tests.loops import loop
from tests.oracle.quantization import (
    SCALES,
    bucket_slices,
    dequantize_sum_numpy,
    flush,
    quantize_numpy,
)

FORMATS = [
    {"mode": "sign"}, {"mode": "two_level"}, {"mode": "threshold"},
    *({"mode": "stochastic", "levels": s} for s in (1, 3, 12, 127, 5000, 32767)),
    *({"mode": "uniform", "levels": s} for s in (1, 3, 10, 63, 65535)), {"mode": "natural"},
]  # fmt: skip
SIZES = (0, 1, 31, 32, 33, 1000, 4097, 9001)
STREAM = (7, -1, 1234)
every_format = pytest.mark.parametrize(
    "form", FORMATS, ids=lambda f: "-".join(map(str, f.values()))
)


def make_scales(sizes, form, bucket_size, seed=0):
    step = SCALES.get(form["mode"], 1)
    count = step * sum(len(bucket_slices(n, bucket_size)) for n in sizes)
    scales = np.random.default_rng(seed).gamma(2.0, size=count).astype(np.float32)
    scales[::7] = 0
    return scales * (-1) ** np.arange(count, dtype=np.float32) if step == 2 else scales


def make_messages(sizes, form, bucket_size=None, ranks=2):
    rows = []
    for rank in range(ranks):
        tensors, scales = (
            make_inputs("normal", sizes, rank)[0],
            make_scales(sizes, form, bucket_size),
        )
        rows.append(quantize_numpy(tensors, scales, **form, bucket_size=bucket_size)[0])
    return np.stack(rows)


@every_format
@loop("bucket_size", [None, 32, 96])
def test_codes_equal_the_oracle(device, form, bucket_size):
    for turn, kind in enumerate(("normal", "student_t", "ties", "zero")):
        tensors, scales = make_inputs(kind, SIZES)[0], make_scales(SIZES, form, bucket_size)
        options = {**form, "bucket_size": bucket_size, "stream": STREAM}
        message, errors = quantize_numpy(tensors, scales, **options)
        got, left, error = quantize(
            device, tensors, scales, **options, errors=turn != 1, in_place=turn == 2,
            misalign=1 if turn == 3 else 0,
        )  # fmt: skip
        assert error is None
        assert_same_bits(got, message, (kind, "message"))
        assert_same_bits(left, errors if turn != 1 else [], (kind, "errors"))


@every_format
@loop("bucket_size", [None, 96])
@loop("ranks", [0, 1, 5])
def test_sum_of_ranks(device, form, bucket_size, ranks):
    options = {**form, "bucket_size": bucket_size}
    messages = make_messages(SIZES, form, bucket_size, max(ranks, 1))[:ranks]
    if ranks == 5:
        messages[2, 0], messages[2, 1:] = 0, -1  # contributes 0, whatever its words
    shapes = [(n,) for n in SIZES]
    expected = dequantize_sum_numpy(messages, shapes, **options)
    got, error = dequantize_sum(device, messages, shapes, **options, misalign=ranks % 2)
    assert error is None
    assert_same_bits(got, expected, ranks)


def test_more_tensors_than_a_launch(device):
    sizes, form = tuple(range(0, 3000, 27)), {"mode": "stochastic", "levels": 3}
    tensors, scales = make_inputs("normal", sizes)[0], make_scales(sizes, form, None)
    message, errors = quantize_numpy(tensors, scales, **form, stream=STREAM)
    got, left, error = quantize(device, tensors, scales, **form, stream=STREAM)
    assert error is None
    assert_same_bits([got, *left], [message, *errors], "codes")
    shapes = [(n,) for n in sizes]
    totals, error = dequantize_sum(device, message[None], shapes, **form)
    assert error is None
    assert_same_bits(totals, dequantize_sum_numpy(message[None], shapes, **form), "sum")


@every_format
@loop("bad", [np.nan, np.inf, -np.inf])
def test_nonfinite_values(device, form, bad):
    sizes = (31, 5000)
    for tensor, at in ((0, 30), (1, 0), (1, 4999)):
        tensors, scales = make_inputs("normal", sizes)[0], make_scales(sizes, form, None)
        tensors[tensor][at] = bad
        message, _, error = quantize(device, tensors, scales, **form)
        assert error is None and not message.any(), (tensor, at)
    if scales.size > 0 and not bad < 0:
        scales[-1] = bad
        message, _, error = quantize(device, make_inputs("normal", sizes)[0], scales, **form)
        assert error is None and not message.any()


@pytest.mark.parametrize("x", [3.4028235e38, -3.4028235e38])
def test_rounding_to_infinity_is_not_finite(device, x):
    message, _, error = quantize(device, [np.float32([1, x])], [], mode="natural", stream=STREAM)
    assert error is None and not message.any()
    message, _, error = quantize(device, [np.float32([1, -(2.0**127)])], [], mode="natural")
    assert error is None and message.tolist() == [1, 127 * 2 + (254 * 2 + 1 << 9)]


def test_denormals_become_zero_or_the_smallest_power_of_two(device):
    x = np.random.default_rng(0).uniform(-1, 1, 500).astype(np.float32) * np.float32(2.0**-126)
    message, _ = quantize_numpy([x], [], mode="natural", stream=STREAM)
    got, left, error = quantize(device, [x], [], mode="natural", stream=STREAM)
    assert error is None
    assert_same_bits(got, message, "codes")
    assert set(np.abs(left[0])) == {0, np.float32(2.0**-126)}  # denormals are flushed here


@loop("form", FORMATS[:-1])
def test_denormals_are_zero(device, form):
    x = (make_inputs("normal", (500,))[0][0] * 1e-39).astype(np.float32)
    scales = make_scales((500,), form, 32)
    message, errors = quantize_numpy([np.copysign(flush(x), x)], scales, **form, bucket_size=32)
    got, left, error = quantize(device, [x], scales, **form, bucket_size=32)
    assert error is None
    assert_same_bits([got, *left], [message, *errors], "codes of denormals")


def test_negative_scale_is_named(device):
    sizes = (31, 200, 100)
    scales = make_scales(sizes, FORMATS[0], 32)
    scales[[5, 9]] = -2, -3
    _, _, error = quantize(device, make_inputs("normal", sizes)[0], scales, mode="sign",
                           bucket_size=32)  # fmt: skip
    assert error.names() == ("scale", -1, 1, 4, -2.0) and error.must_be() == ">= 0"


@pytest.mark.parametrize("code", [510, 511])
def test_code_of_infinity_is_named(device, code):
    message, _ = quantize_numpy([np.ones(100, np.float32)], [], mode="natural")
    bits = np.unpackbits(message[1:].view(np.uint8), bitorder="little")
    bits[9 * 70 : 9 * 71] = code >> np.arange(9) & 1
    message[1:] = np.packbits(bits, bitorder="little").view(np.int32)
    _, error = dequantize_sum(device, message[None], [(100,)], mode="natural")
    assert error.names() == ("code", 0, 0, 70, code) and error.must_be() == "in [0, 509]"


@pytest.mark.parametrize("form", [FORMATS[0], FORMATS[1], FORMATS[2], FORMATS[4]], ids=str)
def test_corrupted_message(device, form):
    sizes, options = (31, 1000), {**form, "bucket_size": 32}
    step = 2 if form["mode"] == "two_level" else 1

    def named(word, value):
        messages = make_messages(sizes, form, 32)
        messages[1, word] = value
        _, error = dequantize_sum(device, messages, [(n,) for n in sizes], **options)
        return None if error is None else error.names()

    def bits(x):
        return np.float32(x).view(np.int32)

    assert named(0, 2) == ("flag", 1, -1, 0, 2)
    assert named(0, -1) == ("flag", 1, -1, 0, -1)
    assert named(1 + 3 * step, bits(np.inf)) == ("scale", 1, 1, 2 * step, np.inf)
    field, *place, value = named(1, bits(np.nan))
    assert (field, *place) == ("scale", 1, 0, 0) and np.isnan(value)
    negative = named(1 + step, bits(-0.5))
    assert negative == (None if step == 2 else ("scale", 1, 1, 0, -0.5))
    if form["mode"] == "threshold":  # 2 bits, 16 codes in a word
        assert named(1 + 33 + 2, -1) == ("code", 1, 1, 0, 3)
        assert named(-1, 3 << 14) == ("code", 1, 1, 62 * 16 + 7, 3)
    if form["mode"] == "stochastic":  # 3 bits: code 10 begins in one word and ends in the next
        messages = make_messages(sizes, form, 32)
        at = 1 + 33 + 3
        messages[1, at] |= np.int32(-(2**30))
        messages[1, at + 1] |= 1
        _, error = dequantize_sum(device, messages, [(n,) for n in sizes], **options)
        assert error.names() == ("code", 1, 1, 10, 7) and error.must_be() == "in [0, 6]"


def test_arguments_are_checked(device):
    x = [np.zeros(40, np.float32)]
    wrong = [
        {"mode": "sign", "levels": 2}, {"mode": "stochastic", "levels": 40_000},
        {"mode": "uniform", "levels": 65_536}, {"mode": "natural", "levels": 2},
        {"mode": "sign", "bucket_size": 48}, {"mode": "sign", "bucket_size": -32},
        {"mode": "sign", "bucket_size": 2**31},
    ]  # fmt: skip
    for options in wrong:
        with pytest.raises(ValueError, match="invalid"):
            quantize(device, x, [1], **options)
