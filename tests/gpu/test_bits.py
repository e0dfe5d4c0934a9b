"""CUDA packed bits and Rice codes: the numpy oracle's words, and bad input."""

import numpy as np
import pytest

from tests.gpu import bit_calls as calls
from tests.gpu.test_fuzz import check, check_both, mutate
from tests.loops import loop
from tests.oracle import bits as oracle

COUNTS = (0, 1, 31, 32, 33, 100, 3000)  # number of codes; the last fills several blocks
INT32 = np.iinfo(np.int32)


def random_words(shape, seed=0):
    return np.random.default_rng(seed).integers(INT32.min, INT32.max + 1, shape).astype(np.int32)


def skewed(rng, count):
    """Returns numbers near zero, and a few large ones."""
    numbers = np.rint(rng.standard_t(2, count) * 3)
    return np.clip(numbers, -400, 400).astype(np.int32)


@loop("width", [0, 1, 2, 3, 5, 8, 13, 16, 17, 31, 32])
def test_codes_of_every_width(device, width):
    """High bits of the codes are ignored; so are those of the last word."""
    for count in COUNTS:
        for rows in ((0,), (1,), (2, 3)):
            codes = random_words((*rows, count), width)
            words = oracle.pack_numpy(codes, width)
            np.testing.assert_array_equal(calls.pack(device, codes, width), words)
        words = random_words((3, words.shape[-1]), count)
        expected = oracle.unpack_numpy(words, width, count)
        np.testing.assert_array_equal(calls.unpack(device, words, width, count), expected)


