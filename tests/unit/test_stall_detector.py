"""The stall detector: which worker it blames, judged from reports on a simulated clock."""

import contextlib
import copy
import dataclasses
import itertools
import json
import types

import pytest
import tensorflow as tf

from tf_redsync.cluster import agreement
from tf_redsync.cluster.stall_detector import StallDetector, WorkerReport


class Simulation:
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
        """Advances the clock; returns the first verdict and its time."""
        for second in range(seconds):
            self.now += 1.0
            for rank, report in enumerate(self.reports):
                if rank not in self.silent:
                    self.judge.hear(rank, report, self.now)
            found = self.judge.verdict(self.now)
            if found:
                return found, second + 1
        return None, seconds


def at_step(step, waits=None, ended=False, agreements=3, error=""):
    waiting = agreements + (waits is not None)
    return WorkerReport(step, waiting, waits, "begin epoch 1", ended, error=error, supplied=step)


def test_equal_steps_never_raise():
    simulation = Simulation(3)
    simulation.reports = [at_step(812)] * 3
    assert simulation.pass_seconds(10_000) == (None, 10_000)  # an evaluation, or a pause of all


def test_stalled_worker_is_named_after_the_limit():
    simulation = Simulation(3)
    simulation.reports = [at_step(813), at_step(813), at_step(812)]
    found, seconds = simulation.pass_seconds(1000)
    assert 60 <= seconds <= 62
    assert found.startswith("worker 2 did not reach the others within 60 s.")
    assert "larger `timeout_seconds`. Received: timeout_seconds=60" in found
    assert "worker 2 is at step 812, after: begin epoch 1\nworker 0 is at step 813" in found


def test_wait_in_the_step_barrier_is_no_other_action():
    """Worker 2's process pauses for a while; the others have the whole limit."""
    waits = dataclasses.replace(at_step(7), waits="act at the end of a step")
    simulation = Simulation(3)
    simulation.reports = [waits, at_step(8), at_step(7)]
    found, seconds = simulation.pass_seconds(1000)
    assert 60 <= seconds <= 62
    assert found.startswith("workers 0, 2 did not reach the others")


def test_limit_starts_with_the_other_workers_step():
    simulation = Simulation(2)
    simulation.reports = [at_step(5), at_step(5)]
    assert simulation.pass_seconds(500)[0] is None
    simulation.reports = [at_step(6), at_step(5)]
    assert simulation.pass_seconds(1000)[1] >= 60


def test_slow_workers_that_progress_never_raise():
    simulation = Simulation(2)
    for step in range(20):
        simulation.reports = [at_step(step + 1), at_step(step)]
        assert simulation.pass_seconds(50)[0] is None


def test_no_limit_gives_no_verdict():
    simulation = Simulation(2, timeout_seconds=None, dead=(1,))
    simulation.reports = [at_step(9), at_step(8, ended=True)]
    assert simulation.pass_seconds(10_000)[0] is None


def test_wait_for_an_agreement_while_another_has_continued():
    simulation = Simulation(3)
    simulation.reports = [at_step(812, "save the state"), at_step(813), at_step(813)]
    found, seconds = simulation.pass_seconds(1000)
    assert 10 <= seconds <= 12
    assert "worker 0 is about to: save the state; worker 1 has entered a further step" in found
    assert "worker 0 is at step 812 and waits for all workers to: save the state" in found


def test_worker_suspended_in_an_agreement_gets_no_wrong_advice():
    # All have agreed, and worker 2 is suspended before it reports it.
    simulation = Simulation(3, timeout_seconds=15.0, dead={2})
    simulation.reports = [at_step(0, "begin `fit`")] * 3
    simulation.pass_seconds(2)
    simulation.silent.add(2)
    simulation.reports[:2] = [at_step(7, agreements=4)] * 2
    found, seconds = simulation.pass_seconds(100)
    assert 14 <= seconds <= 17
    assert found.startswith("worker 2 does not answer")


def creating(what, size=100, agreements=2):
    return WorkerReport(0, agreements, what, "", broadcasts=size)


