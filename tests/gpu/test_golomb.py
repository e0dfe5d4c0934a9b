"""CUDA Golomb codes: the numpy oracle's bits, and bad messages."""

import numpy as np
import pytest

from tests.gpu.codec_calls import golomb_decode, golomb_encode
from tests.gpu.codec_structs import Positions
from tests.gpu.inputs import assert_same_bits
from tests.loops import loop
from tests.oracle.positions import (
    golomb_capacity,
    golomb_decode_numpy,
    golomb_encode_numpy,
)
from tests.oracle.quantization import to_words

# Size, slots, low bits; much longer and shorter gaps are covered, too.
LAYOUTS = [
    (0, 0, 3), (1, 1, 0), (1, 0, 30), (40, 40, 0), (2000, 300, 2), (70_000, 0, 9),
    (100_000, 3000, 4), (100_000, 2500, 0), (2**32 - 1, 2100, 20), (2**32 - 1, 7, 30),
    (9000, 9000, 7),
]  # fmt: skip
SIZES, SLOTS, RICE = (tuple(x) for x in zip(*LAYOUTS, strict=True))


def make_positions(sizes, slots, seed=0, full=False):
    """Returns vectors of ascending positions, garbage after the count, and the counts."""
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
def test_codes_equal_the_oracle(device, full):
    indices, counts = make_positions(SIZES, SLOTS, int(full), full)
    layout = {"sizes": SIZES, "rice": RICE}
    message, error = golomb_encode(device, indices, counts, **layout)
    assert error is None
    assert_same_bits(message, golomb_encode_numpy(indices, counts, **layout), "message")


def test_extreme_positions(device):
    size, last = 300_000, np.array([299_999], np.int32)
    for rice in (0, 1, 5, 18):  # one run of zeros over many words
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
def test_gaps_across_tiles(device, rice):
    """Zeros and ones of a gap, or its low bits, span two words or two tiles."""
    size, slots = 2**32 - 1, 5000
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
    message[-golomb_capacity(sizes[-1], slots[-1], layout["rice"][-1]) - 1] = -1
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


AS_MANY = "as many as positions"


