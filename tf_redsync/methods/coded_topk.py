"""Exact top-k with coded positions and values of a few bits."""

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
    Networks and Learning Systems, arXiv 1903.02891 ("sparse ternary compression"), for the
    message: the signs of the k largest elements, their mean magnitude, and a Golomb code of the
    positions.

    Jiarui Fang, Haohuan Fu, Guangwen Yang, Cho-Jui Hsieh (2019), "RedSync: Reducing Synchronization
    Bandwidth for Distributed Deep Learning Training System", Journal of Parallel and Distributed
    Computing, arXiv 1808.04357, for the selection, with the momentum correction and factor masking
    of Lin et al. (2018).

    On every worker, with residual v and velocity u, for each tensor of n elements, k = density n:

        u <- m u + g;  v <- v + u                   accumulate          (Nesterov: v <- v + u + g)
        S  = the k largest of |v|                   exactly; the lower index among equals
        q  = sign(v[S]) times a mean of |v[S]|      value_bits each; see `codings.SignedLevels`
        message = [Golomb code of S, means, codes of q]     one all-gather per bucket of tensors
        v[S] <- v[S] - q,  u[S] <- 0                error feedback, momentum factor masking
        total = sum over workers of q on S

    An element takes 2 + log2(1 / density) bits for its position, for any positions, and
    `value_bits` for its value. The entropy of random positions plus values is log2(C(n, k)) + k
    value_bits. With n = 2^22, a density of 0.1 % or 1 % and one bit per value, a message is 4.6 %
    to 5.2 % longer.

    With SGD one bit per value is the best choice. The magnitudes of the top-k differ little, and
    the residual keeps their errors. The network of `benchmarks/methods/methods.py` reaches the same
    loss with 1 bit as with 16, which cost 2.1 to 2.5 times the bytes. With Adam use four bits: one
    bit cost 2.6 BLEU in translation (docs/adaptive.md). The first column of each pair is the share
    of the top-k's energy (squared norm) in a message. The second is that share per bit, relative to
    one bit per value:

    | bits per value | Laplace, 0.1 % | | Laplace, 1 % | | Student t(3), 1 % | |
    |---|---|---|---|---|---|---|
    | 1 | 98.4 % | 1 | 96.8 % | 1 | 74.7 % | 1 |
    | 2 | 99.3 % | 0.94 | 98.7 % | 0.92 | 83.0 % | 1.00 |
    | 3 | 99.8 % | 0.87 | 99.5 % | 0.84 | 88.9 % | 0.98 |
    | 4 | 99.9 % | 0.82 | 99.8 % | 0.78 | 93.0 % | 0.94 |
    | 16 | 100.0 % | 0.46 | 100.0 % | 0.39 | 100.0 % | 0.51 |

    (2^22 elements; `benchmarks/methods/value_bits.py`.)

    Biases and norms share the coded message, with a tenth of their elements per step. Other methods
    all-reduce them densely, which would cost more bytes than the coded matrices. In the network
    above, at a density of 1 %, they are 0.8 % of the weights and would take 72 % of the bytes.

    For training with momentum prefer `CodedGMC`, which loses less accuracy than momentum
    correction.

    With `steps` above 1 the workers take local steps, and g is the change of the weights since the
    last exchange; see `step/local_steps.py`.

    Differences from the papers

    * Sparse ternary compression has no momentum correction, and a server compresses the sum again.
      Here every worker sums the messages of all workers.
    * Magnitudes may take up to 3 bits, or be bfloat16.
    * The positions of all tensors of a bucket with about the same density form one stream of gaps.
      Its code has a fixed length, with capacity for any positions.
    * A changing density would change the length of the code, so the only warm-up is `DenseWarmUp`.
    * RedSync all-reduces small tensors densely.

    Args:
        density: Fraction of a tensor's elements that is sent, in (0, 1]. A tensor of n elements
            sends k = max(1, round(density n)). At the default a message takes 0.25 bits per
            weight; docs/accuracy.md has the accuracy at this and lower densities.
        small_density: Density of small tensors: biases, norms, and tensors of fewer than
            `dense_below` bytes. At least `density` is used. `None`: all-reduce them densely.
        steps: Number of local steps between two exchanges. Above 1, the workers' weights differ in
            between; see `SBC`.
        outer: With `steps` above 1, the outer optimizer, which takes a step along the mean of the
            sent changes; see `tf_redsync.outer`. `None`: the mean is added to the weights.
        momentum: m of the momentum correction, in [0, 1). The inner optimizer must then have none.
            With `steps` above 1 it must be 0; give momentum to the inner optimizer.
        nesterov: Whether to use Nesterov momentum.
        masking: Clear the velocity of selected elements (momentum factor masking). `None`: below a
            density of 10 %; see `RedSync` for figures. With `steps` above 1 this clears the
            momentum of the inner optimizer, and `None` does so at any density, as `SBC` does.
        value_bits: Bits per value. 1 is a sign, 2 to 4 add one of 2, 4 or 8 magnitudes, and 16 is
            bfloat16. Use 4 with Adam. At a density of 1 this is sign compression with error
            feedback; use `Dense()` for dense training.
        clip_norm: Clip the norm of each worker's whole gradient to `clip_norm / sqrt(workers)`
            before it is accumulated. `None`: no clipping. Must be `None` with `steps` above 1.
        dense_below: Tensors of fewer float32 bytes are small.
        warm_up: `None` or `DenseWarmUp(steps)`, which counts exchanges.

    Raises:
        ValueError: If an argument is out of range; the message names it.

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
                "`outer` needs `steps` above 1; with 1 the inner optimizer applies the totals. "
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
        """Check that no option applies to gradients only, since weight changes are exchanged."""
        if self.momentum:
            raise ValueError(
                "`momentum` must be 0 with `steps` above 1; give it to the inner optimizer, which "
                f"takes the local steps. Received: momentum={self.momentum}, steps={self.steps}"
            )
        if self.clip_norm is not None:
            raise ValueError(
                "`clip_norm` must be None with `steps` above 1, which exchanges weight changes. "
                "Let the inner optimizer clip gradients. Received: "
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