@pytest.mark.parametrize(("size", "seconds"), [(100, 10), (200_000_000, 30)])
def test_variable_created_by_one_worker_is_named(size, seconds):
    simulation = Simulation(3)
    simulation.reports = [creating("create variable kernel", size)] + [
        at_step(0, "begin epoch 1")
    ] * 2
    found, after = simulation.pass_seconds(1000)
    assert seconds <= after <= seconds + 2
    assert "worker 1 is about to: begin epoch 1; worker 0 is about to: create variable k" in found


def test_numbers_of_layers_are_no_difference():
    """A worker may have created further layers; Keras 3 has their numbers in the names of slots."""
    for name in ("m/{}/kernel", "{}_kernel_momentum", "{}"):
        texts = [f"create variable {name.format(layer)}" for layer in ("dense", "dense_12")]
        assert len({str(agreement._compared(["", [text], ""])) for text in texts}) == 1
    assert agreement._compared(["", ["block_1a"], ""]) != agreement._compared(["", ["block"], ""])


def test_variable_created_after_the_agreement_of_another_is_no_mismatch():
    simulation = Simulation(2)
    waits = at_step(0, "begin epoch 1")
    simulation.reports = [creating("create variable kernel", agreements=waits.agreements), waits]
    assert simulation.pass_seconds(30)[0] is None


def test_broadcast_limit_grows_with_the_variable():
    simulation = Simulation(2)
    simulation.reports = [creating("create variable embedding", 2_000_000_000)] * 2  # 200 s
    assert simulation.pass_seconds(259)[0] is None
    found, _ = simulation.pass_seconds(3)
    assert found.startswith("the workers have waited for each other for 60 s")


def test_failed_broadcast_is_reported_at_once():
    simulation = Simulation(2)
    simulation.reports = [
        creating("create variable kernel (3, 4)"),
        WorkerReport(failed="create variable kernel (3, 5): Shape mismatch"),
    ]
    found, after = simulation.pass_seconds(100)
    assert after == 1 and found.startswith("the workers disagree: create the same variables")
    assert "worker 0 is at step 0 and waits for all workers to: create variable kernel (3" in found
    assert "worker 1 could not create variable kernel (3, 5): Shape mismatch" in found


@pytest.mark.parametrize("late", [1, 100])
def test_failed_broadcast_waits_for_the_others_reports(late):
    simulation, failed = (
        Simulation(2),
        WorkerReport(failed="create variable kernel (3, 5): Shape mismatch"),
    )
    simulation.reports = [failed, at_step(0)]
    assert simulation.pass_seconds(1)[0] is None
    if late == 1:
        simulation.reports[1] = WorkerReport(failed="create variable kernel (3, 4): Shape mismatch")
    found, after = simulation.pass_seconds(100)
    assert after == (1 if late == 1 else 2) and found.startswith("the workers disagree")
    assert "kernel (3, 5)" in found and ("kernel (3, 4)" in found) == (late == 1)


def test_slow_broadcast_of_all_workers_is_not_an_error():
    simulation = Simulation(3, timeout_seconds=60.0)
    simulation.reports = [creating("create variable kernel")] * 3
    assert simulation.pass_seconds(50)[0] is None
    simulation.reports = [creating("create variable bias")] * 2 + [
        creating("create variable kernel")
    ]
    assert simulation.pass_seconds(9)[0] is None
    simulation.reports = [creating("create variable bias")] * 3
    found, after = simulation.pass_seconds(100)
    assert 50 <= after <= 62 and found.startswith(
        "the workers have waited for each other for 60 s:"
    )


def test_worker_that_creates_no_variable_is_named():
    simulation = Simulation(2)
    simulation.reports = [creating("create variable kernel"), at_step(0, agreements=2)]
    found, after = simulation.pass_seconds(100)
    assert 60 <= after <= 62 and found.startswith("worker 1 did not reach the others")


