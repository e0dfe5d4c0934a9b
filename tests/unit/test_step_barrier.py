"""The step barrier with a coordination service that fails now and then."""

import itertools
import threading
import time

import pytest

from tests.unit.lossy_store import LossyStore
from tf_redsync.cluster import agreement, coordination, step_barrier, watchdog
from tf_redsync.cluster.stall_detector import StallDetector, WorkerReport
from tf_redsync.network import strategies

WORKERS = 2
SECONDS = 10.0


@pytest.fixture(params=[False, True], ids=["request lost", "answer lost"])
def barriers(request, monkeypatch):
    """A barrier for each of two workers; the strategy is its rank. All threads end after it."""
    before = {*threading.enumerate()}
    store = LossyStore(request.param)
    monkeypatch.setattr(coordination, "key_value_store", lambda: store)
    monkeypatch.setattr(watchdog, "_process", watchdog._Process())
    monkeypatch.setattr(strategies, "process_rank", lambda rank: rank)
    monkeypatch.setattr(strategies, "process_count", lambda rank: WORKERS)
    made = []
    for rank in range(WORKERS):
        monkeypatch.setattr(step_barrier, "_instances", itertools.count())
        made.append(step_barrier.StepBarrier(rank))
    yield made
    for barrier in made:
        barrier.stop()
    for thread in {*threading.enumerate()} - before:
        thread.join(SECONDS)
        assert not thread.is_alive()


def act_once(barriers):
    """Trains until all workers have acted; returns each one's step and reason."""
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
    for thread in threads:
        thread.join(SECONDS)
    assert len(acted) == WORKERS, f"only {sorted(acted)} of {WORKERS} workers acted"
    return acted


def train_together(barriers):
    """Trains until some steps after the third request; returns the requests' reasons."""
    acted, together = [[], []], threading.Barrier(WORKERS)

    def train(rank):
        left = 100
        while left:
            if reason := barriers[rank].step():
                acted[rank].append(reason)
            left -= len(acted[rank]) >= 3
            time.sleep(0.01)
            together.wait(SECONDS)

    threads = [threading.Thread(target=train, args=(r,), daemon=True) for r in range(WORKERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert acted[0] == acted[1]
    return acted[0]


def test_simultaneous_requests_of_all_workers_count_once(barriers):
    """Also if several are served before a worker sees that its own was not the first."""
    for barrier in barriers:
        for reason in ("a", "b", "c"):
            barrier.ask(reason)
    assert sorted(train_together(barriers)) == ["a", "b", "c"]
    last = barriers[0]._store.keys()  # otherwise a training of days would leave many
    assert last and all(key.startswith(f"{barriers[0]._prefix}/2/") for key in last)


def test_request_is_not_lost_if_its_key_has_been_deleted(barriers, monkeypatch):
    """A thread that publishes may sleep while all workers act on two other requests."""
    store, publish, deleted = barriers[0]._store, barriers[1]._set, threading.Event()
    delete = store.delete_config_key_value

    def late(key, value):
        if (key, value) == ("0/request", "late"):
            assert deleted.wait(SECONDS)
        return publish(key, value)

    def deleting(key):
        delete(key)
        if key == f"{barriers[0]._prefix}/0":
            deleted.set()

    monkeypatch.setattr(barriers[1], "_set", late)
    monkeypatch.setattr(store, "delete_config_key_value", deleting)
    barriers[1].ask("late")
    for reason in ("a", "b"):
        barriers[0].ask(reason)
    assert sorted(train_together(barriers)) == ["a", "b", "late"]


def wait_for(condition):
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end, "condition not reached"
        time.sleep(0.01)


def test_watchdog_names_a_worker_that_has_left_the_training(barriers, monkeypatch):
    """It has received the request, and its program continues."""
    detector, clock = StallDetector(range(WORKERS), 600.0, lambda _: True, lambda _: False), []
    main = threading.current_thread()

    def verdict():
        if threading.current_thread() is not main:
            return None
        clock.append(400.0 * len(clock))
        detector.hear(0, watchdog._process.report(False), clock[-1])
        detector.hear(1, WorkerReport(), clock[-1])
        return detector.verdict(clock[-1]) or ("no verdict" if len(clock) >= 4 else None)

    barriers[1].stop()
    barriers[0].ask("SIGTERM")
    wait_for(lambda: barriers[0]._reason)
    monkeypatch.setattr(watchdog, "verdict", verdict)
    monkeypatch.setattr(barriers[0]._changed, "wait", lambda seconds: None)
    with pytest.raises(agreement.Disagreement, match="worker 1 did not reach the others"):
        barriers[0].step()
    assert watchdog._process.waits is None
    barriers[1]._over.clear()
    barriers[1]._set("0/ended/1", "0")  # ends the query of the other one's thread


def test_workers_act_at_the_same_step_although_requests_fail(barriers):
    barriers[1].ask("SIGTERM")
    acted = act_once(barriers)
    assert acted[0] == acted[1]
    assert acted[0][1] == "SIGTERM"


def test_request_is_dropped_if_all_act_on_another_one(barriers):
    barriers[1].ask("first")
    wait_for(lambda: barriers[0]._reason)
    before = {*threading.enumerate()}
    barriers[0].ask("second", unless_acted=True)
    (publishes,) = {*threading.enumerate()} - before
    assert act_once(barriers)[0][1] == "first"
    publishes.join(SECONDS)
    assert not publishes.is_alive()
    assert f"{barriers[0]._prefix}/1/request" not in barriers[0]._store.keys()
