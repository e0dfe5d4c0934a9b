"""Sign methods in plain numpy.

References: Bernstein, Wang, Azizzadenesheli, Anandkumar (2018), "signSGD"; Karimireddy, Rebjock,
Stich, Jaggi (2019), "Error Feedback Fixes SignSGD"; Seide, Fu, Droppo, Li, Yu (2014), "1-Bit SGD";
Tang et al. (2021), "1-bit Adam".
"""

from __future__ import annotations

import numpy as np


class VoteOracle:
    """Majority vote of the signs of moving averages; `momentum` 0 is SignSGD.

    An element that is 0 votes for 1 if step plus worker is even, else for -1; a tie is 0.
    """

    residuals = None

    def __init__(self, shapes, workers: int, momentum: float = 0.0):
        self.momentum, self.iteration = np.float32(momentum), 0
        self.averages = [[np.zeros(s, np.float32) for s in shapes] for _ in range(workers)]

    def step(self, grads) -> list[np.ndarray]:
        """Runs one step on `grads[worker][tensor]`; returns the totals."""
        m, votes = self.momentum, []
        for worker, own in enumerate(grads):
            average = [
                m * u + np.float32(1 - m) * g
                for u, g in zip(self.averages[worker], own, strict=True)
            ]
            self.averages[worker] = average
            side = 1.0 if (worker + self.iteration) % 2 == 0 else -1.0
            votes.append([np.where(u == 0, side, np.sign(u)) for u in average])
        self.iteration += 1
        return [np.sign(sum(v)).astype(np.float32) for v in zip(*votes, strict=True)]


class _Memory:
    """Residuals that continue from the float32 workers': rounding could flip a sign."""

    def __init__(self, shapes, workers: int):
        self.residuals = [[np.zeros(s, np.float32) for s in shapes] for _ in range(workers)]

    def follow(self, states) -> None:
        self.residuals = [[np.array(e) for e in s["residual"]] for s in states]

    def sums(self, grads):
        """Gradient plus residual, `[worker][tensor]`, as float32 adds them."""
        return [
            [e + g for e, g in zip(*pair, strict=True)]
            for pair in zip(self.residuals, grads, strict=True)
        ]


class ScaledSignOracle(_Memory):
    """EF-SignSGD: the sign times the mean magnitude of gradient plus residual."""

    def step(self, grads) -> list[np.ndarray]:
        sums = self.sums(grads)
        sent = [
            [
                np.where(p >= 0, 1.0, -1.0) * np.abs(np.float64(p)).sum() / max(p.size, 1)
                for p in own
            ]
            for own in sums
        ]
        self.residuals = [
            [p - d for p, d in zip(*pair, strict=True)] for pair in zip(sums, sent, strict=True)
        ]
        return [sum(d) for d in zip(*sent, strict=True)]


def two_means(values: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """Replaces every seen element by the mean of the negative ones or of the others."""
    result, values = np.zeros(values.shape), np.float64(values)
    for side in (seen & (values < 0), seen & (values >= 0)):
        if side.any():
            result[side] = values[side].mean()
    return result


class OneBitOracle(_Memory):
    """1-bit SGD: quantized to the owner of a block, summed, quantized to all workers."""

    def step(self, grads, seen=None) -> list[np.ndarray]:
        """Runs one step; `seen` masks elements, of which the others are 0 and in no mean."""
        sums, workers = self.sums(grads), len(grads)
        totals = [np.zeros(np.shape(g)) for g in grads[0]]
        for i, total in enumerate(totals):
            own = [np.float64(s[i]).reshape(-1) for s in sums]
            kept, total, n = [p.copy() for p in own], total.reshape(-1), own[0].size
            mask = np.ones(n, bool) if seen is None else np.reshape(seen[i], -1)
            length = -(-n // workers)
            for owner in range(workers):
                block = slice(owner * length, min((owner + 1) * length, n))
                arrived = own[owner][block].copy()
                for worker in set(range(workers)) - {owner}:
                    sent = two_means(own[worker][block], mask[block])
                    kept[worker][block] -= sent
                    arrived += sent
                total[block] = two_means(arrived, mask[block])
                kept[owner][block] = arrived - total[block]
            for worker in range(workers):
                self.residuals[worker][i] = kept[worker].reshape(np.shape(grads[0][i]))
        return totals


class OneBitAdamOracle(OneBitOracle):
    """The second stage of 1-bit Adam: totals are momenta.

    An element moves by its momentum over the root of its first-stage variance. The paper does not
    define the step where the variance is 0: the element then has no step and no momentum.
    """

    def __init__(self, shapes, workers: int, beta_1: float, momentum, variance):
        super().__init__(shapes, workers)
        self.beta_1, self.momentum = np.float32(beta_1), [np.float32(m) for m in momentum]
        self.moves = [np.float64(v) > 0 for v in variance]

    @classmethod
    def after(cls, history, workers: int, beta_1: float, beta_2: float = 0.999):
        """The oracle after a first stage: Adam's m and v of the sums `history[step][tensor]`."""
        m = v = [np.zeros(np.shape(g)) for g in history[0]]
        for sums in history:
            sums = [np.float64(g) for g in sums]
            m = [beta_1 * a + (1 - beta_1) * g for a, g in zip(m, sums, strict=True)]
            v = [beta_2 * a + (1 - beta_2) * g**2 for a, g in zip(v, sums, strict=True)]
        return cls([np.shape(g) for g in history[0]], workers, beta_1, m, v)

    def follow(self, states) -> None:
        super().follow(states)
        self.momentum = [np.array(m) for m in states[0]["momentum"]]

    def step(self, grads) -> list[np.ndarray]:
        b, seen = self.beta_1, self.moves
        shares = [b * m / np.float32(len(grads)) for m in self.momentum]
        own = [
            [np.where(s, m + (1 - b) * g, 0) for s, m, g in zip(seen, shares, worker, strict=True)]
            for worker in grads
        ]
        self.momentum = super().step(own, seen)
        return self.momentum
