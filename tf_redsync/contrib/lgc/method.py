"""LGC, learned gradient compression: selection, stages and both variants of the exchange."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Sequence
from typing import Any, NamedTuple

import tensorflow as tf
from typing_extensions import override

from tf_redsync import checks, ops
from tf_redsync.codings.base import Capacity, IndexCoding
from tf_redsync.codings.cheapest import Cheapest
from tf_redsync.config import register
from tf_redsync.contrib.lgc.autoencoder import (
    Autoencoder,
    largest,
    loss_gradient,
    normalised,
    spread,
)
from tf_redsync.exchange import feedback
from tf_redsync.exchange.context import Context
from tf_redsync.exchange.layout import BucketLayout, TensorSpec
from tf_redsync.exchange.method import Exchange, State
from tf_redsync.exchange.requests import AllGather, AllReduce, Request
from tf_redsync.exchange.sync_schedule import SyncSchedule
from tf_redsync.exchange.traits import Traits
from tf_redsync.methods.common.sparsifier import Sparsifier, element_count, flat, split
from tf_redsync.ops import MessageLayout, wire
from tf_redsync.ops.codecs import Positions
from tf_redsync.ops.message_layout import unsigned
from tf_redsync.ops.wire import leading

VARIANTS = ("ring", "server")
PLACES = (1, 256, 65536)  # of three bytes in a 24-bit integer, which is exact in float32
NO_SEED = 0  # lossless codings draw no random numbers

# Total of all workers and delivered part of this worker, both float32 `[length]`.
Delivery = Generator[Request, Any, tuple[tf.Tensor, tf.Tensor]]


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class LGC(Sparsifier):
    """LGC: a code of the sparse gradients from an autoencoder that is trained online.

    All tensors share one autoencoder, so they are exchanged together after the backward pass.

    Lusine Abrahamyan, Yiming Chen, Giannis Bekoulis, Nikos Deligiannis (2021), "Learned Gradient
    Compression for Distributed Deep Learning", IEEE Transactions on Neural Networks and Learning
    Systems, arXiv 2103.08870.

    Gradients of different workers have much information in common. Workers send it once, as the
    code that an encoder E computes from the selected values and a decoder D inverts. With K
    workers, residual v_i and gradient g_i of worker i, training has three stages:

        1  all-reduce of the gradients
        2  v_i <- v_i + g_i, all-gather of the largest elements of each tensor: top-k
           one training step of E and D with these messages
        3  v_i <- v_i + g_i, S = positions of the leader's largest elements, sent to all workers
           x_i = v_i[S] / s_i                      s_i: root mean square of v_i[S]
           q_i = the decoded vector of worker i, see below
           a_i = <q_i, v_i[S]> / <q_i, q_i>
           total[S] = sum over workers of a_i q_i
           v_i[S] <- v_i[S] - a_i q_i

        variant "ring"      q_i = D(sum of s_i E(x_i) / sum of s_i)       all-reduce of codes
        variant "server"    q_i = D(E(x_leader), x_i at the innovation)   all-gather of innovations

    The innovation of worker i is the few largest elements of x_i, an additional input of the last
    layer of the decoder. With means over elements and over pairs of workers, E and D minimise

        ring      1/2 mean (D(code) - sum s_i x_i / sum s_i)^2 + 1/2 mean (E(x_i) - E(x_j))^2
        server    1/2 mean (q_i - x_i)^2                       + 1/2 mean (E(x_i) - E(x_j))^2

    by SGD. With the paper's sizes, `channels=(64, 128, 256, 64)`, 16 values become a code of 4.

    The gradient is conserved: a_i q_i is the projection of the values of worker i on the decoded
    vector. The projections sum to the total, and none is longer than the values, so a bad
    autoencoder delays the delivery but cannot make residuals grow.

    Differences from the paper

    * a_i scales the decoded vector of each worker, so errors in its length do not matter. In the
      ring variant that takes one more all-reduce.
    * One decoder serves all workers, with the innovation and a_i of each; the server of the paper
      has one decoder per worker. A checkpoint can be restored on another number of workers.
    * There is no server: innovations are all-gathered, and each worker decodes all of them.
    * The leader is worker (step mod K). With a constant leader, elements that are large only on
      other workers would never be sent.
    * In stage 2 each worker trains on its own positions, with the values that the messages have
      there, 0 where a worker sent none. An all-reduce of E and D averages the gradients of the
      loss, each clipped to norm 1. So there are K examples per step, and parameters have equal bits
      on all workers, whatever the order in which their hardware sums.
    * In stage 3 each worker decodes for itself. All workers must compute equal bits, so use the
      same kind of processor on all of them.
    * The learning rate of E and D is 0.1. In public code it is 0.001, with which they hardly learn
      normalised vectors in 300 steps.
    * The leader's words are sent by an all-reduce with zeros from the others (`from_leader`).
    * The coding of positions is lossless (`indices`).
    * The first variable and the output layer are all-reduced densely (`dense_ends`), as biases,
      norms and small tensors are. The paper exempts only the output layer, and only from the code.

    Args:
        variant: `"ring"`: the mean of the codes of all workers; `"server"`: the code of the leader,
            and an innovation of each worker.
        density: Fraction of the elements that is selected, in (0, 1].
        innovation: Fraction of the elements in an innovation of variant `"server"`, in (0, 1].
        dense_steps: Length of stage 1 in steps.
        training_steps: Length of stage 2, in which the autoencoder is trained.
        learning_rate: Learning rate of the autoencoder, in (0, 1].
        channels: Widths of the encoder's convolutions; each halves the length.
        decoder_channels: Widths of the decoder's transposed convolutions, the same number.
        code_channels: Width of the code, less than `2 ** len(channels)`, which is the number of
            elements per position of the code.
        indices: Lossless coding of the positions from `tf_redsync.codings`.
        dense_ends: Whether the first variable and the output layer are all-reduced densely.
        dense_below: Tensors of fewer float32 bytes are all-reduced densely.
        seed: Seed of the initial parameters; the same on all workers.

    Raises:
        ValueError: If an argument is out of range; the message names it.

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
        checks.make_tuple(self, "channels")
        checks.make_tuple(self, "decoder_channels")
        _ = self.autoencoder  # checks its widths
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
        """The autoencoder of this configuration."""
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
        """Exchange one bucket in stage 2, and take a training step of the autoencoder."""
        sizes, (parameters,) = self._sizes(ctx.layout), state["autoencoder"]
        selection = sizes.selected(feedback.scaled(grads, ctx.scale), state["residual"])
        messages = yield AllGather(selection.message)
        totals = ops.decode(messages, sizes.layout, grads)

        positions, values = read(messages, sizes.layout)
        places = sizes.places(positions)
        vectors = sizes.padded(at_positions_of(ctx.rank, places, values))
        local_gradient = loss_gradient(
            self.autoencoder, parameters, vectors, ctx.rank, sizes.innovation
        )
        (gradient,) = yield AllReduce([local_gradient])
        parameters -= self.learning_rate / ctx.layout.workers * gradient
        return totals, {"residual": list(selection.residuals), "autoencoder": [parameters]}

    @override
    def exchange(self, grads: list[tf.Tensor], state: State, ctx: Context) -> Exchange:
        (parameters,), sizes = state["autoencoder"], self._sizes(ctx.layout)
        model = self.autoencoder
        grads = feedback.scaled(grads, ctx.scale)
        message = sizes.selected(grads, state["residual"]).message
        sums = flat(state["residual"]) + flat(grads)

        leader, finite = tf.cast(ctx.step % ctx.layout.workers, tf.int32), tf.equal(message[0], 1)
        words = leader_words(model, parameters, self.indices, sizes, message)
        words = yield from from_leader(words, finite, leader, ctx)
        words, code = tf.split(words, [self.indices.words(sizes.capacity), -1])
        positions = self.indices.decode(words[tf.newaxis], sizes.capacity, NO_SEED)
        at, used = sizes.places(positions)
        values = sizes.padded(tf.where(used, tf.gather(sums, at), 0.0))
        used = sizes.padded(tf.cast(used, tf.float32))

        if model.innovation:
            total, delivered = yield from server(
                model, parameters, code, values, used, sizes.innovation, ctx.rank, finite
            )
        else:
            total, delivered = yield from ring(model, parameters, values, used)
        at, slots = at[0][:, tf.newaxis], at.shape[1]
        totals = tf.scatter_nd(at, total[:slots], tf.shape(sums, tf.int64))
        residual = tf.tensor_scatter_nd_sub(sums, at, delivered[:slots])
        specs = ctx.layout.specs
        return split(totals, specs), {**state, "residual": split(residual, specs)}

    def _sizes(self, layout: BucketLayout) -> SelectionSizes:
        """Return the sizes of the selection of a bucket."""
        sizes = [s.size for s in layout.specs]
        k = [element_count(self.density, n) for n in sizes]
        innovation = min(element_count(self.innovation, sum(sizes)), sum(k))
        return SelectionSizes(tuple(sizes), tuple(k), innovation, self.autoencoder.padded(sum(k)))


