"""Drives exchanges: sends the requests that generators yield and resumes them with the answers.

All requests of all methods pass through this module, on every network. It therefore checks what
methods yield and return, counts bytes, agrees on finiteness and adds checksums to messages.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Sequence
from typing import Any, Protocol

import tensorflow as tf

from tf_redsync.exchange.context import Context
from tf_redsync.exchange.layout import BucketLayout
from tf_redsync.exchange.method import Exchange, State
from tf_redsync.exchange.requests import AllGather, AllReduce, AllToAll, PairGather, Request
from tf_redsync.ops import wire
from tf_redsync.ops.sparse import SparseTotal
from tf_redsync.ops.wire import map_words

_GENERATOR = "be a generator: `yield` its requests, or `yield from ()` without any"
_LISTS = (list, tuple)
_SHOWN = 8  # tensors of a list that an error shows
# Name scopes of the ops before and after an exchange's first answer. A profile shows them apart
# from the rest of a step.
SELECTING, DECODING = "redsync_select", "redsync_decode"


class Network(Protocol):
    """Answers requests; `network/collectives.py` implements it over `tf.distribute`.

    Attributes:
        workers: Number of workers.
        in_branches: Whether collectives can run in a branch of a `tf.cond`.
        checksums: Whether messages carry checksums.
    """

    workers: int
    in_branches: bool
    checksums: bool

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collective:
    """The collective that a kind of request asks for.

    Attributes:
        contents: The tensors that a request must have, for errors.
        tensors: Returns the list of the tensors of a request.
        dtypes: The dtypes that they may have.
        send: Returns the network's answer to a request.
        finite: Returns, from the answer, whether all workers sent finite values: a bool scalar,
            equal on all workers. Messages carry a flag, and a sum is non-finite on all workers if
            one summand is. After an all-to-all or a pair gather the result is equal only once later
            messages have forwarded the flag.
        factor: Returns the bytes sent per byte of a worker's payload, for a number of workers; see
            `sent_bytes`.
    """

    contents: str = "an int32 message: `wire.message` bit-casts floats and adds the finite flag"
    tensors: Callable[[Any], Any]
    dtypes: frozenset[tf.DType] = frozenset([tf.int32])
    send: Callable[[Network, Any], Any]
    finite: Callable[[Any], tf.Tensor] = wire.flags_are_set
    factor: Callable[[int], float]


COLLECTIVES: dict[type, Collective] = {
    AllGather: Collective(
        tensors=lambda request: [request.message],
        send=lambda network, request: network.all_gather(request.message),
        factor=lambda workers: workers - 1.0,
    ),
    AllReduce: Collective(
        contents="a list of floating-point tensors",
        tensors=lambda request: request.tensors,
        dtypes=frozenset([tf.float32, tf.float64, tf.float16, tf.bfloat16]),
        send=lambda network, request: network.all_reduce(list(request.tensors)),
        finite=wire.all_finite,
        factor=lambda workers: 2.0 * (workers - 1) / workers,
    ),
    AllToAll: Collective(
        tensors=lambda request: [request.messages],
        send=lambda network, request: network.all_to_all(request.messages),
        factor=lambda workers: (workers - 1.0) / workers,
    ),
    PairGather: Collective(
        tensors=lambda request: [request.message],
        send=lambda network, request: network.pair_gather(request.message, request.distance),
        factor=lambda workers: min(1.0, workers - 1.0),
    ),
}


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


def checked(method: Any, start: Any, grads: Any, state: State, ctx: Context) -> Exchange:
    """Run the exchange of one bucket, and check what it yields and returns.

    Args:
        method: The method, which errors name.
        start: Starts the exchange: `Method.exchange`, or another generator function with its
            arguments. It receives copies of the state's dict and lists, which it may change.
        grads: See `Method.exchange`.
        state: The state before the step.
        ctx: See `Method.exchange`.

    Raises:
        TypeError: If `start` is no generator function, or if the exchange yields an object that is
            no request, yields other tensors than its request takes, or returns no pair.
        ValueError: If the totals do not fit the bucket, or the new state does not fit the old one.
    """
    exchange: Any = start(grads, {n: list(v) for n, v in state.items()}, ctx)
    if not isinstance(exchange, Generator):
        raise TypeError(_broken(method, _GENERATOR, exchange))
    reply = None
    while True:
        try:
            request = exchange.send(reply)
        except StopIteration as stop:
            _check_result(method, ctx.layout, state, stop.value)
            return stop.value
        _check_request(method, request)
        reply = yield request


def _check_request(method: Any, request: Any) -> None:
    kind: Any = COLLECTIVES.get(type(request))
    sent = kind.tensors(request) if kind else None
    if not isinstance(sent, _LISTS) or not {getattr(t, "dtype", 0) for t in sent} <= kind.dtypes:
        raise _bad_request(method, request)


def _bad_request(method: Any, request: Any) -> TypeError:
    kind = COLLECTIVES.get(type(request))
    if kind is None:
        rule = "yield AllGather, AllReduce, AllToAll or PairGather"
        return TypeError(_broken(method, rule, request))
    rule = f"yield {type(request).__name__} with {kind.contents}"
    return TypeError(_broken(method, rule, kind.tensors(request)))


def _check_result(method: Any, layout: BucketLayout, old: State, result: Any) -> None:
    if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[1], dict):
        raise TypeError(_broken(method, "return a pair: totals, new state", result)) from None
    totals, new = result
    if new.keys() != old.keys():
        raise ValueError(_broken(method, f"return state names {list(old)}", list(new))) from None
    rows = [("totals", [tf.TensorSpec(s.shape) for s in layout.specs], totals)]
    rows += [(f"state[{n!r}]", old[n], new[n]) for n in old]
    for name, wanted, got in rows:
        if not isinstance(got, _LISTS) or len(got) != len(wanted):
            raise ValueError(_broken(method, f"return {name} as {_form(wanted)}", got)) from None
        for i, (spec, t) in enumerate(zip(wanted, got, strict=True)):
            same = tf.is_tensor(t) and t.dtype == spec.dtype
            if not (isinstance(t, SparseTotal) or same and t.shape.is_compatible_with(spec.shape)):
                raise _bad_tensor(method, layout, name, i, wanted, got) from None


def _bad_tensor(
    method: Any, layout: BucketLayout, name: str, i: int, wanted: Any, got: Any
) -> ValueError:
    of = f" (of {layout.specs[i].name!r})" if len(wanted) == len(layout.specs) else ""
    rule = f"return {name}[{i}]{of} as {_form(wanted[i])}"
    return ValueError(_broken(method, rule, got[i]))


def _broken(method: Any, rule: str, received: Any) -> str:
    """Return the message of an error: the exchange of `method` breaks a rule."""
    return f"the exchange of {type(method).__name__} must {rule}. Received: {_form(received)}"


def _form(value: Any) -> str:
    """Return the form of a value for errors: of a tensor, its dtype and shape."""
    if isinstance(value, _LISTS):
        forms = [_form(v) for v in value[:_SHOWN]] + ["..."] * (len(value) > _SHOWN)
        return f"[{', '.join(forms)}]"
    if isinstance(value, str):
        return repr(value)
    is_tensor = tf.is_tensor(value) or isinstance(value, tf.TensorSpec)
    return f"{value.dtype.name} {value.shape}" if is_tensor else type(value).__name__


def drive(exchanges: Sequence[Generator[Request, Any, Any]], network: Network) -> Outcome:
    """Run generators to their ends, with one collective per generator and round.

    The requests of a round are sent in the order of the generators. All workers therefore issue the
    same collectives in the same order, and no exchange waits for the second round of another one.

    Args:
        exchanges: Generators of `checked`, one for each bucket.
        network: The network that answers their requests.
    """
    results: list[Any] = [None] * len(exchanges)
    elements: list[Callable[[], tf.Tensor] | None] = [None] * len(exchanges)
    finite: list[tf.Tensor] = []
    bytes_sent: Any = 0.0
    replies: list[Any] = [None] * len(exchanges)
    waiting = dict(enumerate(exchanges))
    while waiting:
        for i, exchange in list(waiting.items()):
            try:
                with tf.name_scope(SELECTING if replies[i] is None else DECODING):
                    request = exchange.send(replies[i])
            except StopIteration as stop:
                results[i] = stop.value
                del waiting[i]
                continue
            elements[i] = getattr(request, "sent", None) or elements[i]
            replies[i] = ask(network, request)
            finite.append(COLLECTIVES[type(request)].finite(replies[i]))
            bytes_sent = bytes_sent + sent_bytes(request, network.workers)
    agreed = tf.reduce_all(finite) if finite else tf.constant(True)
    return Outcome(results, agreed, bytes_sent, elements)


def ask(network: Network, request: Request) -> Any:
    """Return the network's answer to one request.

    Messages carry a checksum. All-reduces do not, since they are summed in transit.

    Raises:
        tf.errors.InvalidArgumentError: At execution, on a worker that receives a corrupted message;
            the error names the sender. That worker does not update its weights, and the other
            workers cannot continue without it.
    """
    send = COLLECTIVES[type(request)].send
    if not network.checksums or isinstance(request, AllReduce):
        return send(network, request)
    with tf.name_scope(SELECTING):
        sealed = sealed_request(request)
    answer = send(network, sealed)
    with tf.name_scope(DECODING):
        return opened_reply(request, answer, network.workers, network.rank())


def sealed_request(request: Any) -> Any:
    """Return a copy of a request in which every message carries a checksum; not of `AllReduce`."""
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


def payload_bytes(request: Request) -> int | tf.Tensor:
    """Return the bytes of one worker's own payload in `request`.

    Returns:
        A Python int if the shape is static, else an int64 scalar tensor.
    """
    payload: Any = 0
    for t in COLLECTIVES[type(request)].tensors(request):
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
    factor, payload = COLLECTIVES[type(request)].factor(workers), payload_bytes(request)
    return factor * (payload if isinstance(payload, int) else tf.cast(payload, tf.float64))


def gather(network: Network, words: tf.Tensor) -> tf.Tensor:
    """Gather int32 `[words]` of every worker into `[workers, words]`, outside of any method."""
    message = wire.with_header(tf.constant(True), words)
    received = ask(network, AllGather(message))
    return map_words(lambda messages: messages[:, wire.HEADER_WORDS :], received)
