"""Inputs, and helpers that run the ops on one backend, for the kernel tests."""

import hashlib

import numpy as np
import pytest
import tensorflow as tf

from tf_redsync import ops
from tf_redsync.ops import native

SIZES = (0, 1, 2, 7, 31, 1000, 4097, 70000)
DENSITIES = (0.001, 0.02, 0.3, 1.0)
MOMENTA = {"none": (0.0, False), "plain": (0.9, False), "nesterov": (0.9, True)}


def native_problem() -> str | None:
    """Returns the reason why the native library is unusable, or None."""
    try:
        native.load()
    except native.NativeLibraryError as error:
        return str(error)
    return None


def native_ops() -> list[str]:
    """Returns the names of all native ops, without the prefix `redsync_`."""
    functions = [n for n in dir(native.load()) if n.startswith("redsync_")]
    return [n.removeprefix("redsync_") for n in functions if not n.endswith("_eager_fallback")]


needs_native = pytest.mark.skipif(
    native_problem() is not None, reason=f"native library: {native_problem()}"
)


def _outlier(rng, n):
    x = rng.normal(size=n)
    x[n // 2 : n // 2 + 1] = 1000
    return x


def _clustered(rng, n):  # a prediction from a sample misses the few large neighbors
    x = rng.normal(size=n) * 1e-3
    x[n // 3 : n // 3 + n // 40] += 5
    return x


KINDS = {
    "normal": lambda rng, n: rng.normal(size=n),
    "laplace": lambda rng, n: rng.laplace(size=n),
    "student_t": lambda rng, n: rng.standard_t(3, size=n),
    "constant": lambda rng, n: np.full(n, 0.37),
    "negative": lambda rng, n: -np.abs(rng.normal(size=n)),
    "zero": lambda rng, n: np.zeros(n),
    "outlier": _outlier,
    "ties": lambda rng, n: rng.integers(-3, 4, size=n),
    "sparse": lambda rng, n: rng.normal(size=n) * (rng.random(n) < 0.002),
    "clustered": _clustered,
    "denormal": lambda rng, n: rng.normal(size=n) * 1e-39,
}


def make_inputs(kind: str, sizes=SIZES, seed: int = 0):
    """Returns gradients, residuals and velocities, float32 of the given sizes."""
    rng = np.random.default_rng(seed)
    return [[KINDS[kind](rng, n).astype(np.float32) for n in sizes] for _ in range(3)]


def make_k(sizes=SIZES, first: int = 0) -> np.ndarray:
    """Returns numbers to select: the densities alternate over tensors, starting with `first`."""
    turns = [DENSITIES[(i + first) % len(DENSITIES)] for i in range(len(sizes))]
    return np.array(
        [min(n, max(1, round(n * d))) for n, d in zip(sizes, turns, strict=True)], np.int32
    )


def select(backend: str, inputs, k, ratios, *, momentum=(0.0, False), graph=False, **options):
    """Runs `accumulate_and_select` on `backend`; returns numpy arrays."""
    grads, residuals, velocities = inputs
    factor, nesterov = momentum

    def run():
        return ops.accumulate_and_select(
            grads, residuals, velocities if factor else [], k, ratios,
            momentum=factor, nesterov=nesterov, **options,
        )  # fmt: skip

    ops.set_backend(backend)
    try:
        selection = tf.function(run)() if graph else run()
    finally:
        ops.set_backend(None)
    return tf.nest.map_structure(lambda t: t.numpy(), selection)


def decode(backend: str, messages, k, like, *, quantized, selectors=None):
    """Runs `decode` on `backend`; returns numpy arrays. Messages do not depend on the selectors."""
    del selectors
    ops.set_backend(backend)
    try:
        layout = ops.MessageLayout.of(k, quantized)
        return [t.numpy() for t in ops.decode(messages, layout, like)]
    finally:
        ops.set_backend(None)


def digest_of_selections() -> str:
    """Returns a digest of selections from tensors with many blocks, and of their decoding."""
    sizes, k = (300_001, 131_072), [300, 40_000]
    state = hashlib.sha256()
    for kind in ("normal", "ties", "clustered"):
        inputs = make_inputs(kind, sizes)
        for selector in ("exact", "threshold"):
            options = {"selectors": [selector] * 2, "quantized": [False, True]}
            result = select("native", inputs, k, [-1, -1], momentum=(0.9, False), **options)
            totals = decode("native", result.message[None], k, inputs[0], **options)
            for array in tf.nest.flatten([result, totals]):
                state.update(array.tobytes())
    return state.hexdigest()


def on(backend: str, run):
    """Returns the result of `run()` on `backend`, with tensors as numpy arrays."""
    ops.set_backend(backend)
    try:
        return tf.nest.map_structure(lambda t: t.numpy() if tf.is_tensor(t) else t, run())
    finally:
        ops.set_backend(None)


def both(run) -> dict:
    """Returns the result of `run()` as numpy arrays, by backend."""
    return {backend: on(backend, run) for backend in ("native", "tensorflow")}


def assert_same_bits(a, b, what: str) -> None:
    """Asserts that two structures of arrays are bitwise equal; names the first difference."""
    a, b = tf.nest.flatten(a), tf.nest.flatten(b)
    assert len(a) == len(b), what
    for i, (x, y) in enumerate(zip(a, b, strict=True)):
        assert x.dtype == y.dtype and x.shape == y.shape, (what, i, x.shape, y.shape)
        differ = np.flatnonzero(x.reshape(-1).view(np.int32) != y.reshape(-1).view(np.int32))
        at = differ[:3]
        assert differ.size == 0, (what, i, at, x.reshape(-1)[at], y.reshape(-1)[at])
