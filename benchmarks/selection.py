r"""Time of accumulate-and-select against the plain accumulate pass over the same arrays.

    python benchmarks/selection.py --log2_sizes 22,24 --density 0.001 --json selection.json

Rows: the plain pass (u = m u + g; v = v + u, a compiled loop, in place); the native selectors; the
pure-TensorFlow twin; tf.math.top_k after an accumulation. The native ops run as a chain in one
graph, each on the outputs of the one before, so that they work in place like the plain pass; the
time is the slope over the length of the chain. Methods take turns; medians are shown.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

from tf_redsync import ops  # noqa: E402

CHAIN = 5  # ops in the longer of the two chains; the shorter has one
PLAIN_PASS = r"""
extern "C" void plain(const float* g, float* u, float* v, float m, long n) {
  if (m == 0) {
    for (long i = 0; i < n; ++i) v[i] += g[i];
  } else {
    for (long i = 0; i < n; ++i) { u[i] = m * u[i] + g[i]; v[i] = v[i] + u[i]; }
  }
}
"""


def compile_plain_pass():
    """The plain pass as a function of numpy arrays."""
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


def chain(length: int, args, momentum: float, selector: str, search: bool, ratios):
    """A function that runs `length` selections one after the other, in place but for the first."""

    @tf.function
    def run(g, v, u):
        velocities = [u] if momentum else []
        residuals, kept, checks = [v], ratios, []
        for _ in range(length):
            selection = ops.accumulate_and_select(
                [g], residuals, velocities, args.k, kept, selectors=[selector], quantized=[False],
                momentum=momentum, search=search,
            )  # fmt: skip
            residuals, velocities = selection.residuals, selection.velocities
            kept = selection.ratios
            checks.append(tf.reduce_sum(selection.message))
        return tf.add_n(checks)

    return run


def timed(function, *inputs) -> float:
    """Milliseconds of one call."""
    start = time.perf_counter()
    result = function(*inputs)
    if result is not None:
        tf.nest.map_structure(lambda t: t.numpy(), result)
    return 1e3 * (time.perf_counter() - start)


def measure(n: int, density: float, momentum: float, repeats: int, slow: bool) -> dict:
    """Median and smallest milliseconds per method, for one tensor of `n` elements."""
    rng = np.random.default_rng(0)
    g, u, v = (rng.standard_normal(n, np.float32) for _ in range(3))
    args = argparse.Namespace(k=tf.constant([max(1, round(density * n))]))
    inputs = [tf.constant(x) for x in (g, v, u)]
    none = tf.constant([-1.0])

    ops.set_backend("native")
    selectors = [("exact", True), ("trimmed", True), ("threshold", True), ("threshold", False)]
    names = ["exact", "trimmed", "threshold search", "threshold reuse"]
    chains = {}
    for name, (selector, search) in zip(names, selectors, strict=True):
        ratios = none
        if not search:
            found = ops.accumulate_and_select(
                inputs[:1], inputs[1:2], inputs[2:] if momentum else [], args.k, none,
                selectors=[selector], quantized=[False], momentum=momentum,
            )  # fmt: skip
            ratios = found.ratios
        chains[name] = [chain(r, args, momentum, selector, search, ratios) for r in (1, 1 + CHAIN)]
        for function in chains[name]:
            function(*inputs)  # traces

    plain = compile_plain_pass()
    times: dict = {name: [] for name in ["accumulate", *names]}
    for _ in range(repeats):
        plain(g, u, v, momentum)
        start = time.perf_counter()
        for _ in range(CHAIN):
            plain(g, u, v, momentum)
        times["accumulate"].append(1e3 * (time.perf_counter() - start) / CHAIN)
        for name, (short, long) in chains.items():
            times[name].append((timed(long, *inputs) - timed(short, *inputs)) / CHAIN)
    if slow:
        times |= measure_slow(args, inputs, momentum, none, max(3, repeats // 4))
    return {
        name: {"median_ms": float(np.median(t)), "min_ms": float(np.min(t))}
        for name, t in times.items()
    }


def measure_slow(args, inputs, momentum, none, repeats) -> dict:
    """Times of the twin and of tf.math.top_k."""
    ops.set_backend("tensorflow")
    functions = {
        f"twin {selector}": chain(1, args, momentum, selector, True, none)
        for selector in ("exact", "threshold")
    }

    @tf.function
    def top_k(g, v, u):
        values = v + (momentum * u + g)
        _, indices = tf.math.top_k(tf.abs(values), args.k[0], sorted=False)
        return tf.reduce_sum(tf.gather(values, indices))

    functions["tf.math.top_k"] = top_k
    times = {}
    for name, function in functions.items():
        function(*inputs)
        times[name] = [timed(function, *inputs) for _ in range(repeats)]
    return times


def main() -> None:
    """Measures and prints a table per size and momentum."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--log2_sizes", default="22,24", help="elements, as powers of two")
    parser.add_argument("--density", type=float, default=0.001)
    parser.add_argument("--momenta", default="0,0.9")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1, help="intra-op threads of TensorFlow")
    parser.add_argument("--native_only", action="store_true", help="leave twin and top_k out")
    parser.add_argument("--json", help="file for the results")
    args = parser.parse_args()
    tf.config.threading.set_intra_op_parallelism_threads(args.threads)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    results = []
    for log2_size in map(int, args.log2_sizes.split(",")):
        for momentum in map(float, args.momenta.split(",")):
            rows = measure(2**log2_size, args.density, momentum, args.repeats, not args.native_only)
            base = rows["accumulate"]
            print(f"\n2^{log2_size} elements, density {args.density}, momentum {momentum}, "
                  f"{args.threads} threads", flush=True)  # fmt: skip
            print(f"{'':18}{'median ms':>10}{'ratio':>8}{'min ms':>10}{'ratio':>8}")
            for name, row in rows.items():
                row["ratio"] = row["median_ms"] / base["median_ms"]
                print(f"{name:18}{row['median_ms']:10.2f}{row['ratio']:8.2f}"
                      f"{row['min_ms']:10.2f}{row['min_ms'] / base['min_ms']:8.2f}")  # fmt: skip
            results.append({"size": 2**log2_size, "momentum": momentum, "methods": rows})
    if args.json:
        record = {"density": args.density, "threads": args.threads, "results": results}
        pathlib.Path(args.json).write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
