"""Inputs for the tests of the CUDA core, and the comparison of results; needs only numpy."""

import numpy as np


def _with(rng, n, first, count, value):
    x = rng.normal(size=n) * 1e-3
    x[first : first + count] += value
    return x


KINDS = {
    "normal": lambda rng, n: rng.normal(size=n),
    "student_t": lambda rng, n: rng.standard_t(3, size=n),
    "constant": lambda rng, n: np.full(n, 0.37),
    "negative": lambda rng, n: -np.abs(rng.normal(size=n)),
    "zero": lambda rng, n: np.zeros(n),
    "outlier": lambda rng, n: _with(rng, n, n // 2, 1, 1000),
    "ties": lambda rng, n: rng.integers(-3, 4, size=n),
    "sparse": lambda rng, n: rng.normal(size=n) * (rng.random(n) < 0.002),
    # A prediction from a sample misses the few large neighbors, or overestimates their number.
    "clustered": lambda rng, n: _with(rng, n, n // 3, n // 40, 5),
    "one_line": lambda rng, n: _with(rng, n, 0, 16, 9),
    "two_levels": lambda rng, n: np.where(np.arange(n) % 16 < 2, 1, 2 + 1e-6 * rng.normal(size=n)),
}


def make_inputs(kind, sizes, seed=0):
    """Returns gradients, residuals and velocities, float32 of the given sizes."""
    rng = np.random.default_rng(seed)
    return [[KINDS[kind](rng, n).astype(np.float32) for n in sizes] for _ in range(3)]


def assert_same_bits(actual, expected, what):
    """Asserts that two arrays or lists of arrays are bitwise equal; names the first difference."""
    if isinstance(actual, (list, tuple)):
        assert len(actual) == len(expected), what
        for i, (x, y) in enumerate(zip(actual, expected, strict=True)):
            assert_same_bits(x, y, (what, i))
        return
    shapes = actual.shape, expected.shape
    assert actual.dtype == expected.dtype and actual.shape == expected.shape, (what, *shapes)
    x, y = actual.reshape(-1).view(np.int32), expected.reshape(-1).view(np.int32)
    at = np.flatnonzero(x != y)[:3]
    assert at.size == 0, (what, at, actual.reshape(-1)[at], expected.reshape(-1)[at])
