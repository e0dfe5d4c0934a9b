"""Accordion with top-k in plain numpy.

    k = density n in a critical regime, else low_density n
    v <- v + g;  S = the k largest of |v|;  total[S] += v[S];  v[S] <- 0
    accumulated <- accumulated + total

After every `interval` steps, with the norm of `accumulated` now and in the interval before: the
regime is critical if |before - now| / before >= eta, or if there is no interval before. Training
begins in a critical regime.

Reference: Agarwal, Wang, Lee, Venkataraman, Papailiopoulos (2021), "Accordion: Adaptive Gradient
Communication via Critical Learning Regime Identification", MLSys, algorithm 1.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tests.oracle.redsync import top_k_numpy
from tests.oracle.sparse import count


class AccordionOracle:
    """Simulates `workers` workers over many steps.

    Args:
        shapes: Shapes of the tensors.
        workers: Number of workers.
        density: Density in critical regimes.
        low_density: Density in other regimes.
        eta: Smallest relative change of the norm in a critical regime.
        interval: Steps of an interval.
    """

    def __init__(
        self, shapes: Sequence[tuple], workers: int, density, low_density, eta, interval: int
    ):
        self.shapes, self.densities = list(shapes), (low_density, density)
        self.eta, self.interval, self.steps = eta, interval, 0
        self.residuals = [[np.zeros(s, np.float32) for s in shapes] for _ in range(workers)]
        self.accumulated = [np.zeros(s, np.float32) for s in shapes]
        self.norms = [0.0] * len(shapes)
        self.critical = [True] * len(shapes)

    def step(self, grads) -> list[np.ndarray]:
        """Runs one step on `grads[worker][tensor]`; returns the totals."""
        totals = []
        for i, shape in enumerate(self.shapes):
            total = np.zeros(int(np.prod(shape)), np.float32)
            k = count(self.densities[self.critical[i]], total.size)
            for worker, own in enumerate(grads):
                v = np.array(self.residuals[worker][i] + own[i]).reshape(-1)
                chosen = top_k_numpy(np.abs(v), k)
                total[chosen] += v[chosen]
                v[chosen] = 0
                self.residuals[worker][i] = v.reshape(shape)
            totals.append(total.reshape(shape))
            self.accumulated[i] = self.accumulated[i] + totals[i]
        self.steps += 1
        if self.steps % self.interval == 0:
            self._update_regime()
        return totals

    def _update_regime(self) -> None:
        for i, accumulated in enumerate(self.accumulated):
            before, now = self.norms[i], float(np.sqrt(np.square(np.float64(accumulated)).sum()))
            self.critical[i] = before == 0 or abs(before - now) / before >= self.eta
            self.norms[i], self.accumulated[i] = now, np.zeros_like(accumulated)
