"""What a coding is: how positions, or values, of selected elements become words of a message.

Codings know tensors only by their sizes and by how many elements of each are sent at most. They
take and return lists with one entry for every tensor of a bucket, so that each can decide whether
a tensor has a code of its own or all of them make one stream. Lengths are static: all workers can
compute them. A code whose length depends on the positions has room for the longest one that there
is: positions are not random, and what did not fit would be the same elements in every step.
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
    """What may be sent of the tensors of a bucket.

    Attributes:
        sizes: Elements of each tensor, Python ints.
        slots: Elements that are sent of it at most: Python ints, or int32 scalars where a method's
            density changes from step to step.
    """

    sizes: tuple[int, ...]
    slots: tuple[Any, ...]

    @property
    def is_static(self) -> bool:
        """Whether all slots are known while the graph is built."""
        return not any(isinstance(k, tf.Tensor) for k in self.slots)


class CodedPositions(NamedTuple):
    """Positions of one worker on their way out.

    Attributes:
        words: int32 vector, the code.
        indices: list of int32 vectors, what the code stands for: ascending positions in each
            flattened tensor; 0 after the first `count`.
        counts: int32 `[N]`.
    """

    words: tf.Tensor
    indices: list[tf.Tensor]
    counts: tf.Tensor


class CodedValues(NamedTuple):
    """Values of one worker on their way out.

    Attributes:
        words: int32 vector, the code.
        values: list of float32 vectors, what the code stands for; 0 after the first `count`.
    """

    words: tf.Tensor
    values: list[tf.Tensor]


@dataclasses.dataclass(frozen=True, kw_only=True)
class IndexCoding(Configurable):
    """A way to write down positions. Frozen dataclasses decorated with `register`.

    Attributes:
        lossless: Whether the code always stands for just the positions that it was made of. If not,
            others may be added, and some be left out for others to be in another step.
        any_slots: Whether `Capacity.slots` may be tensors.
        paper: Authors and year.
    """

    lossless: ClassVar[bool] = True
    any_slots: ClassVar[bool] = False
    paper: ClassVar[str] = "-"

    def received(self, capacity: Capacity) -> Capacity:
        """Return the capacity for decoded positions; more than `capacity` if some are added."""
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
            seed: int32 scalar, equal on all workers and another one in every step.
        """
        raise NotImplementedError

    def decode(self, words: tf.Tensor, capacity: Capacity, seed: tf.Tensor) -> Positions:
        """Decode what `encode` returned on each worker; words that are all 0 are no positions.

        A worker with something to send that is not finite sends zeros.

        Args:
            words: int32 `[workers, words]`.
            capacity: As given to `encode`.
            seed: As given to `encode`.

        Returns:
            `Positions`, with `received(capacity).slots` entries for each tensor.

        Raises:
            tf.errors.InvalidArgumentError: when run, for words that no `encode` has made.
        """
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, kw_only=True)
class ValueCoding(Configurable):
    """A way to write down the values of selected elements, in the order of their positions.

    Attributes:
        exact: Whether float32 values come back as they were.
        any_slots: Whether slots may be tensors.
        paper: Authors and year.
    """

    exact: ClassVar[bool] = False
    any_slots: ClassVar[bool] = False
    paper: ClassVar[str] = "-"

    def words(self, slots: Sequence[Any]) -> Any:
        """Return the length of the code in 32-bit words, for so many values of each tensor."""
        raise NotImplementedError

    def encode(
        self, values: Sequence[tf.Tensor], counts: tf.Tensor, stream: tf.Tensor
    ) -> CodedValues:
        """Code values.

        Args:
            values: For every tensor float32 `[slots]`; what is after the first `counts[i]` is 0.
            counts: int32 `[N]`.
            stream: int32 `[3]`, of this worker's random numbers in this step; see `ops.quantize`.
        """
        raise NotImplementedError

    def decode(self, words: tf.Tensor, counts: tf.Tensor, slots: Sequence[Any]) -> list[tf.Tensor]:
        """Decode what `encode` returned on each worker, `[workers, words]`.

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
