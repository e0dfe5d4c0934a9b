"""Every decoder on mutated and random messages.

A decoder raises InvalidArgument that names a field if the oracle finds the message malformed.
Otherwise it returns the oracle's result. This holds for native ops and in TensorFlow.

FUZZ_EXAMPLES=2000 in the environment runs more, random examples.
"""

import functools
import os

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.deep import DEEP
from tests.kernels.common import make_inputs, needs_native, on
from tests.oracle.bits import bitmap_numpy, rice_decode_numpy, rice_encode_numpy, write_numpy
from tests.oracle.coded_top_k import decode_numpy as decode_coded_numpy
from tests.oracle.coded_top_k import select_and_code_numpy
from tests.oracle.merging import sparse_merge_numpy
from tests.oracle.positions import (
    bloom_query_numpy,
    golomb_decode_numpy,
    golomb_encode_numpy,
)
from tests.oracle.quantization import (
    FORMATS,
    Malformed,
    dequantize_sum_numpy,
    flush,
    quantize_numpy,
)
from tests.oracle.redsync import accumulate_and_select_numpy
from tf_redsync import ops
from tf_redsync.methods.common import coded_selection
from tf_redsync.ops import bits, codecs

EXAMPLES = os.environ.get("FUZZ_EXAMPLES")
RANKS = 3
FLOATS = [np.nan, -np.nan, np.inf, -np.inf, -0.0, 0.0, 1.0, -1.5, 1e-42, -1e-42, 3e38, -3e38]
fuzz = settings(
    max_examples=int(EXAMPLES or (150 if DEEP else 60)), derandomize=not EXAMPLES,
    database=None, deadline=None,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip

words = st.one_of(
    st.integers(-(2**31), 2**31 - 1),
    st.integers(-3, 70),
    st.sampled_from([int(np.float32(x).view(np.int32)) for x in FLOATS]),
)
mutations = st.lists(st.tuples(st.integers(0, 2**20), st.booleans(), words), max_size=5)
seeds = st.integers(0, 3)


def mutate(messages: np.ndarray, changes) -> np.ndarray:
    """Overwrites words, or inverts some of their bits."""
    messages = np.array(messages, np.int32)
    flat = messages.reshape(-1)
    for at, invert, word in changes:
        place = at % flat.size
        flat[place] = flat[place] ^ np.int32(word) if invert else word
    return messages


def check(run, oracle, fields: tuple[str, ...], backends=("native", "tensorflow")) -> None:
    with np.errstate(all="ignore"):
        try:
            expected = tf.nest.flatten(oracle())
        except Malformed:
            expected = None
    for backend in backends:
        try:
            got = tf.nest.flatten(on(backend, run))
        except tf.errors.InvalidArgumentError as error:
            text = str(error)
            assert expected is None, f"{backend} rejects a valid message: {text}"
            assert any(f"invalid {field}" in text for field in fields), text
            continue
        assert expected is not None, f"{backend} accepts a malformed message"
        for x, y in zip(got, expected, strict=True):
            assert x.shape == y.shape and x.dtype == y.dtype
            # TensorFlow flushes denormal intermediate results, numpy does not.
            np.testing.assert_allclose(x, y, rtol=0, atol=1e-36, err_msg=backend)


# ------------------------------------------------------------------------------------- decode

SIZES, K = (0, 1, 30, 90), np.array([0, 1, 5, 9])
LAYOUT = {"selectors": ["exact", "exact", "threshold", "fixed"], "quantized": [False, True] * 2}


def decode_checked(messages):
    """Returns the result that `decode` guarantees for messages that may be malformed."""
    totals = [np.zeros(n, np.float32) for n in SIZES]
    for row in messages:
        if row[0] not in (0, 1):
            raise Malformed("flag")
        at = 1
        for total, k, one_mean in zip(totals, K, LAYOUT["quantized"], strict=True):
            slots, count = int(k), row[at]
            start = at + (2 if one_mean else 1)
            values = row[at + 1 : at + 2] if one_mean else row[start + slots : start + 2 * slots]
            at = start + (1 if one_mean else 2) * slots
            if row[0] == 0:
                continue
            if not 0 <= count <= slots:
                raise Malformed("count")
            index = row[start : start + count]
            if ((index < 0) | (index >= total.size)).any() or (np.diff(index) <= 0).any():
                raise Malformed("index")
            values = values.view(np.float32)[: 1 if one_mean else count]
            if not np.isfinite(values).all():
                raise Malformed("mean" if one_mean else "value")
            total[index] += values
    return totals


@needs_native
@fuzz
@given(seeds, mutations)
def test_decode(seed, changes):
    rows = []
    for rank in range(RANKS):
        inputs = make_inputs("normal", SIZES, seed=10 * seed + rank)
        ratios = np.array([-1, -1, -1, 0.5], np.float32)
        rows.append(accumulate_and_select_numpy(*inputs[:2], [], K, ratios, **LAYOUT)[0])
    messages = mutate(np.stack(rows), changes)
    like = [np.zeros(n, np.float32) for n in SIZES]
    layout = ops.MessageLayout.of(K, LAYOUT["quantized"])
    check(
        lambda: ops.decode(messages, layout, like),
        lambda: decode_checked(messages), ("flag", "count", "index", "value", "mean"),
    )  # fmt: skip


# ------------------------------------------------------------------------------- quantization


@needs_native
@fuzz
@given(seeds, st.sampled_from(FORMATS), mutations)
def test_dequantize_sum(seed, form, changes):
    mode, levels, bucket_size = form
    options = {"mode": mode, "levels": levels, "bucket_size": bucket_size}
    sizes, rows = (0, 33, 100), []
    for rank in range(RANKS):
        rng = np.random.default_rng(10 * seed + rank)
        scales = rng.random(sum(codecs.quantized_scales(sizes, mode, bucket_size)))
        tensors = [rng.normal(size=n) for n in sizes]
        rows.append(quantize_numpy(tensors, scales, **options, stream=(rank, 0, 0))[0])
    messages = mutate(np.stack(rows), changes)
    like = [np.zeros(n, np.float32) for n in sizes]
    check(
        lambda: codecs.dequantize_sum(messages, like, **options),
        lambda: dequantize_sum_numpy(messages, [(n,) for n in sizes], **options),
        ("flag", "scale", "code"),
    )  # fmt: skip


# ---------------------------------------------------------------------------------- positions


@needs_native
@fuzz
@given(seeds, st.sampled_from([0, 1, 4]), mutations)
def test_golomb_decode(seed, rice, changes):
    sizes, slots, rows = (0, 1, 60, 500), (0, 1, 20, 9), []
    layout = {"sizes": sizes, "rice": [rice] * 4}
    for rank in range(RANKS):
        rng = np.random.default_rng(10 * seed + rank)
        chosen = [np.sort(rng.choice(n, s, False)) for n, s in zip(sizes, slots, strict=True)]
        counts = [rng.integers(0, s + 1) for s in slots]
        rows.append(golomb_encode_numpy(chosen, counts, **layout))
    messages = mutate(np.stack(rows), changes)
    check(
        lambda: codecs.golomb_decode(messages, slots=slots, **layout),
        lambda: golomb_decode_numpy(messages, slots=slots, **layout),
        ("count", "number of ones", "index"),
    )  # fmt: skip


@pytest.mark.deep
@needs_native
@fuzz
@given(seeds, st.sampled_from([1, 3, 16]), mutations)
def test_coded_message(seed, value_bits, changes):
    sizes, k, rows = (0, 1, 60, 500), [0, 1, 20, 9], []
    for rank in range(RANKS):
        grads, residuals, _ = make_inputs("normal", sizes, seed=10 * seed + rank)
        rows.append(select_and_code_numpy(grads, residuals, [], k, value_bits=value_bits)[0])
    messages = mutate(np.stack(rows), changes)
    check(
        lambda: coded_sums(ops.backend(), value_bits, sizes, tuple(k))(messages),
        lambda: decode_coded_numpy(messages, [(n,) for n in sizes], k, value_bits),
        ("flag", "count", "number of ones", "bits", "index", "value"),
        # Tracing the reference takes seconds.
        ("native", "tensorflow") if value_bits == 3 or DEEP or EXAMPLES else ("native",),
    )  # fmt: skip


@functools.cache
def coded_sums(backend, value_bits, sizes, k):
    """Returns the decoder as a graph on `backend`: eager mode takes ten times as long."""
    like = [tf.zeros([n]) for n in sizes]

    @tf.function(input_signature=[tf.TensorSpec([RANKS, None], tf.int32)])
    def sums(messages):
        layout = ops.MessageLayout.of(k)
        return ops.decode(
            coded_selection.uncode_messages(messages, like, layout, value_bits), layout, like
        )

    return sums


@needs_native
@fuzz
@given(st.lists(words, min_size=2 * 7, max_size=2 * 7), words, st.integers(1, 9))
def test_bloom_query(filters, seed, hashes):
    filters = np.array(filters, np.int32).reshape(2, 7)
    layout = {
        "sizes": (0, 40, 200), "slots": (0, 10, 50), "words": (1, 2, 4),
        "hashes": (1, hashes, 2),
    }  # fmt: skip
    check(
        lambda: codecs.bloom_query(filters, seed, **layout),
        lambda: bloom_query_numpy(filters, seed, **layout), (),
    )  # fmt: skip


# ------------------------------------------------------------------------------- bits in words


@needs_native
@fuzz
@given(seeds, st.integers(0, 12), mutations)
def test_rice_decode(seed, rice, changes):
    form, rows = {"rice": rice, "bitmap_words": 7}, []
    for rank in range(RANKS):
        rng = np.random.default_rng(10 * seed + rank)
        rows.append(rice_encode_numpy(rng.integers(-4, 4, 20), **form))
    codes = mutate(np.stack(rows), changes)
    check(
        lambda: codecs.rice_decode(codes, **form, count=20),
        lambda: rice_decode_numpy(codes, **form, count=20), ("number of ones", "number of zeros"),
    )  # fmt: skip


@needs_native
@fuzz
@given(st.lists(words, max_size=9), st.integers(0, 30), st.integers(0, 5))
def test_rice_encode(numbers, rice, bitmap_words):
    form = {"rice": rice, "bitmap_words": bitmap_words}
    numbers = np.array(numbers, np.int32)
    check(
        lambda: codecs.rice_encode(numbers, **form), lambda: rice_encode_numpy(numbers, **form),
        ("length",),
    )  # fmt: skip


@needs_native
@fuzz
@given(seeds, st.integers(-1, 9), mutations)
def test_bitmap(seed, count, changes):
    positions = np.sort(np.random.default_rng(seed).choice(64, 8, False))
    positions = mutate(positions, changes)
    check(
        lambda: bits.bitmap(positions, count, 2), lambda: bitmap_numpy(positions, count, 2),
        ("count", "index"),
    )  # fmt: skip


@needs_native
@fuzz
@given(st.lists(st.tuples(words, st.integers(-1, 33)), max_size=9), st.integers(0, 9))
def test_written(fields, size):
    codes = np.array([code for code, _ in fields], np.int64)
    lengths = np.array([length for _, length in fields], np.int32)
    check(
        lambda: bits.written(codes, lengths, size), lambda: write_numpy(codes, lengths, size),
        ("length",),
    )  # fmt: skip


# -------------------------------------------------------------------------------------- merge


@needs_native
@fuzz
@given(seeds, st.sampled_from([0, 4, 100]), mutations, mutations, mutations)
def test_sparse_merge(seed, k, of_indices, of_values, of_counts):
    rng = np.random.default_rng(seed)
    indices = np.stack([np.sort(rng.choice(50, 8, False)) for _ in range(RANKS)])
    values = rng.integers(-3, 4, (RANKS, 8)).astype(np.float32)
    indices = mutate(indices, of_indices[:2])
    values = mutate(values.view(np.int32), of_values).view(np.float32)
    counts = mutate(rng.integers(5, 9, (RANKS, 1)), of_counts[:2])
    sizes, k = [50], [k]
    check(
        lambda: tuple(codecs.sparse_merge([indices], [values], counts, sizes=sizes, k=k)),
        lambda: sparse_merge_numpy([indices], [values], counts, sizes=sizes, k=k),
        ("count", "index", "value"),
    )  # fmt: skip


# -------------------------------------------------------------------------------------- lengths


@needs_native
@pytest.mark.parametrize("backend", ["native", "tensorflow"])
@pytest.mark.parametrize("columns", [0, 1, 5, 1000])
def test_truncated_and_oversized(backend, columns):
    """A message of another length is rejected before it is read."""
    x, messages = [np.zeros(100, np.float32)], np.ones([2, columns], np.int32)
    runs = {
        "decode": lambda: ops.decode(messages, ops.MessageLayout.of([9]), x),
        "sum": lambda: codecs.dequantize_sum(messages, x, mode="sign"),
        "golomb": lambda: codecs.golomb_decode(messages, sizes=[100], slots=[9], rice=[3]),
        "bloom": lambda: codecs.bloom_query(
            messages, 0, sizes=[100], slots=[9], words=[3], hashes=[2]
        ),
        "bits": lambda: bits.unpacked(messages, 3, 100),
        "rice": lambda: codecs.rice_decode(messages, rice=2, bitmap_words=6, count=100),
    }
    for name, run in runs.items():
        with pytest.raises(
            (tf.errors.InvalidArgumentError, ValueError), match="messages|filters|words|codes"
        ):
            on(backend, run)
            pytest.fail(f"{name} accepts {columns} words")


def test_oracle_flushes_denormals():
    assert flush([1e-42, -1e-42, 2e-38]).tolist() == [0, 0, np.float32(2e-38)]
