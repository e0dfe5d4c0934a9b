"""Formats of quantized messages: modes, and the lengths of their codes and messages.

`quantization.py` defines the values of the codes and the layout of a message.
"""

from __future__ import annotations

from collections.abc import Sequence

from tf_redsync import checks
from tf_redsync.ops.limits import MAX_COUNT

MODES = ("sign", "two_level", "threshold", "stochastic", "uniform", "natural")
RANDOM_MODES = ("stochastic", "uniform", "natural")
MAX_LEVELS = {"stochastic": 32767, "uniform": 65535}  # 16-bit codes; 1 for other modes
MAX_POWER = 2 * 254 + 1  # code of the largest power of two below infinity, with a sign
BUCKET_UNIT = 32  # elements; a bucket starts at a word
MAX_BUCKET = MAX_COUNT  # elements


def max_code(mode: str, levels: int = 1) -> int:
    """Return the largest code; the smallest code is 0."""
    if mode == "natural":
        return MAX_POWER
    return {"sign": 1, "two_level": 1, "uniform": levels}.get(mode, 2 * levels)


def code_bits(mode: str, levels: int = 1) -> int:
    """Return the number of bits of a code.

    1, 2 for "threshold", `ceil(log2(2 * levels + 1))` for "stochastic", `ceil(log2(levels + 1))`
    for "uniform", 9 for "natural".

    Example:
        >>> code_bits("sign"), code_bits("threshold"), code_bits("stochastic", levels=127)
        (1, 2, 8)
        >>> code_bits("uniform", levels=63), code_bits("natural")
        (6, 9)
    """
    check_format(mode, levels, None)
    return max_code(mode, levels).bit_length()


def scales_per_bucket(mode: str) -> int:
    """Return the number of scales of a bucket: 1, 2 for "two_level", 0 for "natural"."""
    return {"two_level": 2, "natural": 0}.get(mode, 1)


def quantized_scales(sizes: Sequence[int], mode: str, bucket_size: int | None = None) -> list[int]:
    """Return the number of scales of each tensor; see `scales_per_bucket`.

    Without `bucket_size` a tensor is one bucket, even if it is empty.

    Example:
        >>> quantized_scales([100, 0], "stochastic", bucket_size=32)
        [4, 0]
        >>> quantized_scales([100, 0], "sign")
        [1, 1]
    """
    check_format(mode, 1, bucket_size)
    buckets = [1 if bucket_size is None else -(-size // bucket_size) for size in sizes]
    return [scales_per_bucket(mode) * n for n in buckets]


def quantized_words(
    sizes: Sequence[int], mode: str, levels: int = 1, bucket_size: int | None = None
) -> int:
    """Return the length in 32-bit words of a message for tensors of these sizes.

    Example:
        >>> quantized_words([1000], "sign")  # flag, scale, 1000 bits
        34
    """
    bits = code_bits(mode, levels)
    codes = sum(-(-size * bits // 32) for size in sizes)
    return 1 + sum(quantized_scales(sizes, mode, bucket_size)) + codes


def check_levels(name: str, value: int) -> None:
    """Check an argument that is a number of levels per sign.

    Raises:
        ValueError: If `value` is not an integer in [1, 32767]; the message has `name`.
    """
    most = MAX_LEVELS["stochastic"]
    checks.integer(name, value, low=1)
    if value > most:
        raise ValueError(f"`{name}` must be at most {most}. Received: {name}={value}")


def check_bucket_size(value: int) -> None:
    """Check an argument `bucket_size`.

    Raises:
        ValueError: If `value` is not a positive multiple of 32 below 2^31.
    """
    checks.integer("bucket_size", value, low=BUCKET_UNIT)
    if value % BUCKET_UNIT or value > MAX_BUCKET:
        raise ValueError(
            f"`bucket_size` must be a multiple of {BUCKET_UNIT}, at most {MAX_BUCKET}. Received: "
            f"bucket_size={value}"
        )


def check_format(mode: str, levels: int, bucket_size: int | None) -> None:
    """Check the arguments of the ops `quantize` and `dequantize_sum`.

    Raises:
        ValueError: If `mode` is unknown, or another argument does not suit it.
    """
    if mode not in MODES:
        raise ValueError(f"`mode` must be among {', '.join(map(repr, MODES))}. Received: {mode!r}.")
    most = MAX_LEVELS.get(mode, 1)
    if not 1 <= levels <= most:
        raise ValueError(
            f"`levels` must be in [1, {most}] for mode {mode!r}. Received: levels={levels}."
        )
    if bucket_size is not None and not (
        1 <= bucket_size <= MAX_BUCKET and bucket_size % BUCKET_UNIT == 0
    ):
        raise ValueError(
            f"`bucket_size` must be a positive multiple of {BUCKET_UNIT}, at most {MAX_BUCKET}, or "
            f"None for one per tensor. Received: bucket_size={bucket_size}."
        )
