"""SignSGD with majority vote, and EF-SignSGD."""

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
    """SignSGD with majority vote: the sign of the majority of workers.

    Jeremy Bernstein, Yu-Xiang Wang, Kamyar Azizzadenesheli, Anima Anandkumar (2018), "signSGD:
    Compressed Optimisation for Non-Convex Problems", ICML, arXiv 1802.04434.

    On every worker, with gradient g, in one bit per element:

        send sign(g)                            one all-gather
        total = sign(sum over workers of signs)

    Totals are -1, 0 and 1, so every step changes a weight by the learning rate or not at all. Use a
    much smaller learning rate than with SGD, about that of Adam. No tensor is sent densely, since
    dense totals would need another learning rate. A tie, possible for an even number of workers,
    gives 0 and leaves the weight unchanged.

    Differences from the paper

    * One bit cannot represent zero. The vote for a gradient of exactly 0 (an inactive unit, an
      absent word) alternates between 1 and -1 by step and worker. The common code `g >= 0` would
      always vote for 1, so that weights without a gradient drift.
    * With one worker the total is also a sign.

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
            # Totals are signs, and there is no residual
            conserves=False,
            # Totals are -1, 0 and 1
            totals_may_overflow=False,
        )

    @override
    def dense(self) -> Method:
        """Return the method itself: it refuses no tensor."""
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

    dense_exchange = exchange  # a single worker also applies signs


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class EFSignSGD(Quantizer):
    """EF-SignSGD: signs scaled by the mean magnitude, with error feedback.

    Sai Praneeth Karimireddy, Quentin Rebjock, Sebastian Stich, Martin Jaggi (2019), "Error Feedback
    Fixes SignSGD and other Gradient Compression Schemes", ICML, arXiv 1901.09847.

    On every worker, with gradient g and residual e, for each tensor of d elements:

        p = g + e
        D = (||p||_1 / d) sign(p)               one bit per element and a scale per tensor
        send D;  e <- p - D                     one all-gather
        total = sum over workers of D

    Differences from the paper

    * One bit cannot represent zero: an element of exactly 0 is sent as positive, and the residual
      keeps the error.
    * The residual is in units of the gradient, and the optimizer applies the learning rate to the
      total. In the paper the residual is in units of the update. Both are equal while the learning
      rate is constant.
    * Biases, norms and small tensors are all-reduced densely.
    * With one worker it is plain SGD.

    Args:
        dense_below: Tensors of fewer float32 bytes are all-reduced densely.

    Raises:
        ValueError: If an argument is out of range; the message names it.
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
