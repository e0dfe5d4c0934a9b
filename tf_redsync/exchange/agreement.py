"""Workers that disagree get an error message and not a deadlock.

They compare texts through the coordination service, without a collective.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

import tensorflow as tf

from tf_redsync.exchange import collectives, coordination, watchdog
from tf_redsync.exchange.differences import differences

_logger = logging.getLogger("tf_redsync")
_SLICE_SECONDS = 5  # of waiting, between two looks at what the watchdog found
_WARN_SECONDS = 20
_PREFIX = "tf_redsync/agree"
_sequence = itertools.count()
_covered: list[str] = []  # what an outer agreement covers


class Disagreement(ValueError):
    """Workers do different things, or were started with different models or configurations."""


def agree(strategy: tf.distribute.Strategy, what: str) -> None:
    """Compare `what` with every other worker, without a collective.

    Every call is numbered, the same on all workers, so a worker that does *something else* than
    the others at this point is found as well. The chief compares and publishes the verdict, hence
    either all workers return or all raise. A worker that comes late is waited for, with a warning
    now and then, until the watchdog finds that it will not come.

    Args:
        strategy: A multi-worker strategy; with one worker nothing happens.
        what: A text that describes what this worker is about to do.

    Raises:
        Disagreement: on every worker, with the differing texts, when they are not all equal.
    """
    if collectives.worker_count(strategy) == 1 or _covered:
        return
    if not collectives.counts_steps(strategy):  # ours is watched since it was made
        watchdog.start(strategy, watchdog.DEFAULT_TIMEOUT_SECONDS)
    with watchdog.waiting_for_agreement(what):
        verdict = _exchange(strategy, what)
    if verdict != "agreed":
        raise Disagreement(verdict)


@contextmanager
def agreed(strategy: tf.distribute.Strategy, what: str) -> Iterator[None]:
    """Agree on `what`, and let that cover all further agreements within this context."""
    agree(strategy, what)
    _covered.append(what)
    try:
        yield
    finally:
        _covered.pop()


def _exchange(strategy: tf.distribute.Strategy, what: str) -> str:
    """Publish this worker's text; return the chief's verdict."""
    number, rank = next(_sequence), collectives.worker_rank(strategy)
    store = coordination.key_value_store()
    if rank != 0:
        store.set_config_key_value(f"{_PREFIX}/{number}/{rank}", what)
        return _wait_for(f"{number}/verdict", 0)
    workers = collectives.worker_count(strategy)
    verdict = _verdict(what, {r: _wait_for(f"{number}/{r}", r) for r in range(1, workers)})
    if number:  # everyone is here, so everyone has read the last verdict
        store.delete_config_key_value(f"{_PREFIX}/{number - 1}")
    store.set_config_key_value(f"{_PREFIX}/{number}/verdict", verdict)
    return verdict


def _verdict(chief: str, texts: dict[int, str]) -> str:
    different = {rank: text for rank, text in texts.items() if text != chief}
    if not different:
        return "agreed"
    shown = differences([chief, *different.values()])
    lines = [f"worker {r}: {text}" for r, text in zip([0, *different], shown, strict=True)]
    return (
        "the workers disagree; start all of them with the same script, flags, model and method, "
        "and let all do the same, whatever their rank:\n" + "\n".join(lines)
    )


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
