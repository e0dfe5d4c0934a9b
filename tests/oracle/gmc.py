"""GMC in plain numpy, in the paper's units, float32.

    a = e + (beta before + eta g),  c = C(a),  e = a - c,  before = mean of c

where g is a worker's own gradient. The totals of an exchange are `before / eta`, since the
optimizer multiplies them by eta. Its input is g / K, and its residual is e / (eta K).

Reference: Shi, Zhao, Xie, Gao, Li (2019), "Global Momentum Compression for Sparse Communication in
Distributed Learning". C selects the k largest elements of every tensor, or a given set.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np


class GMCOracle:
    """Simulates `workers` workers over many steps.

    Args:
        shapes: Shapes of the tensors.
        workers: K.
        choose: As in `tests.oracle.sparse.MemoryOracle`.
        momentum: beta.
        rate: eta. A power of 2, as K should be, makes the change of units exact.
    """

    def __init__(
        self, shapes: Sequence[tuple], workers: int, choose: Callable, momentum: float, rate: float
    ):
        self.shapes, self.workers, self.choose = list(shapes), workers, choose
        self.momentum, self.rate = np.float32(momentum), np.float32(rate)
        self.errors = [[np.zeros(s, np.float32) for s in shapes] for _ in range(workers)]
        self.before = [np.zeros(s, np.float32) for s in shapes]
        self.iteration = 0

    @property
    def residuals(self):
        """The residuals in the exchange's units."""
        unit = self.rate * np.float32(self.workers)
        return [[e / unit for e in own] for own in self.errors]

    def step(self, grads) -> list[np.ndarray]:
        """Runs one step on `grads[worker][tensor]`, which are g / K; returns the totals."""
        sums = [np.zeros(int(np.prod(s)), np.float32) for s in self.shapes]
        for errors, own in zip(self.errors, grads, strict=True):
            a = [
                (e + (self.momentum * b + self.rate * (np.float32(self.workers) * g))).reshape(-1)
                for e, b, g in zip(errors, self.before, own, strict=True)
            ]
            for i, at in enumerate(self.choose(a, self.iteration)):
                sums[i][at] += a[i][at]
                a[i][at] = 0
                errors[i] = a[i].reshape(self.shapes[i])
        self.iteration += 1
        mean = [s / np.float32(self.workers) for s in sums]
        self.before = [m.reshape(s) for m, s in zip(mean, self.shapes, strict=True)]
        return [b / self.rate for b in self.before]
