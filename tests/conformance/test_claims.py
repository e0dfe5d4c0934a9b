"""Methods send as many bits of a large tensor as they declare (`Traits.bits`).

The tables in `families/` use tensors of some hundred elements. This test uses one of 16 MiB, where
methods may choose other selections, codes and capacities.
"""

import math

import pytest
import tensorflow as tf

import tf_redsync as rs
from tests.conformance import table
from tests.conformance.table import TABLE
from tf_redsync.exchange import traffic
from tf_redsync.exchange.layout import BucketLayout, TensorSpec

K = 2  # number of workers
SIDE = 2048
SPEC = TensorSpec("kernel", (SIDE, SIDE), position=1)
N = SIDE * SIDE


def payload_bits(method) -> float:
    """Average bits per element that a worker puts into its requests in a step."""
    schedule = method.sync_schedule
    dense = 1 / schedule.dense_every if schedule.dense_every else 0.0
    bits = (1 - dense) * phase_bits(method, "exchange")
    if dense:
        bits += dense * phase_bits(method, "dense_exchange")
    return bits / max(1, schedule.local_steps)


def phase_bits(method, phase: str) -> float:
    """The mean of two late steps, since some methods alternate; from traces, not from a formula."""
    numbers = [tf.int64.max - 1, tf.int64.max]
    steps = traffic.dry_run(method, BucketLayout((SPEC,), K), numbers, phase)
    # In a ring of two, half of the rows of an all-to-all stay on their worker.
    whole = {"all_gather": 1, "all_reduce": 1, "all_to_all": 2, "pair_gather": 1}
    sent = [8 * sum(whole[message.kind] * message.sent for message in step) for step in steps]
    return sum(sent) / len(sent) / N


def position_bits(density: float) -> float:
    """Golomb code of the worst positions: b + 1 bits each, and one bit per 2^b skipped elements."""
    return min(b + 1 + (1 / density - 1) / 2**b for b in range(31))


def index_bits(density: float) -> float:
    """Bits of the shortest position code: a bitmap or Golomb's."""
    return min(1 / density, position_bits(density))


def coded_bits(method) -> float:
    """Bits of a position and a value; `DeepReduce` also sends values of false positives."""
    density = method.method.density
    if not isinstance(method, rs.contrib.DeepReduce):
        return index_bits(density) + 32
    value = math.ceil(math.log2(2 * method.values.levels + 1)) + 32 / method.values.bucket_size
    return math.log2(10 / density) / math.log(2) + 1.1 * value


