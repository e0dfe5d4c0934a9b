"""Agreement: workers that are about to run different operations raise instead of deadlocking.

The workers compare texts through the coordination service, without a collective.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import tensorflow as tf

from tf_redsync.cluster import coordination, watchdog
from tf_redsync.errors import DistributedError, first_lines
from tf_redsync.network import strategies

_Answer = TypeVar("_Answer")
_logger = logging.getLogger("tf_redsync")
_SLICE_SECONDS = 5  # waiting time between two checks of the watchdog's verdict
_WARN_SECONDS = 20
# Only worker 0 knows which worker is late, unless it is late itself.
_UNKNOWN = "worker 0, or a worker that its log names,"
_RETRY_SECONDS = 0.2
_LOST_SECONDS = 30.0  # limit without an answer of the service, if no watchdog gives a verdict
_MOST_SHOWN = 200  # characters of an action
_MOST_TEXT = 1_000  # characters of another worker's error
_PREFIX = "tf_redsync/agree"
_CHANNELS = "tf_redsync/channel"
_sequence = itertools.count()
_covered: list[str] = []  # open `agreed` contexts
_created: list[str] = []  # variables created since the last agreement


class Disagreement(DistributedError, ValueError):
    """The workers run different programs, models, methods or configurations."""


def agree(strategy: tf.distribute.Strategy, action: str) -> None:
    """Check that all workers are about to do `action`, without a collective.

    Calls are numbered, so the check also detects a worker that makes *another* call at this point,
    or has created other variables since the last call. The chief compares the texts and publishes
    the verdict, so either all workers return or all raise. The workers wait for a late one, which
    the chief names in regular warnings, until the watchdog declares it lost or stalled.

    Args:
        strategy: A multi-worker strategy. With one worker this is a no-op.
        action: A text that describes what this worker is about to do.

    Raises:
        Disagreement: on every worker, with the differing texts.
    """
    if strategies.process_count(strategy) > 1 and not _covered:
        _agree_and_gather(strategy, action, "")


def gather_texts(strategy: tf.distribute.Strategy, action: str, text: str) -> list[str]:
    """Agree on `action`, and return the texts of all workers by rank, without a collective.

    Args:
        strategy: As in `agree`.
        action: As in `agree`.
        text: This worker's text, of a few kilobytes: the chief's process holds all of them.

    Raises:
        Disagreement: as in `agree`.
    """
    if strategies.process_count(strategy) == 1:
        return [text]
    return _agree_and_gather(strategy, action, text)


def together(
    strategy: tf.distribute.Strategy, action: str, function: Callable[[], _Answer]
) -> _Answer:
    """Agree on `action` and return the result of `function`; if it fails on one worker, all raise.

    Args:
        strategy: As in `agree`.
        action: As in `agree`.
        function: This worker's part of the action, without a collective.

    Raises:
        Exception: of this worker's `function`.
        DistributedError: if `function` fails on another worker only.
        Disagreement: as in `agree`.
    """
    answer, failure = None, None
    try:
        answer = function()
    except Exception as error:
        failure = error
    text = "" if failure is None else f"{type(failure).__name__}: {failure}"[:_MOST_TEXT]
    texts = gather_texts(strategy, action, text)
    if failure is not None:
        raise failure
    for rank, text in enumerate(texts):
        if text:
            raise DistributedError(f"worker {rank} failed at: {_shortened(action)}. {text}")
    return cast(_Answer, answer)


def _agree_and_gather(strategy: tf.distribute.Strategy, action: str, text: str) -> list[str]:
    if not strategies.is_redsync_strategy(strategy):  # ours has started its watchdog
        watchdog.start(strategy, watchdog.DEFAULT_TIMEOUT_SECONDS)
    with watchdog.waiting_for_agreement(_shortened(action)):
        verdict, texts = _exchange(strategy, action, text)
    if verdict != "agreed":
        raise Disagreement(verdict)
    _created.clear()
    return texts


def _shortened(text: str) -> str:
    """Return the beginning of a text, such as a configuration, for other workers' errors."""
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


@contextmanager
def agreed(strategy: tf.distribute.Strategy, action: str) -> Iterator[None]:
    """Context that agrees on `action` once, in place of the agreements within it."""
    agree(strategy, action)
    _covered.append(action)
    try:
        yield
    finally:
        _covered.pop()


