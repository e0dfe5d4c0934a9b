"""Coded messages: the positions and values of any sparsifier in fewer bits."""

from __future__ import annotations

import dataclasses

import tensorflow as tf
from typing_extensions import override

from tf_redsync import checks
from tf_redsync.codings.base import IndexCoding, ValueCoding
from tf_redsync.codings.cheapest import Cheapest
from tf_redsync.codings.message import MessageCoding
from tf_redsync.codings.plain import Float32
from tf_redsync.config import register
from tf_redsync.exchange.context import Context
from tf_redsync.exchange.layout import BucketLayout, TensorSpec
from tf_redsync.exchange.method import Exchange, Method, State
from tf_redsync.exchange.traits import Traits
from tf_redsync.methods.common.random_numbers import worker_stream
from tf_redsync.methods.common.wrapper import MethodWrapper
from tf_redsync.methods.topk import TopK


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class Coded(MethodWrapper):
    """Coded messages: the positions and values of any sparsifier in fewer bits.

    The split in two independent codings is that of Hang Xu, Kelly Kostopoulou, Aritra Dutta, Xin
    Li, Alexandros Ntoulas, Panos Kalnis (2021), "DeepReduce: A Sparse-tensor Communication
    Framework for Federated Deep Learning", NeurIPS.

    A sparsifier selects elements S of its tensors and sends [indices of S, values]. Here

        message = [code of the indices, code of the values]     all-gather
        S', c   = what all workers decode
        total   = sum over workers of c on S'
        residual <- what the sparsifier keeps, and what the codes have changed: p on S - c on S'

    with p the true values: rounding errors, positions that did not fit into a code of fixed length,
    and positions that a lossy code adds are all made up for in later steps.

    The paper's codings: `Bloom` with the policies P0, P1, P2 and leftmost, `RunLength` and
    `Huffman` for indices; `PolynomialFit`, `DoubleExponentialFit` and `QSGDValues` for values. The
    other ones are shorter: Golomb codes (the default, where they win) are 5 % above what random
    positions need at 0.1 %, 6 % at 1 % and 9 % at 10 %, have room for any other positions, and lose
    nothing.

    Message over dense gradient, of 2^18 Laplace gradients, and in the paper (other nets):

                                               10 %     paper          1 %      paper
        top-k, as it is                        .200     .203, .207     .020     .020
        Bloom, P0                              .140     .143, .148     .016     .015
        Bloom, P0, QSGD (`DeepReduce`)         .058     .062, .071     .007
        PolynomialFit, 32-bit indices          .147     .104, .109
        PolynomialFit, Golomb                  .062                    .007
        Golomb (`Coded`)                       .115                    .013
        Golomb, QSGD                           .040

    Differences from the paper

    * Messages have a length that all workers can compute, so that one all-gather does. Codes of
      varying length have room for the longest one.
    * Where the paper fits values and leaves indices as they are, it sends these in the order of the
      sorted values. Here indices ascend, for the sake of their own coding, and every value's place
      in the sorted order is sent, ceil(log2 k) bits, as where the paper combines both. With Golomb
      codes that is shorter than 32 bits for an index.
    * No Deflate: there is nothing like it in TensorFlow's graphs.

    Args:
        method: A method that sends selected elements: `TopK`, `RedSync`, `DGC`, `SIDCo`, `GMC`,
            `FixedThreshold`, `SparDL` ...
        indices: Coding of the positions, one of `tf_redsync.codings`; by default the shortest
            lossless one for each bucket.
        values: Coding of the values, one of `tf_redsync.codings`.
        error_feedback: Whether the method's residual keeps what values lose by their coding. What
            a coding of positions leaves out waits there in any case.
        seed: Of codings that draw random numbers.

    Raises:
        ValueError: for something that is no coding, or a method whose messages cannot be coded.

    Example:
        >>> import tf_redsync as rs
        >>> rs.Coded(method=rs.TopK(density=0.01), values=rs.codings.Half()).traits.conserves
        True
    """

    method: Method = dataclasses.field(default_factory=TopK)
    indices: IndexCoding = dataclasses.field(default_factory=Cheapest)
    values: ValueCoding = dataclasses.field(default_factory=Float32)
    error_feedback: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.indices, IndexCoding):
            raise ValueError(
                "`indices` must be a coding of positions from tf_redsync.codings, such as "
                f"Golomb(). Received: indices={self.indices!r}{checks.if_class(self.indices)}"
            )
        if not isinstance(self.values, ValueCoding):
            raise ValueError(
                "`values` must be a coding of values from tf_redsync.codings, such as Half(). "
                f"Received: values={self.values!r}{checks.if_class(self.values)}"
            )
        checks.boolean("error_feedback", self.error_feedback)
        checks.integer("seed", self.seed, low=0)
        if not (isinstance(self.method, Method) and self.method.traits.sends_selected):
            raise ValueError(
                "`method` must send selected elements with their positions, as TopK, RedSync, DGC, "
                "SIDCo, GMC, FixedThreshold, CompAMS and SparDL do: others have nothing to code. "
                f"Received: method={self.method!r}{checks.if_class(self.method)}"
            )
        if self.method.traits.density_changes:
            self._check_any_slots()

    @property
    @override
    def traits(self) -> Traits:
        inside, kept = self.method.traits, {"residual": "sum"} if self.error_feedback else {}
        return dataclasses.replace(
            super().traits,
            paper="-",
            requests="as the method, of coded positions and values",
            bits="density (bits of an index + bits of a value)",
            state_kinds={**inside.state_kinds, **kept},
            conserves=inside.conserves and (self.error_feedback or self.values.exact),
        )

    def _check_any_slots(self) -> None:
        fixed = [type(c).__name__ for c in (self.indices, self.values) if not c.any_slots]
        if fixed:
            raise ValueError(
                "`method` sends other numbers of elements in other steps (ExponentialWarmUp), and "
                f"the length of {' and '.join(fixed)} must be the same in all of them. Use "
                "indices=RawIndices() with values=Float32() or Half(), or warm_up=None here "
                "and Scheduled(method=Coded(...), stages=ExponentialWarmUp(...)). "
                f"Received: method={self.method!r}"
            )

    @override
    def describe(self, spec: TensorSpec) -> str:
        codings = f"{type(self.indices).__name__}, {type(self.values).__name__}"
        return f"{self.method.describe(spec)}; {codings}"

    @override
    def init(self, layout: BucketLayout) -> State:
        """With a residual for what the codes change, if the method has none."""
        state = self.method.init(layout)
        if "residual" in self.traits.state_kinds and "residual" not in state:
            state = {**state, "residual": [tf.zeros(s.shape, tf.float32) for s in layout.specs]}
        return state

    @override
    def exchange(self, grads: list[tf.Tensor], state: State, ctx: Context) -> Exchange:
        stream = worker_stream(self.seed, ctx)
        coding = MessageCoding(
            self.indices,
            self.values,
            self.error_feedback,
            seed=stream[0] + stream[2],
            stream=stream,
        )
        ctx = dataclasses.replace(ctx, coding=coding)
        return (yield from self.method.exchange(grads, state, ctx))
