"""Block quantization: numbers of 8, 4 or 2 bits with a shared scale per block.

A row of n elements becomes a message of int32 words:

    [flag] [scales, two bfloat16 in a word, the first one low] [codes]

A code is a signed integer of `bits` bits, the first one lowest in its word; with 4 bits, it is a
float with one bit of sign, two of exponent and one of mantissa (E2M1, as in MXFP4). n is a multiple
of 32, so codes end with a word; the last block of a row may be shorter than the others.
"""

from __future__ import annotations

import tensorflow as tf

from tf_redsync import checks
from tf_redsync.ops import native
from tf_redsync.ops.limits import MAX_COUNT
from tf_redsync.ops.native import runs_natively
from tf_redsync.ops.reference import block_quantization as reference

BITS = (8, 4, 2)
BLOCK_UNIT = 32  # elements; blocks and rows are multiples


def block_words(size: int, *, bits: int, block: int) -> int:
    """Return the number of int32 words of a message for a row of `size` elements.

    Example:
        >>> block_words(1024, bits=4, block=256)  # flag, 4 scales, 1,024 codes
        131
    """
    return 1 + -(-size // (2 * block)) + size // 32 * bits


def block_quantize(rows: tf.Tensor, *, bits: int, block: int) -> tuple[tf.Tensor, tf.Tensor]:
    """Quantize rows; return their messages and errors.

    The values of a block are multiples of a unit u = scale / L:

        8 bits      0, u, 2 u, ..., 127 u                           L = 127
        4 bits      0, u, 2 u, 3 u, 4 u, 6 u, 8 u, 12 u             L = 12
        2 bits      0, u                                            L = 1

    and their negatives. An element x becomes the level nearest to `x (1 / u)`, half to even, at
    most L. The scale is the largest magnitude of the block, rounded up to bfloat16. With 2 bits it
    is 1, 0.8, 0.6 or 0.45 times the largest magnitude, whichever has the smallest sum of squared
    errors. Scales below 2^-100 are 0.

    All arithmetic is float32, and sums have a fixed order: messages are equal on every device.

    Args:
        rows: float32 `[rows, n]`, n a multiple of 32.
        bits: 8, 4 or 2.
        block: Elements that share a scale, a multiple of 32.

    Returns:
        Messages, int32 `[rows, words]`, and errors, `rows - decoded`, float32 `[rows, n]`. All
        messages are zero, and errors unspecified, if an element of any row is not finite or has a
        magnitude of 2^126 or more.

    Raises:
        TypeError: If `rows` is not float32.
        ValueError: If the shape of `rows`, `bits` or `block` is invalid.

    Reference:
        Dettmers et al., "8-bit Optimizers via Block-wise Quantization", ICLR 2022, for blocks;
        Open Compute Project, "OCP Microscaling Formats (MX) Specification" (2023), for the floats
        of 4 bits. The four fractions of 2 bits are a short search for the scale of least error.
        `benchmarks/methods/block_levels.py` compares levels, scales and blocks on gradients.

    Example:
        >>> rows = tf.constant([[8.0, -4.0, 1.0, 0.25] + [0.0] * 28])
        >>> messages, errors = block_quantize(rows, bits=4, block=32)
        >>> block_dequantize(messages, 32, bits=4, block=32)[0, :4].numpy()
        array([ 8.       , -4.       ,  1.3333334,  0.       ], dtype=float32)
    """
    rows = tf.convert_to_tensor(rows)
    if rows.dtype != tf.float32:
        raise TypeError(f"`rows` must be float32. Received: {rows.dtype.name}.")
    if rows.shape.rank != 2 or (rows.shape[1] is not None and rows.shape[1] % BLOCK_UNIT):
        raise ValueError(
            f"`rows` must have shape [rows, n], n a multiple of {BLOCK_UNIT}. Received: shape "
            f"{rows.shape}."
        )
    check_block_format(bits, block)
    if runs_natively([rows]):
        return tuple(native.load().redsync_block_quantize(values=rows, bits=bits, block=block))
    return reference.block_quantize(rows, bits=bits, block=block)


def block_dequantize(
    messages: tf.Tensor, size: int | tf.Tensor, *, bits: int, block: int, add: bool = False
) -> tf.Tensor:
    """Decode messages of `block_quantize`.

    Any words are decoded; a message of zeros stands for zeros.

    Args:
        messages: int32 `[rows, words]`.
        size: n, the number of elements of a row; an int or an int64 scalar.
        bits: As given to `block_quantize`.
        block: As given to `block_quantize`.
        add: Whether to sum the rows, in their order, starting from 0.

    Returns:
        float32 `[rows, n]`, or `[n]` with `add`.

    Raises:
        ValueError: If `bits` or `block` is out of range.
        tf.errors.InvalidArgumentError: When run, if `messages` have a wrong length.
    """
    check_block_format(bits, block)
    messages = tf.convert_to_tensor(messages, tf.int32)
    size = tf.convert_to_tensor(size, tf.int64)
    if runs_natively([messages]):
        return native.load().redsync_block_dequantize(
            messages=messages, size=size, bits=bits, block=block, sum=add
        )
    return reference.block_dequantize(messages, size, bits=bits, block=block, add=add)


def check_block_format(bits: int, block: int) -> None:
    """Check the arguments `bits` and `block` of block quantization.

    Raises:
        ValueError: If `bits` is not 8, 4 or 2, or `block` is not a positive multiple of 32 below
            2^31. The message names the argument.
    """
    checks.choice("bits", bits, BITS)
    checks.integer("block", block, low=BLOCK_UNIT)
    if block % BLOCK_UNIT or block > MAX_COUNT:
        raise ValueError(
            f"`block` must be a multiple of {BLOCK_UNIT}, at most {MAX_COUNT}. Received: "
            f"block={block}"
        )
