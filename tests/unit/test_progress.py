"""Who is to blame when workers wait for each other: judged from reports, on a clock of the test."""

import contextlib
import dataclasses

import pytest

from tf_redsync.cluster import agreement
from tf_redsync.cluster.stall_detector import StallDetector, WorkerReport


class Room:
    """Workers that report every second."""

    def __init__(self, workers, timeout_seconds=60.0, dead=(), refusing=()):
        self.judge = StallDetector(
            range(workers),
            timeout_seconds,
            answers=lambda rank: rank not in dead and rank not in refusing,
            gone=lambda rank: rank in refusing,
        )
        self.reports = [WorkerReport() for _ in range(workers)]
        self.silent = set()
        self.now = 0.0

    def pass_seconds(self, seconds):
        """Let time pass; return the first verdict and when it came."""
        for second in range(seconds):
            self.now += 1.0
            for rank, report in enumerate(self.reports):
                if rank not in self.silent:
                    self.judge.hear(rank, report, self.now)
            found = self.judge.verdict(self.now)
            if found:
                return found, second + 1
        return None, seconds


def at(step, waits=None, ended=False, agreements=3, error=""):
    waiting = agreements + (waits is not None)
    return WorkerReport(step, waiting, waits, "begin epoch 1", ended, error=error, supplied=step)


def test_equal_steps_never_fire():
    room = Room(3)
    room.reports = [at(812)] * 3
    assert room.pass_seconds(10_000) == (None, 10_000)  # an evaluation, or a pause of all


def test_a_worker_that_stays_behind_is_named_after_the_limit():
    room = Room(3)
    room.reports = [at(813), at(813), at(812)]
    found, seconds = room.pass_seconds(1000)
    assert 60 <= seconds <= 62
    assert found.startswith("worker 2 did not reach the others within 60 s.")
    assert "larger `timeout_seconds`. Received: timeout_seconds=60" in found
    assert "worker 2 is at step 812, after: begin epoch 1\nworker 0 is at step 813" in found


def test_the_limit_begins_with_the_other_ones_step():
    room = Room(2)
    room.reports = [at(5), at(5)]
    assert room.pass_seconds(500)[0] is None
    room.reports = [at(6), at(5)]
    assert room.pass_seconds(1000)[1] >= 60


def test_slow_but_moving_workers_never_fire():
    room = Room(2)
    for step in range(20):
        room.reports = [at(step + 1), at(step)]
        assert room.pass_seconds(50)[0] is None


def test_no_limit_no_verdict():
    room = Room(2, timeout_seconds=None, dead=(1,))
    room.reports = [at(9), at(8, ended=True)]
    assert room.pass_seconds(10_000)[0] is None


def test_waiting_for_an_agreement_while_another_has_gone_on():
    room = Room(3)
    room.reports = [at(812, "save the state"), at(813), at(813)]
    found, seconds = room.pass_seconds(1000)
    assert 10 <= seconds <= 12
    assert "worker 0 is about to: save the state; worker 1 has entered a further step" in found
    assert "worker 0 is at step 812 and waits for all workers to: save the state" in found


def test_a_worker_that_was_stopped_in_an_agreement_is_not_told_to_do_something_else():
    # All have agreed, and worker 2 is stopped before it can say so.
    room = Room(3, timeout_seconds=15.0, dead={2})
    room.reports = [at(0, "begin `fit`")] * 3
    room.pass_seconds(2)
    room.silent.add(2)
    room.reports[:2] = [at(7, agreements=4)] * 2
    found, seconds = room.pass_seconds(100)
    assert 14 <= seconds <= 17
    assert found.startswith("worker 2 does not answer")


def creates(what, size=100, agreements=2):
    return WorkerReport(0, agreements, what, "", broadcasts=size)


@pytest.mark.parametrize(("size", "seconds"), [(100, 10), (200_000_000, 30)])
def test_a_variable_that_one_worker_creates_alone_is_named(size, seconds):
    room = Room(3)
    room.reports = [creates("create variable kernel", size)] + [at(0, "begin epoch 1")] * 2
    found, after = room.pass_seconds(1000)
    assert seconds <= after <= seconds + 2
    assert "worker 1 is about to: begin epoch 1; worker 0 is about to: create variable k" in found