class Places(NamedTuple):
    """Positions in the concatenation of all tensors of a bucket.

    Attributes:
        at: int64 `[rows, K]`, ascending.
        used: bool `[rows, K]`. Unused positions are the last element of their tensor.
    """

    at: tf.Tensor
    used: tf.Tensor


@dataclasses.dataclass(frozen=True)
class SelectionSizes:
    """Sizes of the selection of a bucket.

    Attributes:
        sizes: Number of elements of each tensor.
        k: Number of selected elements of each tensor.
        innovation: Number of elements of an innovation, for all tensors together.
        length: Length of the vectors that the autoencoder takes.
    """

    sizes: tuple[int, ...]
    k: tuple[int, ...]
    innovation: int
    length: int

    @property
    def capacity(self) -> Capacity:
        """Capacity of the coding of positions."""
        return Capacity(self.sizes, self.k)

    @property
    def layout(self) -> MessageLayout:
        """Layout of a message of the selection."""
        return MessageLayout.of(self.k)

    def selected(self, grads: Sequence[tf.Tensor], residuals: Sequence[tf.Tensor]) -> ops.Selection:
        """Select the largest elements of the sums."""
        return ops.accumulate_and_select(grads, residuals, [], self.k)

    def padded(self, vectors: tf.Tensor) -> tf.Tensor:
        """Pad vectors `[n, K]` with zeros to `[n, length]`."""
        return tf.pad(vectors, [[0, 0], [0, self.length - sum(self.k)]])

    def places(self, positions: Positions) -> Places:
        """Convert positions in every tensor to positions in the concatenation of all tensors."""
        at, used, start = [], [], 0
        for i, (size, indices) in enumerate(zip(self.sizes, positions.indices, strict=True)):
            valid = leading(positions.counts[:, i : i + 1], indices.shape[1])
            at.append(start + tf.where(valid, unsigned(indices), size - 1))
            used.append(valid)
            start += size
        return Places(tf.concat(at, axis=1), tf.concat(used, axis=1))