def test_worker_may_reach_an_agreement_late():
    simulation = Simulation(2)
    simulation.reports = [
        at_step(812, "begin epoch 2"),
        at_step(812),
    ]  # a slow callback of worker 1
    assert simulation.pass_seconds(59)[0] is None
    found, _ = simulation.pass_seconds(3)
    assert found.startswith("worker 1 did not reach the others within 60 s")


def test_worker_with_more_steps_may_reach_an_agreement_late():
    simulation = Simulation(2)
    for step in range(813, 843):
        simulation.reports = [at_step(812, "begin epoch 2"), at_step(step)]
        assert simulation.pass_seconds(1)[0] is None


@pytest.mark.parametrize("waits", [None, "save the state"])
def test_finished_worker_is_not_awaited(waits):
    simulation = Simulation(2)
    simulation.reports = [at_step(812, waits) if waits else at_step(813), at_step(812, ended=True)]
    found, seconds = simulation.pass_seconds(100)
    assert 5 <= seconds <= 7
    assert found.startswith("worker 1 has ended its program, and worker 0 waits for it:")
    assert "worker 1 has ended its program, at step 812" in found


def test_failed_worker_is_named_at_once_within_the_same_step():
    simulation = Simulation(3)
    failed = at_step(812, ended=True, error="ValueError: bad batch")
    simulation.reports = [at_step(812, ended=True), failed, at_step(812)]
    found, seconds = simulation.pass_seconds(100)
    assert seconds == 1 and found.startswith("worker 1 has failed: ValueError: bad batch\n")
    assert "worker 1 has ended its program, at step 812, by ValueError: bad batch" in found
    simulation.reports = [at_step(812, ended=True), failed, at_step(812, ended=True)]
    assert simulation.pass_seconds(1000)[0] is None  # no worker is left to be notified


def test_worker_may_finish_before_the_others():
    simulation = Simulation(2)
    simulation.reports = [at_step(812), at_step(812, ended=True)]
    simulation.silent = {1}
    simulation.judge.hear(1, simulation.reports[1], 0.0)
    assert simulation.pass_seconds(10_000)[0] is None


def silent_since_812(silent, **simulation):
    """Three workers, of which some become silent at step 812 while the others reach step 813."""
    simulation = Simulation(3, timeout_seconds=600.0, **simulation)
    simulation.reports = [at_step(812)] * 3
    assert simulation.pass_seconds(20)[0] is None
    simulation.silent = silent
    simulation.reports = [at_step(812 if rank in silent else 813) for rank in range(3)]
    return simulation.pass_seconds(1000)


def test_dead_worker_is_named_soon():
    found, seconds = silent_since_812({2}, dead=(2,))
    assert 30 <= seconds <= 32
    assert found.startswith("worker 2 does not answer")
    assert "worker 2 is at step 812, after: begin epoch 1; last report 30 s ago" in found


def test_ended_process_is_named_within_seconds():
    found, seconds = silent_since_812({2}, refusing=(2,))
    assert 2 <= seconds <= 3
    assert found.startswith("worker 2 does not answer")
    assert "worker 2 is at step 812" in found and "worker 1 is at step 813" in found
    found, seconds = silent_since_812({1, 2}, refusing=(1, 2))
    assert seconds <= 5 and "does not answer" in found


def test_dead_worker_is_reported_with_the_others_steps():
    simulation = Simulation(3, timeout_seconds=6.0, dead=(2,))
    simulation.reports = [at_step(6)] * 3
    simulation.pass_seconds(3)
    simulation.silent = {2}
    simulation.pass_seconds(2)
    simulation.silent = {1, 2}  # the machine is busy, and worker 1's next report is late
    simulation.reports[:2] = [at_step(7)] * 2
    assert simulation.pass_seconds(5)[0] is None
    simulation.silent = {2}
    found, seconds = simulation.pass_seconds(10)
    assert seconds == 1 and found.startswith("worker 2 does not answer")
    assert "worker 1 is at step 7" in found and "worker 2 is at step 6" in found


