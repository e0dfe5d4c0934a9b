"""Bloom filters of positions: DeepReduce's policies against plain Python, and false positives."""

import numpy as np
import pytest
import tensorflow as tf

from tests.oracle.deep_reduce import BloomFilter
from tf_redsync import contrib
from tf_redsync.codings.base import Capacity
from tf_redsync.contrib.codings.bloom import draws

SIZES, SLOTS = (200, 5, 0, 40), (8, 5, 0, 1)
POLICIES = ("p0", "p1", "p2", "leftmost")


def chosen_positions(rng, counts=SLOTS):
    chosen = [np.sort(rng.choice(n, k, replace=False)) for n, k in zip(SIZES, counts, strict=True)]
    return [np.int32(p) for p in chosen]


def encoded(coding, chosen, seed, sizes=SIZES, slots=SLOTS):
    padded = [np.pad(p, (0, k - len(p))) for p, k in zip(chosen, slots, strict=True)]
    counts = tf.constant([len(p) for p in chosen], tf.int32)
    indices = [tf.constant(p, tf.int32) for p in padded]
    return coding.encode(indices, counts, Capacity(sizes, slots), tf.constant(seed))


def decoded_positions(positions, row=0) -> list[list[int]]:
    return [
        np.array(at[row][:n]).tolist()
        for at, n in zip(positions.indices, positions.counts[row].numpy(), strict=True)
    ]


def expected(policy, chosen, seed, rate):
    """Returns heads, filters, and the positions that have values."""
    heads, filters, positions = [], [], []
    for i, (size, slots, own) in enumerate(zip(SIZES, SLOTS, chosen, strict=True)):
        bloom = BloomFilter(size, slots, rate)
        filters.append(bloom.build(own, seed))
        positives = bloom.positives(filters[-1], seed)
        if policy != "p0":
            heads.append(len(own))
        noise = draws(tf.constant(seed), i, bloom.positives_capacity).numpy()
        first = np.argsort(noise[: len(positives)], kind="stable")[: len(own)]
        start = int((noise[:1] * np.float32(len(positives))).sum())
        positions.append({
            "p0": positives,
            "p1": sorted(positives[place] for place in first),
            "p2": bloom.by_conflicts(positives, noise, len(own), seed),
            "leftmost": sorted([*positives[start:], *positives][: len(own)]),
        }[policy])  # fmt: skip
    return np.concatenate([np.int32(heads), *filters]), positions


@pytest.mark.parametrize(
    ("policy", "rate"),
    [("p0", None), ("p0", 0.3), ("p1", 0.3), ("p2", 0.3), ("leftmost", None)],
)
def test_policies_match_the_oracle(policy, rate):
    """The sender's and the receivers' words and positions equal the oracle's."""
    coding, rng = (
        contrib.codings.Bloom(policy=policy, false_positive_rate=rate),
        np.random.default_rng(0),
    )
    rows, sent = [], []
    for counts in (SLOTS, (5, 2, 0, 0)):
        chosen = chosen_positions(rng, counts)
        coded = encoded(coding, chosen, 77)
        words, positions = expected(policy, chosen, 77, rate)
        np.testing.assert_array_equal(coded.words, words)
        assert words.size == coding.words(Capacity(SIZES, SLOTS))
        counted = zip(coded.indices, coded.counts, strict=True)
        assert [np.array(at[:n]).tolist() for at, n in counted] == positions
        rows.append(words)
        sent.append(positions)
    rows, sent = [*rows, np.zeros_like(rows[0])], [*sent, [[]] * 4]
    decoded = coding.decode(tf.constant(np.stack(rows)), Capacity(SIZES, SLOTS), tf.constant(77))
    assert [decoded_positions(decoded, r) for r in range(3)] == sent
    capacity = coding.received(Capacity(SIZES, SLOTS))
    assert [at.shape[1] for at in decoded.indices] == list(capacity.slots)


@pytest.mark.parametrize("rate", [0.01, 0.1, 0.4])
def test_false_positive_rate_matches_the_setting(rate):
    """The mean rate of ten filters is as set, and all selected positions are positives."""
    size, k, rng = 20_000, 200, np.random.default_rng(1)
    coding, false = contrib.codings.Bloom(false_positive_rate=rate), []
    for seed in range(10):
        chosen = np.int32(np.sort(rng.choice(size, k, replace=False)))
        coded = encoded(coding, [chosen], seed, (size,), (k,))
        positives = np.array(coded.indices[0])[: coded.counts[0]]
        assert np.isin(chosen, positives).all()
        assert len(positives) < coded.indices[0].shape[0]  # capacity for all of them
        false.append(len(positives) - k)
    assert np.mean(false) / (size - k) == pytest.approx(rate, rel=0.1)


