"""Detects deadlocked and stalled workers from the reports of all workers.

Knows no network and no clock: `watchdog.py` brings the reports and the time.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

from tf_redsync.cluster.worker_report import Report

STALLED_SECONDS = 10.0  # what two workers that wait for each other do not move in
GONE_SECONDS = 5.0  # how long a worker may wait for one that has ended its program
SLOW_NETWORK = 10e6  # bytes a second
SILENT_SECONDS = 30.0  # after which a worker that does not answer is lost
_MAX_LINES = 16


@dataclasses.dataclass
class _Worker:
    report: Report = Report()
    heard: float | None = None  # when it last reported
    moved: float = 0.0  # when what it reported last changed
    lost: bool = False  # does not answer
    behind: float | None = None  # since when another one has come to where it has not
    warned: int = 0  # after how many quarters of the limit others were told so


class StallDetector:
    """Finds workers that wait for each other, or for one that does not come.

    Args:
        ranks: Of the workers that will report.
        timeout_seconds: How long one may wait for another; `None` for ever, and then there is
            never a verdict.
        answers: Whether the process of a rank answers; takes some seconds.
        silent_seconds: After how many seconds without a report a worker has to answer.
    """

    def __init__(
        self,
        ranks: Iterable[int],
        timeout_seconds: float | None,
        answers: Callable[[int], bool],
        silent_seconds: float = SILENT_SECONDS,
    ):
        self.timeout_seconds = timeout_seconds
        self.silent_seconds = silent_seconds
        self._answers = answers
        self._workers = {rank: _Worker() for rank in ranks}

    def hear(self, rank: int, report: Report, now: float) -> None:
        """Take note of a report."""
        worker = self._workers[rank]
        if report != worker.report or worker.heard is None:
            worker.moved = now
        worker.report, worker.heard = report, now

    def verdict(self, now: float) -> str | None:
        """Return why the workers cannot go on, with the place of each one, or `None`."""
        if self.timeout_seconds is None:
            return None
        self._mark_behind(now)
        for finding in (
            self._failed,
            self._ended,
            self._silent,
            self._mismatch,
            self._other_variables,
            self._late,
        ):
            found = finding(now, self.timeout_seconds)
            if found is not None:
                return f"{found}\n{self._everyone(now)}"
        return None

    def warnings(self, now: float) -> dict[int, str]:
        """Return what to say, by rank, of workers for which others wait: at each quarter of it."""
        if self.timeout_seconds is None:
            return {}
        self._mark_behind(now)
        found = {}
        for rank, worker in self._workers.items():
            late = 0.0 if worker.behind is None else now - worker.behind
            quarters = int(4 * late / self.timeout_seconds)
            if quarters > worker.warned:
                data = worker.report.lacks_data
                where = "for data" if data else f"behind the others: it {worker.report}"
                found[rank] = (
                    f"worker {rank} has {'waited' if data else 'been'} {late:.0f} s {where}. "
                    f"Training ends after timeout_seconds={self.timeout_seconds:g}"
                )
            worker.warned = quarters
        return found

    def _mark_behind(self, now: float) -> None:
        ahead = max(w.report.place for w in self._workers.values())
        for worker in self._workers.values():
            if worker.report.place == ahead:
                worker.behind = None
            elif worker.behind is None or worker.moved > worker.behind:
                worker.behind = now

    def _still(self, rank: int, seconds: float, now: float) -> bool:
        """Whether a worker is in its program, and reports that it has not moved for some time.

        The last report of a process that was stopped is about the past.
        """
        worker = self._workers[rank]
        reports = worker.heard is not None and now - worker.heard < GONE_SECONDS
        return reports and not worker.report.ended and now - worker.moved >= seconds

    def _failed(self, now: float, limit: float) -> str | None:
        del now, limit
        if any(worker.report.failed for worker in self._workers.values()):
            return (
                "the workers disagree: all must create the same variables in the strategy's scope, "
                "from the same script, flags and model, whatever their rank:"
            )
        return None

    def _ended(self, now: float, limit: float) -> str | None:
        for gone, other in self._pairs():
            end, rest = self._workers[gone].report, self._workers[other].report
            if end.ended and end.error and not rest.ended:  # perhaps in a step that all have begun
                return f"worker {gone} has failed: {end.error}"
            needed = rest.waits is not None or rest.place > end.place
            if end.ended and needed and self._still(other, min(GONE_SECONDS, limit), now):
                return f"worker {gone} has ended its program, and worker {other} waits for it:"
        return None

    def _silent(self, now: float, limit: float) -> str | None:
        broken = any(worker.report.broken for worker in self._workers.values())
        seconds = 0.0 if broken else min(self.silent_seconds, limit)
        for rank, worker in self._workers.items():
            silent = worker.heard is not None and now - worker.heard >= seconds
            if silent and not worker.report.ended and not self._answers(rank):
                worker.lost = True
                return (
                    f"worker {rank} does not answer: its process was stopped or killed, or its "
                    "machine is gone:"
                )
        return None

    def _mismatch(self, now: float, limit: float) -> str | None:
        seconds = min(STALLED_SECONDS, limit)
        for waiting, other in self._pairs():
            here, there = self._workers[waiting].report, self._workers[other].report
            apart = here.waits is not None and there.waits is None and there.place > here.place
            if apart and self._still(waiting, seconds, now) and self._still(other, seconds, now):
                return (
                    f"the workers do different things: worker {waiting} is about to: {here.waits}; "
                    f"worker {other} has entered a further step. What all workers must do, saving "
                    "and evaluating among them, must not depend on the rank, and all need the same "
                    "number of batches:"
                )
        return None

    def _other_variables(self, now: float, limit: float) -> str | None:
        for waiting, other in self._pairs():
            here, there = self._workers[waiting].report, self._workers[other].report
            agrees = here.waits is not None and here.broadcasts is None
            if not agrees or there.broadcasts is None or there.agreements >= here.agreements:
                continue
            seconds = min(STALLED_SECONDS + there.broadcasts / SLOW_NETWORK, limit)
            if self._still(waiting, seconds, now) and self._still(other, seconds, now):
                return (
                    f"the workers do different things: worker {waiting} is about to: {here.waits}; "
                    f"worker {other} is about to: {there.waits}. All must create the same "
                    "variables in the strategy's scope, whatever their rank:"
                )
        return None

    def _late(self, now: float, limit: float) -> str | None:
        workers = self._workers.items()
        late = [r for r, w in workers if w.behind is not None and now - w.behind >= limit]
        if not late:  # no worker has gone on, but one waits
            if not any(self._waits_in_vain(r, limit, now) for r, _ in workers):
                return None
            begun = max(w.report.agreements for _, w in workers)
            late = [r for r, w in workers if w.report.agreements < begun or not w.report.waits]
        if not late:
            return f"the workers wait for each other, for {limit:g} s:"
        hungry = [rank for rank in late if self._workers[rank].report.lacks_data]
        data = f"; {_names(hungry)} waited for data, look at the input there" if hungry else ""
        return (
            f"{_names(late)} did not come to where others wait, for {limit:g} s{data}. If that is "
            f"only slow, give the strategy a larger `timeout_seconds`. Received: timeout_seconds="
            f"{limit:g}"
        )

    def _waits_in_vain(self, rank: int, limit: float, now: float) -> bool:
        report = self._workers[rank].report
        seconds = limit + (report.broadcasts or 0) / SLOW_NETWORK
        return bool(report.waits) and self._still(rank, seconds, now)

    def _pairs(self) -> Iterator[tuple[int, int]]:
        return itertools.permutations(self._workers, 2)

    def _everyone(self, now: float) -> str:
        last = min(w.report.place for w in self._workers.values())
        met = max(w.report.met for w in self._workers.values())
        lines = []
        for rank, worker in self._workers.items():
            silence = now - worker.heard if worker.heard is not None else 0.0
            quiet = worker.lost or (silence >= GONE_SECONDS and not worker.report.ended)
            heard = f"; last heard of {silence:.0f} s ago" if quiet else ""
            known = Report(met) if quiet and met > worker.report.step else worker.report
            special = quiet or worker.report.waits is not None or worker.report.place == last
            lines.append((not special, f"worker {rank} {known}{heard}"))
        shown = [text for _, text in sorted(lines, key=lambda line: line[0])]
        if len(shown) > _MAX_LINES:
            shown[_MAX_LINES:] = [f"and {len(shown) - _MAX_LINES} more workers"]
        note = "(Steps are those of a process, of evaluation and prediction as well.)"
        return "\n".join([*shown, note])


def _names(ranks: Sequence[int]) -> str:
    numbers = ", ".join(map(str, ranks))
    return f"worker {numbers}" if len(ranks) == 1 else f"workers {numbers or '?'}"
