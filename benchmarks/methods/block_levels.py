"""Compares levels, scales and blocks by their errors on gradients of real networks.

    python benchmarks/methods/block_levels.py --data_dir DATA --json levels.json

Trains a CNN and a ResNet-20 on CIFAR-10 and a small transformer on characters, one worker, plain
SGD or AdamW, and quantizes the gradients of some steps in blocks. A figure is the relative error
||g - Q(g)||^2 / ||g||^2 of all matrices and kernels together, the median over networks and steps.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
if __name__ == "__main__" and not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import numpy as np

NETWORKS = (("cifar10", "cnn"), ("cifar10", "resnet20"), ("charlm", "transformer"))
FACTORS = {8: (), 4: (2.5, 3.0, 3.5, 4.0, 5.0), 2: (1.0, 1.25, 1.5, 1.75, 2.0)}
HALF_STEPS = "half steps"  # -1.5, -0.5, 0.5, 1.5: no zero
FLOATS = "floats"  # 0, 1, 2, 3, 4, 6, 8, 12: two bits of exponent, one of mantissa
SHARES = (1.0, 0.8, 0.6, 0.45)  # of the largest magnitude
BLOCKS = (64, 128, 256, 512, 1024)


def gradients(
    task: str, network: str, data_dir: Path | None, steps: Sequence[int]
) -> Iterator[np.ndarray]:
    """Yield the gradient of the matrices and kernels of a network after each number of steps."""
    import keras
    import tensorflow as tf

    from benchmarks.accuracy.tasks import TASKS
    from benchmarks.accuracy.training import loss_of

    keras.utils.set_random_seed(0)
    setting = TASKS[task]
    data = setting.load(data_dir)
    model = setting.networks[network](data.train[0].shape[1:], data.classes)
    adam = keras.optimizers.AdamW(1e-3)
    optimizer = adam if setting.optimizer == "adamw" else keras.optimizers.SGD(0.05, momentum=0.9)
    random = np.random.default_rng(0)

    @tf.function
    def step(x: tf.Tensor, y: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True))
        grads = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(grads, model.trainable_variables)
        return [tf.convert_to_tensor(g) for g in grads if len(g.shape) > 1]

    for number in range(max(steps) + 1):
        rows = random.integers(0, len(data.train[0]), setting.batch)
        x = data.inputs(data.train[0][rows], random if data.images else None)
        found = step(x, data.train[1][rows])
        if number in steps:
            yield np.concatenate([np.asarray(g).ravel() for g in found])


def bfloat16(scale: np.ndarray) -> np.ndarray:
    """Round positive numbers up to bfloat16."""
    bits = scale.astype(np.float32).view(np.uint32) + np.uint32(0xFFFF)
    return (bits & np.uint32(0xFFFF0000)).view(np.float32)


def power_of_two(scale: np.ndarray) -> np.ndarray:
    """Round positive numbers up to powers of two, as E8M0."""
    return np.exp2(np.ceil(np.log2(np.maximum(scale, 1e-38)))).astype(np.float32)


def quantized(rows: np.ndarray, scale: np.ndarray, levels: float, kind: str) -> np.ndarray:
    """Round rows to multiples of `scale / levels` by the given kind; see `candidates`."""
    unit = (scale / np.float32(levels))[:, None]
    steps = np.clip(rows / np.where(unit > 0, unit, np.inf), -levels, levels)
    if kind == HALF_STEPS:
        steps = np.clip(np.floor(steps) + 0.5, -levels, levels)
    elif kind == FLOATS:
        sizes = np.abs(steps)
        distance = np.select([sizes < 4, sizes < 8], [1, 2], 4)
        steps = np.rint(steps / distance) * distance
    else:
        steps = np.rint(steps)
    return (steps * unit).astype(np.float32)


def error(rows: np.ndarray, got: np.ndarray) -> float:
    """Return ||x - Q(x)||^2 / ||x||^2."""
    return float(np.square(rows - got, dtype=np.float64).sum() / np.square(rows).sum())


def largest(rows: np.ndarray) -> np.ndarray:
    """Return the largest magnitude of each row."""
    return np.abs(rows).max(axis=1)


def fitted(rows: np.ndarray, levels: float, kind: str, shares: Sequence[float]) -> np.ndarray:
    """Return each row's scale with the smallest error, among shares of its maximum."""
    most = largest(rows)
    best, scale = np.full(len(rows), np.inf), most
    for share in shares:
        tried = bfloat16(share * most)
        lost = np.square(rows - quantized(rows, tried, levels, kind)).sum(axis=1)
        scale = np.where(lost < best, tried, scale)
        best = np.minimum(lost, best)
    return scale


