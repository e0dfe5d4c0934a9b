"""Time that each worker spends on messages by the number of workers, and on its dense update.

    python benchmarks/selection/workers.py --json workers.json

measures, on one tensor of n elements and on `--threads` threads, the median of rounds in which all
alternate:

    accumulate   adds a gradient to a residual: the minimum work of a selection
    code         selects by `CodedTopK`: accumulates, selects and codes
    decode P     decodes the messages of P workers and adds them, dense
    descend P    decodes them and updates the variable at their elements, as for plain SGD
    update       subtracts a dense gradient times the rate from the variable, as SGD does

`dense ratio` is (code + decode P) / update, and `sparse ratio` (code + descend P) / update. Below 1
a step with P workers spends less time on its messages than on its update; a sparse one has no other
update. Set GLIBC_TUNABLES=glibc.malloc.hugetlb=1 as the launcher does; otherwise page faults take
most of the time.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import pathlib
import statistics
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

WARM_UP = 2


def functions(n: int, density: float, workers: list[int]) -> dict:
    """The measured functions by name, without arguments."""
    import numpy as np
    import tensorflow as tf

    from tf_redsync import ops
    from tf_redsync.methods.common.coded_selection import select_and_code, uncode_messages
    from tf_redsync.ops import selection, sparse

    rng, k = np.random.default_rng(0), max(1, round(density * n))
    gradients = [tf.constant(rng.standard_normal(n, np.float32)) for _ in range(max(workers))]
    residual, weights, kept = tf.zeros([n]), tf.Variable(tf.zeros([n])), tf.Variable(tf.zeros([n]))

    def code(gradient):
        return select_and_code([gradient], [residual], [], [k], value_bits=1)

    layout = code(gradients[0]).layout
    messages = tf.stack([code(g).message for g in gradients])

    @tf.function(autograph=False)
    def coded():
        selected = code(gradients[0])
        return selected.message[0], selected.residuals[0][0]

    @tf.function(autograph=False)
    def decoded(received):
        plain = uncode_messages(received, [residual], layout, 1)
        return ops.decode(plain, layout, [residual])[0][0]

    @tf.function(autograph=False)
    def descended(received):
        plain = uncode_messages(received, [residual], layout, 1)
        (total,) = selection.sparse_totals(plain, layout)
        sparse.descend(weights, total, tf.constant(0.01))
        return weights.read_value()[0]

    @tf.function(autograph=False)
    def accumulated():
        kept.assign_add(gradients[0], read_value=False)
        return kept.read_value()[0]

    @tf.function(autograph=False)
    def updated():
        weights.assign_sub(tf.constant(0.01) * gradients[0], read_value=False)
        return weights.read_value()[0]

    found = {"accumulate": accumulated, "code": coded, "update": updated}
    for p in workers:
        found[f"decode {p}"] = functools.partial(decoded, messages[:p])
        found[f"descend {p}"] = functools.partial(descended, messages[:p])
    return found


def measure(found: dict, rounds: int) -> dict[str, float]:
    """Medians in ms."""
    times: dict[str, list[float]] = {name: [] for name in found}
    for number in range(WARM_UP + rounds):
        for name, run in found.items():
            start = time.perf_counter()
            run()
            if number >= WARM_UP:
                times[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(values) for name, values in times.items()}


def main(arguments=None) -> None:
    """Measures, prints, writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--log2_size", type=int, default=24, help="elements, as a power of two")
    add("--densities", type=lambda t: [float(d) for d in t.split(",")], default="0.01,0.03")
    add("--workers", type=lambda t: [int(p) for p in t.split(",")], default="2,4,8,16")
    add("--threads", type=int, default=1)
    add("--rounds", type=int, default=15)
    add("--json", help="file for the rows")
    args = parser.parse_args(arguments)
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(args.threads)
    rows = []
    for density in args.densities:
        ms = measure(functions(2**args.log2_size, density, args.workers), args.rounds)
        for p in args.workers:
            row = {"n": 2**args.log2_size, "density": density, "workers": p}
            row |= {name: ms[name] for name in ("accumulate", "code", "update")}
            for name, kind in (("decode", "dense"), ("descend", "sparse")):
                row[name] = ms[f"{name} {p}"]
                row[f"{kind} ratio"] = (ms["code"] + row[name]) / ms["update"]
            rows.append(row)
            print(", ".join(f"{name} {value:.4g}" for name, value in row.items()), flush=True)
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
