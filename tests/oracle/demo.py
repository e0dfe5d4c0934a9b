"""DeMo in plain numpy.

Reference: Peng, Quesnelle, Kingma (2024), "DeMo: Decoupled Momentum Optimization".
"""

from __future__ import annotations

import numpy as np


def divisor(n: int, limit: int) -> int:
    """The largest divisor of n that is at most `limit`."""
    return max((d for d in range(1, limit + 1) if n % d == 0 and n), default=1)


def blocks(matrix: np.ndarray, limit: int):
    """Views of the chunks of a matrix, row by row of chunks."""
    height, width = (divisor(n, limit) for n in matrix.shape)
    for top in range(0, matrix.shape[0], height):
        for left in range(0, matrix.shape[1], width):
            yield matrix[top : top + height, left : left + width]


def as_matrix(tensor: np.ndarray) -> np.ndarray:
    """A contiguous tensor as a matrix view: [other axes, last axis]; a vector is one row."""
    if tensor.ndim < 2:
        return tensor.reshape(1, tensor.size)
    return tensor.reshape(int(np.prod(tensor.shape[:-1])), tensor.shape[-1])


def dct_1d(x: np.ndarray) -> np.ndarray:
    """Orthonormal DCT-II of each column: the Fourier transform of the column and its mirror image.

    The phase moves the origin to the middle between both.
    """
    n = len(x)
    spectrum = np.fft.fft(np.concatenate([x, x[::-1]]), axis=0)[:n]
    middle = np.exp(-0.5j * np.pi * np.arange(n) / n)
    scale = np.where(np.arange(n) == 0, np.sqrt(0.25 / n), np.sqrt(0.5 / n))
    return ((scale * middle)[:, np.newaxis] * spectrum).real


def idct_1d(q: np.ndarray) -> np.ndarray:
    """The columns whose `dct_1d` is q."""
    return np.linalg.solve(dct_1d(np.eye(len(q))), q)


def dct(x: np.ndarray) -> np.ndarray:
    return dct_1d(dct_1d(np.float64(x)).T).T


def idct(q: np.ndarray) -> np.ndarray:
    return idct_1d(idct_1d(np.float64(q)).T).T


class DeMoOracle:
    """Decoupled momentum.

    `forward` and `back` are the method's transforms of all chunks of a tensor, `[number, height,
    width]`. Their rounding decides the selection, and the sign of elements near 0. The oracle
    checks that they differ from its own by rounding only. Without them it stays in float64.
    """

    residuals = None

    def __init__(self, shapes, workers: int, decay: float, k: int, chunk: int, forward=None,
                 back=None):  # fmt: skip
        self.decay, self.k, self.chunk = np.float32(decay), k, chunk
        self.forward, self.back = _checked(dct, forward), _checked(idct, back)
        self.momenta = [[np.zeros(s, np.float32) for s in shapes] for _ in range(workers)]
        self.before_sign: list[np.ndarray] = []

    def step(self, grads) -> list[np.ndarray]:
        """Runs one step on `grads[worker][tensor]`; returns the totals."""
        self.before_sign = [self._tensor(i, [g[i] for g in grads]) for i in range(len(grads[0]))]
        return [np.sign(t).astype(np.float32) for t in self.before_sign]

    def _tensor(self, i: int, own) -> np.ndarray:
        sums = counts = None
        for worker, grad in enumerate(own):
            momentum = self.decay * self.momenta[worker][i] + grad
            chunks = list(blocks(as_matrix(momentum), self.chunk))
            if not chunks:
                return np.zeros(grad.shape)
            found = self.forward(np.stack(chunks))
            sent, taken = np.zeros_like(found), np.zeros(found.shape)
            for number, chunk in enumerate(found):
                order = sorted(range(chunk.size), key=lambda j: (-abs(chunk.flat[j]), j))
                for j in order[: self.k]:
                    sent[number].flat[j], taken[number].flat[j] = chunk.flat[j], 1
            result = np.ascontiguousarray(momentum)
            for block, gone in zip(
                blocks(as_matrix(result), self.chunk), self.back(sent), strict=True
            ):
                block -= gone.astype(block.dtype)
            self.momenta[worker][i] = result
            sums = sent if sums is None else sums + sent
            counts = taken if counts is None else counts + taken
        mean = np.where(counts > 0, sums / np.maximum(counts, 1).astype(sums.dtype), 0)
        total = np.zeros(own[0].shape, sums.dtype)
        for block, delivered in zip(
            blocks(as_matrix(total), self.chunk), self.back(mean.astype(sums.dtype)), strict=True
        ):
            block[...] = delivered
        return total


def _checked(own, rounded):
    """A function of chunks: `rounded`, with an assertion that it is near `own` of each chunk."""

    def transform(chunks):
        exact = np.stack([own(c) for c in chunks])
        if rounded is None:
            return exact
        found = rounded(chunks)
        errors = np.linalg.norm(found - exact, axis=(1, 2))
        assert np.all(errors <= 1e-6 * np.linalg.norm(exact, axis=(1, 2)))
        return found

    return transform