def bounded(rows: np.ndarray, factor: float) -> np.ndarray:
    """Return each row's largest magnitude, at most `factor` times its root mean square."""
    rms = np.sqrt(np.square(rows).mean(axis=1))
    return bfloat16(np.minimum(largest(rows), np.float32(factor) * rms))


def candidates(bits: int) -> dict[str, float]:
    """Return the kinds of levels for a number of bits, with the largest level in units."""
    most = 2 ** (bits - 1) - 1
    kinds = {f"-{most}..{most}": float(most)}
    if bits <= 4:
        kinds[HALF_STEPS] = most + 0.5
    if bits == 4:
        kinds[FLOATS] = 12.0
    return kinds


def scales(bits: int, levels: float, kind: str) -> dict[str, Callable[[np.ndarray], np.ndarray]]:
    """Return by name the functions that choose the scales of blocks."""
    ways = {
        "max, float32": largest,
        "max, bfloat16": lambda rows: bfloat16(largest(rows)),
        "max, power of two": lambda rows: power_of_two(largest(rows)),
    }
    for shares in (SHARES, tuple(np.linspace(0.25, 1.0, 16))):
        ways[f"best of {len(shares)} shares, bfloat16"] = functools.partial(
            fitted, levels=levels, kind=kind, shares=shares
        )
    for factor in FACTORS[bits]:
        ways[f"at most {factor} rms, bfloat16"] = functools.partial(bounded, factor=factor)
    return ways


def measure(vectors: Sequence[np.ndarray]) -> list[dict[str, object]]:
    """Return a row for each number of bits, level set, block, scale format and fit."""
    found: list[dict[str, object]] = []
    for bits in (8, 4, 2):
        for kind, levels in candidates(bits).items():
            for block in BLOCKS:
                for way, scale_of in scales(bits, levels, kind).items():
                    errors = []
                    for vector in vectors:
                        rows = np.pad(vector, (0, -len(vector) % block)).reshape(-1, block)
                        errors.append(error(rows, quantized(rows, scale_of(rows), levels, kind)))
                    found.append(
                        {"bits": bits, "levels": kind, "block": block, "scale": way,
                         "error": float(np.median(errors)), "errors": errors}
                    )  # fmt: skip
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table, and write it as JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data_dir", type=Path, help="of CIFAR-10 and a text")
    parser.add_argument("--steps", default="20,100", help="after which gradients are taken")
    parser.add_argument("--json", type=Path, help="write all rows here")
    options = parser.parse_args(arguments)
    steps = [int(s) for s in options.steps.split(",")]
    vectors = []
    for task, network in NETWORKS:
        for vector in gradients(task, network, options.data_dir, steps):
            print(f"{network}: {vector.size:,} elements", flush=True)
            vectors.append(vector)
    rows = measure(vectors)
    for row in rows:
        print(
            f"{row['bits']} bits  {row['levels']:<12} block {row['block']:>5}  "
            f"{row['scale']:<28} {row['error']:.3e}"
        )
    if options.json:
        lines = ",\n".join(map(json.dumps, rows))
        options.json.write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main()
