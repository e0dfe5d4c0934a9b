"""Trains the standard runs one after the other, in the background.

    python -m benchmarks.accuracy.run_queue --folder ROWS --list
    chrt --idle 0 nice -n 19 python -m benchmarks.accuracy.run_queue --folder ROWS \
        --data_dir DATA --processes 2 --run

`standard_runs.py` defines the runs. Each calls `benchmarks/convergence.py` with one thread and has
a file in the folder: the curve so far after each evaluation, and the final results. A killed run
resumes bit for bit from its last state, which is saved every two minutes (PyTorch runs start over).
Finished files are not trained again, so they may be copied from another machine. All runs stop
while the file `PAUSE` exists in the folder, for time measurements.
"""

from __future__ import annotations

import argparse
import collections
import ctypes
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.accuracy.standard_runs import SETUPS, Run, Setup, done, row_of, runs_of

ROOT = Path(__file__).resolve().parents[2]
TRIES = 3  # attempts per run without a result
POLL_SECONDS = 0.5
PR_SET_PDEATHSIG = 1


class Queue:
    """The runs of a folder.

    Args:
        setups: The setups to train.
        folder: Folder of the rows, states and logs.
        data_dir: See `benchmarks/convergence.py`.
        processes: Number of concurrent runs.
        save_seconds: Interval between saved states of a run.
        chosen: Names of the setups to train; `None` for all.
    """

    def __init__(
        self,
        setups: Sequence[Setup],
        folder: Path,
        data_dir: Path | None = None,
        processes: int = 1,
        save_seconds: float = 120.0,
        chosen: set[str] | None = None,
    ):
        self.chosen = chosen
        self.setups, self.folder, self.data_dir = setups, folder, data_dir
        self.processes, self.save_seconds = processes, save_seconds
        self._running: dict[Run, subprocess.Popen[bytes]] = {}
        self._tries: collections.Counter[str] = collections.Counter()
        self._stopped = False

    @property
    def paused(self) -> bool:
        """Whether all runs are paused."""
        return (self.folder / "PAUSE").exists()

    def next(self) -> Run | None:
        """Returns the next run: with a known rate, not done, and attempts left."""
        for run in runs_of(self.setups, self.folder):
            if run.rate is None or run in self._running or not _is_in(run, self.chosen):
                continue
            if self._tries[run.name] < TRIES and not done(row_of(run, self.folder)):
                return run
        return None

    def train(self) -> int:
        """Trains until no run is left; returns the number of runs without a result.

        Raises:
            RuntimeError: if another queue trains in the folder.
        """
        with (self.folder / "queue.lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise RuntimeError(
                    f"another queue trains in this folder: end it first. Received: {self.folder}"
                ) from None
            while True:
                self._reap()
                self._stop_or_go_on()
                while not self._stopped and len(self._running) < self.processes:
                    if (run := self.next()) is None:
                        break
                    self._begin(run)
                if not self._running and not self._stopped:
                    return sum(tries >= TRIES for tries in self._tries.values())
                time.sleep(POLL_SECONDS)

    def _begin(self, run: Run) -> None:
        _log(run.name)
        command = [sys.executable, "-m", run.setup.program, "--threads", "1"]
        command += run.flags(self.folder, self.data_dir)
        if run.setup.program == "benchmarks.convergence":
            command += ["--save_seconds", str(self.save_seconds)]
        with (self.folder / f"{run.name}.log").open("ab") as log:
            self._running[run] = subprocess.Popen(
                command, cwd=ROOT, stdout=log, stderr=log, stdin=subprocess.DEVNULL,
                preexec_fn=end_with_parent, start_new_session=True,
            )  # fmt: skip
        self._tries[run.name] += 1

    def _reap(self) -> None:
        for run, process in list(self._running.items()):
            if process.poll() is not None:
                del self._running[run]
                _log(f"{run.name}: exit code {process.returncode}")
                if done(row_of(run, self.folder)):
                    del self._tries[run.name]

    def _stop_or_go_on(self) -> None:
        if self.paused != self._stopped:
            self._stopped = not self._stopped
            for process in self._running.values():
                os.killpg(process.pid, signal.SIGSTOP if self._stopped else signal.SIGCONT)
            _log("paused" if self._stopped else "resumed")


def _log(text: str) -> None:
    print(f"{time.strftime('%F %T')} {text}", flush=True)


def end_with_parent() -> None:
    """Makes the kernel kill this process when its parent ends, even by SIGKILL."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _is_in(run: Run, chosen: set[str] | None) -> bool:
    return chosen is None or run.setup.name in chosen


def listing(setups: Sequence[Setup], folder: Path, chosen: set[str] | None = None) -> str:
    """Returns a line for each run, and the remaining core-hours."""
    lines, left = [], 0.0
    for run in runs_of(setups, folder):
        if not _is_in(run, chosen):
            continue
        row = row_of(run, folder)
        state = "has no learning rate yet" if run.rate is None else "waits"
        hours = run.core_hours
        if row is not None and "curve" in row:
            curve = row["curve"]
            state = f"{run.setup.metric} {curve['metric'][-1]:.2f} at step {curve['steps'][-1]}"
        if row is not None and "error" in row:
            state = row["error"]
        if done(row):
            hours = row["processor_seconds"] / 3600 if row and "metric" in row else 0.0
            state = f"done: {state}"
        else:
            left += hours
        lines.append(f"{run.name:48} {hours:5.2f} h  {state}")
    return "\n".join([*lines, f"{left:.1f} core-hours are left"])


def main(argv: Sequence[str] | None = None, setups: Sequence[Setup] = SETUPS) -> int:
    """Lists or trains; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="run_queue.py", description="Trains the standard runs.", allow_abbrev=False
    )
    add = parser.add_argument
    add("--folder", type=Path, required=True, help="of rows, states and logs")
    add("--data_dir", type=Path, help="folder with the data")
    add("--processes", type=int, default=1, help="runs at once, of one thread each")
    add("--save_seconds", type=float, default=120.0, help="how often a state is kept")
    add("--setups", nargs="+", metavar="NAME", choices=[setup.name for setup in setups],
        help="only these, such as resnet9 (default: all)")  # fmt: skip
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--list", action="store_true", help="print all runs and their progress")
    what.add_argument("--run", action="store_true", help="train the remaining runs")
    args = parser.parse_args(argv)
    args.folder.mkdir(parents=True, exist_ok=True)
    folder = args.folder.resolve()
    chosen = args.setups and {*args.setups}
    if args.list:
        print(listing(setups, folder, chosen))
        return 0
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    data_dir = args.data_dir and args.data_dir.resolve()
    queue = Queue(setups, folder, data_dir, args.processes, args.save_seconds, chosen)
    return int(queue.train() > 0)


if __name__ == "__main__":
    sys.exit(main())
