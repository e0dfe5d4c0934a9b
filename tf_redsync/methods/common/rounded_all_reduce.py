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
the errors of all workers equal the sum of the values. With block quantization, two workers exchange
Q(p) in one all-gather, which has the same bytes, one latency instead of two, and a single rounding.
With 16 bits the all-gather was slower, because its messages are twice as long and are sent later.

A method declares the trait `rounds_values` if it sums all values here or by `sparsifier.deliver`
and keeps the errors in its residual. `HalfPrecision` and `BlockQuantized` accept such methods.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Sequence
from typing import Any, ClassVar, TypeGuard

import tensorflow as tf

from tf_redsync.exchange.context import BlockRounding, Context, Rounding
from tf_redsync.exchange.method import Payloads
from tf_redsync.exchange.requests import AllGather, AllReduce, AllToAll, Request
from tf_redsync.ops import block_quantization, halves, rows, wire

Tensors = list[tf.Tensor]


def all_reduce(
    ctx: Context, values: Sequence[tf.Tensor], residuals: Sequence[tf.Tensor] = ()
) -> Generator[Request, Any, tuple[Tensors, Tensors]]:
    """Sum values over the workers, in the format of `ctx.rounding`.

    Use it as `sums, errors = yield from all_reduce(...)`.

    Args:
        ctx: Context of the exchange.
        values: Float32 tensors of any shapes.
        residuals: Tensors in the same shapes that are added to the values, or none.

    Returns:
        The sums, float32; and this worker's rounding errors, zeros if values are not rounded or the
        errors are unknown.
    """
    rounding = ctx.rounding
    if rounding is None:
        sums = yield AllReduce(rows.added(values, residuals))
        return list(sums), [tf.zeros_like(v) for v in values]
    if isinstance(rounding, Rounding) and not rounding.error_feedback:
        sums = yield AllReduce([tf.cast(v, rounding.dtype) for v in rows.added(values, residuals)])
        return [tf.cast(s, tf.float32) for s in sums], [tf.zeros_like(v) for v in values]
    form = _format(rounding)
    if _uses_all_gather(form, ctx.layout.workers):
        return (yield from _all_gather(form, values, residuals))
    return (yield from _reduce_scatter(ctx, form, values, residuals))


def rounded_payloads(rounding: Rounding | BlockRounding, elements: int, workers: int) -> Payloads:
    """Return the payloads of `all_reduce` for a number of elements and workers."""
    if isinstance(rounding, Rounding) and not rounding.error_feedback:
        return [(AllReduce, elements * tf.as_dtype(rounding.dtype).size)]
    form = _format(rounding)
    if _uses_all_gather(form, workers):
        return [(AllGather, wire.BYTES_PER_WORD * form.words(elements, 1))]
    message = wire.BYTES_PER_WORD * form.words(elements, workers)
    return [(AllToAll, workers * message), (AllGather, message)]


@dataclasses.dataclass(frozen=True)
class _Halves:
    """Format of 16-bit numbers, two per word."""

    dtype: tf.DType

    def words(self, elements: int, blocks: int) -> int:
        """Return the number of words of the message of each block."""
        return halves.words(elements, blocks)

    def encode(
        self, values: Sequence[tf.Tensor], residuals: Sequence[tf.Tensor], blocks: int
    ) -> tuple[tf.Tensor, Any]:
        """Return the blocks' messages, all zero unless all values are finite, and errors."""
        return halves.half_encode(values, residuals, blocks, self.dtype)

    def reduce(self, messages: tf.Tensor, errors: Any, block: tf.Tensor) -> tuple[tf.Tensor, Any]:
        """Sum one block's messages and errors; return the sum's message and the new errors."""
        return halves.half_reduce(messages, errors, block, self.dtype)

    def decode(self, messages: tf.Tensor, like: Sequence[tf.Tensor]) -> Tensors:
        """Return the values in the messages of all blocks, in the shapes of `like`."""
        return halves.half_decode(messages, like, self.dtype)

    def errors(self, errors: Any, like: Sequence[tf.Tensor]) -> Tensors:
        """Return errors of `encode` or `reduce` in the shapes of `like`."""
        del like
        return list(errors)


