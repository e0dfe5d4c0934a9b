"""The watchdog's messages over a coordination service that fails now and then."""

import json
import re
import time

import pytest
import tensorflow as tf

from tests.unit.lossy_store import LossyStore
from tf_redsync.cluster import coordination, watchdog
from tf_redsync.cluster.stall_detector import WorkerReport
from tf_redsync.network import groups, strategies

SECONDS = 10.0


def workers_with(store, monkeypatch, workers=2):
    """Makes the strategy of a watchdog's thread its rank."""
    monkeypatch.setattr(coordination, "key_value_store", lambda: store)
    monkeypatch.setattr(strategies, "process_rank", lambda rank: rank)
    monkeypatch.setattr(strategies, "process_count", lambda rank: workers)
    monkeypatch.setattr(groups, "task_names", lambda rank: range(workers))


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
    workers_with(store, monkeypatch)
    chief = watchdog._Thread(0, 600.0, 30.0)
    chief._over.set()
    chief.run()
    assert store.log == ["report/1/0", "answer/1/0"]


class SilentWorkers:
    """A simulated clock, and a store in which some of the workers report until second 100."""

    def __init__(self, silent):
        self.silent, self.seconds = silent, 0.0

    def monotonic(self):
        return self.seconds

    def sleep(self, seconds):
        self.seconds += seconds

    def answers(self, rank, seconds):
        silent = rank in self.silent and self.seconds >= 100.0
        self.seconds += seconds if silent else 0.001
        return not silent

    def get_config_key_value(self, key, timeout_in_ms):
        if not self.answers(int(key.split("/")[-2]), timeout_in_ms / 1000):
            raise tf.errors.DeadlineExceededError(None, None, key)
        return WorkerReport(step=int(self.seconds)).to_text()

    def set_config_key_value(self, key, value):
        self.seconds += 0.001

    def delete_config_key_value(self, key):
        self.seconds += 0.001


@pytest.mark.parametrize(("workers", "silent"), [(16, 1), (64, 24), (64, 32), (256, 64)])
def test_many_silent_workers_are_detected_as_soon_as_one(workers, silent, monkeypatch):
    """After half of `heartbeat_seconds` and up to 10 s more (docs/reliability.md)."""
    world = SilentWorkers(range(workers - silent, workers))
    workers_with(world, monkeypatch, workers)
    monkeypatch.setattr(watchdog, "time", world)
    monkeypatch.setattr(coordination, "is_alive", lambda r: world.answers(r, 3.0))
    monkeypatch.setattr(coordination, "is_gone", lambda r: False if world.answers(r, 0.5) else None)
    chief, verdicts = watchdog._Thread(0, 600.0, 30.0), []
    monkeypatch.setattr(chief, "_pause", world.sleep)
    monkeypatch.setattr(chief, "_abort", verdicts.append)
    monkeypatch.setattr(
        watchdog._process, "report", lambda ended: WorkerReport(step=int(min(world.seconds, 100)))
    )
    chief._run_chief()
    assert int(re.match(r"worker (\d+) does not answer", verdicts[0])[1]) in world.silent
    assert 130.0 <= world.seconds <= 140.0 + watchdog._LINGER_SECONDS


def test_reports_continue_after_a_lost_answer_of_the_service(monkeypatch):
    store = LossyStore(stores=True)
    monkeypatch.setattr(LossyStore, "delete_config_key_value", lambda *_: None, raising=False)
    workers_with(store, monkeypatch)
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
