"""Exact top-k with a coded message: every form of values and momentum, a dense warm-up."""

import tf_redsync as rs
from tests.conformance.descriptor import Descriptor
from tests.oracle.coded_top_k import (
    CodedAdamOracle,
    CodedGMCOracle,
    CodedTopKOracle,
    message_words,
)
from tests.oracle.sparse import count
from tf_redsync.exchange.requests import AllGather


def densities(method, specs):
    """Biases, norms and tensors below `dense_below` have a density of their own."""
    small = [len(s.shape) < 2 or 4 * s.size < method.dense_below for s in specs]
    if method.small_density is None:
        return [method.density] * len(specs)
    return [max(method.density, method.small_density) if s else method.density for s in small]


def payload(method, specs, step):
    """A flag, a Golomb code of all positions, magnitudes and codes of values."""
    sizes = [s.size for s in specs]
    slots = [count(d, n) for d, n in zip(densities(method, specs), sizes, strict=True)]
    return [4 * message_words(sizes, slots, method.value_bits)]


def oracle(method, specs, workers):
    return CodedTopKOracle(
        [s.shape for s in specs], workers, densities(method, specs), method.value_bits,
        momentum=method.momentum, nesterov=method.nesterov, masking=method.masks,
    )  # fmt: skip


def _coded(**options):
    method = rs.CodedTopK(**{"density": 0.1, **options})
    return Descriptor(method, None, True, (AllGather,), payload, oracle, steps=15)


def gmc_oracle(method, specs, workers):
    return CodedGMCOracle(
        [s.shape for s in specs], workers, densities(method, specs), method.value_bits,
        momentum=method.momentum,
    )  # fmt: skip


def _gmc(**options):
    method = rs.CodedGMC(**options)
    forms = {"tolerance": 1e-5, "steps": 15, "patience": 6.0}  # momentum is sent repeatedly
    return Descriptor(method, None, True, (AllGather,), payload, gmc_oracle, **forms)


def adam_oracle(method, specs, workers):
    return CodedAdamOracle(
        [s.shape for s in specs], workers, densities(method, specs), method.value_bits,
        method.beta_2, method.epsilon, 1 if method.average_every else workers,
    )  # fmt: skip


def _adam(**options):
    # With a small epsilon all first updates have the same magnitude, up to rounding.
    method = rs.CodedAdam(epsilon=0.1, **options)
    return Descriptor(method, None, True, (AllGather,), payload, adam_oracle, tolerance=1e-4)


TABLE = {
    "coded_adam": _adam(density=0.05, small_density=0.3, dense_below=256),
    "coded_adam_averaged": _adam(density=0.05, beta_2=0.9, average_every=4),
    "coded_adam_bfloat16": _adam(density=0.2, beta_2=0.9, value_bits=16),
    "coded_topk": _coded(density=0.05, small_density=0.3, dense_below=256),
    "coded_topk_nesterov": _coded(
        density=0.03, momentum=0.9, nesterov=True, value_bits=4, warm_up=rs.DenseWarmUp(2)
    ),
    "coded_topk_bfloat16": _coded(momentum=0.5, masking=False, value_bits=16, small_density=None),
    "coded_gmc": _gmc(density=0.1, small_density=0.3, dense_below=256),
    "coded_gmc_bfloat16": _gmc(density=0.2, momentum=0.5, value_bits=16, small_density=None),
    "coded_topk_local": _coded(steps=3, small_density=0.01),
}
