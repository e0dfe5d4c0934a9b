"""The positions of a bucket as one ascending stream, which needs one header."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tf_redsync.codings.base import Capacity, used
from tf_redsync.ops.codecs import Positions
from tf_redsync.ops.wire import leading, map_words, padded

MAX_STREAM = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class Stream:
    """The tensors of a bucket, flattened and concatenated.

    Attributes:
        capacity: Sizes and slots, all Python ints.
    """

    capacity: Capacity

    @property
    def size(self) -> int:
        """Number of elements of all tensors.

        Raises:
            ValueError: If positions in the stream overflow int32.
        """
        size = sum(self.capacity.sizes)
        if size > MAX_STREAM:
            raise too_large(size)
        return size

    @property
    def slots(self) -> int:
        """Number of slots of all tensors."""
        return sum(self.capacity.slots)

    @property
    def starts(self) -> np.ndarray:
        """The offset of each tensor in the stream, and the end of the last; int64 `[N + 1]`."""
        return np.cumsum([0, *self.capacity.sizes], dtype=np.int64)

    def merged(self, indices: Sequence[tf.Tensor], counts: tf.Tensor) -> tf.Tensor:
        """Return positions in the stream, int32 `[slots]`, ascending; 0 after the last one."""
        parts = []
        for at, n, start in zip(indices, tf.unstack(counts), self.starts[:-1], strict=True):
            taken = map_words(lambda words, n=n: words[:n], at)
            parts.append(tf.cast(taken, tf.int64) + start)
        return padded(tf.cast(tf.concat(parts, axis=0), tf.int32), self.slots)

    def checked(self, at: tf.Tensor, count: tf.Tensor, ones: tf.Tensor | None = None) -> tf.Tensor:
        """Return received positions after checks of their order and range.

        Args:
            at: int32 or int64 `[workers, slots]`.
            count: int32 `[workers, 1]`, the number of positions in the header.
            ones: int32 `[workers, 1]`, the number of positions in the code, if it has one.

        Returns:
            int32 `[workers, slots]`, 0 after the first `count`.

        Raises:
            tf.errors.InvalidArgumentError: When run, for a count that is out of range or differs
                from `ones`, and for positions that do not ascend or are out of range.
        """
        right = (count >= 0) & (count <= self.slots)
        if ones is not None:
            right &= tf.equal(count, ones)
        text = f"`messages`: a count must be that of the positions, at most {self.slots}. Received:"
        checks = [tf.debugging.Assert(tf.reduce_all(right), [text, count])]
        valid, at = leading(count, self.slots), tf.cast(at, tf.int64)
        before = tf.concat([tf.fill([tf.shape(at)[0], 1], tf.constant(-1, tf.int64)), at], axis=1)
        before = before[:, :-1]
        right = ~valid | ((at > before) & (at < self.size))
        text = f"`messages`: indices must ascend and be below {self.size}. Received:"
        checks.append(tf.debugging.Assert(tf.reduce_all(right), [text, at]))
        with tf.control_dependencies(checks):
            return tf.cast(tf.where(valid, at, 0), tf.int32)

    def separated(self, stream: tf.Tensor, count: tf.Tensor) -> Positions:
        """Undo `merged`.

        Args:
            stream: int32 `[workers, slots]`, the first `count` ascending and in range.
            count: int32 `[workers, 1]`, the number of positions.
        """
        if self.slots == 0:  # all tensors are empty, or nothing is sent
            workers = tf.shape(stream)[0]
            nothing = [tf.zeros([workers, 0], tf.int32) for _ in self.capacity.slots]
            return Positions(nothing, tf.zeros([workers, len(nothing)], tf.int32))
        stream = tf.cast(stream, tf.int64)  # GPUs would process int32 on the host
        sorted_ = tf.where(leading(count, self.slots), stream, MAX_STREAM)
        starts = tf.broadcast_to(self.starts, [tf.shape(stream)[0], len(self.starts)])
        first = tf.searchsorted(sorted_, starts, out_type=tf.int64)  # [workers, N + 1]
        counts = first[:, 1:] - first[:, :-1]
        indices = []
        for i, (slots, start) in enumerate(zip(self.capacity.slots, self.starts[:-1], strict=True)):
            places = tf.constant(np.arange(slots), tf.int64)
            place = tf.minimum(first[:, i : i + 1] + places, self.slots - 1)
            at = tf.gather(stream, place, batch_dims=1) - start
            indices.append(tf.cast(used(at, counts[:, i : i + 1]), tf.int32))
        return Positions(indices, tf.cast(counts, tf.int32))


def too_large(size: int) -> ValueError:
    """Return the error for a bucket of `size` elements."""
    return ValueError(
        "`indices` other than RawIndices count the elements of a bucket in int32: it must have at "
        f"most {MAX_STREAM} elements. Received: a bucket of {size} elements. Use "
        "RawIndices, a smaller `bucket_bytes`, or split the variable."
    )


def gaps(at: tf.Tensor) -> tf.Tensor:
    """Return the differences of ascending positions; the first one is relative to -1."""
    return at - tf.concat([[-1], at[:-1]], axis=0)
