"""Worker processes that a scenario starts, watches and hurts; they are forks, see `forks.py`."""

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
PATIENCE = 150.0  # seconds for what takes ten where nothing else runs


class Unexpected(AssertionError):
    """It went another way than it must."""


class Worker:
    """One process, and what it has told.

    Attributes:
        rank: Its place in TF_CONFIG.
        ended: When it ended, by `time.monotonic`; None before.
        process: Which waits for it, and ends as it does.
    """

    def __init__(
        self, rank: int, command: Sequence[str], env: dict[str, str], told: threading.Condition
    ):
        self.rank = rank
        self.ended: float | None = None
        self._told = told
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
            with self._told:
                who, mark, event = text.partition(MARK)
                if mark:
                    self._events.append({"who": who, **json.loads(event)})
                elif text:
                    self._lines.append(text)
                self._told.notify_all()
        code = self.process.wait()
        with self._told:
            self.ended = time.monotonic()
            self._events.append({"kind": "exit", "at": self.ended, "code": code})
            self._told.notify_all()

    def events(self, kind: str) -> list[dict]:
        """What it has told of one kind, see `training.tell`; `"exit"` when it has ended."""
        return [event for event in list(self._events) if event["kind"] == kind]

    @property
    def output(self) -> str:
        """All its other lines."""
        return "\n".join(self._lines)

    @property
    def pid(self) -> int:
        """Of the worker itself, not of the process that has asked for it."""
        return self.events("start")[0]["pid"]

    @property
    def step(self) -> int:
        """The last one that it told of; 0 before."""
        steps = self.events("step")
        return steps[-1]["step"] if steps else 0

    @property
    def error(self) -> str:
        """What its training ended by; "" if by nothing."""
        errors = self.events("error")
        return errors[0]["text"] if errors else ""

    @property
    def code(self) -> int | None:
        """Its exit code, `-s` if signal `s` ended it; None while it runs."""
        exits = self.events("exit")
        return exits[0]["code"] if exits else None

    def send(self, number: int) -> float:
        """Sends it a signal; returns when."""
        os.kill(self.pid, number)
        return time.monotonic()

    def close(self) -> None:
        """Ends it, if it has not ended."""
        self.process.kill()  # the server of the forks ends the worker then
        self._thread.join(10)


class Job:
    """The workers of one run, for a `with` block: whatever happens, they are ended.

    Args:
        settings: Of the training.
        workers: Their number.
        later: Ranks that are not started yet; `start` does.
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
        self._told = threading.Condition()
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
        """Starts a process with a place in the cluster."""
        env = {
            **os.environ,
            **cluster.ENVIRONMENT,
            **dict.fromkeys(THREAD_VARIABLES, "1"),
            "PYTHONUNBUFFERED": "1",
            "TF_CONFIG": launch.tf_config(self.addresses, rank),
        }
        command = forks.command(cluster.ENVIRONMENT, TRAINING, self.settings.to_text())
        worker = Worker(rank, command, env, self._told)
        self._started.append(worker)
        return worker

    def until(self, what: str, found: Callable[[], object], seconds: float = PATIENCE) -> None:
        """Waits until `found()` is true.

        Raises:
            Unexpected: if it does not become so, or if all workers have ended without.
        """
        limit = time.monotonic() + seconds
        with self._told:
            while not found():
                over = all(worker.code is not None for worker in self._started)
                left = limit - time.monotonic()
                if over or left <= 0:
                    why = "all workers have ended" if over else f"not within {seconds:g} s"
                    raise Unexpected(f"{what}: {why}.\n{self.report()}")
                self._told.wait(min(left, 1.0))

    def until_step(self, step: int, ranks: Sequence[int] | None = None) -> None:
        """Waits until workers have told of a step."""
        ranks = list(self.workers) if ranks is None else ranks
        self.until(f"step {step}", lambda: all(self.workers[r].step >= step for r in ranks))

    def until_ended(self, ranks: Sequence[int] | None = None, seconds: float = PATIENCE) -> None:
        """Waits until workers have ended."""
        ranks = list(self.workers) if ranks is None else ranks
        self.until("the end", lambda: all(self.workers[r].ended for r in ranks), seconds)

    def trained(self, seconds: float = PATIENCE) -> dict:
        """Waits until the training has ended, and well; returns what all have told of its end.

        Raises:
            Unexpected: where a worker did not end by itself, or they did not end alike.
        """
        self.until_ended(seconds=seconds)
        ends = [worker.events("end") for worker in self.workers.values()]
        if not all(ends) or any(worker.code for worker in self.workers.values()):
            raise Unexpected(f"a worker did not train to the end.\n{self.report()}")
        told = [{n: e[0][n] for n in ("digest", "step", "skipped")} for e in ends]
        if any(end != told[0] for end in told):
            raise Unexpected(f"the workers end with different weights: {told}")
        return told[0]

    def kill_all(self) -> float:
        """SIGKILL to all that run; returns when."""
        for worker in self.workers.values():
            if worker.code is None and worker.events("start"):
                os.kill(worker.pid, signal.SIGKILL)
        return time.monotonic()

    def report(self) -> str:
        """What to print of a job that went wrong."""
        texts = []
        for worker in self._started:
            lines = "\n".join(worker.output.splitlines()[-30:])
            head = f"--- worker {worker.rank}, exit code {worker.code}, step {worker.step}"
            texts.append(f"{head}\n{lines}\n{worker.error}")
        return "\n".join(texts)
