"""Fixed thresholds in plain numpy, float32.

    v <- v + g;  S = {|v| >= tau}, at most the `capacity` largest
    values:         d = v[S]
    signs (Strom):  d = tau sign(v[S])
    total[S] += d,  v[S] -= d

References: Strom (2015), "Scalable Distributed DNN Training Using Commodity GPU Cloud Computing";
Foroutan Eghlidi, Jaggi (2020), "Sparse Communication for Training Deep Networks".
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tests.oracle.redsync import top_k_numpy


class ThresholdOracle:
    """Simulates `workers` workers over many steps.

    Args:
        shapes: Shapes of the tensors.
        workers: Number of workers.
        threshold: tau.
        capacities: Capacity of a message, in elements of every tensor.
        signs: Send tau and a sign (Strom) instead of the value.
    """

    def __init__(
        self, shapes: Sequence[tuple], workers: int, threshold: float, capacities, signs: bool
    ):
        self.shapes, self.capacities, self.signs = list(shapes), list(capacities), signs
        self.tau = np.float32(threshold)
        self.residuals = [[np.zeros(s, np.float32) for s in shapes] for _ in range(workers)]

    def step(self, grads) -> list[np.ndarray]:
        """Runs one step on `grads[worker][tensor]`; returns the totals."""
        totals = [np.zeros(int(np.prod(s)), np.float32) for s in self.shapes]
        for residuals, own in zip(self.residuals, grads, strict=True):
            for i, capacity in enumerate(self.capacities):
                v = np.array(residuals[i] + own[i]).reshape(-1)
                reach = np.flatnonzero((np.abs(v) >= self.tau) & (v != 0))
                chosen = reach[top_k_numpy(np.abs(v[reach]), capacity)]
                sent = self.tau * np.sign(v[chosen]) if self.signs else v[chosen].copy()
                totals[i][chosen] += sent
                v[chosen] -= sent
                residuals[i] = v.reshape(self.shapes[i])
        return [t.reshape(s) for t, s in zip(totals, self.shapes, strict=True)]
