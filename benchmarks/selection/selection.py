r"""Time of accumulate-and-select against the plain accumulate pass over the same arrays.

    python benchmarks/selection/selection.py --json selection.json --plot selection.png

sweeps size, density and input, and measures in one run, on one thread:

    exact, trimmed, threshold   this library's selectors (threshold: a search every fifth step)
    coded                       `exact` with a coded message: Golomb positions, 1-bit values
    reference                   `exact` in pure TensorFlow
    tf_top_k                    accumulate, tf.math.top_k of the magnitudes, gather, scatter zeros
    argpartition                the plain pass and the same selection by numpy.argpartition
    memcpy                      copies one of the arrays
    accumulate                  the plain pass, a compiled loop, in place: u = m u + g; v = v + u
    decode8                     adds 8 messages into a dense tensor (at random positions)

`selection_ops.py` defines the ops, `inputs.py` the inputs. The ops alternate in several rounds;
`ms` is the median, `ratio_to_accumulate` the median of the ratios to `accumulate` in the same
round. Slow ops run in fewer rounds; see `rounds` and `calls` (steps timed together). From 2^26
elements on the slow ones (reference, tf_top_k, argpartition) run with the first input only. The
JSON file holds a list of rows.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# Equal page sizes: numpy requests huge pages, TensorFlow does not.
os.environ.setdefault("NUMPY_MADVISE_HUGEPAGE", "0")
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from benchmarks.selection.counters import Instructions

SIZES = "14,16,18,20,22,24,26"
# Weights of a size in the total time, and the maximum rounds of an op.
WEIGHTS = {22: 3.0, 24: 12.0, 26: 16.0}
MAX_ROUNDS = 15
LARGEST = 26


def calls_at_once(op: str, n: int) -> int:
    """Number of steps to time together: many at small sizes, to amortize overheads."""
    from benchmarks.selection.selection_ops import SLOW

    if op in SLOW:
        return 4 if n <= 2**16 else 1
    return min(64, max(2, 2**22 // n))


class Op:
    """One op in one cell: its function, times, and maximum number of rounds."""

    def __init__(self, function, calls, seconds, instructions):
        self.function, self.calls, self.instructions = function, calls, instructions
        self.ms: list[float] = []
        self.counts: list[float] = []
        first = self.run() * calls / 1e3
        if first > 1:  # A warm-up is unnecessary there, and expensive.
            self.rounds = 1
            return
        cost = self.run() * calls / 1e3
        self.ms, self.counts = [], []
        self.rounds = max(2, min(MAX_ROUNDS, int(seconds / cost)))

    def run(self) -> float:
        """Time of a step in milliseconds."""
        before, start = self.instructions.read(), time.perf_counter()
        self.function()
        self.ms.append(1e3 * (time.perf_counter() - start) / self.calls)
        if before is not None:
            self.counts.append((self.instructions.read() - before) / self.calls)
        return self.ms[-1]


def ops_of_cell(names, log2_size: int, kind: str, first_kind: str) -> list[str]:
    """The ops to measure; at the largest sizes, slow ones with one input only."""
    from benchmarks.selection.selection_ops import SLOW

    everything = log2_size < LARGEST or kind == first_kind
    return [name for name in names if everything or name not in SLOW]


def measure_cell(g, kind, density, momentum, names, seconds, instructions) -> list[dict]:
    """Rows of all ops for one input; `seconds` is the approximate duration."""
    import numpy as np

    from benchmarks.selection.selection_ops import Cell

    cell, ops, n = Cell(g, density, momentum), {}, g.size
    for name in names:
        calls = calls_at_once(name, n)
        share = seconds / len(names)
        ops[name] = Op(cell.function(name, calls), calls, share, instructions)
    ratios: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(max(op.rounds for op in ops.values())):
        base = ops["accumulate"].run()
        for name, op in ops.items():
            if name != "accumulate" and len(op.ms) < op.rounds:
                ratios[name].append(op.run() / base)
    cell.close()
    base = np.median(ops["accumulate"].ms)
    for name, op in ops.items():
        ratios[name] = ratios[name] or [np.median(op.ms) / base]
    return [
        {
            "op": name, "n": n, "density": density, "input": kind, "momentum": momentum,
            "ms": float(np.median(op.ms)), "min_ms": min(op.ms),
            "ratio_to_accumulate": float(np.median(ratios[name])),
            "instructions_per_element": float(np.median(op.counts)) / n if op.counts else None,
            "rounds": len(op.ms), "calls": op.calls,
        }
        for name, op in ops.items()
    ]  # fmt: skip


def sweep(args, instructions) -> list[dict]:
    """Measures everything; prints a line per cell."""
    import tensorflow as tf

    from benchmarks.selection import inputs, selection_ops

    tf.config.threading.set_intra_op_parallelism_threads(args.threads)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    names = selection_ops.OPS if args.ops is None else tuple(args.ops.split(","))
    names = ("accumulate", *(name for name in names if name != "accumulate"))
    cells = [(b, i) for b in args.log2_sizes for i in args.inputs]
    total = sum(WEIGHTS.get(b, 1.0) for b, _ in cells) * len(args.densities) * len(args.momenta)
    print(f"{'log2 n':>6} {'input':10}{'density':>8}{'mom.':>5}  ms of a step; * in one round only")
    print(" " * 31 + "".join(f"{name:>13}" for name in names), flush=True)
    rows = []
    for log2_size, kind in cells:
        g = inputs.make(kind, 2**log2_size)
        for density in args.densities:
            for momentum in args.momenta:
                seconds = args.seconds * WEIGHTS.get(log2_size, 1.0) / total
                mine = ops_of_cell(names, log2_size, kind, args.inputs[0])
                found = measure_cell(g, kind, density, momentum, mine, seconds, instructions)
                rows += found
                text = {r["op"]: f"{r['ms']:.4g}{'*' if r['rounds'] == 1 else ' '}" for r in found}
                line = "".join(f"{text.get(name, '- '):>13}" for name in names)
                print(f"{log2_size:6} {kind:10}{density:8g}{momentum:5g} {line}", flush=True)
    return rows


def plot(rows: list[dict], path: str, kind: str, momentum: float) -> None:
    """Plots nanoseconds per element over the size, one panel per density."""
    from matplotlib.figure import Figure

    rows = [r for r in rows if r["input"] == kind and r["momentum"] == momentum]
    densities = sorted({r["density"] for r in rows})
    figure = Figure(figsize=(5.5 * len(densities), 4.8))
    panels = figure.subplots(1, len(densities), sharey=True, squeeze=False)
    for panel, density in zip(panels[0], densities, strict=True):
        for i, op in enumerate(dict.fromkeys(r["op"] for r in rows)):
            points = sorted(
                (r["n"], r["ms"]) for r in rows if (r["op"], r["density"]) == (op, density)
            )
            n, ms = zip(*points, strict=True)
            ns = [1e6 * m / size for size, m in points]
            style = "--" if op in ("accumulate", "memcpy") else "-"
            panel.loglog(n, ns, style, marker="o", markersize=4, label=op, color=f"C{i}")
        panel.set_xscale("log", base=2)
        panel.set_title(f"density {density:g}, {kind} input, momentum {momentum:g}")
        panel.set_xlabel("elements")
        panel.grid(True, which="both", alpha=0.25)
    panels[0][0].set_ylabel("ns per element")
    panels[0][-1].legend(fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5))
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def measure_gpu(args) -> list[dict]:
    """Rows measured on a GPU.

    Raises:
        SystemExit: if the GPU part or its GPU is missing.
    """
    try:
        from benchmarks.selection import gpu
    except ImportError as error:
        raise SystemExit(f"`--device` gpu cannot be measured: {error}.") from error
    sizes = [2**b for b in args.log2_sizes]
    return gpu.measure(sizes, args.densities, args.inputs, args.momenta)


def parse(arguments=None) -> argparse.Namespace:
    """Parses the command line."""
    from benchmarks.selection.inputs import INPUTS

    def floats(text):
        return [float(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--log2_sizes", type=lambda t: [int(part) for part in t.split(",")], default=SIZES,
        help="elements, as powers of two")  # fmt: skip
    add("--densities", type=floats, default="0.001,0.01")
    add("--inputs", type=lambda t: t.split(","), default=",".join(INPUTS))
    add("--momentum", dest="momenta", type=floats, default="0.9", help="one or several; 0: none")
    add("--ops", help="default: all; exact_variables, bfloat16 and cast are measured when named")
    add("--seconds", type=float, default=60, help="to spend on rounds; warming up comes on top")
    add("--threads", type=int, default=1, help="intra-op threads of TensorFlow")
    add("--device", choices=("cpu", "gpu"), default="cpu")
    add("--json", help="file for the rows")
    add("--plot", help="PNG file for a picture")
    return parser.parse_args(arguments)


def main() -> None:
    """Measures, prints, writes."""
    args = parse()
    if args.device == "gpu":
        rows = measure_gpu(args)
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
        instructions = Instructions()  # Before TensorFlow starts its threads.
        if instructions.problem:
            print(f"instructions are not counted ({instructions.problem})")
        start = time.perf_counter()
        rows = sweep(args, instructions)
        print(f"{len(rows)} rows in {time.perf_counter() - start:.0f} s")
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps(rows, indent=1) + "\n")
    if args.plot:
        plot(rows, args.plot, args.inputs[0], args.momenta[0])


if __name__ == "__main__":
    main()
