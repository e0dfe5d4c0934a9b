"""Drives exchanges: takes what the generators yield to the network and brings back the answers.

This is the only place that both a method and a network pass through, hence the place where bytes
are counted, finiteness is agreed on, and messages get their checksums.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Sequence
from typing import Any, Protocol

import tensorflow as tf

from tf_redsync.exchange import wire
from tf_redsync.exchange.requests import AllGather, AllReduce, AllToAll, PairGather, Request
from tf_redsync.ops.words import moved

Exchange = Generator[Request, Any, Any]
# In the names of ops before an exchange's first answer, and of those after it: by these a profile
# tells them from the rest of a step.
SELECTING, DECODING = "redsync_select", "redsync_decode"


class Network(Protocol):
    """What answers requests; see `collectives.py` for the one over `tf.distribute`.

    Attributes:
        workers: Number of workers.
        in_branches: Whether requests may stand in a branch of a conditional.
        checked: Whether messages carry checksums.
    """

    workers: int
    in_branches: bool
    checked: bool

    def rank(self) -> tf.Tensor:
        """Return this worker's number, int32 scalar in [0, workers)."""

    def all_gather(self, message: tf.Tensor) -> tf.Tensor:
        """Gather `[words]` of every worker into `[workers, words]`."""

    def all_reduce(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Sum every tensor over the workers."""

    def all_to_all(self, messages: tf.Tensor) -> tf.Tensor:
        """Send row r of `[workers, words]` to worker r."""

    def pair_gather(self, message: tf.Tensor, distance: int) -> tf.Tensor:
        """Gather `[words]` of both partners into `[2, words]`; see `PairGather`."""


@dataclasses.dataclass
class DryRun:
    """A network of `workers` that only has the right shapes; for counting bytes in a trace."""

    workers: int
    in_branches: bool = True
    checked: bool = False

    def rank(self) -> tf.Tensor:
        """Return 0: bytes do not depend on the rank."""
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


@dataclasses.dataclass
class Outcome:
    """What a round of exchanges came to.

    Attributes:
        results: The generators' return values, in their order.
        finite: Bool scalar tensor, equal on all workers: everything exchanged was finite.
        bytes_sent: Bytes one worker put on the network: a float, or a float64 scalar tensor where
            the size depends on the step.
        elements: For each generator, how many elements of each tensor this worker has sent, int32,
            where its requests tell.
    """

    results: list[Any]
    finite: tf.Tensor
    bytes_sent: Any
    elements: Sequence[tf.Tensor | None] = ()


def drive(exchanges: Sequence[Exchange], network: Network) -> Outcome:
    """Run generators to their ends, one collective a generator and round.

    Round by round, and in the given order within a round: every worker asks for the same
    collectives in the same order, and no exchange waits for another one's second round.
    """
    results: list[Any] = [None] * len(exchanges)
    elements: list[tf.Tensor | None] = [None] * len(exchanges)
    finite: list[tf.Tensor] = []
    bytes_sent: Any = 0.0
    waiting: list[tuple[int, Exchange, Any]] = [(i, e, None) for i, e in enumerate(exchanges)]
    while waiting:
        next_round = []
        for i, exchange, reply in waiting:
            try:
                with tf.name_scope(SELECTING if reply is None else DECODING):
                    request = exchange.send(reply)
            except StopIteration as stop:
                results[i] = stop.value
                continue
            if isinstance(request, AllGather) and request.sent is not None:
                elements[i] = request.sent
            answer = ask(network, request)
            finite.append(wire.is_finite(request, answer))
            bytes_sent = bytes_sent + wire.sent_bytes(request, network.workers)
            next_round.append((i, exchange, answer))
        waiting = next_round
    agreed = tf.reduce_all(finite) if finite else tf.constant(True)
    return Outcome(results, agreed, bytes_sent, elements)


def ask(network: Network, request: Request) -> Any:
    """Return the network's answer to one request.

    Raises:
        tf.errors.InvalidArgumentError: when run, for a message that has changed on its way.
    """
    handlers: dict[type, Callable] = {
        AllGather: lambda r: network.all_gather(r.message),
        AllReduce: lambda r: network.all_reduce(list(r.tensors)),
        AllToAll: lambda r: network.all_to_all(r.messages),
        PairGather: lambda r: network.pair_gather(r.message, r.distance),
    }
    handler = handlers.get(type(request))
    if handler is None:
        raise TypeError(
            "an exchange must yield AllGather, AllReduce, AllToAll or PairGather. "
            f"Received: {type(request).__name__}"
        )
    if not network.checked:
        return handler(request)
    with tf.name_scope(SELECTING):
        sealed = wire.sealed(request)
    answer = handler(sealed)
    with tf.name_scope(DECODING):
        return wire.opened(request, answer, network.workers, network.rank())


def gather(network: Network, words: tf.Tensor) -> tf.Tensor:
    """Gather words that are no message of a method: int32 `[words]` to `[workers, words]`."""
    message = wire.with_header(tf.constant(True), words)
    received = ask(network, AllGather(message))
    return moved(lambda messages: messages[:, wire.HEADER_WORDS :], received)
