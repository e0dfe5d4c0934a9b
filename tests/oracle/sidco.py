"""SIDCo in plain numpy: fits and thresholds in float64, elements in float32.

    v <- v + g,  a = |v|,  t = 0
    M stages: x = {a - t : a > t}, r = target / number of x, t <- t + F^-1(1 - r)
    S = {a >= t}, at most the 2 k largest (all of a, if none reaches t)

`target` falls by equal factors from n / 4 to k. Every `interval` steps M grows by one if the mean
of (number of a >= t) / k differs from 1 by more than 20 %.

Reference: Abdelmoniem, Elzanaty, Alouini, Canini (2021), "An Efficient Statistical-based Gradient
Compression Technique for Distributed Training Systems", MLSys.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from tests.oracle.redsync import top_k_numpy


def lower_gamma(shape: float, x: float) -> float:
    """Regularized lower incomplete gamma function by its power series."""
    term = total = 1.0 / shape
    for i in range(1, 2000):
        term *= x / (shape + i)
        total += term
        if term < 1e-17 * total:
            break
    return math.exp(shape * math.log(x) - x - math.lgamma(shape)) * total if x > 0 else 0.0


def gamma_quantile(shape: float, p: float) -> float:
    """x with `lower_gamma(shape, x) == p`, by bisection."""
    low, high = 0.0, 1.0
    while lower_gamma(shape, high) < p:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if lower_gamma(shape, middle) < p else (low, middle)
    return high


def exceeded(x: np.ndarray, ratio: float, kind: str) -> float:
    """The value that a fraction `ratio` of the fitted distribution exceeds."""
    mean = x.mean()
    if ratio == 1.0:
        return 0.0
    if kind == "exponential":
        return -mean * math.log(ratio)
    if kind == "gamma":
        s = max(math.log(mean) - np.log(x).mean(), 1e-3)
        shape = (3 - s + math.sqrt((s - 3) ** 2 + 24 * s)) / (12 * s)
        return mean / shape * gamma_quantile(shape, 1 - ratio)
    inverse = 1 / max(np.square(x / mean - 1).mean(), 1e-6)
    k, alpha = (inverse - 1) / 2, mean * (inverse + 1) / 2
    return alpha * (1 - ratio**k) / k if abs(k) > 1e-9 else -alpha * math.log(ratio)


def threshold_numpy(a: np.ndarray, k: int, stages: int, kind: str) -> float:
    """Threshold that about `k` of the values `a` reach."""
    a, t = np.float64(a), 0.0
    first = max(0.25 * a.size, k)
    for m in range(stages if first > k else 1):
        target = first * (k / first) ** (m / (stages - 1))
        x = a[a > t] - t
        if x.size:
            later = "generalized_pareto" if kind == "gamma" and m else kind
            t += exceeded(x, min(1.0, target / x.size), later)
    return t


class SIDCoOracle:
    """Simulates `workers` workers over many steps.

    Args:
        shapes: Shapes of the tensors.
        workers: Number of workers.
        counts: k of every tensor.
        kind: "exponential", "gamma" or "generalized_pareto".
        interval: Steps between updates of the number of stages.
    """

    def __init__(self, shapes: Sequence[tuple], workers: int, counts, kind: str, interval: int):
        self.shapes, self.counts, self.kind, self.interval = list(shapes), counts, kind, interval
        self.residuals = [[np.zeros(s, np.float32) for s in shapes] for _ in range(workers)]
        self.stages = [[2] * len(shapes) for _ in range(workers)]
        self.achieved: list = [[[] for _ in shapes] for _ in range(workers)]

    def step(self, grads) -> list[np.ndarray]:
        """Runs one step on `grads[worker][tensor]`; returns the totals."""
        totals = [np.zeros(int(np.prod(s)), np.float32) for s in self.shapes]
        for worker, own in enumerate(grads):
            for i, k in enumerate(self.counts):
                v = np.array(self.residuals[worker][i] + own[i]).reshape(-1)
                if v.size:
                    chosen = self._choose(worker, i, np.abs(v), k)
                    totals[i][chosen] += v[chosen]
                    v[chosen] = 0
                self.residuals[worker][i] = v.reshape(self.shapes[i])
        return [t.reshape(s) for t, s in zip(totals, self.shapes, strict=True)]

    def _choose(self, worker: int, i: int, a: np.ndarray, k: int) -> np.ndarray:
        t = np.float32(threshold_numpy(a, k, self.stages[worker][i], self.kind))
        reached = (a >= t) & (a > 0)
        self._adapt(worker, i, reached.sum() / k, max(2, math.ceil(math.log2(a.size / k))))
        allowed = reached if reached.any() else a > 0
        return top_k_numpy(np.where(allowed, a, 0), min(2 * k, a.size))

    def _adapt(self, worker: int, i: int, ratio: float, most: int) -> None:
        """Computed in float32, since small tensors reach exactly 20 %."""
        history = self.achieved[worker][i]
        history.append(np.float32(ratio))
        if len(history) == self.interval:
            mean = sum(history, np.float32(0)) / np.float32(len(history))
            if abs(mean - np.float32(1)) > np.float32(0.2):
                self.stages[worker][i] = min(self.stages[worker][i] + 1, most)
            history.clear()
