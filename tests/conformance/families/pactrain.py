"""PacTrain, including masks that keep fewer elements than the capacity."""

import numpy as np
import tensorflow as tf

import tf_redsync as rs
from tests.conformance.descriptor import Descriptor
from tests.conformance.families.quantized import scalers_and_sums
from tests.oracle.pactrain import PrunedOracle, TernaryOracle, capacity
from tf_redsync.exchange.layout import BucketLayout, TensorSpec
from tf_redsync.exchange.requests import AllGather, AllReduce
from tf_redsync.methods.common.random_numbers import stream


def masks(method, specs):
    """Random masks, the same for all workers."""
    found, rng = [], np.random.default_rng(len(specs))
    for i, spec in enumerate(specs):
        mask = np.zeros(spec.size, bool)
        kept = max(0, capacity(method.sparsity, spec.size) - i % 3)
        mask[rng.permutation(spec.size)[:kept]] = True
        found.append(mask.reshape(spec.shape))
    return found


def pruned(method, specs):
    """The state after the masks are written."""
    return method.with_masks(BucketLayout(specs, 1), masks(method, specs))


def kept_values(method, specs, step):
    """32 (1 - s) bits per element."""
    return [4 * sum(capacity(method.sparsity, s.size) for s in specs)]


def scalers_and_kept_sums(method, specs, step):
    """Scalers and sums of TernGrad, for tensors of (1 - s) n elements."""
    rows = [TensorSpec(s.name, (capacity(method.sparsity, s.size),)) for s in specs]
    return scalers_and_sums(method, rows, step)


def pruned_oracle(method, specs, workers):
    return PrunedOracle(masks(method, specs))


def ternary_oracle(method, specs, workers):
    def own_stream(step, worker):
        seed, number = stream(method.seed, tf.constant(step, tf.int64), specs[0].position).numpy()
        return seed, worker, number

    return TernaryOracle(masks(method, specs), method.sparsity, own_stream)


def _compact(sparsity, stable_steps=0):
    method = rs.contrib.PacTrain(sparsity=sparsity, stable_steps=stable_steps)
    full = rs.contrib.PacTrain(sparsity=0.0)
    return Descriptor(
        method, full, payload=kept_values, oracle=pruned_oracle, tolerance=1e-6, start=pruned
    )


TABLE = {
    "pactrain": _compact(0.5),
    "pactrain_sparse": _compact(0.9, stable_steps=3),
    "pactrain_ternary": Descriptor(
        rs.contrib.PacTrain(sparsity=0.7, ternary=True, seed=3),
        requests=(AllGather, AllReduce),
        payload=scalers_and_kept_sums,
        oracle=ternary_oracle,
        steps=10,
        start=pruned,
    ),
}