def read(messages: tf.Tensor, layout: MessageLayout) -> tuple[Positions, tf.Tensor]:
    """Split messages into positions and values.

    Args:
        messages: int32 `[rows, words]`.
        layout: Layout of the messages.

    Returns:
        Positions, and values, float32 `[rows, K]`, 0 in unused slots.
    """
    parts = layout.split(messages)
    return Positions(list(parts.indices), parts.counts), tf.concat(parts.values, axis=1)


def at_positions_of(rank: tf.Tensor, places: Places, values: tf.Tensor) -> tf.Tensor:
    """Return the values of all messages at the positions of one of them, 0 where missing.

    Args:
        rank: Rank of that message, int32 scalar.
        places: Places of all messages, `[rows, K]`.
        values: float32 `[rows, K]`.
    """
    last = values.shape[1] - 1
    if last < 0:
        return values
    keys = 2 * places.at + tf.cast(~places.used, tf.int64)  # ascending too
    wanted = tf.broadcast_to(tf.gather(keys, rank), keys.shape)
    place = tf.minimum(tf.searchsorted(keys, wanted), last)
    hit = tf.equal(tf.gather(keys, place, batch_dims=1), wanted)
    return tf.where(hit, tf.gather(values, place, batch_dims=1), 0.0)


def leader_words(
    model: Autoencoder,
    parameters: tf.Tensor,
    indices: IndexCoding,
    sizes: SelectionSizes,
    message: tf.Tensor,
) -> tf.Tensor:
    """Return the words that a worker sends if it is the leader, int32 `[words]`.

    They are its positions and, in the server variant, the code of its values.

    Args:
        model: The autoencoder.
        parameters: Its parameters.
        indices: Coding of the positions.
        sizes: Sizes of the selection.
        message: Message of the selection of the worker.
    """
    positions, values = read(message[tf.newaxis], sizes.layout)
    at, (counts,) = [i[0] for i in positions.indices], tf.unstack(positions.counts, num=1)
    coded = indices.encode(at, counts, sizes.capacity, NO_SEED)
    words = tf.ensure_shape(coded.words, [indices.words(sizes.capacity)])
    if not model.innovation:
        return words
    values = tf.where(sizes.places(positions).used, values, 0.0)
    code = model.encode(parameters, normalised(sizes.padded(values))[0])
    return tf.concat([words, tf.reshape(wire.to_words(code), [-1])], axis=0)


