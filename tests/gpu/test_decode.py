"""CUDA decode and descend: the numpy oracle's bits, and bad messages."""

import numpy as np
import pytest

from tests.gpu.calls import decode, descend
from tests.gpu.inputs import assert_same_bits, make_inputs
from tests.loops import loop
from tests.oracle.redsync import accumulate_and_select_numpy, decode_numpy

SIZES = (0, 1, 31, 1000, 8192, 50_000)


def make_messages(k, sizes, ranks, **form):
    rows = []
    for rank in range(ranks):
        grads, residuals, _ = make_inputs("normal", sizes, seed=rank)
        ratios = np.full(len(sizes), -1, np.float32)
        rows.append(accumulate_and_select_numpy(grads, residuals, [], k, ratios, **form)[0])
    return np.stack(rows)


@loop("quantized", [False, True])
@loop("selector", ["exact", "threshold"])
@loop("ranks", [1, 3, 150])
def test_equals_the_oracle(device, ranks, selector, quantized):
    sizes = SIZES[:4] if ranks > 100 else SIZES
    k = [min(n, max(1, n // 20)) for n in sizes]
    form = {"selectors": [selector] * len(sizes), "quantized": [quantized] * len(sizes)}
    messages, shapes = make_messages(k, sizes, ranks, **form), [(n,) for n in sizes]
    messages[0, 0] = 0 if ranks == 3 else 1  # a rank that was not finite contributes 0
    totals, error = decode(device, messages, k, shapes, **form)
    assert error is None
    assert_same_bits(totals, decode_numpy(messages, k, shapes, **form), "totals")


def test_no_ranks(device):
    totals, error = decode(device, np.zeros([0, 8], np.int32), [3], [(9,)], selectors=["exact"],
                           quantized=[False])  # fmt: skip
    assert error is None and not totals[0].any()


def test_more_tensors_than_a_launch(device):
    sizes = (40,) * 150
    form = {"selectors": ["exact"] * 150, "quantized": [i % 2 == 0 for i in range(150)]}
    messages, shapes = make_messages([3] * 150, sizes, 2, **form), [(n,) for n in sizes]
    totals, error = decode(device, messages, [3] * 150, shapes, **form)
    assert error is None
    assert_same_bits(totals, decode_numpy(messages, [3] * 150, shapes, **form), "totals")
    messages[1, -4] = 40  # the last index
    _, error = decode(device, messages, [3] * 150, shapes, **form)
    assert (error.field, error.tensor, error.slot) == (b"index", 149, 2)


@loop(
    ("word", "value", "names"),
    [
        (0, 7, (b"flag", -1, 0, 1)),
        (0, -1, (b"flag", -1, 0, 1)),
        (1, 4, (b"count", 0, 0, 3)),
        (1, -2, (b"count", 0, 0, 3)),
        (2, -5, (b"index", 0, 0, 31)),
        (4, 31, (b"index", 0, 2, 31)),
        (8, 99, (b"count", 1, 0, 10)),
        (10, 1000, (b"index", 1, 0, 1000)),
        (10, 2**31 - 1, (b"index", 1, 0, 1000)),
        (3, 0, (b"index", 0, 1, 31)),  # not ascending
        (5, 0x7FC00000, (b"value", 0, 0, 31)),  # NaN
        (7, 0x7F800000, (b"value", 0, 2, 31)),  # infinity
        (9, -0x800000, (b"mean", 1, 0, 1000)),  # minus infinity
    ],
)
def test_corrupted_message(device, word, value, names):
    sizes, k = (31, 1000), [3, 10]
    form = {"selectors": ["exact"] * 2, "quantized": [False, True]}
    messages = make_messages(k, sizes, 2, **form)
    messages[1, word] = value
    totals, error = decode(device, messages, k, [(n,) for n in sizes], **form)
    assert (error.field, error.tensor, error.slot, error.limit) == names
    assert (error.rank, error.value) == (1, value)
    assert all(np.isnan(t).all() for t in totals), "no output may be written"


def test_first_error_is_named(device):
    k, form = [100], {"selectors": ["exact"], "quantized": [False]}
    messages = make_messages(k, (20_000,), 3, **form)
    messages[2, 1] = -1
    messages[1, [60, 30, 80]] = -3
    messages[0, 0] = 0
    messages[0, 5] = -9  # not read
    _, error = decode(device, messages, k, [(20_000,)], **form)
    assert (error.field, error.rank, error.slot, error.value) == (b"index", 1, 28, -3)


def expected_descent(variable, indices, values, rate):
    expected = variable.copy()
    for i, value in zip(indices, values, strict=True):
        expected[i] -= np.float32(rate) * value
    return expected


@pytest.mark.parametrize("ranks", [1, 8, 200])
def test_descend_applies_one_entry_after_the_other(device, ranks):
    rng = np.random.default_rng(ranks)
    n, slots = 30_000, 40
    indices, values = np.zeros([ranks, slots], np.int32), np.zeros([ranks, slots], np.float32)
    for rank in range(ranks):  # the last slots are unused
        indices[rank, :30] = np.sort(rng.choice(100 if rank % 2 else n, 30, replace=False))
        values[rank, :30] = rng.normal(size=30)
    variable = rng.normal(size=n).astype(np.float32)
    arguments = (indices.reshape(-1), values.reshape(-1), 0.1)
    got, bad = descend(device, variable, *arguments)
    assert bad is None
    assert_same_bits(got, expected_descent(variable, *arguments), "variable")


def test_descend_along_unordered_entries(device):
    rng = np.random.default_rng(0)  # far more runs than the table holds
    indices = rng.integers(0, 50, 5000).astype(np.int32)
    values = rng.normal(size=5000).astype(np.float32)
    variable = np.arange(50, dtype=np.float32)
    got, bad = descend(device, variable, indices, values, 0.1)
    assert bad is None
    assert_same_bits(got, expected_descent(variable, indices, values, 0.1), "variable")


def test_descend_along_equal_neighbors(device):
    indices = np.int32([3, 3, 3, 5, 7, 7, 1, 2, 2])  # runs end between equal indices
    values = np.float32([1, 1e8, -1e8, 1, 3, 1e8, 1, 1e8, 1])
    variable = np.linspace(0, 1, 9, dtype=np.float32)
    got, bad = descend(device, variable, indices, values, 0.1)
    assert bad is None
    assert_same_bits(got, expected_descent(variable, indices, values, 0.1), "variable")


def test_descend_without_entries(device):
    variable = np.arange(3, dtype=np.float32)
    none = np.zeros(0, np.int32)
    got, bad = descend(device, variable, none, none.view(np.float32), 0.1)
    assert bad is None and (got == variable).all()


@pytest.mark.parametrize("index", [-1, 2, 2**31 - 1])
def test_descend_checks_its_indices_first(device, index):
    variable = np.float32([1, 2])
    got, bad = descend(device, variable, np.int32([0, index]), np.float32([1, 1]), 0.1)
    assert bad == (1, index) and (got == variable).all()
