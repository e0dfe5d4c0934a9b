"""Golomb-Rice codes of ascending positions, lossless and near the entropy.

A message is a vector of int32 words, for every tensor [count, low bits, bitmap]. A position is
coded by its gap d >= 1 to the previous one (the first one: to -1): the b low bits of d - 1 (see
`bits.packed`), and in the bitmap (d - 1) >> b zeros and a one. Bit t is bit t mod 32 of word
t div 32. Both parts have capacity for any positions, which is little more than the average length.
All workers can compute their lengths, and no message can overflow. Decoding lists the ones and sums
the low bits; it runs in parallel, because no code begins where another ends.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tf_redsync.ops import native
from tf_redsync.ops.codec_checks import Positions, check_ints, check_list
from tf_redsync.ops.limits import MAX_COUNT, MAX_WORD
from tf_redsync.ops.message_layout import golomb_sections
from tf_redsync.ops.native import runs_natively
from tf_redsync.ops.reference import golomb as reference

MAX_RICE = 30


def golomb_parameter(size: int, slots: int) -> int:
    """Return the number of low bits that minimizes the longest code of `slots` positions.

    It differs by at most 1 from the optimum for random positions (Sattler, Wiedemann, Müller and
    Samek, "Sparse Binary Compression", IJCNN 2019).

    Args:
        size: Number of elements: positions are below it.
        slots: Number of positions.

    Example:
        >>> golomb_parameter(1_000_000, 10_000), golomb_parameter(1_000_000, 1_000)
        (6, 9)
    """
    return min(range(MAX_RICE + 1), key=lambda rice: _worst_bits(size, slots, rice))


def golomb_words(sizes: Sequence[int], slots: Sequence[int], rice: Sequence[int]) -> int:
    """Return the length of a Golomb message in 32-bit words.

    Example:
        >>> golomb_words([10_000], [100], [6])  # 1 + ceil(100 * 6 / 32) + ceil((100 + 154) / 32)
        28
    """
    return sum(_golomb_part(*layout) for layout in zip(sizes, slots, rice, strict=True))


def golomb_encode(
    indices: Sequence[tf.Tensor],
    counts: tf.Tensor,
    *,
    sizes: Sequence[int],
    rice: Sequence[int],
) -> tf.Tensor:
    """Code ascending positions by the gaps between them.

    Args:
        indices: N int32 vectors [slots_i], the bits of unsigned positions; the first `counts[i]`
            ascend strictly.
        counts: int32 [N].
        sizes: Number of elements of the N tensors, Python ints in [slots_i, 2^32).
        rice: Number of low bits of a gap, in [0, 30]; see `golomb_parameter`.

    Returns:
        int32 [W], the message; see the module's docstring.

    Raises:
        ValueError: If the list is empty, or sizes or rice have a wrong length or value.
        TypeError: If indices are not int32.
        tf.errors.InvalidArgumentError: When run, if a count or an index is out of range, or indices
            do not ascend.

    Reference:
        Golomb, "Run-length encodings", IEEE Trans. Inf. Theory, 1966; for gradients: Sattler et
        al., "Sparse Binary Compression", IJCNN 2019.
    """
    indices = [tf.convert_to_tensor(t) for t in indices]
    check_list("indices", indices, tf.int32)
    counts = tf.convert_to_tensor(counts, tf.int32)
    sizes = check_ints("sizes", sizes, 0, MAX_WORD, len(indices))
    rice = check_ints("rice", rice, 0, MAX_RICE, len(indices))
    for tensor, size, low_bits in zip(indices, sizes, rice, strict=True):
        if tensor.shape.num_elements() is not None:
            _golomb_part(size, tensor.shape.num_elements(), low_bits)
    if runs_natively(indices):
        return native.load().redsync_golomb_encode(
            indices=indices, counts=counts, sizes=sizes, rice=rice
        )
    return reference.golomb_encode(indices, counts, sizes=sizes, rice=rice)


def golomb_decode(
    messages: tf.Tensor,
    *,
    sizes: Sequence[int],
    slots: Sequence[int],
    rice: Sequence[int],
) -> Positions:
    """Decode the positions of all workers.

    Args:
        messages: int32 [P, W]; row r is the message of the worker of rank r.
        sizes: As given to `golomb_encode`.
        slots: Lengths of the vectors of indices given to `golomb_encode`, Python ints.
        rice: As given to `golomb_encode`.

    Returns:
        `Positions`.

    Raises:
        ValueError: If a list has a wrong length, or a value is out of range.
        tf.errors.InvalidArgumentError: When run, if messages have a wrong length or an invalid
            count, number of ones or index; the error names the field, rank, tensor and value.
    """
    slots = check_ints("slots", slots, 0, MAX_COUNT)
    sizes = check_ints("sizes", sizes, 0, MAX_WORD, len(slots))
    rice = check_ints("rice", rice, 0, MAX_RICE, len(slots))
    golomb_words(sizes, slots, rice)
    layout = {"sizes": sizes, "slots": slots, "rice": rice}
    messages = tf.convert_to_tensor(messages, tf.int32)
    if runs_natively([messages]):
        return Positions(
            *native.load().redsync_golomb_decode(messages=messages, N=len(slots), **layout)
        )
    return Positions(*reference.golomb_decode(messages, **layout))


def _worst_bits(size: int, slots: int, rice: int) -> int:
    """Return the bits of the longest code: rice + 1 per position, and a zero per 2^rice skipped."""
    return slots * (rice + 1) + ((size - slots) >> rice)


def _golomb_part(size: int, slots: int, rice: int) -> int:
    """Return the words of one tensor's part of a Golomb message."""
    words = sum(golomb_sections(size, slots, rice))
    if slots > size or 32 * words > MAX_COUNT:
        raise ValueError(
            "`slots` must be at most `sizes`, and the code of a tensor below 2^31 bits. Received: "
            f"slots={slots}, size={size}, rice={rice}. Increase `rice` for sparse positions."
        )
    return 1 + words
