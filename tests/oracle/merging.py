"""Merge of sparse blocks in plain Python, as in Zhao et al., "SparDL", ICDE 2024."""

from __future__ import annotations

import numpy as np

from tests.oracle.positions import unsigned
from tests.oracle.quantization import Malformed, flush


def sparse_merge_numpy(indices, values, counts, *, sizes, k):
    """Fields in the order of `tf_redsync.ops.codecs.Merged`; raises Malformed.

    Positions in the result are unsigned, stored as the bits of an int32.
    """
    kept: list = []
    dropped: list = []
    for i, (rows, row_values, size) in enumerate(zip(indices, values, sizes, strict=True)):
        sums: dict[int, np.float32] = {}
        for row, row_value, count in zip(rows, row_values, np.asarray(counts)[:, i], strict=True):
            if not 0 <= count <= len(row):
                raise Malformed("count")
            row, row_value = unsigned(row)[:count], row_value[:count]
            if (row >= size).any() or (np.diff(row.astype(np.int64)) <= 0).any():
                raise Malformed("index")
            if not np.isfinite(row_value).all():
                raise Malformed("value")
            for index, value in zip(row.tolist(), flush(row_value), strict=True):
                sums[index] = flush(sums.get(index, np.float32(0)) + value)[()]
        order = sorted((j for j in sums if sums[j] != 0), key=lambda j: (-abs(sums[j]), j))  # noqa: B023
        for chosen, slots, out in (
            (order[: k[i]], k[i], kept),
            (order[k[i] :], rows.size, dropped),
        ):
            index, value = np.zeros(slots, np.uint32), np.zeros(slots, np.float32)
            for at, j in enumerate(sorted(chosen)):
                index[at], value[at] = j, sums[j]
            out.append((index.view(np.int32), value, len(chosen)))
    return tuple(
        part
        for out in (kept, dropped)
        for part in (
            [o[0] for o in out],
            [o[1] for o in out],
            np.array([o[2] for o in out], np.int32),
        )
    )
