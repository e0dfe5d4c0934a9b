"""Sums sparse blocks and keeps the largest sums, for reduce-scatter methods."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from tf_redsync.ops import native
from tf_redsync.ops.codec_checks import check_ints, check_list
from tf_redsync.ops.limits import MAX_COUNT, MAX_WORD
from tf_redsync.ops.native import runs_natively
from tf_redsync.ops.reference import merging as reference


class Merged(NamedTuple):
    """The result of `sparse_merge`; indices ascend, unused slots hold 0.

    Attributes:
        indices: List of int32 vectors [k_i], the bits of the unsigned positions of kept sums.
        values: List of float32 vectors [k_i], the kept sums.
        counts: int32 [N], the numbers of kept sums.
        dropped_indices: List of int32 vectors [P * slots_i], the positions of the other sums.
        dropped_values: List of float32 vectors [P * slots_i], the other sums, which belong to the
            residual.
        dropped_counts: int32 [N], the numbers of the other sums.
    """

    indices: list[tf.Tensor]
    values: list[tf.Tensor]
    counts: tf.Tensor
    dropped_indices: list[tf.Tensor]
    dropped_values: list[tf.Tensor]
    dropped_counts: tf.Tensor


def sparse_merge(
    indices: Sequence[tf.Tensor],
    values: Sequence[tf.Tensor],
    counts: tf.Tensor,
    *,
    sizes: Sequence[int],
    k: Sequence[int],
) -> Merged:
    """Sum the sparse blocks of P workers and keep the `k` sums of largest magnitude.

    The values of one position are added in float32, in the order of the ranks, starting from 0.
    Among sums of equal magnitude the lower index comes first. Sums of 0 are neither kept nor
    dropped. The kept and the dropped sums add up to the sum of the blocks.

    Args:
        indices: N int32 tensors [P, slots_i], the bits of unsigned positions; the first
            `counts[r, i]` of row r ascend strictly.
        values: N float32 tensors [P, slots_i].
        counts: int32 [P, N].
        sizes: Number of elements of the N tensors, Python ints below 2^32.
        k: Number of sums to keep, Python ints; 0 drops all.

    Returns:
        A `Merged`.

    Raises:
        ValueError: If a list is empty or has a wrong length, or a value is out of range.
        TypeError: If indices are not int32, or values are not float32.
        tf.errors.InvalidArgumentError: When run, if counts or indices are out of range, indices do
            not ascend, or values are non-finite; the error names field, rank, tensor and value.

    Reference:
        Zhao et al., "SparDL: Distributed Deep Learning Training with Efficient Sparse
        Communication", ICDE 2024.
    """
    indices = [tf.convert_to_tensor(t) for t in indices]
    values = [tf.convert_to_tensor(t) for t in values]
    check_list("indices", indices, tf.int32)
    check_list("values", values, tf.float32)
    if len(values) != len(indices):
        raise ValueError(
            "`values` must have one tensor per tensor of `indices`. Received: "
            f"{len(values)} values, {len(indices)} indices."
        )
    sizes = check_ints("sizes", sizes, 0, MAX_WORD, len(indices))
    k = check_ints("k", k, 0, MAX_COUNT, len(indices))
    counts = tf.convert_to_tensor(counts, tf.int32)
    merge = reference.merge
    if runs_natively([*indices, *values]):
        merge = native.load().redsync_sparse_merge
    return Merged(*merge(indices=indices, values=values, counts=counts, sizes=sizes, k=k))
