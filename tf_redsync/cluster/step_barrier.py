"""All workers do something at the end of the same step, whoever asks for it, and whenever.

Without a collective, a request over the network, or a clock in any step:

1. Who asks publishes a request in the coordination service, where a thread of every worker waits.
2. That thread notes the request and publishes how many steps its worker has ended. From now on this
   worker waits at the end of a step until it knows at which one it is to act; so it has ended one
   step more at most.
3. The chief's thread takes the largest number of all, plus one, and publishes it: no worker has
   gone beyond that step, and each of them acts at its end.

The threads answer whatever their workers are doing, so a worker that waits in step 3 does not wait
for one that waits for it in a collective.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from collections import deque

import tensorflow as tf

from tf_redsync.cluster import agreement, coordination, watchdog
from tf_redsync.network import collectives

# A question that is given up is not forgotten in the service, so there should be few of them.
_SLICE_SECONDS = 30.0
_RETRY_SECONDS = 0.2
_PREFIX = "tf_redsync/common_step"
_instances = itertools.count()  # made in the same order on all workers
_logger = logging.getLogger("tf_redsync")


class CommonStep:
    """Requests to act at the end of a step, the same one on all workers.

    All workers make one, call `step` at the ends of the same steps, and `stop` after they have met.

    Args:
        strategy: Whose workers they are.
    """

    def __init__(self, strategy: tf.distribute.Strategy):
        self._rank = collectives.worker_rank(strategy)
        self._workers = collectives.worker_count(strategy)
        self._prefix = f"{_PREFIX}/{next(_instances)}"
        self._changed = threading.Condition()
        self._steps = 0  # ended by this worker
        self._number = 0  # of the request that comes next
        self._reason: str | None = None  # of the one that is being agreed on
        self._target: int | None = None  # the step at whose end to act
        self._acted = ""  # the reason of the last one
        self._asked: deque[str] = deque()  # with one worker
        self._over = threading.Event()
        if self._workers > 1:
            self._store = coordination.key_value_store()
            threading.Thread(target=self._listen, name=_PREFIX, daemon=True).start()

    def ask(self, reason: str) -> None:
        """Ask all workers to act; returns at once, in signal handlers and threads, too.

        Args:
            reason: What `step` returns to all of them. Of several requests of the same reason at
                the same time one is enough.
        """
        if self._workers == 1:
            self._asked.append(reason)
        else:  # a handler may interrupt whatever holds the lock
            threading.Thread(target=self._publish, args=(reason,), daemon=True).start()

    def step(self) -> str | None:
        """A step has ended; return the reason if all workers are to act now.

        Raises:
            Disagreement: when the watchdog finds that some worker will not come.
        """
        if self._workers == 1:
            return self._asked.popleft() if self._asked else None
        with self._changed:
            self._steps += 1
            while self._reason is not None and self._target is None:
                self._changed.wait(1.0)
                if watchdog.verdict() is not None:
                    raise agreement.Disagreement(watchdog.verdict())
            if self._target is None or self._steps < self._target:
                return None
            self._acted, self._reason, self._target = self._reason or "", None, None
            self._number += 1
            self._changed.notify_all()
            return self._acted

    def stop(self) -> None:
        """No step follows; all workers have met since their last one."""
        self._over.set()

    def _publish(self, reason: str) -> None:
        while not self._over.is_set():
            number = self._number
            with contextlib.suppress(tf.errors.AlreadyExistsError):
                if self._set(f"request/{number}", reason):
                    return
            while self._number == number and not self._over.is_set():  # another one came first
                time.sleep(_RETRY_SECONDS)
            if self._acted == reason:
                return

    def _listen(self) -> None:
        while not self._over.is_set():
            number = self._number
            reason = self._get(f"request/{number}")
            if reason is None:
                return
            with self._changed:
                self._reason, ended = reason, self._steps
            self._set(f"ended/{number}/{self._rank}", str(ended))
            if self._rank == 0:
                steps = [self._get(f"ended/{number}/{r}") for r in range(self._workers)]
                self._set(f"target/{number}", str(1 + max(int(s) for s in steps if s is not None)))
            target = self._get(f"target/{number}")
            if target is None:
                return
            with self._changed:
                self._target = int(target)
                self._changed.notify_all()
                while self._number == number and not self._over.is_set():
                    self._changed.wait(1.0)

    def _set(self, key: str, value: str) -> bool:
        """Publish something; whether the service took it."""
        try:
            self._store.set_config_key_value(f"{self._prefix}/{key}", value)
        except tf.errors.AlreadyExistsError:
            raise
        except tf.errors.OpError as error:
            _logger.debug("%s", error)
            return False
        return True

    def _get(self, key: str) -> str | None:
        """Wait for what another worker publishes; `None` when there is nothing to wait for."""
        while not self._over.is_set() and watchdog.verdict() is None:
            try:
                return self._store.get_config_key_value(
                    f"{self._prefix}/{key}", int(1000 * _SLICE_SECONDS)
                )
            except tf.errors.DeadlineExceededError:
                continue
            except tf.errors.OpError as error:
                _logger.debug("%s", error)
                self._over.wait(_RETRY_SECONDS)
        return None
