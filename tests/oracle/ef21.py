"""EF21 in plain numpy, with top-k as its compressor.

    c_i = C(grad_i - g_i);  g_i <- g_i + c_i;  g <- g + sum of c_i;  total = g

Reference: Richtárik, Sokolov, Fatkhullin (2021), "EF21: A New, Simpler, Theoretically Better, and
Practically Faster Error Feedback", NeurIPS.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tests.oracle.redsync import top_k_numpy
from tests.oracle.sparse import count


class EF21Oracle:
    """A server and workers that store the server's estimates of their gradients.

    Args:
        shapes: Shapes of the tensors.
        workers: Number of workers.
        density: Fraction of the elements that C keeps.
    """

    residuals = None

    def __init__(self, shapes: Sequence[tuple], workers: int, density: float):
        self.density = density
        self.estimates = [[np.zeros(s, np.float32) for s in shapes] for _ in range(workers)]
        self.total = [np.zeros(s, np.float32) for s in shapes]

    def compressed(self, difference: np.ndarray) -> np.ndarray:
        """The k largest elements, and 0 elsewhere."""
        kept = np.zeros(difference.size, np.float32)
        at = top_k_numpy(np.abs(difference).reshape(-1), count(self.density, difference.size))
        kept[at] = difference.reshape(-1)[at]
        return kept.reshape(difference.shape)

    def step(self, grads) -> list[np.ndarray]:
        """Runs one step on `grads[worker][tensor]`; returns the totals."""
        for i, total in enumerate(self.total):
            change = np.zeros_like(total)
            for own, gradients in zip(self.estimates, grads, strict=True):
                sent = self.compressed(gradients[i] - own[i])
                own[i] = own[i] + sent
                change = change + sent
            self.total[i] = total + change
        return list(self.total)
