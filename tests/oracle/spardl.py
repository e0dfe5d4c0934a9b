"""SparDL in plain numpy: the all-to-all form, and the paper's rounds for comparison.

Reference: Zhao et al. (2024), "SparDL: Distributed Deep Learning Training with Efficient Sparse
Communication", ICDE.
"""

from __future__ import annotations

import math

import numpy as np

from tests.oracle.redsync import top_k_numpy
from tests.oracle.sparse import count


class SparDLOracle:
    """`workers` workers over many steps, with global residual collection.

    Args:
        shapes: Shapes of the bucket's tensors.
        workers: Number of workers and of blocks.
        density: Fraction of a block's elements that is sent.
    """

    def __init__(self, shapes, workers: int, density: float):
        self.shapes, self.workers = list(shapes), workers
        self.size = sum(int(np.prod(s)) for s in shapes)
        self.length = math.ceil(self.size / workers)
        self.k = count(density, self.length)
        self.residuals = [[np.zeros(s, np.float32) for s in shapes] for _ in range(workers)]

    def step(self, grads) -> list[np.ndarray]:
        """Runs one step on `grads[worker][tensor]`; returns the totals."""
        sums = [
            self.blocks([v + g for v, g in zip(old, new, strict=True)])
            for old, new in zip(self.residuals, grads, strict=True)
        ]
        kept = [s.copy() for s in sums]
        total = np.zeros((self.workers, self.length), np.float32)
        for b in range(self.workers):
            sent = [top_k_numpy(np.abs(s[b]), self.k) for s in sums]
            collected = np.zeros(self.length, np.float32)
            for own, at in zip(sums, sent, strict=True):
                collected[at] += own[b, at]
            not_sent = sums[b][b].copy()
            not_sent[sent[b]] = 0
            collected += not_sent
            support = top_k_numpy(np.abs(collected), self.k)
            total[b, support] = collected[support]
            for worker, at in enumerate(sent):
                delivered = support if worker == b else np.intersect1d(support, at)
                kept[worker][b, delivered] = 0
        self.residuals = [self.tensors(k) for k in kept]
        return self.tensors(total)

    def blocks(self, tensors) -> np.ndarray:
        """All tensors as one vector, split into one block per worker."""
        vector = np.concatenate([t.reshape(-1) for t in tensors])
        vector = np.pad(vector, (0, self.workers * self.length - self.size))
        return vector.reshape(self.workers, self.length)

    def tensors(self, blocks: np.ndarray) -> list[np.ndarray]:
        """Inverse of `blocks`."""
        parts = np.split(
            blocks.reshape(-1)[: self.size], np.cumsum([int(np.prod(s)) for s in self.shapes])[:-1]
        )
        return [p.reshape(s) for p, s in zip(parts, self.shapes, strict=True)]


def paper_rounds(sums: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """The paper's reduce-scatter in ceil(log2 K) rounds, all-gather and residual collection.

    Args:
        sums: float64 `[workers, blocks, length]` with as many blocks as workers: S.
        k: Elements of each block to send.

    Returns:
        The total, `[blocks, length]`, and the residuals, of the shape of `sums`.
    """
    workers = len(sums)
    s, residual = sums.copy(), sums.copy()
    total = np.zeros_like(sums[0])
    rounds = math.ceil(math.log2(workers))
    sizes = [workers - 2 ** (rounds - 1)] + [2**j for j in range(rounds - 2, -1, -1)]
    gap = workers - sizes[0] if rounds else 0
    for size in sizes[:rounds]:
        messages = []
        for w in range(workers):
            for c in range(size):
                b = (w + gap + c) % workers
                at = top_k_numpy(np.abs(s[w, b]), k)
                messages.append(((w + gap) % workers, b, at, s[w, b, at].copy()))
                residual[w, b] = s[w, b]
                residual[w, b, at] = 0
        for to, b, at, values in messages:
            s[to, b, at] += values
        gap //= 2
    for w in range(workers):
        support = top_k_numpy(np.abs(s[w, w]), k)
        total[w, support] = s[w, w, support]
        residual[w, w] = s[w, w]
        residual[w, w, support] = 0
    return total, np.where(total != 0, residual, sums)
