"""The ops of the selection benchmark, as functions without arguments.

All of them run the same step on the same arrays of n float32: u = m u + g, v = v + u (without
momentum: v = v + g). All but `accumulate` then move the k largest |v| into a message.

Ops in a graph take their state from a staging area and return the new state to it. Meanwhile
nothing else references it, so the native ops write it in place, as the plain pass does: the same
traffic, in steady state, without allocation. `calls` such steps are one call of the graph. In
training the state is in variables, which keep the old state until the step is known to be finite.
The new state is then written to other memory, bypassing the caches: `exact_variables` measures
that.

With a gradient of bfloat16: `bfloat16` reads it directly, `cast` casts it to float32 first.
"""

from __future__ import annotations

import ctypes
import functools
import os
import pathlib
import subprocess
import tempfile

import numpy as np
import tensorflow as tf

from tf_redsync import ops
from tf_redsync.methods.common.coded_selection import select_and_code

NATIVE = ("exact", "trimmed", "threshold")
# Ops with few repetitions at large n.
SLOW = ("reference", "tf_top_k", "argpartition")
OPS = (*NATIVE, "coded", *SLOW, "memcpy", "accumulate", "decode8")
NARROW = ("bfloat16", "cast")  # Measured on request only.
SEARCH_INTERVAL = 5  # Steps from one threshold search to the next, RedSync's default.
RANKS = 8
PLAIN_PASS = r"""
extern "C" void plain(const float* g, float* u, float* v, float m, long n) {
  if (m == 0) {
    for (long i = 0; i < n; ++i) v[i] += g[i];
  } else {
    for (long i = 0; i < n; ++i) { u[i] = m * u[i] + g[i]; v[i] = v[i] + u[i]; }
  }
}
"""


@functools.cache
def compile_plain_pass():
    """The plain pass as a function of numpy arrays (g, u, v) and the momentum, in place."""
    with tempfile.TemporaryDirectory() as folder:
        source, library = f"{folder}/plain.cc", f"{folder}/plain.so"
        pathlib.Path(source).write_text(PLAIN_PASS)
        flags = ["-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-shared", "-fPIC"]
        subprocess.run([os.environ.get("CXX", "g++"), *flags, source, "-o", library], check=True)
        plain = ctypes.CDLL(library).plain
    plain.restype = None

    def run(g, u, v, momentum):
        pointers = [x.ctypes.data_as(ctypes.c_void_p) for x in (g, u, v)]
        plain(*pointers, ctypes.c_float(momentum), ctypes.c_long(g.size))

    return run


def top_k_step(g, v, u, k, momentum):
    """The step with TensorFlow's own ops: (message, v, u)."""
    if momentum:
        u = momentum * u + g
        v = v + u
    else:
        v = v + g
    _, indices = tf.math.top_k(tf.abs(v), k, sorted=False)
    values = tf.gather(v, indices)
    at, zeros = indices[:, None], tf.zeros_like(values)
    v = tf.tensor_scatter_nd_update(v, at, zeros)
    if momentum:
        u = tf.tensor_scatter_nd_update(u, at, zeros)
    message = tf.concat([[1, k], indices, tf.bitcast(values, tf.int32)], 0)
    return message, v, u


def select(selector, g, v, u, k, momentum, ratios, search):
    """The step with this library's op: (message, v, u, ratios)."""
    selection = ops.accumulate_and_select(
        [g], [v], [u] if momentum else [], [k], ratios,
        selectors=selector, momentum=momentum, search=search,
    )  # fmt: skip
    velocity = selection.velocities[0] if momentum else u
    return selection.message, selection.residuals[0], velocity, selection.ratios


class Staged:
    """Tensors that a graph can take and put back without a copy; it holds the only reference."""

    def __init__(self, name: str, tensors):
        self.name, self.types = name, [t.dtype for t in tensors]
        self.shapes = [t.shape for t in tensors]
        self.put(tensors)

    def put(self, tensors) -> None:
        """Stages tensors."""
        tf.raw_ops.Stage(values=tensors, shared_name=self.name)

    def take(self) -> list[tf.Tensor]:
        """Takes them out."""
        tensors = tf.raw_ops.Unstage(dtypes=self.types, shared_name=self.name)
        return [tf.ensure_shape(t, s) for t, s in zip(tensors, self.shapes, strict=True)]


