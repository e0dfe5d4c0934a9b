"""Positions beyond 2^31, unsigned 32-bit, in native ops, references and oracle.

The tensors themselves are not allocated. See also test_core.py.
"""

import functools

import numpy as np
import pytest
import tensorflow as tf

from tests.kernels.common import assert_same_bits, both, needs_native, on
from tests.oracle.merging import sparse_merge_numpy
from tests.oracle.positions import bloom_build_numpy, golomb_decode_numpy, golomb_encode_numpy
from tf_redsync.ops import codecs

BACKENDS = ("native", "tensorflow")
LARGEST = 2**32 - 1
SIZES = (2**31 - 1, 2**31, 2**31 + 1, 3_000_000_000, LARGEST)


def far(size: int, slots: int = 40, seed: int = 0) -> np.ndarray:
    """Returns ascending int64 positions: the last one, some around 2^31, the others random."""
    rng = np.random.default_rng(seed)
    near = [p for p in range(2**31 - 2, 2**31 + 2) if p < size]
    chosen = np.unique([0, size - 1, *near, *rng.integers(0, size, slots - 4)])
    return chosen.astype(np.int64)


def words(positions) -> np.ndarray:
    """Returns positions as int32 words."""
    return np.asarray(positions).astype(np.uint32).view(np.int32)


@needs_native
@pytest.mark.parametrize("rice", [18, 26, 30])
def test_golomb(rice):
    positions = [far(size, seed=rice) for size in SIZES]
    counts = [p.size for p in positions]
    rice = [rice] * len(SIZES)
    expected = golomb_encode_numpy(positions, counts, sizes=SIZES, rice=rice)
    sent = [words(p) for p in positions]
    run = both(lambda: codecs.golomb_encode(sent, counts, sizes=SIZES, rice=rice))
    for backend, got in run.items():
        assert_same_bits(got, expected, backend)
    layout = {"sizes": SIZES, "slots": counts, "rice": rice}
    decoded = golomb_decode_numpy(expected[None], **layout)
    for row, p in zip(decoded[0], sent, strict=True):
        assert (row[0] == p).all()
    for backend, got in both(lambda: codecs.golomb_decode(expected[None], **layout)).items():
        assert_same_bits([*got.indices, got.counts], [*decoded[0], decoded[1]], backend)


@needs_native
def test_bloom():
    positions = [np.random.default_rng(0).permutation(far(size)) for size in SIZES]
    counts = [p.size for p in positions]
    form = {"words": [50] * len(SIZES), "hashes": [9] * len(SIZES)}
    expected = bloom_build_numpy(positions, counts, 5, **form)
    sent = [words(p) for p in positions]
    run = both(lambda: codecs.bloom_build(sent, counts, 5, sizes=SIZES, **form))
    for backend, got in run.items():
        assert_same_bits(got, expected, backend)


def make_blocks(size: int, ranks: int = 3):
    rows = [far(size, seed=rank % 2)[-30 - rank :] for rank in range(ranks)]
    slots = max(map(len, rows))
    indices, counts = np.full((ranks, slots), 7, np.int64), [[len(row)] for row in rows]
    for rank, row in enumerate(rows):
        indices[rank, : len(row)] = row
    values = np.random.default_rng(3).integers(-3, 4, (ranks, slots)).astype(np.float32)
    return indices, values, np.int32(counts)


@needs_native
@pytest.mark.parametrize("size", SIZES)
def test_merge(size):
    indices, values, counts = make_blocks(size)
    for k in (0, 10, 500):
        expected = sparse_merge_numpy([indices], [values], counts, sizes=[size], k=[k])
        run = both(
            lambda: codecs.sparse_merge([words(indices)], [values], counts, sizes=[size], k=[k])  # noqa: B023
        )
        for backend, got in run.items():
            assert_same_bits(tf.nest.flatten(list(got)), tf.nest.flatten(expected), backend)


def wrong(backend, run, *names):
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        on(backend, run)
    assert all(name in str(caught.value) for name in names), caught.value


