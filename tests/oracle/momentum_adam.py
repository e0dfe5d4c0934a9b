"""Adam after an exchange that applies the momentum, in plain numpy, float64.

    u = m u + g                                 the momentum of the sum over workers
    v = b2 v + (1 - b2) u^2
    w -= eta u / (sqrt(v / (1 - b2^t)) + eps)   Adam of u with beta_1 = 0

Without compression, GMC's momentum (Shi et al. 2019) turns Adam (Kingma, Ba 2015) into this.
"""

from __future__ import annotations

import numpy as np


class MomentumAdamOracle:
    """One vector of weights."""

    def __init__(self, weights, rate, momentum=0.9, beta_2=0.999, epsilon=1e-7):
        self.weights = np.array(weights, np.float64)
        self.rate, self.momentum, self.beta_2, self.epsilon = rate, momentum, beta_2, epsilon
        self.u, self.v = np.zeros_like(self.weights), np.zeros_like(self.weights)
        self.steps = 0

    def step(self, gradient) -> np.ndarray:
        """Apply the sum of the workers' gradients; returns the weights."""
        self.steps += 1
        self.u = self.momentum * self.u + gradient
        self.v = self.beta_2 * self.v + (1 - self.beta_2) * np.square(self.u)
        second = self.v / (1 - self.beta_2**self.steps)
        self.weights -= self.rate * self.u / (np.sqrt(second) + self.epsilon)
        return self.weights
