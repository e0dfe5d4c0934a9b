"""MSTop-k in plain numpy, by the paper's algorithm.

Reference: Shi, Zhou, Song, and others (2021), "Towards Scalable Distributed Training of Deep
Learning on Public Cloud Clusters", MLSys, Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np


def ms_top_k(x: np.ndarray, k: int, samplings: int, u: float) -> np.ndarray:
    """Ascending positions of the `k` selected elements; `u` in [0, 1) places the block."""
    if not x.size:
        return np.arange(0)
    a = np.abs(x)
    mean, largest = a.astype(np.float64).mean(), np.float64(a.max())
    left, right = 0.0, 1.0
    k1, k2, upper, lower = 0, x.size, np.float32(np.inf), np.float32(0.0)
    for _ in range(samplings):
        ratio = left + (right - left) / 2
        threshold = np.float32(mean + ratio * (largest - mean))
        n = int(np.count_nonzero(a >= threshold))
        if n <= k:
            right = ratio
            if n > k1:
                k1, upper = n, threshold
        else:
            left = ratio
            if n < k2:
                k2, lower = n, threshold
    first = np.flatnonzero(a >= upper)
    second = np.flatnonzero((a < upper) & (a >= lower))
    start = int(u * (len(second) - (k - k1) + 1))
    return np.sort(np.concatenate([first, second[start : start + k - k1]]))


class MSTopKOracle:
    """Workers that select elements of gradient plus residual by MSTop-k, and keep the rest.

    Args:
        shapes: Shapes of the tensors.
        workers: Number of workers.
        counts: k of each tensor.
        samplings: N.
        starts: `starts(step, worker, tensor)` returns the start of the block, in [0, 1).
    """

    def __init__(
        self,
        shapes: Sequence[tuple],
        workers: int,
        counts: Sequence[int],
        samplings: int,
        starts: Callable[[int, int, int], float],
    ):
        self.shapes, self.counts, self.samplings, self.starts = shapes, counts, samplings, starts
        self.iteration = 0
        self.residuals = [[np.zeros(s, np.float32) for s in shapes] for _ in range(workers)]

    def step(self, grads) -> list[np.ndarray]:
        """Runs one step on `grads[worker][tensor]`; returns the totals."""
        totals = [np.zeros(s, np.float32) for s in self.shapes]
        for worker, own in enumerate(grads):
            for i, total in enumerate(totals):
                v = np.array(self.residuals[worker][i] + own[i], np.float32)
                u = self.starts(self.iteration, worker, i)
                at = ms_top_k(v.reshape(-1), self.counts[i], self.samplings, u)
                total.reshape(-1)[at] += v.reshape(-1)[at]
                v.reshape(-1)[at] = 0.0
                self.residuals[worker][i] = v
        self.iteration += 1
        return totals