def test_all_may_wait_for_a_large_variable_as_long_as_a_slow_network_takes():
    room = Room(2)
    room.reports = [creates("create variable embedding", 2_000_000_000)] * 2  # 200 s
    assert room.pass_seconds(259)[0] is None
    found, _ = room.pass_seconds(3)
    assert found.startswith("the workers have waited for each other for 60 s")


def test_a_broadcast_that_fails_is_told_at_once():
    room = Room(2)
    room.reports = [
        creates("create variable kernel (3, 4)"),
        WorkerReport(failed="create variable kernel (3, 5): Shape mismatch"),
    ]
    found, after = room.pass_seconds(100)
    assert after == 1 and found.startswith("the workers disagree: create the same variables")
    assert "worker 0 is at step 0 and waits for all workers to: create variable kernel (3" in found
    assert "worker 1 could not create variable kernel (3, 5): Shape mismatch" in found


@pytest.mark.parametrize("late", [1, 100])
def test_a_failed_broadcast_waits_for_the_words_of_the_others(late):
    room, failed = Room(2), WorkerReport(failed="create variable kernel (3, 5): Shape mismatch")
    room.reports = [failed, at(0)]
    assert room.pass_seconds(1)[0] is None
    if late == 1:
        room.reports[1] = WorkerReport(failed="create variable kernel (3, 4): Shape mismatch")
    found, after = room.pass_seconds(100)
    assert after == (1 if late == 1 else 2) and found.startswith("the workers disagree")
    assert "kernel (3, 5)" in found and ("kernel (3, 4)" in found) == (late == 1)


def test_a_slow_broadcast_to_all_is_none():
    room = Room(3, timeout_seconds=60.0)
    room.reports = [creates("create variable kernel")] * 3
    assert room.pass_seconds(50)[0] is None
    room.reports = [creates("create variable bias")] * 2 + [creates("create variable kernel")]
    assert room.pass_seconds(9)[0] is None
    room.reports = [creates("create variable bias")] * 3
    found, after = room.pass_seconds(100)
    assert 50 <= after <= 62 and found.startswith(
        "the workers have waited for each other for 60 s:"
    )


def test_a_worker_that_creates_no_variable_is_named():
    room = Room(2)
    room.reports = [creates("create variable kernel"), at(0, agreements=2)]
    found, after = room.pass_seconds(100)
    assert 60 <= after <= 62 and found.startswith("worker 1 did not reach the others")


def test_a_worker_may_come_late_to_an_agreement():
    room = Room(2)
    room.reports = [at(812, "begin epoch 2"), at(812)]  # a slow callback of worker 1
    assert room.pass_seconds(59)[0] is None
    found, _ = room.pass_seconds(3)
    assert found.startswith("worker 1 did not reach the others within 60 s")


def test_a_worker_with_more_steps_of_its_own_may_come_late():
    room = Room(2)
    for step in range(813, 843):
        room.reports = [at(812, "begin epoch 2"), at(step)]
        assert room.pass_seconds(1)[0] is None


@pytest.mark.parametrize("waits", [None, "save the state"])
def test_a_worker_that_has_ended_is_not_waited_for(waits):
    room = Room(2)
    room.reports = [at(812, waits) if waits else at(813), at(812, ended=True)]
    found, seconds = room.pass_seconds(100)
    assert 5 <= seconds <= 7
    assert found.startswith("worker 1 has ended its program, and worker 0 waits for it:")
    assert "worker 1 has ended its program, at step 812" in found


def test_a_worker_that_has_failed_is_named_at_once_in_the_same_step_too():
    room = Room(3)
    failed = at(812, ended=True, error="ValueError: bad batch")
    room.reports = [at(812, ended=True), failed, at(812)]
    found, seconds = room.pass_seconds(100)
    assert seconds == 1 and found.startswith("worker 1 has failed: ValueError: bad batch\n")
    assert "worker 1 has ended its program, at step 812, by ValueError: bad batch" in found
    room.reports = [at(812, ended=True), failed, at(812, ended=True)]
    assert room.pass_seconds(1000)[0] is None  # nobody is left to be told


