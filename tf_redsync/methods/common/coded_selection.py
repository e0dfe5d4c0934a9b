"""Exact top-k in a coded message, for large and small tensors.

`select_and_code` fuses `ops.accumulate_and_select` with `MessageCoding.encode`, for `Golomb`
positions and few-bit values. Its native op keeps the selected elements in a scratch buffer and adds
their quantization errors to the residual in place. `uncode_messages` is `MessageCoding.decode` as a
native op; `ops.decode` then sums the plain messages. Without the native library both are composed
of other ops, with equal bits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Sequence
from typing import Any, NamedTuple

import tensorflow as tf
from typing_extensions import override

from tf_redsync import checks, ops
from tf_redsync.codings.base import Capacity
from tf_redsync.codings.golomb import Golomb, stream_groups
from tf_redsync.codings.message import MessageCoding
from tf_redsync.codings.plain import Half
from tf_redsync.codings.signed_levels import MAX_BITS, SignedLevels
from tf_redsync.exchange import feedback
from tf_redsync.exchange.context import Context
from tf_redsync.exchange.layout import BucketLayout, TensorSpec
from tf_redsync.exchange.method import Payloads
from tf_redsync.exchange.requests import AllGather, Request
from tf_redsync.exchange.traits import Traits
from tf_redsync.methods.common.adam_update import AdamUpdate
from tf_redsync.methods.common.sparsifier import Sparsifier, element_count, sum_messages, too_small
from tf_redsync.ops import native, wire
from tf_redsync.ops.message_layout import MessageLayout
from tf_redsync.ops.native import runs_natively
from tf_redsync.ops.selection import sparse_totals, validated
from tf_redsync.ops.sparse import descended

HALF_BITS = 16
VALUE_BITS = (*range(1, MAX_BITS + 1), HALF_BITS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CodedSelection(Sparsifier):
    """A sparsifier that sends the k largest elements as Golomb-coded positions and few-bit values.

    Other sparsifiers all-reduce biases and norms densely, which would cost more bytes here than
    the coded matrices do. Small tensors therefore share the coded message, at a density of their
    own.

    Args:
        density: Fraction of a tensor's elements that is sent, in (0, 1].
        small_density: Density of small tensors: biases, norms, and tensors of fewer than
            `dense_below` bytes. At least `density` is used. `None`: all-reduce them densely.
        value_bits: Bits per value. 1 is a sign, 2 to 4 add one of 2, 4 or 8 magnitudes, and 16 is
            bfloat16.
        dense_below: Tensors of fewer float32 bytes are small.
    """

    value_bits: int = 1
    small_density: float | None = 0.1

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        checks.integer("value_bits", self.value_bits, low=1)
        if self.value_bits not in VALUE_BITS:
            raise ValueError(
                f"`value_bits` must be one of {VALUE_BITS}; 16 is for bfloat16. Received: "
                f"value_bits={self.value_bits}"
            )
        if self.small_density is not None:
            checks.real("small_density", self.small_density, low=0.0, high=1.0, low_open=True)

    @property
    @override
    def traits(self) -> Traits:
        return dataclasses.replace(
            super().traits,
            # The message already has a coding
            rounds_values=False,
            sends_selected=False,
            notes=self._notes,
        )

    @property
    def _notes(self) -> tuple[str, ...]:
        if self.density < 1.0 or self.value_bits == 16:
            return ()
        return (
            f"{type(self).__name__}(density=1.0) with value_bits={self.value_bits} is sign "
            "compression with error feedback, and not dense training: each element travels as its "
            f"sign and one of {2 ** (self.value_bits - 1)} magnitudes. Dense() is exact; "
            "value_bits=16 sends bfloat16",
        )

    @override
    def refuses(self, spec: TensorSpec) -> str | None:
        return super().refuses(spec) if self.small_density is None else None

    @override
    def k(self, spec: TensorSpec) -> int:
        density = self.density
        if self.small_density is not None and too_small(spec, self.dense_below):
            density = max(density, self.small_density)
        return element_count(density, spec.size)

    @override
    def describe(self, spec: TensorSpec) -> str:
        return f"{self.k(spec)} elements, coded, {self.value_bits}-bit values"

    def message_payloads(self, layout: BucketLayout) -> Payloads:
        """Return the payload of `select_and_deliver`.

        Each method returns it in `payloads`, because a formula counts only beside its `exchange`.
        """
        message_layout = MessageLayout.of(self.capacities(layout))
        capacity = Capacity(tuple(s.size for s in layout.specs), message_layout.capacities)
        words = sum(coding(self.value_bits).lengths(capacity, message_layout))
        return [(AllGather, wire.BYTES_PER_WORD * words)]

    def select_and_deliver(
        self,
        grads: list[tf.Tensor],
        residuals: list[tf.Tensor],
        velocities: list[tf.Tensor],
        ctx: Context,
        total_momentum: float = 0.0,
        **options: Any,
    ) -> Generator[Request, Any, tuple[list[Any], Selected]]:
        """Accumulate, select, all-gather the coded messages, and sum them.

        Use it as `totals, selected = yield from self.select_and_deliver(...)`.

        Args:
            grads: Gradients.
            residuals: Residuals.
            velocities: Velocities; empty without momentum. With `adam` second moments.
            ctx: Context of the exchange.
            total_momentum: Each new residual gains this factor times the sum over workers.
            **options: `momentum`, `nesterov`, `masking` and `adam` of `select_and_code`.

        Returns:
            For each tensor the sum over workers, dense or a `SparseTotal`; and the selection.
        """
        selected = select_and_code(
            grads,
            residuals,
            velocities,
            self.capacities(ctx.layout),
            value_bits=self.value_bits,
            scale=ctx.scale,
            **options,
        )
        messages = yield AllGather(selected.message)
        message_layout, residuals, sums = selected.layout, selected.residuals, None
        plain = uncode_messages(messages, residuals, message_layout, self.value_bits)
        if total_momentum:  # v <- v + total_momentum * total, at the received positions only
            sums = sparse_totals(plain, message_layout)
            rate = tf.constant(-total_momentum)  # `descended` subtracts
            residuals = [descended(v, t, rate) for v, t in zip(residuals, sums, strict=True)]
        totals = sum_messages(ctx.layout, plain, message_layout, residuals, sums)
        return totals, Selected(selected.message, residuals, selected.velocities, message_layout)


class Selected(NamedTuple):
    """Result of `select_and_code`.

    Attributes:
        message: This worker's coded message, int32 vector.
        residuals: New residuals, list of float32 tensors.
        velocities: New velocities, list of float32 tensors; empty without momentum.
        layout: Layout of the message before coding.
    """

    message: tf.Tensor
    residuals: list[tf.Tensor]
    velocities: list[tf.Tensor]
    layout: MessageLayout


def coding(value_bits: int) -> MessageCoding:
    """Return the coding of a message: `Golomb` positions, values in `value_bits` bits each."""
    if value_bits == HALF_BITS:
        return MessageCoding(Golomb(), Half(dtype="bfloat16"))
    return MessageCoding(Golomb(), SignedLevels(bits=value_bits))


def select_and_code(
    grads: Sequence[tf.Tensor],
    residuals: Sequence[tf.Tensor],
    velocities: Sequence[tf.Tensor],
    k: Sequence[int],
    *,
    value_bits: int,
    momentum: float = 0.0,
    nesterov: bool = False,
    masking: bool = True,
    scale: tf.Tensor | float | None = None,
    adam: AdamUpdate | None = None,
) -> Selected:
    """Add gradients to the residuals, and move the k largest elements into a coded message.

    Args:
        grads: As in `ops.accumulate_and_select`.
        residuals: As in `ops.accumulate_and_select`.
        velocities: As in `ops.accumulate_and_select`.
        k: Number of elements to select of each tensor, Python ints.
        value_bits: One of `VALUE_BITS`.
        momentum: As in `ops.accumulate_and_select`.
        nesterov: As in `ops.accumulate_and_select`.
        masking: As in `ops.accumulate_and_select`.
        scale: As in `ops.accumulate_and_select`.
        adam: Adds these updates to the residuals in place of gradients. `velocities` are its second
            moments, which are kept and not masked.

    Returns:
        `Selected`. If an accumulated element is non-finite or has a magnitude of 2^96 or more, the
        message is all zero and the other fields are unspecified.

    Raises:
        ValueError: If lengths, shapes, `value_bits` or the momentum are invalid, or more than
            2^31 - 1 elements are selected.
        TypeError: If `ops.accumulate_and_select` does not accept a dtype.
        tf.errors.InvalidArgumentError: At run time, if `k` is out of range.
    """
    if value_bits not in VALUE_BITS:
        raise ValueError(f"`value_bits` must be one of {VALUE_BITS}. Received: {value_bits}.")
    layout, selectors = MessageLayout.of(k), ["exact"] * len(grads)
    grads, residuals, velocities = validated(
        grads, residuals, velocities, selectors, 1.0 if adam else momentum
    )
    if adam and not (runs_natively(grads) and native.are_on_cpus(grads)):
        return _updates_and_code(grads, residuals, velocities, k, value_bits, scale, adam)
    options: dict[str, Any] = {"momentum": momentum, "nesterov": nesterov, "masking": masking}
    scale = tf.convert_to_tensor(1.0 if scale is None else scale, tf.float32)
    if runs_natively(grads):
        options["U"] = len(velocities)
        return _native_op(grads, residuals, velocities, layout, scale, value_bits, adam, **options)
    options |= {"selectors": selectors, "scale": scale}
    chosen = ops.accumulate_and_select(grads, residuals, velocities, k, **options)
    message, new_residuals = coding(value_bits).encode(chosen.message, chosen.residuals, layout)
    return Selected(message, new_residuals, list(chosen.velocities), layout)


def _updates_and_code(
    grads: Sequence[tf.Tensor],
    residuals: Sequence[tf.Tensor],
    moments: Sequence[tf.Tensor],
    k: Sequence[int],
    value_bits: int,
    scale: tf.Tensor | float | None,
    adam: AdamUpdate,
) -> Selected:
    """Compose the updates and the selection, where the native op does not do both."""
    grads = feedback.scaled([tf.cast(g, tf.float32) for g in grads], scale)
    updates, moments = adam.apply(grads, moments)
    selected = select_and_code(updates, residuals, [], k, value_bits=value_bits)
    return Selected(selected.message, selected.residuals, moments, selected.layout)


def _native_op(
    grads: list[tf.Tensor],
    residuals: list[tf.Tensor],
    velocities: list[tf.Tensor],
    layout: MessageLayout,
    scale: tf.Tensor,
    value_bits: int,
    adam: AdamUpdate | None,
    **options: Any,
) -> Selected:
    options |= adam.arguments() if adam else {"adam": tf.zeros([0, 3])}
    k = layout.capacities
    streams, rice = _streams(Capacity(tuple(g.shape.num_elements() for g in grads), k))
    message, new_residuals, new_velocities = native.load().redsync_select_and_code(
        grads=grads,
        residuals=residuals,
        velocities=velocities,
        scale=scale,
        k=k,
        streams=streams,
        rice=rice,
        value_bits=value_bits,
        **options,
    )
    return Selected(message, new_residuals, new_velocities, layout)


def uncode_messages(
    messages: tf.Tensor, like: Sequence[tf.Tensor], layout: MessageLayout, value_bits: int
) -> tf.Tensor:
    """Decode the messages of all workers to plain messages, as `ops.decode` takes them.

    Args:
        messages: Coded messages of `select_and_code`, int32 `[workers, words]`.
        like: Tensors in the shapes of the gradients.
        layout: Layout of the plain messages, from `select_and_code`.
        value_bits: As in `select_and_code`.

    Returns:
        int32 `[workers, layout.words]`.

    Raises:
        tf.errors.InvalidArgumentError: At run time, if a message has malformed positions.
    """
    if not runs_natively([messages]):
        decoded, _ = coding(value_bits).decode(messages, like, layout)
        return decoded
    sizes = tuple(t.shape.num_elements() for t in like)
    streams, rice = _streams(Capacity(sizes, layout.capacities))
    return native.load().redsync_uncode(
        messages=messages,
        sizes=sizes,
        k=layout.capacities,
        streams=streams,
        rice=rice,
        value_bits=value_bits,
    )


def _streams(capacity: Capacity) -> tuple[list[int], list[int]]:
    """Return the stream number of each tensor, and the Rice parameter of each stream."""
    streams, rice = [0] * len(capacity.slots), []
    for number, group in enumerate(stream_groups(capacity)):
        rice.append(group.rice)
        for i in group.members:
            streams[i] = number
    return streams, rice
