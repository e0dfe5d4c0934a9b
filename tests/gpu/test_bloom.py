"""CUDA Bloom filters: the numpy oracle's bits, and bad positions."""

import numpy as np
import pytest

from tests.gpu.codec_calls import bloom_build, bloom_query
from tests.gpu.inputs import assert_same_bits
from tests.oracle.positions import bloom_build_numpy, bloom_query_numpy

# Size, slots, words, hashes: sparse and crowded filters, and one that contains every position.
LAYOUTS = [
    (0, 0, 1, 1), (1, 1, 1, 64), (300, 20, 3, 4), (9000, 700, 200, 7), (20_000, 300, 40, 2),
    (5000, 5000, 1, 1), (50, 0, 2, 3),
]  # fmt: skip
SIZES, SLOTS, WORDS, HASHES = (tuple(x) for x in zip(*LAYOUTS, strict=True))
FILTERS = {"sizes": SIZES, "words": WORDS, "hashes": HASHES}


def make_positions(seed=0):
    """Returns positions in any order, garbage after the count, and the counts."""
    rng = np.random.default_rng(seed)
    counts = [int(rng.integers(k // 2, k + 1)) if k > 1 else k for k in SLOTS]
    indices = [np.full(k, -9, np.int32) for k in SLOTS]
    for x, count, size in zip(indices, counts, SIZES, strict=True):
        x[:count] = rng.permutation(size)[:count]
    return indices, counts


@pytest.mark.parametrize("seed", [0, 1, -1, 2**31 - 1])
def test_filters_equal_the_oracle(device, seed):
    indices, counts = make_positions(abs(seed))
    filters, error = bloom_build(device, indices, counts, seed, **FILTERS)
    assert error is None
    layout = {"words": WORDS, "hashes": HASHES}
    expected = bloom_build_numpy(indices, counts, seed, **layout)
    assert_same_bits(filters, expected, seed)


@pytest.mark.parametrize("ranks", [0, 1, 3])
def test_queries(device, ranks):
    rows = [bloom_build(device, *make_positions(r), 5, **FILTERS)[0] for r in range(max(ranks, 1))]
    filters = np.stack(rows)[:ranks]
    got = bloom_query(device, filters, 5, slots=SLOTS, **FILTERS)
    expected = bloom_query_numpy(filters, 5, slots=SLOTS, **FILTERS)
    assert_same_bits([*got[0], got[1]], [*expected[0], expected[1]], ranks)


def test_full_and_empty_filter(device):
    """A full filter contains every position, an empty one none; tiles start and end anywhere."""
    sizes, slots = [8192, 8193, 20_000, 20_000], [9000, 100, 8200, 20_001]
    layout = {"sizes": sizes, "slots": slots, "words": [1] * 4, "hashes": [3] * 4}
    indices, counts = bloom_query(device, [[-1] * 4, [0] * 4], 0, **layout)
    assert counts.tolist() == [[8192, 100, 8200, 20_000], [0] * 4]
    for x, count in zip(indices, counts[0], strict=True):
        assert (x[0, :count] == np.arange(count)).all()
        assert not x[0, count:].any() and not x[1].any()


def test_large_filter(device):
    """All bits of the hashes matter: a probe is one of 2^25 bits."""
    positions = [np.int32([0, 77, 2**20, 2**31 - 2])]
    form = {"words": [2**20], "hashes": [64]}
    filters, error = bloom_build(device, positions, [4], 9, sizes=[2**31 - 1], **form)
    assert error is None
    assert_same_bits(filters, bloom_build_numpy(positions, [4], 9, **form), "filter")


def test_more_tensors_than_a_launch(device):
    n = 90
    layout = {"sizes": [60 + i for i in range(n)], "words": [1 + i % 3 for i in range(n)],
              "hashes": [1 + i % 5 for i in range(n)]}  # fmt: skip
    indices, counts = (
        [np.arange(i % 9, dtype=np.int32) * 5 for i in range(n)],
        [i % 9 for i in range(n)],
    )
    filters, error = bloom_build(device, indices, counts, 3, **layout)
    assert error is None
    parts = {name: layout[name] for name in ("words", "hashes")}
    assert_same_bits(filters, bloom_build_numpy(indices, counts, 3, **parts), "filters")
    got = bloom_query(device, filters[None], 3, slots=[20] * n, **layout)
    expected = bloom_query_numpy(filters[None], 3, slots=[20] * n, **layout)
    assert_same_bits([*got[0], got[1]], [*expected[0], expected[1]], "positions")
    counts[n - 1] = -1
    _, error = bloom_build(device, indices, counts, 3, **layout)
    assert error.names() == ("count", -1, n - 1, 0, -1)


@pytest.mark.parametrize(
    ("where", "value", "names", "must"),
    [
        ("count", 31, ("count", -1, 1, 0, 31), "in [0, 30]"),
        ("count", -2, ("count", -1, 1, 0, -2), "in [0, 30]"),
        (7, 60, ("index", -1, 1, 7, 60), "in [0, 59]"),
        (29, -(2**31), ("index", -1, 1, 29, -(2**31)), "in [0, 59]"),
        (0, 2**31 - 1, ("index", -1, 1, 0, 2**31 - 1), "in [0, 59]"),
    ],
)
def test_bad_positions(device, where, value, names, must):
    indices, counts = [np.arange(30, dtype=np.int32) for _ in range(3)], [30] * 3
    if where == "count":
        counts[1] = value
    else:
        indices[1][where] = value
    layout = {"sizes": [60] * 3, "words": [4] * 3, "hashes": [2] * 3}
    _, error = bloom_build(device, indices, counts, 0, **layout)
    assert error.names() == names and error.must_be() == must


@pytest.mark.parametrize(
    "change", [{"sizes": [2**32]}, {"words": [0]}, {"hashes": [65]}, {"hashes": [0]}]
)
def test_arguments_are_checked(device, change):
    layout = {"sizes": [9], "slots": [3], "words": [1], "hashes": [1], **change}
    with pytest.raises(ValueError, match="invalid"):
        bloom_query(device, np.zeros((1, layout["words"][0]), np.int32), 0, **layout)
