"""Every decoder of the CUDA core on mutated messages and messages of a wrong length.

A decoder names a field if the oracle finds the message malformed. Otherwise it returns the oracle's
result. See tests/kernels/test_fuzz.py for the CPU decoders.
"""

import numpy as np
import pytest

from tests.gpu.codec_calls import (
    bloom_build,
    bloom_query,
    dequantize_sum,
    golomb_decode,
    golomb_encode,
    quantize,
    sparse_merge,
)
from tests.oracle.merging import sparse_merge_numpy
from tests.oracle.positions import (
    bloom_query_numpy,
    golomb_capacity,
    golomb_decode_numpy,
    golomb_encode_numpy,
)
from tests.oracle.quantization import (
    FORMATS,
    Malformed,
    dequantize_sum_numpy,
    quantize_numpy,
    to_words,
)

RANKS, EXAMPLES = 3, 150
FLOATS = [np.nan, -np.nan, np.inf, -np.inf, -0.0, 0.0, 1.0, -1.5, 1e-42, -1e-42, 3e38, -3e38]
WORDS = [int(np.float32(x).view(np.int32)) for x in FLOATS] + [-(2**31), 2**31 - 1]


def mutate(rng, messages, most=5):
    """Overwrites words, or inverts some of their bits; sometimes changes none."""
    messages = np.array(messages, np.int32)
    flat = messages.reshape(-1)
    for _ in range(rng.integers(0, most + 1)):
        at, kind = rng.integers(flat.size), rng.integers(4)
        word = np.int32(
            rng.choice(WORDS) if kind == 0 else rng.integers(-3, 70) if kind == 1
            else rng.integers(-(2**31), 2**31)
        )  # fmt: skip
        flat[at] = flat[at] ^ word if kind == 3 else word
    return messages


def flatten(result):
    if isinstance(result, np.ndarray):
        return [result]
    return [array for part in result for array in flatten(part)]


def check(got, error, oracle, fields):
    """Compares with the oracle; returns whether the message was rejected."""
    with np.errstate(all="ignore"):
        try:
            expected = flatten(oracle())
        except Malformed as malformed:
            assert error is not None, f"accepts a malformed {malformed}"
            assert error.field.decode() in fields and error.must_be()
            return True
    assert error is None, f"rejects a valid message: {error.names()}"
    for x, y in zip(flatten(got), expected, strict=True):
        assert x.shape == y.shape and x.dtype == y.dtype
        # The kernels flush denormal intermediate results, numpy does not.
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-36)
    return False


def check_both(refused):
    """Asserts that a test covered valid and malformed messages."""
    assert 0.05 < np.mean(refused) < 0.95


@pytest.mark.parametrize("form", FORMATS, ids=lambda f: f[0])
def test_dequantize_sum(device, form):
    options = dict(zip(("mode", "levels", "bucket_size"), form, strict=True))
    sizes, refused = (0, 33, 100), []
    scales = np.full(20, 0.7, np.float32)
    counts = {"sign": 3, "two_level": 12, "threshold": 6, "natural": 0}
    count = counts.get(form[0], 3)
    for seed in range(EXAMPLES):
        rng = np.random.default_rng(seed)
        rows = [
            quantize_numpy([rng.normal(size=n) for n in sizes], scales[:count], **options)[0]
            for _ in range(RANKS)
        ]
        messages, shapes = mutate(rng, np.stack(rows)), [(n,) for n in sizes]
        got, error = dequantize_sum(device, messages, shapes, **options)
        oracle = lambda: dequantize_sum_numpy(messages, shapes, **options)  # noqa: B023, E731
        refused.append(check(got, error, oracle, ("flag", "scale", "code")))
    check_both(refused)


@pytest.mark.parametrize("rice", [0, 1, 4, 30])
def test_golomb_decode(device, rice):
    sizes, slots, refused = (0, 1, 60, 500), (0, 1, 20, 9), []
    layout = {"sizes": sizes, "rice": [rice] * 4}
    for seed in range(EXAMPLES):
        rng, rows = np.random.default_rng(seed), []
        for _ in range(RANKS):
            chosen = [np.sort(rng.choice(n, s, False)) for n, s in zip(sizes, slots, strict=True)]
            rows.append(golomb_encode_numpy(chosen, [rng.integers(s + 1) for s in slots], **layout))
        messages = mutate(rng, np.stack(rows))
        *got, error = golomb_decode(device, messages, slots=slots, **layout)
        oracle = lambda: golomb_decode_numpy(messages, slots=slots, **layout)  # noqa: B023, E731
        refused.append(check(got, error, oracle, ("count", "number of ones", "index")))
    check_both(refused)


