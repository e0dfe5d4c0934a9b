"""Bloom filters of positions: a compact superset with few false positives.

A message is the int32 words of the filters, tensor after tensor. Position p sets the bits
((a + t * c mod 2^32) * m) >> 32 for t = 0 .. hashes - 1, where m is the filter's number of bits, a
the low and c the high 32 bits, made odd, of h = mix(p + (seed + 1) * 0x9E3779B97F4A7C15), and mix
is the finalizer of SplitMix64. All integers are unsigned; bit t is bit t mod 32 of word t div 32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_redsync.ops import native
from tf_redsync.ops.codec_checks import Positions, check_ints, check_list
from tf_redsync.ops.limits import MAX_COUNT, MAX_WORD
from tf_redsync.ops.native import runs_natively
from tf_redsync.ops.reference import bloom as reference

MAX_HASHES, MAX_WORDS = 64, 2**27 - 1


def bloom_parameters(count: int, false_positive_rate: float) -> tuple[int, int]:
    """Return the number of 32-bit words and of hashes of a filter of `count` positions.

    Reference:
        Xu et al., "DeepReduce", NeurIPS 2021: ceil(log2(1 / rate)) hashes and
        count * log2(1 / rate) / ln 2 bits.

    Example:
        >>> bloom_parameters(1000, 0.001)
        (450, 10)
    """
    if not 0.0 < false_positive_rate < 1.0:
        raise ValueError(
            "`false_positive_rate` must be in (0, 1). "
            f"Received: false_positive_rate={false_positive_rate}."
        )
    doublings = -math.log2(false_positive_rate)
    words = math.ceil(count * doublings / math.log(2) / 32)
    return max(words, 1), min(math.ceil(doublings), MAX_HASHES)


def bloom_build(
    indices: Sequence[tf.Tensor],
    counts: tf.Tensor,
    seed: tf.Tensor | int,
    *,
    sizes: Sequence[int],
    words: Sequence[int],
    hashes: Sequence[int],
) -> tf.Tensor:
    """Return Bloom filters of positions.

    Args:
        indices: N int32 vectors [slots_i], the bits of unsigned positions, the first `counts[i]`
            valid, in any order.
        counts: int32 [N].
        seed: int32 scalar, the seed of the hashes; the same on all workers.
        sizes: Number of elements of the N tensors, Python ints below 2^32.
        words: Number of 32-bit words of every filter, at least 1; see `bloom_parameters`.
        hashes: Number of bits that a position sets, in [1, 64].

    Returns:
        int32 [sum of words], the concatenated filters; see the module's docstring.

    Raises:
        ValueError: If the list is empty, or sizes, words or hashes have a wrong length or value.
        TypeError: If indices are not int32.
        tf.errors.InvalidArgumentError: When run, if a count or an index is out of range.

    Reference:
        Bloom, "Space/time trade-offs in hash coding with allowable errors", CACM 1970; Kirsch and
        Mitzenmacher, "Less hashing, same performance", ESA 2006; for gradients: Xu et al.,
        "DeepReduce", NeurIPS 2021.
    """
    indices = [tf.convert_to_tensor(t) for t in indices]
    check_list("indices", indices, tf.int32)
    layout = _filter_layout(sizes, words, hashes, len(indices))
    build = reference.bloom_build
    if runs_natively(indices):
        build = native.load().redsync_bloom_build
    return build(
        indices=indices, counts=tf.convert_to_tensor(counts, tf.int32),
        seed=tf.convert_to_tensor(seed, tf.int32), **layout,
    )  # fmt: skip


def bloom_query(
    filters: tf.Tensor,
    seed: tf.Tensor | int,
    *,
    sizes: Sequence[int],
    slots: Sequence[int],
    words: Sequence[int],
    hashes: Sequence[int],
) -> Positions:
    """Return the positions in Bloom filters, false positives included.

    Args:
        filters: int32 [P, sum of words]; row r has the filters of the worker of rank r.
        seed: As given to `bloom_build`.
        sizes: As given to `bloom_build`.
        slots: Largest number of positions to return; further ones are dropped.
        words: As given to `bloom_build`.
        hashes: As given to `bloom_build`.

    Returns:
        `Positions`: the first `slots` positives among [0, size), ascending.

    Raises:
        ValueError: If a list has a wrong length, or a value is out of range.
        tf.errors.InvalidArgumentError: When run, if the filters have a wrong length.
    """
    slots = check_ints("slots", slots, 0, MAX_COUNT)
    layout = {"slots": slots, **_filter_layout(sizes, words, hashes, len(slots))}
    filters = tf.convert_to_tensor(filters, tf.int32)
    seed = tf.convert_to_tensor(seed, tf.int32)
    if runs_natively([filters]):
        outputs = native.load().redsync_bloom_query(
            filters=filters, seed=seed, N=len(slots), **layout
        )
    else:
        outputs = reference.bloom_query(filters, seed, **layout)
    return Positions(*outputs)


def _filter_layout(sizes: Any, words: Any, hashes: Any, length: int) -> dict[str, tuple[int, ...]]:
    return {
        "sizes": check_ints("sizes", sizes, 0, MAX_WORD, length),
        "words": check_ints("words", words, 1, MAX_WORDS, length),
        "hashes": check_ints("hashes", hashes, 1, MAX_HASHES, length),
    }
