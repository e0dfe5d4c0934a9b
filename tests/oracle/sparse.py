"""Top-k with memory, random-k and random block in plain numpy.

    v <- v + g;  S = chosen elements of v;  total[S] += v[S];  v[S] <- 0

References: Stich, Cordonnier, Jaggi (2018), "Sparsified SGD with Memory"; Foroutan Eghlidi, Jaggi
(2020), "Sparse Communication for Training Deep Networks".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from tests.oracle.redsync import top_k_numpy


class MemoryOracle:
    """Workers that choose elements of gradient plus residual and keep the rest.

    Args:
        shapes: Shapes of the tensors.
        workers: Number of workers.
        choose: `choose(values, step)`, with the flat accumulated tensors of one worker, returns for
            every tensor the positions to send.
        rounded: Rounds the values to send; the rounding error stays in the residual.
    """

    def __init__(
        self, shapes: Sequence[tuple], workers: int, choose: Callable, rounded=lambda values: values
    ):
        self.shapes, self.choose, self.rounded = list(shapes), choose, rounded
        self.iteration = 0
        self.residuals = [[np.zeros(s, np.float32) for s in shapes] for _ in range(workers)]

    def step(self, grads) -> list[np.ndarray]:
        """Runs one step on `grads[worker][tensor]`; returns the totals."""
        totals = [np.zeros(int(np.prod(s)), np.float32) for s in self.shapes]
        for worker, own in enumerate(grads):
            sums = [(v + g).reshape(-1) for v, g in zip(self.residuals[worker], own, strict=True)]
            for i, at in enumerate(self.choose(sums, self.iteration)):
                sent = self.rounded(sums[i][at]).astype(np.float32)
                totals[i][at] += sent
                sums[i][at] -= sent
            self.residuals[worker] = [v.reshape(s) for v, s in zip(sums, self.shapes, strict=True)]
        self.iteration += 1
        return [t.reshape(s) for t, s in zip(totals, self.shapes, strict=True)]


def count(density: float, size: int) -> int:
    """Number of elements to send of `size`."""
    return min(max(1, int(np.floor(density * size + 0.5))), size)


def top_k_by_layer(density: float) -> Callable:
    """Chooses the largest elements of every tensor."""
    return lambda values, step: [top_k_numpy(np.abs(v), count(density, v.size)) for v in values]


def top_k_of_model(density: float) -> Callable:
    """Chooses the largest elements of all tensors together; among equals the first."""

    def choose(values, step):
        everything = np.concatenate(values)
        chosen = top_k_numpy(np.abs(everything), count(density, everything.size))
        ends = np.cumsum([v.size for v in values])
        parts = np.split(chosen, np.searchsorted(chosen, ends[:-1]))
        starts = [0, *ends[:-1]]
        return [p - start for p, start in zip(parts, starts, strict=True)]

    return choose


def block_of_every_tensor(density: float, draw: Callable) -> Callable:
    """Chooses contiguous elements from a random one on; the first element follows the last.

    `draw(tensor, step)` returns the number in [0, 1) that all workers share.
    """

    def choose(values, step):
        firsts = [int(draw(i, step) * v.size) for i, v in enumerate(values)]
        marks = [np.arange(v.size) < count(density, v.size) for v in values]
        return [np.flatnonzero(np.roll(m, at)) for m, at in zip(marks, firsts, strict=True)]

    return choose