# Each claim and the same formula in Python, for K workers and a SIDE x SIDE matrix; families add
# others.
CLAIMS = {
    "64 density": lambda m: 64 * m.density,
    "as the method, in each stage": lambda m: CLAIMS[m.method.traits.bits](m.method),
    "32 density": lambda m: 32 * m.density,
    "128 density": lambda m: 128 * m.density,
    "64 density; quantized 32 density": lambda m: (32 if m.quantized else 64) * m.density,
    "64 density; blocks 32 density": (
        lambda m: (32 if m.selection == "random_block" else 64) * m.density
    ),
    "64 density; block-sign 1": (
        lambda m: 1 if m.compressor == "block_sign" else 64 * m.density
    ),
    "64 density (1 + 1 / K)": lambda m: 64 * m.density * (1 + 1 / K),
    "80 density (1 + 1 / K)": lambda m: 80 * m.density * (1 + 1 / K),
    "64 density log2(K)": lambda m: 64 * m.density * math.log2(K),
    "min(64 density 2^r, 32) for each r < log2(K)": lambda m: min(64 * m.density, 32),
    "density (2 + log2(1 / density) + value_bits) / steps": (
        lambda m: m.density * (position_bits(m.density) + m.value_bits) / m.steps
    ),
    "density (2 + log2(1 / density) + value_bits)": (
        lambda m: m.density * (position_bits(m.density) + m.value_bits)
    ),
    "density (b + 1 + (1 / density - 1) / 2^b) / steps": (
        lambda m: m.density * position_bits(m.density) / m.steps
    ),
    "k (32 + 2 log2(s)) / s^2, s = 64": lambda m: m.top_k * (32 + 2 * math.log2(64)) / 64**2,
    "(k (2 log2(s) + 2) + 32) / (s^2 steps), s = 64": (
        lambda m: (m.top_k * (2 * math.log2(64) + 2) + 32) / 64**2 / m.steps
    ),
    "32": lambda m: 32,
    "0": lambda m: 0,
    "1": lambda m: 1,
    "2": lambda m: 2,
    "9": lambda m: 9,
    "k": lambda m: m.bitwidth,
    "1 + 1 / K": lambda m: 1 + 1 / K,
    "(1 + 1 / K) / steps": lambda m: (1 + 1 / K) / m.steps,
    "(4 + 1 / 8) (1 + 1 / K) / steps; K = 2: (4 + 1 / 8) / steps": lambda m: (4 + 1 / 8) / m.steps,
    "32 / steps": lambda m: 32 / m.steps,
    "16 (1 + 1 / K)": lambda m: 16 * (1 + 1 / K),
    "32 r (n + m) / (n m)": lambda m: 32 * m.rank * 2 * SIDE / N,
    "16 r (n + m) / (n m)": lambda m: 16 * m.rank * 2 * SIDE / N,
    "2; shared scaler 32 / floor(log(2^25) / log(2 K + 1))": (
        lambda m: 32 / ternary_digits() if m.shared_scaler else 2
    ),
    "32 (1 - s); ternary 32 (1 - s) / floor(log(2^25) / log(2 K + 1))": (
        lambda m: 32 * (1 - m.sparsity) / (ternary_digits() if m.ternary else 1)
    ),
    "r + 1 + 2^-r / sqrt(alpha), r = 1 at 0.1": lambda m: 2 + 0.5 / math.sqrt(m.alpha),
    "density (8 + 4 / 3 bits of an index)": (
        lambda m: m.density * (8 + 4 / 3 * index_bits(m.density))
    ),
    "density (bits of an index + bits of a value)": (
        lambda m: m.method.density * coded_bits(m)
    ),
    "(2 (k - 1) + 32) / k": lambda m: (2 * (m.full_every - 1) + 32) / m.full_every,
    "(b + 5) / d": lambda m: (m.index_bits + 5) / m.block_size,
    "z(s) + z(s2) / K, z(s) = ceil(log2(s + 1)) + 1": (
        lambda m: levels(m.levels) + levels(m.sum_levels or m.levels) / K
    ),
    "ceil(log2(2 s + 1)) + 32 / d": (
        lambda m: math.ceil(math.log2(2 * m.levels + 1)) + 32 / m.bucket_size
    ),
    **table.CLAIMS,
}  # fmt: skip


def levels(s: int) -> int:
    return math.ceil(math.log2(s + 1)) + 1


def ternary_digits() -> int:
    """Number of ternary codes in a float32 that K workers sum."""
    return math.floor(25 / math.log2(2 * K + 1))


def default(descriptor):
    """The method with its defaults; that of the table if it needs arguments."""
    try:
        return type(descriptor.method)()
    except TypeError:
        return descriptor.method


FIRST = {type(d.method): d for d in reversed(TABLE.values())}
# For the second halves of claims.
OPTIONS = [
    rs.RedSync(quantized=True),
    rs.GMC(selection="random_block"),
    rs.TernGrad(shared_scaler=True),
    rs.contrib.CompAMS(compressor="block_sign"),
    rs.contrib.PacTrain(ternary=True),
]
CASES = {c.__name__: default(d) for c, d in FIRST.items()}
CASES |= {f"{type(m).__name__} with an option": m for m in OPTIONS}


@pytest.mark.parametrize("name", CASES)
def test_bits(name):
    method = CASES[name]
    assert method.traits.bits in CLAIMS, "add this `bits` to `CLAIMS` of your family"
    assert payload_bits(method) == pytest.approx(CLAIMS[method.traits.bits](method), rel=0.01)
