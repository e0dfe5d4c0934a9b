"""RedSync; `tests/unit/test_redsync.py` compares it with the oracle in more variants."""

import dataclasses

import numpy as np

import tf_redsync as rs
from tests.conformance.descriptor import Descriptor
from tf_redsync.exchange.requests import AllGather


def payload(method, specs, step) -> list[int]:
    """Bytes of a message in the paper's layout: count, indices, and values or a mean."""
    words = 1
    densities = getattr(method.warm_up, "densities", ())
    density = (*densities, *[method.density] * 9)[step]
    for spec in specs:
        k = min(max(1, int(np.floor(density * spec.size + 0.5))), spec.size)
        quantized = method.quantized and not spec.output_layer
        words += 2 + k if quantized else 1 + 2 * k
    return [4 * words]


def _redsync(**options) -> Descriptor:
    method = rs.RedSync(**{"density": 0.1, **options})
    full = None if method.quantized else dataclasses.replace(method, density=1.0, warm_up=None)
    return Descriptor(method, full, requests=(AllGather,), payload=payload)


TABLE = {
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
