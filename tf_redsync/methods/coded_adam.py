"""CodedAdam: error feedback of each worker's own Adam update, in coded messages."""

from __future__ import annotations

import dataclasses

import tensorflow as tf
from typing_extensions import override

from tf_redsync import checks
from tf_redsync.config import register
from tf_redsync.exchange import feedback
from tf_redsync.exchange.context import Context
from tf_redsync.exchange.layout import BucketLayout
from tf_redsync.exchange.method import Exchange, Method, Payloads, State
from tf_redsync.exchange.requests import AllReduce
from tf_redsync.exchange.sync_schedule import SyncSchedule
from tf_redsync.exchange.traits import Traits
from tf_redsync.methods.common.adam_update import AdamUpdate
from tf_redsync.methods.common.coded_selection import CodedSelection


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class CodedAdam(CodedSelection):
    """Each worker's Adam update without momentum, in coded messages with error feedback.

    Congliang Chen, Li Shen, Haozhi Huang, Wei Liu (2021), "Quantized Adam with Error Feedback", ACM
    Transactions on Intelligent Systems and Technology, arXiv 2004.14180, for second moments of each
    worker and error feedback of updates.

    Felix Sattler, Simon Wiedemann, Klaus-Robert Müller, Wojciech Samek (2020), "Robust and
    Communication-Efficient Federated Learning from Non-IID Data", IEEE Transactions on Neural
    Networks and Learning Systems, arXiv 1903.02891 ("sparse ternary compression"), for the message.

    On every one of K workers, with gradient g, second moment s and residual v, in step t = 1, 2,
    ..., for each tensor of n elements, k = density n:

        s <- beta_2 s + (1 - beta_2) K g^2
        v <- v + g / (sqrt(s / (1 - beta_2^t)) + epsilon)
        S  = the k largest of |v|                   exactly; the lower index among equals
        q  = sign(v[S]) times a mean of |v[S]|      value_bits each; see `codings.SignedLevels`
        message = [Golomb code of S, means, codes of q]     one all-gather per bucket of tensors
        v[S] <- v[S] - q                            error feedback
        total = sum over workers of q on S

    g is the gradient that the exchange receives, already divided by K. The inner optimizer is SGD
    without momentum, with the learning rate and the weight decay of Adam. With gradients of small
    batches, which are mostly noise, K g^2 is about the square of the mean gradient, so the learning
    rate is that of dense Adam. Where the gradients of all workers agree, as in the first steps, the
    total is up to sqrt(K) times Adam's update.

    The second moment of a worker sees a share 1 / K of the examples. Of an element with a gradient
    in few examples, such as a row of an embedding, that is a poor estimate for large K. With
    `average_every` = n,

        s <- mean over workers of s                 after steps 1, 2, 4, ... < n, and every n steps

    and from t = 2 on the update counts g^2 once, not K times: in place of s it has
    s - (1 - beta_2) (K - 1) g^2. For an element with a gradient on one worker only, both are those
    of dense Adam.

    Adam over the totals of a sparsifier, such as `CodedTopK`, sees an element only when it is
    sent, so the second moment is that of sums of about 1 / density gradients. Here the second
    moment is that of gradients, and the largest updates are sent, not the largest gradients.

    In dense steps, such as a warm-up, the updates of all workers are summed, and the residual
    stays. With one worker this is Adam with a beta_1 of 0.

    Differences from the papers

    * Quantized Adam quantizes all elements. It also has a momentum, and the learning rate is in the
      residual; weights are quantized, too. Here the residual acts as momentum, as it sums the
      updates since an element was last sent, and the inner optimizer applies the rate.
    * Sparse ternary compression has a server that compresses the sum again. Here every worker sums
      the messages of all workers.
    * The factor K, and the means of second moments.

    Args:
        density: Fraction of a tensor's elements that is sent, in (0, 1]. A tensor of n elements
            sends k = max(1, round(density n)).
        small_density: Density of small tensors: biases, norms, and tensors of fewer than
            `dense_below` bytes. At least `density` is used.
        beta_2: Decay of the second moment, in (0, 1).
        epsilon: epsilon of Adam's paper, above 0. Keras's Adam adds it before the correction of
            the bias, so there it has a larger effect in the first steps.
        value_bits: Bits per value. 1 is a sign, 2 to 4 add one of 2, 4 or 8 magnitudes, and 16 is
            bfloat16.
        dense_below: Tensors of fewer float32 bytes are small.
        average_every: Interval n, in steps, of means of the second moments over the workers: 100
            for eight workers or more. Each mean is an all-reduce of 32 bits per element; with
            `MirroredStrategy` or `direct_collectives=False` it runs in every step. 0: each worker
            keeps its own.

    Raises:
        ValueError: If an argument is out of range; the message names it.

    Example:
        >>> import keras, tf_redsync as rs
        >>> optimizer = rs.DistributedOptimizer(
        ...     keras.optimizers.SGD(1e-3, weight_decay=0.01), rs.CodedAdam())
    """

    density: float = 0.03
    value_bits: int = 4
    beta_2: float = 0.999
    epsilon: float = 1e-7
    average_every: int = 0

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        checks.real("small_density", self.small_density, low=0.0, high=1.0, low_open=True)
        checks.real("beta_2", self.beta_2, low=0.0, high=1.0, low_open=True, high_open=True)
        checks.real("epsilon", self.epsilon, low=0.0, high=1.0, low_open=True)
        checks.integer("average_every", self.average_every, low=0)

    @property
    @override
    def traits(self) -> Traits:
        return dataclasses.replace(
            super().traits,
            paper="Chen, Shen, Huang, Liu 2021",
            requests="all-gather of coded indices and values",
            bits="density (2 + log2(1 / density) + value_bits)",
            state_kinds={"residual": "sum", "variance": "mean", "updates": "shared"},
            # Totals are updates, not gradients
            conserves=False,
            needs_sgd=True,
            totals_may_overflow=False,  # the values of a message are bounded
        )

    @property
    @override
    def sync_schedule(self) -> SyncSchedule:
        if not self.average_every:
            return super().sync_schedule
        return SyncSchedule(averages=("variance",), average_every=self.average_every)

    @override
    def dense(self) -> Method:
        """Return the method itself, because it serves all tensors."""
        return self

    @override
    def init(self, layout: BucketLayout) -> State:
        """Return zeros; `variance` is s with its bias corrected, `updates` t of each tensor."""
        return {**super().init(layout), "updates": [tf.zeros([]) for _ in layout.specs]}

    @override
    def payloads(self, layout: BucketLayout, step: int) -> Payloads:
        return self.message_payloads(layout)

    def update(self, state: State, ctx: Context) -> tuple[AdamUpdate, State]:
        """Return the update of the next step, and the state with t of that step."""
        updates = [t + 1.0 for t in state["updates"]]
        weights = [(1.0 - self.beta_2) / (1.0 - self.beta_2**t) for t in updates]
        workers = float(ctx.layout.workers)
        own = [self._own(t, workers) for t in updates]
        return AdamUpdate(weights, workers, own, self.epsilon), {**state, "updates": updates}

    def _own(self, t: tf.Tensor, workers: float) -> tf.Tensor | float:
        """Return how many times the update in step t counts g^2."""
        if not self.average_every:
            return workers
        return tf.where(t > 1.0, 1.0, workers)  # the first step has no mean yet

    @override
    def dense_exchange(self, grads: list[tf.Tensor], state: State, ctx: Context) -> Exchange:
        """All-reduce the updates; the residual stays."""
        update, state = self.update(state, ctx)
        grads = feedback.scaled(grads, ctx.scale)
        updates, variances = update.apply(grads, state["variance"])
        totals = yield AllReduce(updates)
        return totals, {**state, "variance": variances}

    @override
    def exchange(self, grads: list[tf.Tensor], state: State, ctx: Context) -> Exchange:
        update, state = self.update(state, ctx)
        totals, selected = yield from self.select_and_deliver(
            grads, state["residual"], state["variance"], ctx, adam=update
        )
        return totals, {**state, "residual": selected.residuals, "variance": selected.velocities}
