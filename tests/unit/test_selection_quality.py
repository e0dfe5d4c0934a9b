"""The selection op of every backend against the numpy oracle: equal bits and a good selection."""

import functools
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

from tests.deep import DEEP
from tests.loops import loop
from tests.oracle import redsync as oracle
from tf_redsync import ops

BACKENDS = ("tensorflow", "native")
# Selectors that search their threshold; "fixed" gets one, see tests/kernels/test_select.py.
SELECTORS = ("exact", "trimmed", "threshold")
SHAPES = [(), (1,), (0,), (2, 0, 3), (2, 3), (7,), (64,), (33, 3), (5, 5, 41), (4099,), (20_000,)]


@pytest.fixture(params=BACKENDS)
def backend(request):
    """Forces one backend; the native one may be missing only without a compiler."""
    try:
        ops.set_backend(request.param)
    except ops.NativeLibraryError as error:
        compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
        if compiler:
            raise
        pytest.skip(f"no C++ compiler, so no native library: {error}")
    assert ops.backend() == request.param
    yield request.param
    ops.set_backend(None)


@pytest.fixture(params=BACKENDS if DEEP else ["fastest"])
def any_backend(request):
    """For properties of the selection. The backends' bits are equal, as tested above."""
    if request.param != "fastest":
        ops.set_backend(request.param)
    yield ops.backend()
    ops.set_backend(None)


# ----------------------------------------------------------------------------- inputs


def _one_nan(rng, n):
    x = rng.standard_normal(n)
    x[rng.integers(n)] = rng.choice([np.nan, np.inf, -np.inf])
    return x


def _one_outlier(rng, n):
    x = rng.standard_normal(n)
    x[rng.integers(n)] = rng.choice([1000.0, -1e6, 1e24])
    return x


DRAWS = {
    "normal": lambda rng, n: rng.standard_normal(n),
    "laplace": lambda rng, n: rng.laplace(size=n),
    "student_t": lambda rng, n: rng.standard_t(3, n),
    "cauchy": lambda rng, n: rng.standard_cauchy(n),
    "ties": lambda rng, n: np.round(2 * rng.standard_normal(n)),
    "two_values": lambda rng, n: rng.choice([-1.0, 1.0, 1 + 2.0**-23], n),
    "mostly_zero": lambda rng, n: rng.standard_normal(n) * (rng.random(n) < 0.01),
    "constant": lambda rng, n: np.full(n, rng.choice([0.1, -3.0])),
    "zero": lambda rng, n: np.zeros(n) * rng.choice([-1.0, 1.0], n),  # both zeros
    "positive": lambda rng, n: np.abs(rng.standard_normal(n)) + 0.5,
    "negative": lambda rng, n: -np.abs(rng.standard_normal(n)) - 0.5,
    "ascending": lambda rng, n: np.arange(n),
    "descending": lambda rng, n: n - np.arange(n),
    "magnitudes": lambda rng, n: np.exp2(rng.uniform(-60, 60, n)) * rng.choice([-1, 1], n),
    "outlier": _one_outlier,
    "tiny": lambda rng, n: 1e-30 * rng.standard_normal(n),
    "huge": lambda rng, n: 1e24 * rng.standard_normal(n),
    "not_finite": _one_nan,
}


def draw(rng, shape, name=None):
    n = int(np.prod(shape))
    name = name or rng.choice([d for d in DRAWS if d != "not_finite"])
    return DRAWS[name](rng, n).astype(np.float32).reshape(shape) if n else np.zeros(shape, "f4")


