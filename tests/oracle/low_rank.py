"""PowerSGD and ACP-SGD in plain numpy, float64.

References: Vogels, Karimireddy, Jaggi (2019), "PowerSGD"; Zhang, Zhang, Shi, Chu, Li (2023),
"Evaluation and Optimization of Gradient Compression for Distributed Deep Learning".
"""

from __future__ import annotations

import numpy as np


def orthonormal(matrix: np.ndarray) -> np.ndarray:
    """Orthonormal basis of the columns."""
    return np.linalg.qr(matrix)[0]


def wide(matrix: np.ndarray) -> np.ndarray:
    """The matrix with no more rows than columns."""
    return matrix.T if len(matrix) > len(matrix.T) else matrix


def back(matrix: np.ndarray, shape) -> np.ndarray:
    """Inverse of `wide` for a tensor of the given shape."""
    rows = int(np.prod(shape[:-1]))
    return (matrix.T if rows > shape[-1] else matrix).reshape(shape)


class LowRankOracle:
    """Simulates `workers` workers over many steps.

    Args:
        shapes: Shapes of the tensors, rank 2 or more.
        workers: Number of workers.
        p, q: First factors, one for each tensor; p may be None for PowerSGD.
        alternate: ACP-SGD, one factor a step, instead of PowerSGD.
    """

    def __init__(self, shapes, workers, p, q, alternate: bool):
        self.shapes = list(shapes)
        self.p, self.q = p, [np.float64(f) for f in q]
        self.alternate, self.iteration = alternate, 0
        self.residuals = [[np.zeros(s) for s in shapes] for _ in range(workers)]

    def step(self, grads) -> list[np.ndarray]:
        """One step; `grads[worker][tensor]`. Returns the totals, sums over the workers."""
        totals = []
        for i, shape in enumerate(self.shapes):
            matrices = [
                wide((np.float64(own[i]) + e[i]).reshape(-1, shape[-1]))
                for own, e in zip(grads, self.residuals, strict=True)
            ]
            total, own_products = self._one(i, matrices)
            totals.append(back(total, shape))
            for e, m, product in zip(self.residuals, matrices, own_products, strict=True):
                e[i] = back(m - product, shape)
        self.iteration += 1
        return totals

    def follow(self, states) -> None:
        """Continues from the state of float32 workers: a power iteration amplifies rounding."""
        self.residuals = [[np.float64(e) for e in s["residual"]] for s in states]
        self.q = [np.float64(q) for q in states[0]["q"]]
        if self.alternate:
            self.p = [np.float64(p) for p in states[0]["p"]]

    def _one(self, i: int, matrices) -> tuple[np.ndarray, list[np.ndarray]]:
        """Total of tensor i, and each worker's contribution."""
        if not self.alternate:
            p = orthonormal(sum(m @ self.q[i] for m in matrices))
            own = [m.T @ p for m in matrices]
            self.q[i] = sum(own)
            return p @ self.q[i].T, [p @ q.T for q in own]
        if self.iteration % 2 == 0:
            q = self.q[i] = orthonormal(self.q[i])
            own = [m @ q for m in matrices]
            self.p[i] = sum(own)
            return self.p[i] @ q.T, [p @ q.T for p in own]
        p = self.p[i] = orthonormal(self.p[i])
        own = [m.T @ p for m in matrices]
        self.q[i] = sum(own)
        return p @ self.q[i].T, [p @ q.T for q in own]
