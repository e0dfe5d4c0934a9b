"""Step barrier: on request, all workers act at the end of the same step.

Ordinary steps need no collective, no network and no clock for it:

1. A worker publishes a request in the coordination service, where a thread of every worker listens.
2. That thread publishes the number of steps that its worker has ended. From then on the worker
   waits at the end of its step until it knows the target step, so it ends at most one more step.
3. The chief's thread publishes the largest count plus one as the target. No worker has passed that
   step, and all act at its end.

The threads answer even while their workers are in a step. So a worker that waits for the target
cannot deadlock with a worker that waits for it in a collective.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from contextlib import suppress

import tensorflow as tf

from tf_redsync.cluster import agreement, coordination, watchdog
from tf_redsync.network import strategies

# Seconds of a query. Service and client keep each query that has timed out, so the wait for a
# request, which lasts for the whole training, has long ones.
_REQUEST_SECONDS = 3600.0
_ANSWER_SECONDS = 30.0
_RETRY_SECONDS = 0.2
_PREFIX = "tf_redsync/step_barrier"
_instances = itertools.count()  # created in the same order on all workers
_logger = logging.getLogger("tf_redsync")


class StepBarrier:
    """Barrier at the end of a step that all workers agree on.

    All workers create one, call `step` at the end of every step, and call `stop` after their last
    common synchronization.

    Args:
        strategy: Strategy of the workers.
    """

    def __init__(self, strategy: tf.distribute.Strategy):
        self._rank = strategies.process_rank(strategy)
        self._workers = strategies.process_count(strategy)
        self._prefix = f"{_PREFIX}/{next(_instances)}"
        self._changed = threading.Condition()
        self._steps = 0  # number of steps that this worker has ended
        self._reason: str | None = None  # reason of the request in progress
        self._target: int | None = None  # the step at whose end to act
        self._acted: list[str] = []  # reasons of all requests so far
        self._asked: deque[str] = deque()  # used with one worker only
        self._over = threading.Event()
        if self._workers > 1:
            self._store = coordination.key_value_store()
            threading.Thread(target=self._listen, name=_PREFIX, daemon=True).start()

    @property
    def _number(self) -> int:
        """The number of the next request."""
        return len(self._acted)

    def ask(self, reason: str, unless_acted: bool = False) -> None:
        """Ask all workers to act; returns at once, also in signal handlers and threads.

        Args:
            reason: The value that `step` returns on all workers, a non-empty string. Simultaneous
                requests with the same reason count once.
            unless_acted: Whether to drop the request if all act on another one first.
        """
        if self._workers > 1:  # a signal handler may interrupt the holder of the lock
            arguments = (reason, self._number, unless_acted)
            threading.Thread(target=self._publish, args=arguments, daemon=True).start()
        elif not (unless_acted and self._asked):
            self._asked.append(reason)

    def step(self) -> str | None:
        """Count the end of a step; return the reason if all workers must act now, else `None`.

        Raises:
            Disagreement: if the watchdog finds a lost or stalled worker.
        """
        if self._workers == 1:
            return self._asked.popleft() if self._asked else None
        with self._changed:
            self._steps += 1
            if self._reason is not None and self._target is None:
                self._wait_for_target()
            if self._target is None or self._steps < self._target:
                return None
            reason, self._reason, self._target = self._reason or "", None, None
            self._acted.append(reason)
            self._changed.notify_all()
            return reason

    def _wait_for_target(self) -> None:
        # A worker that has left the training does not answer; the watchdog names it.
        with watchdog.waiting_for_others("act at the end of a step"):
            while self._target is None:
                self._changed.wait(1.0)
                if watchdog.verdict() is not None:
                    raise agreement.Disagreement(watchdog.verdict())

    def stop(self) -> None:
        """End the barrier; call it after the last step, when all workers have synchronized."""
        if self._workers > 1 and self._rank == 0:
            threading.Thread(target=self._end, name=_PREFIX, daemon=True).start()
        else:
            self._over.set()

    def _end(self) -> None:
        """End the threads of all workers, by an empty request unless another one came first."""
        self._set(f"{self._number}/request", "")
        self._over.set()

    def _publish(self, reason: str, number: int, unless_acted: bool) -> None:
        while not self._over.is_set():
            # Otherwise all have acted on this number, and its key may have been deleted.
            if self._set(f"{number}/request", reason) and self._number == number:
                return
            while self._number == number and not self._over.is_set():  # another request came first
                time.sleep(_RETRY_SECONDS)
            if unless_acted or reason in self._acted[number:]:
                return
            number = self._number

    def _listen(self) -> None:
        while not self._over.is_set():
            number = self._number
            reason = self._get(f"{number}/request", _REQUEST_SECONDS)
            if not reason:
                return
            with self._changed:
                self._reason, ended = reason, self._steps
            self._set(f"{number}/ended/{self._rank}", str(ended))
            if self._rank == 0:
                steps = [self._get(f"{number}/ended/{r}") for r in range(self._workers)]
                if None in steps:
                    return
                last = max(int(s) for s in steps if s is not None)
                self._set(f"{number}/target", str(1 + last))
                # A thread answers after it has left the previous request: none reads its keys now.
                with suppress(tf.errors.OpError):
                    self._store.delete_config_key_value(f"{self._prefix}/{number - 1}")
            target = self._get(f"{number}/target")
            if target is None:
                return
            with self._changed:
                self._target = int(target)
                self._changed.notify_all()
                while self._number == number and not self._over.is_set():
                    self._changed.wait(1.0)

    def _set(self, key: str, value: str) -> bool:
        """Publish a text, with retries until `stop` or a verdict.

        Returns:
            Whether the service accepted it. `False` also if the key exists, perhaps from an earlier
            attempt whose answer was lost.
        """
        while not self._over.is_set() and watchdog.verdict() is None:
            try:
                self._store.set_config_key_value(f"{self._prefix}/{key}", value)
            except tf.errors.AlreadyExistsError:
                return False
            except tf.errors.OpError as error:
                _logger.debug("%s", error)
                self._over.wait(_RETRY_SECONDS)
            else:
                return True
        return False

    def _get(self, key: str, seconds: float = _ANSWER_SECONDS) -> str | None:
        """Wait for a text of another worker, by queries of `seconds`.

        Returns:
            The text; `None` if a query has ended after `stop` or a verdict.
        """
        while not self._over.is_set() and watchdog.verdict() is None:
            try:
                return self._store.get_config_key_value(
                    f"{self._prefix}/{key}", int(1000 * seconds)
                )
            except tf.errors.DeadlineExceededError:
                continue
            except tf.errors.OpError as error:
                _logger.debug("%s", error)
                self._over.wait(_RETRY_SECONDS)
        return None
