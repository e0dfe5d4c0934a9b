"""Codings of the positions and values that a sparsifier sends."""

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

    Independent codings of positions and values, as in Hang Xu, Kelly Kostopoulou, Aritra Dutta, Xin
    Li, Alexandros Ntoulas, Panos Kalnis (2021), "DeepReduce: A Sparse-tensor Communication
    Framework for Federated Deep Learning", NeurIPS.

    A sparsifier selects the elements S of its tensors, with values p, and sends [indices of S, p].
    With codings, on every worker:

        message = [code of the indices, code of the values]     all-gather
        S', c   = decode(message)
        total   = sum over workers of c on S'
        residual <- residual of the sparsifier + (p on S) - (c on S')

    The residual thus receives rounding errors, positions that exceed a code of fixed length, and
    false positions of a lossy code. Later steps correct them.

    The paper's codings: `Bloom` with the policies P0, P1, P2 and leftmost, `RunLength` and
    `Huffman` for indices; `PolynomialFit`, `DoubleExponentialFit` and `QSGDValues` for values. The
    other codings give shorter messages. Golomb codes are lossless and have capacity for any
    positions. The default uses them if they are the shortest. Their length exceeds the entropy of
    random positions by 5 % at a density of 0.1 %, 6 % at 1 % and 9 % at 10 %.

    Size of the message relative to the dense gradient, for 2^18 Laplace gradients, and in the paper
    (other networks):

                                               10 %     paper          1 %      paper
        top-k, uncoded                         .200     .203, .207     .020     .020
        Bloom, P0                              .140     .143, .148     .016     .015
        Bloom, P0, QSGD (`DeepReduce`)         .058     .062, .071     .007
        PolynomialFit, 32-bit indices          .147     .104, .109
        PolynomialFit, Golomb                  .062                    .007
        Golomb (`Coded`)                       .115                    .013
        Golomb, QSGD                           .040

    Differences from the paper

    * Messages have a length that all workers can compute, so that one all-gather suffices. A code
      of variable length is padded to its longest length.
    * For a curve fit the paper sorts the values and sends plain indices in that order. Here indices
      ascend, as their coding requires, so the message also has the rank of each value in the
      sorted order, in ceil(log2 k) bits. The paper does this only if it codes indices and values.
      With Golomb codes both parts together are shorter than 32 bits per index.
    * No Deflate, for which TensorFlow has no op.

    Args:
        method: A method that sends selected elements (`traits.sends_selected`), such as `TopK`.
        indices: Coding of the positions, from `tf_redsync.codings`. Default: the shortest lossless
            coding for each bucket.
        values: Coding of the values, from `tf_redsync.codings`.
        error_feedback: Whether the residual keeps the errors of the value coding. It always keeps
            those of the position coding.
        seed: Seed of stochastic codings.

    Raises:
        ValueError: If a coding is invalid, or the method's messages cannot be coded.

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
                f"Golomb(). Received: indices={self.indices!r}{checks.class_hint(self.indices)}"
            )
        if not isinstance(self.values, ValueCoding):
            raise ValueError(
                "`values` must be a coding of values from tf_redsync.codings, such as Half(). "
                f"Received: values={self.values!r}{checks.class_hint(self.values)}"
            )
        checks.boolean("error_feedback", self.error_feedback)
        checks.integer("seed", self.seed, low=0)
        if not (isinstance(self.method, Method) and self.method.traits.sends_selected):
            raise ValueError(
                "`method` must send selected elements with their positions, as TopK does "
                "(`traits.sends_selected`). "
                f"Received: method={self.method!r}{checks.class_hint(self.method)}"
            )
        if self.method.traits.density_changes:
            self._check_any_slots()

    @property
    @override
    def traits(self) -> Traits:
        inside, added = self.method.traits, {"residual": "sum"} if self.error_feedback else {}
        return dataclasses.replace(
            super().traits,
            paper="-",
            requests="as the method, of coded positions and values",
            bits="density (bits of an index + bits of a value)",
            state_kinds={**inside.state_kinds, **added},
            conserves=inside.conserves and (self.error_feedback or self.values.exact),
            # Decoded values may be larger than the selected ones
            totals_may_overflow=True,
        )

    def _check_any_slots(self) -> None:
        fixed = [type(c).__name__ for c in (self.indices, self.values) if not c.any_slots]
        if fixed:
            raise ValueError(
                f"`method` changes its density, but messages of {' and '.join(fixed)} have the "
                "same length in all steps. Use indices=RawIndices() with values=Float32() or "
                "Half(), or, for an ExponentialWarmUp, warm_up=None here and "
                "Scheduled(method=Coded(...), stages=ExponentialWarmUp(...)). "
                f"Received: method={self.method!r}"
            )

    @override
    def describe(self, spec: TensorSpec) -> str:
        codings = f"{type(self.indices).__name__}, {type(self.values).__name__}"
        return f"{self.method.describe(spec)}; {codings}"

    @override
    def init(self, layout: BucketLayout) -> State:
        """Return the method's state, with a residual for coding errors if it has none."""
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