def make_part(count, low, ones, size, slots, rice):
    """Returns a tensor's part of a message, from low bits and positions of ones."""
    code = np.zeros((golomb_capacity(size, slots, rice), 32), np.int64)
    low_words = -(-slots * rice // 32)
    low_bits = np.asarray(low, np.int64).reshape(-1, 1) >> np.arange(rice) & 1
    code[:low_words].reshape(-1)[: low_bits.size] = low_bits.reshape(-1)
    code[low_words:].reshape(-1)[np.asarray(ones, np.int64)] = 1
    return np.concatenate([np.array([count], np.int32), to_words(code.reshape(-1))])


def test_parts_equal_the_oracle():
    for size, slots, rice in ((100, 4, 2), (5000, 40, 7), (60, 9, 0)):
        positions = np.sort(np.random.default_rng(rice).choice(size, slots, False))
        rest = np.diff(positions, prepend=-1) - 1
        ones = np.cumsum((rest >> rice) + 1) - 1
        part = make_part(slots, rest % 2**rice, ones, size, slots, rice)
        expected = golomb_encode_numpy([positions], [slots], sizes=[size], rice=[rice])
        assert_same_bits(part, expected, "part")


@loop(
    ("count", "low", "ones", "names", "must"),
    [
        (5, [], [], ("count", 1, 1, 0, 5), "in [0, 4]"),
        (5, [], range(5), ("count", 1, 1, 0, 5), "in [0, 4]"),
        (-3, [], [], ("count", 1, 1, 0, -3), "in [0, 4]"),
        (2**31 - 1, [], [31], ("count", 1, 1, 0, 2**31 - 1), "in [0, 4]"),
        (-(2**31), [], [0], ("count", 1, 1, 0, -(2**31)), "in [0, 4]"),
        (1, [], [], ("number of ones", 1, 1, 0, 0), AS_MANY),
        (4, [3, 3, 3, 3], [0, 1, 2], ("number of ones", 1, 1, 0, 3), AS_MANY),
        (0, [], [31], ("number of ones", 1, 1, 0, 1), AS_MANY),
        (3, [], [0, 1, 2, 31], ("number of ones", 1, 1, 0, 4), AS_MANY),
        (4, [], range(32), ("number of ones", 1, 1, 0, 32), AS_MANY),
        (2, [], [29, 30, 31], ("number of ones", 1, 1, 0, 3), AS_MANY),  # an index is bad, too
        (1, [], [25], ("index", 1, 1, 0, 100), "in [0, 99]"),
        (1, [3], [31], ("index", 1, 1, 0, 127), "in [0, 99]"),
        (2, [1, 2], [0, 25], ("index", 1, 1, 1, 100), "in [0, 99]"),
        (4, [3, 3, 3, 3], [0, 23, 26, 27], ("index", 1, 1, 2, 107), "in [0, 99]"),
        (4, [0, 0, 0, 3], [0, 1, 2, 27], ("index", 1, 1, 3, 102), "in [0, 99]"),
    ],
)
def test_bad_codes(device, count, low, ones, names, must):
    form = (100, 4, 2)
    layout = {"sizes": [100] * 3, "rice": [2] * 3, "slots": [4] * 3}
    good = make_part(4, [0] * 4, range(4), *form)
    rows = [[good] * 3, [good, make_part(count, low, ones, *form), good]]
    messages = np.stack([np.concatenate(row) for row in rows])
    indices, counts, error = golomb_decode(device, messages, **layout)
    assert error.names() == names and error.must_be() == must
    used = count if names[0] == "index" else 0
    assert counts.tolist() == [[4, 4, 4], [4, used, 4]]
    for i in range(3):
        assert indices[i][0].tolist() == [0, 1, 2, 3]
        assert i == 1 or indices[i][1].tolist() == [0, 1, 2, 3]
    slot = names[3] if names[0] == "index" else 0  # ascending up to the count
    bad = indices[1][1].view(np.uint32).tolist()
    assert bad[slot:] == [2**32 - 1] * (used - slot) + [0] * (4 - used)
    assert bad == sorted(bad[:used]) + [0] * (4 - used)


@loop(
    ("count", "low", "ones", "positions"),
    [
        (0, [3, 3, 3, 3], [], []),
        (1, [3, 1, 2, 3], [24], [99]),  # low bits of unused slots
        (2, [1, 1, 3, 3], [0, 25], [1, 99]),
        (4, [3, 3, 3, 0], [0, 1, 2, 3], [3, 7, 11, 12]),
    ],
)
def test_largest_positions_and_unused_low_bits(device, count, low, ones, positions):
    message = make_part(count, low, ones, 100, 4, 2)
    message[1] |= np.int32(-256)  # behind the low bits of all slots
    layout = {"sizes": [100], "rice": [2], "slots": [4]}
    indices, counts, error = golomb_decode(device, message[None], **layout)
    assert error is None and counts.tolist() == [[count]]
    assert indices[0].tolist() == [positions + [0] * (4 - count)]


def test_first_malformed_position_is_named(device):
    sizes, slots, rice = (60, 40, 500, 3000), (20, 0, 9, 3000), (0, 5, 4, 2)
    form = list(zip(sizes, slots, rice, strict=True))
    good = [make_part(k, [], range(k), n, k, b) for n, k, b in form]
    bad = {
        "count": lambda i: make_part(-1, [], [], *form[i]),
        "number of ones": lambda i: make_part(0, [], [0], *form[i]),
        "index": lambda i: make_part(1, [], [63], *form[i]),
    }
    cases = [
        {(0, 2): "index", (1, 0): "count"},
        {(1, 0): "index", (1, 2): "count", (2, 0): "count"},
        {(1, 0): "number of ones", (1, 2): "count", (2, 0): "count"},
        {(0, 2): "number of ones", (0, 3): "count"},
        {(2, 2): "index", (2, 3): "number of ones"},
        {(0, 1): "number of ones", (0, 2): "index", (1, 1): "count"},
        {(2, 1): "count", (2, 2): "number of ones"},
    ]
    for case in cases:
        rows = [list(good) for _ in range(3)]
        for (rank, tensor), field in case.items():
            rows[rank][tensor] = bad[field](tensor)
        messages = np.stack([np.concatenate(row) for row in rows])
        _, counts, error = golomb_decode(device, messages, sizes=sizes, slots=slots, rice=rice)
        (rank, tensor), field = min(case.items())
        assert error.names()[:3] == (field, rank, tensor), case
        for place, field in case.items():
            assert counts[place] == (field == "index"), case


@loop("word", [0, 255, 256, 600, -1])
def test_one_bit_of_a_bitmap_of_several_tiles(device, word):
    size, slots, rice = 41_000, 5000, 1
    positions = np.sort(np.random.default_rng(3).choice(size, slots, False))
    layout = {"sizes": [size], "rice": [rice]}
    message = golomb_encode_numpy([positions], [slots], **layout)
    at = 1 + -(-slots * rice // 32)
    bitmap = message[at:]
    assert bitmap.size > 700 and bitmap[-1] == 0
    bitmap[word] ^= 1 << 7
    more = 1 if bitmap[word] & 1 << 7 else -1
    _, counts, error = golomb_decode(device, message[None], slots=[slots], **layout)
    assert error.names() == ("number of ones", 0, 0, 0, slots + more)
    assert error.must_be() == AS_MANY and counts.tolist() == [[0]]


@pytest.mark.parametrize(
    ("size", "slots", "rice", "before", "zeros"),
    [
        (2**31 - 1, 4, 30, 0, 31),
        (2**31 - 1, 4, 30, 1, 2),
        (2**32 - 1, 9, 30, 0, 4),
        (2**32 - 1, 100_000, 30, 2, 99_999),
        (2**20, 4000, 9, 90, 5900),
        (2**20, 4000, 9, 3500, 2100),
    ],
)
def test_position_beyond_the_tensor(device, size, slots, rice, before, zeros):
    ones = [*range(before), before + zeros]
    message = make_part(before + 1, [], ones, size, slots, rice)
    layout = {"sizes": [size], "rice": [rice], "slots": [slots]}
    _, _, error = golomb_decode(device, message[None], **layout)
    assert error.names() == ("index", 0, 0, before, before + (zeros << rice))
    assert error.must_be() == f"in [0, {size - 1}]"


@loop(("rice", "skipped"), [(30, 0), (30, 2), (20, 0), (20, 900), (21, 2047), (21, 2048)])
def test_low_bits_beyond_the_tensor(device, rice, skipped):
    """Sums of more than 32 bits, in the first tile and behind it."""
    size, slots = 2**32 - 1, 6000
    low = np.where(np.arange(slots) < skipped, 0, 2**rice - 1)
    message = make_part(slots, low, range(slots), size, slots, rice)
    layout = {"sizes": [size], "rice": [rice], "slots": [slots]}
    indices, _, error = golomb_decode(device, message[None], **layout)
    positions = np.cumsum(low + 1) - 1
    slot = int(np.argmax(positions >= size))
    assert error.names() == ("index", 0, 0, slot, positions[slot])
    assert error.must_be() == f"in [0, {size - 1}]"
    expected = np.minimum(positions, 2**32 - 1).astype(np.uint32)
    assert_same_bits(indices[0], expected.view(np.int32)[None], "positions")


def test_arguments_are_checked(device):
    x = [np.zeros(4, np.int32)]
    for sizes, rice in (([3], [1]), ([-1], [1]), ([9], [31]), ([9], [-1]), ([2**32], [3]),
                        ([2**31 - 1], [0]), ([2**32 - 1], [0])):  # fmt: skip
        with pytest.raises(ValueError, match="invalid"):
            golomb_encode(device, x, [1], sizes=sizes, rice=rice)


@loop(
    ("size", "slots", "rice"),
    [
        (2**31 - 32, 4, 0), (2**32 - 1, 0, 1), (2**32 - 1, 2**31 - 33, 0),
        (2**32 - 1, 69_273_600, 30), (2**31 - 1, 2**31 - 1, 1),
    ],
)  # fmt: skip
def test_words_of_a_part(device, size, slots, rice):
    """Low bits and bitmap together are fewer than 2^26 words."""
    for more in (-32, -1, 0, 1, 32):
        tensor = Positions(size, min(slots + more, size), rice, None, None)
        if tensor.slots < 0:
            continue
        words = golomb_capacity(size, tensor.slots, rice)
        expected = -1 if words >= 2**26 else 1 + words
        assert device.library.redsync_gpu_golomb_words((Positions * 1)(tensor), 1) == expected
