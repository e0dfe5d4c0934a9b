"""Runs all workers of an exchange in one process, for tests and plans.

The generators of P workers advance in lockstep and receive each other's messages. Messages carry
checksums, as on a network, and a test can corrupt them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tf_redsync.exchange import driver
from tf_redsync.exchange.capabilities import at_step
from tf_redsync.exchange.context import Context
from tf_redsync.exchange.layout import BucketLayout
from tf_redsync.exchange.method import initial_state
from tf_redsync.exchange.requests import AllGather, AllReduce, PairGather, Request
from tf_redsync.ops import wire

# A step after any warm-up, and a multiple of all small numbers. A method with a period is therefore
# at the start of one.
STEADY_STEP = 720_720_000
# Injects faults: maps the number of the round, the worker's rank and the answer on the network to
# the answer that the worker receives.
Fault = Callable[[int, int, Any], Any]


@dataclasses.dataclass
class LoopbackStep:
    """The outcome of one step of all workers.

    Attributes:
        totals: Per worker, its totals.
        states: Per worker, the new state; the old one if the step was non-finite.
        finite: Whether the contributions of all workers were finite, and also the totals if the
            method declares that they may overflow.
        bytes_sent: Bytes that one worker sent.
        requests: The requests of worker 0, in order.
    """

    totals: list[list[tf.Tensor]]
    states: list[Any]
    finite: bool
    bytes_sent: float
    requests: list[Request]


def initial_states(method: Any, layout: BucketLayout) -> list[Any]:
    """Return initial states, one for each of `layout.workers` workers, all equal."""
    return [initial_state(method, layout) for _ in range(layout.workers)]


def run_step(
    method: Any,
    layout: BucketLayout,
    grads: Sequence[Sequence[tf.Tensor]],
    states: Sequence[Any],
    step: int,
    phase: str = "exchange",
    fault: Fault | None = None,
) -> LoopbackStep:
    """Exchange one bucket among `layout.workers` workers.

    Args:
        method: The method under test.
        layout: The bucket.
        grads: Per worker, one gradient for each tensor of the bucket.
        states: Per worker, the state from `method.init` or from the last step.
        step: Step number, from 0.
        phase: `"exchange"`, `"dense_exchange"` for its warm-up, or one of its `phases`.
        fault: Injects faults; see `Fault`.

    Raises:
        ValueError: If workers request different collectives, shapes, or numbers of collectives.
        TypeError, ValueError: As `driver.checked`.
        tf.errors.InvalidArgumentError: If a message is corrupted.
    """
    outcome = _exchange(method, layout, grads, states, tf.constant(step, tf.int64), phase, fault)
    return _result(outcome, states)


def traced_step(
    method: Any, layout: BucketLayout, phase: str = "exchange"
) -> Callable[..., LoopbackStep]:
    """Return `run_step` as a `tf.function`, for many steps of one method and layout.

    The step number is a tensor, as in training. Tracing costs as much as several eager steps.

    Args:
        method: The method under test.
        layout: The bucket.
        phase: As in `run_step`.

    Returns:
        A function of `grads`, `states` and `step` as in `run_step`, which returns a `LoopbackStep`.
    """
    of_stage = functools.cache(lambda staged: _traced_stage(staged, layout, phase))

    def run(grads: Any, states: Any, step: int) -> LoopbackStep:
        return of_stage(at_step(method, step))(grads, states, step)

    return run


def _traced_stage(method: Any, layout: BucketLayout, phase: str) -> Callable[..., LoopbackStep]:
    kinds: list[tuple[type[Request], dict[str, Any]]] = []

    @tf.function(autograph=False)
    def graph(grads: Any, states: Any, step: tf.Tensor) -> tuple[Any, ...]:
        *rest, log = _exchange(method, layout, grads, states, step, phase)
        kinds[:] = [(type(r), _fields(r, numbers=True)) for r in log]
        return *rest, [_fields(r, numbers=False) for r in log]

    def run(grads: Any, states: Any, step: int) -> LoopbackStep:
        *rest, log = graph(grads, states, tf.constant(step, tf.int64))
        requests = [
            kind(**numbers, **tensors) for (kind, numbers), tensors in zip(kinds, log, strict=True)
        ]
        return _result((*rest, requests), states)

    return run


def _exchange(
    method: Any,
    layout: BucketLayout,
    grads: Any,
    states: Any,
    step: tf.Tensor,
    phase: str,
    fault: Fault | None = None,
) -> tuple[Any, ...]:
    """Return all workers' totals and new states, finiteness and bytes as tensors, and requests."""
    start = getattr(method, phase)
    workers = [
        driver.checked(method, start, list(g), s, Context(layout, tf.constant(rank), step))
        for rank, (g, s) in enumerate(zip(grads, states, strict=True))
    ]
    replies: list[Any] = [None] * len(workers)
    finite: tf.Tensor = tf.constant(True)
    bytes_sent: Any = 0.0
    log: list[Request] = []
    while True:
        requests, results = _advance(workers, replies)
        if results:
            break
        _check_same(requests)
        replies = _deliver(requests, len(log), fault)
        finite &= driver.COLLECTIVES[type(requests[0])].finite(replies[0])
        bytes_sent += driver.sent_bytes(requests[0], layout.workers)
        log.append(requests[0])
    if method.traits.totals_may_overflow and phase != "dense_exchange":
        finite &= wire.totals_are_finite(results[0][0])
    if isinstance(bytes_sent, float):
        bytes_sent = tf.constant(bytes_sent, tf.float64)
    return [r[0] for r in results], [r[1] for r in results], finite, bytes_sent, log


