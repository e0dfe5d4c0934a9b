"""All-reduce in 16 bits or in blocks of few bits, with float32 sums and known rounding errors.

A plain all-reduce of 16-bit numbers rounds each partial sum, and no worker knows the errors. Here a
vector is cut into K blocks, and worker b sums block b in float32: a reduce-scatter followed by an
all-gather. With Q(x) the rounded x, on worker w, for values p:

    send Q(p[b]) to worker b, for every block b                 one all-to-all
    error[b] = p[b] - Q(p[b])                                    for every b other than w
    s = p[w] + sum over the other workers of Q(p[w])
    send Q(s) to all workers                                     one all-gather
    error[w] = s - Q(s)

A worker sends as many bytes as in a ring all-reduce of the rounded values. The returned sums plus
the errors of all workers equal the sum of the values. Two workers that send blocks exchange Q(p)
in one all-gather, which has the same bytes, one latency instead of two, and a single rounding.

A method declares the trait `rounds_values` if it sums all values here or by `sparsifier.deliver`
and keeps the errors in its residual. `HalfPrecision` and `BlockQuantized` accept such methods.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Sequence
from typing import Any, ClassVar

import tensorflow as tf

from tf_redsync.exchange.context import BlockRounding, Context, Rounding
from tf_redsync.exchange.method import Payloads
from tf_redsync.exchange.requests import AllGather, AllReduce, AllToAll, Request
from tf_redsync.ops import block_quantization, wire
from tf_redsync.ops.wire import half_decode, half_encode, only_row

Tensors = list[tf.Tensor]


def all_reduce(
    ctx: Context, values: Sequence[tf.Tensor]
) -> Generator[Request, Any, tuple[Tensors, Tensors]]:
    """Sum values over the workers, in the format of `ctx.rounding`.

    Use it as `sums, errors = yield from all_reduce(...)`.

    Args:
        ctx: Context of the exchange.
        values: Float32 tensors of any shapes.

    Returns:
        The sums, float32; and this worker's rounding errors, zeros if values are not rounded or the
        errors are unknown.
    """
    rounding, zeros = ctx.rounding, [tf.zeros_like(v) for v in values]
    if rounding is None:
        sums = yield AllReduce(list(values))
        return list(sums), zeros
    if isinstance(rounding, Rounding) and not rounding.error_feedback:
        sums = yield AllReduce([tf.cast(v, rounding.dtype) for v in values])
        return [tf.cast(s, tf.float32) for s in sums], zeros
    form, workers = _format(rounding), ctx.layout.workers
    gathers = _uses_all_gather(rounding, workers)
    rows = _rows(values, form, 1 if gathers else workers)
    sums, errors = yield from (_all_gather if gathers else _reduce_scatter)(ctx, rows, form)
    return _split(sums, values), _split(errors, values)


def rounded_payloads(rounding: Rounding | BlockRounding, elements: int, workers: int) -> Payloads:
    """Return the payloads of `all_reduce` for a number of elements and workers."""
    if isinstance(rounding, Rounding) and not rounding.error_feedback:
        return [(AllReduce, elements * tf.as_dtype(rounding.dtype).size)]
    form = _format(rounding)
    if _uses_all_gather(rounding, workers):
        return [(AllGather, wire.BYTES_PER_WORD * form.words(_row(form, elements, 1)))]
    message = wire.BYTES_PER_WORD * form.words(_row(form, elements, workers))
    return [(AllToAll, workers * message), (AllGather, message)]


@dataclasses.dataclass(frozen=True)
class _Halves:
    """Format of 16-bit numbers, two per word."""

    dtype: tf.DType
    unit: ClassVar[int] = 2  # the length of a row is a multiple of this

    def words(self, size: int) -> int:
        """Return the number of words of a message for a row of `size` elements."""
        return wire.HEADER_WORDS + size // 2

    def encode(self, rows: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Encode rows of values; return messages and rounding errors.

        Args:
            rows: float32 `[rows, size]`.

        Returns:
            Messages, int32 `[rows, words]`, all zero unless all rounded values are finite; and
            errors, float32 in the shape of `rows`.
        """
        return half_encode(rows, self.dtype)

    def decode(self, messages: tf.Tensor, size: Any) -> tf.Tensor:
        """Decode messages to float32 `[rows, size]`."""
        del size
        return half_decode(messages, self.dtype)

    def decode_sum(self, messages: tf.Tensor, size: Any) -> tf.Tensor:
        """Return the sum of the rows that `decode` returns."""
        del size
        return half_decode(messages, self.dtype, add=True)


