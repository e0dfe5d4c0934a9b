"""Streaming DiLoCo's low-bit messages in numpy.

Written from the definition of the formats: a list of magnitudes, and the nearest one of each value.
"""

import numpy as np

RUN = 256
# E3M0: three bits of exponent, one of its eight codes for 0. E4M3: sixteen exponents of eight
# mantissas each; the largest value is 1 and the smallest represents 0.
E3M0 = [2.0**-j for j in range(7)]
E4M3 = sorted([1.0, *((1 + i / 8) * 2.0**-j for i in range(8) for j in range(1, 17))])[-127:]
MAGNITUDES = {4: np.array([0.0, *sorted(E3M0)]), 8: np.array([0.0, *E4M3])}


def rounded(run, bits):
    """The nearest magnitude of each element in units of the run's largest; ties go up."""
    scale = np.abs(run).max()
    if scale == 0:
        return np.zeros_like(run)
    distance = np.abs((np.abs(run) / scale)[:, None].astype(np.float64) - MAGNITUDES[bits][::-1])
    nearest = MAGNITUDES[bits][::-1][np.argmin(distance, axis=1)].astype(np.float32)
    return np.sign(run) * nearest * scale


class SmallFloatsOracle:
    """Two workers sum both runs; of more workers, each rounds the sums of a block of runs."""

    residuals = None

    def __init__(self, shapes, workers, bits):
        self.shapes, self.workers, self.bits = shapes, workers, bits

    def step(self, grads):
        vectors = [np.concatenate([np.ravel(g) for g in own]).astype(np.float32) for own in grads]
        size = vectors[0].size
        length = -(-size // (self.workers * RUN)) * RUN * self.workers
        total = np.zeros(length, np.float32)
        for start in range(0, length, RUN):
            for vector in vectors:
                run = np.zeros(RUN, np.float32)
                own = vector[start : start + RUN]
                run[: own.size] = own
                total[start : start + RUN] += rounded(run, self.bits)
            if self.workers > 2:
                total[start : start + RUN] = rounded(total[start : start + RUN], self.bits)
        ends = np.cumsum([int(np.prod(s)) for s in self.shapes])
        parts = np.split(total[:size], ends[:-1])
        return [part.reshape(shape) for part, shape in zip(parts, self.shapes, strict=True)]
