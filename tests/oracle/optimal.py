"""Sparse dithering and spherical compression with error feedback, in plain numpy.

Reference: Albasyoni, Safaryan, Condat, Richtárik (2020), "Optimal Gradient Compression for
Distributed and Federated Learning".
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np


class _Memory:
    """Sums `compressed(vector, codebook)` of gradient plus residual, and keeps the rest.

    The residuals continue from the float32 workers': rounding could change a decision.
    """

    def __init__(self, shapes, workers: int):
        self.iteration = 0
        self.residuals = [[np.zeros(s, np.float32) for s in shapes] for _ in range(workers)]

    def follow(self, states) -> None:
        self.residuals = [[np.array(e) for e in s["residual"]] for s in states]

    def step(self, grads) -> list[np.ndarray]:
        """Runs one step on `grads[worker][tensor]`; returns the totals."""
        totals = [np.zeros(np.shape(g)) for g in grads[0]]
        for kept, own in zip(self.residuals, grads, strict=True):
            for i, g in enumerate(own):
                p = kept[i] + g
                sent = self.compressed(np.float64(p).reshape(-1)).reshape(p.shape)
                totals[i], kept[i] = totals[i] + sent, p - sent
        self.iteration += 1
        return totals

    def compressed(self, p: np.ndarray) -> np.ndarray:
        raise NotImplementedError


class DitheringOracle(_Memory):
    """Levels 2 h apart, h = sqrt(alpha / d), times the optimal factor."""

    def __init__(self, shapes, workers: int, alpha: float):
        super().__init__(shapes, workers)
        self.alpha = alpha

    def compressed(self, p):
        norm = np.linalg.norm(p)
        if norm == 0:
            return np.zeros_like(p)
        u, h = p / norm, np.sqrt(self.alpha / p.size)
        q = 2 * h * np.rint(u / (2 * h))
        return q * (p @ q) / (q @ q)


class SphericalOracle(_Memory):
    """The first codebook vector within the error alpha, or the nearest, for each block.

    Args:
        shapes: Shapes of the tensors.
        workers: Number of workers.
        alpha: Accepted error.
        codebook: `codebook(step)` returns unit vectors `[vectors, d]`.
        factors: Possible factors relative to the largest, ascending from 0.
    """

    def __init__(self, shapes, workers: int, alpha: float, codebook: Callable, factors):
        super().__init__(shapes, workers)
        self.alpha, self.codebook, self.factors = alpha, codebook, np.float64(factors)

    def compressed(self, p):
        codebook = np.float64(self.codebook(self.iteration))
        d = codebook.shape[1]
        blocks = np.pad(p, (0, -p.size % d)).reshape(-1, d)
        chosen = [self._vector(x, codebook) for x in blocks]
        products = [max(x @ xi, 0.0) for x, xi in zip(blocks, chosen, strict=True)]
        largest = max(products, default=0.0)
        sent = [self._factor(c, largest) * xi for c, xi in zip(products, chosen, strict=True)]
        return np.concatenate([np.zeros(0), *sent])[: p.size]

    def _vector(self, x, codebook):
        for xi in codebook:
            if xi @ x >= np.sqrt(1 - self.alpha) * np.linalg.norm(x):
                return xi
        return codebook[np.argmax(codebook @ x)]

    def _factor(self, c, largest):
        """The nearest of the factors, in the logarithm; 0 below half of the smallest."""
        if largest == 0 or c / largest < self.factors[1] / 2:
            return 0.0
        distances = np.abs(np.log(self.factors[1:]) - np.log(c / largest))
        return largest * self.factors[1:][np.argmin(distances)]
