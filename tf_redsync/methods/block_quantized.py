"""Sums of values that travel as integers of 8, 4 or 2 bits with a shared scale per block."""

from __future__ import annotations

import dataclasses

from typing_extensions import override

from tf_redsync.config import register
from tf_redsync.exchange.context import BlockRounding
from tf_redsync.exchange.traits import Traits
from tf_redsync.methods.half import RoundingWrapper
from tf_redsync.ops.block_quantization import check_block_format


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockQuantized(RoundingWrapper):
    """Integers of 8, 4 or 2 bits on the wire, for dense gradients or another method's values.

    Elements of a block share a scale, and every rounding error stays in the residual of the worker
    that made it. On every worker w of K, with gradient g, residual e, p = e + g cut into K parts,
    and Q(x) the quantised x:

        send Q(p[b]) to worker b                      one all-to-all
        e[b] <- p[b] - Q(p[b])                        for every b other than w
        s = p[w] + sum over the others of their Q(p[w]), in float32
        send Q(s) to all                              one all-gather
        e[w] <- s - Q(s)
        total = Q(s) of all parts

    Two workers exchange Q(p) in one all-gather: as many bytes, half the latency, one rounding.

    Quantised all-reduces with feedback on both sides: Xie et al. (2024), "LoCo: Low-Bit
    Communication Adaptor for Large-scale Model Training", arXiv 2407.04480, 4 bits; Tang et al.
    (2021), "1-bit Adam", arXiv 2102.02888, section 5, one bit. Around `DiLoCo` it quantises the
    changes of weights, as Thérien et al. (2025), "MuLoCo", arXiv 2505.23725, with error feedback.

    Format. With L = 2^(bits - 1) - 1 and the scale c of a block, rounded up to bfloat16, values are
    the multiples of c / L from -c to c. c is the largest magnitude; with 2 bits, the best of four
    shares of it. A scale takes 16 / `block` bits per element. `ops/block_quantization.py` has the
    arithmetic, docs/methods/BlockQuantized.md the errors of other levels, scales and blocks.

    Differences from the papers

    * LoCo keeps an average of past errors in 8 bits; here the residual is float32.
    * Sums are quantised with feedback too, as by 1-bit Adam.

    Args:
        method: Whose values: `None` or `Dense()` for the dense gradients, a method that sends
            values, such as `PowerSGD`, `ACPSGD`, `TopK`, `RedSync` or `RandomBlock`, or `LocalSGD`,
            `DiLoCo` or `StreamingDiLoCo(value_bits=32)`. The residual of that method, or one of
            this wrapper, keeps the rounding errors. Positions of selected elements keep 32 bits.
        bits: 8, 4 or 2.
        block: Elements that share a scale, a multiple of 32.

    Raises:
        ValueError: for a hyper-parameter out of its range, or a method whose values cannot be
            rounded on the way.

    Example:
        >>> import tf_redsync as rs
        >>> rs.BlockQuantized(method=rs.PowerSGD(rank=4), bits=4).traits.conserves
        True
    """

    bits: int = 8
    block: int = 256

    @override
    def __post_init__(self) -> None:
        check_block_format(self.bits, self.block)
        super().__post_init__()

    @property
    @override
    def traits(self) -> Traits:
        return dataclasses.replace(
            super().traits,
            paper="Xie et al. 2024",
            bits="(bits + 16 / block) (1 + 1 / K); K = 2: bits + 16 / block",
        )

    @property
    @override
    def rounding(self) -> BlockRounding:
        return BlockRounding(self.bits, self.block)

    @property
    @override
    def name(self) -> str:
        return f"{self.bits} bits"
