"""Workers that disagree get an error message and not a deadlock.

They compare texts through the coordination service, without a collective.
"""

from __future__ import annotations

import itertools
import json
import logging
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from tf_redsync.cluster import coordination, watchdog
from tf_redsync.cluster.differences import differences
from tf_redsync.errors import DistributedError
from tf_redsync.network import collectives

_logger = logging.getLogger("tf_redsync")
_SLICE_SECONDS = 5  # of waiting, between two looks at what the watchdog found
_WARN_SECONDS = 20
_PREFIX = "tf_redsync/agree"
_sequence = itertools.count()
_covered: list[str] = []  # what an outer agreement covers
_created: list[str] = []  # variables of which no agreement knows yet


class Disagreement(DistributedError, ValueError):
    """Workers do different things, or were started with different models or configurations."""


def agree(strategy: tf.distribute.Strategy, what: str) -> None:
    """Compare `what` with every other worker, without a collective.

    Every call is numbered, the same on all workers, so a worker that does *something else* than
    the others at this point is found as well, and so is one that has created other variables since
    the last call. The chief compares and publishes the verdict, hence
    either all workers return or all raise. A worker that comes late is waited for, with a warning
    now and then, until the watchdog finds that it will not come.

    Args:
        strategy: A multi-worker strategy; with one worker nothing happens.
        what: A text that describes what this worker is about to do.

    Raises:
        Disagreement: on every worker, with the differing texts, when they are not all equal.
    """
    if collectives.worker_count(strategy) > 1 and not _covered:
        _agree_and_tell(strategy, what, "")


def everyones(strategy: tf.distribute.Strategy, what: str, text: str) -> list[str]:
    """Agree on `what`, and return the texts of all workers, by rank; without a collective.

    Args:
        strategy: As in `agree`.
        what: What all of them are about to do; see `agree`.
        text: This worker's, of a few kilobytes: the chief's process holds them all.

    Raises:
        Disagreement: on every worker, where they are not about to do the same.
    """
    if collectives.worker_count(strategy) == 1:
        return [text]
    return _agree_and_tell(strategy, what, text)


def _agree_and_tell(strategy: tf.distribute.Strategy, what: str, told: str) -> list[str]:
    if not collectives.counts_steps(strategy):  # ours is watched since it was made
        watchdog.start(strategy, watchdog.DEFAULT_TIMEOUT_SECONDS)
    with watchdog.waiting_for_agreement(what):
        verdict, all_told = _exchange(strategy, what, told)
    if verdict != "agreed":
        raise Disagreement(verdict)
    _created.clear()
    return all_told


@contextmanager
def agreed(strategy: tf.distribute.Strategy, what: str) -> Iterator[None]:
    """Agree on `what`, and let that cover all further agreements within this context."""
    agree(strategy, what)
    _covered.append(what)
    try:
        yield
    finally:
        _covered.pop()


def create_variable(create: Callable[..., tf.Variable], arguments: dict[str, Any]) -> tf.Variable:
    """Create a variable of the chief's initial value, to be compared in the next agreement.

    A round for each variable would cost more than its broadcast. A worker that creates another one
    is found by a broadcast that fails, by the watchdog where one stays away, or in the next round.

    Args:
        create: Creates the variable and broadcasts its value.
        arguments: Of `create`, by name.

    Raises:
        Disagreement: on all workers, where the broadcast fails for what they create.
    """
    initial_value = arguments["initial_value"]

    def described():
        value = initial_value() if callable(initial_value) else initial_value
        if not hasattr(value, "wrapped_value"):  # a checkpoint's value is checked by its own
            value = tf.convert_to_tensor(value, arguments.get("dtype"))
            name = arguments.get("name")
            what = f"create variable {name} {value.dtype.name}{value.shape}"
            watchdog.begin_broadcast(what, value.dtype.size * value.shape.num_elements())
            if not _covered:
                _created.append(what)
        return value

    try:
        return create(**{**arguments, "initial_value": described})
    except tf.errors.OpError as error:
        found = watchdog.verdict_after_failure(error.message)
        if found is None:
            raise
        raise Disagreement(found) from error
    finally:
        watchdog.end_broadcast()


def _exchange(strategy: tf.distribute.Strategy, what: str, told: str) -> tuple[str, list[str]]:
    """Publish this worker's text; return the chief's verdict, and what all have told."""
    what = json.dumps([what, _created, told])
    number, rank = next(_sequence), collectives.worker_rank(strategy)
    store = coordination.key_value_store()
    if rank != 0:
        store.set_config_key_value(f"{_PREFIX}/{number}/{rank}", what)
        verdict, all_told = json.loads(_wait_for(f"{number}/verdict", 0))
        return verdict, all_told
    workers = collectives.worker_count(strategy)
    texts = {r: _wait_for(f"{number}/{r}", r) for r in range(1, workers)}
    reports = [json.loads(text) for text in (what, *texts.values())]
    verdict, all_told = _verdict(reports), [said[-1] for said in reports]
    if number:  # everyone is here, so everyone has read the last verdict
        store.delete_config_key_value(f"{_PREFIX}/{number - 1}")
    store.set_config_key_value(f"{_PREFIX}/{number}/verdict", json.dumps([verdict, all_told]))
    return verdict, all_told


def _verdict(reports: list[list[Any]]) -> str:
    """Compare the reports of all workers, by rank: what they do, and what they have created."""
    own, others = reports[0], dict(enumerate(reports[1:], 1))
    different = {r: said for r, said in others.items() if _compared(said) != _compared(own)}
    if not different:
        return "agreed"
    shown = differences(_first_difference([own, *different.values()]))
    lines = [f"worker {r}: {text}" for r, text in zip([0, *different], shown, strict=True)]
    return (
        "the workers disagree; start all of them with the same script, flags, model and method, "
        "and let all do the same, whatever their rank:\n" + "\n".join(lines)
    )


def _compared(said: list[Any]) -> tuple[str, list[str]]:
    """Return what must be equal."""
    what, created, _ = said
    return what, [_without_numbers(text) for text in created]


def _first_difference(all_said: list[list[Any]]) -> list[str]:
    """Return the first variable that is not the same for all, or what all are about to do."""
    rows = itertools.zip_longest(*(created for _, created, _ in all_said))
    for row in rows:
        if len({text and _without_numbers(text) for text in row}) > 1:
            return [text or what for text, (what, *_) in zip(row, all_said, strict=True)]
    return [what for what, *_ in all_said]


def _without_numbers(text: str) -> str:
    """Keras numbers names, also by layers that one worker has alone."""
    return re.sub(r"_\d+\b", "", text)


def _wait_for(key: str, rank: int) -> str:
    store, started = coordination.key_value_store(), time.monotonic()
    warned = 0.0
    while True:
        if watchdog.verdict() is not None:
            raise Disagreement(watchdog.verdict())
        try:
            return store.get_config_key_value(f"{_PREFIX}/{key}", 1000 * _SLICE_SECONDS)
        except tf.errors.DeadlineExceededError:
            waited = time.monotonic() - started
        if waited - warned >= _WARN_SECONDS:
            warned = waited
            _logger.warning("waiting for worker %d since %.0f s", rank, waited)
