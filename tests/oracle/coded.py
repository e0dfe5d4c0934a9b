"""Which positions fit into a Golomb code of fixed length, in plain Python.

The tensors of a bucket are one stream of gaps. The code has the length of an average one, half a
percent more, and two words; positions beyond it are not sent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

PHI = (math.sqrt(5) + 1) / 2


def golomb_parameter(p: float) -> int:
    """b* of Sattler et al., "Sparse Binary Compression", 2019."""
    return 0 if p >= 1 else max(0, 1 + math.floor(math.log2(math.log(PHI - 1) / math.log(1 - p))))


def bits_per_position(p: float) -> float:
    """Of positions that a fraction `p` of the elements has."""
    b = golomb_parameter(p)
    return b + 1 / (1 - (1 - p) ** (2**b))


class GolombLength:
    """Length of the code of the positions of a bucket.

    Args:
        sizes: Elements of each tensor.
        k: Positions of each tensor.
    """

    def __init__(self, sizes: Sequence[int], k: Sequence[int]):
        share = min(max(sum(k), 1) / max(sum(sizes), 1), 1.0)
        self.b = golomb_parameter(share)
        self.words = math.ceil(1.005 * bits_per_position(share) * sum(k) / 32) + 2

    def fitting(self, stream: np.ndarray) -> int:
        """How many positions' codes there is room for."""
        gaps = np.diff(stream, prepend=-1)
        bits = np.cumsum(((gaps - 1) >> self.b) + 1 + self.b)  # ones, a zero, the low bits
        return int((bits <= 32 * self.words).sum())
