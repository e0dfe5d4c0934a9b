"""The step barrier with a coordination service that fails now and then."""

import itertools
import threading
import time

import pytest
import tensorflow as tf

from tf_redsync.cluster import coordination, step_barrier
from tf_redsync.network import collectives

WORKERS = 2
SECONDS = 10.0


class Store:
    """A key-value store in this process whose first `set` of each key fails.

    Args:
        stores: Whether a failing `set` has stored its text, so that only the answer is lost.
    """

    def __init__(self, stores):
        self._stores = stores
        self._texts, self._failed = {}, set()
        self._changed = threading.Condition()

    def set_config_key_value(self, key, value):
        with self._changed:
            first = key not in self._failed
            self._failed.add(key)
            if key in self._texts:
                raise tf.errors.AlreadyExistsError(None, None, key)
            if not first or self._stores:
                self._texts[key] = value
                self._changed.notify_all()
            if first:
                raise tf.errors.UnavailableError(None, None, "the connection was reset")

    def get_config_key_value(self, key, timeout_in_ms):
        with self._changed:
            if not self._changed.wait_for(lambda: key in self._texts, timeout_in_ms / 1000):
                raise tf.errors.DeadlineExceededError(None, None, key)
            return self._texts[key]


@pytest.fixture(params=[False, True], ids=["request lost", "answer lost"])
def barriers(request, monkeypatch):
    """A barrier for each of two workers; the strategy is its rank."""
    store = Store(request.param)
    monkeypatch.setattr(coordination, "key_value_store", lambda: store)
    monkeypatch.setattr(collectives, "worker_rank", lambda rank: rank)
    monkeypatch.setattr(collectives, "worker_count", lambda rank: WORKERS)
    monkeypatch.setattr(step_barrier, "_SLICE_SECONDS", 0.1)
    made = []
    for rank in range(WORKERS):
        monkeypatch.setattr(step_barrier, "_instances", itertools.count())
        made.append(step_barrier.StepBarrier(rank))
    yield made
    for barrier in made:
        barrier.stop()


def test_workers_act_at_the_same_step_although_requests_fail(barriers):
    acted = {}

    def train(rank):
        for number in itertools.count(1):
            reason = barriers[rank].step()
            if reason is not None:
                acted[rank] = number, reason
                return
            time.sleep(0.01)

    threads = [threading.Thread(target=train, args=(r,), daemon=True) for r in range(WORKERS)]
    for thread in threads:
        thread.start()
    barriers[1].ask("SIGTERM")
    for thread in threads:
        thread.join(SECONDS)
    assert len(acted) == WORKERS, f"only {sorted(acted)} of {WORKERS} workers acted"
    assert acted[0] == acted[1]
    assert acted[0][1] == "SIGTERM"
