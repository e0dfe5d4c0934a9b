"""The table: every public method, in its variants, and what the laws should find.

A new method needs one entry here; `test_laws.test_table_covers_every_public_method` says so.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import tf_redsync as rs
from tf_redsync.exchange.layout import TensorSpec


@dataclasses.dataclass(frozen=True)
class Descriptor:
    """A method and what it is expected to be.

    Attributes:
        method: The instance under test.
        full: The same method when it sends everything (density 1), or None if there is no such
            thing. Its totals must be those of uncompressed momentum SGD.
        agrees: All workers end up with the same totals.
        gathers: It sends messages (with a header); otherwise sums, or nothing.
    """

    method: Any
    full: Any = None
    agrees: bool = True
    gathers: bool = False


def _redsync(**options) -> Descriptor:
    method = rs.RedSync(**{"density": 0.1, **options})
    full = None if method.quantized else dataclasses.replace(method, density=1.0, warm_up=None)
    return Descriptor(method, full, gathers=True)


TABLE = {
    "dense": Descriptor(rs.Dense(), rs.Dense()),
    "dense_momentum": Descriptor(rs.Dense(momentum=0.9), rs.Dense(momentum=0.9)),
    "dense_nesterov": Descriptor(
        rs.Dense(momentum=0.9, nesterov=True), rs.Dense(momentum=0.9, nesterov=True)
    ),
    "no_exchange": Descriptor(rs.NoExchange(), agrees=False),
    "redsync_auto": _redsync(threshold_above=1000, dense_below=0),
    "redsync_exact": _redsync(selection="exact"),
    "redsync_trimmed": _redsync(selection="trimmed"),
    "redsync_threshold": _redsync(selection="threshold", search_interval=2),
    "redsync_sparse": _redsync(density=0.001, selection="exact"),
    "redsync_dense": _redsync(density=0.8, selection="threshold"),
    "redsync_momentum": _redsync(momentum=0.9),
    "redsync_nesterov": _redsync(momentum=0.9, nesterov=True, selection="threshold"),
    "redsync_no_masking": _redsync(momentum=0.9, masking=False, selection="exact"),
    "redsync_nesterov_no_masking": _redsync(momentum=0.5, nesterov=True, masking=False),
    "redsync_clipped": _redsync(clip_norm=1.0),
    "redsync_dense_warm_up": _redsync(warm_up=rs.DenseWarmUp(2)),
    "redsync_ramp": _redsync(density=0.01, warm_up=rs.ExponentialWarmUp(1, (0.5, 0.1))),
    "redsync_quantized": _redsync(quantized=True, selection="exact"),
    "redsync_quantized_trimmed": _redsync(quantized=True, selection="trimmed", momentum=0.9),
    "redsync_quantized_threshold": _redsync(quantized=True, selection="threshold"),
}

# Ranks 0 to 4, one element, no element, primes, and sizes around powers of two.
SHAPES = ((), (1,), (13,), (1, 1), (0, 3), (31, 5), (257, 3), (3, 4, 5), (2, 3, 1, 4), (64, 33))
SPECS = tuple(
    TensorSpec(f"layer/{i}", shape, position=i, output_layer=i == len(SHAPES) - 1)
    for i, shape in enumerate(SHAPES)
)
WORKERS = (1, 2, 3, 4, 7, 8)