@needs_native
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("size", [3_000_000_000, 2**31 + 1])
def test_position_beyond_a_large_tensor(backend, size):
    """The error shows the position as unsigned."""
    for bad in (size, LARGEST):
        sent, names = [words([5, 2**31, bad])], ("index of tensor 0", str(bad))
        block = [sent[0][None]], [np.ones([1, 3], np.float32)], [[3]]
        for call in (
            functools.partial(codecs.golomb_encode, sent, [3], rice=[25]),
            functools.partial(codecs.bloom_build, sent, [3], 0, words=[3], hashes=[2]),
            functools.partial(codecs.sparse_merge, *block, k=[2]),
        ):
            wrong(backend, functools.partial(call, sizes=[size]), *names)
    positions = [5, 2**31, LARGEST - 1, *[0] * 7]
    message = golomb_encode_numpy([positions], [3], sizes=[LARGEST], rice=[28])
    layout = {"sizes": [size], "slots": [10], "rice": [28]}
    assert message.size == codecs.golomb_words(**layout)
    decode = lambda: codecs.golomb_decode(message[None], **layout)  # noqa: E731
    wrong(backend, decode, "index of tensor 0", str(LARGEST - 1))


@needs_native
@pytest.mark.parametrize("backend", BACKENDS)
def test_positions_must_ascend_as_unsigned(backend):
    """As signed numbers these ascend."""
    descending = words([2**31 + 5, 3, 4])
    for count, fine in ((1, True), (2, False)):
        run = lambda: codecs.golomb_encode([descending], [count], sizes=[LARGEST], rice=[28])  # noqa: B023, E731
        if fine:
            assert on(backend, run)[0] == 1
        else:
            wrong(backend, run, "index", "ascend")
    values = [np.ones([1, 3], np.float32)]
    merge = lambda: codecs.sparse_merge([descending[None]], values, [[3]], sizes=[LARGEST], k=[2])  # noqa: E731
    wrong(backend, merge, "index", "ascend")


@pytest.mark.parametrize("size", [2**32, -1])
def test_sizes_beyond_32_bit_words(size):
    text = rf"`sizes` must be in \[0, 4294967295\]. Received: sizes\[0\]={size}"
    indices, values = np.zeros([1, 2], np.int32), np.zeros([1, 2], np.float32)
    for call in (
        lambda: codecs.golomb_encode([indices[0]], [2], sizes=[size], rice=[30]),
        lambda: codecs.golomb_decode(indices, sizes=[size], slots=[2], rice=[30]),
        lambda: codecs.bloom_build([indices[0]], [2], 0, sizes=[size], words=[1], hashes=[1]),
        lambda: codecs.bloom_query(indices, 0, sizes=[size], slots=[2], words=[2], hashes=[1]),
        lambda: codecs.sparse_merge([indices], [values], [[2]], sizes=[size], k=[1]),
    ):
        with pytest.raises(ValueError, match=text):
            call()


def test_too_long_code():
    """Bit lengths are int32: with too few low bits, a large tensor's code is rejected."""
    with pytest.raises(ValueError, match="below 2.31 bits.*size=4294967295, rice=0.*`rice`"):
        codecs.golomb_encode([np.zeros(2, np.int32)], [2], sizes=[LARGEST], rice=[0])


@needs_native
@pytest.mark.parametrize("backend", BACKENDS)
def test_quantized_tensors_of_any_size(backend):
    """Their message has no positions. Traced only, since running it would take 17 GB."""
    rows, columns = 2**16 + 1, 2**16

    @tf.function(input_signature=[tf.TensorSpec([rows, columns], tf.float32)])
    def run(x):
        coded = codecs.quantize([x], [1.0], mode="sign")
        return coded.message, codecs.dequantize_sum(coded.message[None], [x], mode="sign")[0]

    expected = [codecs.quantized_words([rows * columns], "sign")]
    shapes = on(backend, lambda: [t.shape for t in run.get_concrete_function().outputs])
    assert shapes[1] == [rows, columns] and shapes[0].is_compatible_with(expected)
