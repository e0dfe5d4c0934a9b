"""Interfaces of codings, which pack positions or values of selected elements into message words.

A coding depends only on the sizes of the tensors and on the largest number of elements sent of
each. It takes and returns lists with one entry per tensor of a bucket, so it may code each tensor
separately or all of them as one stream. All workers compute the same static length. A code of
variable length has the capacity for the worst case. Positions are not random, so the elements that
did not fit would be the same in every step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import tensorflow as tf

from tf_redsync.config import Configurable
from tf_redsync.ops.codecs import Positions
from tf_redsync.ops.wire import leading


@dataclasses.dataclass(frozen=True)
class Capacity:
    """The sizes of a bucket's tensors, and the largest number of elements sent of each.

    Attributes:
        sizes: Number of elements of each tensor, Python ints.
        slots: Largest number of elements sent of each tensor, `MessageLayout.capacities`: Python
            ints, or int32 scalars if the method's density changes from step to step.
    """

    sizes: tuple[int, ...]
    slots: tuple[Any, ...]

    @property
    def is_static(self) -> bool:
        """Whether all slots are Python ints."""
        return not any(isinstance(k, tf.Tensor) for k in self.slots)


class CodedPositions(NamedTuple):
    """The coded positions of one worker.

    Attributes:
        words: int32 vector, the code.
        indices: List of int32 vectors, the positions that the receivers decode: ascending in each
            flattened tensor; 0 after the first `count`.
        counts: int32 `[N]`.
    """

    words: tf.Tensor
    indices: list[tf.Tensor]
    counts: tf.Tensor


class CodedValues(NamedTuple):
    """The coded values of one worker.

    Attributes:
        words: int32 vector, the code.
        values: List of float32 vectors, the values that the receivers decode; 0 after the first
            `count`.
    """

    words: tf.Tensor
    values: list[tf.Tensor]


@dataclasses.dataclass(frozen=True, kw_only=True)
class IndexCoding(Configurable):
    """Codes positions. Subclasses are frozen dataclasses decorated with `register`.

    Attributes:
        lossless: Whether the decoded positions are always the coded ones. A lossy coding may add
            positions, and omit different ones in each step.
        any_slots: Whether `Capacity.slots` may be tensors.
        paper: Authors and year.
    """

    lossless: ClassVar[bool] = True
    any_slots: ClassVar[bool] = False
    paper: ClassVar[str] = "-"

    def received(self, capacity: Capacity) -> Capacity:
        """Return the capacity for decoded positions; above `capacity` if the coding adds some."""
        return capacity

    def words(self, capacity: Capacity) -> Any:
        """Return the length of the code in 32-bit words."""
        raise NotImplementedError

    def encode(
        self, indices: Sequence[tf.Tensor], counts: tf.Tensor, capacity: Capacity, seed: tf.Tensor
    ) -> CodedPositions:
        """Code positions.

        Args:
            indices: For every tensor int32 `[slots]`, of which the first `counts[i]` ascend.
            counts: int32 `[N]`.
            capacity: Sizes and slots.
            seed: int32 scalar, equal on all workers and different in every step.
        """
        raise NotImplementedError

    def decode(self, words: tf.Tensor, capacity: Capacity, seed: tf.Tensor) -> Positions:
        """Decode the codes of all workers; a code of zeros has no positions.

        A worker with non-finite values sends zeros.

        Args:
            words: int32 `[workers, words]`.
            capacity: As given to `encode`.
            seed: As given to `encode`.

        Returns:
            `Positions`, with `received(capacity).slots` entries for each tensor.

        Raises:
            tf.errors.InvalidArgumentError: When run, for a count that is out of range or does not
                match the code, and for positions that do not ascend or are out of range.
                `RawIndices` leaves these checks to `ops.decode`.
        """
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, kw_only=True)
class ValueCoding(Configurable):
    """Codes the values of selected elements, in the order of their positions.

    Attributes:
        exact: Whether decoded values have the same bits.
        any_slots: Whether slots may be tensors.
        paper: Authors and year.
    """

    exact: ClassVar[bool] = False
    any_slots: ClassVar[bool] = False
    paper: ClassVar[str] = "-"

    def words(self, slots: Sequence[Any]) -> Any:
        """Return the length of the code in 32-bit words, for `slots[i]` values of tensor i."""
        raise NotImplementedError

    def encode(
        self, values: Sequence[tf.Tensor], counts: tf.Tensor, stream: tf.Tensor
    ) -> CodedValues:
        """Code values.

        Args:
            values: For every tensor float32 `[slots]`; 0 after the first `counts[i]`.
            counts: int32 `[N]`.
            stream: int32 `[3]`, this worker's random stream in this step; see `ops.quantize`.
        """
        raise NotImplementedError

    def decode(self, words: tf.Tensor, counts: tf.Tensor, slots: Sequence[Any]) -> list[tf.Tensor]:
        """Decode the codes of all workers.

        Args:
            words: int32 `[workers, words]`.
            counts: int32 `[workers, N]`.
            slots: As given to `words`.

        Returns:
            For every tensor float32 `[workers, slots]`, 0 after the first `counts[worker, i]`.
        """
        raise NotImplementedError


def used(values: tf.Tensor, count: tf.Tensor) -> tf.Tensor:
    """Return `values` with zeros after the first `count` of the last axis.

    Args:
        values: `[slots]`, or `[workers, slots]`.
        count: int32 scalar, or `[workers, 1]`.
    """
    slots = values.shape[-1]
    slots = tf.shape(values)[-1] if slots is None else slots
    return tf.where(leading(count, slots), values, tf.zeros_like(values))
