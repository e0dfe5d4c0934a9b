"""CUDA sparse merge: the numpy oracle's bits, and bad blocks."""

import numpy as np
import pytest

from tests.gpu.codec_calls import sparse_merge
from tests.gpu.inputs import assert_same_bits
from tests.oracle.merging import sparse_merge_numpy


def make_blocks(size, slots, ranks, seed=0, values="normal"):
    """Returns indices, values and counts of one tensor; slots beyond the count hold garbage."""
    rng = np.random.default_rng(seed)
    draw = {
        "normal": lambda: rng.normal(size=slots),
        "ties": lambda: rng.integers(-2, 3, slots),  # some sums are 0
    }[values]
    indices = [np.sort(rng.choice(size, slots, replace=False)) for _ in range(ranks)]
    counts = rng.integers(slots // 2, slots + 1, (ranks, 1))
    shape = (ranks, slots)
    rows = [draw() for _ in range(ranks)]
    indices = np.array(indices, np.int32).reshape(shape)
    indices[np.arange(slots) >= counts] = -5
    rows = np.array(rows, np.float32).reshape(shape)
    rows[np.arange(slots) >= counts] = np.nan
    return indices, rows, counts


def check(device, blocks, sizes, k, what=""):
    indices, values, counts = zip(*blocks, strict=True)
    arguments = (indices, values, np.concatenate(counts, 1))
    got, error = sparse_merge(device, *arguments, sizes=sizes, k=k)
    assert error is None
    for x, y in zip(got, sparse_merge_numpy(*arguments, sizes=sizes, k=k), strict=True):
        assert_same_bits(x, y, what)


@pytest.mark.parametrize("values", ["normal", "ties"])
@pytest.mark.parametrize("ranks", [1, 2, 7])
def test_equals_the_oracle(device, ranks, values):
    layouts = [(1, 1), (9, 9), (50, 8), (1000, 300), (100_000, 700), (5, 0)]
    for first in range(4):
        sizes = [n for n, _ in layouts]
        k = [(0, slots // 3, slots, ranks * slots + 5)[(first + i) % 4]
             for i, (_, slots) in enumerate(layouts)]  # fmt: skip
        blocks = [make_blocks(n, s, ranks, 10 * first + i, values)
                  for i, (n, s) in enumerate(layouts)]  # fmt: skip
        check(device, blocks, sizes, k, first)


def test_many_sums(device):
    check(device, [make_blocks(1 << 20, 6000, 4)], [1 << 20], [5000])
    check(device, [make_blocks(30_000, 6000, 4, 1, "ties")], [30_000], [3000])


def test_order_of_the_ranks_and_signs(device):
    # 1e8 + 1 - 1e8 is 0 only in this order; sums of 0 are removed.
    indices = np.array([[0, 3, 4], [0, 2, 4], [0, 4, 5]], np.int32)
    values = np.array([[1e8, 1, -0.0], [1, 5, 2], [-1e8, -2, -7]], np.float32)
    check(device, [(indices, values, np.full((3, 1), 3))], [6], [2])


def test_ties_go_to_the_lower_index(device):
    n = 3000
    indices = np.arange(n, dtype=np.int32)[None]
    values = np.where(np.arange(n) % 3, 0.5, -0.5).astype(np.float32)[None]
    values[0, [7, 2900]] = 3
    for k in (1, 2, 700, 2999, 3000):
        check(device, [(indices, values, np.array([[n]]))], [n], [k], k)


def test_overflow_is_the_largest(device):
    indices = np.array([[1, 2], [1, 3]], np.int32)
    values = np.array([[3e38, 1], [3e38, -3e38]], np.float32)
    with np.errstate(over="ignore"):
        check(device, [(indices, values, np.full((2, 1), 2))], [4], [1])


def test_no_ranks(device):
    empty = (np.zeros((0, 4), np.int32), np.zeros((0, 4), np.float32), np.zeros((0, 1), int))
    check(device, [empty], [9], [3])


def test_more_tensors_than_a_launch(device):
    layouts = [(100 + i, 3 + i % 40) for i in range(60)]
    blocks = [make_blocks(n, s, 3, i) for i, (n, s) in enumerate(layouts)]
    check(device, blocks, [n for n, _ in layouts], [s for _, s in layouts])


@pytest.mark.parametrize(
    ("field", "slot", "value", "names", "must"),
    [
        ("count", 0, 41, ("count", 2, 1, 0, 41), "in [0, 40]"),
        ("count", 0, -1, ("count", 2, 1, 0, -1), "in [0, 40]"),
        ("index", 3, -1, ("index", 2, 1, 3, -1), "in [0, 99]"),
        ("index", 9, 100, ("index", 2, 1, 9, 100), "in [0, 99]"),
        ("index", 9, 2**31 - 1, ("index", 2, 1, 9, 2**31 - 1), "in [0, 99]"),
        ("index", 9, 0, ("index", 2, 1, 9, 0), "ascending"),
        ("value", 5, -np.inf, ("value", 2, 1, 5, -np.inf), "finite"),
    ],
)
def test_bad_blocks(device, field, slot, value, names, must):
    blocks = [make_blocks(100, 40, 4, i) for i in range(3)]
    indices, values, counts = zip(*blocks, strict=True)
    {"index": indices[1], "value": values[1], "count": counts[1]}[field][2, slot] = value
    _, error = sparse_merge(
        device, indices, values, np.concatenate(counts, 1), sizes=[100] * 3, k=[5] * 3
    )
    assert error.names() == names and error.must_be() == must


def test_repeated_index_nan_and_first_error(device):
    indices, values, counts = make_blocks(100, 40, 4)
    indices[1, 4] = indices[1, 3]
    values[1, 4] = values[3, 2] = np.nan
    _, error = sparse_merge(device, [indices], [values], counts, sizes=[100], k=[5])
    assert error.names() == ("index", 1, 0, 4, indices[1, 3]) and error.must_be() == "ascending"
    indices[1] = np.arange(40)
    _, error = sparse_merge(device, [indices], [values], counts, sizes=[100], k=[5])
    assert error.names()[:4] == ("value", 1, 0, 4) and np.isnan(error.value)


def test_arguments_are_checked(device):
    x = np.zeros((2, 3), np.int32)
    for change in ({"sizes": [-1]}, {"sizes": [2**32]}):
        arguments = {"sizes": [9], "k": [1], **change}
        with pytest.raises(ValueError, match="invalid"):
            sparse_merge(device, [x], [x.view(np.float32)], np.zeros((2, 1)), **arguments)
