"""Worker processes that a scenario starts, observes and disrupts; forks, see `forks.py`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.chaos.training import MARK, Settings
from tests.distributed import cluster, forks
from tf_redsync import launch
from tf_redsync.cli.launch import THREAD_VARIABLES

TRAINING = Path(__file__).with_name("training.py")
PATIENCE = 150.0  # seconds, for waits that take ten on an idle machine


class Unexpected(AssertionError):
    """The outcome differs from the required one."""


class Worker:
    """One process and its events.

    Attributes:
        rank: Its index in TF_CONFIG.
        ended: When it ended, by `time.monotonic`; None before.
        process: The client process; it exits with the worker's exit code.
    """

    def __init__(
        self, rank: int, command: Sequence[str], env: dict[str, str], changed: threading.Condition
    ):
        self.rank = rank
        self.ended: float | None = None
        self._changed = changed
        self._events: list[dict] = []
        self._lines: list[str] = []
        self.process = subprocess.Popen(
            list(command),
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        for line in self.process.stdout:
            text = line.decode("utf-8", "replace").rstrip("\n")
            with self._changed:
                prefix, mark, event = text.partition(MARK)
                if mark:
                    self._events.append({"prefix": prefix, **json.loads(event)})
                elif text:
                    self._lines.append(text)
                self._changed.notify_all()
        code = self.process.wait()
        with self._changed:
            self.ended = time.monotonic()
            self._events.append({"kind": "exit", "at": self.ended, "code": code})
            self._changed.notify_all()

    def events(self, kind: str) -> list[dict]:
        """Events of one kind, see `training.tell`; `"exit"` is added when it has ended."""
        return [event for event in list(self._events) if event["kind"] == kind]

    @property
    def output(self) -> str:
        """All other output lines."""
        return "\n".join(self._lines)

    @property
    def pid(self) -> int:
        """PID of the worker itself, not of its client process."""
        return self.events("start")[0]["pid"]

    @property
    def step(self) -> int:
        """The last reported step; 0 before."""
        steps = self.events("step")
        return steps[-1]["step"] if steps else 0

    @property
    def error(self) -> str:
        """The error that ended its training, or ""."""
        errors = self.events("error")
        return errors[0]["text"] if errors else ""

    @property
    def code(self) -> int | None:
        """Its exit code, `-s` if signal `s` ended it; None while it runs."""
        exits = self.events("exit")
        return exits[0]["code"] if exits else None

    def send(self, number: int) -> float:
        """Sends a signal; returns the time."""
        os.kill(self.pid, number)
        return time.monotonic()

    def close(self) -> None:
        """Ends the worker if it still runs."""
        self.process.kill()  # then the fork server ends the worker
        self._thread.join(10)


class Job:
    """The workers of one run, as a context manager that always ends them.

    Args:
        settings: Settings of the training.
        workers: Number of workers.
        later: Ranks that are started later by `start`.
        addresses: "host:port" by rank. Default: free ports of this machine.
    """

    def __init__(
        self,
        settings: Settings,
        workers: int = 2,
        later: Sequence[int] = (),
        addresses: Sequence[str] = (),
    ):
        self.settings = settings
        self.addresses = list(addresses) or [f"127.0.0.1:{p}" for p in launch.free_ports(workers)]
        self.workers: dict[int, Worker] = {}
        self._changed = threading.Condition()
        self._started: list[Worker] = []
        for rank in range(workers):
            if rank not in later:
                self.workers[rank] = self.start(rank)

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_) -> None:
        for worker in self._started:
            worker.close()

    def start(self, rank: int) -> Worker:
        """Starts a process with an index in the cluster."""
        env = {
            **os.environ,
            **cluster.ENVIRONMENT,
            **dict.fromkeys(THREAD_VARIABLES, "1"),
            "PYTHONUNBUFFERED": "1",
            "TF_CONFIG": launch.tf_config(self.addresses, rank),
        }
        command = forks.command(cluster.ENVIRONMENT, TRAINING, self.settings.to_text())
        worker = Worker(rank, command, env, self._changed)
        self._started.append(worker)
        return worker

    def until(self, goal: str, condition: Callable[[], object], seconds: float = PATIENCE) -> None:
        """Waits until `condition()` is true.

        Raises:
            Unexpected: on a timeout, or if all workers have ended before.
        """
        limit = time.monotonic() + seconds
        with self._changed:
            while not condition():
                over = all(worker.code is not None for worker in self._started)
                left = limit - time.monotonic()
                if over or left <= 0:
                    why = "all workers have ended" if over else f"not within {seconds:g} s"
                    raise Unexpected(f"{goal}: {why}.\n{self.report()}")
                self._changed.wait(min(left, 1.0))

    def until_step(self, step: int, ranks: Sequence[int] | None = None) -> None:
        """Waits until workers have reported a step."""
        ranks = list(self.workers) if ranks is None else ranks
        self.until(f"step {step}", lambda: all(self.workers[r].step >= step for r in ranks))

    def until_ended(self, ranks: Sequence[int] | None = None, seconds: float = PATIENCE) -> None:
        """Waits until workers have ended."""
        ranks = list(self.workers) if ranks is None else ranks
        self.until("the end", lambda: all(self.workers[r].ended for r in ranks), seconds)

    def wait_for_end(self, seconds: float = PATIENCE) -> dict:
        """Waits until the training has ended without an error; returns the workers' final values.

        Raises:
            Unexpected: if a worker failed or the workers' final values differ.
        """
        self.until_ended(seconds=seconds)
        ends = [worker.events("end") for worker in self.workers.values()]
        if not all(ends) or any(worker.code for worker in self.workers.values()):
            raise Unexpected(f"a worker did not train to the end.\n{self.report()}")
        final = [{n: e[0][n] for n in ("digest", "step", "skipped")} for e in ends]
        if any(end != final[0] for end in final):
            raise Unexpected(f"the workers end with different weights: {final}")
        return final[0]

    def kill_all(self) -> float:
        """Sends SIGKILL to all running workers; returns the time."""
        for worker in self.workers.values():
            if worker.code is None and worker.events("start"):
                os.kill(worker.pid, signal.SIGKILL)
        return time.monotonic()

    def report(self) -> str:
        """Output of all workers, for error messages."""
        texts = []
        for worker in self._started:
            lines = "\n".join(worker.output.splitlines()[-30:])
            head = f"--- worker {worker.rank}, exit code {worker.code}, step {worker.step}"
            texts.append(f"{head}\n{lines}\n{worker.error}")
        return "\n".join(texts)
