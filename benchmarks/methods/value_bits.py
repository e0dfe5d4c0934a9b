"""Bits per value of `CodedTopK`: energy per bit, and training at equal bytes.

    python benchmarks/methods/value_bits.py
    python benchmarks/methods/value_bits.py --steps 300 --densities 0.003,0.01,0.03

First table: the share of the top-k's energy that a message carries, and that energy per bit of the
message relative to one bit per value, for random gradients. Second table: `digits_task.Digits`,
every density with every number of bits; bytes that a worker sends in a step, without those of the
biases, which are dense here.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
if __name__ == "__main__" and not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import numpy as np

SIDE = 2048
INPUTS = (
    ("Laplace", lambda rng: rng.laplace(size=SIDE * SIDE), 0.001),
    ("Laplace", lambda rng: rng.laplace(size=SIDE * SIDE), 0.01),
    ("normal", lambda rng: rng.standard_normal(SIDE * SIDE), 0.01),
    ("Student t(3)", lambda rng: rng.standard_t(3, SIDE * SIDE), 0.01),
)


def carried(gradient: np.ndarray, density: float, value_bits: int) -> tuple[float, float]:
    """Share of the top-k's energy that a message carries, and its bits per element sent."""
    import tensorflow as tf

    from tf_redsync.methods.common.coded_selection import coding, select_and_code

    k = [round(density * gradient.size)]
    zero = tf.zeros([gradient.size])
    selected = select_and_code([gradient], [zero], [], k, value_bits=value_bits)
    plain, _ = coding(value_bits).decode(selected.message[tf.newaxis], [zero], selected.layout)
    at = plain[0, 2 : 2 + k[0]].numpy()[: int(plain[0, 1])]
    true = np.float64(gradient[at])
    rest = np.float64(selected.residuals[0].numpy()[at])
    share = 1 - np.square(rest).sum() / np.square(true).sum()
    return share, 32 * selected.message.shape[0] / k[0]


def energies() -> list[str]:
    """Returns the lines of the first table."""
    from tf_redsync.methods.common.coded_selection import VALUE_BITS

    lines = [f"{'gradient':<14}{'density':>8}" + "".join(f"{b:>8} bits     " for b in VALUE_BITS)]
    for name, draw, density in INPUTS:
        gradient = draw(np.random.default_rng(0)).astype(np.float32)
        found = [carried(gradient, density, bits) for bits in VALUE_BITS]
        first = found[0][0] / found[0][1]
        cells = [f"{100 * s:8.2f} % {s / b / first:5.3f} " for s, b in found]
        lines.append(f"{name:<14}{density:>8}" + "".join(cells))
    return lines


def trainings(args: argparse.Namespace) -> list[str]:
    """Returns the lines of the second table."""
    import tf_redsync as rs
    from benchmarks.methods.digits_task import Digits
    from benchmarks.methods.digits_training import train_over_seeds
    from tf_redsync.methods.common.coded_selection import VALUE_BITS

    lines = [f"{'density':>8}{'bits':>6}{'bytes a step':>14}{'loss':>10}{'accuracy':>10}"]
    task = Digits(args.workers)
    biases = 4 * sum(s.size for s in task.specs if len(s.shape) < 2)
    for density in args.densities:
        for bits in VALUE_BITS:
            method = rs.CodedTopK(
                density=density, value_bits=bits, momentum=args.momentum, small_density=None
            )
            rate = args.learning_rate * (1 - args.momentum)
            found = train_over_seeds(method, rate, args.steps, args.seeds, args.workers)
            sent = found["bits"] * task.elements / 8 - biases
            lines.append(
                f"{density:>8}{bits:>6}{sent:>14.0f}{found['loss']:>10.5f}{found['accuracy']:>10.4f}"
            )
    return lines


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    add = parser.add_argument
    add("--steps", type=int, default=300)
    add("--workers", type=int, default=4)
    add("--seeds", type=int, default=3, help="trainings that losses are averaged over")
    add("--momentum", type=float, default=0.0, help="of the momentum correction")
    add("--learning_rate", type=float, default=0.2)
    add("--densities", default="0.003,0.01,0.03", help="separated by commas")
    args = parser.parse_args(argv)
    args.densities = [float(word) for word in args.densities.split(",")]
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints; returns the exit code."""
    args = parse(argv)
    print("\n".join(energies()), flush=True)
    print("\n".join(trainings(args)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
