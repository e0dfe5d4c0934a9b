"""gTop-k and SparCML in plain numpy: sums in a binary tree over the workers' ranks.

References: Shi et al. (2019), "A Distributed Synchronous SGD Algorithm with Global Top-k
Sparsification for Low Bandwidth Networks", ICDCS; Renggli et al. (2019), "SparCML: High-Performance
Sparse Communication for Machine Learning", SC.
"""

from __future__ import annotations

import numpy as np

from tests.oracle.redsync import top_k_numpy
from tests.oracle.sparse import count


def power_below(workers: int) -> int:
    """The largest power of two that is at most `workers`."""
    return 2 ** int(np.floor(np.log2(workers)))


def largest(x: np.ndarray, k: int) -> np.ndarray:
    """`x` with all but its k largest elements set to 0."""
    kept = np.zeros_like(x)
    at = top_k_numpy(np.abs(x), k)
    kept[at] = x[at]
    return kept


def paper_tree(vectors: list[np.ndarray], k: int) -> np.ndarray:
    """The paper's reduction: in round j worker w adds the message of worker w + 2^j and keeps k.

    Args:
        vectors: Vectors of 2^m workers, with k nonzero elements each.
        k: Number of elements to keep.
    """
    vectors, distance = list(vectors), 1
    while distance < len(vectors):
        for w in range(0, len(vectors), 2 * distance):
            vectors[w] = largest(vectors[w] + vectors[w + distance], k)
        distance *= 2
    return vectors[0]


class _Workers:
    """Workers with residuals."""

    def __init__(self, shapes, workers: int):
        self.shapes, self.workers = list(shapes), workers
        self.residuals = [[np.zeros(s, np.float32) for s in shapes] for _ in range(workers)]

    def tensors(self, vector: np.ndarray) -> list[np.ndarray]:
        """A vector as tensors."""
        sizes = [int(np.prod(s)) for s in self.shapes]
        parts = np.split(vector, np.cumsum(sizes)[:-1])
        return [p.reshape(s) for p, s in zip(parts, self.shapes, strict=True)]

    def sums(self, grads) -> list[np.ndarray]:
        """Gradient plus residual of every worker, as vectors."""
        return [
            np.concatenate([(v + g).reshape(-1) for v, g in zip(old, new, strict=True)])
            for old, new in zip(self.residuals, grads, strict=True)
        ]


class GTopKOracle(_Workers):
    """gTop-k whose workers keep elements that are dropped in any round.

    Args:
        shapes: Shapes of the bucket's tensors.
        workers: Number of workers.
        density: Fraction of the bucket's elements.
    """

    def __init__(self, shapes, workers: int, density: float):
        super().__init__(shapes, workers)
        self.k = count(density, sum(int(np.prod(s)) for s in shapes))

    def step(self, grads) -> list[np.ndarray]:
        """Runs one step on `grads[worker][tensor]`; returns the totals."""
        sums = self.sums(grads)
        own = [largest(s, self.k) for s in sums]
        kept = [s - x for s, x in zip(sums, own, strict=True)]
        half = power_below(self.workers)
        for w in range(half, self.workers):  # sent to a worker of the tree
            merged = largest(own[w - half] + own[w], self.k)
            for part in (w - half, w):
                kept[part] += np.where(merged == 0, own[part], 0)
            own[w - half] = merged
        groups = [([w], own[w]) for w in range(half)]
        missing = [np.zeros(x.shape, bool) for x in own]
        while len(groups) > 1:
            pairs, groups = zip(groups[::2], groups[1::2], strict=True), []
            for (first, x), (second, y) in pairs:
                groups.append((first + second, largest(x + y, self.k)))
                for w in first + second:
                    missing[w] |= groups[-1][1] == 0
        for w in range(half):
            kept[w] += np.where(missing[w], own[w], 0)
        self.residuals = [self.tensors(k) for k in kept]
        return self.tensors(groups[0][1])


class SparCMLOracle(_Workers):
    """Top-k of every tensor, summed in a tree.

    Args:
        shapes: Shapes of the bucket's tensors.
        workers: Number of workers.
        density: Fraction of each tensor's elements.
    """

    def __init__(self, shapes, workers: int, density: float):
        super().__init__(shapes, workers)
        self.density = density

    def step(self, grads) -> list[np.ndarray]:
        """Runs one step on `grads[worker][tensor]`; returns the totals."""
        sums = self.sums(grads)
        own = [
            np.concatenate(
                [largest(x, count(self.density, x.size)).reshape(-1) for x in map(np.ravel, parts)]
            )
            for parts in map(self.tensors, sums)
        ]
        self.residuals = [self.tensors(s - x) for s, x in zip(sums, own, strict=True)]
        half = power_below(self.workers)
        for w in range(half, self.workers):
            own[w - half] = own[w - half] + own[w]
        own = own[:half]
        while len(own) > 1:
            own = [x + y for x, y in zip(own[::2], own[1::2], strict=True)]
        return self.tensors(own[0])