@dataclasses.dataclass(frozen=True)
class _Blocks:
    """Format of few-bit numbers with a shared scale; same methods as `_Halves`.

    The block that one worker sums is called a row here, because "block" is the unit of a scale.
    """

    bits: int
    block: int
    unit: ClassVar[int] = block_quantization.BLOCK_UNIT  # a row's length is a multiple of this

    def words(self, elements: int, blocks: int) -> int:
        size = rows.length(elements, blocks, self.unit)
        return block_quantization.block_words(size, bits=self.bits, block=self.block)

    def encode(
        self, values: Sequence[tf.Tensor], residuals: Sequence[tf.Tensor], blocks: int
    ) -> tuple[tf.Tensor, Any]:
        return self._quantize(rows.from_tensors(rows.added(values, residuals), blocks, self.unit))

    def reduce(self, messages: tf.Tensor, errors: Any, block: tf.Tensor) -> tuple[tf.Tensor, Any]:
        total = self._dequantize(messages, _columns_of(errors), add=True) + tf.gather(errors, block)
        message, error = self._quantize(total[tf.newaxis])
        return wire.only_row(message), rows.replaced(errors, block, error)

    def decode(self, messages: tf.Tensor, like: Sequence[tf.Tensor]) -> Tensors:
        columns = rows.length(rows.count(like), messages.shape[0], self.unit)
        return rows.to_tensors(self._dequantize(messages, columns, add=False), like)

    def decode_sum(self, messages: tf.Tensor, like: Sequence[tf.Tensor]) -> Tensors:
        """Return the sum of messages, each of which holds all elements."""
        columns = rows.length(rows.count(like), 1, self.unit)
        return rows.to_tensors(self._dequantize(messages, columns, add=True), like)

    def errors(self, errors: Any, like: Sequence[tf.Tensor]) -> Tensors:
        return rows.to_tensors(errors, like)

    def _quantize(self, table: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return block_quantization.block_quantize(table, bits=self.bits, block=self.block)

    def _dequantize(self, messages: tf.Tensor, columns: Any, *, add: bool) -> tf.Tensor:
        return block_quantization.block_dequantize(
            messages, columns, bits=self.bits, block=self.block, add=add
        )


def _format(rounding: Rounding | BlockRounding) -> _Halves | _Blocks:
    if isinstance(rounding, BlockRounding):
        return _Blocks(rounding.bits, rounding.block)
    return _Halves(tf.as_dtype(rounding.dtype))


def _uses_all_gather(form: _Halves | _Blocks, workers: int) -> TypeGuard[_Blocks]:
    return isinstance(form, _Blocks) and workers <= 2


def _reduce_scatter(
    ctx: Context,
    form: _Halves | _Blocks,
    values: Sequence[tf.Tensor],
    residuals: Sequence[tf.Tensor],
) -> Generator[Request, Any, tuple[Tensors, Tensors]]:
    """Reduce-scatter by an all-to-all, then all-gather; return the sums and the errors."""
    message, errors = form.encode(values, residuals, ctx.layout.workers)
    received = yield AllToAll(message)
    message, errors = form.reduce(received, errors, ctx.rank)
    messages = yield AllGather(message)
    return form.decode(messages, values), form.errors(errors, values)


def _all_gather(
    form: _Blocks, values: Sequence[tf.Tensor], residuals: Sequence[tf.Tensor]
) -> Generator[Request, Any, tuple[Tensors, Tensors]]:
    """All-gather whole vectors; return the sums and the errors."""
    message, errors = form.encode(values, residuals, 1)
    messages = yield AllGather(wire.only_row(message))
    return form.decode_sum(messages, values), form.errors(errors, values)


def _columns_of(table: tf.Tensor) -> Any:
    """Return the length of the rows: an int if it is static, else an int64 scalar."""
    return table.shape[1] if table.shape[1] is not None else tf.shape(table, tf.int64)[1]
