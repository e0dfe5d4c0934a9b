"""Deep Gradient Compression in plain numpy, float32 elementwise.

    u' = m u + g,  v' = v + u'                    (Nesterov: u' = m (u + g),  v' = v + u' + g)
    t = the ceil(k s / n)-th largest of a sample of s of the n values |v'|
    t <- 0.8 t, at most 10 times, while fewer than 0.8 k values reach it
    S = the k largest of {|v'| >= t},  send v'[S],  v'[S] = 0,  u'[S] = 0

Reference: Lin, Han, Mao, Wang, Dally (2018), "Deep Gradient Compression", ICLR.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from tests.oracle.redsync import accumulate_numpy, top_k_numpy


def threshold_numpy(
    a: np.ndarray, sample: np.ndarray, k: int, factor: float = 0.8, rounds: int = 10
) -> np.float32:
    """Threshold for about `k` of the values `a`, from their positions `sample`."""
    if k == a.size:
        return np.float32(0)
    largest = -(-k * sample.size // a.size)
    t = np.sort(a[sample])[::-1][largest - 1]
    while np.count_nonzero(a >= t) < factor * k and rounds:
        t, rounds = np.float32(factor) * t, rounds - 1
    return t


class DGCOracle:
    """Simulates `workers` workers over many steps.

    Args:
        shapes: Shapes of the tensors.
        workers: Number of workers.
        counts: `counts(step)` returns k of every tensor.
        sample: `sample(tensor, step)` returns sampled positions.
        momentum, nesterov, masking: See the module's docstring.
    """

    def __init__(
        self, shapes: Sequence[tuple], workers: int, counts: Callable, sample: Callable,
        momentum: float, nesterov: bool, masking: bool,
    ):  # fmt: skip
        self.shapes, self.counts, self.sample, self.iteration = list(shapes), counts, sample, 0
        self.momentum, self.nesterov, self.masking = momentum, nesterov, masking
        self.residuals = [[np.zeros(s, np.float32) for s in shapes] for _ in range(workers)]
        self.velocities = [[np.zeros(s, np.float32) for s in shapes] for _ in range(workers)]

    def step(self, grads) -> list[np.ndarray]:
        """Runs one step on `grads[worker][tensor]`; returns the totals."""
        totals = [np.zeros(int(np.prod(s)), np.float32) for s in self.shapes]
        for worker, own in enumerate(grads):
            for i, k in enumerate(self.counts(self.iteration)):
                v, u = self.residuals[worker][i], self.velocities[worker][i]
                v, u = accumulate_numpy(own[i], v, u, self.momentum, self.nesterov, None)
                v = np.array(v).reshape(-1)
                u = None if u is None else np.array(u).reshape(-1)
                if v.size:
                    a = np.abs(v)
                    t = threshold_numpy(a, self.sample(i, self.iteration), k)
                    chosen = top_k_numpy(np.where(a >= t, a, 0), k)
                    totals[i][chosen] += v[chosen]
                    v[chosen] = 0
                    if self.masking and u is not None:
                        u[chosen] = 0
                self.residuals[worker][i] = v.reshape(self.shapes[i])
                if u is not None:
                    self.velocities[worker][i] = u.reshape(self.shapes[i])
        self.iteration += 1
        return [t.reshape(s) for t, s in zip(totals, self.shapes, strict=True)]