def create_variable(create: Callable[..., tf.Variable], arguments: dict[str, Any]) -> tf.Variable:
    """Create a variable with the chief's initial value; the next agreement compares it.

    One agreement per variable would cost more than its broadcast. A worker that creates another
    variable shows in a failing broadcast, to the watchdog, or in the next agreement.

    Args:
        create: Creates the variable and broadcasts its value.
        arguments: Keyword arguments of `create`.

    Raises:
        Disagreement: on all workers, if the broadcast fails because their variables differ.
    """
    initial_value = arguments["initial_value"]

    def described() -> Any:
        value = initial_value() if callable(initial_value) else initial_value
        if not hasattr(value, "wrapped_value"):  # a checkpoint checks its values itself
            value = tf.convert_to_tensor(value, arguments.get("dtype"))
            name = arguments.get("name")
            action = f"create variable {name} {value.dtype.name}{value.shape}"
            watchdog.begin_broadcast(action, value.dtype.size * value.shape.num_elements())
            if not _covered:
                _created.append(action)
        return value

    try:
        return create(**{**arguments, "initial_value": described})
    except tf.errors.OpError as error:
        verdict = watchdog.verdict_after_failure(error.message)
        if verdict is None:
            raise
        raise Disagreement(verdict) from error
    finally:
        watchdog.end_broadcast()


def _exchange(strategy: tf.distribute.Strategy, action: str, text: str) -> tuple[str, list[str]]:
    """Publish this worker's text; return the chief's verdict and the texts of all workers."""
    local_report = json.dumps([action, _created, text])
    number, rank = next(_sequence), strategies.process_rank(strategy)
    store = coordination.key_value_store()
    if rank != 0:
        store.set_config_key_value(f"{_PREFIX}/{number}/{rank}", local_report)
        verdict, texts = json.loads(_wait_for(f"{number}/verdict", _UNKNOWN, math.inf))
        return verdict, texts
    workers = strategies.process_count(strategy)
    received = {
        r: _wait_for(f"{number}/{r}", f"worker {r}", _WARN_SECONDS) for r in range(1, workers)
    }
    reports = [json.loads(report) for report in (local_report, *received.values())]
    verdict, texts = _verdict(reports), [report[-1] for report in reports]
    if number:  # all workers have reached this call, so all have read the last verdict
        store.delete_config_key_value(f"{_PREFIX}/{number - 1}")
    store.set_config_key_value(f"{_PREFIX}/{number}/verdict", json.dumps([verdict, texts]))
    return verdict, texts


def _verdict(reports: list[list[Any]]) -> str:
    """Compare the workers' reports, by rank: their next action and their new variables."""
    first, others = reports[0], dict(enumerate(reports[1:], 1))
    different = {r: report for r, report in others.items() if _compared(report) != _compared(first)}
    if not different:
        return "agreed"
    shown = differences(_first_difference([first, *different.values()]))
    lines = [f"worker {r}: {text}" for r, text in zip([0, *different], shown, strict=True)]
    return (
        "the workers disagree; start all of them with the same script, flags, model and method, "
        "and make the same calls on every rank:\n" + "\n".join(first_lines(lines, of=" workers"))
    )


def _compared(report: list[Any]) -> tuple[str, list[str]]:
    """Return the part of a report that must be equal on all workers."""
    action, created, _ = report
    return action, [without_numbers(text) for text in created]


def _first_difference(reports: list[list[Any]]) -> list[str]:
    """Return the first differing variable of each worker; without one, each next action."""
    rows = itertools.zip_longest(*(created for _, created, _ in reports))
    for row in rows:
        if len({text and without_numbers(text) for text in row}) > 1:
            return [text or action for text, (action, *_) in zip(row, reports, strict=True)]
    return [action for action, *_ in reports]


def without_numbers(text: str) -> str:
    """Strip Keras's numbers of names, which differ if one worker has created further layers.

    A user's own numbers look the same and are stripped, too: "head_1" becomes "head".
    """
    return re.sub(r"_\d+(?=\b|_)", "", text)


