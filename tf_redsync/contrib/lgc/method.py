"""Learned gradient compression."""

from __future__ import annotations

import dataclasses

import tensorflow as tf
from typing_extensions import override

from tf_redsync import checks, ops
from tf_redsync.codings.base import IndexCoding
from tf_redsync.codings.cheapest import Cheapest
from tf_redsync.config import register
from tf_redsync.contrib.common.broadcast import from_leader
from tf_redsync.contrib.lgc import codes, shared_values
from tf_redsync.contrib.lgc.autoencoder import Autoencoder
from tf_redsync.exchange import feedback
from tf_redsync.exchange.context import Context
from tf_redsync.exchange.layout import BucketLayout, TensorSpec
from tf_redsync.exchange.method import Exchange, State
from tf_redsync.exchange.requests import AllGather, AllReduce
from tf_redsync.exchange.sync_schedule import SyncSchedule
from tf_redsync.exchange.traits import Traits
from tf_redsync.methods.common.sparsifier import Sparsifier, element_count, flat, split

VARIANTS = ("ring", "server")


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class LGC(Sparsifier):
    """LGC: a code of the sparse gradients, learned by an autoencoder while the model trains.

    All tensors share one autoencoder, so they are exchanged together, after the backward pass.

    Lusine Abrahamyan, Yiming Chen, Giannis Bekoulis, Nikos Deligiannis (2021), "Learned Gradient
    Compression for Distributed Deep Learning", IEEE Transactions on Neural Networks and Learning
    Systems, arXiv 2103.08870.

    Gradients of different workers have much in common. What they have in common is sent once, as
    the code that an encoder E makes of the selected values and a decoder D undoes. With K workers,
    residual v_i and gradient g_i of worker i, training goes through three stages:

        1  all-reduce of the gradients
        2  v_i <- v_i + g_i, of each tensor the density n largest elements are all-gathered: top-k
           E and D are trained by these messages
        3  S = the positions of a leader's largest elements, sent to all workers
           x_i = v_i[S] / s_i                      s_i: root mean square of v_i[S]
           q_i = what is decoded for worker i, see below
           a_i = <q_i, v_i[S]> / <q_i, q_i>
           total[S] = sum over workers of a_i q_i
           v_i[S] <- v_i[S] - a_i q_i

        variant "ring"      q_i = D(sum of s_i E(x_i) / sum of s_i)       all-reduce of codes
        variant "server"    q_i = D(E(x_leader), x_i at the innovation)   all-gather of innovations

    The innovation is the few largest elements of x_i. The decoder's last layer sees them beside
    what the leader's code is decoded to. With means over elements and over pairs of workers, E and
    D descend

        ring      1/2 mean (D(code) - sum s_i x_i / sum s_i)^2 + 1/2 mean (E(x_i) - E(x_j))^2
        server    1/2 mean (q_i - x_i)^2                       + 1/2 mean (E(x_i) - E(x_j))^2

    by SGD. With the paper's sizes, `channels=(64, 128, 256, 64)`, 16 values become a code of 4.

    Nothing is lost: a_i q_i, the share of what was delivered that is worker i's, is the projection
    of its values on what was decoded. The shares add up to the total, and no share is longer than
    the values, so a bad autoencoder slows the delivery down and cannot make residuals grow.

    Differences from the paper

    * The lengths of decoded vectors are not trusted: a_i, one number of each worker, scales them.
      In the ring that is one more, tiny all-reduce.
    * One decoder serves all workers, each with its own innovation and a_i; the paper's server has
      one for every worker. A checkpoint passes between numbers of workers.
    * There is no server: innovations are all-gathered, and each worker decodes all of them.
    * The leader takes turns, worker (step mod K). Else what others find large would wait for ever.
    * In stage 2 each worker takes its own positions for the leader's, with the values that the
      messages have at them and 0 where others sent nothing. All descend the mean of their gradients
      of the loss, each clipped to norm 1. So there are K examples a step, and parameters are equal
      to the bit on all workers whatever the order in which their hardware adds up. It costs an
      all-reduce of E and D.
    * The learning rate of E and D is 0.1. In public code it is 0.001, at which normalised vectors
      teach them next to nothing in 300 steps.
    * The leader's words travel in an all-reduce with zeros of the others (`broadcast.py`).
    * Positions are coded without loss (`indices`).
    * The first variable and the output layer are all-reduced densely (`dense_ends`), as small
      tensors, biases and norms are. The paper's output layer is exempt from the code alone.

    Args:
        variant: `"ring"`: codes of all workers are averaged; or `"server"`: one worker's code, and
            an innovation of each.
        density: Fraction of the elements at whose positions there are values, in (0, 1].
        innovation: Variant `"server"`: fraction of the elements that are an innovation, in (0, 1].
        dense_steps: Length of stage 1 in steps.
        training_steps: Length of stage 2, in which the autoencoder is trained.
        learning_rate: Of the autoencoder, in (0, 1].
        channels: Widths of the encoder's convolutions; each halves the length.
        decoder_channels: Widths of the decoder's transposed convolutions, as many.
        code_channels: Width of the code, less than `2 ** len(channels)`: that many elements of a
            vector become so many of the code.
        indices: Coding of the positions, one of `tf_redsync.codings` that loses none.
        dense_ends: Whether the first variable and the output layer are all-reduced densely.
        dense_below: Tensors of fewer float32 bytes are all-reduced densely.
        seed: Of the autoencoder's first parameters; the same on all workers.

    Raises:
        ValueError: for a hyper-parameter out of its range.

    Example:
        >>> import tf_redsync as rs
        >>> rs.contrib.LGC(variant="server").autoencoder.size
        216678
    """

    variant: str = "ring"
    density: float = 0.001
    innovation: float = 1e-5
    dense_steps: int = 200
    training_steps: int = 300
    learning_rate: float = 0.1
    channels: tuple[int, ...] = (64, 128, 256, 64)
    decoder_channels: tuple[int, ...] = (32, 64, 128, 32)
    code_channels: int = 4
    indices: IndexCoding = dataclasses.field(default_factory=Cheapest)
    dense_ends: bool = True
    seed: int = 0

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        checks.choice("variant", self.variant, VARIANTS)
        checks.real("innovation", self.innovation, low=0.0, high=1.0, low_open=True)
        checks.integer("dense_steps", self.dense_steps, low=0)
        checks.integer("training_steps", self.training_steps, low=1)
        checks.real("learning_rate", self.learning_rate, low=0.0, high=1.0, low_open=True)
        checks.boolean("dense_ends", self.dense_ends)
        checks.integer("seed", self.seed, low=0)
        _ = self.autoencoder  # which checks its widths
        if not isinstance(self.indices, IndexCoding) or not self.indices.lossless:
            raise ValueError(
                "`indices` must be a lossless coding of positions from tf_redsync.codings, such as "
                f"Cheapest() or EliasFano(). Received: indices={self.indices!r}"
            )

    @property
    @override
    def traits(self) -> Traits:
        return dataclasses.replace(
            super().traits,
            paper="Abrahamyan, Chen, Bekoulis, Deligiannis 2021",
            requests="all-reduces of one worker's positions and of codes",
            bits="density (8 + 4 / 3 bits of an index)",
            state_kinds={"residual": "sum", "autoencoder": "shared"},
            rounds_values=False,
            whole_model=True,
            sends_selected=False,
        )

    @property
    def autoencoder(self) -> Autoencoder:
        """The autoencoder of this method."""
        return Autoencoder(
            self.channels, self.decoder_channels, self.code_channels, self.variant == "server"
        )

    @property
    @override
    def sync_schedule(self) -> SyncSchedule:
        trained = self.dense_steps + self.training_steps
        return SyncSchedule(
            warm_up_steps=self.dense_steps, phases=((trained, "training_exchange"),)
        )

    @override
    def refuses(self, spec: TensorSpec) -> str | None:
        if self.dense_ends and spec.position == 0:
            return "first variable"
        if self.dense_ends and spec.output_layer:
            return "output layer"
        return super().refuses(spec)

    @override
    def describe(self, spec: TensorSpec) -> str:
        return f"code of {self.k(spec)} of {spec.size} elements"

    @override
    def init(self, layout: BucketLayout) -> State:
        return {**super().init(layout), "autoencoder": [self.autoencoder.initial(self.seed)]}

    def training_exchange(self, grads: list[tf.Tensor], state: State, ctx: Context) -> Exchange:
        """Exchange one bucket in stage 2; otherwise as `exchange`."""
        shape, (parameters,) = self._shape(ctx.layout), state["autoencoder"]
        found = shape.selected(feedback.scaled(grads, ctx.scale), state["residual"])
        messages = yield AllGather(found.message)
        totals = ops.decode(messages, shape.layout, grads)

        positions, values = shared_values.read(messages, shape.layout)
        places = shape.places(positions)
        vectors = shape.padded(shared_values.at_positions_of(ctx.rank, places, values))
        own = shared_values.gradient(
            self.autoencoder, parameters, vectors, ctx.rank, shape.innovation
        )
        (gradient,) = yield AllReduce([own])
        parameters -= self.learning_rate / ctx.layout.workers * gradient
        return totals, {"residual": list(found.residuals), "autoencoder": [parameters]}

    @override
    def exchange(self, grads: list[tf.Tensor], state: State, ctx: Context) -> Exchange:
        (parameters,), shape = state["autoencoder"], self._shape(ctx.layout)
        model = self.autoencoder
        grads = feedback.scaled(grads, ctx.scale)
        message = shape.selected(grads, state["residual"]).message
        sums = flat(state["residual"]) + flat(grads)

        leader, finite = tf.cast(ctx.step % ctx.layout.workers, tf.int32), tf.equal(message[0], 1)
        words = codes.leader_words(model, parameters, self.indices, shape, message)
        words = yield from from_leader(words, finite, leader, ctx)
        words, code = tf.split(words, [self.indices.words(shape.capacity), -1])
        positions = self.indices.decode(words[tf.newaxis], shape.capacity, codes.NO_SEED)
        at, used = shape.places(positions)
        values = shape.padded(tf.where(used, tf.gather(sums, at), 0.0))
        used = shape.padded(tf.cast(used, tf.float32))

        if model.innovation:
            total, own = yield from codes.server(
                model, parameters, code, values, used, shape.innovation, ctx.rank, finite
            )
        else:
            total, own = yield from codes.ring(model, parameters, values, used)
        at, slots = at[0][:, tf.newaxis], at.shape[1]
        totals = tf.scatter_nd(at, total[:slots], tf.shape(sums, tf.int64))
        kept = tf.tensor_scatter_nd_sub(sums, at, own[:slots])
        specs = ctx.layout.specs
        return split(totals, specs), {**state, "residual": split(kept, specs)}

    def _shape(self, layout: BucketLayout) -> shared_values.Shape:
        """How much of a bucket is selected."""
        sizes = [s.size for s in layout.specs]
        k = [element_count(self.density, n) for n in sizes]
        innovation = min(element_count(self.innovation, sum(sizes)), sum(k))
        return shared_values.Shape(
            tuple(sizes), tuple(k), innovation, self.autoencoder.padded(sum(k))
        )
