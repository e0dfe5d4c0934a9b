"""Position codings: bit by bit against plain Python, the longest codes, malformed words."""

import numpy as np
import pytest
import tensorflow as tf

from tests.loops import loop
from tests.oracle.coded import GolombStreams
from tests.oracle.codings import LOSSLESS, code_of, huffman_codes
from tf_redsync import codings
from tf_redsync.codings import golomb
from tf_redsync.codings.base import Capacity
from tf_redsync.ops import bits

CODINGS = {
    "RawIndices": codings.RawIndices(),
    "Bitmap": codings.Bitmap(),
    "RunLength": codings.RunLength(),
    "DeltaPacking": codings.DeltaPacking(),
    "Huffman": codings.Huffman(),
    "EliasFano": codings.EliasFano(),
    "Golomb": codings.Golomb(),
    "Cheapest": codings.Cheapest(),
}
every_coding = loop("name", CODINGS)
SEED = tf.constant(5)

# Sizes and slots of the tensors of a bucket.
CAPACITIES = {
    "one_of_one": ((1,), (1,)),
    "one": ((1000,), (1,)),
    "all": ((33,), (33,)),
    "empty": ((0,), (0,)),
    "empty_tensors": ((0, 40, 0), (0, 4, 0)),
    "one_percent": ((4096,), (41,)),
    "half": ((500,), (250,)),
    "unequal": ((300, 7, 1, 2048, 64), (3, 7, 1, 20, 32)),
    "sparse": ((70_000, 5), (70, 1)),
}
KINDS = ("none", "one", "first", "last", "some", "full")


def positions(kind, sizes, slots, rng) -> list[np.ndarray]:
    """Returns ascending positions of each tensor."""
    result = []
    for size, k in zip(sizes, slots, strict=True):
        n = {"none": 0, "one": min(k, 1), "some": rng.integers(0, k + 1)}.get(kind, k)
        if kind == "first":
            result.append(np.arange(n))
        elif kind == "last":
            result.append(np.arange(size - n, size))
        else:
            result.append(np.sort(rng.choice(size, n, replace=False)))
    return [p.astype(np.int32) for p in result]


def encoded(coding, chosen, sizes, slots):
    padded = [np.pad(p, (0, k - len(p))) for p, k in zip(chosen, slots, strict=True)]
    counts = tf.constant([len(p) for p in chosen], tf.int32)
    return coding.encode([tf.constant(p) for p in padded], counts, Capacity(sizes, slots), SEED)


def valid(indices, counts) -> list[list[int]]:
    """Returns the valid positions; asserts that unused slots are 0."""
    found = []
    for at, n in zip(indices, np.array(counts), strict=True):
        at = np.array(at)
        assert not at[n:].any(), "unused slots hold 0"
        found.append(at[:n].tolist())
    return found


@loop("capacity", CAPACITIES)
@every_coding
def test_words_and_round_trip(name, capacity):
    """The words equal the oracle's; all positions round-trip; zeros decode to no position."""
    coding, (sizes, slots), rng = CODINGS[name], CAPACITIES[capacity], np.random.default_rng(0)
    code = code_of(name, sizes, slots)
    assert coding.words(Capacity(sizes, slots)) == code.words
    rows, expected = [np.zeros(code.words, np.int32)], [[[]] * len(sizes)]
    starts = np.cumsum([0, *sizes[:-1]])
    for kind in KINDS:
        chosen = positions(kind, sizes, slots, rng)
        coded, sent = encoded(coding, chosen, sizes, slots), [p.tolist() for p in chosen]
        assert coding.lossless and valid(coded.indices, coded.counts) == sent
        if name not in ("RawIndices", "Cheapest"):
            stream = np.concatenate([np.int64(p) + s for p, s in zip(sent, starts, strict=True)])
            np.testing.assert_array_equal(coded.words, code.encode(stream.astype(int)))
        rows.append(np.array(coded.words))
        expected.append(sent)
    for first in range(len(rows)):  # one to four rows
        some = rows[first : first + 1 + first % 4]
        decoded = coding.decode(tf.constant(np.stack(some)), Capacity(sizes, slots), SEED)
        for r in range(len(some)):
            found = valid([at[r] for at in decoded.indices], decoded.counts[r])
            assert found == expected[first + r]
        assert [at.shape for at in decoded.indices] == [(len(some), k) for k in slots]


