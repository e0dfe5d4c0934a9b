"""Golomb codes of the gaps between positions, with one stream for tensors of similar density."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import tensorflow as tf
from typing_extensions import override

from tf_redsync.codings.base import Capacity, CodedPositions, IndexCoding
from tf_redsync.codings.streams import MAX_STREAM, Stream, too_large
from tf_redsync.config import register
from tf_redsync.ops.codecs import (
    Positions,
    golomb_decode,
    golomb_encode,
    golomb_parameter,
    golomb_words,
)


class Group(NamedTuple):
    """Tensors whose positions share a stream.

    Attributes:
        members: Indices of the tensors, ascending.
        stream: Their stream.
        rice: Number of low bits of a gap, which are stored verbatim.
    """

    members: tuple[int, ...]
    stream: Stream
    rice: int

    @property
    def words(self) -> int:
        """The length of the group's code in words."""
        capacity = self.stream.capacity
        return golomb_words([sum(capacity.sizes)], [sum(capacity.slots)], [self.rice])


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class Golomb(IndexCoding):
    """Golomb codes of the gaps between positions, about 0.5 bits above the entropy.

    One stream for all tensors of similar density: `[count, low bits, bitmap]`.

    Solomon W. Golomb (1966), "Run-length encodings", IEEE Transactions on Information Theory 12;
    for gradients: Sattler, Wiedemann, Müller, Samek (2019), "Sparse Binary Compression", IJCNN,
    arXiv 1805.08768.

    A gap d is coded as the b low bits of d - 1, and as (d - 1) >> b zeros and a one in a bitmap.
    The low bits of all gaps come first, so that each part can be read by itself. The gaps of k
    positions below n add up to at most n, so the code of any positions has at most

        k (1 + b) + ((n - k) >> b) bits,

    0.4 to 0.6 bits per position above the entropy of random positions. Messages have this length,
    for the b that minimizes it. A shorter capacity would suffice on average. But positions in
    embeddings and single layers cluster, so their codes are nearly this long in every step. The
    elements that did not fit would be the same each time.

    Small tensors are often sent at a higher density than large ones and need another b. So each
    density has its own stream of gaps, if that makes the message shorter.

    Example:
        >>> capacity = Capacity((1_000_000, 5_000, 800), (1_000, 500, 80))  # 0.1 %, and twice 10 %
        >>> [group.members for group in stream_groups(capacity)], Golomb().words(capacity)
        ([(1, 2), (0,)], 471)
    """

    paper: ClassVar[str] = "Golomb 1966"

    @override
    def words(self, capacity: Capacity) -> Any:
        return sum(group.words for group in stream_groups(capacity))

    @override
    def encode(
        self, indices: Sequence[tf.Tensor], counts: tf.Tensor, capacity: Capacity, seed: tf.Tensor
    ) -> CodedPositions:
        parts, group_totals, groups = [], [], stream_groups(capacity)
        for members, stream, _ in groups:
            group_counts = tf.gather(counts, members)
            parts.append(stream.merged([indices[i] for i in members], group_counts))
            group_totals.append(tf.reduce_sum(group_counts))
        sizes, rice = [g.stream.size for g in groups], [g.rice for g in groups]
        code = golomb_encode(parts, tf.stack(group_totals), sizes=sizes, rice=rice)
        return CodedPositions(code, list(indices), counts)

    @override
    def decode(self, words: tf.Tensor, capacity: Capacity, seed: tf.Tensor) -> Positions:
        groups = stream_groups(capacity)
        merged, counts = golomb_decode(
            words,
            sizes=[g.stream.size for g in groups],
            slots=[g.stream.slots for g in groups],
            rice=[g.rice for g in groups],
        )
        indices: dict[int, tf.Tensor] = {}
        of_tensor: dict[int, tf.Tensor] = {}
        for i, (members, stream, _) in enumerate(groups):
            at, group_counts = stream.separated(merged[i], counts[:, i : i + 1])
            indices.update(zip(members, at, strict=True))
            of_tensor.update(zip(members, tf.unstack(group_counts, axis=1), strict=True))
        order = range(len(capacity.slots))
        return Positions([indices[i] for i in order], tf.stack([of_tensor[i] for i in order], 1))


def stream_groups(capacity: Capacity) -> list[Group]:
    """Return the division of tensors into streams with the shortest message, densest first."""
    by_rice: dict[int, list[int]] = {}
    for i, (size, slots) in enumerate(zip(capacity.sizes, capacity.slots, strict=True)):
        by_rice.setdefault(golomb_parameter(size, slots), []).append(i)
    # Tensors of neighboring densities share a stream if the shorter header outweighs the longer
    # code. Dynamic programming: the best division of a prefix is that of a shorter prefix plus one
    # group.
    ordered = [by_rice[rice] for rice in sorted(by_rice)]
    shortest: list[tuple[int, list[Group]]] = [(0, [])]
    for last in range(1, len(ordered) + 1):
        choices = []
        for first in range(last):
            members = tuple(sorted(itertools.chain(*ordered[first:last])))
            group = _group(members, capacity)
            words, before = shortest[first]
            choices.append((words + group.words, [*before, group]))
        shortest.append(min(choices, key=lambda choice: choice[0]))
    return shortest[-1][1]


def _group(members: tuple[int, ...], capacity: Capacity) -> Group:
    group_capacity = Capacity(
        tuple(capacity.sizes[i] for i in members), tuple(capacity.slots[i] for i in members)
    )
    size = sum(group_capacity.sizes)
    if size > MAX_STREAM:
        raise too_large(size)
    return Group(members, Stream(group_capacity), golomb_parameter(size, sum(group_capacity.slots)))
