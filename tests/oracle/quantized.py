"""QSGD, TernGrad and 2-bit in plain numpy.

References: Alistarh, Grubic, Li, Tomioka, Vojnovic (2017), "QSGD"; Wen, Xu, Yan, Wu, Wang, Chen, Li
(2017), "TernGrad"; Strom (2015), "Scalable Distributed DNN Training".
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tests.oracle.quantization import uniform_numpy


class StochasticOracle:
    """Stochastic rounding to multiples of c / levels; c is the largest magnitude of a bucket.

    Args:
        shapes: Shapes of the tensors.
        stream: `stream(step, worker)` returns three integers that select a worker's random numbers.
        levels: Number of magnitudes besides 0.
        bucket_size: Elements with a common c; None for the whole tensor.
        shared: Whether c is the largest of all workers, and codes are summed as integers.
    """

    residuals = None

    def __init__(self, shapes, stream: Callable, levels=1, bucket_size=None, shared=False):
        self.shapes, self.stream, self.iteration = list(shapes), stream, 0
        self.levels, self.bucket_size, self.shared = levels, bucket_size, shared

    def step(self, grads) -> list[np.ndarray]:
        """Runs one step on `grads[worker][tensor]`; returns the totals."""
        totals = [self._total(i, [np.ravel(own[i]) for own in grads]) for i in range(len(grads[0]))]
        self.iteration += 1
        return [t.reshape(s) for t, s in zip(totals, self.shapes, strict=True)]

    def _total(self, tensor: int, rows) -> np.ndarray:
        size, s = rows[0].size, np.float32(self.levels)
        largest = [np.abs(self._buckets(row)).max(axis=1, initial=0)[:, np.newaxis] for row in rows]
        total = np.float32(0)
        for worker, row in enumerate(rows):
            c = np.max(largest, axis=0) if self.shared else largest[worker]
            u = self._buckets(uniform_numpy(self.stream(self.iteration, worker), tensor, size))
            codes = self._rounded(self._buckets(row), c, u)
            total = total + (codes if self.shared else codes * (c / s))
        if self.shared:
            total = total * np.max(largest, axis=0)
        return total.reshape(-1)[:size]

    def _buckets(self, row) -> np.ndarray:
        """One bucket per row, padded with zeros."""
        if self.bucket_size is None:
            return row[np.newaxis]
        filled = np.concatenate([row, np.zeros(-row.size % self.bucket_size, np.float32)])
        return filled.reshape(-1, self.bucket_size)

    def _rounded(self, x, c, u) -> np.ndarray:
        """Integers whose expectation times c / levels is x."""
        y = np.abs(x) / np.where(c > 0, c, np.float32(np.inf)) * np.float32(self.levels)
        return np.copysign(np.floor(y) + (u < y - np.floor(y)), x).astype(np.float32)


class ThresholdOracle:
    """Sends elements that reach a fixed threshold; the rest stays in the residual."""

    def __init__(self, shapes, workers: int, threshold: float):
        self.threshold = np.float32(threshold)
        self.residuals = [[np.zeros(s, np.float32) for s in shapes] for _ in range(workers)]

    def step(self, grads) -> list[np.ndarray]:
        c, totals = self.threshold, [np.zeros(np.shape(g), np.float32) for g in grads[0]]
        for kept, own in zip(self.residuals, grads, strict=True):
            for i, g in enumerate(own):
                p = kept[i] + g
                sent = np.where(p >= c, c, np.where(p <= -c, -c, np.float32(0)))
                kept[i], totals[i] = p - sent, totals[i] + sent
        return totals
