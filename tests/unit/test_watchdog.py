"""The watchdog's messages over a coordination service that fails now and then."""

import json
import time

import tensorflow as tf

from tests.unit.lossy_store import LossyStore
from tf_redsync.cluster import coordination, watchdog
from tf_redsync.cluster.stall_detector import WorkerReport
from tf_redsync.network import groups, strategies

SECONDS = 10.0


def two_workers_with(store, monkeypatch):
    """Makes the strategy of a watchdog's thread its rank."""
    monkeypatch.setattr(coordination, "key_value_store", lambda: store)
    monkeypatch.setattr(strategies, "process_rank", lambda rank: rank)
    monkeypatch.setattr(strategies, "process_count", lambda rank: 2)
    monkeypatch.setattr(groups, "task_names", lambda rank: ["worker:0", "worker:1"])


class PausingWorker:
    """A key-value store in which worker 1 publishes its next report in `left` seconds."""

    def __init__(self, left):
        self.left, self.log = left, []

    def get_config_key_value(self, key, timeout_in_ms):
        self.left -= timeout_in_ms / 1000
        if self.left > 0:
            raise tf.errors.DeadlineExceededError(None, None, key)
        self.log.append(key.rpartition("watchdog/")[2])
        return WorkerReport().to_text()

    def set_config_key_value(self, key, value):
        if json.loads(value)["ended"]:
            self.log.append(key.rpartition("watchdog/")[2])

    def delete_config_key_value(self, key):
        pass


def test_chief_that_ends_answers_a_worker_that_pauses(monkeypatch):
    """Otherwise that worker would find the chief's service gone and report a killed process."""
    store = PausingWorker(left=0.99 * watchdog.PERIOD_SECONDS / 2)
    two_workers_with(store, monkeypatch)
    chief = watchdog._Thread(0, 600.0, 30.0)
    chief._over.set()
    chief.run()
    assert store.log == ["report/1/0", "answer/1/0"]


def test_reports_continue_after_a_lost_answer_of_the_service(monkeypatch):
    store = LossyStore(stores=True)
    monkeypatch.setattr(LossyStore, "delete_config_key_value", lambda *_: None, raising=False)
    two_workers_with(store, monkeypatch)
    monkeypatch.setattr(watchdog, "PERIOD_SECONDS", 0.05)
    monkeypatch.setattr(watchdog, "_READ_SECONDS", 0.02)
    threads = [watchdog._Thread(rank, 600.0, 30.0) for rank in range(2)]
    heard = []
    hear = threads[0].detector.hear
    monkeypatch.setattr(
        threads[0].detector, "hear", lambda rank, *rest: (heard.append(rank), hear(rank, *rest))
    )
    for thread in threads:
        thread.start()
    limit = time.monotonic() + SECONDS
    while heard.count(1) < 3 and time.monotonic() < limit:
        time.sleep(0.02)
    for thread in reversed(threads):
        thread.end()
    assert heard.count(1) >= 3, f"the chief has read {heard.count(1)} reports of worker 1"
