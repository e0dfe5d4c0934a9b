"""bloom_build and bloom_query: native, reference and oracle give equal bits."""

import numpy as np
import pytest
import tensorflow as tf

from tests.kernels.common import assert_same_bits, both, needs_native, on
from tests.kernels.test_golomb import choose
from tests.oracle.positions import bloom_build_numpy, bloom_query_numpy
from tf_redsync.ops import codecs

BACKENDS = ("native", "tensorflow")
SIZES, SLOTS = (0, 1, 100, 3000), (0, 1, 10, 60)
WORDS, HASHES = (1, 1, 3, 40), (1, 3, 64, 7)
FILTERS = {"sizes": SIZES, "words": WORDS, "hashes": HASHES}


@needs_native
@pytest.mark.parametrize("seed", [0, -1, 12345])
def test_backends_and_oracle_agree(seed):
    rows = []
    for rank in range(2):
        rng = np.random.default_rng(rank)
        indices = [choose(rng, n, s) for n, s in zip(SIZES, SLOTS, strict=True)]
        rng.shuffle(indices[3])  # in any order
        counts = np.array([0, rank, 10, 60], np.int32)
        expected = bloom_build_numpy(indices, counts, seed, words=WORDS, hashes=HASHES)
        run = both(lambda: codecs.bloom_build(indices, counts, seed, **FILTERS))  # noqa: B023
        for backend, got in run.items():
            assert_same_bits(got, expected, backend)
        rows.append(expected)
    for slots in (SLOTS, (3, 1, 100, 500)):  # fewer than the positives, and more
        expected = bloom_query_numpy(rows, seed, slots=slots, **FILTERS)
        run = both(lambda: codecs.bloom_query(rows, seed, slots=slots, **FILTERS))  # noqa: B023
        for backend, got in run.items():
            assert_same_bits([*got.indices, got.counts], [*expected[0], expected[1]], backend)


@needs_native
@pytest.mark.parametrize("rate", [0.1, 0.01, 0.001])
def test_false_positive_rate(rate):
    n, count = 200_000, 1000
    positions = choose(np.random.default_rng(3), n, count)
    words, hashes = codecs.bloom_parameters(count, rate)
    layout = {"sizes": [n], "words": [words], "hashes": [hashes]}
    for seed in (1, 2):
        filters = on("native", lambda: codecs.bloom_build([positions], [count], seed, **layout))  # noqa: B023
        found = on("native", lambda: codecs.bloom_query(filters[None], seed, slots=[n], **layout))  # noqa: B023
        listed = found.indices[0][0, : found.counts[0, 0]]
        assert np.isin(positions, listed).all() and (np.diff(listed) > 0).all()
        false = (listed.size - count) / (n - count)
        assert 0.5 * rate < false < 1.5 * rate
        other = on("native", lambda: codecs.bloom_query(filters[None], 7, slots=[n], **layout))  # noqa: B023
        assert not np.isin(positions, other.indices[0]).all()


@needs_native
def test_large_tensor():
    """Uses several blocks of the map of positives."""
    n, layout = 300_000, {"sizes": [300_000], "words": [30], "hashes": [2]}
    positions = np.array([0, 1, 31, 32, 16_383, 16_384, 150_000, n - 1], np.int32)
    filters = on("native", lambda: codecs.bloom_build([positions], [8], 5, **layout))[None]
    for slots in (10, 1000, n):
        run = both(lambda: codecs.bloom_query(filters, 5, slots=[slots], **layout))  # noqa: B023
        assert_same_bits(*([*r.indices, r.counts] for r in run.values()), f"{slots} slots")


@needs_native
@pytest.mark.parametrize("backend", BACKENDS)
def test_graph_mode(backend):
    layout = {"sizes": [500, 90], "words": [9, 2], "hashes": [4, 2]}
    spec = [tf.TensorSpec([None], tf.int32), tf.TensorSpec([], tf.int32)]

    @tf.function(input_signature=spec)
    def run(indices, seed):
        filters = codecs.bloom_build([indices, indices], [3, 2], seed, **layout)
        assert filters.shape.as_list() == [11]
        found = codecs.bloom_query(filters[None], seed, slots=[5, 5], **layout)
        assert found.indices[0].shape[1] == 5 and found.counts.shape[1] == 2
        return filters, found

    positions = np.array([7, 77, 88], np.int32)
    filters, found = on(backend, lambda: run(positions, 5))
    expected = bloom_query_numpy(filters[None], 5, slots=[5, 5], **layout)
    assert_same_bits([*found.indices, found.counts], [*expected[0], expected[1]], backend)


@needs_native
@pytest.mark.parametrize("backend", BACKENDS)
def test_bad_input(backend):
    layout = {"sizes": [9], "words": [2], "hashes": [2]}
    for indices, count, name in (([1, 9], 2, "index"), ([-1, 2], 2, "index"), ([1, 2], 3, "count")):
        with pytest.raises(tf.errors.InvalidArgumentError, match=f"(?s){name} of tensor 0"):
            on(backend, lambda: codecs.bloom_build([tf.constant(indices)], [count], 0, **layout))  # noqa: B023
    for words in (1, 3):
        with pytest.raises((ValueError, tf.errors.InvalidArgumentError), match="filters|equal"):
            filters = np.zeros([2, words], np.int32)
            on(backend, lambda: codecs.bloom_query(filters, 0, slots=[3], **layout))  # noqa: B023
    full = np.full([1, 2], -1, np.int32)  # all positions are positive
    found = on(backend, lambda: codecs.bloom_query(full, 0, slots=[4], **layout))
    assert found.indices[0].tolist() == [[0, 1, 2, 3]] and found.counts.tolist() == [[4]]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"words": [0]}, r"`words` must be in \[1, .*words\[0\]=0"),
        ({"hashes": [65]}, r"`hashes` must be in \[1, 64\].*=65"),
        ({"hashes": []}, "`hashes` must have one entry"),
        ({"sizes": [-1]}, "`sizes`.*-1"),
    ],
)
def test_bad_arguments(change, text):
    with pytest.raises(ValueError, match=text):
        codecs.bloom_build(
            [tf.range(3)], [3], 0, **{"sizes": [9], "words": [2], "hashes": [2], **change}
        )


def test_bad_rate():
    for rate in (0.0, 1.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="`false_positive_rate` must be"):
            codecs.bloom_parameters(10, rate)
