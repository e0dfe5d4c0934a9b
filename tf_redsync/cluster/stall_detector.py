"""Detects deadlocked, stalled and lost workers from the reports of all workers.

Pure logic: `watchdog.py` provides the reports and the time.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence

from typing_extensions import override

from tf_redsync.errors import first_lines


@dataclasses.dataclass(frozen=True)
class WorkerReport:
    """A worker's progress, as it reports it to the chief.

    Attributes:
        step: Number of steps of any kind that its process has begun.
        agreements: Number of `agree` calls that it has begun.
        waits: The action that it waits to agree on, if any.
        last: The last action that was agreed on.
        ended: Whether its program has ended.
        broadcasts: Size in bytes of the variable that it broadcasts, if any.
        failed: The broadcast that failed, with the reason.
        error: The uncaught error that ended its program, if any.
        broken: Whether one of its collectives has failed for an unknown reason.
        exchanged: The last step in which it received the messages of all others.
        supplied: Number of steps whose arguments, including the batch, were available.
        asked: Number of batches that it has requested from finite datasets.
        answered: Number of requests in `asked` that its dataset has answered.
        arrived: Number of steps whose gradients were available.
        departed: Number of exchanges that it has begun in the background.
        delivered: Number of exchanges in `departed` that are complete.
    """

    step: int = 0
    agreements: int = 0
    waits: str | None = None
    last: str = ""
    ended: bool = False
    broadcasts: int | None = None
    failed: str = ""
    error: str = ""
    broken: bool = False
    exchanged: int = 0
    supplied: int = 0
    asked: int = 0
    answered: int = 0
    arrived: int = 0
    departed: int = 0
    delivered: int = 0

    @property
    def place(self) -> int:
        """Progress in the program, comparable because all workers run the same program."""
        return self.step + self.supplied + self.asked + self.answered + self.arrived

    @property
    def lacks_data(self) -> bool:
        """Whether its step has no batch: its own, or another worker's if it is not behind."""
        return self.asked > self.answered or self.step > self.supplied

    def to_text(self) -> str:
        """Return this as JSON."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_text(cls, text: str) -> WorkerReport:
        """Return what `to_text` wrote."""
        return cls(**json.loads(text))

    @override
    def __str__(self) -> str:
        if self.ended:
            cause = f", by {self.error}" if self.error else ""
            return f"has ended its program, at step {self.step}{cause}"
        if self.failed:
            return f"could not {self.failed}"
        if self.waits is not None:
            return f"is at step {self.step} and waits for all workers to: {self.waits}"
        data = " and waits for data" if self.asked > self.answered else ""
        beside = " beside an exchange of a fragment" if self.departed > self.delivered else ""
        after = f", after: {self.last}" if self.last else ""
        return f"is at step {self.step}{data}{beside}{after}"


STALLED_SECONDS = 10.0  # after which two workers that wait for each other are deadlocked
FAILURE_SECONDS = 2.0  # time for all workers to report a failed broadcast
GONE_SECONDS = 5.0  # limit of a wait for a worker whose program has ended
SLOW_NETWORK = 10e6  # bytes per second
SILENT_SECONDS = 30.0  # without a report, after which a worker's process is asked whether it lives
LATE_SECONDS = 2.0  # without a report, after which it is checked whether the process has ended
BROKEN_SECONDS = 0.5  # the same after a failed collective, with time for a last report


@dataclasses.dataclass
class _WorkerState:
    report: WorkerReport = WorkerReport()
    heard: float | None = None  # when it last reported
    moved: float = 0.0  # when its report last changed
    lost: bool = False  # its process does not answer
    behind: float | None = None  # since when another worker has been ahead
    asked: float = 0.0  # when it was last checked whether its process has ended
    warned: int = 0  # number of quarters of the limit with a warning


class StallDetector:
    """Detects deadlocked workers, and workers that wait for a lost or stalled one.

    Args:
        ranks: Ranks of the workers that report.
        timeout_seconds: Seconds that one worker may wait for another. `None`: no limit, so no
            verdicts and warnings.
        answers: Returns whether the process of a rank is alive; takes some seconds.
        gone: Returns whether the process of a rank has certainly ended; takes up to 2 s. `None` if
            the process does not answer, which takes 0.5 s.
        silent_seconds: Seconds without a report after which the detector calls `answers`. It calls
            `gone` after `LATE_SECONDS`.
    """

    def __init__(
        self,
        ranks: Iterable[int],
        timeout_seconds: float | None,
        answers: Callable[[int], bool],
        gone: Callable[[int], bool | None],
        silent_seconds: float = SILENT_SECONDS,
    ):
        self.timeout_seconds = timeout_seconds
        self.silent_seconds = silent_seconds
        self._answers = answers
        self._gone = gone
        self._workers = {rank: _WorkerState() for rank in ranks}

    def hear(self, rank: int, report: WorkerReport, now: float) -> None:
        """Record a worker's report."""
        worker = self._workers[rank]
        if report != worker.report or worker.heard is None:
            worker.moved = now
        worker.report, worker.heard = report, now

    def is_lost(self, rank: int) -> bool:
        """Return whether the process of a rank does not answer."""
        return self._workers[rank].lost

    def verdict(self, now: float) -> str | None:
        """Return the reason why the workers cannot continue, with each one's step, or `None`."""
        if self.timeout_seconds is None:
            return None
        self._mark_behind(now)
        if self._others_may_fail(now):
            return None
        for finding in (
            self._failed,
            self._ended,
            self._silent,
            self._mismatch,
            self._different_variables,
            self._behind,
        ):
            reason = finding(now, self.timeout_seconds)
            if reason is not None:
                return f"{reason}\n{self._steps_of_all(now)}"
        return None

    def warnings(self, now: float) -> dict[int, str]:
        """Return warnings of late workers, by rank: one at each quarter of the limit."""
        if self.timeout_seconds is None:
            return {}
        self._mark_behind(now)
        texts = {}
        for rank, worker in self._workers.items():
            late = 0.0 if worker.behind is None else now - worker.behind
            quarters = int(4 * late / self.timeout_seconds)
            if quarters > worker.warned:
                data = worker.report.lacks_data
                where = "for data" if data else f"behind the others: it {worker.report}"
                texts[rank] = (
                    f"worker {rank} has {'waited' if data else 'been'} {late:.0f} s {where}. "
                    f"Training ends after timeout_seconds={self.timeout_seconds:g}"
                )
            worker.warned = quarters
        return texts

    def _mark_behind(self, now: float) -> None:
        ahead = max(w.report.place for w in self._workers.values())
        for worker in self._workers.values():
            if worker.report.place == ahead:
                worker.behind = None
            elif worker.behind is None or worker.moved > worker.behind:
                worker.behind = now

    def _stopped(self, rank: int, seconds: float, now: float) -> bool:
        """Return whether a worker's recent reports show no progress for `seconds`.

        The last report of a stopped process does not count, since it is stale.
        """
        worker = self._workers[rank]
        reports = worker.heard is not None and now - worker.heard < GONE_SECONDS
        return reports and not worker.report.ended and now - worker.moved >= seconds

    def _others_may_fail(self, now: float) -> bool:
        """Return whether a broadcast has just failed and some worker's next report is pending."""
        since = [w.moved for w in self._workers.values() if w.report.failed]
        reports = [w.report for w in self._workers.values()]
        pending = any(not (r.failed or r.ended or r.waits) for r in reports)
        return pending and bool(since) and now - min(since) < FAILURE_SECONDS

    def _failed(self, now: float, limit: float) -> str | None:
        del now, limit
        if any(worker.report.failed for worker in self._workers.values()):
            return (
                "the workers disagree: create the same variables in the strategy's scope on every "
                "rank, with the same script, flags and model:"
            )
        return None

    def _ended(self, now: float, limit: float) -> str | None:
        for gone, other in self._pairs():
            end, rest = self._workers[gone].report, self._workers[other].report
            if end.ended and end.error and not rest.ended:  # also in a step that all have begun
                return f"worker {gone} has failed: {end.error}"
            needed = rest.waits is not None or rest.place > end.place
            if end.ended and needed and self._stopped(other, min(GONE_SECONDS, limit), now):
                return f"worker {gone} has ended its program, and worker {other} waits for it:"
        return None

    def _silent(self, now: float, limit: float) -> str | None:
        broken = any(worker.report.broken for worker in self._workers.values())
        seconds = min(BROKEN_SECONDS if broken else self.silent_seconds, limit)
        late = min(LATE_SECONDS, seconds)
        found = []
        for rank, worker in self._workers.items():
            if worker.heard is None or worker.report.ended or now < worker.heard + late:
                continue
            silent = now >= worker.heard + seconds
            if broken or self._others_current(rank, seconds if silent else late, now):
                found.append((worker.asked, not silent, rank))
        for _, late_only, rank in sorted(found):
            self._workers[rank].asked = now
            gone = self._gone(rank)
            if gone or not (late_only or self._answers(rank)):
                self._workers[rank].lost = True
                return (
                    f"worker {rank} does not answer: its process was stopped or killed, or its "
                    "machine is down:"
                )
            if gone is None:  # that took time, so the next worker is asked at the next call
                break
        return None

    def _others_current(self, rank: int, seconds: float, now: float) -> bool:
        """Return whether all others have reported since `rank` had been silent for `seconds`.

        The steps in a verdict are then recent. Workers that are silent, too, do not count.
        """
        last_reports = {r: w.heard for r, w in self._workers.items() if w.heard is not None}
        since, silence = last_reports.pop(rank) + seconds, max(seconds, GONE_SECONDS)
        return all(last >= since or now >= last + silence for last in last_reports.values())

    def _mismatch(self, now: float, limit: float) -> str | None:
        seconds = min(STALLED_SECONDS, limit)
        for waiting, other in self._pairs():
            waiter, peer = self._workers[waiting].report, self._workers[other].report
            diverged = waiter.waits is not None and peer.waits is None and peer.place > waiter.place
            # Not in the step barrier, which counts no agreement and lets others enter a step.
            another = waiter.broadcasts is not None or waiter.agreements > peer.agreements
            if (
                diverged
                and another
                and self._stopped(waiting, seconds, now)
                and self._stopped(other, seconds, now)
            ):
                return (
                    f"the workers do different things: worker {waiting} is about to: "
                    f"{waiter.waits}; worker {other} has entered a further step. All workers must "
                    "make the same calls, such as saving and evaluating, on every rank, with the "
                    "same number of batches:"
                )
        return None

    def _different_variables(self, now: float, limit: float) -> str | None:
        for waiting, other in self._pairs():
            waiter, peer = self._workers[waiting].report, self._workers[other].report
            agrees = waiter.waits is not None and waiter.broadcasts is None
            if not agrees or peer.broadcasts is None or peer.agreements >= waiter.agreements:
                continue
            seconds = min(STALLED_SECONDS + peer.broadcasts / SLOW_NETWORK, limit)
            if self._stopped(waiting, seconds, now) and self._stopped(other, seconds, now):
                return (
                    f"the workers do different things: worker {waiting} is about to: "
                    f"{waiter.waits}; worker {other} is about to: {peer.waits}. Create the same "
                    "variables in the strategy's scope on every rank:"
                )
        return None

    def _behind(self, now: float, limit: float) -> str | None:
        workers = self._workers.items()
        late = [r for r, w in workers if w.behind is not None and now - w.behind >= limit]
        if not late:  # all have made equal progress, but one waits
            if not any(self._waits_too_long(r, limit, now) for r, _ in workers):
                return None
            begun = max(w.report.agreements for _, w in workers)
            late = [r for r, w in workers if w.report.agreements < begun or not w.report.waits]
        if not late:
            return f"the workers have waited for each other for {limit:g} s:"
        starved = [rank for rank in late if self._workers[rank].report.lacks_data]
        data = (
            f"; {_workers_text(starved)} waited for data, check the input there" if starved else ""
        )
        return (
            f"{_workers_text(late)} did not reach the others within {limit:g} s{data}. If training "
            "is only slow, give the strategy a larger `timeout_seconds`. Received: timeout_seconds="
            f"{limit:g}"
        )

    def _waits_too_long(self, rank: int, limit: float, now: float) -> bool:
        report = self._workers[rank].report
        seconds = limit + (report.broadcasts or 0) / SLOW_NETWORK
        return bool(report.waits) and self._stopped(rank, seconds, now)

    def _pairs(self) -> Iterator[tuple[int, int]]:
        return itertools.permutations(self._workers, 2)

    def _steps_of_all(self, now: float) -> str:
        last = min(w.report.place for w in self._workers.values())
        exchanged = max(w.report.exchanged for w in self._workers.values())
        lines = []
        for rank, worker in self._workers.items():
            silence = now - worker.heard if worker.heard is not None else 0.0
            quiet = worker.lost or (silence >= GONE_SECONDS and not worker.report.ended)
            age = f"; last report {silence:.0f} s ago" if quiet else ""
            report = worker.report
            known = WorkerReport(exchanged) if quiet and exchanged > report.step else report
            special = quiet or worker.report.waits is not None or worker.report.place == last
            lines.append((not special, f"worker {rank} {known}{age}"))
        shown = [text for _, text in sorted(lines, key=lambda line: line[0])]
        note = "(Steps count all steps of a process, also of evaluation and prediction.)"
        return "\n".join([*first_lines(shown, of=" workers"), note])


def _workers_text(ranks: Sequence[int]) -> str:
    numbers = ", ".join(map(str, ranks))
    return f"worker {numbers}" if len(ranks) == 1 else f"workers {numbers or '?'}"