def ring(model: Autoencoder, parameters: tf.Tensor, values: tf.Tensor, used: tf.Tensor) -> Delivery:
    """Exchange in stage 3, variant "ring": average the codes of all workers.

    Args:
        model: The autoencoder.
        parameters: Its parameters, equal on all workers.
        values: float32 `[1, length]`, values of this worker at the positions of the leader.
        used: float32 `[1, length]`, 1 for a position and 0 for padding.
    """
    x, scale = normalised(values)
    own_code = scale[:, :, tf.newaxis] * model.encode(parameters, x)
    code, scales = yield AllReduce([own_code, scale])
    decoded = used * model.decode(parameters, tf.math.divide_no_nan(code, scales))
    factor = projection(decoded, values)
    (everyone,) = yield AllReduce([factor])
    return everyone * decoded[0], factor * decoded[0]


def server(
    model: Autoencoder,
    parameters: tf.Tensor,
    code_words: tf.Tensor,
    values: tf.Tensor,
    used: tf.Tensor,
    innovation: int,
    rank: tf.Tensor,
    finite: tf.Tensor,
) -> Delivery:
    """Exchange in stage 3, variant "server": the code of the leader, corrected by innovations.

    Args:
        model: The autoencoder.
        parameters: Its parameters, equal on all workers.
        code_words: The leader's code, int32 `[words]`.
        values: As in `ring`.
        used: As in `ring`.
        innovation: Number of elements of an innovation.
        rank: Rank of this worker, int32 scalar.
        finite: Bool scalar, whether all contributions of this worker to the step are finite.
    """
    length = values.shape[1]
    code_shape = [1, length // model.stride, model.code_channels]
    code = tf.reshape(wire.from_words(code_words), code_shape)

    def decoded(at: tf.Tensor, innovations: tf.Tensor) -> tf.Tensor:
        """Decode innovations `[n, m]` of n workers to vectors without their factor a_i."""
        return used * model.decode(parameters, code, spread(at, innovations, length))

    at, innovations = largest(normalised(values)[0], innovation)
    factor = projection(decoded(at, innovations), values)
    floats = tf.concat([factor[tf.newaxis], innovations[0]], axis=0)
    finite &= tf.reduce_all(tf.math.is_finite(floats))
    messages = yield AllGather(wire.message(finite, floats, at[0]))
    _, floats, at = wire.split(messages, 1 + innovation)
    delivered = floats[:, :1] * decoded(at, floats[:, 1:])
    return tf.reduce_sum(delivered, axis=0), tf.gather(delivered, rank)


def projection(decoded: tf.Tensor, values: tf.Tensor) -> tf.Tensor:
    """Return a, the factor of `decoded` that is closest to `values`, both `[length]`; a scalar."""
    return tf.math.divide_no_nan(tf.reduce_sum(decoded * values), tf.reduce_sum(tf.square(decoded)))


def from_leader(
    words: tf.Tensor, finite: tf.Tensor, leader: tf.Tensor, ctx: Context
) -> Generator[Request, Any, tf.Tensor]:
    """Broadcast the words of the leader by one all-reduce.

    Use it as `words = yield from from_leader(...)`. The leader adds pieces of 24 bits to the zeros
    of the others. For m bytes of words and K workers every worker sends `8/3 m (K - 1) / K` bytes;
    an all-gather of all workers' words would send `m (K - 1)`.

    Args:
        words: int32 `[n]`, the words of this worker; n is equal on all workers.
        finite: Bool scalar, whether all contributions of this worker to the step are finite.
        leader: int32 scalar, rank of the leader, equal on all workers.
        ctx: Context of the bucket.

    Returns:
        int32 `[n]`, the words of the leader; 0 unless everything is finite on all workers.
    """
    (size,) = words.shape
    octets = tf.bitcast(tf.pad(words, [[0, -size % 3]]), tf.uint8)
    pieces = tf.cast(tf.reshape(octets, [-1, 3]), tf.float32) * tf.constant(PLACES, tf.float32)
    summand = tf.where(tf.equal(ctx.rank, leader), tf.reduce_sum(pieces, axis=1), 0.0)
    (numbers,) = yield AllReduce([summand + tf.where(finite, 0.0, float("nan"))])
    all_finite = tf.reduce_all(tf.math.is_finite(numbers))
    numbers = tf.cast(tf.where(all_finite, numbers, 0.0), tf.int32)[:, tf.newaxis]
    octets = tf.reshape(tf.cast(numbers // PLACES % 256, tf.uint8), [-1, 4])
    return tf.bitcast(octets, tf.int32)[:size]