def test_codes_of_varying_lengths(device):
    rng = np.random.default_rng(0)
    for count in COUNTS:
        codes = rng.integers(-(2**63), 2**63, count)
        lengths = rng.integers(0, 33, count)
        full = -(-int(lengths.sum()) // 32)
        for words in {0, 1, full // 2, full, full + 300}:
            got, error = calls.write(device, codes, lengths, words)
            assert error is None
            np.testing.assert_array_equal(got, oracle.write_numpy(codes, lengths, words))


@pytest.mark.parametrize("length", [33, -1, INT32.min])
def test_invalid_code_length(device, length):
    lengths = np.full(3000, 7, np.int32)
    lengths[[1500, 2999]] = length
    _, error = calls.write(device, np.arange(3000), lengths, 20)
    assert error.names() == ("length", -1, -1, 1500, length) and error.must_be() == "in [0, 32]"


def test_bitmaps(device):
    rng = np.random.default_rng(1)
    for words in (1, 7, 900):
        for count in (0, 1, 20, 32 * words):
            positions = np.sort(rng.choice(32 * words, min(count, 32 * words), False))
            slots = np.concatenate([positions, np.full(5, -1)]).astype(np.int32)
            got, error = calls.bitmap(device, slots, positions.size, words)
            assert error is None
            np.testing.assert_array_equal(got, oracle.bitmap_numpy(slots, positions.size, words))
    got, error = calls.bitmap(device, [], 0, 0)
    assert error is None and got.size == 0


@pytest.mark.parametrize(
    ("positions", "count", "names", "rule"),
    [
        ([1, 2], 3, ("count", -1, -1, 0, 3), "in [0, 2]"),
        ([1, 2], -1, ("count", -1, -1, 0, -1), "in [0, 2]"),
        ([3, 3], 2, ("index", -1, -1, 1, 3), "ascending"),
        ([5, 3, 1], 3, ("index", -1, -1, 1, 3), "ascending"),
        ([3, 64], 2, ("index", -1, -1, 1, 64), "in [0, 63]"),
        ([-4, 5], 2, ("index", -1, -1, 0, -4), "in [0, 63]"),
    ],
)
def test_invalid_bitmap_positions(device, positions, count, names, rule):
    _, error = calls.bitmap(device, positions, count, 2)
    assert error.names() == names and error.must_be() == rule


def test_positions_of_set_bits(device):
    rng = np.random.default_rng(2)
    for rows, size in ((0, 3), (1, 0), (2, 1), (3, 255), (2, 256), (2, 5000)):
        for share in (0.0, 0.01, 1.0):
            words = np.where(rng.random((rows, size)) < share, random_words((rows, size), size), 0)
            most = int(oracle.set_bits_numpy(words, 0)[1].max(initial=0))
            for slots in {0, 1, most // 2, most, most + 700}:
                got = calls.set_bits(device, words, slots)
                for x, y in zip(got, oracle.set_bits_numpy(words, slots), strict=True):
                    np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("rice", [0, 1, 3, 8, 30])
def test_rice_codes(device, rice):
    rng = np.random.default_rng(rice)
    for count in COUNTS:
        numbers = skewed(rng, count) if rice < 30 else random_words(count, 3)
        zigzag = np.where(
            numbers < 0, ~(2 * numbers.astype(np.int64)), 2 * numbers.astype(np.int64)
        )
        bits = int((zigzag >> rice).sum()) + count
        for words in {-(-bits // 32), bits // 32 + 40}:
            code, error = calls.rice_encode(device, numbers, rice, words)
            assert error is None
            np.testing.assert_array_equal(code, oracle.rice_encode_numpy(numbers, rice, words))
            rows = np.stack([code, np.zeros_like(code), code])
            back, error = calls.rice_decode(device, rows, rice, words, count)
            assert error is None
            np.testing.assert_array_equal(back, np.stack([numbers, 0 * numbers, numbers]))


@pytest.mark.parametrize("rice", [0, 30])
def test_numbers_beyond_the_capacity(device, rice):
    """The error names the first number that does not fit, however large the sums become."""
    numbers = np.full(3000, INT32.min)
    numbers[:200] = 0
    words = 10
    first = 200 if rice == 0 else 200 + (320 - 200) // 4  # ones of 3 zeros and a one
    end = 200 + 2**32 if rice == 0 else 200 + 4 * (first - 200 + 1)
    _, error = calls.rice_encode(device, numbers, rice, words)
    assert error.names() == ("length", -1, -1, first, end)
    assert error.must_be() == "in [0, 320]"


def test_codes_that_no_encoder_writes(device):
    numbers = np.zeros(40, np.int32)
    code = oracle.rice_encode_numpy(numbers, 4, 3)
    more = code.copy()
    more[-1] |= 1 << 30
    _, error = calls.rice_decode(device, np.stack([code, more, more]), 4, 3, 40)
    assert error.names() == ("number of ones", 1, -1, 0, 41)
    assert error.must_be() == "0, or one for each number"
    far = np.zeros(1 + 40, np.int32)
    far[-1] = INT32.min  # 40 * 32 - 1 zeros with 30 low bits
    _, error = calls.rice_decode(device, far[np.newaxis], 30, 40, 1)
    assert error.names() == ("number of zeros", 0, -1, 0, 40 * 32 - 1)
    assert error.must_be() == "in [0, 3]"


@pytest.mark.parametrize("rice", [0, 2, 30])
def test_any_code_is_rejected_or_decoded(device, rice):
    refused = []
    for seed in range(60):
        rng = np.random.default_rng(seed)
        count = int(rng.integers(1, 40))
        numbers = rng.integers(-40, 40, (3, count))
        words = 120 if rice == 0 else 45
        codes = np.stack([oracle.rice_encode_numpy(row, rice, words) for row in numbers])
        if rng.random() < 0.5:
            codes[:, : -(-count * rice // 32)] = mutate(rng, codes)[:, : -(-count * rice // 32)]
        else:
            codes = mutate(rng, codes, 2)
        got, error = calls.rice_decode(device, codes, rice, words, count)
        expected = lambda: oracle.rice_decode_numpy(codes, rice, words, count)  # noqa: B023, E731
        refused.append(check(got, error, expected, ("number of ones", "number of zeros")))
    check_both(refused)


def test_arguments_out_of_range(device):
    one = np.zeros((1, 4), np.int32)
    for bad in (
        lambda: calls.pack(device, one, 33),
        lambda: calls.rice_encode(device, one[0], 31, 4),
        lambda: calls.rice_encode(device, one[0], 3, -1),
        lambda: calls.rice_decode(device, one, 31, 2, 4),
        lambda: calls.rice_decode(device, one, 3, 2**26 + 1, 4),
        lambda: calls.set_bits(device, np.zeros((0, 2**26), np.int32), 4),
    ):
        with pytest.raises(ValueError, match="invalid"):
            bad()