def test_a_worker_may_end_before_the_others():
    room = Room(2)
    room.reports = [at(812), at(812, ended=True)]
    room.silent = {1}
    room.judge.hear(1, room.reports[1], 0.0)
    assert room.pass_seconds(10_000)[0] is None


def silent_since_812(silent, **room):
    """Three workers, of which some fall silent at step 812 while the others go on to 813."""
    room = Room(3, timeout_seconds=600.0, **room)
    room.reports = [at(812)] * 3
    assert room.pass_seconds(20)[0] is None
    room.silent = silent
    room.reports = [at(812 if rank in silent else 813) for rank in range(3)]
    return room.pass_seconds(1000)


def test_a_dead_worker_is_named_soon():
    found, seconds = silent_since_812({2}, dead=(2,))
    assert 30 <= seconds <= 32
    assert found.startswith("worker 2 does not answer")
    assert "worker 2 is at step 812, after: begin epoch 1; last report 30 s ago" in found


def test_an_ended_process_is_named_within_seconds():
    found, seconds = silent_since_812({2}, refusing=(2,))
    assert 2 <= seconds <= 3
    assert found.startswith("worker 2 does not answer")
    assert "worker 2 is at step 812" in found and "worker 1 is at step 813" in found
    found, seconds = silent_since_812({1, 2}, refusing=(1, 2))
    assert seconds <= 5 and "does not answer" in found


def test_a_dead_worker_is_named_with_the_steps_that_the_others_have_reached():
    room = Room(3, timeout_seconds=6.0, dead=(2,))
    room.reports = [at(6)] * 3
    room.pass_seconds(3)
    room.silent = {2}
    room.pass_seconds(2)
    room.silent = {1, 2}  # the machine is busy, and the next report of worker 1 comes late
    room.reports[:2] = [at(7)] * 2
    assert room.pass_seconds(5)[0] is None
    room.silent = {2}
    found, seconds = room.pass_seconds(10)
    assert seconds == 1 and found.startswith("worker 2 does not answer")
    assert "worker 1 is at step 7" in found and "worker 2 is at step 6" in found


def test_a_dead_worker_has_the_steps_whose_messages_the_others_have():
    """A worker may send messages after its last report."""
    room = Room(2, timeout_seconds=600.0, dead=(1,))
    room.reports = [at(812)] * 2
    room.pass_seconds(5)
    room.silent = {1}
    room.reports[0] = dataclasses.replace(at(815), exchanged=814)
    found, _ = room.pass_seconds(100)
    assert found.startswith("worker 1 does not answer")
    assert "worker 1 is at step 814; last report 30 s ago" in found


def test_a_silent_worker_that_answers_has_the_whole_limit():
    room = Room(2, timeout_seconds=600.0)
    room.reports = [at(812)] * 2
    room.pass_seconds(5)
    room.silent = {1}  # its threads wait for a function that does not let go of Python
    assert room.pass_seconds(5000)[0] is None  # while nobody waits for it
    room.reports[0] = at(813)
    found, seconds = room.pass_seconds(5000)
    assert found.startswith("worker 1 did not reach") and 600 <= seconds <= 602


def test_many_workers_make_a_short_text():
    room = Room(100)
    room.reports = [at(813)] * 77 + [at(812)] + [at(813)] * 22
    found, _ = room.pass_seconds(100)
    assert len(found.splitlines()) < 25 and "and 84 more workers" in found
    assert found.splitlines()[1].startswith("worker 77 is at step 812")


def test_a_report_survives_the_wire():
    report = WorkerReport(5, 3, "save the exchange's state", "begin", True, error="OSError: full")
    assert WorkerReport.from_text(report.to_text()) == report


def gets(step, *, asked, answered, arrived=812):
    """A step of `fit` over a finite dataset: its batches are asked for before it has them."""
    return WorkerReport(step, 3, supplied=812, asked=asked, answered=answered, arrived=arrived)