@pytest.mark.parametrize("name", ["Golomb", "DeltaPacking", "Huffman", "EliasFano", "RunLength"])
def test_longest_codes_fit(name):
    """The most expensive positions: at one end, equally spaced, one per group, of rare bytes."""
    sizes, slots = (66_000, 66_000, 900), (3000, 3000, 90)
    worst = {
        "end": [np.arange(size - k, size) for size, k in zip(sizes, slots, strict=True)],
        "leaps": [
            np.arange(1, k + 1) * (size // k) - 1 for size, k in zip(sizes, slots, strict=True)
        ],
        "groups": [
            (np.arange(k) + np.arange(k) // 32 * (size // k - 1) * 32)[:k]
            for size, k in zip(sizes, slots, strict=True)
        ],
    }
    if name == "Huffman":
        code = code_of(name, sizes, slots)
        lengths = np.array([len(code.bits(p)) for p in range(sum(sizes))])
        longest = np.sort(np.argsort(-lengths, kind="stable")[: sum(slots)])
        of_tensor = np.split(longest, np.searchsorted(longest, np.cumsum(sizes)[:-1]))
        starts = np.cumsum([0, *sizes[:-1]])
        pairs = zip(of_tensor, starts, slots, strict=True)
        worst["longest"] = [(p - start)[:k] for p, start, k in pairs]
    for kind, chosen in worst.items():
        chosen = [np.int32(p) for p in chosen]
        coded, sent = encoded(CODINGS[name], chosen, sizes, slots), [p.tolist() for p in chosen]
        assert valid(coded.indices, coded.counts) == sent, kind
        decoded = CODINGS[name].decode(coded.words[tf.newaxis], Capacity(sizes, slots), SEED)
        assert valid([at[0] for at in decoded.indices], decoded.counts[0]) == sent, kind


@pytest.mark.parametrize("k", [1, 31, 64, 1000])
def test_capacity_is_tight(k):
    """Some positions use the code up to its last word."""
    sizes, slots = (40_000,), (k,)
    leaps = np.zeros(k, int)
    leaps[0] = sizes[0] - k
    at = np.int32(np.cumsum(leaps + 1) - 1)
    code = encoded(codings.Golomb(), [at], sizes, slots).words.numpy()
    assert code[-1] != 0


def test_tensors_of_similar_density_share_a_stream():
    """A density has its own stream only where that is shorter."""
    sizes, slots = (4_000_000, 512, 300_000, 2048, 1000), (4000, 51, 300, 205, 1)
    found = [group.members for group in golomb.stream_groups(Capacity(sizes, slots))]
    assert found == [(1, 3), (0, 2, 4)]
    together = GolombStreams([sum(sizes)], [sum(slots)]).words
    assert codings.Golomb().words(Capacity(sizes, slots)) < 0.98 * together
    assert len(golomb.stream_groups(Capacity((4_000_000, 10), (4000, 1)))) == 1


@pytest.mark.parametrize("name", [n for n in CODINGS if n not in ("RawIndices", "Cheapest")])
def test_graph_mode(name):
    """Shapes are static there, as a collective requires."""
    sizes, slots = (300, 7), (20, 3)
    capacity, rng = Capacity(sizes, slots), np.random.default_rng(1)
    chosen = positions("some", sizes, slots, rng)
    padded = [np.pad(p, (0, k - len(p))) for p, k in zip(chosen, slots, strict=True)]

    @tf.function
    def both(indices, counts, seed):
        coded = CODINGS[name].encode(indices, counts, capacity, seed)
        assert coded.words.shape == [CODINGS[name].words(capacity)]
        decoded = CODINGS[name].decode(tf.stack([coded.words] * 3), capacity, seed)
        assert [at.shape for at in decoded.indices] == [(3, k) for k in slots]
        return coded.words, decoded.indices, decoded.counts

    words, indices, counts = both(
        [tf.constant(p) for p in padded], tf.constant([len(p) for p in chosen]), SEED
    )
    np.testing.assert_array_equal(words, encoded(CODINGS[name], chosen, sizes, slots).words)
    expected = [p.tolist() for p in chosen]
    for r in range(3):
        assert valid([at[r] for at in indices], counts[r]) == expected


@pytest.mark.parametrize("name", [n for n in LOSSLESS if n != "RawIndices"])
def test_malformed_words(name):
    """They raise, or decode to positions inside a tensor; they never crash."""
    sizes, slots = (300, 7, 64), (30, 7, 5)
    coding, capacity, rng = CODINGS[name], Capacity(sizes, slots), np.random.default_rng(2)
    good = encoded(coding, positions("full", sizes, slots, rng), sizes, slots).words.numpy()
    errors = 0
    for trial in range(21):
        words = np.stack([good, good])
        if trial % 3 == 0:
            words[1] = rng.integers(-(2**31), 2**31, words.shape[1])
        elif trial % 3 == 1:
            words[1, rng.integers(words.shape[1])] ^= np.int32(1) << rng.integers(31)
        else:
            words[1, 0] = rng.integers(-50, 100)
        try:
            decoded = coding.decode(tf.constant(words), capacity, SEED)
        except tf.errors.InvalidArgumentError as error:
            assert "messages" in str(error)
            errors += 1
            continue
        assert np.sum(decoded.counts[1]) <= sum(slots) and np.all(decoded.counts >= 0)
        for at, size, n in zip(decoded.indices, sizes, decoded.counts[1], strict=True):
            used = np.array(at[1])[:n]
            assert np.all((used >= 0) & (used < size)) and np.all(np.diff(used) > 0)
    assert errors >= (4 if name == "Bitmap" else 7)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("EliasFano", "a count must be"),
        ("RunLength", "a count must be"),
        ("Huffman", "indices must"),
        ("DeltaPacking", "indices must"),
        ("Golomb", "count"),
    ],
)
def test_errors_name_the_argument(name, words):
    sizes, slots = (300,), (3,)
    code = encoded(CODINGS[name], [np.int32([1, 2, 299])], sizes, slots).words.numpy()
    code[0] = 4 if name == "Golomb" else 3
    if words == "indices must":
        code[1:] = -1
    elif name != "Golomb":
        code[0] = 2 if name == "EliasFano" else 4
    with pytest.raises(tf.errors.InvalidArgumentError, match=words):
        CODINGS[name].decode(tf.constant(code)[tf.newaxis], Capacity(sizes, slots), SEED)


