"""Tensors cut into chunks: small blocks of a matrix that are compressed independently.

A tensor of rank 2 is a matrix. A tensor of a higher rank is reshaped to `[product of the other
axes, last axis]`, and a vector is one row. The sides of a chunk are the largest divisors of the
matrix's sides up to a limit, so all chunks of a tensor have the same size and none is padded.

A prime side above the limit has only the divisor 1, so its chunks are one element thick; those of a
vector are single elements. A method that sends k elements per chunk then sends more of the tensor,
all of it for single elements. Choose sizes of vocabularies and layers with small factors.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

import tensorflow as tf

SIDE = 64  # largest side of a chunk of a matrix
LENGTH = SIDE * SIDE  # largest length of a chunk of a vector


def largest_divisor(number: int, limit: int) -> int:
    """Return the largest divisor of a number that is at most `limit`; 1 for the number 0.

    Example:
        >>> largest_divisor(96, 64), largest_divisor(67, 64)
        (48, 1)
    """
    return next((d for d in range(min(number, limit), 1, -1) if number % d == 0), 1)


@dataclasses.dataclass(frozen=True)
class Chunks:
    """The division of a tensor into chunks.

    Attributes:
        shape: Shape of the tensor.
        height: Rows of a chunk; 1 for vectors.
        width: Columns of a chunk.
    """

    shape: tuple[int, ...]
    height: int
    width: int

    @classmethod
    def of(cls, shape: tuple[int, ...], side: int = SIDE, length: int = LENGTH) -> Chunks:
        """Return the chunks of a tensor of a shape.

        Args:
            shape: Static shape.
            side: Largest side of a chunk of a matrix.
            length: Largest length of a chunk of a vector.

        Example:
            >>> Chunks.of((3, 3, 16, 256)).size, Chunks.of((5000,)).size
            (3072, 2500)
        """
        if len(shape) < 2:
            return cls(shape, 1, largest_divisor(math.prod(shape), length))
        rows = math.prod(shape[:-1])
        return cls(shape, largest_divisor(rows, side), largest_divisor(shape[-1], side))

    @property
    def size(self) -> int:
        """Number of elements of a chunk."""
        return self.height * self.width

    @property
    def number(self) -> int:
        """Number of chunks."""
        return math.prod(self.shape) // self.size

    @property
    def _grid(self) -> tuple[int, int]:
        """Number of chunks along the rows, and along the columns, of the matrix."""
        columns = self.shape[-1] if self.shape else 1
        return math.prod(self.shape[:-1]) // self.height, columns // self.width

    def split(self, tensor: tf.Tensor) -> tf.Tensor:
        """Return the chunks of a tensor, `[number, height, width]`, in row-major order."""
        down, across = self._grid
        blocks = tf.reshape(tensor, [down, self.height, across, self.width])
        blocks = tf.transpose(blocks, [0, 2, 1, 3])
        return tf.reshape(blocks, [self.number, self.height, self.width])

    def join(self, chunks: tf.Tensor) -> tf.Tensor:
        """Join chunks into the tensor.

        Args:
            chunks: `[number, height, width]`, or the same elements as `[number, size]`.
        """
        down, across = self._grid
        blocks = tf.reshape(chunks, [down, across, self.height, self.width])
        return tf.reshape(tf.transpose(blocks, [0, 2, 1, 3]), self.shape)


@dataclasses.dataclass(frozen=True)
class ChunkGroup:
    """Chunks with equal sides of several tensors, in the order of the tensors.

    A model has many tensors but few sizes of chunks, so a step has fewer operations if those of
    one size are processed together.

    Attributes:
        tensors: Positions of the tensors in the bucket.
        chunks: The chunks of each of them.
    """

    tensors: tuple[int, ...]
    chunks: tuple[Chunks, ...]

    @property
    def sides(self) -> tuple[int, int]:
        """Height and width of a chunk."""
        return self.chunks[0].height, self.chunks[0].width

    @property
    def size(self) -> int:
        """Number of elements of a chunk."""
        return self.chunks[0].size

    @property
    def numbers(self) -> list[int]:
        """Number of chunks of each tensor."""
        return [c.number for c in self.chunks]

    @property
    def number(self) -> int:
        """Number of chunks."""
        return sum(self.numbers)


@dataclasses.dataclass(frozen=True)
class ChunkedBucket:
    """The chunks of a bucket's tensors.

    Attributes:
        chunks: Those of each tensor.
    """

    chunks: tuple[Chunks, ...]

    @functools.cached_property
    def groups(self) -> tuple[ChunkGroup, ...]:
        """The chunks by their sides."""
        tensors: dict[tuple[int, int], list[int]] = {}
        for i, chunks in enumerate(self.chunks):
            tensors.setdefault((chunks.height, chunks.width), []).append(i)
        return tuple(
            ChunkGroup(tuple(places), tuple(self.chunks[i] for i in places))
            for places in tensors.values()
        )

    def split(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Return the chunks of each group, `[number, height, width]`."""
        return [
            tf.concat([c.split(tensors[i]) for i, c in zip(g.tensors, g.chunks, strict=True)], 0)
            for g in self.groups
        ]

    def join(self, groups: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Join the chunks of each group, `[number, height, width]` or `[number, size]`."""
        tensors: dict[int, tf.Tensor] = {}
        for group, chunks in zip(self.groups, groups, strict=True):
            parts = zip(group.tensors, group.chunks, tf.split(chunks, group.numbers), strict=True)
            tensors.update((i, c.join(part)) for i, c, part in parts)
        return [tensors[i] for i in range(len(self.chunks))]
