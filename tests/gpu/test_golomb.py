"""CUDA Golomb codes: the bits of the numpy oracle, and bad messages."""

import numpy as np
import pytest

from tests.gpu.codec_calls import golomb_decode, golomb_encode
from tests.gpu.inputs import assert_same_bits
from tests.loops import loop
from tests.oracle.positions import (
    golomb_bits_numpy,
    golomb_capacity,
    golomb_decode_numpy,
    golomb_encode_numpy,
)
from tests.oracle.quantization import to_words

# Size, slots, bits sent as they are; gaps much longer and shorter than these suit, too.
LAYOUTS = [
    (0, 0, 3), (1, 1, 0), (1, 0, 30), (40, 40, 0), (2000, 300, 2), (70_000, 0, 9),
    (100_000, 3000, 4), (100_000, 2500, 0), (2**32 - 1, 2100, 20), (2**32 - 1, 7, 30),
    (9000, 9000, 7),
]  # fmt: skip
SIZES, SLOTS, RICE = (tuple(x) for x in zip(*LAYOUTS, strict=True))


def make_positions(sizes, slots, seed=0, full=False):
    """Vectors of ascending positions, garbage after the count, and the counts."""
    rng = np.random.default_rng(seed)
    indices, counts = [], []
    for size, k in zip(sizes, slots, strict=True):
        count = k if full or k < 3 else int(rng.integers(k // 2, k + 1))
        chosen = np.unique(rng.integers(0, size, 2 * count)) if k < size // 9 else np.arange(size)
        chosen = np.sort(rng.permutation(chosen)[:count])
        indices.append(np.full(k, -9, np.int32))
        indices[-1][: chosen.size] = chosen.astype(np.uint32).view(np.int32)
        counts.append(chosen.size)
    return indices, counts


@pytest.mark.parametrize("full", [False, True])
def test_codes_are_the_oracle_s(device, full):
    indices, counts = make_positions(SIZES, SLOTS, int(full), full)
    layout = {"sizes": SIZES, "rice": RICE}
    message, error = golomb_encode(device, indices, counts, **layout)
    assert error is None
    assert_same_bits(message, golomb_encode_numpy(indices, counts, **layout), "message")


def test_extreme_positions(device):
    size, last = 300_000, np.array([299_999], np.int32)
    for rice in (0, 1, 5, 18):  # one run of ones over many words
        layout = {"sizes": [size, size], "rice": [rice] * 2}
        both = [last, np.array([0, 299_999, 0], np.int32)]
        message, error = golomb_encode(device, both, [1, 2], **layout)
        assert error is None
        assert_same_bits(message, golomb_encode_numpy(both, [1, 2], **layout), rice)
        indices, counts, error = golomb_decode(device, message[None], slots=[1, 3], **layout)
        assert error is None and counts.tolist() == [[1, 2]]
        assert indices[0].tolist() == [[299_999]] and indices[1].tolist() == [[0, 299_999, 0]]


@pytest.mark.parametrize("ranks", [0, 1, 4])
def test_decoding(device, ranks):
    layout = {"sizes": SIZES, "rice": RICE}
    rows = [golomb_encode_numpy(*make_positions(SIZES, SLOTS, r, r == 1), **layout)
            for r in range(max(ranks, 1))]  # fmt: skip
    messages = np.stack(rows)[:ranks]
    indices, counts, error = golomb_decode(device, messages, slots=SLOTS, **layout)
    assert error is None
    expected = golomb_decode_numpy(messages, slots=SLOTS, **layout)
    assert_same_bits([*indices, counts], [*expected[0], expected[1]], ranks)


@loop("rice", range(0, 31, 3))
def test_states_across_chunks(device, rice):
    # Whatever the state at the end of a chunk: gaps of about as many bits as a code has.
    size, slots = 2**32 - 1, 400
    rng = np.random.default_rng(rice)
    rest = rng.integers(0, 3 << rice, slots)
    positions = np.cumsum(np.minimum(rest, (size - slots) // slots) + 1) - 1
    words = positions.astype(np.uint32).view(np.int32)
    layout = {"sizes": [size], "rice": [rice]}
    if golomb_capacity(size, slots, rice) > 2**16:  # a message of a reasonable length
        layout["sizes"] = [int(positions[-1]) + 1]
    message, error = golomb_encode(device, [words], [slots], **layout)
    assert error is None
    assert_same_bits(message, golomb_encode_numpy([positions], [slots], **layout), "message")
    indices, counts, error = golomb_decode(device, message[None], slots=[slots], **layout)
    assert error is None and counts.tolist() == [[slots]]
    assert_same_bits(indices[0], words[None], rice)


def test_more_tensors_than_a_launch(device):
    sizes, slots = [50 + 7 * i for i in range(110)], [i % 50 for i in range(110)]
    layout = {"sizes": sizes, "rice": [i % 6 for i in range(110)]}
    indices, counts = make_positions(sizes, slots)
    message, error = golomb_encode(device, indices, counts, **layout)
    assert error is None
    assert_same_bits(message, golomb_encode_numpy(indices, counts, **layout), "message")
    found, got, error = golomb_decode(device, message[None], slots=slots, **layout)
    assert error is None and got.tolist() == [counts]
    expected = golomb_decode_numpy(message[None], slots=slots, **layout)[0]
    assert_same_bits(found, expected, "positions")
    message[-golomb_capacity(sizes[-1], slots[-1], layout["rice"][-1]) - 2] = -1
    assert golomb_decode(device, message[None], slots=slots, **layout)[2].names()[:3] == (
        "count", 0, 109,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("where", "value", "names", "must"),
    [
        ("count", 21, ("count", -1, 1, 0, 21), "in [0, 20]"),
        ("count", -1, ("count", -1, 1, 0, -1), "in [0, 20]"),
        (0, -1, ("index", -1, 1, 0, -1), "in [0, 59]"),
        (9, 60, ("index", -1, 1, 9, 60), "in [0, 59]"),
        (9, 2**31 - 1, ("index", -1, 1, 9, 2**31 - 1), "in [0, 59]"),
        (9, -(2**31), ("index", -1, 1, 9, -(2**31)), "in [0, 59]"),
        (9, 2, ("index", -1, 1, 9, 2), "ascending"),
    ],
)
def test_bad_positions(device, where, value, names, must):
    indices, counts = [np.arange(20, dtype=np.int32) for _ in range(3)], [20] * 3
    if where == "count":
        counts[1] = value
    else:
        indices[1][where] = value
    _, error = golomb_encode(device, indices, counts, sizes=[60] * 3, rice=[1] * 3)
    assert error.names() == names and error.must_be() == must


@loop(
    ("bits", "count", "length", "names", "must"),
    [
        ([], 5, 0, ("count", 1, 1, 0, 5), "in [0, 4]"),
        ([], -3, 0, ("count", 1, 1, 0, -3), "in [0, 4]"),
        ([], 1, 97, ("bits", 1, 1, 0, 97), "in [0, 64]"),
        ([], 1, -1, ("bits", 1, 1, 0, -1), "in [0, 64]"),
        ([], 1, 0, ("bits", 1, 1, 0, 0), "enough for all codes"),
        ([0, 0, 1, 0], 2, 4, ("bits", 1, 1, 1, 4), "enough for all codes"),  # low bits are missing
        ([0, 0, 1, 1, 1], 2, 5, ("bits", 1, 1, 1, 5), "enough for all codes"),  # no zero
        ([0, 0, 1, 1], 1, 4, ("bits", 1, 1, 1, 4), "used up by the codes"),  # ones are left
        ([0, 0, 1, 0, 1, 0], 1, 6, ("bits", 1, 1, 1, 6), "used up by the codes"),
        ([], 0, 5, ("bits", 1, 1, 0, 5), "used up by the codes"),
        ([1] * 60 + [0, 1, 1], 1, 63, ("index", 1, 1, 0, 243), "in [0, 99]"),
        ([0, 1, 0] + [1] * 24 + [0, 1, 0], 2, 30, (), None),
        ([0, 1, 0] + [1] * 25 + [0, 1, 0], 2, 31, ("index", 1, 1, 1, 103), "in [0, 99]"),
    ],
)
def test_bad_codes(device, bits, count, length, names, must):
    layout = {"sizes": [100] * 3, "rice": [2] * 3}
    slots = [4] * 3
    words = golomb_capacity(100, 4, 2)
    good = golomb_encode_numpy([np.arange(4)] * 3, [4] * 3, **layout)
    messages, at = np.stack([good] * 2), 2 + words
    code = np.zeros(32 * words, np.uint8)
    code[: len(bits)] = bits
    messages[1, at : at + 2] = count, length
    messages[1, at + 2 : at + 2 + words] = np.packbits(code, bitorder="little").view(np.int32)
    indices, _, error = golomb_decode(device, messages, slots=slots, **layout)
    if must is None:  # the largest that fits
        assert error is None and indices[1][1].tolist() == [1, 99, 0, 0]
    else:
        assert error.names() == names and error.must_be() == must


@pytest.mark.parametrize(
    ("size", "slots", "rice", "before", "ones"),
    [
        (2**31 - 1, 4, 30, 0, 60),
        (2**31 - 1, 4, 30, 1, 2),
        (2**32 - 1, 9, 30, 0, 4),
        (2**20, 4000, 9, 90, 20_000),
    ],
)
def test_a_position_beyond_all_bounds(device, size, slots, rice, before, ones):
    bits = golomb_bits_numpy(range(before), rice) + [1] * ones + [0] * (1 + rice)
    words = golomb_capacity(size, slots, rice)
    code = np.concatenate([to_words(bits), np.zeros(words, np.int32)])[:words]
    message = np.concatenate([np.array([before + 1, len(bits)], np.int32), code])
    layout = {"sizes": [size], "rice": [rice], "slots": [slots]}
    _, _, error = golomb_decode(device, message[None], **layout)
    assert error.names() == ("index", 0, 0, before, before + (ones << rice))
    assert error.must_be() == f"in [0, {size - 1}]"


def test_arguments_are_checked(device):
    x = [np.zeros(4, np.int32)]
    for sizes, rice in (([3], [1]), ([-1], [1]), ([9], [31]), ([9], [-1]), ([2**32], [3]),
                        ([2**31 - 1], [0]), ([2**32 - 1], [0])):  # fmt: skip
        with pytest.raises(ValueError, match="invalid"):
            golomb_encode(device, x, [1], sizes=sizes, rice=rice)