@pytest.mark.parametrize("size", [0, 1, 100, 257, 65_536, 1_000_003, 2**24 + 5, 2**31 - 1])
def test_huffman_tables(size):
    """A prefix code with optimal lengths; equal to the oracle's where counting is fast."""
    lengths, codes = codings.huffman.table(size)
    assert lengths.min() >= 1 and lengths.max() <= codings.huffman.LONGEST
    assert np.sum(0.5**lengths) == 1  # Kraft's sum is 1: the code is complete
    if size < 2**20:
        expected = huffman_codes(size)
        assert [len(c) for c in expected] == lengths.tolist()
        assert [sum(b << t for t, b in enumerate(c)) for c in expected] == codes.tolist()


def test_fields_of_every_width():
    rng = np.random.default_rng(3)
    for width in (0, 1, 5, 8, 17, 31, 32):
        for count in (0, 1, 32, 100):
            numbers = rng.integers(0, 2**width, count).astype(np.uint32).view(np.int32)
            words = bits.packed(tf.constant(numbers), width)
            assert words.shape == [bits.packed_words(count, width)]
            both = tf.stack([words, tf.zeros_like(words)])
            found = np.array(bits.unpacked(both, width, count))
            np.testing.assert_array_equal(found, [numbers, np.zeros_like(numbers)])
            if count:
                starts = tf.range(count, dtype=tf.int64)[tf.newaxis] * width
                lengths = tf.fill([1, count], width)
                read = bits.read(both[:1], starts, lengths)[0]
                np.testing.assert_array_equal(read, numbers.view(np.uint32))
                again = bits.written(read, lengths[0], words.shape[0])
                np.testing.assert_array_equal(again, words)


def test_bucket_with_too_many_elements_is_rejected():
    capacity = Capacity((2**31 - 1, 5), (10, 1))
    with pytest.raises(ValueError, match="`indices`.*RawIndices"):
        codings.Golomb().words(capacity)
    assert codings.RawIndices().words(capacity) == 13