def _fields(request: Request, numbers: bool) -> dict[str, Any]:
    """Return a request's fields by name: its Python numbers, or its tensors; not `sent`."""
    present = {n: v for n, v in vars(request).items() if n != "sent"}
    return {n: value for n, value in present.items() if isinstance(value, int) == numbers}


def _result(outcome: tuple[Any, ...], old_states: Any) -> LoopbackStep:
    """Return a step's outcome with Python numbers; a non-finite step keeps the old states."""
    totals, states, finite, bytes_sent, requests = outcome
    finite = bool(finite)
    states = states if finite else list(old_states)
    return LoopbackStep(totals, states, finite, float(bytes_sent), requests)


def _advance(workers: Any, replies: Any) -> tuple[list[Request], list[Any]]:
    requests, results = [], []
    for worker, reply in zip(workers, replies, strict=True):
        try:
            requests.append(worker.send(reply))
        except StopIteration as stop:
            results.append(stop.value)
    if requests and results:
        raise ValueError("some workers ended their exchange while others yielded further requests")
    return requests, results


def _check_same(requests: Sequence[Request]) -> None:
    def signature(request: Request) -> tuple[Any, ...]:
        tensors = tf.nest.flatten(_fields(request, numbers=False))
        shapes = [(tuple(t.shape), t.dtype) for t in tensors]
        return type(request), _fields(request, numbers=True), shapes

    signatures = [signature(r) for r in requests]
    if any(s != signatures[0] for s in signatures):
        raise ValueError(f"workers requested different collectives: {signatures}")


def _deliver(requests: Sequence[Request], number: int, fault: Fault | None) -> list[Any]:
    """Return the answer that each worker receives in a round."""
    if isinstance(requests[0], AllReduce):  # without checksums
        answers = _answer(requests)
        return [fault(number, rank, a) if fault else a for rank, a in enumerate(answers)]
    answers = _answer([driver.sealed_request(r) for r in requests])
    if fault is not None:
        answers = [fault(number, rank, answer) for rank, answer in enumerate(answers)]
    elif isinstance(requests[0], AllGather):  # equal for all workers
        return [_open(requests, answers[0], 0)] * len(requests)
    return [_open(requests, answer, rank) for rank, answer in enumerate(answers)]


def _open(requests: Sequence[Request], answer: Any, rank: int) -> Any:
    return driver.opened_reply(requests[rank], answer, len(requests), tf.constant(rank))


def _answer(requests: Sequence[Any]) -> list[Any]:
    first = requests[0]
    if isinstance(first, AllGather):
        return [tf.stack([r.message for r in requests])] * len(requests)
    if isinstance(first, AllReduce):
        return [[tf.add_n(list(ts)) for ts in zip(*(r.tensors for r in requests), strict=True)]] * (
            len(requests)
        )
    if isinstance(first, PairGather):
        rows = [r.message for r in requests]
        rows += [wire.absent(rows[0])] * first.distance  # partners beyond the last worker
        lower = [rank & ~first.distance for rank in range(len(requests))]
        return [tf.stack([rows[low], rows[low + first.distance]]) for low in lower]
    table = tf.stack([r.messages for r in requests])  # [from, to, words]
    return [table[:, to] for to in range(len(requests))]
