"""BlockQuantized: sums of 8-, 4- or 2-bit numbers with a shared scale per block."""

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
    """8-, 4- or 2-bit numbers on the wire, for dense gradients or the values of another method.

    The elements of a block share a scale. Each worker keeps its own quantization errors in its
    residual. On every worker w of K, with gradient g, residual e, p = e + g cut into K parts, and
    Q(x) the quantized x:

        send Q(p[b]) to worker b                      one all-to-all
        e[b] <- p[b] - Q(p[b])                        for every b other than w
        s = p[w] + sum over the other workers of Q(p[w]), in float32
        send Q(s) to all workers                      one all-gather
        e[w] <- s - Q(s)
        total = Q(s) of all parts

    Two workers exchange Q(p) in one all-gather: the same bytes, half the latency, one rounding.

    Quantized all-reduces with error feedback for both roundings: Xie et al. (2024), "LoCo: Low-Bit
    Communication Adaptor for Large-scale Model Training", arXiv 2407.04480, 4 bits; Tang et al.
    (2021), "1-bit Adam", arXiv 2102.02888, section 5, one bit. Around `DiLoCo` it quantizes the
    changes of the weights with error feedback, as in Thérien et al. (2025), "MuLoCo", arXiv
    2505.23725.

    Format. A block has a scale c, rounded up to bfloat16. With 8 bits values are multiples of
    c / 127, with 2 bits -c, 0 and c. With 4 bits they are floats with two bits of exponent and one
    of mantissa (E2M1). c is the largest magnitude; with 2 bits, the best of four fractions of it. A
    scale takes 16 / `block` bits per element. Factors P of `PowerSGD` have twice the bits.
    `ops/block_quantization.py` has the arithmetic, docs/methods/BlockQuantized.md the errors of
    other levels, scales and blocks.

    Differences from the papers

    * LoCo keeps an average of past errors in 8 bits; here the residual is float32.
    * Sums are also quantized with error feedback, as in 1-bit Adam.

    Args:
        method: The method whose values are quantized: `None` or `Dense()` for the dense gradients,
            or a method that sends values, such as `PowerSGD`, `ACPSGD`, `TopK`, `RedSync`,
            `RandomBlock`, `LocalSGD`, `DiLoCo` or `StreamingDiLoCo(value_bits=32)`. The residual of
            that method, or of this wrapper, keeps the quantization errors. Positions of selected
            elements have 32 bits.
        bits: Bits per value, 8, 4 or 2.
        block: Number of elements that share a scale, a multiple of 32.

    Raises:
        ValueError: If a hyper-parameter is out of range, or the method's values cannot be rounded.

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