def test_a_worker_whose_data_do_not_come_is_warned_of_and_named():
    # Keras 3 and tf_keras: the step begins with the batch, or with the function around it.
    for step in (812, 813):
        room = Room(3)
        room.reports = [gets(step, asked=813, answered=813)] * 3
        room.reports[1] = gets(step, asked=813, answered=812)
        told = []
        for _ in range(59):
            assert room.pass_seconds(1)[0] is None
            told.append(room.judge.warnings(room.now))
        assert [i for i, texts in enumerate(told) if texts] == [15, 30, 45]
        assert list(told[15]) == [1] and "worker 1 has waited 15 s for data" in told[15][1]
        found, seconds = room.pass_seconds(10)
        assert seconds <= 3 and found.startswith("worker 1 did not reach the others")
        assert "worker 1 waited for data" in found
        assert f"worker 1 is at step {step} and waits for data\n" in found


def test_data_of_an_infinite_dataset_are_missing_too():
    room = Room(2)
    waits = WorkerReport(813, 3, supplied=812, arrived=812)
    room.reports = [WorkerReport(813, 3, supplied=813, arrived=813), waits]
    assert room.pass_seconds(20)[0] is None
    assert "worker 1 has waited 19 s for data" in room.judge.warnings(room.now)[1]


def test_a_slow_callback_of_one_worker_is_warned_of():
    room = Room(2)
    room.reports = [at(813), at(812)]
    assert room.pass_seconds(40)[0] is None
    told = room.judge.warnings(room.now)
    assert list(told) == [1] and "data" not in told[1]
    room.reports[1] = at(813)
    room.pass_seconds(100)
    assert room.judge.warnings(room.now) == {}


def test_workers_that_all_wait_for_data_are_no_case():
    room = Room(2)
    room.reports = [gets(813, asked=813, answered=812)] * 2
    assert room.pass_seconds(1000) == (None, 1000)
    assert room.judge.warnings(room.now) == {}


def test_a_worker_that_asks_for_more_batches_than_another_has_is_named():
    room = Room(2)
    room.reports = [at(812, "end epoch 1"), gets(812, asked=813, answered=813)]
    found, seconds = room.pass_seconds(100)
    assert 10 <= seconds <= 12 and "worker 1 has entered a further step" in found


@pytest.mark.parametrize("length", [20, 5000])
def test_an_error_shows_the_beginning_of_a_long_action(monkeypatch, length):
    """Such as of a configuration, which is compared in full."""
    shown, compared = [], []
    monkeypatch.setattr(
        agreement.watchdog,
        "waiting_for_agreement",
        lambda what: contextlib.nullcontext(shown.append(what)),
    )
    monkeypatch.setattr(
        agreement, "_exchange", lambda _, what, told: (compared.append(what), ("agreed", []))[1]
    )
    monkeypatch.setattr(agreement.collectives, "is_ours", lambda _: True)
    agreement._agree_and_gather(None, "x" * length, "")
    assert compared == ["x" * length]
    assert (shown == compared) == (length == 20) and len(shown[0]) < 300


def broken_room(dead):
    """Two workers; the collective of worker 0 has just failed, and worker 1 is silent."""
    room = Room(2, dead=dead)
    room.reports = [at(5), at(5)]
    assert room.pass_seconds(3) == (None, 3)
    room.silent = {1}
    room.judge.hear(0, dataclasses.replace(at(5), broken=True), room.now)
    return room


def test_after_a_failed_collective_a_killed_worker_is_found_within_a_second():
    room = broken_room({1})
    assert room.judge.verdict(room.now) is None  # its last report may be on the way
    assert not room.judge.is_lost(1)
    found = room.judge.verdict(room.now + 0.6)
    assert found is not None and found.startswith("worker 1 does not answer")
    assert room.judge.is_lost(1) and not room.judge.is_lost(0)


def test_after_a_failed_collective_a_worker_may_still_report_its_error():
    room = broken_room({1})
    room.judge.hear(1, at(5, ended=True, error="ValueError: bad row"), room.now + 0.1)
    found = room.judge.verdict(room.now + 0.6)
    assert found is not None and found.startswith("worker 1 has failed: ValueError: bad row")


def test_after_a_failed_collective_a_worker_that_answers_is_not_lost():
    room = broken_room(set())
    assert room.judge.verdict(room.now + 0.6) is None
