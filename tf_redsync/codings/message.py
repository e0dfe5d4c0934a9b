"""Coded messages: what `ops.accumulate_and_select` returned, in fewer bits.

    [flag] [code of the positions of all tensors] [one mean for each tensor that has one] [code of
    the values of the other tensors]

With p the true values of the tensors, selected or not, and S and c what the codes stand for,
positions and values, the residual is

    residual = p - c on S, p elsewhere

so that an element that a filter has left out, a false position and the rounding of a value are all
made up for later. Without error feedback the residual is 0 on S: the rounding is forgotten.

Reference for the split in two codings: Hang Xu, Kelly Kostopoulou, Aritra
Dutta, Xin Li, Alexandros Ntoulas, Panos Kalnis (2021), "DeepReduce: A Sparse-tensor Communication
Framework for Federated Deep Learning", NeurIPS.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tf_redsync.codings.base import CodedPositions, IndexCoding, Room, ValueCoding, used
from tf_redsync.codings.plain import Float32, RawIndices
from tf_redsync.exchange import wire


class Parts(NamedTuple):
    """A message in the layout of `ops/contract.py`, taken apart.

    Attributes:
        flag: int32 `[1]`.
        counts: int32 `[N]`.
        indices: list of int32 `[slots]`.
        values: list of float32 `[slots]`, 0 after the first `count`. Of a tensor with one mean that
            mean, repeated.
        means: dict of float32 `[1]`, by the number of a tensor that has one mean.
    """

    flag: tf.Tensor
    counts: tf.Tensor
    indices: list[tf.Tensor]
    values: list[tf.Tensor]
    means: dict[int, tf.Tensor]


@dataclasses.dataclass(frozen=True)
class MessageCoding:
    """How selected elements travel.

    Attributes:
        indices: Coding of the positions.
        values: Coding of the values.
        error_feedback: Whether the residual keeps what values lose by their coding.
        seed: int32 scalar, equal on all workers and another one in every step.
        stream: int32 `[3]`, of this worker's random numbers in this step.
    """

    indices: IndexCoding = dataclasses.field(default_factory=RawIndices)
    values: ValueCoding = dataclasses.field(default_factory=Float32)
    error_feedback: bool = True
    seed: Any = dataclasses.field(default=0, compare=False)
    stream: Any = dataclasses.field(default=(0, 0, 0), compare=False)

    def for_message(self, number: int) -> MessageCoding:
        """Return the coding of one of a step's messages, with random numbers of its own."""
        return dataclasses.replace(self, stream=tf.constant([number, 0, 0]) + self.stream)

    def encode(
        self,
        message: tf.Tensor,
        residuals: Sequence[tf.Tensor],
        k: tf.Tensor | Sequence[int],
        **form: Any,
    ) -> tuple[tf.Tensor, list[tf.Tensor]]:
        """Code a message.

        Args:
            message: int32 `[words]`, from `ops.accumulate_and_select`.
            residuals: What the selection left.
            k: As given to the selection.
            form: `selectors` and `quantized`, as given to the selection.

        Returns:
            The coded message, all zero unless all that it stands for is finite; and the residuals.
        """
        room, one_mean = _room(residuals, k), form["quantized"]
        parts = _taken_apart(message, room, one_mean)
        coded = self.indices.encode(parts.indices, parts.counts, room, self.seed)
        values = self._values_at(coded, parts, residuals)
        for i, mean in parts.means.items():
            values[i] = used(tf.fill(tf.shape(values[i]), mean[0]), coded.counts[i])
        true = list(values)
        words = [parts.flag, coded.words, *map(wire.to_words, parts.means.values())]
        own = _with_values(one_mean)
        if own:
            counts = tf.gather(coded.counts, own)
            rounded = self.values.encode([values[i] for i in own], counts, self.stream)
            words.append(rounded.words)
            for i, tensor in zip(own, rounded.values, strict=True):
                values[i] = tensor
        finite = wire.all_finite(values)
        short = tf.concat(words, axis=0)
        short = tf.where(finite & tf.equal(parts.flag[0], 1), short, tf.zeros_like(short))
        delivered = values if self.error_feedback else true
        if self.indices.lossless and (self.values.exact or not self.error_feedback):
            return short, list(residuals)
        return short, _kept(residuals, parts, coded, delivered)

    def decode(
        self,
        messages: tf.Tensor,
        like: Sequence[tf.Tensor],
        k: tf.Tensor | Sequence[int],
        **form: Any,
    ) -> tuple[tf.Tensor, Any, dict[str, Any]]:
        """Undo `encode`, as far as that can be done, for the messages of all workers.

        Args:
            messages: int32 `[workers, words]`.
            like: Tensors of the shapes of the totals.
            k: As given to `encode`.
            form: As given to `encode`.

        Returns:
            Messages, `k`, and `selectors` and `quantized`, all as `ops.decode` takes them.
        """
        room, one_mean = _room(like, k), form["quantized"]
        received, own = self.indices.received(room), _with_values(one_mean)
        slots, means = [received.slots[i] for i in own], len(one_mean) - len(own)
        lengths = [1, self.indices.words(room), means, self.values.words(slots) if own else 0]
        flag, words, mean_words, value_words = tf.split(messages, lengths, axis=1)
        positions = self.indices.decode(words, room, self.seed)
        values = []
        if own:
            counts = tf.gather(positions.counts, own, axis=1)
            values = self.values.decode(value_words, counts, slots)
        result, next_value = [flag], iter(values)
        next_mean = iter(tf.split(mean_words, means, axis=1) if means else ())
        for i, (at, is_mean) in enumerate(zip(positions.indices, one_mean, strict=True)):
            result.append(positions.counts[:, i : i + 1])
            result += [next(next_mean), at] if is_mean else [at, wire.to_words(next(next_value))]
        sent = {"selectors": ["exact"] * len(one_mean), "quantized": list(one_mean)}
        return tf.concat(result, axis=1), _k_of(received, k), sent

    def _values_at(
        self, coded: CodedPositions, parts: Parts, residuals: Sequence[tf.Tensor]
    ) -> list[tf.Tensor]:
        """The true values at the positions that the code stands for."""
        if self.indices.lossless:
            return list(parts.values)
        values = []
        for i, at in enumerate(coded.indices):
            sums = _add(residuals[i], parts.indices[i], parts.values[i], parts.counts[i])
            true = tf.gather(tf.reshape(sums, [-1]), at) if at.shape[0] != 0 else tf.zeros([0])
            values.append(used(true, coded.counts[i]))
        return values


