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


def _coded(compare=oracle, **options):
    method = rs.CodedTopK(**{"density": 0.1, **options})
    return Descriptor(method, None, True, (AllGather,), payload, compare, steps=15)


TABLE = {
    "coded_topk": _coded(),
    "coded_topk_momentum": _coded(momentum=0.9, value_bits=2, density=0.03),
    "coded_topk_nesterov": _coded(momentum=0.9, nesterov=True, masking=False, value_bits=4),
    "coded_topk_bfloat16": _coded(value_bits=16, momentum=0.5),
    "coded_topk_clipped": _coded(None, clip_norm=1.0, warm_up=rs.DenseWarmUp(2), value_bits=3),
}
