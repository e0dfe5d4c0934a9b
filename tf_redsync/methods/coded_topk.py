"""The largest elements, exactly, in a coded message."""

from __future__ import annotations

import dataclasses

import tensorflow as tf
from typing_extensions import override

from tf_redsync import checks, outer
from tf_redsync.config import register
from tf_redsync.exchange.context import Context
from tf_redsync.exchange.layout import BucketLayout, TensorSpec
from tf_redsync.exchange.method import (
    Exchange,
    Method,
    Payloads,
    State,
)
from tf_redsync.exchange.sync_schedule import SyncSchedule
from tf_redsync.exchange.traits import Traits
from tf_redsync.methods.common.coded_selection import CodedSelection
from tf_redsync.methods.common.momentum_correction import MomentumCorrected
from tf_redsync.methods.local_sgd import LocalSGD
from tf_redsync.outer import Outer
from tf_redsync.schedules import DenseWarmUp, check_warm_up


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class CodedTopK(CodedSelection, MomentumCorrected):
    """Exact top-k with a coded message: a position and one to four bits for each element.

    Felix Sattler, Simon Wiedemann, Klaus-Robert Müller, Wojciech Samek (2020), "Robust and
    Communication-Efficient Federated Learning from Non-IID Data", IEEE Transactions on Neural
    Networks and Learning Systems, arXiv 1903.02891 ("sparse ternary compression"): what a worker
    sends is the sign of each of the k largest elements, their mean magnitude, and a Golomb code of
    the positions.

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

    An element takes 2 + log2(1 / density) bits for its position, whatever the positions are, and
    `value_bits` for its value: with n = 2^22 and a density of 0.1 % or 1 % a whole message with one
    bit a value is 4.6 % to 5.2 % above log2(C(n, k)) + k value_bits, which random positions need.
    One bit a value serves best: magnitudes above a threshold differ little, and what they differ by
    waits in the residual. The network of `benchmarks/methods/methods.py` ends with the same loss
    whether values have 1 bit or 16, which is 2.1 to 2.5 times the bytes. The share of the energy of
    the top-k that a message carries, and that share per bit of the message relative to one bit a
    value:

    | bits of a value | Laplace, 0.1 % | | Laplace, 1 % | | Student t(3), 1 % | |
    |---|---|---|---|---|---|---|
    | 1 | 98.4 % | 1 | 96.8 % | 1 | 74.7 % | 1 |
    | 2 | 99.3 % | 0.94 | 98.7 % | 0.92 | 83.0 % | 1.00 |
    | 3 | 99.8 % | 0.87 | 99.5 % | 0.84 | 88.9 % | 0.98 |
    | 4 | 99.9 % | 0.82 | 99.8 % | 0.78 | 93.0 % | 0.94 |
    | 16 | 100.0 % | 0.46 | 100.0 % | 0.39 | 100.0 % | 0.51 |

    (2^22 elements; `benchmarks/methods/value_bits.py`.)

    Biases and norms would cost more than everything else if they were all-reduced densely, as other
    methods do: 0.8 % of the weights of that network take 72 % of the bytes at a density of 1 %. In
    a code an element of them is no dearer than one of a matrix, so they travel in the same message,
    a tenth of their elements in each step.

    For training with momentum see `CodedGMC`, which loses less than momentum correction does.

    With `steps` above 1 the workers train alone in between, and g is the change of the weights
    since the last exchange; see `step/local_steps.py`.

    Differences from the papers

    * Sparse ternary compression has no momentum correction, and compresses what a server sends,
      too; here all workers add up what all have sent.
    * Magnitudes may have up to 3 bits more, or be bfloat16.
    * The positions of all tensors of a bucket with about the same density are one stream of gaps.
      Its code has a fixed length, with room for the worst positions.
    * A density that changes from step to step would change the length of the code, so the only
      warm-up is `DenseWarmUp`.
    * RedSync sends small tensors densely.

    Args:
        density: Fraction of a tensor's elements that is sent, in (0, 1]. A tensor of n elements
            sends k = max(1, round(density n)). At the default a message takes 0.25 bits per
            weight; docs/accuracy.md has the accuracy at this and lower densities.
        small_density: The same for small tensors: biases, norms, and those of fewer than
            `dense_below` bytes. No less than `density` in any case. `None` to all-reduce them
            densely.
        steps: Steps that each worker takes between two exchanges. Above 1 the weights differ in
            between; see `SBC`.
        outer: With `steps` above 1, takes a step along the mean of what is sent; see
            `tf_redsync.outer`. `None`: that mean is the step.
        momentum: m of the momentum correction, in [0, 1). The inner optimizer must then have none.
            0 where `steps` is above 1: there the inner optimizer has it.
        nesterov: Nesterov's form of the momentum.
        masking: Clear the velocity where a value was selected (momentum factor masking). `None`:
            below a density of 10 %; see `RedSync` for figures. With `steps` above 1 it is the inner
            optimizer's momentum, which `None` clears at any density, as `SBC` does.
        value_bits: Bits of a value: 1 for a sign, each further one, up to 4, for twice as many
            magnitudes; 16 for bfloat16. At a density of 1 this is sign compression with error
            feedback; dense training is `Dense()`.
        clip_norm: Clip each worker's whole gradient to `clip_norm / sqrt(workers)` before it is
            accumulated. `None` for no clipping, as it must be where `steps` is above 1.
        dense_below: Tensors of fewer float32 bytes are small.
        warm_up: `None` or `DenseWarmUp(steps)`, which counts exchanges.

    Raises:
        ValueError: for a hyper-parameter out of its range.

    Example:
        >>> import tf_redsync as rs
        >>> rs.CodedTopK(density=0.001, momentum=0.9).value_bits
        1
    """

    density: float = 0.03
    steps: int = 1
    outer: Outer | None = None

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        check_warm_up(self.warm_up, DenseWarmUp)
        checks.integer("steps", self.steps, low=1)
        outer.check("outer", self.outer)
        if self.outer is not None and self.steps == 1:
            raise ValueError(
                "`outer` is for `steps` above 1; with one the inner optimizer is the only one. "
                f"Received: outer={self.outer!r}, steps=1"
            )
        if self.steps > 1:
            self._check_local_steps()

    @property
    @override
    def traits(self) -> Traits:
        return dataclasses.replace(
            super().traits,
            paper="Sattler, Wiedemann, Müller, Samek 2020",
            requests="all-gather of coded indices and values",
            bits="density (2 + log2(1 / density) + value_bits) / steps",
        )

    def _check_local_steps(self) -> None:
        """Check that nothing is asked for that gradients need and changes of weights cannot."""
        if self.momentum:
            raise ValueError(
                "`momentum` must be 0 with `steps` above 1; give it to the inner optimizer, whose "
                f"steps the workers take alone. Received: momentum={self.momentum}, "
                f"steps={self.steps}"
            )
        if self.clip_norm is not None:
            raise ValueError(
                "`clip_norm` must be None with `steps` above 1: what is exchanged are changes of "
                "weights; let the inner optimizer clip gradients. Received: "
                f"clip_norm={self.clip_norm}, steps={self.steps}"
            )

    @property
    @override
    def sync_schedule(self) -> SyncSchedule:
        return dataclasses.replace(
            super().sync_schedule,
            local_steps=self.steps if self.steps > 1 else 0,
            masks_local_momentum=self.masking is not False,
            outer=self.outer,
        )

    @override
    def dense(self) -> Method:
        return LocalSGD(steps=self.steps, outer=self.outer) if self.steps > 1 else super().dense()

    @override
    def describe(self, spec: TensorSpec) -> str:
        schedule = f", every {self.steps} steps" if self.steps > 1 else ""
        return super().describe(spec) + schedule

    @override
    def payloads(self, layout: BucketLayout, step: int) -> Payloads:
        return self.message_payloads(layout)

    @override
    def exchange(self, grads: list[tf.Tensor], state: State, ctx: Context) -> Exchange:
        totals, selected = yield from self.select_and_deliver(
            grads,
            state["residual"],
            state["velocity"],
            ctx,
            momentum=self.momentum,
            nesterov=self.nesterov,
            masking=self.momentum > 0.0 and self.masks,
        )
        return totals, {"residual": selected.residuals, "velocity": selected.velocities}