def test_dead_workers_step_follows_from_its_messages():
    """A worker may send messages after its last report."""
    simulation = Simulation(2, timeout_seconds=600.0, dead=(1,))
    simulation.reports = [at_step(812)] * 2
    simulation.pass_seconds(5)
    simulation.silent = {1}
    simulation.reports[0] = dataclasses.replace(at_step(815), exchanged=814)
    found, _ = simulation.pass_seconds(100)
    assert found.startswith("worker 1 does not answer")
    assert "worker 1 is at step 814; last report 30 s ago" in found


def test_silent_worker_that_answers_has_the_whole_limit():
    simulation = Simulation(2, timeout_seconds=600.0)
    simulation.reports = [at_step(812)] * 2
    simulation.pass_seconds(5)
    simulation.silent = {1}  # its threads wait for a function that holds the GIL
    assert simulation.pass_seconds(5000)[0] is None  # while no worker waits for it
    simulation.reports[0] = at_step(813)
    found, seconds = simulation.pass_seconds(5000)
    assert found.startswith("worker 1 did not reach") and 600 <= seconds <= 602


def test_many_workers_give_a_short_text():
    simulation = Simulation(100)
    simulation.reports = [at_step(813)] * 77 + [at_step(812)] + [at_step(813)] * 22
    found, _ = simulation.pass_seconds(100)
    assert len(found.splitlines()) < 25 and "and 84 more workers" in found
    assert found.splitlines()[1].startswith("worker 77 is at step 812")


def test_report_round_trip():
    report = WorkerReport(5, 3, "save the exchange's state", "begin", True, error="OSError: full")
    assert WorkerReport.from_text(report.to_text()) == report


def waits_for_data(step, *, asked, answered, arrived=812):
    """Returns a `fit` step on a finite dataset: it requests its batches before they arrive."""
    return WorkerReport(step, 3, supplied=812, asked=asked, answered=answered, arrived=arrived)


def test_worker_without_data_is_warned_of_and_named():
    # Keras 3 and tf_keras: the step starts with the batch, or with the function around it.
    for step in (812, 813):
        simulation = Simulation(3)
        simulation.reports = [waits_for_data(step, asked=813, answered=813)] * 3
        simulation.reports[1] = waits_for_data(step, asked=813, answered=812)
        warnings = []
        for _ in range(59):
            assert simulation.pass_seconds(1)[0] is None
            warnings.append(simulation.judge.warnings(simulation.now))
        assert [i for i, texts in enumerate(warnings) if texts] == [15, 30, 45]
        assert list(warnings[15]) == [1] and "worker 1 has waited 15 s for data" in warnings[15][1]
        found, seconds = simulation.pass_seconds(10)
        assert seconds <= 3 and found.startswith("worker 1 did not reach the others")
        assert "worker 1 waited for data" in found
        assert f"worker 1 is at step {step} and waits for data\n" in found


def test_missing_data_of_an_infinite_dataset():
    simulation = Simulation(2)
    waits = WorkerReport(813, 3, supplied=812, arrived=812)
    simulation.reports = [WorkerReport(813, 3, supplied=813, arrived=813), waits]
    assert simulation.pass_seconds(20)[0] is None
    assert "worker 1 has waited 19 s for data" in simulation.judge.warnings(simulation.now)[1]


def test_slow_callback_of_one_worker_is_warned_of():
    simulation = Simulation(2)
    simulation.reports = [at_step(813), at_step(812)]
    assert simulation.pass_seconds(40)[0] is None
    warnings = simulation.judge.warnings(simulation.now)
    assert list(warnings) == [1] and "data" not in warnings[1]
    simulation.reports[1] = at_step(813)
    simulation.pass_seconds(100)
    assert simulation.judge.warnings(simulation.now) == {}


def test_all_workers_waiting_for_data_is_not_an_error():
    simulation = Simulation(2)
    simulation.reports = [waits_for_data(813, asked=813, answered=812)] * 2
    assert simulation.pass_seconds(1000) == (None, 1000)
    assert simulation.judge.warnings(simulation.now) == {}


def test_worker_that_requests_more_batches_is_named():
    simulation = Simulation(2)
    simulation.reports = [at_step(812, "end epoch 1"), waits_for_data(812, asked=813, answered=813)]
    found, seconds = simulation.pass_seconds(100)
    assert 10 <= seconds <= 12 and "worker 1 has entered a further step" in found


