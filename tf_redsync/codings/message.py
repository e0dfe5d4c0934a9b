"""Coded messages: the messages of `ops.accumulate_and_select` in fewer bits.

    [flag] [code of the positions of all tensors] [one mean for each tensor that has one] [code of
    the values of the other tensors]

With p the true values of all elements, S the decoded positions and c the decoded values, the
residual is

    residual = p - c on S, p elsewhere

so that later steps deliver elements that a filter omitted, and compensate false positions and
rounded values. Without error feedback the residual is 0 on S and rounding errors are lost.

Reference for the split into two codings: Hang Xu, Kelly Kostopoulou, Aritra Dutta, Xin Li,
Alexandros Ntoulas, Panos Kalnis (2021), "DeepReduce: A Sparse-tensor Communication Framework for
Federated Deep Learning", NeurIPS.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_redsync.codings.base import Capacity, CodedPositions, IndexCoding, ValueCoding, used
from tf_redsync.codings.plain import Float32, RawIndices
from tf_redsync.ops import wire
from tf_redsync.ops.message_layout import MessageLayout, Parts, unsigned
from tf_redsync.ops.wire import all_ones, as_column, cut, joined


@dataclasses.dataclass(frozen=True)
class MessageCoding:
    """Codes messages of selected elements.

    Attributes:
        indices: The coding of positions.
        values: The coding of values.
        error_feedback: Whether the residual keeps the rounding errors of values.
        seed: int32 scalar, equal on all workers and different in every step.
        stream: int32 `[3]`, this worker's random stream in this step.
    """

    indices: IndexCoding = dataclasses.field(default_factory=RawIndices)
    values: ValueCoding = dataclasses.field(default_factory=Float32)
    error_feedback: bool = True
    seed: Any = dataclasses.field(default=0, compare=False)
    stream: Any = dataclasses.field(default=(0, 0, 0), compare=False)

    def for_message(self, number: int) -> MessageCoding:
        """Return the coding of one of a step's messages, with its own random stream."""
        return dataclasses.replace(self, stream=tf.constant([number, 0, 0]) + self.stream)

    def encode(
        self, message: tf.Tensor, residuals: Sequence[tf.Tensor], layout: MessageLayout
    ) -> tuple[tf.Tensor, list[tf.Tensor]]:
        """Code a message.

        Args:
            message: int32 `[words]`, from `ops.accumulate_and_select`.
            residuals: The residuals of the selection.
            layout: The layout of the message.

        Returns:
            The coded message, all zero unless all its values are finite; and the residuals.
        """
        capacity, parts = _capacity(residuals, layout), layout.split(message)
        selected = _with_means_repeated(parts)
        coded = self.indices.encode(parts.indices, parts.counts, capacity, self.seed)
        values = self._values_at(coded, selected, residuals)
        words = [parts.flags, coded.words]
        for i, mean in enumerate(parts.values):
            if layout.quantized[i]:
                values[i] = used(tf.fill(tf.shape(values[i]), mean[0]), coded.counts[i])
                words.append(wire.to_words(mean))
        true = list(values)
        valued = _tensors_with_values(layout)
        if valued:
            counts = tf.gather(coded.counts, valued)
            rounded = self.values.encode([values[i] for i in valued], counts, self.stream)
            words.append(rounded.words)
            for i, tensor in zip(valued, rounded.values, strict=True):
                values[i] = tensor
        finite = wire.all_finite(values) & all_ones(parts.flags)
        short = wire.zero_unless(finite, joined(*words))
        delivered = values if self.error_feedback else true
        if self.indices.lossless and (self.values.exact or not self.error_feedback):
            return short, list(residuals)
        return short, _updated_residuals(residuals, selected, coded, delivered)

    def decode(
        self, messages: tf.Tensor, like: Sequence[tf.Tensor], layout: MessageLayout
    ) -> tuple[tf.Tensor, MessageLayout]:
        """Decode the coded messages of all workers.

        Args:
            messages: int32 `[workers, words]`.
            like: Tensors of the shapes of the totals.
            layout: As given to `encode`.

        Returns:
            Messages and their layout, as `ops.decode` takes them. Its capacities are larger if the
            coding adds positions.
        """
        capacity = _capacity(like, layout)
        received, valued = self.indices.received(capacity), _tensors_with_values(layout)
        slots, lengths = [received.slots[i] for i in valued], self.lengths(capacity, layout)
        flags, words, mean_words, value_words = cut(messages, lengths)
        positions = self.indices.decode(words, capacity, self.seed)
        decoded: list[tf.Tensor] = []
        if valued:
            counts = tf.gather(positions.counts, valued, axis=1)
            decoded = self.values.decode(value_words, counts, slots)
        next_value = iter(decoded)
        next_mean = iter(tf.split(mean_words, lengths[2], axis=1) if lengths[2] else ())
        values = [
            wire.from_words(next(next_mean)) if one_mean else next(next_value)
            for one_mean in layout.quantized
        ]
        message_layout = MessageLayout(received.slots, layout.quantized)
        parts = Parts(flags, positions.counts, positions.indices, values)
        return message_layout.join(parts), message_layout

    def lengths(self, capacity: Capacity, layout: MessageLayout) -> list[int]:
        """Return the words of a message's parts: header, positions, means, values.

        Args:
            capacity: Sizes of the tensors and slots of the selection's message.
            layout: The layout of that message.
        """
        received, valued = self.indices.received(capacity), _tensors_with_values(layout)
        values = self.values.words([received.slots[i] for i in valued]) if valued else 0
        means = len(layout.quantized) - len(valued)
        return [wire.HEADER_WORDS, self.indices.words(capacity), means, values]

    def _values_at(
        self, coded: CodedPositions, parts: Parts, residuals: Sequence[tf.Tensor]
    ) -> list[tf.Tensor]:
        """Return the true values at the decoded positions."""
        if self.indices.lossless:
            return list(parts.values)
        values = []
        for i, at in enumerate(coded.indices):
            sums = _add(residuals[i], parts.indices[i], parts.values[i], parts.counts[i])
            true = tf.gather(tf.reshape(sums, [-1]), at) if at.shape[0] != 0 else tf.zeros([0])
            values.append(used(true, coded.counts[i]))
        return values