@functools.cache
def chain(op: str, n: int, k: int, momentum: float, calls: int):
    """A graph function (g) of `calls` steps of `op` on the state staged as "`op` `n`", traced."""
    ops.set_backend("tensorflow" if op == "reference" else "native")
    staged = Staged(f"{op} {n}", [tf.zeros([n])] * 2)

    @tf.function(autograph=False)
    def run(g):
        v, u = staged.take()
        ratios, checks = tf.constant([-1.0]), []
        for i in range(calls):
            if op == "tf_top_k":
                message, v, u = top_k_step(g, v, u, k, momentum)
            elif op == "coded":
                velocities = [u] if momentum else []
                coded = select_and_code([g], [v], velocities, [k], value_bits=1, momentum=momentum)
                message, (v,) = coded.message, coded.residuals
                (u,) = coded.velocities or [u]
            else:
                selector, search = (op if op in NATIVE else "exact"), i % SEARCH_INTERVAL == 0
                grad = g
                if op == "cast":
                    # in each step, not hoisted out of the loop
                    with tf.control_dependencies(checks):
                        grad = tf.identity(tf.cast(g, tf.float32))
                message, v, u, ratios = select(selector, grad, v, u, k, momentum, ratios, search)
            checks.append(message[1])
        staged.put([v, u])
        return tf.add_n(checks)

    dtype = tf.bfloat16 if op in NARROW else tf.float32
    run = run.get_concrete_function(tf.TensorSpec([n], dtype))
    staged.take()
    return run, staged


@functools.cache
def decode_chain(n: int, k: int, calls: int):
    """A graph function (messages) that adds up the messages of RANKS workers, `calls` times."""
    ops.set_backend("native")
    staged, layout = Staged(f"decode {n} {k}", [tf.zeros([n])]), ops.MessageLayout.of([k])

    @tf.function(autograph=False)
    def run(messages):
        (total,) = staged.take()
        for _ in range(calls):
            (total,) = ops.decode(messages, layout, [total])
        staged.put([total])
        return messages[0, 0]

    return run.get_concrete_function(tf.TensorSpec([RANKS, layout.words], tf.int32))


def random_messages(n: int, k: int) -> tf.Tensor:
    """Messages of RANKS workers that selected k elements at random, one of every n // k."""
    rng = np.random.default_rng(1)
    stretch, rows = n // k, []
    for _ in range(RANKS):
        indices = np.arange(k) * stretch + rng.integers(0, stretch, k)
        values = rng.standard_normal(k, np.float32).view(np.int32)
        rows.append(np.concatenate([[1, k], indices, values]).astype(np.int32))
    return tf.constant(np.stack(rows))


class Cell:
    """All ops for one size, density, input and momentum.

    Args:
        g: the gradient, float32 [n].
        density: fraction of elements to select.
        momentum: 0 for no velocity.
    """

    def __init__(self, g: np.ndarray, density: float, momentum: float):
        self.n, self.momentum = g.size, momentum
        self.k = max(1, round(density * g.size))
        self.arrays = [g, np.zeros_like(g), np.zeros_like(g)]
        self.copy = np.empty_like(g)
        self.g = tf.constant(g)
        self.v, self.u = self._warm_state()
        self.messages = random_messages(self.n, self.k)
        self._plain = compile_plain_pass()
        self._staged: list[Staged] = []

    def _warm_state(self) -> tuple[tf.Tensor, tf.Tensor]:
        """Residual and velocity after three steps, each with the gradient shifted."""
        v = u = tf.zeros_like(self.g)
        ops.set_backend("native")
        for shift in (1, 3, 7):
            g = tf.roll(self.g, self.n * shift // 8, 0)
            none = tf.constant([-1.0])
            _, v, u, _ = select("exact", g, v, u, self.k, self.momentum, none, True)
        return v, u

    def function(self, op: str, calls: int):
        """A function without arguments that runs `calls` steps of `op`."""
        if op in ("accumulate", "memcpy", "argpartition"):
            return lambda: [self._eager(op) for _ in range(calls)]
        if op == "exact_variables":
            step = self._variables()
            return lambda: [step().numpy() for _ in range(calls)]
        if op == "decode8":
            decode = decode_chain(self.n, self.k, calls)
            return lambda: decode(self.messages).numpy()
        run, staged = chain(op, self.n, self.k, self.momentum, calls)
        staged.put([self.v + 0.0, self.u + 0.0])  # copies, because these two remain in use
        self._staged.append(staged)
        g = tf.cast(self.g, tf.bfloat16) if op in NARROW else self.g
        return lambda: run(g).numpy()

    def close(self) -> None:
        """Drops the state of the graphs."""
        for staged in self._staged:
            staged.take()

    def _eager(self, op: str) -> None:
        g, u, v = self.arrays
        if op == "memcpy":
            np.copyto(self.copy, g)
            return
        self._plain(g, u, v, self.momentum)
        if op == "argpartition":
            indices = np.argpartition(np.abs(v), self.n - self.k)[self.n - self.k :]
            message = v[indices]
            v[indices] = 0
            if self.momentum:
                u[indices] = 0
            np.concatenate([indices.astype(np.int32), message.view(np.int32)])

    def _variables(self):
        v, u = (tf.Variable(t) for t in (self.v, self.u))
        ops.set_backend("native")

        @tf.function
        def run():
            message, new_v, new_u, _ = select(
                "exact", self.g, v.read_value(), u.read_value(), self.k, self.momentum,
                tf.constant([-1.0]), True,
            )  # fmt: skip
            v.assign(new_v, read_value=False)
            if self.momentum:
                u.assign(new_u, read_value=False)
            return message[0]

        return run.get_concrete_function()  # Traces it.
