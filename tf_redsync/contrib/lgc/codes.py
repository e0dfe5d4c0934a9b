"""What workers tell each other in LGC's third stage, and what they make of it."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import tensorflow as tf

from tf_redsync.codings.base import IndexCoding
from tf_redsync.contrib.lgc.autoencoder import Autoencoder
from tf_redsync.contrib.lgc.shared_values import (
    Shape,
    largest,
    normalised,
    read,
    share,
    spread,
)
from tf_redsync.exchange.requests import AllGather, AllReduce, Request
from tf_redsync.ops import wire

NO_SEED = 0  # Codings of positions that lose none draw no random numbers.

# Of all workers together and of this worker, what is delivered, both float32 `[length]`.
Delivery = Generator[Request, Any, tuple[tf.Tensor, tf.Tensor]]


def leader_words(
    model: Autoencoder,
    parameters: tf.Tensor,
    indices: IndexCoding,
    shape: Shape,
    message: tf.Tensor,
) -> tf.Tensor:
    """Return what a worker sends if it is the leader, int32 `[words]`.

    Its positions; and, where others have an innovation only, the code of its values.

    Args:
        model: The autoencoder.
        parameters: Its parameters.
        indices: Coding of the positions.
        shape: Of the selection.
        message: What the worker has selected, of the exact selector.
    """
    positions, values = read(message[tf.newaxis], shape.layout)
    at, (counts,) = [i[0] for i in positions.indices], tf.unstack(positions.counts, num=1)
    coded = indices.encode(at, counts, shape.capacity, NO_SEED)
    words = tf.ensure_shape(coded.words, [indices.words(shape.capacity)])
    if not model.innovation:
        return words
    values = tf.where(shape.places(positions).used, values, 0.0)
    code = model.encode(parameters, normalised(shape.padded(values))[0])
    return tf.concat([words, tf.reshape(wire.to_words(code), [-1])], axis=0)


def ring(model: Autoencoder, parameters: tf.Tensor, values: tf.Tensor, used: tf.Tensor) -> Delivery:
    """Average the codes of all workers.

    Args:
        model: The autoencoder.
        parameters: Its parameters, equal on all workers.
        values: float32 `[1, length]`, this worker's values at the leader's positions.
        used: float32 `[1, length]`, 1 where there is a position, else 0.
    """
    x, scale = normalised(values)
    own_code = scale[:, :, tf.newaxis] * model.encode(parameters, x)
    code, scales = yield AllReduce([own_code, scale])
    decoded = used * model.decode(parameters, tf.math.divide_no_nan(code, scales))
    own = share(decoded, values)
    (everyone,) = yield AllReduce([own])
    return everyone * decoded[0], own * decoded[0]


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
    """Correct what the leader's code is decoded to by the innovations of all workers.

    Args:
        model: The autoencoder.
        parameters: Its parameters, equal on all workers.
        code_words: The leader's code, int32 `[words]`.
        values: As in `ring`.
        used: As in `ring`.
        innovation: Elements of an innovation.
        rank: This worker's, int32 scalar.
        finite: Bool scalar, whether all that this worker contributes to the step is finite.
    """
    length = values.shape[1]
    code_shape = [1, length // model.stride, model.code_channels]
    code = tf.reshape(wire.from_words(code_words), code_shape)

    def decoded(at: tf.Tensor, innovations: tf.Tensor) -> tf.Tensor:
        """For innovations `[n, m]` of n workers what they deliver of length 1."""
        return used * model.decode(parameters, code, spread(at, innovations, length))

    at, innovations = largest(normalised(values)[0], innovation)
    own = share(decoded(at, innovations), values)
    floats = tf.concat([own[tf.newaxis], innovations[0]], axis=0)
    finite &= tf.reduce_all(tf.math.is_finite(floats))
    messages = yield AllGather(wire.message(finite, floats, at[0]))
    _, floats, at = wire.split(messages, 1 + innovation)
    delivered = floats[:, :1] * decoded(at, floats[:, 1:])
    return tf.reduce_sum(delivered, axis=0), tf.gather(delivered, rank)
