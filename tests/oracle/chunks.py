"""Top-k of every chunk in plain numpy, by sorting."""

import numpy as np


def chunked_top_k_numpy(chunks: np.ndarray, k: int):
    """Positions, ascending, and values of the k largest magnitudes; the first ones among equals."""
    positions = np.zeros((len(chunks), k), np.int32)
    for row, chunk in zip(positions, chunks, strict=True):
        magnitudes = chunk.view(np.uint32) & 0x7FFFFFFF  # NaNs above infinities above numbers
        order = sorted(range(len(chunk)), key=lambda i: (-int(magnitudes[i]), i))  # noqa: B023
        row[:] = sorted(order[:k])
    return positions, np.take_along_axis(chunks, positions.astype(np.int64), axis=1)