def _tensors_with_values(layout: MessageLayout) -> list[int]:
    """Return the indices of the tensors whose message has values instead of one mean."""
    return [i for i, one_mean in enumerate(layout.quantized) if not one_mean]


def _capacity(tensors: Sequence[tf.Tensor], layout: MessageLayout) -> Capacity:
    """Return the sizes of the tensors and the slots of the selection's message."""
    return Capacity(tuple(t.shape.num_elements() for t in tensors), layout.capacities)


def _with_means_repeated(parts: Parts) -> Parts:
    """Return a message with a value in every slot, 0 after the first `count`."""
    values = [
        used(tf.broadcast_to(value, tf.shape(at)), parts.counts[i])
        for i, (at, value) in enumerate(zip(parts.indices, parts.values, strict=True))
    ]
    return Parts(parts.flags, parts.counts, parts.indices, values)


def _updated_residuals(
    residuals: Sequence[tf.Tensor],
    parts: Parts,
    coded: CodedPositions,
    delivered: Sequence[tf.Tensor],
) -> list[tf.Tensor]:
    """Return residuals plus selected values minus delivered values."""
    updated = []
    for i, residual in enumerate(residuals):
        sums = _add(residual, parts.indices[i], parts.values[i], parts.counts[i])
        updated.append(_add(sums, coded.indices[i], -delivered[i], coded.counts[i]))
    return updated


def _add(tensor: tf.Tensor, at: tf.Tensor, values: tf.Tensor, count: tf.Tensor) -> tf.Tensor:
    """Add values to the elements at the first `count` positions of a tensor."""
    flat = tf.reshape(tensor, [-1])
    if tensor.shape.num_elements() != 0:
        flat = tf.tensor_scatter_nd_add(flat, unsigned(as_column(at, count)), values[:count])
    return tf.ensure_shape(tf.reshape(flat, tf.shape(tensor)), tensor.shape)
