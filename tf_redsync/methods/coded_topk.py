"""Exact top-k with a coded message: a position and one to four bits for each element that is sent.

Felix Sattler, Simon Wiedemann, Klaus-Robert Müller, Wojciech Samek (2020), "Robust and
Communication-Efficient Federated Learning from Non-IID Data", IEEE Transactions on Neural Networks
and Learning Systems, arXiv 1903.02891 ("sparse ternary compression"): what a worker sends is the
sign of each of the k largest elements, their mean magnitude, and a Golomb code of the positions.

Jiarui Fang, Haohuan Fu, Guangwen Yang, Cho-Jui Hsieh (2019), "RedSync: Reducing Synchronization
Bandwidth for Distributed Deep Learning Training System", Journal of Parallel and Distributed
Computing, arXiv 1808.04357: the selection, with momentum correction and masking of Lin et al.
(2018).

On every worker, with residual v and velocity u, for each tensor of n elements, k = density n:

    u <- m u + g;  v <- v + u                   accumulate          (Nesterov: v <- v + u + g)
    S  = the k largest of |v|                   exactly; the lower index among equals
    q  = sign(v[S]) times a mean of |v[S]|      value_bits for each; see `codings.SignedLevels`
    message = [Golomb code of S, means, codes of q]     one all-gather for a bucket of tensors
    v[S] <- v[S] - q,  u[S] <- 0                error feedback, momentum factor masking
    total = sum over workers of q on S

An element takes about 1.5 + log2(1 / density) bits for its position and `value_bits` for its
value: with n = 2^22 and a density of 0.1 % or 1 % a whole message is 0.3 % to 1.7 % above the
bound, log2(C(n, k)) + k value_bits. One bit a value serves best: magnitudes above a threshold
differ little, and what they differ by waits in the residual. The network of `benchmarks/methods.py`
ends with the same loss whether values have 1 bit or 16, which is 2.1 to 2.5 times the bytes. The
share of the energy of the top-k that a message carries, and that share per bit of the message
relative to one bit a value:

| bits of a value | Laplace, 0.1 % | | Laplace, 1 % | | Student t(3), 1 % | |
|---|---|---|---|---|---|---|
| 1 | 98.4 % | 1 | 96.8 % | 1 | 74.7 % | 1 |
| 2 | 99.3 % | 0.94 | 98.7 % | 0.92 | 83.0 % | 1.00 |
| 3 | 99.8 % | 0.87 | 99.5 % | 0.84 | 88.9 % | 0.98 |
| 4 | 99.9 % | 0.82 | 99.8 % | 0.78 | 93.0 % | 0.94 |
| 16 | 100.0 % | 0.46 | 100.0 % | 0.39 | 100.0 % | 0.51 |

(2^22 elements; `benchmarks/value_bits.py`.)

Differences from the papers

* Sparse ternary compression has no momentum correction, and compresses what a server sends, too;
  here all workers add up what all have sent.
* Magnitudes may have up to 3 bits more, or be bfloat16.
* The positions of all tensors of a bucket are one stream of gaps. Its code has a fixed length, half
  a percent above the average. Positions that do not fit wait in the residual, like all that is not
  sent; their velocity is masked nevertheless.
* A density that changes from step to step would change the length of the code, so the only warm-up
  is `DenseWarmUp`.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import tensorflow as tf

from tf_redsync import checks
from tf_redsync.codings.selected import VALUE_BITS, coding, select_and_code
from tf_redsync.exchange.layout import BucketLayout, TensorSpec
from tf_redsync.exchange.requests import AllGather
from tf_redsync.methods.base import Exchange, State, register
from tf_redsync.methods.momentum_corrected import MomentumCorrected
from tf_redsync.methods.sparse import delivered
from tf_redsync.ops.contract import form_of
from tf_redsync.schedules import DenseWarmUp, check_warm_up


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class CodedTopK(MomentumCorrected):
    """The largest elements, exactly, in a coded message; see the module's docstring.

    Args:
        density: Fraction of a tensor's elements that is sent, in (0, 1]. A tensor of n elements
            sends k = max(1, round(density n)).
        momentum: m of the momentum correction, in [0, 1). The inner optimizer must then have none.
        nesterov: Nesterov's form of the momentum.
        masking: Clear the velocity where a value was selected (momentum factor masking).
        value_bits: Bits of a value: 1 for a sign, each further one, up to 4, for twice as many
            magnitudes; 16 for bfloat16.
        clip_norm: Clip each worker's whole gradient to `clip_norm / sqrt(workers)` before it is
            accumulated. `None` for no clipping.
        dense_below: Tensors of fewer float32 bytes are all-reduced densely.
        warm_up: `None` or `DenseWarmUp(steps)`.

    Raises:
        ValueError: for a hyper-parameter out of its range.

    Example:
        >>> import tf_redsync as rs
        >>> rs.CodedTopK(density=0.001, momentum=0.9).value_bits
        1
    """

    value_bits: int = 1

    paper: ClassVar[str] = "Sattler, Wiedemann, Müller, Samek 2020"
    requests: ClassVar[str] = "all-gather of coded indices and values"
    bits: ClassVar[str] = "density (1.5 + log2(1 / density) + value_bits)"
    rounds_values: ClassVar[bool] = False  # they have codes of their own

    def __post_init__(self) -> None:
        super().__post_init__()
        check_warm_up(self.warm_up, DenseWarmUp)
        checks.integer("value_bits", self.value_bits, low=1)
        if self.value_bits not in VALUE_BITS:
            raise ValueError(
                f"`value_bits` must be one of {VALUE_BITS}; 16 is for bfloat16. Received: "
                f"value_bits={self.value_bits}"
            )

    def describe(self, spec: TensorSpec) -> str:
        """See `Method`."""
        del spec
        return f"exact, coded, {self.value_bits}-bit values"

    def exchange(
        self,
        layout: BucketLayout,
        grads: list[tf.Tensor],
        state: State,
        step: tf.Tensor,
        scale: tf.Tensor | None = None,
    ) -> Exchange:
        """See `Method`."""
        k, form = [self.k(s) for s in layout.specs], form_of("exact", len(grads))
        selected = select_and_code(
            grads,
            state["residual"],
            state["velocity"],
            k,
            value_bits=self.value_bits,
            momentum=self.momentum,
            nesterov=self.nesterov,
            masking=self.masking,
            scale=scale,
        )
        messages = yield AllGather(selected.message)
        messages, k, form = coding(self.value_bits).decode(messages, grads, k, **form)
        totals = delivered(layout, messages, k, grads, **form)
        return totals, {"residual": selected.residuals, "velocity": selected.velocities}
