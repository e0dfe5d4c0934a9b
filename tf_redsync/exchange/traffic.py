"""The traffic of an exchange: kinds and bytes of its collectives, by formula or dry run."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Generator, Sequence
from typing import Any

import tensorflow as tf

from tf_redsync.exchange import driver
from tf_redsync.exchange.context import Context
from tf_redsync.exchange.layout import BucketLayout
from tf_redsync.exchange.method import Exchange, initial_state
from tf_redsync.exchange.requests import AllGather, AllReduce, AllToAll, PairGather, Request
from tf_redsync.ops import wire

KINDS: dict[type, str] = {
    AllGather: "all_gather",
    AllReduce: "all_reduce",
    AllToAll: "all_to_all",
    PairGather: "pair_gather",
}


@dataclasses.dataclass(frozen=True)
class Message:
    """The traffic of one collective.

    Attributes:
        kind: `"all_gather"`, `"all_reduce"`, `"all_to_all"` or `"pair_gather"`.
        sent: Bytes that one worker sends; see `driver.sent_bytes`.
    """

    kind: str
    sent: float


Steps = tuple[tuple[Message, ...], ...]  # by step, in the order of the collectives


def messages(method: Any, layout: BucketLayout, phase: str = "exchange") -> Steps:
    """Return the collectives of one period of an exchange (`Traits.period`), after warm-ups.

    Uses the method's formula if it has one. Otherwise traces a dry run with `layout.workers`
    workers, once for all buckets of equal shapes.

    Args:
        method: The method.
        layout: The bucket.
        phase: `"exchange"`, or `"dense_exchange"`.

    Returns:
        For each step of the period, its collectives.
    """
    if not layout.specs:
        return ((),) * method.traits.period
    # The name decides which tensors of rank 2 or more are biases or norms.
    specs = [
        dataclasses.replace(s, name="bias" if s.is_bias_or_norm else "", position=i)
        for i, s in enumerate(layout.specs)
    ]
    return _messages(method, dataclasses.replace(layout, specs=tuple(specs), index=0), phase)


@functools.lru_cache(maxsize=4096)
def _messages(method: Any, layout: BucketLayout, phase: str) -> Steps:
    numbers = [tf.int64.max - n for n in reversed(range(method.traits.period))]
    known = [method.payloads(layout, n) if _has_formula(method, phase) else None for n in numbers]
    formulas = [payloads for payloads in known if payloads is not None]
    if len(formulas) < len(numbers):
        return dry_run(method, layout, numbers, phase)
    factors = {kind: driver.COLLECTIVES[kind].factor(layout.workers) for kind in KINDS}
    return tuple(
        tuple(Message(KINDS[kind], factors[kind] * size) for kind, size in payloads)
        for payloads in formulas
    )


def averages(method: Any, layout: BucketLayout) -> tuple[Message, ...]:
    """Return the collective of `SyncSchedule.averages`, which runs every `average_every` steps."""
    size = len(method.sync_schedule.averages) * sum(s.bytes for s in layout.specs)
    factor = driver.COLLECTIVES[AllReduce].factor(layout.workers)
    return (Message(KINDS[AllReduce], factor * size),) if size else ()


def _has_formula(method: Any, phase: str) -> bool:
    """Return whether `payloads` describes the exchange, which a subclass may have overridden."""
    defined = ({"exchange", "payloads"} & set(vars(cls)) for cls in type(method).__mro__)
    return phase == "exchange" and "payloads" in next(names for names in defined if names)


def dry_run(
    method: Any, layout: BucketLayout, numbers: Sequence[int], phase: str = "exchange"
) -> Steps:
    """Return the collectives of an exchange in each step, from traces that are never executed.

    Args:
        method: The method.
        layout: The bucket.
        numbers: The steps to trace.
        phase: Name of the method's generator.
    """
    steps = []
    with tf.Graph().as_default():
        for number in numbers:
            network, seen = DryRun(layout.workers), list[Message]()
            grads = [tf.zeros(s.shape, tf.float32) for s in layout.specs]
            ctx = Context(layout, network.rank(), tf.constant(number, tf.int64))
            state = initial_state(method, layout)
            exchange = driver.checked(method, getattr(method, phase), grads, state, ctx)
            driver.drive([_recorded(exchange, layout.workers, seen)], network)
            steps.append(tuple(seen))
    return tuple(steps)


def _recorded(
    exchange: Exchange, workers: int, seen: list[Message]
) -> Generator[Request, Any, None]:
    """Forward the requests of an exchange, and append each answered one to `seen`."""
    reply = None
    while True:
        try:
            request = exchange.send(reply)
        except StopIteration:
            return
        reply = yield request
        sent = driver.sent_bytes(request, workers)
        seen.append(Message(KINDS[type(request)], float(tf.get_static_value(sent))))


def bytes_sent(steps: Sequence[Sequence[Message]]) -> float:
    """Return the mean bytes per step that one worker sends."""
    return sum(message.sent for seen in steps for message in seen) / len(steps)


@dataclasses.dataclass
class DryRun:
    """A network for traces: answers requests with tensors of the right shapes and dtypes.

    Attributes:
        workers: Number of workers to simulate.
        in_branches: See `Network`.
        checksums: See `Network`.
    """

    workers: int
    in_branches: bool = True
    checksums: bool = False

    def rank(self) -> tf.Tensor:
        """Return 0, since bytes do not depend on the rank."""
        return tf.constant(0)

    def all_gather(self, message: tf.Tensor) -> tf.Tensor:
        """Return `message` as if every worker had sent it."""
        return tf.repeat(message[tf.newaxis], self.workers, axis=0)

    def all_reduce(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Return `tensors`."""
        return list(tensors)

    def all_to_all(self, messages: tf.Tensor) -> tf.Tensor:
        """Return `messages`."""
        return messages

    def pair_gather(self, message: tf.Tensor, distance: int) -> tf.Tensor:
        """Return `message` as if the partner of worker 0 had sent it too."""
        return tf.stack([message, message if distance < self.workers else wire.absent(message)])
