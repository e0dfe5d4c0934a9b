"""QSGD, TernGrad and 2-bit in plain numpy.

References: Alistarh, Grubic, Li, Tomioka, Vojnovic (2017), "QSGD"; Wen, Xu, Yan, Wu, Wang, Chen, Li
(2017), "TernGrad"; Strom (2015), "Scalable Distributed DNN Training".
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tests.oracle.quantization import uniform_numpy


def largest(rows: np.ndarray) -> np.ndarray:
    """The largest magnitude of each row."""
    return np.abs(rows).max(axis=1, initial=0)


def l2_norm(rows: np.ndarray) -> np.ndarray:
    """The Euclidean norm of each row."""
    return np.sqrt(np.square(np.float64(rows)).sum(axis=1))


def deviations(number: float):
    """Some standard deviations of a row with a mean of 0, at most the largest magnitude."""

    def scale(rows):
        root_mean_square = l2_norm(rows) / np.sqrt(max(rows.shape[1], 1))
        return np.minimum(number * root_mean_square, largest(rows))

    return scale


def near(rounded, exact) -> np.ndarray:
    """Scales as a method rounds them, whose last bit may decide a code; they are near `exact`."""
    np.testing.assert_allclose(rounded, exact, rtol=1e-6)
    return np.asarray(rounded, np.float32)


class StochasticOracle:
    """Stochastic rounding of a bucket's elements, clipped at c, to multiples of c / levels.

    Args:
        shapes: Shapes of the tensors.
        stream: `stream(step, worker)` returns three integers that select a worker's random numbers.
        levels: Number of magnitudes besides 0.
        bucket_size: Elements with a common c; None for the whole tensor.
        shared: Whether c is the largest of all workers, and codes are summed as integers.
        scale: `scale(rows)` returns c of each bucket.
        as_rounded: The same in float32, as the method rounds it.
    """

    residuals = None

    def __init__(
        self, shapes, stream: Callable, levels=1, bucket_size=None, shared=False, scale=largest,
        as_rounded=largest,
    ):  # fmt: skip
        self.shapes, self.stream, self.iteration = list(shapes), stream, 0
        self.levels, self.bucket_size, self.shared = levels, bucket_size, shared
        self.scale, self.as_rounded = scale, as_rounded

    def step(self, grads) -> list[np.ndarray]:
        """Runs one step on `grads[worker][tensor]`; returns the totals."""
        totals = [self._total(i, [np.ravel(own[i]) for own in grads]) for i in range(len(grads[0]))]
        self.iteration += 1
        return [t.reshape(s) for t, s in zip(totals, self.shapes, strict=True)]

    def _total(self, tensor: int, rows) -> np.ndarray:
        size, s = rows[0].size, np.float32(self.levels)
        buckets = [self._buckets(row) for row in rows]
        scales = [near(self.as_rounded(b), self.scale(b))[:, np.newaxis] for b in buckets]
        total = np.float32(0)
        for worker, row in enumerate(buckets):
            c = np.max(scales, axis=0) if self.shared else scales[worker]
            u = self._buckets(uniform_numpy(self.stream(self.iteration, worker), tensor, size))
            codes = self._rounded(np.clip(row, -scales[worker], scales[worker]), c, u)
            total = total + (codes if self.shared else codes * (c / s))
        if self.shared:
            total = total * np.max(scales, axis=0)
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
    """Sends a threshold or its negative for elements that reach it; the rest stays in the residual.

    Args:
        shapes: Shapes of the tensors.
        workers: Number of workers.
        scale: `scale(rows)` returns the threshold of each row.
        as_rounded: The same in float32, as the method rounds it.
    """

    def __init__(self, shapes, workers: int, scale: Callable, as_rounded: Callable):
        self.scale, self.as_rounded = scale, as_rounded
        self.residuals = [[np.zeros(s, np.float32) for s in shapes] for _ in range(workers)]

    def step(self, grads) -> list[np.ndarray]:
        """Runs one step on `grads[worker][tensor]`; returns the totals."""
        totals = [np.zeros(np.shape(g), np.float32) for g in grads[0]]
        for kept, own in zip(self.residuals, grads, strict=True):
            for i, g in enumerate(own):
                p = kept[i] + g
                row = p.reshape(1, -1)
                (c,) = near(self.as_rounded(row), self.scale(row))
                sent = np.where(p >= c, c, np.where(p <= -c, -c, np.float32(0)))
                kept[i], totals[i] = p - sent, totals[i] + sent
        return totals