def test_worker_that_has_not_requested_its_batch_is_named():
    simulation = Simulation(2)
    simulation.reports = [waits_for_data(812, asked=asked, answered=812) for asked in (813, 812)]
    found, _ = simulation.pass_seconds(100)
    assert found.startswith("worker 1 did not reach the others")


@pytest.mark.parametrize("length", [20, 5000])
def test_error_truncates_a_long_action(monkeypatch, length):
    """For example a configuration, which is compared in full."""
    shown, compared = [], []
    monkeypatch.setattr(
        agreement.watchdog,
        "waiting_for_agreement",
        lambda what: contextlib.nullcontext(shown.append(what)),
    )
    monkeypatch.setattr(
        agreement, "_exchange", lambda _, what, told: (compared.append(what), ("agreed", []))[1]
    )
    monkeypatch.setattr(agreement.strategies, "is_redsync_strategy", lambda _: True)
    agreement._agree_and_gather(None, "x" * length, "")
    assert compared == ["x" * length]
    assert (shown == compared) == (length == 20) and len(shown[0]) < 300


@pytest.mark.parametrize("rank", [0, 1])
def test_late_worker_is_named_by_worker_0_alone(rank, monkeypatch, caplog):
    """Worker 2 arrives after 70 s."""
    now = itertools.count(0, 5)

    class Store:
        def set_config_key_value(self, key, value):
            pass

        def get_config_key_value(self, key, timeout_in_ms):
            if key.endswith(("/2", "/verdict")) and next(now) < 70:
                raise tf.errors.DeadlineExceededError(None, None, "")
            return json.dumps(["agreed", []] if key.endswith("/verdict") else ["act", [], ""])

    clock = types.SimpleNamespace(monotonic=lambda: next(copy.copy(now)))
    monkeypatch.setattr(agreement, "time", clock)
    monkeypatch.setattr(agreement, "_sequence", itertools.count())
    monkeypatch.setattr(agreement.coordination, "key_value_store", Store)
    monkeypatch.setattr(agreement.strategies, "process_rank", lambda _: rank)
    monkeypatch.setattr(agreement.strategies, "process_count", lambda _: 3)
    assert agreement._exchange(None, "act", "")[0] == "agreed"
    if rank == 0:
        assert caplog.messages == [f"waiting for worker 2 for {s} s" for s in (20, 40, 60)]
    else:
        (message,) = caplog.messages
        assert "worker 0, or a worker that its log names," in message and "worker 2" not in message


def failed_collective(dead):
    """Two workers; worker 0's collective has just failed, and worker 1 is silent."""
    simulation = Simulation(2, dead=dead)
    simulation.reports = [at_step(5), at_step(5)]
    assert simulation.pass_seconds(3) == (None, 3)
    simulation.silent = {1}
    simulation.judge.hear(0, dataclasses.replace(at_step(5), broken=True), simulation.now)
    return simulation


def test_killed_worker_is_named_within_a_second_of_a_failed_collective():
    simulation = failed_collective({1})
    assert simulation.judge.verdict(simulation.now) is None  # its last report may be in transit
    assert not simulation.judge.is_lost(1)
    found = simulation.judge.verdict(simulation.now + 0.6)
    assert found is not None and found.startswith("worker 1 does not answer")
    assert simulation.judge.is_lost(1) and not simulation.judge.is_lost(0)


def test_worker_may_still_report_its_error_after_a_failed_collective():
    simulation = failed_collective({1})
    simulation.judge.hear(
        1, at_step(5, ended=True, error="ValueError: bad row"), simulation.now + 0.1
    )
    found = simulation.judge.verdict(simulation.now + 0.6)
    assert found is not None and found.startswith("worker 1 has failed: ValueError: bad row")


def test_answering_worker_is_not_lost_after_a_failed_collective():
    simulation = failed_collective(set())
    assert simulation.judge.verdict(simulation.now + 0.6) is None
