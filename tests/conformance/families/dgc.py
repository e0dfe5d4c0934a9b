"""Deep Gradient Compression."""

import dataclasses

import numpy as np
import tensorflow as tf

import tf_redsync as rs
from tests.conformance.descriptor import Descriptor
from tests.oracle.dgc import DGCOracle
from tests.oracle.sparse import count
from tf_redsync.exchange.requests import AllGather


def counts(method, specs, step):
    densities = getattr(method.warm_up, "densities", ())
    density = densities[step] if step < len(densities) else method.density  # one step per stage
    return [count(density, s.size) for s in specs]


def payload(method, specs, step):
    """A flag, then count, indices and values of each tensor."""
    return [4 * (1 + sum(1 + 2 * k for k in counts(method, specs, step)))]


def oracle(method, specs, workers):
    """Uses the method's own sample; `test_dgc.py` tests it."""

    def sample(tensor, step):
        return np.array(method.sample(specs[tensor], method.draw(tf.constant(step, tf.int64))))

    return DGCOracle(
        [s.shape for s in specs], workers, lambda step: counts(method, specs, step), sample,
        method.momentum, method.nesterov, method.masks,
    )  # fmt: skip


def _dgc(**options):
    method = rs.DGC(**options)
    full = dataclasses.replace(method, density=1.0, warm_up=None)
    return Descriptor(method, full, True, (AllGather,), payload, oracle, steps=20)


TABLE = {
    "dgc": _dgc(density=0.1, sample_ratio=0.1),
    "dgc_nesterov_ramp": _dgc(
        density=0.05, nesterov=True, masking=False, warm_up=rs.ExponentialWarmUp(1, (0.5, 0.1))
    ),
}