@dataclasses.dataclass(frozen=True)
class _Blocks:
    """Format of few-bit numbers with a shared scale per block; same methods as `_Halves`."""

    bits: int
    block: int
    unit: ClassVar[int] = block_quantization.BLOCK_UNIT

    def words(self, size: int) -> int:
        return block_quantization.block_words(size, bits=self.bits, block=self.block)

    def encode(self, rows: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return block_quantization.block_quantize(rows, bits=self.bits, block=self.block)

    def decode(self, messages: tf.Tensor, size: Any) -> tf.Tensor:
        return block_quantization.block_dequantize(messages, size, bits=self.bits, block=self.block)

    def decode_sum(self, messages: tf.Tensor, size: Any) -> tf.Tensor:
        return block_quantization.block_dequantize(
            messages, size, bits=self.bits, block=self.block, add=True
        )


def _format(rounding: Rounding | BlockRounding) -> _Halves | _Blocks:
    if isinstance(rounding, BlockRounding):
        return _Blocks(rounding.bits, rounding.block)
    return _Halves(tf.as_dtype(rounding.dtype))


def _row(form: _Halves | _Blocks, size: Any, rows: int) -> Any:
    """Return the length of each of `rows` rows that together hold `size` elements."""
    return form.unit * -(-size // (form.unit * rows))


def _uses_all_gather(rounding: Rounding | BlockRounding, workers: int) -> bool:
    return isinstance(rounding, BlockRounding) and workers <= 2


def _rows(values: Sequence[tf.Tensor], form: _Halves | _Blocks, count: int) -> tf.Tensor:
    """Return all values in `count` rows of equal length, with zeros at the end."""
    flat = [tf.reshape(v, [-1]) for v in values]
    sizes = [v.shape[0] if v.shape[0] is not None else tf.size(v, tf.int64) for v in flat]
    size = sum(sizes)
    length = _row(form, size, count)
    return tf.reshape(tf.concat([*flat, tf.zeros([count * length - size])], 0), [count, length])


def _reduce_scatter(
    ctx: Context, rows: tf.Tensor, form: _Halves | _Blocks
) -> Generator[Request, Any, tuple[tf.Tensor, tf.Tensor]]:
    """Reduce-scatter by an all-to-all, then all-gather; return the sum and this worker's error."""
    length = _length(rows)
    message, errors = form.encode(rows)
    received = yield AllToAll(message)
    total = form.decode_sum(received, length) + tf.gather(errors, ctx.rank)
    message, sum_error = form.encode(total[tf.newaxis])
    messages = yield AllGather(only_row(message))
    # Unlike `tf.where`, this can write into `errors`
    errors = tf.tensor_scatter_nd_update(errors, [[ctx.rank]], sum_error)
    return form.decode(messages, length), errors


def _all_gather(
    ctx: Context, rows: tf.Tensor, form: _Halves | _Blocks
) -> Generator[Request, Any, tuple[tf.Tensor, tf.Tensor]]:
    """All-gather whole vectors; return the sum and this worker's error."""
    del ctx
    message, errors = form.encode(rows)
    messages = yield AllGather(only_row(message))
    return form.decode_sum(messages, _length(rows)), errors


def _length(rows: tf.Tensor) -> Any:
    """Return the length of the rows: an int if it is static, else an int64 scalar."""
    return rows.shape[1] if rows.shape[1] is not None else tf.shape(rows, tf.int64)[1]


def _split(padded: tf.Tensor, like: Sequence[tf.Tensor]) -> Tensors:
    """Return the first elements in the shapes of `like`."""
    sizes = [tf.size(v) for v in like]
    vector = tf.reshape(padded, [-1])[: tf.add_n(sizes)]
    parts = tf.split(vector, tf.stack(sizes), num=len(like))
    return [
        tf.ensure_shape(tf.reshape(p, tf.shape(v)), v.shape)
        for p, v in zip(parts, like, strict=True)
    ]
