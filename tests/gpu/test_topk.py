"""CUDA coded messages: the numpy oracle's words and residuals, and bad messages."""

import numpy as np
import pytest

from tests.gpu.calls import select
from tests.gpu.inputs import KINDS, assert_same_bits, make_inputs
from tests.gpu.test_fuzz import check_both, mutate
from tests.gpu.topk_calls import decode_topk, encode_topk
from tests.loops import loop
from tests.oracle.coded import GolombStreams
from tests.oracle.coded_top_k import (
    Malformed,
    decode_numpy,
    read_positions,
    read_values,
    select_and_code_numpy,
)

SIZES = (0, 1, 31, 4097, 9000, 500)
SLOTS = (0, 1, 4, 200, 4500, 250)  # densities that make several streams; one of two tiles
BITS = (1, 2, 3, 4, 16)


def selected(device, inputs, slots):
    """Returns a plain message and its residuals."""
    zero = [np.zeros_like(g) for g in inputs]
    form = {"selectors": ["exact"] * len(slots), "quantized": [False] * len(slots)}
    plain, residuals, _, _ = select(device, inputs, zero, [], slots, None, **form)
    return plain, [r.reshape(-1) for r in residuals]


def plain_numpy(messages, sizes, slots, bits):
    """Returns plain messages; raises Malformed for invalid position codes."""
    streams, rows = GolombStreams(sizes, slots), []
    for row in messages:
        chosen, words = read_positions(row[1:], streams), [row[:1]]
        values = read_values(row[1 + streams.words :], slots, bits)
        for i, k in enumerate(slots):
            index, value = np.zeros(k, np.int32), np.zeros(k, np.float32)
            n = min(k, chosen[i].size)
            index[:n], value[:n] = chosen[i][:n], values[i][:n]
            words += [np.int32([chosen[i].size]), index, value.view(np.int32)]
        rows.append(np.concatenate(words))
    return np.stack(rows)


@loop("bits", BITS)
@loop("kind", KINDS)
def test_codes_equal_the_oracle(device, kind, bits):
    inputs = make_inputs(kind, SIZES)[0]
    plain, residuals = selected(device, inputs, SLOTS)
    zero = [np.zeros_like(g) for g in inputs]
    expected = select_and_code_numpy(inputs, zero, [], SLOTS, value_bits=bits)
    message, kept = encode_topk(device, plain, residuals, SLOTS, bits)
    assert_same_bits(message, expected[0], "message")
    if expected[0][0] == 1:
        assert_same_bits(kept, [r.reshape(-1) for r in expected[1]], "residuals")
    other = np.zeros_like(message)  # of a worker with a non-finite gradient
    messages = np.stack([message, other, message])
    back, error = decode_topk(device, messages, SIZES, SLOTS, bits)
    assert error is None
    assert_same_bits(back, plain_numpy(messages, SIZES, SLOTS, bits), "plain")


@pytest.mark.parametrize("bits", [2, 16])
def test_many_tensors(device, bits):
    """More than a launch takes, in three interleaved streams."""
    sizes = [1000, 300, 90] * 40
    slots = [3, 30, 45] * 40
    inputs = make_inputs("normal", sizes)[0]
    plain, residuals = selected(device, inputs, slots)
    message, kept = encode_topk(device, plain, residuals, slots, bits)
    zero = [np.zeros_like(g) for g in inputs]
    expected = select_and_code_numpy(inputs, zero, [], slots, value_bits=bits)
    assert_same_bits(message, expected[0], "message")
    assert_same_bits(kept, expected[1], "residuals")
    back, error = decode_topk(device, message[np.newaxis], sizes, slots, bits)
    assert error is None
    assert_same_bits(back, plain_numpy(message[np.newaxis], sizes, slots, bits), "plain")


@pytest.mark.parametrize("bits", [1, 16])
def test_nonfinite_message_has_no_codes(device, bits):
    plain = np.zeros(1 + 2 * 4 + 1, np.int32)
    message, _ = encode_topk(device, plain, [np.ones(9, np.float32)], [4], bits)
    assert not message.any()


def test_values_that_the_selection_rejects(device):
    plain, residuals = selected(device, [np.float32([3.4e38, 1, 2])], [2])
    for bits in (1, 16):
        assert not encode_topk(device, plain, residuals, [2], bits)[0].any()


@pytest.mark.parametrize("bits", [1, 3, 16])
def test_any_message_is_rejected_or_decoded(device, bits):
    sizes, slots, refused = (60, 500, 1), (20, 9, 1), []
    rng = np.random.default_rng(bits)
    rows = []
    for seed in range(3):
        inputs = make_inputs("normal", sizes, seed)[0]
        zero = [np.zeros_like(g) for g in inputs]
        rows.append(select_and_code_numpy(inputs, zero, [], slots, value_bits=bits)[0])
    for _ in range(100):
        messages = mutate(rng, np.stack(rows), 2)
        plain, error = decode_topk(device, messages, sizes, slots, bits)
        try:
            expected = plain_numpy(messages, sizes, slots, bits)
        except Malformed as malformed:
            assert error is not None, f"accepts a malformed {malformed}"
            assert error.field in (b"count", b"number of ones", b"index") and error.rank in range(3)
            assert error.tensor == -1  # tensors share streams
            refused.append(True)
            continue
        assert error is None, f"rejects a valid message: {error.names()}"
        assert_same_bits(plain, expected, "plain")
        refused.append(False)
    check_both(refused)
    assert decode_numpy(np.stack(rows), [(n,) for n in sizes], slots, bits)


def test_arguments_out_of_range(device):
    x, plain = [np.ones(9, np.float32)], np.zeros(10, np.int32)
    for slots, bits in (([4], 5), ([4], 0), ([10], 1)):
        with pytest.raises(ValueError, match="invalid"):
            encode_topk(device, plain, x, slots, bits)
    for words in (4, 6):
        with pytest.raises(ValueError, match="invalid"):
            decode_topk(device, np.zeros((2, words), np.int32), [9], [4], 1)


@pytest.mark.parametrize("form", [("threshold", False), ("fixed", False), ("exact", True)])
def test_selection_that_needs_ratios_or_a_side(device, form):
    selector, quantized = form
    x = [np.ones(9, np.float32)]
    with pytest.raises(AssertionError):
        select(device, x, x, [], [4], None, selectors=[selector], quantized=[quantized])
