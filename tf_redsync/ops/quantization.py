"""Quantisation to codes of a few bits, and the sum of what several workers sent.

One message layout and one decoder serve the sign methods (1 bit an element), two-bit ternary
codes, QSGD, TernGrad, DoReFa and natural compression. A message is a vector of int32 words:

    [flag] [scales of tensor 0, of tensor 1, ..] [codes of tensor 0] [codes of tensor 1] ..

`flag` is 1 if all elements and scales are finite, else 0 (and then every other word is 0 too);
what mode "natural" rounds up to 2^128 is not finite either.
Scales are float32, bit-cast. Code j of a tensor occupies the bits [j * b, (j + 1) * b) of the
tensor's words, bit 0 being the lowest of the first word; codes of b bits may cross words, so that
a tensor of n elements takes ceil(n * b / 32) words. The rest of the last word is 0.
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
    """Result of `quantize`.

    Attributes:
        message: int32 vector, what this worker sends; see the module's docstring for the layout.
        errors: list of float32 tensors, what the message leaves out, `tensor - decoded`; empty
            unless asked for. Unspecified if the message's flag is 0.
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
    """Codes every element with a few bits.

    The values that the codes of an element x stand for are

        "sign"        c if x >= 0, else -c. Zero is positive.
        "two_level"   c1 if x >= 0, else c0; two scales (c0, c1) a bucket, of any sign.
        "threshold"   c if x >= c, -c if x <= -c, else 0.
        "stochastic"  sign(x) * level * (c / levels) with y = (|x| / c) * levels, at most `levels`,
                      and level = floor(y) + [u < y - floor(y)]: y on average. 0 if c is 0.
        "uniform"     (2 * code - levels) * (c / levels) with y = (x / c + 1) * (levels / 2), in
                      [0, levels], and code = floor(y) + [u < y - floor(y)]: levels + 1 values
                      from -c to c, x on average if |x| <= c. 0 if c is 0.
        "natural"     one of the two powers of two around |x|, with the sign of x: x on average.
                      23 random bits, those of u but for its last one, are added to the mantissa of
                      the float32, which is cleared then. The code is twice the exponent that is
                      left, with its bias of 127, plus the bit of the sign. There is no c. What is
                      below 2^-126 becomes 0 or 2^-126, and nothing may become 2^128.

    `c` is the scale of the element's bucket. All arithmetic is float32 in the order written. `u` is
    uniform in [0, 1) with 24 bits, from the counter-based generator Philox4x32-10: with `stream` =
    (seed, worker, step), element j of tensor i gets `(word >> 8) * 2^-24`, where word is number
    j mod 4 of the output for the key (seed, worker) and the counter (low and high half of j div 4,
    i, step). Equal streams give equal messages on every device; let workers have unequal streams.

    Args:
        tensors: N float32 tensors of any shape.
        scales: float32 vector, a scale per bucket, tensor after tensor: `quantized_scales` says how
            many. Not negative, except for "two_level". None, `[]`, for "natural".
        mode: "sign", "two_level", "threshold", "stochastic", "uniform" or "natural".
        levels: for "stochastic": number of values > 0 that an element can take, at most 32767; for
            "uniform": steps from -c to c, at most 65535. 1 for the others.
        bucket_size: elements that share a scale, a multiple of 32; None: all of a tensor.
        stream: int32 [3], needed by "stochastic", "uniform" and "natural" only.
        errors: whether `tensor - decoded` is wanted too, for error feedback.

    Returns:
        A `Quantized`: message (see the module's docstring) and errors. If an element or a scale is
        not finite the message is all zero.

    Raises:
        ValueError: for an empty list, an unknown mode, or levels, bucket size or stream that do not
            fit it.
        TypeError: for tensors that are not float32.
        tf.errors.InvalidArgumentError: when run, for a wrong number of scales or one below 0.

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
    """Adds up the messages of all workers, rank by rank.

    Messages whose flag is 0 contribute nothing.

    Args:
        messages: int32 [P, W], row r is what the worker of rank r sent.
        like: N float32 tensors that give the shapes. Their values are not used; the native op
            writes the results into their buffers if nothing else needs them.
        mode: as given to `quantize`, like the other arguments.
        levels: see `quantize`.
        bucket_size: see `quantize`.

    Returns:
        N float32 tensors of the shapes of `like`: sums over the workers.

    Raises:
        ValueError: for an empty list, an unknown mode, or levels or bucket size that do not fit it.
        TypeError: for `like` that is not float32.
        tf.errors.InvalidArgumentError: when run, for messages of a wrong length, flag, scale (not
            finite, or negative) or code; the error names the field, rank, tensor and value.
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
    """Return a tensor of `size` elements as `[buckets, bucket_size]`, filled up with zeros.

    As one row for `None`.
    """
    vector = tf.reshape(tensor, [-1])
    if bucket_size is None:
        return vector[tf.newaxis]
    vector = tf.pad(vector, [[0, -size % bucket_size]])
    return tf.reshape(vector, [-(-size // bucket_size), bucket_size])
