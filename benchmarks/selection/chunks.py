r"""Time of top-k in every chunk against a plain pass over the same memory.

    python benchmarks/selection/chunks.py --json chunks.json

measures, in turns, in several rounds, on one thread:

    read         a pass over the array that only reads it: numpy's maximum
    memcpy       copies the array
    chunked      `ops.selection.chunked_top_k`: the k largest of each chunk of 4096, by position
    composed     the same in pure TensorFlow
    tf_chunks    tf.math.top_k of the magnitudes of each chunk, and nothing else
    tf_top_k     tf.math.top_k of all magnitudes, for as many elements
    exact        `ops.accumulate_and_select`, for as many: accumulate pass and global selection

`ms` is the median over the rounds, `ratio` the median of the ratios to `read` in the same round.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

CHUNK = 4096


def functions(kind: str, n: int, density: float) -> dict:
    """The ops as functions without arguments, by name, of the same `n` elements."""
    import numpy as np
    import tensorflow as tf

    from benchmarks.selection import inputs
    from tf_redsync import ops
    from tf_redsync.ops.selection import chunked_top_k

    array, k = inputs.make(kind, n), round(density * CHUNK)
    copy, chunks = np.empty_like(array), tf.constant(array.reshape(-1, CHUNK))
    vector, zeros, total = tf.reshape(chunks, [-1]), tf.zeros([n]), k * (n // CHUNK)

    def traced(function, backend="native"):
        ops.set_backend(backend)
        concrete = tf.function(function, autograph=False).get_concrete_function()
        ops.set_backend(None)
        return concrete

    return {
        "read": array.max,
        "memcpy": lambda: np.copyto(copy, array),
        "chunked": traced(lambda: chunked_top_k(chunks, k)),
        "composed": traced(lambda: chunked_top_k(chunks, k), "tensorflow"),
        "tf_chunks": traced(lambda: tf.math.top_k(tf.abs(chunks), k, sorted=False)),
        "tf_top_k": traced(lambda: tf.math.top_k(tf.abs(vector), total, sorted=False)),
        "exact": traced(lambda: ops.accumulate_and_select([vector], [zeros], [], [total]).message),
    }


def measure(kind: str, n: int, density: float, rounds: int) -> list[dict]:
    """A row for each op."""
    import numpy as np

    found = functions(kind, n, density)
    times: dict[str, list[float]] = {name: [] for name in found}
    for number in range(rounds + 1):
        for name, function in found.items():
            start = time.perf_counter()
            function()
            if number:  # The first round warms up caches and memory.
                times[name].append(1e3 * (time.perf_counter() - start))
    return [
        {
            "op": name, "input": kind, "n": n, "density": density, "rounds": rounds,
            "ms": float(np.median(ms)), "ratio": float(np.median(np.divide(ms, times["read"]))),
        }
        for name, ms in times.items()
    ]  # fmt: skip


def parse(arguments=None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--log2_sizes", default="22,23,24", help="elements, as powers of two, from 12 on")
    add("--densities", default="0.01,0.03")
    add("--inputs", default="normal,student_t,gradient,constant")
    add("--rounds", type=int, default=9)
    add("--threads", type=int, default=1, help="intra-op threads of TensorFlow")
    add("--json", help="file for the rows")
    return parser.parse_args(arguments)


def main(arguments=None) -> None:
    """Measures, prints, writes."""
    args = parse(arguments)
    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(args.threads)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    rows = []
    for log2 in map(int, args.log2_sizes.split(",")):
        for kind in args.inputs.split(","):
            for density in map(float, args.densities.split(",")):
                found = measure(kind, 2**log2, density, args.rounds)
                rows += found
                text = "  ".join(f"{r['op']} {r['ms']:.2f} ({r['ratio']:.1f})" for r in found)
                print(f"2^{log2} {kind} {density:g}: {text}", flush=True)
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
