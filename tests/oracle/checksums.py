"""The checksum of a message in plain Python: a polynomial modulo a prime, with Horner's rule."""

from __future__ import annotations

import numpy as np

PRIME = 2**32 - 5
BASE = 2300216400
REACH = 2**25


def checksum(words) -> int:
    total = 0
    for word in reversed([int(w) % 2**32 for w in words]):
        total = (total + word) * BASE % PRIME
    return total


def sealed_numpy(messages) -> np.ndarray:
    rows = np.array(messages, np.int32)
    for row in rows:
        term = pow(BASE, REACH + 1, PRIME) + int(row[0]) * pow(BASE, REACH, PRIME)
        row[0] = np.uint32((checksum(row[1:]) + term) % PRIME).view(np.int32)
    return rows
