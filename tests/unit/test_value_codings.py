"""Codings of values: unbiased rounding, fitted curves against numpy, degenerate fits."""

import numpy as np
import pytest
import tensorflow as tf

from tests.loops import loop
from tests.oracle import deep_reduce as oracle
from tf_redsync import codings, contrib

STREAM = tf.constant([1, 2, 3])
CODINGS = {
    "float32": codings.Float32(),
    "float16": codings.Half(dtype="float16"),
    "bfloat16": codings.Half(),
    "qsgd": contrib.codings.QSGDValues(levels=7, bucket_size=32),
    "polynomial": contrib.codings.PolynomialFit(least=0),
    "exponential": contrib.codings.DoubleExponentialFit(least=0),
}
every_coding = loop("name", CODINGS)


def encoded(coding, values, counts=None, stream=STREAM):
    counts = [len(v) for v in values] if counts is None else counts
    return coding.encode([tf.constant(v, tf.float32) for v in values], tf.constant(counts), stream)


def largest(kind, k, density=0.1, seed=0):
    """Returns the k largest of random numbers, unordered."""
    rng = np.random.default_rng(seed)
    values = getattr(rng, kind)(size=round(k / density)).astype(np.float32)
    return values[np.sort(np.argsort(-np.abs(values))[:k])]


def relative_error(found, values) -> float:
    """Returns the relative l2 error."""
    return float(np.linalg.norm(np.float64(found) - values) / np.linalg.norm(values))


