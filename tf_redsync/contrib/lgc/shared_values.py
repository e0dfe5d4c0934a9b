"""Values at shared positions, as LGC's autoencoder sees them: vectors of a bucket's selection."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from tf_redsync import ops
from tf_redsync.codings.base import Capacity
from tf_redsync.contrib.lgc.autoencoder import Autoencoder
from tf_redsync.ops import MessageLayout
from tf_redsync.ops.codecs import Positions
from tf_redsync.ops.message_layout import unsigned
from tf_redsync.ops.wire import leading


class Places(NamedTuple):
    """Positions of all tensors of a bucket in the vector of all of its elements.

    Attributes:
        at: int64 `[rows, K]`, rising.
        used: bool `[rows, K]`. What is not used stands at the last element of its tensor.
    """

    at: tf.Tensor
    used: tf.Tensor


@dataclasses.dataclass(frozen=True)
class Shape:
    """How much of a bucket is selected.

    Attributes:
        sizes: Elements of each tensor.
        k: How many of them are selected.
        innovation: How many elements of all tensors are an innovation.
        length: Of the vectors that the autoencoder takes.
    """

    sizes: tuple[int, ...]
    k: tuple[int, ...]
    innovation: int
    length: int

    @property
    def capacity(self) -> Capacity:
        """For codings of the positions."""
        return Capacity(self.sizes, self.k)

    @property
    def layout(self) -> MessageLayout:
        """Of a message of what is selected."""
        return MessageLayout.of(self.k)

    def selected(self, grads: Sequence[tf.Tensor], residuals: Sequence[tf.Tensor]) -> ops.Selection:
        """Return the largest elements of the sums."""
        return ops.accumulate_and_select(grads, residuals, [], self.k)

    def padded(self, vectors: tf.Tensor) -> tf.Tensor:
        """Return vectors `[n, K]` with zeros behind, `[n, length]`."""
        return tf.pad(vectors, [[0, 0], [0, self.length - sum(self.k)]])

    def places(self, positions: Positions) -> Places:
        """Return where positions in every tensor are in the vector of all elements."""
        at, used, start = [], [], 0
        for i, (size, indices) in enumerate(zip(self.sizes, positions.indices, strict=True)):
            own = leading(positions.counts[:, i : i + 1], indices.shape[1])
            at.append(start + tf.where(own, unsigned(indices), size - 1))
            used.append(own)
            start += size
        return Places(tf.concat(at, axis=1), tf.concat(used, axis=1))


def read(messages: tf.Tensor, layout: MessageLayout) -> tuple[Positions, tf.Tensor]:
    """Take messages apart.

    Args:
        messages: int32 `[rows, words]`.
        layout: Theirs.

    Returns:
        Positions, and the values float32 `[rows, K]`, 0 where there is none.
    """
    parts = layout.split(messages)
    return Positions(list(parts.indices), parts.counts), tf.concat(parts.values, axis=1)


def at_positions_of(rank: tf.Tensor, found: Places, values: tf.Tensor) -> tf.Tensor:
    """Return the values that messages have at the positions of one of them, 0 for none.

    Args:
        rank: Of that message, int32 scalar.
        found: Places of all messages, `[rows, K]`.
        values: float32 `[rows, K]`.
    """
    last = values.shape[1] - 1
    if last < 0:
        return values
    keys = 2 * found.at + tf.cast(~found.used, tf.int64)  # rising too
    wanted = tf.broadcast_to(tf.gather(keys, rank), keys.shape)
    place = tf.minimum(tf.searchsorted(keys, wanted), last)
    hit = tf.equal(tf.gather(keys, place, batch_dims=1), wanted)
    return tf.where(hit, tf.gather(values, place, batch_dims=1), 0.0)


def normalised(vectors: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Return vectors `[n, length]` divided by their root mean squares, and these, `[n, 1]`."""
    scales = tf.sqrt(tf.reduce_mean(tf.square(vectors), axis=1, keepdims=True))
    return tf.math.divide_no_nan(vectors, scales), scales


def largest(vectors: tf.Tensor, count: int) -> tuple[tf.Tensor, tf.Tensor]:
    """Return places and values of the largest elements of vectors `[n, length]`, `[n, count]`."""
    at = tf.math.top_k(tf.abs(vectors), count).indices
    return at, tf.gather(vectors, at, batch_dims=1)


def spread(at: tf.Tensor, values: tf.Tensor, length: int) -> tf.Tensor:
    """Return vectors `[n, length]` of zeros but for `values` at the places `at`, both `[n, m]`."""
    rows = tf.range(at.shape[0])[:, tf.newaxis] + tf.zeros_like(at)
    places_of_all = tf.stack([rows, at], axis=2)
    return tf.scatter_nd(places_of_all, values, [at.shape[0], length])


def share(decoded: tf.Tensor, values: tf.Tensor) -> tf.Tensor:
    """Return the factor of `decoded` that leaves least of `values`, both `[length]`; a scalar."""
    return tf.math.divide_no_nan(tf.reduce_sum(decoded * values), tf.reduce_sum(tf.square(decoded)))


def mixed(codes: tf.Tensor, scales: tf.Tensor) -> tf.Tensor:
    """Return the mean `[1, ...]` of codes `[n, l, c]`, weighted by scales `[n, 1]`."""
    weighted = tf.reduce_sum(scales[:, :, tf.newaxis] * codes, axis=0, keepdims=True)
    return tf.math.divide_no_nan(weighted, tf.reduce_sum(scales))


def gradient(
    model: Autoencoder,
    parameters: tf.Tensor,
    vectors: tf.Tensor,
    leader: tf.Tensor,
    innovation: int,
) -> tf.Tensor:
    """Return the gradient of LGC's loss by the parameters, clipped to norm 1, float32 `[size]`.

    Args:
        model: The autoencoder.
        parameters: float32 `[size]`.
        vectors: float32 `[workers, length]`, what the workers have at one worker's positions.
        leader: int32 scalar, that worker.
        innovation: With an innovation, how many elements it has.
    """
    x, scales = normalised(vectors)
    with tf.GradientTape() as tape:
        tape.watch(parameters)
        codes = model.encode(parameters, x)
        if model.innovation:
            own = spread(*largest(x, innovation), x.shape[1])
            code = tf.gather(codes, leader)[tf.newaxis]
            errors = model.decode(parameters, code, own) - x
        else:
            target = mixed(x[:, :, tf.newaxis], scales)[:, :, 0]
            errors = model.decode(parameters, mixed(codes, scales)) - target
        between = codes - tf.reduce_mean(codes, axis=0, keepdims=True)
        # The mean over all pairs is twice the variance.
        loss = 0.5 * tf.reduce_mean(tf.square(errors)) + tf.reduce_mean(tf.square(between))
    return tf.clip_by_norm(tape.gradient(loss, parameters), 1.0)
