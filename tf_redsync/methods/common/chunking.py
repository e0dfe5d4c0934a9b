"""Tensors in chunks: small blocks of a matrix, each of which is compressed by itself.

A tensor is a matrix: of rank 2 as it is, of a higher rank `[product of the other axes, last axis]`,
a vector is one row. A chunk is a block of it whose sides are the largest divisors of the matrix's
sides that are within a limit, so that all chunks of a tensor are equal and nothing is padded.

A side that is prime and above the limit has no divisor but 1: its chunks are that thin, a vector's
of a single element. Where a method sends k elements of a chunk, it then sends more of the tensor,
of single elements all. A vocabulary or a layer of a number with small factors costs nothing.
"""

from __future__ import annotations

import dataclasses
import math

import tensorflow as tf

SIDE = 64  # of a chunk of a matrix, at most
LENGTH = SIDE * SIDE  # of a chunk of a vector, at most


def largest_divisor(number: int, limit: int) -> int:
    """Return the largest divisor of a number >= 0 that is at most `limit`; of 0 it is 1.

    Example:
        >>> largest_divisor(96, 64), largest_divisor(67, 64)
        (48, 1)
    """
    return next((d for d in range(min(number, limit), 1, -1) if number % d == 0), 1)


@dataclasses.dataclass(frozen=True)
class Chunks:
    """How a tensor is cut.

    Attributes:
        shape: Of the tensor.
        height: Rows of a chunk; 1 for vectors.
        width: Columns of a chunk.
    """

    shape: tuple[int, ...]
    height: int
    width: int

    @classmethod
    def of(cls, shape: tuple[int, ...], side: int = SIDE, length: int = LENGTH) -> Chunks:
        """Return how a tensor of a shape is cut.

        Args:
            shape: Static.
            side: The most rows and columns of a chunk of a matrix.
            length: The most elements of a chunk of a vector.

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
        """Elements of a chunk."""
        return self.height * self.width

    @property
    def number(self) -> int:
        """How many chunks there are."""
        return math.prod(self.shape) // self.size

    @property
    def _grid(self) -> tuple[int, int]:
        """How many chunks are above each other, and how many side by side."""
        columns = self.shape[-1] if self.shape else 1
        return math.prod(self.shape[:-1]) // self.height, columns // self.width

    def split(self, tensor: tf.Tensor) -> tf.Tensor:
        """Return a tensor's chunks, `[number, height, width]`, row by row of chunks."""
        down, across = self._grid
        blocks = tf.reshape(tensor, [down, self.height, across, self.width])
        blocks = tf.transpose(blocks, [0, 2, 1, 3])
        return tf.reshape(blocks, [self.number, self.height, self.width])

    def join(self, chunks: tf.Tensor) -> tf.Tensor:
        """Undo `split`.

        Args:
            chunks: `[number, height, width]`, or the same elements as `[number, size]`.
        """
        down, across = self._grid
        blocks = tf.reshape(chunks, [down, across, self.height, self.width])
        return tf.reshape(tf.transpose(blocks, [0, 2, 1, 3]), self.shape)