def words_of(name, slots):
    return {
        "float32": sum(slots),
        "float16": sum(-(-k // 2) for k in slots),
        "bfloat16": sum(-(-k // 2) for k in slots),
        "qsgd": oracle.qsgd_words(list(slots), 7, 32),
        "polynomial": sum(oracle.polynomial_words(k, 0) for k in slots),
        "exponential": sum(oracle.exponential_words(k, 0) for k in slots),
    }[name]


@every_coding
def test_receivers_decode_what_the_sender_expects(name):
    """Several tensors and workers, unused slots, empty tensors; lengths by formula."""
    coding, slots, rng = CODINGS[name], [300, 0, 1, 40, 7], np.random.default_rng(0)
    assert coding.words(slots) == words_of(name, slots)
    rows, sent, all_counts = [], [], []
    for counts in ([300, 0, 1, 40, 7], [120, 0, 0, 39, 1], [0, 0, 0, 0, 0], [1, 0, 1, 1, 6]):
        values = [np.zeros(k, np.float32) for k in slots]
        for v, n in zip(values, counts, strict=True):
            v[:n] = rng.standard_normal(n) + 0.1
        coded = encoded(coding, values, counts)
        assert coded.words.shape == [coding.words(slots)] and coded.words.dtype == tf.int32
        for found, v, n in zip(coded.values, values, counts, strict=True):
            assert found.shape == v.shape and np.isfinite(found).all()
            assert not np.any(found[n:])
            if coding.exact:
                np.testing.assert_array_equal(found, v)
            elif n:
                assert relative_error(found[:n], v[:n]) < 0.5
        rows.append(coded.words)
        sent.append(coded.values)
        all_counts.append(counts)
    decoded = coding.decode(tf.stack(rows), tf.constant(all_counts), slots)
    for i, tensor in enumerate(decoded):
        assert tensor.shape == [4, slots[i]]
        for r in range(4):
            np.testing.assert_allclose(tensor[r], sent[r][i], rtol=1e-6, atol=1e-7)
    nothing = coding.decode(tf.zeros_like(tf.stack(rows)), tf.zeros([4, 5], tf.int32), slots)
    assert not any(np.any(t) for t in nothing)


@every_coding
def test_graph_mode(name):
    coding, values = CODINGS[name], [largest("normal", 100), np.float32([1.0])]
    slots = [len(v) for v in values]

    @tf.function
    def both(tensors, counts, stream):
        coded = coding.encode(tensors, counts, stream)
        assert coded.words.shape == [coding.words(slots)]
        decoded = coding.decode(tf.stack([coded.words] * 2), tf.stack([counts] * 2), slots)
        assert [t.shape for t in decoded] == [(2, k) for k in slots]
        return coded.words, coded.values, decoded

    words, sent, decoded = both([tf.constant(v) for v in values], tf.constant(slots), STREAM)
    eager = encoded(coding, values)
    for found, expected in zip(sent, eager.values, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    for found, expected in zip(decoded, sent, strict=True):
        np.testing.assert_allclose(found, [expected] * 2, rtol=1e-6, atol=1e-7)


@every_coding
def test_malformed_words(name):
    """They raise, or decode to the right number of values; they never crash."""
    coding, slots, rng = CODINGS[name], [200, 3], np.random.default_rng(5)
    for trial in range(8):
        words = rng.integers(-(2**31), 2**31, (2, coding.words(slots))).astype(np.int32)
        if trial % 2:
            words[1] = encoded(coding, [largest("normal", 200), np.ones(3)]).words
            words[1, rng.integers(words.shape[1])] ^= np.int32(1) << rng.integers(31)
        counts = tf.constant(rng.integers(-5, 300, (2, 2)), tf.int32)
        try:
            decoded = coding.decode(tf.constant(words), counts, slots)
        except tf.errors.InvalidArgumentError as problem:
            assert name == "qsgd" and "messages" in str(problem)
            continue
        assert [t.shape for t in decoded] == [(2, 200), (2, 3)]


@loop("values", [np.zeros(200), np.full(200, -3.0), np.ones(200), np.eye(200)[7]])
@every_coding
def test_degenerate_curves(name, values):
    """All zero, all equal, one nonzero value: no division by zero and no spurious values."""
    (found,) = encoded(CODINGS[name], [values]).values
    # No sum of two exponentials falls as fast as a single value.
    tolerance = 0.8 if name == "exponential" and values.max() > values.min() else 0.02
    np.testing.assert_allclose(found, values, rtol=0, atol=tolerance * np.abs(values).max())


# ------------------------------------------------------------------------------------- QSGD


def test_qsgd_values_are_unbiased():
    """Over many streams, each within a level of its bucket's largest magnitude."""
    coding, values, draws = CODINGS["qsgd"], largest("laplace", 100), 150
    norms = np.abs(np.pad(values, (0, 28))).reshape(-1, 32).max(axis=1).repeat(32)[:100]
    found = np.array(
        [encoded(coding, [values], None, tf.constant([1, 0, n])).values[0] for n in range(draws)]
    )
    assert np.all(np.abs(found - values) <= norms / 7 * (1 + 1e-5))
    assert np.std(found, axis=0).max() > 0.1 * norms.max() / 7  # rounding is random
    five_sigma = 5 * 0.5 * norms / 7 / draws**0.5
    assert np.all(np.abs(found.mean(axis=0) - values) <= five_sigma)


def test_qsgd_workers_round_independently():
    values = [largest("laplace", 100)]
    first, second, third = (
        np.array(encoded(CODINGS["qsgd"], values, None, tf.constant(stream)).values[0])
        for stream in ([1, 0, 5], [1, 1, 5], [1, 0, 5])
    )
    np.testing.assert_array_equal(first, third)
    assert np.mean(first != second) > 0.1


# ------------------------------------------------------------------------------------ curves


@loop("k", [30, 211, 1000, 20_000])
@loop("kind", ["normal", "laplace", "exponential"])
def test_polynomials_equal_numpys_least_squares(kind, k):
    """For every segment; positive and negative values separately."""
    values = largest(kind, k)
    (found,) = encoded(contrib.codings.PolynomialFit(least=0), [values]).values
    if oracle.polynomial_words(k, 0) == k:
        np.testing.assert_array_equal(found, values)
    else:
        expected = oracle.fitted(values)
        np.testing.assert_allclose(found, expected, rtol=0, atol=3e-6 * np.abs(values).max())


def test_two_exponentials_are_recovered():
    """From exact data, for any order and signs."""
    x, rng = np.arange(4000) / 3999, np.random.default_rng(1)
    curve = 3.0 * np.exp(-20.0 * x) + 0.5 * np.exp(-1.5 * x)
    values = np.float32(rng.permutation(curve) * rng.choice([-1, 1], 4000))
    coded = encoded(contrib.codings.DoubleExponentialFit(), [values])
    a, b, c, d = np.array(tf.bitcast(coded.words[:4], tf.float32))
    np.testing.assert_allclose([a, b, c, d], [0.5, -1.5, 3.0, -20.0], rtol=2e-3)
    np.testing.assert_allclose(coded.values[0], values, rtol=0, atol=1e-3)


# Relative l2 errors of the sent values at a density of 10 % and 1 %.
@pytest.mark.parametrize(
    ("kind", "density", "polynomial", "exponential"),
    [
        ("normal", 0.1, 0.005, 0.02),
        ("laplace", 0.1, 0.005, 0.05),
        ("normal", 0.01, 0.002, 0.02),
        ("laplace", 0.01, 0.005, 0.05),
    ],
)
def test_quality_of_the_fits(kind, density, polynomial, exponential):
    values = largest(kind, 8000, density)
    for coding, bound in (
        (contrib.codings.PolynomialFit(), polynomial),
        (contrib.codings.DoubleExponentialFit(), exponential),
    ):
        (found,) = encoded(coding, [values]).values
        assert relative_error(found, values) < bound


def test_small_tensors_are_not_coded():
    values = [largest("normal", 999), largest("normal", 1000)]
    for coding in (contrib.codings.PolynomialFit(), contrib.codings.DoubleExponentialFit()):
        small, large = encoded(coding, values).values
        np.testing.assert_array_equal(small, values[0])
        assert 0 < relative_error(large, values[1]) < 0.1
        assert coding.words([999]) == 999 and coding.words([1000]) < 460


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: codings.Half(dtype="float32"), "`dtype` must be one of"),
        (lambda: contrib.codings.QSGDValues(levels=0), "`levels` must be"),
        (lambda: contrib.codings.QSGDValues(levels=32768), "`levels` must be at most 32767"),
        (lambda: contrib.codings.QSGDValues(bucket_size=33), "a multiple of 32"),
        (lambda: contrib.codings.PolynomialFit(least=-1), "`least` must be"),
        (lambda: contrib.codings.DoubleExponentialFit(least=1.5), "`least` must be"),
    ],
)
def test_bad_arguments(make, words):
    with pytest.raises(ValueError, match=words):
        make()
