"""PacTrain and pruning by magnitude in plain numpy.

References: Wang, Wu, Li, Kutscher (2025), "PacTrain"; for the ternary form Wen, Xu, Yan, Wu, Wang,
Chen, Li (2017), "TernGrad".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from decimal import Decimal

import numpy as np

from tests.oracle.quantized import StochasticOracle


def capacity(sparsity: float, size: int) -> int:
    """Number of elements that remain of `size`: all but the whole part of sparsity times size."""
    return size - int(Decimal(str(sparsity)) * size)


def masks_by_magnitude(
    weights: Sequence[np.ndarray], sparsity: float, scope: str
) -> list[np.ndarray]:
    """`True` for the largest magnitudes of each tensor or of all; among equals the first."""
    names = [(i, j) for i, w in enumerate(weights) for j in range(w.size)]
    magnitude = {(i, j): abs(float(weights[i].flat[j])) for i, j in names}
    groups = [[n for n in names if n[0] == i] for i in range(len(weights))]
    if scope == "model":
        groups = [names]
    masks = [np.zeros(w.shape, bool) for w in weights]
    for group in groups:
        ranked = sorted(group, key=lambda n: (-magnitude[n], n))
        for i, j in ranked[: capacity(sparsity, len(group))]:
            masks[i].flat[j] = True
    return masks


class PrunedOracle:
    """The sum of the gradients, and 0 outside of the mask."""

    residuals = None

    def __init__(self, masks: Sequence[np.ndarray]):
        self.masks = list(masks)

    def step(self, grads) -> list[np.ndarray]:
        """Runs one step on `grads[worker][tensor]`; returns the totals."""
        totals = []
        for i, mask in enumerate(self.masks):
            total = np.zeros(mask.shape, np.float32)
            for own in grads:
                total = total + own[i]
            totals.append(np.where(mask, total, np.float32(0)))
        return totals


class TernaryOracle:
    """TernGrad of the elements inside of the mask, packed into a row and padded with zeros.

    Args:
        masks: Masks of the tensors.
        sparsity: Determines the number of elements of a row.
        stream: As in `StochasticOracle`.
    """

    residuals = None

    def __init__(self, masks: Sequence[np.ndarray], sparsity: float, stream: Callable):
        self.masks, self.capacities = list(masks), [capacity(sparsity, m.size) for m in masks]
        self.ternary = StochasticOracle([(n,) for n in self.capacities], stream, shared=True)

    def step(self, grads) -> list[np.ndarray]:
        """Runs one step on `grads[worker][tensor]`; returns the totals."""
        rows = [
            [
                np.append(np.asarray(g)[m], np.zeros(n - m.sum(), np.float32)).astype(np.float32)
                for g, m, n in zip(own, self.masks, self.capacities, strict=True)
            ]
            for own in grads
        ]
        totals = [np.zeros(m.shape, np.float32) for m in self.masks]
        for total, row, mask in zip(totals, self.ternary.step(rows), self.masks, strict=True):
            total[mask] = row[: mask.sum()]
        return totals