def count_hits(policy, seed, k=40, rate=0.05):
    """Returns how many selected positions a policy takes out of 50 k, and the positions."""
    chosen = np.int32(np.sort(np.random.default_rng(2).choice(50 * k, k, replace=False)))
    coding = contrib.codings.Bloom(policy=policy, false_positive_rate=rate)
    coded = encoded(coding, [chosen], seed, (50 * k,), (k,))
    taken = np.array(coded.indices[0])
    assert coded.counts[0] == k == len(np.unique(taken))
    return np.isin(taken, chosen).sum(), taken.tolist()


def test_p1_varies_its_choice_by_step():
    """About r / |P| of the selected positions are dropped, none of them always."""
    taken = [count_hits("p1", seed) for seed in range(30)]
    assert len({tuple(t) for _, t in taken}) == 30
    share = np.mean([n for n, _ in taken]) / 40
    assert share == pytest.approx(40 / (40 + 0.05 * 1960), abs=0.06)


def test_p2_takes_more_selected_positions():
    found = {p: sum(count_hits(p, seed, k=16)[0] for seed in range(4)) for p in ("p1", "p2")}
    assert found["p2"] > 1.3 * found["p1"]


@pytest.mark.parametrize("policy", ["p2"])
def test_graph_mode(policy):
    """Shapes are static, as a collective requires; equal rows give equal positions."""
    coding, capacity = contrib.codings.Bloom(policy=policy), Capacity((100,), (4,))
    chosen = tf.constant([3, 30, 31, 99])

    @tf.function
    def both(seed):
        coded = coding.encode([chosen], tf.constant([4]), capacity, seed)
        assert coded.words.shape == [coding.words(capacity)]
        decoded = coding.decode(tf.stack([coded.words] * 2), capacity, seed)
        assert decoded.indices[0].shape == [2, coding.received(capacity).slots[0]]
        return coded, decoded

    coded, decoded = both(tf.constant(9))
    eager = encoded(coding, [chosen], 9, (100,), (4,))
    np.testing.assert_array_equal(coded.words, eager.words)
    for r in range(2):
        np.testing.assert_array_equal(decoded.indices[0][r], eager.indices[0])
        np.testing.assert_array_equal(decoded.counts[r], eager.counts)


@pytest.mark.parametrize("policy", POLICIES)
def test_malformed_words_are_in_bounds(policy):
    """Any word is a valid filter. Decoded positions stay within the tensors and the capacity."""
    coding, capacity, rng = (
        contrib.codings.Bloom(policy=policy),
        Capacity((200, 50), (8, 4)),
        np.random.default_rng(4),
    )
    for trial in range(8):
        words = rng.integers(-(2**31), 2**31, (2, coding.words(capacity))).astype(np.int32)
        if trial == 0:
            words[:] = -1
        decoded = coding.decode(tf.constant(words), capacity, tf.constant(trial))
        for i, (size, slots) in enumerate(
            zip(capacity.sizes, coding.received(capacity).slots, strict=True)
        ):
            for r in range(2):
                used = np.array(decoded.indices[i][r])[: max(decoded.counts[r, i], 0)]
                assert len(used) <= slots and np.all((used >= 0) & (used < size))
                assert np.all(np.diff(used) > 0)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: contrib.codings.Bloom(policy="P0"), "`policy` must be one of"),
        (
            lambda: contrib.codings.Bloom(false_positive_rate=0.0),
            "`false_positive_rate` must be in",
        ),
        (lambda: contrib.codings.Bloom(false_positive_rate=1), "`false_positive_rate` must be in"),
    ],
)
def test_bad_arguments(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_tensor_with_too_many_elements_raises():
    capacity = Capacity((2**31,), (100,))
    with pytest.raises(ValueError, match="at most 2147483647 elements.*RawIndices"):
        contrib.codings.Bloom().decode(
            tf.zeros([1, contrib.codings.Bloom().words(capacity)], tf.int32), capacity, 0
        )