def test_golomb_decode_of_random_words(device):
    """Random codes of several tiles, whose count may be valid."""
    size, slots, refused = 1 << 20, 5000, []
    for seed in range(EXAMPLES // 3):
        rng = np.random.default_rng(seed)
        rice = int(rng.integers(1, 5))
        layout = {"sizes": [size], "slots": [slots], "rice": [rice]}
        low = rng.integers(-(2**31), 2**31, -(-slots * rice // 32)).astype(np.int32)
        length = golomb_capacity(size, slots, rice) - low.size
        places = size >> rice if rng.random() < 0.7 else 32 * length  # an index may be too large
        ones = rng.choice(places, int(rng.integers(1, slots + 1)), False)
        bitmap = np.zeros(32 * length, np.uint8)
        bitmap[ones] = 1
        count = min(ones.size + int(rng.choice([0, 0, 1, -1])), slots)
        message = np.concatenate([np.array([count], np.int32), low, to_words(bitmap)])[None]
        *got, error = golomb_decode(device, message, **layout)
        oracle = lambda: golomb_decode_numpy(message, **layout)  # noqa: B023, E731
        refused.append(check(got, error, oracle, ("number of ones", "index")))
    check_both(refused)


def test_bloom_query(device):
    for seed in range(EXAMPLES // 3):
        rng = np.random.default_rng(seed)
        filters = mutate(rng, rng.integers(-(2**31), 2**31, (2, 7)))
        layout = {
            "sizes": (0, 40, 200), "slots": (0, 10, 50), "words": (1, 2, 4),
            "hashes": (1, int(rng.integers(1, 10)), 2),
        }  # fmt: skip
        got = bloom_query(device, filters, seed, **layout)
        assert not check(got, None, lambda: bloom_query_numpy(filters, seed, **layout), ())  # noqa: B023


@pytest.mark.parametrize("k", [0, 4, 100])
def test_sparse_merge(device, k):
    refused = []
    for seed in range(EXAMPLES):
        rng = np.random.default_rng(seed)
        indices = np.stack([np.sort(rng.choice(50, 8, False)) for _ in range(RANKS)])
        values = rng.integers(-3, 4, (RANKS, 8)).astype(np.float32)
        indices = mutate(rng, indices, 1)
        values = mutate(rng, values.view(np.int32), 2).view(np.float32)
        counts = mutate(rng, rng.integers(5, 9, (RANKS, 1)), 1)
        blocks, layout = ([indices], [values], counts), {"sizes": [50], "k": [k]}
        got, error = sparse_merge(device, *blocks, **layout)
        oracle = lambda: sparse_merge_numpy(*blocks, **layout)  # noqa: B023, E731
        refused.append(check(got, error, oracle, ("count", "index", "value")))
    check_both(refused)


@pytest.mark.parametrize("columns", [0, 1, 5, 1000])
def test_truncated_and_oversized(device, columns):
    """A message of another length is rejected before it is read."""
    messages = np.ones((2, columns), np.int32)
    one = {"sizes": [100], "slots": [9]}
    runs = [
        lambda: dequantize_sum(device, messages, [(100,)], mode="sign"),
        lambda: golomb_decode(device, messages, rice=[3], **one),
        lambda: bloom_query(device, messages, 0, words=[3], hashes=[2], **one),
    ]
    for run in runs:
        with pytest.raises(ValueError, match="invalid"):
            run()


def test_results_are_reproducible(device):
    """The emulator runs blocks and threads in another order each time."""
    rng = np.random.default_rng(0)
    x = [rng.normal(size=5000).astype(np.float32)]
    positions, count = [np.arange(0, 9000, 3, np.int32)], [3000]
    blocks = [np.stack([positions[0]] * 3)], [rng.normal(size=(3, 3000)).astype(np.float32)]
    runs = {
        "quantize": lambda: quantize(device, x, [1], mode="stochastic", stream=(1, 2, 3))[:2],
        "golomb": lambda: golomb_encode(device, positions, count, sizes=[9000], rice=[1])[0],
        "bloom": lambda: bloom_build(
            device, positions, count, 7, sizes=[9000], words=[400], hashes=[3]
        )[0],
        "merge": lambda: sparse_merge(device, *blocks, [count] * 3, sizes=[9000], k=[700])[0],
    }
    for name, run in runs.items():
        first = [array.tobytes() for array in flatten(run())]
        for _ in range(3):
            assert first == [array.tobytes() for array in flatten(run())], name
