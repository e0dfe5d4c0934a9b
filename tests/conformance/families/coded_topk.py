"""Exact top-k with a coded message: every form of values, momentum, a dense warm-up."""

import tf_redsync as rs
from tests.conformance.descriptor import Descriptor
from tests.oracle.coded_top_k import CodedTopKOracle, message_words
from tests.oracle.sparse import count
from tf_redsync.exchange.requests import AllGather


def payload(method, specs, step):
    """A flag, a Golomb code of all positions, magnitudes and codes of values."""
    sizes = [s.size for s in specs]
    slots = [count(method.density, n) for n in sizes]
    return [4 * message_words(sizes, slots, method.value_bits)]


def oracle(method, specs, workers):
    return CodedTopKOracle(
        [s.shape for s in specs], workers, method.density, method.value_bits,
        momentum=method.momentum, nesterov=method.nesterov, masking=method.masking,
    )  # fmt: skip


def _coded(**options):
    method = rs.CodedTopK(**{"density": 0.1, **options})
    return Descriptor(method, None, True, (AllGather,), payload, oracle, steps=15)


TABLE = {
    "coded_topk": _coded(),
    "coded_topk_nesterov": _coded(
        density=0.03, momentum=0.9, nesterov=True, value_bits=3, warm_up=rs.DenseWarmUp(2)
    ),
    "coded_topk_bfloat16": _coded(momentum=0.5, masking=False, value_bits=16),
}