def draw_k(rng, n):
    choices = [1, 2, n // 1000, n // 100, n // 3, 2 * n // 3, n - 1, n, rng.integers(n + 1)]
    return int(np.clip(rng.choice(choices), min(n, 1), n))


def draw_case(seed):
    """Returns random arguments (lists of arrays) and keywords of one call."""
    rng = np.random.default_rng(seed)
    shapes = [SHAPES[i] for i in rng.integers(len(SHAPES), size=rng.integers(1, 5))]
    momentum = float(rng.choice([0.0, 0.5, 0.9]))
    grads = [draw(rng, s) for s in shapes]
    if rng.random() < 0.1:
        i = rng.integers(len(shapes))
        grads[i] = draw(rng, shapes[i], "not_finite")
    still = rng.random() < 0.4  # the first step: residuals and velocities are zero
    state = lambda: [np.zeros(s, np.float32) if still else draw(rng, s, "laplace") for s in shapes]  # noqa: E731
    arguments = [
        grads,
        state(),
        state() if momentum else [],
        np.array([draw_k(rng, int(np.prod(s))) for s in shapes], np.int32),
        rng.choice([-1.0, 0.0, 0.25, 0.5, 0.625, 1.0], len(shapes)).astype(np.float32),
    ]
    keywords = {
        "selectors": tuple(str(s) for s in rng.choice(SELECTORS, len(shapes))),
        "quantized": tuple(bool(q) for q in rng.random(len(shapes)) < 0.3),
        "momentum": momentum,
        "nesterov": bool(rng.random() < 0.5),
        "masking": bool(rng.random() < 0.5),
        "scale": None if rng.random() < 0.5 else np.float32(rng.uniform(0.1, 1)),
        "side": np.int32(rng.choice([-1, 1])),
        "search": np.bool_(rng.random() < 0.5),
    }
    return arguments, keywords


# ----------------------------------------------------------------------------- equal bits


def assert_same_bits(actual, expected, what):
    actual = np.asarray(actual)
    assert actual.shape == expected.shape and actual.dtype == expected.dtype, what
    if actual.tobytes() != expected.tobytes():
        differ = actual.reshape(-1).view(np.int32) != expected.reshape(-1).view(np.int32)
        at = np.flatnonzero(differ)[:5]
        raise AssertionError(
            f"{what}: {differ.sum()} of {differ.size} differ, first at {at}: "
            f"{actual.reshape(-1)[at]} instead of {expected.reshape(-1)[at]}"
        )


def compare(selection, expected):
    """Compares `selection` of the op with the oracle's (message, residuals, velocities, ratios)."""
    message, residuals, velocities, ratios = expected
    assert_same_bits(selection.message, message, "message")
    assert_same_bits(selection.ratios, ratios, "ratios")
    assert len(selection.residuals) == len(residuals)
    assert len(selection.velocities) == len(velocities)
    if message[0]:  # otherwise they are unspecified
        for i, (a, b) in enumerate(zip(selection.residuals, residuals, strict=True)):
            assert_same_bits(a, b, f"residuals[{i}]")
        for i, (a, b) in enumerate(zip(selection.velocities, velocities, strict=True)):
            assert_same_bits(a, b, f"velocities[{i}]")


def constants(arguments):
    return [
        [tf.constant(x) for x in a] if isinstance(a, list) else tf.constant(a) for a in arguments
    ]


def select_numpy(arguments, keywords):
    return oracle.accumulate_and_select_numpy(*arguments, **keywords)


@loop("seed", range(120 if DEEP else 40))
def test_select_sweep(backend, seed):
    arguments, keywords = draw_case(seed)
    expected = select_numpy(arguments, keywords)
    compare(ops.accumulate_and_select(*constants(arguments), **keywords), expected)


@loop("name", DRAWS)
@loop("quantized", [False, True])
def test_select_every_kind_of_input(backend, name, quantized):
    rng = np.random.default_rng(len(name))
    n = 10_001
    zero = np.zeros(n, np.float32)
    for k in (1, 10, 500, 7000, n):
        arguments = [
            [draw(rng, (n,), name)] * 3, [zero] * 3, [],
            np.full(3, k, np.int32), np.full(3, -1, np.float32),
        ]  # fmt: skip
        keywords = {"selectors": SELECTORS, "quantized": (quantized,) * 3}
        expected = select_numpy(arguments, keywords)
        compare(ops.accumulate_and_select(*constants(arguments), **keywords), expected)


@loop("selector", SELECTORS)
@loop("size", [300_000, 1_048_583])
def test_select_large_tensor(backend, selector, size):
    rng = np.random.default_rng(size)
    for name, k in [("normal", size // 1000), ("cauchy", size // 50), ("ties", size // 1000)]:
        arguments = [
            [draw(rng, (size,), name)], [draw(rng, (size,), "laplace")], [draw(rng, (size,))],
            np.array([k], np.int32), np.array([-1], np.float32),
        ]  # fmt: skip
        keywords = {"selectors": (selector,), "quantized": (False,), "momentum": 0.9}
        expected = select_numpy(arguments, keywords)
        compare(ops.accumulate_and_select(*constants(arguments), **keywords), expected)


@pytest.mark.deep
@loop(
    "momentum, nesterov, static_shapes",
    [
        (*how, static)
        for how, short in (((0.0, False), None), ((0.9, False), True), ((0.9, True), False))
        for static in (False, True)
        if DEEP or static is short
    ],
)
def test_training_steps_in_graph_mode(backend, momentum, nesterov, static_shapes):
    """20 steps of 3 workers in a `tf.function` with state, against the oracle step by step.

    The graph optimizer must not reorder the sums, with static and dynamic shapes.
    """
    shapes, workers = [(40, 50), (3000,), (9,), (100, 10)], 3
    selectors = ("threshold", "exact", "trimmed", "threshold")
    quantized = (False, False, True, True)
    fixed = {"selectors": selectors, "quantized": quantized}
    tensors = tuple(
        tf.TensorSpec(s if static_shapes else [None] * len(s), tf.float32) for s in shapes
    )
    real, integer, truth = (tf.TensorSpec([], t) for t in (tf.float32, tf.int32, tf.bool))
    state = (tensors, tensors if momentum else (), tf.TensorSpec([4], tf.float32))

    ks = tf.TensorSpec([4], tf.int32)

    @tf.function(input_signature=[tensors, *state, ks, real, integer, truth])
    def select(grads, residuals, velocities, ratios, k, scale, side, search):
        return ops.accumulate_and_select(
            list(grads), list(residuals), list(velocities), k, ratios, scale=scale, side=side,
            search=search, momentum=momentum, nesterov=nesterov, **fixed,
        )  # fmt: skip

    @tf.function(input_signature=[tf.TensorSpec([workers, None], tf.int32), ks, tensors])
    def decode(messages, k, like):
        return ops.decode(messages, ops.MessageLayout.of(k, quantized), list(like))

    rng = np.random.default_rng(1)
    zeros = tuple(np.zeros(s, np.float32) for s in shapes)
    op_state = [(zeros, zeros if momentum else (), np.full(4, -1, np.float32))] * workers
    np_state = list(op_state)
    for step in range(20):
        k = np.array([2000, 30, 3, 40] if step == 7 else [20 + step, 30, 1, 10], np.int32)
        scale, side = np.float32(1 / (1 + step % 3)), np.int32(1 - 2 * (step % 2))
        search, messages = np.bool_(step % 5 == 0), []
        for worker in range(workers):
            grads = tuple(draw(rng, s, "laplace") for s in shapes)
            got = select(grads, *op_state[worker], k, scale, side, search)
            v, u, r = np_state[worker]
            expected = oracle.accumulate_and_select_numpy(
                grads, v, u, k, r, scale=scale, side=side, search=search, momentum=momentum,
                nesterov=nesterov, **fixed,
            )  # fmt: skip
            compare(got, expected)
            messages.append(expected[0])
            op_state[worker] = (tuple(got.residuals), tuple(got.velocities), got.ratios)
            np_state[worker] = tuple(map(tuple, expected[1:3])) + (expected[3],)
        totals = decode(np.stack(messages), k, zeros)
        expected = oracle.decode_numpy(messages, k, shapes, **fixed)
        for i, (a, b) in enumerate(zip(totals, expected, strict=True)):
            assert_same_bits(a, b, f"totals[{i}] of step {step}")


@loop("nesterov", [False, True])
def test_inputs_are_not_modified(backend, nesterov):
    """Also if one tensor is passed several times, and with state in variables."""
    rng = np.random.default_rng(8)
    x, y, z = (draw(rng, (5000,), "laplace") for _ in range(3))
    fixed = {"selectors": ("exact", "trimmed"), "quantized": (False, True)}
    fixed |= {"momentum": 0.5, "nesterov": nesterov}
    k, ratios = np.array([50, 60], np.int32), np.array([-1, -1], np.float32)
    expected = oracle.accumulate_and_select_numpy([x, x], [x, y], [z, y], k, ratios, **fixed)

    tx, ty, tz = tf.constant(x), tf.constant(y), tf.constant(z)
    compare(ops.accumulate_and_select([tx, tx], [tx, ty], [tz, ty], k, ratios, **fixed), expected)
    for tensor, array in ((tx, x), (ty, y), (tz, z)):
        assert_same_bits(tensor, array, "input")

    v, u = [tf.Variable(x), tf.Variable(y)], [tf.Variable(z), tf.Variable(y)]

    @tf.function
    def step(g):
        old = [tf.identity(t) for t in v + u]
        result = ops.accumulate_and_select([g, g], v, u, k, ratios, **fixed)
        for variable, new in zip(v + u, result.residuals + result.velocities, strict=True):
            variable.assign(new)
        return result, old, tf.identity(g)

    result, old, g = step(tf.constant(x))
    compare(result, expected)
    for tensor, array in zip([*old, g], [x, y, z, y, x], strict=True):
        assert_same_bits(tensor, array, "input")
    for variable, array in zip(v + u, expected[1] + expected[2], strict=True):
        assert_same_bits(variable, array, "variable")


@loop("seed", range(30 if DEEP else 10))
@loop("workers", [1, 2, 5])
def test_decode_sweep(backend, seed, workers):
    arguments, keywords = draw_case(seed)
    rng = np.random.default_rng(seed)
    shapes = [g.shape for g in arguments[0]]
    messages = []
    for _ in range(workers):
        arguments[0] = [draw(rng, s) for s in shapes]
        messages.append(select_numpy(arguments, keywords)[0])
    if workers > 1:
        messages[1] = np.zeros_like(messages[1])  # a worker with a non-finite gradient
    layout = {name: keywords[name] for name in ("selectors", "quantized")}
    expected = oracle.decode_numpy(messages, arguments[3], shapes, **layout)
    like = [tf.ones(s) for s in shapes]  # shapes only: the values must not be used
    sent = ops.MessageLayout.of(arguments[3], layout["quantized"])
    totals = ops.decode(tf.constant(np.stack(messages)), sent, like)
    for a, b in zip(totals, expected, strict=True):
        assert_same_bits(a, b, "totals")
    for a in like:
        assert (a.numpy() == 1).all()
    if not any(0 in s for s in shapes):
        assert sent.words == messages[0].size


@pytest.mark.deep  # test_fresh_process.py covers other selections
def test_results_do_not_depend_on_thread_count():
    """Repeats the comparison above in a process with four threads."""
    if os.environ.get("TF_NUM_INTRAOP_THREADS") == "4":
        pytest.skip("this is the inner run")
    chosen = "native and (large_tensor or test_select_sweep or decode_sweep)"
    chosen += " or large_tensor" if DEEP else ""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    result = subprocess.run(
        [*command, "-k", chosen, __file__],
        env={**os.environ, "TF_NUM_INTRAOP_THREADS": "4", "TF_NUM_INTEROP_THREADS": "2"},
        cwd=os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))),
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout[-5000:] + result.stderr[-2000:]


# ----------------------------------------------------------------------------- quality


def select_one(v, k, selector, quantized=False, side=1, ratio=-1.0, search=True):
    """Selects from residual `v`; returns (indices, values or the mean, residual, ratio)."""
    result = ops.accumulate_and_select(
        [tf.zeros(v.shape)], [tf.constant(v)], [], tf.constant([k]), tf.constant([float(ratio)]),
        selectors=(selector,), quantized=(quantized,), side=tf.constant(side),
        search=tf.constant(search),
    )  # fmt: skip
    message = result.message.numpy()
    count, rest = message[1], message[2:]
    if quantized:
        index, value = rest[1:][:count], rest[:1].view(np.float32)
    else:
        index, value = np.split(rest, 2)[0][:count], np.split(rest, 2)[1][:count].view(np.float32)
    return index, value, result.residuals[0].numpy(), float(result.ratios[0])


def top_energy(a, k):
    """Returns the largest sum of squares of `k` positive elements of `a`, by a plain sort."""
    return np.square(np.sort(np.maximum(a, 0).astype(np.float64))[::-1][:k]).sum()


FINITE = [name for name in DRAWS if name != "not_finite"]


@loop("name", FINITE)
@loop("selector", SELECTORS)
def test_energy_captured(any_backend, name, selector):
    """Exact and trimmed capture all the energy of k elements; threshold that of 3/4 k."""
    n = 10_001
    v = draw(np.random.default_rng(5), (n,), name)
    for k in (1, 10, 100, 3000):
        index, value, residual, _ = select_one(v, k, selector)
        assert (np.diff(index) > 0).all()
        np.testing.assert_array_equal(value, v[index])
        assert not residual[index].any()
        captured = np.square(value.astype(np.float64)).sum()
        best = top_energy(np.abs(v), k)
        if selector == "threshold":
            assert captured >= top_energy(np.abs(v), 3 * k // 4 + 1) * (1 - 1e-12)
            assert index.size <= k
        else:
            assert captured == pytest.approx(best, rel=1e-12)
            assert index.size == min(k, np.count_nonzero(v))


@loop("name", FINITE)
@loop("selector", SELECTORS)
@loop("side", [1, -1])
def test_quantized_takes_one_side(any_backend, name, selector, side):
    v = draw(np.random.default_rng(5), (10_001,), name)
    k = 100
    index, mean, residual, ratio = select_one(v, k, selector, quantized=True, side=side)
    a = side * v[index]
    assert (a > 0).all()
    energy = np.square(a.astype(np.float64)).sum()
    fewest = 3 * k // 4 + 1 if selector == "threshold" else k
    assert energy >= top_energy(side * v, fewest) * (1 - 1e-12)
    expected = v[index].astype(np.float64).mean() if index.size else 0
    np.testing.assert_allclose(mean[0], expected, rtol=1e-6)
    assert not residual[index].any()
    assert ratio == -1


@loop("name", ["normal", "laplace", "student_t"])
def test_reused_ratio_follows_the_scale(any_backend, name):
    v = draw(np.random.default_rng(5), (10_001,), name)
    chosen, _, _, ratio = select_one(v, 100, "threshold")
    again, _, _, kept = select_one(8 * v, 100, "threshold", ratio=ratio, search=False)
    np.testing.assert_array_equal(again, chosen)
    assert kept == ratio > 0


# ----------------------------------------------------------------------------- training steps

STEPS = 20


@functools.cache
def compiled_step(backend, selector, quantized, momentum):
    """Returns select and decode of one worker and tensor as a graph; cached, as tracing is slow."""
    assert ops.backend() == backend
    layout = {"selectors": (selector,), "quantized": (quantized,)}
    vector, k = tf.TensorSpec([None], tf.float32), tf.TensorSpec([1], tf.int32)
    velocities = (vector,) if momentum else ()
    ratios, side = tf.TensorSpec([1], tf.float32), tf.TensorSpec([], tf.int32)
    search = tf.TensorSpec([], tf.bool)

    @tf.function(
        input_signature=[vector, vector, velocities, k, ratios, side, search], autograph=False
    )
    def run(g, v, u, k, ratios, side, search):
        result = ops.accumulate_and_select(
            [g], [v], list(u), k, ratios, momentum=momentum, side=side, search=search, **layout
        )
        return result, ops.decode(result.message[None], result.layout, [v])[0]

    return run


class Worker:
    """A training loop with the op: keeps the state, discards non-finite steps."""

    def __init__(self, n, k, selector, momentum=0.0, quantized=False):
        self.run = compiled_step(ops.backend(), selector, quantized, momentum)
        self.k, self.step = np.array([k], np.int32), 0
        self.residual = np.zeros(n, np.float32)
        self.velocity = (np.zeros(n, np.float32),) if momentum else ()
        self.ratio = np.array([-1], np.float32)
        self.sent, self.flags, self.counts = np.zeros(n), [], []
        self.ever_sent = np.zeros(n, bool)

    def __call__(self, g):
        side, search = np.int32(1 - 2 * (self.step % 2)), np.bool_(self.step % 5 == 0)
        result, total = self.run(g, self.residual, self.velocity, self.k, self.ratio, side, search)
        flag, count = result.message.numpy()[:2]
        self.step += 1
        self.flags.append(int(flag))
        self.counts.append(int(count))
        self.sent += total.numpy()
        if flag:
            self.ever_sent |= total.numpy() != 0
            self.residual, self.ratio = result.residuals[0].numpy(), result.ratios
            self.velocity = tuple(result.velocities)

    def drain(self, steps):
        """Empties the residual in `steps` steps without gradients, and then sends no elements."""
        zero = np.zeros_like(self.residual)
        while steps and self.residual.any():
            self(zero)
            steps -= 1
        assert not self.residual.any()
        for _ in range(2):  # both sides
            self(zero)
            assert self.counts[-1] == 0 and not self.residual.any()


@loop("name", FINITE)
@loop("selector", SELECTORS)
@loop("momentum", [0.0, 0.9])
def test_twenty_steps_conserve_gradients_and_drain(any_backend, name, selector, momentum):
    """The same gradient 20 times; the residual empties after the gradient becomes zero."""
    n, k = 600, 30
    g = draw(np.random.default_rng(2), (n,), name)
    worker = Worker(n, k, selector, momentum)
    for _ in range(STEPS):
        worker(g)
        assert np.isfinite(worker.residual).all()
        available = np.count_nonzero(g)
        assert worker.counts[-1] > min(available, 0.75 * k) * 0.99 or not available
        assert worker.counts[-1] <= k
    if not momentum:
        delivered = worker.sent + worker.residual
        np.testing.assert_allclose(delivered, STEPS * g.astype(np.float64), rtol=1e-5)
    worker.velocity = (np.zeros(n, np.float32),) if momentum else ()
    worker.drain(2 * n // k)  # threshold sends 3/4 k per step in the worst case
    assert set(worker.flags) == {1}
    if not momentum:
        np.testing.assert_allclose(worker.sent, STEPS * g.astype(np.float64), rtol=1e-5)
    np.testing.assert_array_equal(worker.ever_sent, g != 0)


@loop("selector", SELECTORS)
def test_elements_of_constant_gradients_rotate(any_backend, selector):
    """With k = n/20, every element of a constant gradient is sent within 20 steps (exact top-k)."""
    n = 600
    worker = Worker(n, n // STEPS, selector)
    for _ in range(STEPS):
        worker(np.full(n, 0.125, np.float32))
    if selector == "threshold":  # between k/2 and 1.5 k
        assert worker.ever_sent.mean() > 0.5
        for _ in range(STEPS):
            worker(np.full(n, 0.125, np.float32))
    assert worker.ever_sent.all()


@loop("selector", SELECTORS)
def test_outlier_does_not_block_the_rest(any_backend, selector):
    """One huge element in every step: at least k/2 of the others must be sent as well."""
    rng = np.random.default_rng(4)
    worker = Worker(2000, 100, selector)
    for _ in range(STEPS):
        g = rng.standard_normal(2000).astype(np.float32)
        g[13] = 1e4
        worker(g)
    assert min(worker.counts) > 50
    assert worker.ever_sent.mean() > 0.4
    assert worker.residual[13] == 0


@loop("name", FINITE)
@loop("selector", SELECTORS)
def test_quantized_twenty_steps_drain(any_backend, name, selector):
    n, k = 600, 30
    worker = Worker(n, k, selector, quantized=True)
    g = draw(np.random.default_rng(2), (n,), name)
    for _ in range(STEPS):
        worker(g)
        assert np.isfinite(worker.residual).all() and np.isfinite(worker.sent).all()
    worker.drain(4 * n // k)  # one side every second step
    # The mean of a selection preserves its sum, and so the sum over all elements.
    scale = np.abs(g.astype(np.float64)).sum() * STEPS
    assert abs(worker.sent.sum() - STEPS * g.sum(dtype=np.float64)) <= 1e-5 * scale
    np.testing.assert_array_equal(worker.ever_sent, g != 0)


@loop("value", [np.nan, np.inf, -np.inf])
@loop("selector", SELECTORS)
@loop("momentum", [0.0, 0.9])
def test_nonfinite_steps_change_no_state(any_backend, value, selector, momentum):
    rng = np.random.default_rng(6)
    worker, clean = (Worker(500, 25, selector, momentum) for _ in range(2))
    for step in range(STEPS):
        g = rng.standard_normal(500).astype(np.float32)
        if step % 4 == 1:
            g[step] = value
            worker(g)
            assert worker.flags[-1] == 0 and worker.counts[-1] == 0
            clean.step += 1
        else:
            worker(g)
            clean(g)
            assert worker.flags[-1] == 1
    assert np.isfinite(worker.residual).all()
    np.testing.assert_array_equal(worker.residual, clean.residual)
    np.testing.assert_array_equal(worker.sent, clean.sent)
