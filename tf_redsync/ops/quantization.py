"""Quantization to codes of a few bits, and the sum of several workers' messages.

One message layout and one decoder serve the sign methods (1 bit per element), two-bit ternary
codes, QSGD, TernGrad, DoReFa and natural compression. A message is a vector of int32 words:

    [flag] [scales of tensor 0, of tensor 1, ..] [codes of tensor 0] [codes of tensor 1] ..

`flag` is 1 if all elements and scales are finite and, in mode "natural", no element is rounded up
to 2^128. Otherwise all words are 0. Scales are bit-cast float32. Code j of a tensor occupies bits
[j * b, (j + 1) * b) of the tensor's words, where bit 0 is the lowest of the first word. Codes of b
bits may cross words, so a tensor of n elements takes ceil(n * b / 32) words. The rest of the last
word is 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from tf_redsync.ops import native
from tf_redsync.ops.codec_checks import check_list
from tf_redsync.ops.native import runs_natively
from tf_redsync.ops.quantized_format import RANDOM_MODES, check_format
from tf_redsync.ops.reference import quantization as reference


class Quantized(NamedTuple):
    """The result of `quantize`.

    Attributes:
        message: int32 vector, this worker's message; see the module's docstring for the layout.
        errors: List of float32 tensors, the quantization errors `tensor - decoded`; empty unless
            requested. Unspecified if the message's flag is 0.
    """

    message: tf.Tensor
    errors: list[tf.Tensor]


def quantize(
    tensors: Sequence[tf.Tensor],
    scales: tf.Tensor,
    *,
    mode: str,
    levels: int = 1,
    bucket_size: int | None = None,
    stream: tf.Tensor | Sequence[int] | None = None,
    errors: bool = False,
) -> Quantized:
    """Code every element with a few bits.

    The decoded value of an element x is

        "sign"        c if x >= 0, else -c. Zero is positive.
        "two_level"   c1 if x >= 0, else c0; two scales (c0, c1) a bucket, of any sign.
        "threshold"   c if x >= c, -c if x <= -c, else 0.
        "stochastic"  sign(x) * level * (c / levels) with y = (|x| / c) * levels, at most `levels`,
                      and level = floor(y) + [u < y - floor(y)]: y on average. 0 if c is 0.
        "uniform"     (2 * code - levels) * (c / levels) with y = (x / c + 1) * (levels / 2), in
                      [0, levels], and code = floor(y) + [u < y - floor(y)]: levels + 1 values
                      from -c to c, x on average if |x| <= c. 0 if c is 0.
        "natural"     one of the two powers of two around |x|, with the sign of x: x on average.
                      The first 23 random bits of u are added to the mantissa of the float32, which
                      is then cleared. The code is twice the remaining exponent, with its bias of
                      127, plus the sign bit. There is no c. Values below 2^-126 become 0 or 2^-126;
                      none may become 2^128.

    `c` is the scale of the element's bucket. All arithmetic is float32 in the order written. `u` is
    uniform in [0, 1) with 24 bits, from the counter-based generator Philox4x32-10: with `stream` =
    (seed, worker, step), element j of tensor i gets `(word >> 8) * 2^-24`, where word is number
    j mod 4 of the output for the key (seed, worker) and the counter (low and high half of j div 4,
    i, step). Equal streams give equal messages on every device; workers need different streams.

    Args:
        tensors: N float32 tensors of any shape.
        scales: float32 vector, the scales of all buckets, tensor after tensor; see
            `quantized_scales`. Not negative, except for "two_level". `[]` for "natural".
        mode: "sign", "two_level", "threshold", "stochastic", "uniform" or "natural".
        levels: For "stochastic": number of values > 0 that an element can take, at most 32767. For
            "uniform": steps from -c to c, at most 65535. 1 for the other modes.
        bucket_size: Number of elements that share a scale, a multiple of 32 below 2^31; `None`
            for all elements of a tensor.
        stream: int32 [3], for "stochastic", "uniform" and "natural" only.
        errors: Whether to return `tensor - decoded`, for error feedback.

    Returns:
        A `Quantized`: message (see the module's docstring) and errors. If an element or a scale is
        non-finite, the message is all zero.

    Raises:
        ValueError: If the list is empty, the mode is unknown, or levels, bucket size or stream do
            not suit it.
        TypeError: If tensors are not float32.
        tf.errors.InvalidArgumentError: When run, if a scale is negative or their number is wrong.

    Reference:
        Sign and 1-bit: Seide et al., "1-Bit Stochastic Gradient Descent", Interspeech 2014;
        Bernstein et al., "signSGD", ICML 2018. Stochastic: Alistarh et al., "QSGD", NeurIPS 2017;
        Wen et al., "TernGrad", NeurIPS 2017 (levels=1). Uniform: Zhou et al., "DoReFa-Net", arXiv
        1606.06160, 2016. Natural: Horváth et al., "Natural Compression for Distributed Deep
        Learning", arXiv 1905.10988, 2019. Generator: Salmon et al., "Parallel Random Numbers: As
        Easy as 1, 2, 3", SC 2011.
    """
    tensors = [tf.convert_to_tensor(t) for t in tensors]
    check_list("tensors", tensors)
    check_format(mode, levels, bucket_size)
    if (stream is None) == (mode in RANDOM_MODES):
        raise ValueError(
            f"`stream` must be (seed, worker, step) for the modes {', '.join(RANDOM_MODES)}, and "
            f"None for the others. Received: stream={stream} for mode {mode!r}."
        )
    scales = tf.convert_to_tensor(scales, tf.float32)
    stream = tf.convert_to_tensor([0, 0, 0] if stream is None else stream, tf.int32)
    if runs_natively(tensors):
        message, remainders = native.load().redsync_quantize(
            tensors=tensors, scales=scales, stream=stream, M=len(tensors) if errors else 0,
            mode=mode, levels=levels, bucket_size=bucket_size or 0,
        )  # fmt: skip
    else:
        message, remainders = reference.quantize(
            tensors, scales, stream, mode=mode, levels=levels, bucket_size=bucket_size,
            errors=errors,
        )  # fmt: skip
    return Quantized(message, list(remainders))


def dequantize_sum(
    messages: tf.Tensor,
    like: Sequence[tf.Tensor],
    *,
    mode: str,
    levels: int = 1,
    bucket_size: int | None = None,
) -> list[tf.Tensor]:
    """Sum the messages of all workers, in the order of the ranks.

    Messages whose flag is 0 are ignored.

    Args:
        messages: int32 [P, W]; row r is the message of the worker of rank r.
        like: N float32 tensors of the shapes of the results. Their values are ignored; the native
            op reuses their buffers if no other op needs them.
        mode: As given to `quantize`.
        levels: As given to `quantize`.
        bucket_size: As given to `quantize`.

    Returns:
        N float32 tensors of the shapes of `like`: sums over the workers.

    Raises:
        ValueError: If the list is empty, the mode is unknown, or levels or bucket size do not suit
            it.
        TypeError: If `like` is not float32.
        tf.errors.InvalidArgumentError: When run, if messages have a wrong length or an invalid
            flag, scale or code; the error names the field, rank, tensor and value.
    """
    like = [tf.convert_to_tensor(t) for t in like]
    check_list("like", like)
    check_format(mode, levels, bucket_size)
    messages = tf.convert_to_tensor(messages, tf.int32)
    if runs_natively([messages, *like]):
        return native.load().redsync_dequantize_sum(
            messages=messages, like=like, mode=mode, levels=levels, bucket_size=bucket_size or 0
        )
    return reference.dequantize_sum(
        messages, like, mode=mode, levels=levels, bucket_size=bucket_size
    )


def bucketed(tensor: tf.Tensor, size: int, bucket_size: int | None) -> tf.Tensor:
    """Return a tensor of `size` elements as `[buckets, bucket_size]`, padded with zeros.

    The result has one row if `bucket_size` is `None`.
    """
    vector = tf.reshape(tensor, [-1])
    if bucket_size is None:
        return vector[tf.newaxis]
    vector = tf.pad(vector, [[0, -size % bucket_size]])
    return tf.reshape(vector, [-(-size // bucket_size), bucket_size])
