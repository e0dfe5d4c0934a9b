"""DeepReduce: `Coded` with the codings of that paper."""

from __future__ import annotations

import dataclasses

from typing_extensions import override

from tf_redsync.codings.base import IndexCoding, ValueCoding
from tf_redsync.config import register
from tf_redsync.contrib.codings.bloom import Bloom
from tf_redsync.contrib.codings.quantized_values import QSGDValues
from tf_redsync.exchange.traits import Traits
from tf_redsync.methods.coded import Coded


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class DeepReduce(Coded):
    """DeepReduce: `Coded` with Bloom filters under policy P0 and QSGD values as defaults.

    Hang Xu, Kelly Kostopoulou, Aritra Dutta, Xin Li, Alexandros Ntoulas, Panos Kalnis (2021),
    "DeepReduce: A Sparse-tensor Communication Framework for Federated Deep Learning", NeurIPS.
    Policy P0 with QSGD values is its best pair. `Coded` describes the message and the differences
    from the paper.

    Args:
        method: See `Coded`.
        indices: Coding of the positions. The paper has `Bloom`, `RunLength` and `Huffman`.
        values: Coding of the values. The paper has `QSGDValues`, `PolynomialFit` and
            `DoubleExponentialFit`.
        error_feedback: See `Coded`.
        seed: See `Coded`.

    Raises:
        ValueError: as `Coded`.

    Example:
        >>> import tf_redsync as rs
        >>> values = rs.contrib.codings.PolynomialFit()
        >>> rs.contrib.DeepReduce(method=rs.TopK(density=0.1), values=values).traits.conserves
        True
    """

    indices: IndexCoding = dataclasses.field(default_factory=Bloom)
    values: ValueCoding = dataclasses.field(default_factory=QSGDValues)

    @property
    @override
    def traits(self) -> Traits:
        return dataclasses.replace(
            super().traits, paper="Xu, Kostopoulou, Dutta, Li, Ntoulas, Kalnis 2021"
        )