def _wait_for(key: str, worker: str, repeat: float) -> str:
    """Return a text of the store once `worker` has published it.

    Warn after 20 s, and then every `repeat` seconds.
    """
    store, started = coordination.key_value_store(), time.monotonic()
    warn_after = float(_WARN_SECONDS)
    while True:
        if watchdog.verdict() is not None:
            raise Disagreement(watchdog.verdict())
        try:
            return store.get_config_key_value(f"{_PREFIX}/{key}", 1000 * _SLICE_SECONDS)
        except tf.errors.DeadlineExceededError:
            waited = time.monotonic() - started
        if waited >= warn_after:
            warn_after = waited + repeat
            _logger.warning("waiting for %s for %.0f s", worker, waited)


class Channel:
    """Exchange of texts between a thread of each worker, independent of the main threads.

    Its calls have their own numbers, not those of the main threads' agreements, and do not raise.

    Args:
        strategy: Strategy of the workers.
        name: A unique name, the same on all workers.
    """

    def __init__(self, strategy: tf.distribute.Strategy, name: str):
        self._rank = strategies.process_rank(strategy)
        self._workers = strategies.process_count(strategy)
        self._prefix = f"{_CHANNELS}/{name}"
        self._number = 0

    def gather(self, text: str) -> list[str] | None:
        """Return the texts of all workers by rank; `None` if a worker or the service is lost.

        Args:
            text: As in `gather_texts`.
        """
        if self._workers == 1:
            return [text]
        try:
            return self._exchange(text)
        except tf.errors.OpError as error:
            _logger.debug("%s", error)
            return None

    def _exchange(self, text: str) -> list[str]:
        store, number = coordination.key_value_store(), self._number
        self._number += 1

        def get(key: str) -> str:
            path = f"{self._prefix}/{number}/{key}"
            return _retrying(lambda: store.get_config_key_value(path, 1000 * _SLICE_SECONDS))

        def put(key: str, value: str) -> None:
            # The key exists if an earlier request succeeded and its answer was lost.
            with contextlib.suppress(tf.errors.AlreadyExistsError):
                _retrying(
                    lambda: store.set_config_key_value(f"{self._prefix}/{number}/{key}", value)
                )

        put(str(self._rank), text)
        if self._rank == 0:
            texts = [get(str(rank)) for rank in range(self._workers)]
            if number:  # all workers have reached this call, so all have read the last texts
                _retrying(lambda: store.delete_config_key_value(f"{self._prefix}/{number - 1}"))
            put("all", json.dumps(texts))
        gathered: list[str] = json.loads(get("all"))
        return gathered


def _retrying(action: Callable[[], _Answer]) -> _Answer:
    """Retry a request to the service until it is answered or a worker is lost.

    Raises:
        tf.errors.OpError: the watchdog has given a verdict, or the service does not answer.
    """
    answered = time.monotonic()
    while True:
        try:
            return action()
        except tf.errors.AlreadyExistsError:
            raise
        except tf.errors.DeadlineExceededError:
            answered = time.monotonic()
            if watchdog.verdict() is not None:
                raise
        except tf.errors.OpError:
            lost = time.monotonic() - answered >= _LOST_SECONDS
            if lost or watchdog.verdict() is not None:
                raise
            time.sleep(_RETRY_SECONDS)


_MOST = 10


def differences(texts: Sequence[str]) -> list[str]:
    """Return the texts reduced to the entries that differ, if all of them are JSON objects."""
    try:
        values = [json.loads(text) for text in texts]
    except ValueError:
        return list(texts)
    if not all(isinstance(value, dict) for value in values):
        return list(texts)
    flat = [dict(_leaves(value)) for value in values]
    keys = dict.fromkeys(key for leaves in flat for key in leaves)
    different = [
        k for k in keys if any(f.get(k, _MISSING) != flat[0].get(k, _MISSING) for f in flat)
    ]
    more = f", and {len(different) - _MOST} more" if len(different) > _MOST else ""
    return [", ".join(f"{k}={f.get(k, _MISSING)}" for k in different[:_MOST]) + more for f in flat]


_MISSING = "(none)"


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield the leaves of a structure with their paths."""
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _leaves(item, f"{path}.{key}" if path else key)
    elif isinstance(value, list) and any(isinstance(v, (dict, list)) for v in value):
        for i, item in enumerate(value):
            yield from _leaves(item, f"{path}[{i}]")
    else:
        yield path, json.dumps(value)
