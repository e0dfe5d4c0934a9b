"""The watchdog's messages over a coordination service that fails now and then."""

import time

from tests.unit.lossy_store import LossyStore
from tf_redsync.cluster import coordination, watchdog
from tf_redsync.network import groups, strategies

SECONDS = 10.0


def test_reports_continue_after_a_lost_answer_of_the_service(monkeypatch):
    store = LossyStore(stores=True)
    monkeypatch.setattr(LossyStore, "delete_config_key_value", lambda *_: None, raising=False)
    monkeypatch.setattr(coordination, "key_value_store", lambda: store)
    monkeypatch.setattr(strategies, "process_rank", lambda rank: rank)
    monkeypatch.setattr(strategies, "process_count", lambda rank: 2)
    monkeypatch.setattr(groups, "task_names", lambda rank: ["worker:0", "worker:1"])
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
