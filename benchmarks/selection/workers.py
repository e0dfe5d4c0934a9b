"""Time that each worker spends on messages by the number of workers, beside its dense update.

    python benchmarks/selection/workers.py --json workers.json

measures, on one tensor of n elements and on `--threads` threads, the median of rounds in which all
take turns:

    code         selects by `CodedTopK`: accumulates, selects and codes
    decode P     decodes the messages of P workers and adds them up, dense
    update       subtracts a dense gradient times the rate from the variable, as SGD does

`ratio` is (code + decode P) / update. Below 1 a step with P workers spends less on its messages
than on its update. Set GLIBC_TUNABLES=glibc.malloc.hugetlb=1 as the launcher does, or
page faults take most of the time.
"""

from __future__ import annotations

import argparse
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
    """What is measured, by name; each is a function without arguments."""
    import numpy as np
    import tensorflow as tf

    from tf_redsync import ops
    from tf_redsync.methods.common.coded_selection import decode_messages, select_and_code

    rng, k = np.random.default_rng(0), max(1, round(density * n))
    gradients = [tf.constant(rng.standard_normal(n, np.float32)) for _ in range(max(workers))]
    residual, weights = tf.zeros([n]), tf.Variable(tf.zeros([n]))

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
        plain = decode_messages(received, [residual], layout, 1)
        return ops.decode(plain, layout, [residual])[0][0]

    @tf.function(autograph=False)
    def updated():
        weights.assign_sub(tf.constant(0.01) * gradients[0], read_value=False)
        return weights.read_value()[0]

    found = {"code": coded, "update": updated}
    found |= {f"decode {p}": lambda p=p: decoded(messages[:p]) for p in workers}
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
            ratio = (ms["code"] + ms[f"decode {p}"]) / ms["update"]
            rows.append({"n": 2**args.log2_size, "density": density, "workers": p, "ratio": ratio})
            rows[-1] |= {"code": ms["code"], "decode": ms[f"decode {p}"], "update": ms["update"]}
            print(f"{density:6g} {p:3} workers  code {ms['code']:.1f} ms, decode "
                  f"{ms[f'decode {p}']:.1f}, update {ms['update']:.1f}: {ratio:.2f}",
                  flush=True)  # fmt: skip
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
