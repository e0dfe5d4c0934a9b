"""AMSGrad as in COMP-AMS, in plain numpy, float64.

    m = b1 m + (1 - b1) g,  v = b2 v + (1 - b2) g^2,  h = max(h, v),  w -= eta m / sqrt(h + eps)

Reference: Li, Karimi, Li (2022), "On Distributed Adaptive Optimization with Gradient Compression".
"""

from __future__ import annotations

import numpy as np


class AMSGradOracle:
    """One vector of weights."""

    def __init__(self, weights, rate, beta_1=0.9, beta_2=0.999, epsilon=1e-8):
        self.weights = np.array(weights, np.float64)
        self.rate, self.beta_1, self.beta_2, self.epsilon = rate, beta_1, beta_2, epsilon
        self.m, self.v, self.h = (np.zeros_like(self.weights) for _ in range(3))

    def step(self, gradient) -> np.ndarray:
        """Apply one gradient; returns the weights."""
        self.m = self.beta_1 * self.m + (1 - self.beta_1) * gradient
        self.v = self.beta_2 * self.v + (1 - self.beta_2) * np.square(gradient)
        self.h = np.maximum(self.h, self.v)
        self.weights -= self.rate * self.m / np.sqrt(self.h + self.epsilon)
        return self.weights
