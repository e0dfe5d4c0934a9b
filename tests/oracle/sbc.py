"""Sparse binary compression in plain numpy.

    A = R + dW;  v+, v- = the k largest of A and of -A;  dW* = the mean of the side with the
    larger mean, at its positions;  R <- A - dW*

Reference: Sattler, Wiedemann, Müller, Samek (2019), "Sparse Binary Compression".
"""

from __future__ import annotations

import math

import numpy as np


def one_side(values: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Positions, ascending, and the float32 value of all of them."""
    sides = []
    for sign in (1, -1):
        at = np.sort(np.argsort(-sign * values, kind="stable")[:k])
        at = at[sign * values[at] > 0]
        mean = np.float32(values[at].astype(np.float64).mean()) if at.size else np.float32(0)
        sides.append((at, mean))
    return sides[0] if sides[0][1] >= -sides[1][1] else sides[1]


def binarized(values: np.ndarray, k: int) -> np.ndarray:
    """The transmitted values of a flat tensor."""
    at, mean = one_side(values, k)
    sent = np.zeros_like(values)
    sent[at] = mean
    return sent


class SBCOracle:
    """Workers that exchange changes of their weights.

    Args:
        shapes: Shapes of the tensors.
        workers: Number of workers.
        density: Density of each tensor; the count is rounded up.
    """

    def __init__(self, shapes, workers: int, density: float):
        self.shapes = list(shapes)
        self.sizes = [int(np.prod(s)) for s in shapes]
        self.k = [min(max(1, math.ceil(density * n - 1e-9)), n) for n in self.sizes]
        self.residuals = [[np.zeros(s, np.float32) for s in shapes] for _ in range(workers)]

    def step(self, changes) -> list[np.ndarray]:
        """One exchange; `changes[worker][tensor]`. Returns the totals."""
        totals = [np.zeros(n, np.float32) for n in self.sizes]
        for worker, own in enumerate(changes):
            sums = [(r + c).reshape(-1) for r, c in zip(self.residuals[worker], own, strict=True)]
            for i, k in enumerate(self.k):
                at, mean = one_side(sums[i], k)
                totals[i][at] += mean
                sums[i][at] -= mean
            self.residuals[worker] = [a.reshape(s) for a, s in zip(sums, self.shapes, strict=True)]
        return [t.reshape(s) for t, s in zip(totals, self.shapes, strict=True)]