def _with_values(one_mean: Sequence[bool]) -> list[int]:
    """Numbers of the tensors that have values of their own, and not one mean."""
    return [i for i, is_mean in enumerate(one_mean) if not is_mean]


def _room(tensors: Sequence[tf.Tensor], k: tf.Tensor | Sequence[int]) -> Room:
    """Sizes of the tensors and slots of the selection's message."""
    fixed = tf.get_static_value(k) if isinstance(k, tf.Tensor) else k
    slots = tf.unstack(k, len(tensors)) if fixed is None else map(int, fixed)
    return Room(tuple(t.shape.num_elements() for t in tensors), tuple(slots))


def _k_of(room: Room, k: tf.Tensor | Sequence[int]) -> Any:
    """Slots as `k` of messages with the selector "exact", a list if `k` is."""
    if room.is_static:
        return list(room.slots) if isinstance(k, list) else tf.constant(room.slots, tf.int32)
    return tf.stack(room.slots)


def _taken_apart(message: tf.Tensor, room: Room, one_mean: Sequence[bool]) -> Parts:
    lengths: list[Any] = [1]
    for slots, is_mean in zip(room.slots, one_mean, strict=True):
        lengths += [1, 1, slots] if is_mean else [1, slots, slots]
    flag, *rest = tf.split(message, lengths)
    counts, indices, values, means = [], [], [], {}
    for i, is_mean in enumerate(one_mean):
        count, first, second = rest[3 * i : 3 * i + 3]
        counts.append(count[0])
        indices.append(second if is_mean else first)
        value = wire.from_words(first if is_mean else second)
        values.append(used(tf.broadcast_to(value, tf.shape(second)), count[0]))
        if is_mean:
            means[i] = value
    return Parts(flag, tf.stack(counts), indices, values, means)


def _kept(
    residuals: Sequence[tf.Tensor],
    parts: Parts,
    coded: CodedPositions,
    delivered: Sequence[tf.Tensor],
) -> list[tf.Tensor]:
    """What the selection left, with what it took, without what is delivered."""
    kept = []
    for i, residual in enumerate(residuals):
        sums = _add(residual, parts.indices[i], parts.values[i], parts.counts[i])
        kept.append(_add(sums, coded.indices[i], -delivered[i], coded.counts[i]))
    return kept


def _add(tensor: tf.Tensor, at: tf.Tensor, values: tf.Tensor, count: tf.Tensor) -> tf.Tensor:
    """A tensor with values added to the elements at the first `count` positions."""
    flat = tf.reshape(tensor, [-1])
    if tensor.shape.num_elements() != 0:
        flat = tf.tensor_scatter_nd_add(flat, at[:count, tf.newaxis], values[:count])
    return tf.ensure_shape(tf.reshape(flat, tf.shape(tensor)), tensor.shape)
