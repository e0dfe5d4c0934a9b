"""Sums of 16-bit numbers with error feedback, in plain numpy.

Worker b sums block b of the values. Messages and sums are rounded to the nearest 16-bit number.
"""

from __future__ import annotations

import numpy as np


def next_half(x, dtype: str) -> np.ndarray:
    """The nearest 16-bit number of each float32 element, as float32; ties go to even."""
    x = np.asarray(x, np.float32)
    if dtype == "float16":
        return x.astype(np.float16).astype(np.float32)
    bits = x.view(np.uint32)  # bfloat16: the upper half, rounded
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & np.uint32(0xFFFF0000)).view(np.float32)


class HalfOracle:
    """Dense sums; all tensors of a step are one vector.

    Args:
        shapes: Shapes of the tensors.
        workers: Number of workers.
        dtype: "float16" or "bfloat16".
    """

    def __init__(self, shapes, workers: int, dtype: str):
        self.shapes, self.dtype = list(shapes), dtype
        self.sizes = [int(np.prod(s)) for s in shapes]
        self.vectors = [np.zeros(sum(self.sizes), np.float32) for _ in range(workers)]

    @property
    def residuals(self):
        return [self._tensors(v) for v in self.vectors]

    def step(self, grads) -> list[np.ndarray]:
        """Runs one step on `grads[worker][tensor]`; returns the totals."""
        sums = [
            e + np.concatenate([np.ravel(g) for g in own])
            for e, own in zip(self.vectors, grads, strict=True)
        ]
        sent = [next_half(p, self.dtype) for p in sums]
        self.vectors = [p - h for p, h in zip(sums, sent, strict=True)]
        total, workers = np.zeros_like(sums[0]), len(grads)
        length = 2 * -(-total.size // (2 * workers))
        for owner in range(workers):
            block = slice(owner * length, (owner + 1) * length)
            arrived = np.float32(0)
            for h in sent:
                arrived = arrived + h[block]
            arrived = arrived + self.vectors[owner][block]  # blocks that other workers sent
            total[block] = next_half(arrived, self.dtype)
            self.vectors[owner][block] = arrived - total[block]
        return self._tensors(total)

    def _tensors(self, vector):
        parts = np.split(vector, np.cumsum(self.sizes)[:-1])
        return [p.reshape(s) for p, s in zip(parts, self.shapes, strict=True)]
