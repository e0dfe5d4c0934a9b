"""Drives exchanges: sends the requests that generators yield and resumes them with the answers.

All requests of all methods pass through this module, on every network. It therefore counts bytes,
agrees on finiteness and adds checksums to messages.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Sequence
from typing import Any, Protocol

import tensorflow as tf

from tf_redsync.exchange.requests import AllGather, AllReduce, AllToAll, PairGather, Request
from tf_redsync.ops import wire
from tf_redsync.ops.wire import map_words

# Name scopes of the ops before and after an exchange's first answer. A profile shows them apart
# from the rest of a step.
SELECTING, DECODING = "redsync_select", "redsync_decode"


class Network(Protocol):
    """Answers requests; `network/collectives.py` implements it over `tf.distribute`.

    Attributes:
        workers: Number of workers.
        in_branches: Whether collectives can run in a branch of a `tf.cond`.
        checked: Whether messages carry checksums.
    """

    workers: int
    in_branches: bool
    checked: bool

    def rank(self) -> tf.Tensor:
        """Return this worker's rank, int32 scalar in [0, workers)."""

    def all_gather(self, message: tf.Tensor) -> tf.Tensor:
        """Gather int32 `[words]` of every worker into `[workers, words]`, in rank order."""

    def all_reduce(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Return the sum of each tensor over the workers; shapes and dtypes stay."""

    def all_to_all(self, messages: tf.Tensor) -> tf.Tensor:
        """Send row r of int32 `[workers, words]` to worker r; row r of the result is from it."""

    def pair_gather(self, message: tf.Tensor, distance: int) -> tf.Tensor:
        """Gather int32 `[words]` of both partners into `[2, words]`; see `PairGather`."""


@dataclasses.dataclass
class Outcome:
    """The outcome of a step's exchanges.

    Attributes:
        results: The totals and the new state that each generator returned, in order.
        finite: Bool scalar tensor, equal on all workers: whether all exchanged values are finite.
            A plan also checks totals that may overflow.
        bytes_sent: Bytes that one worker sent: a float, or a float64 scalar tensor if the size
            depends on the step.
        elements: For each generator, a function that returns the number of elements of each tensor
            that this worker sent, int32; `None` if its requests do not report it.
    """

    results: list[Any]
    finite: tf.Tensor
    bytes_sent: Any
    elements: Sequence[Callable[[], tf.Tensor] | None] = ()


def drive(exchanges: Sequence[Generator[Request, Any, Any]], network: Network) -> Outcome:
    """Run generators to their ends, with one collective per generator and round.

    The requests of a round are sent in the order of the generators. All workers therefore issue the
    same collectives in the same order, and no exchange waits for the second round of another one.

    Args:
        exchanges: Generators of `Method.exchange`, one for each bucket.
        network: The network that answers their requests.

    Raises:
        TypeError: If a generator yields an object that is not a request.
    """
    results: list[Any] = [None] * len(exchanges)
    elements: list[Callable[[], tf.Tensor] | None] = [None] * len(exchanges)
    finite: list[tf.Tensor] = []
    bytes_sent: Any = 0.0
    replies: list[Any] = [None] * len(exchanges)
    waiting = list(enumerate(exchanges))
    while waiting:
        next_round = []
        for i, exchange in waiting:
            try:
                with tf.name_scope(SELECTING if replies[i] is None else DECODING):
                    request = exchange.send(replies[i])
            except StopIteration as stop:
                results[i] = stop.value
                continue
            if isinstance(request, AllGather) and request.sent is not None:
                elements[i] = request.sent
            replies[i] = ask(network, request)
            finite.append(is_finite(request, replies[i]))
            bytes_sent = bytes_sent + sent_bytes(request, network.workers)
            next_round.append((i, exchange))
        waiting = next_round
    agreed = tf.reduce_all(finite) if finite else tf.constant(True)
    return Outcome(results, agreed, bytes_sent, elements)


def ask(network: Network, request: Request) -> Any:
    """Return the network's answer to one request.

    Messages carry a checksum. All-reduces do not, since they are summed in transit.

    Raises:
        tf.errors.InvalidArgumentError: At execution, on a worker that receives a corrupted message;
            the error names the sender. That worker does not update its weights, and the other
            workers cannot continue without it.
        TypeError: If `request` is not a request.
    """
    if not network.checked or isinstance(request, AllReduce):
        return _send(network, request)
    with tf.name_scope(SELECTING):
        sealed = sealed_request(request)
    answer = _send(network, sealed)
    with tf.name_scope(DECODING):
        return opened_reply(request, answer, network.workers, network.rank())


def _send(network: Network, request: Request) -> Any:
    if isinstance(request, AllGather):
        return network.all_gather(request.message)
    if isinstance(request, AllReduce):
        return network.all_reduce(list(request.tensors))
    if isinstance(request, AllToAll):
        return network.all_to_all(request.messages)
    if isinstance(request, PairGather):
        return network.pair_gather(request.message, request.distance)
    raise _unknown(request)


def _unknown(request: Any) -> TypeError:
    return TypeError(
        "an exchange must yield AllGather, AllReduce, AllToAll or PairGather. "
        f"Received: {type(request).__name__}"
    )


def sealed_request(request: Request) -> Request:
    """Return a copy of a request in which every message carries a checksum."""
    assert not isinstance(request, AllReduce)
    if isinstance(request, AllToAll):
        return dataclasses.replace(request, messages=wire.sealed(request.messages))
    message = wire.only_row(wire.sealed(wire.as_row(request.message)))
    return dataclasses.replace(request, message=message)


def opened_reply(request: Request, reply: Any, workers: int, rank: tf.Tensor) -> Any:
    """Check and remove the checksums in the reply to a sealed request.

    Args:
        request: The request before `sealed_request`.
        reply: The answer, int32 `[rows, words]`.
        workers: Number of workers.
        rank: This worker's rank, int32 scalar.

    Returns:
        The answer with finite flags instead of checksums, int32 `[rows, words]`.

    Raises:
        tf.errors.InvalidArgumentError: At execution, if a message is corrupted.
    """
    senders = tf.range(workers)
    if isinstance(request, PairGather):
        lower = tf.bitwise.bitwise_and(rank, ~request.distance)
        pair = tf.stack([lower, lower + request.distance])
        senders = tf.where(pair < workers, pair, wire.NO_SENDER)
    return wire.opened(reply, senders, rank)


def is_finite(request: Request, reply: Any) -> tf.Tensor:
    """Return whether all workers sent finite values: a bool scalar, equal on all workers.

    Messages carry a flag, and a sum is non-finite on all workers if one summand is. After an
    all-to-all or a pair gather the result is equal only once later messages have forwarded the
    flag.
    """
    return wire.all_finite(reply) if isinstance(request, AllReduce) else wire.flags_are_set(reply)


def payload_bytes(request: Request) -> int | tf.Tensor:
    """Return the bytes of one worker's own payload in `request`.

    Returns:
        A Python int if the shape is static, else an int64 scalar tensor.
    """
    if isinstance(request, AllReduce):
        tensors = request.tensors
    else:
        tensors = [request.messages if isinstance(request, AllToAll) else request.message]
    payload: Any = 0
    for t in tensors:
        elements = t.shape.num_elements()
        elements = tf.reduce_prod(wire.shape_of(t)) if elements is None else elements
        payload += elements * t.dtype.size
    return payload


def sent_bytes(request: Request, workers: int) -> float | tf.Tensor:
    """Return the bytes that one worker sends for `request`.

    With P workers and a payload of m bytes, ring collectives send:

    * all-gather: `m (P - 1)`;
    * all-reduce: `2 m (P - 1) / P`;
    * all-to-all: `m (P - 1) / P`.

    A pair gather sends `m`; a worker without a partner is counted like the others.

    Args:
        request: The request.
        workers: P, the number of workers.
    """
    factor, payload = sent_factor(type(request), workers), payload_bytes(request)
    return factor * (payload if isinstance(payload, int) else tf.cast(payload, tf.float64))


def sent_factor(kind: type[Request], workers: int) -> float:
    """Return the bytes sent per byte of a worker's payload; see `sent_bytes`."""
    if kind is AllGather:
        return workers - 1.0
    if kind is PairGather:
        return min(1.0, workers - 1.0)
    if kind is AllReduce:
        return 2.0 * (workers - 1) / workers
    return (workers - 1.0) / workers


def gather(network: Network, words: tf.Tensor) -> tf.Tensor:
    """Gather int32 `[words]` of every worker into `[workers, words]`, outside of any method."""
    message = wire.with_header(tf.constant(True), words)
    received = ask(network, AllGather(message))
    return map_words(lambda messages: messages[:, wire.HEADER_WORDS :], received)
