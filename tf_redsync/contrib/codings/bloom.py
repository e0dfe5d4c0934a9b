"""Bloom filters of positions, with DeepReduce's policies for false positives."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import tensorflow as tf
from typing_extensions import override

from tf_redsync import checks
from tf_redsync.codings.base import Capacity, CodedPositions, IndexCoding, used
from tf_redsync.config import register
from tf_redsync.ops.codecs import Positions, bloom_build, bloom_parameters, bloom_query
from tf_redsync.ops.limits import MAX_COUNT
from tf_redsync.ops.message_layout import unsigned
from tf_redsync.ops.reference.bloom import probes
from tf_redsync.ops.wire import (
    as_row,
    cut,
    joined,
    leading,
    only_row,
)

POLICIES = ("p0", "p1", "p2", "leftmost")


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class Bloom(IndexCoding):
    """Bloom filters of positions, with a policy for their false positives.

    The code has one filter per tensor: `[filters]`, and policies other than p0 send `[counts]`
    before them.

    Burton H. Bloom (1970), "Space/time trade-offs in hash coding with allowable errors", CACM 13;
    for gradients, with the policies below: Xu et al. (2021), "DeepReduce", NeurIPS.

    For r positions among n, a filter with false positive rate e has r log2(1 / e) / ln 2 bits and
    log2(1 / e) hashes. Sender and receivers query it for every element. The set P of positives has
    the r elements and about e (n - r) false positives. The policy selects the positives that get
    values:

        p0         all of P, so |P| values
        p1         r random elements of P, different ones in every step
        p2         r elements of P by conflict sets: a set has the elements of P that set one bit of
                   the filter; from the smallest set on, each set contributes one new element
        leftmost   the first r elements of P from a random start, a different one in every step

    All values are the true values of these elements, so the total has no wrong ones. Selected
    elements without a value stay in the residual. If one mean replaces all values of a tensor,
    false positives get it too, and error feedback compensates it.

    A position costs 1.44 log2(1 / e) bits, which for small e is more than in a Golomb code, and p0
    also sends values for false positives.

    Differences from the paper

    * P1 draws different elements in every step, because those of a fixed seed would repeat. Hash
      functions change in every step too.
    * Leftmost starts at a different element in every step and wraps around. From a fixed start, a
      tensor's last elements would never be sent, because false positives always precede them.
    * Messages have capacity for the expected number of false positives plus six standard
      deviations; elements beyond it stay in the residual.

    Args:
        policy: `"p0"`, `"p1"`, `"p2"` or `"leftmost"`.
        false_positive_rate: e, in (0, 1). `None`: a tenth of the density.

    Raises:
        ValueError: If an argument is out of range; the message names it.
    """

    policy: str = "p0"
    false_positive_rate: float | None = None

    lossless: ClassVar[bool] = False
    paper: ClassVar[str] = "Xu, Kostopoulou, Dutta, Li, Ntoulas, Kalnis 2021"

    def __post_init__(self) -> None:
        checks.choice("policy", self.policy, POLICIES)
        rate = self.false_positive_rate
        if rate is not None:
            bounds: dict[str, Any] = {"low": 0.0, "high": 1.0, "low_open": True, "high_open": True}
            checks.real("false_positive_rate", rate, **bounds)

    @override
    def received(self, capacity: Capacity) -> Capacity:
        """Return the capacity of decoded positions, with p0 including false positives."""
        if self.policy != "p0":
            return capacity
        return Capacity(capacity.sizes, tuple(map(self._positives, capacity.sizes, capacity.slots)))

    @override
    def words(self, capacity: Capacity) -> Any:
        return self._heads(capacity) + sum(self._filters(capacity).words)

    @override
    def encode(
        self, indices: Sequence[tf.Tensor], counts: tf.Tensor, capacity: Capacity, seed: tf.Tensor
    ) -> CodedPositions:
        layout = self._filters(capacity)
        filters = bloom_build(
            indices, counts, seed, sizes=capacity.sizes, words=layout.words, hashes=layout.hashes
        )
        words = joined(counts[: self._heads(capacity)], filters)
        positions = self.decode(as_row(words), capacity, seed)
        positives = [only_row(at) for at in positions.indices]
        return CodedPositions(words, positives, only_row(positions.counts))

    @override
    def decode(self, words: tf.Tensor, capacity: Capacity, seed: tf.Tensor) -> Positions:
        layout = self._filters(capacity)
        if max(capacity.sizes) > MAX_COUNT:
            raise ValueError(
                f"`indices=Bloom(...)` takes tensors of at most {MAX_COUNT} elements. "
                f"Received: sizes={capacity.sizes}. Use RawIndices, or split the variable."
            )
        lengths = [self._heads(capacity), sum(layout.words)]
        heads, filters = cut(words, lengths)
        places = list(map(self._positives, capacity.sizes, capacity.slots))
        positives = bloom_query(
            filters,
            seed,
            sizes=capacity.sizes,
            slots=places,
            words=layout.words,
            hashes=layout.hashes,
        )
        if self.policy == "p0":
            return positives
        counts = tf.minimum(heads, positives.counts)
        indices = []
        for i, (at, slots) in enumerate(zip(positives.indices, capacity.slots, strict=True)):
            available, count = positives.counts[:, i : i + 1], counts[:, i : i + 1]
            chosen = self._ordered(at, available, seed, i, capacity)[:, :slots]
            valid = leading(count, slots)
            indices.append(used(tf.sort(tf.where(valid, chosen, tf.int32.max)), count))
        return Positions(indices, counts)

    def _ordered(
        self, at: tf.Tensor, count: tf.Tensor, seed: tf.Tensor, number: int, capacity: Capacity
    ) -> tf.Tensor:
        """Return the positives of tensor `number` by priority, int32 `[workers, slots]`."""
        noise = draws(seed, number, at.shape[1])
        if self.policy == "leftmost":
            first = tf.cast(noise[:1] * tf.cast(count, tf.float32), tf.int32)
            place = (first + tf.range(at.shape[1])) % tf.maximum(count, 1)
            return tf.gather(at, place, batch_dims=1)
        if self.policy == "p2":
            layout, limit = self._filters(capacity), capacity.slots[number]
            words, hashes = layout.words[number], layout.hashes[number]
            return by_conflicts(at, count, noise, seed, words=words, hashes=hashes, limit=limit)
        order = tf.argsort(tf.where(leading(count, at.shape[1]), noise, 2.0), stable=True)
        return tf.gather(at, order, batch_dims=1)

    def _rate(self, size: int, slots: int) -> float:
        if self.false_positive_rate is not None:
            return self.false_positive_rate
        return min(max(0.1 * slots / max(size, 1), 1e-9), 0.5)

    def _positives(self, size: int, slots: int) -> int:
        """Return the capacity for positives: their mean plus six standard deviations."""
        words, hashes = bloom_parameters(slots, self._rate(size, slots))
        load = hashes * max(slots, 1) / (32 * words)
        held = 1.0 - math.exp(-load)  # fraction of bits that are set, `spread` its deviation
        spread = math.sqrt(max(math.exp(-load) - (1 + load) * math.exp(-2 * load), 0) / 32 / words)
        # The actual rate exceeds the requested one, because the number of hashes is rounded.
        false = held**hashes * max(size - slots, 0)
        deviation = math.sqrt(false + (false * hashes * spread / held) ** 2)
        return min(slots + math.ceil(false + 6 * deviation) + 4, size)

    def _heads(self, capacity: Capacity) -> int:
        """Return the number of words for counts of selected positions; p0 needs none."""
        return 0 if self.policy == "p0" else len(capacity.slots)

    def _filters(self, capacity: Capacity) -> _Filters:
        """Return the sizes of the filters of a bucket."""
        both = [
            bloom_parameters(slots, self._rate(size, slots))
            for size, slots in zip(capacity.sizes, capacity.slots, strict=True)
        ]
        return _Filters([words for words, _ in both], [hashes for _, hashes in both])


class _Filters(NamedTuple):
    """Words and hashes of the filter of each tensor, in the form that the ops take."""

    words: list[int]
    hashes: list[int]


def draws(seed: tf.Tensor, number: int, count: int) -> tf.Tensor:
    """Return uniform numbers for tensor `number`, equal on all workers, new in every step."""
    key = tf.stack([tf.convert_to_tensor(seed, tf.int32), tf.constant(number)])
    return tf.random.stateless_uniform([count], key, alg="philox")


def by_conflicts(
    at: tf.Tensor,
    count: tf.Tensor,
    noise: tf.Tensor,
    seed: tf.Tensor,
    *,
    words: int,
    hashes: int,
    limit: int,
) -> tf.Tensor:
    """Order positives by policy P2 of DeepReduce, the untaken ones last.

    Xu et al. (2021), "DeepReduce", NeurIPS, policy P2. For every bit j of the filter, the conflict
    set C_j has the positives that set bit j. At least one element of C_j is a true positive, since
    the bit is set. From the smallest set on, and among equal sizes from the lowest bit on, take a
    random element of C_j that was not taken before, until enough are taken. A true positive is
    alone in a set more often than a false one. Each choice depends on the ones before, so the
    policy is slow; it serves for comparisons.

    Args:
        at: int32 `[workers, slots]`, positives of the filter of each worker.
        count: int32 `[workers, 1]`, number of positives.
        noise: float32 `[slots]`; the element of a set with the smallest value is taken.
        seed: As given to `bloom_build`.
        words: Words of the filter.
        hashes: Hashes of the filter.
        limit: Maximum number of elements to take.

    Returns:
        int32 `[workers, slots]`.
    """

    def ordered(row: tf.Tensor) -> tf.Tensor:
        return _by_conflicts(row[0], row[1][0], noise, seed, words, hashes, limit)

    return tf.map_fn(
        ordered, (at, count), fn_output_signature=tf.TensorSpec(at.shape[1:], tf.int32)
    )


def _by_conflicts(
    at: tf.Tensor,
    count: tf.Tensor,
    noise: tf.Tensor,
    seed: tf.Tensor,
    words: int,
    hashes: int,
    limit: int,
) -> tf.Tensor:
    slots = at.shape[0]
    element, bit = _incidences(at, count, noise, seed, words, hashes)
    sizes = tf.math.bincount(bit, minlength=32 * words, maxlength=32 * words)
    first = tf.cumsum(sizes, exclusive=True)
    sets = tf.argsort(tf.where(sizes > 0, sizes, tf.int32.max), stable=True)
    used_sets = tf.math.count_nonzero(sizes, dtype=tf.int32)

    def take(number: tf.Tensor, taken: tf.Tensor, when: tf.Tensor) -> Any:
        begin = first[sets[number]]
        members = element[begin : begin + sizes[sets[number]]]
        left = tf.boolean_mask(members, tf.gather(when, members) >= slots)[:1]
        now = tf.fill(tf.shape(left), taken)
        when = tf.tensor_scatter_nd_update(when, left[:, tf.newaxis], now)
        return number + 1, taken + tf.size(left), when

    def is_incomplete(number: tf.Tensor, taken: tf.Tensor, when: tf.Tensor) -> Any:
        return (number < used_sets) & (taken < limit)

    start = (tf.constant(0), tf.constant(0), slots + tf.range(slots))
    when = tf.while_loop(is_incomplete, take, start)[2]
    return tf.gather(at, tf.argsort(when, stable=True))


def _incidences(
    at: tf.Tensor, count: tf.Tensor, noise: tf.Tensor, seed: tf.Tensor, words: int, hashes: int
) -> tuple[tf.Tensor, tf.Tensor]:
    """Return the distinct pairs of a positive's slot and a bit it sets, by bit, then by noise."""
    places = tf.argsort(noise[:count], stable=True)
    positions = unsigned(tf.gather(at, places))
    bits = tf.stack(list(probes(positions, seed, words, hashes)))  # [hashes, count]
    number = tf.size(places, tf.int64)
    pairs = tf.unique(tf.sort(tf.reshape(bits * number + tf.range(number), [-1])))[0]
    number = tf.maximum(number, 1)
    return tf.gather(places, pairs % number), tf.cast(pairs // number, tf.int32)
