"""Signs: SignSGD with majority vote, Signum, and signs with error feedback.

Jeremy Bernstein, Yu-Xiang Wang, Kamyar Azizzadenesheli, Anima Anandkumar (2018), "signSGD:
Compressed Optimisation for Non-Convex Problems", ICML, arXiv 1802.04434 (SignSGD, Signum).
Sai Praneeth Karimireddy, Quentin Rebjock, Sebastian Stich, Martin Jaggi (2019), "Error Feedback
Fixes SignSGD and other Gradient Compression Schemes", ICML, arXiv 1901.09847 (EF-SignSGD).

On every worker, with gradient g, for each tensor of d elements:

    SignSGD                       Signum                            EF-SignSGD, residual e
    send sign(g)                  u <- m u + (1 - m) g              p = g + e
                                  send sign(u)                      D = (||p||_1 / d) sign(p)
    total = sign(sum of signs)    total = sign(sum of signs)        send D;  e <- p - D
                                                                    total = sum of D

all in one all-gather of a bit an element and a scale a tensor.

SignSGD's and Signum's totals are -1, 0 and 1, whatever the gradient's unit: every step moves a
weight by the learning rate or not at all, so it has to be much smaller than SGD's, like Adam's. All
tensors are served, for a dense total next to these would need another learning rate. A tie of the
votes, as an even number of workers can have, is 0: the weight stays.

Differences from the papers

* A bit has no value for zero. An element whose gradient is exactly 0 (a unit that is off, a word
  that does not occur) votes for 1 and -1 in turn, by step and worker, where the usual code
  `g >= 0` would vote for 1 always and make weights without a gradient drift.
* EF-SignSGD's residual is in units of the gradient: the learning rate is applied to the total, by
  the optimizer. The paper's is in units of the update; the two are the same while the learning
  rate is constant. Biases, norms and small tensors are all-reduced densely.
* With one worker SignSGD and Signum still take signs; EF-SignSGD is plain SGD then.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import tensorflow as tf
from typing_extensions import override

from tf_redsync import checks, feedback
from tf_redsync.exchange.layout import BucketLayout, TensorSpec
from tf_redsync.methods.base import Context, Exchange, Method, State, register
from tf_redsync.methods.common.quantizer import Quantizer, deliver_codes


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class SignSGD(Method):
    """The sign on which most workers agree; see the module's docstring for the algorithm.

    Example:
        >>> import keras, tf_redsync as rs
        >>> optimizer = rs.DistributedOptimizer(keras.optimizers.SGD(1e-4), rs.SignSGD())
    """

    paper: ClassVar[str] = "Bernstein, Wang, Azizzadenesheli, Anandkumar 2018"
    requests: ClassVar[str] = "all-gather of signs"
    bits: ClassVar[str] = "1"

    @property
    @override
    def conserves(self) -> bool:
        """Only signs are delivered, and nothing is kept."""
        return False

    @property
    @override
    def totals_may_overflow(self) -> bool:
        """They are -1, 0 and 1."""
        return False

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
class Signum(SignSGD):
    """The majority of the signs of the workers' momenta; see the module's docstring.

    Args:
        momentum: m of the moving average of the gradient, in [0, 1). The inner optimizer must have
            none.

    Raises:
        ValueError: for a momentum out of its range.
    """

    momentum: float = 0.9

    state_kinds: ClassVar[dict[str, str]] = {"velocity": "sum"}

    def __post_init__(self) -> None:
        checks.real("momentum", self.momentum, low=0.0, high=1.0, high_open=True)

    @property
    @override
    def momentum_in_exchange(self) -> float:
        return self.momentum

    @override
    def describe(self, spec: TensorSpec) -> str:
        return "majority of the momenta's signs"

    @override
    def init(self, layout: BucketLayout) -> State:
        return {"velocity": [tf.zeros(s.shape, tf.float32) for s in layout.specs]}

    @override
    def directions(
        self, grads: list[tf.Tensor], state: State
    ) -> tuple[list[tf.Tensor], dict[str, list[tf.Tensor]]]:
        """Return the momenta, which are the new state too."""
        m = self.momentum
        velocity = [m * u + (1.0 - m) * g for u, g in zip(state["velocity"], grads, strict=True)]
        return velocity, {"velocity": velocity}


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class EFSignSGD(Quantizer):
    """Signs times the mean magnitude, with error feedback; see the module's docstring.

    Args:
        dense_below: Tensors of fewer float32 bytes are all-reduced densely.

    Raises:
        ValueError: for a hyper-parameter out of its range.
    """

    paper: ClassVar[str] = "Karimireddy, Rebjock, Stich, Jaggi 2019"
    requests: ClassVar[str] = "all-gather of signs and scales"
    bits: ClassVar[str] = "1"
    state_kinds: ClassVar[dict[str, str]] = {"residual": "sum"}

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
