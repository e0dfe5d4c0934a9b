"""SignSGD with majority vote, Signum, and signs with error feedback."""

from __future__ import annotations

import dataclasses

import tensorflow as tf
from typing_extensions import override

from tf_redsync.config import register
from tf_redsync.exchange import feedback
from tf_redsync.exchange.context import Context
from tf_redsync.exchange.layout import TensorSpec
from tf_redsync.exchange.method import Exchange, Method, State
from tf_redsync.exchange.traits import Traits
from tf_redsync.methods.common.quantizer import Quantizer, deliver_codes


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class SignSGD(Method):
    """SignSGD with majority vote: the sign on which most workers agree.

    Jeremy Bernstein, Yu-Xiang Wang, Kamyar Azizzadenesheli, Anima Anandkumar (2018), "signSGD:
    Compressed Optimisation for Non-Convex Problems", ICML, arXiv 1802.04434.

    On every worker, with gradient g, and one bit an element:

        send sign(g)                            one all-gather
        total = sign(sum over workers of signs)

    Totals are -1, 0 and 1, whatever the gradient's unit: every step moves a weight by the learning
    rate or not at all, so it has to be much smaller than SGD's, like Adam's. All tensors are
    served, since dense totals next to these would need another learning rate. A tie of the votes,
    as an even number of workers can have, is 0: the weight stays.

    Differences from the paper

    * A bit has no value for zero. An element whose gradient is exactly 0 (a unit that is off, a
      word that does not occur) votes for 1 and -1 in turn, by step and worker, where the usual code
      `g >= 0` would always vote for 1 and make weights without a gradient drift.
    * With one worker the total is still the sign of its gradient.

    Example:
        >>> import keras, tf_redsync as rs
        >>> optimizer = rs.DistributedOptimizer(keras.optimizers.SGD(1e-4), rs.SignSGD())
    """

    @property
    @override
    def traits(self) -> Traits:
        return dataclasses.replace(
            super().traits,
            paper="Bernstein, Wang, Azizzadenesheli, Anandkumar 2018",
            requests="all-gather of signs",
            bits="1",
            votes=True,
            # Only signs are delivered, and nothing is kept
            conserves=False,
            # They are -1, 0 and 1
            totals_may_overflow=False,
        )

    @override
    def dense(self) -> Method:
        """There is no tensor that it refuses."""
        return self

    @override
    def describe(self, spec: TensorSpec) -> str:
        return "majority of signs"

    def directions(
        self, grads: list[tf.Tensor], state: State
    ) -> tuple[list[tf.Tensor], dict[str, list[tf.Tensor]]]:
        """Return the tensors whose signs are sent, and the new state."""
        return grads, state

    @override
    def exchange(self, grads: list[tf.Tensor], state: State, ctx: Context) -> Exchange:
        directions, state = self.directions(feedback.scaled(grads, ctx.scale), state)
        turn = 1 - 2 * ((tf.cast(ctx.step % 2, tf.int32) + ctx.rank) % 2)
        votes = [tf.where(d == 0.0, tf.cast(turn, tf.float32), d) for d in directions]
        sums, _ = yield from deliver_codes(votes, tf.ones([len(votes)]), mode="sign")
        return [tf.sign(s) for s in sums], state

    dense_exchange = exchange  # a single worker's weights move as many workers' do


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class EFSignSGD(Quantizer):
    """EF-SignSGD: signs times the mean magnitude, with error feedback.

    Sai Praneeth Karimireddy, Quentin Rebjock, Sebastian Stich, Martin Jaggi (2019), "Error Feedback
    Fixes SignSGD and other Gradient Compression Schemes", ICML, arXiv 1901.09847.

    On every worker, with gradient g and residual e, for each tensor of d elements:

        p = g + e
        D = (||p||_1 / d) sign(p)               a bit an element and a scale a tensor
        send D;  e <- p - D                     one all-gather
        total = sum over workers of D

    Differences from the paper

    * A bit has no value for zero: an element that is exactly 0 is sent as a positive one, and the
      residual keeps the error.
    * The residual is in units of the gradient: the learning rate is applied to the total, by the
      optimizer. The paper's is in units of the update; the two are the same while the learning rate
      is constant.
    * Biases, norms and small tensors are all-reduced densely.
    * With one worker it is plain SGD.

    Args:
        dense_below: Tensors of fewer float32 bytes are all-reduced densely.

    Raises:
        ValueError: for a hyper-parameter out of its range.
    """

    @property
    @override
    def traits(self) -> Traits:
        return dataclasses.replace(
            super().traits,
            paper="Karimireddy, Rebjock, Stich, Jaggi 2019",
            requests="all-gather of signs and scales",
            bits="1",
            state_kinds={"residual": "sum"},
        )

    @override
    def describe(self, spec: TensorSpec) -> str:
        return "signs and their scale"

    @override
    def exchange(self, grads: list[tf.Tensor], state: State, ctx: Context) -> Exchange:
        sums = [
            e + g for e, g in zip(state["residual"], feedback.scaled(grads, ctx.scale), strict=True)
        ]
        norms = tf.stack(
            [
                tf.reduce_sum(tf.abs(p)) / max(spec.size, 1)
                for p, spec in zip(sums, ctx.layout.specs, strict=True)
            ]
        )
        totals, residuals = yield from deliver_codes(sums, norms, mode="sign", errors=True)
        return totals, {"residual": residuals}
