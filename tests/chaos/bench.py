"""What scenarios share: chance, folders, an undisturbed training to compare with, and outcomes."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.chaos.job import Job, Unexpected, Worker
from tests.chaos.training import Settings


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of a failure.

    Attributes:
        happened: In words and figures.
        found: Seconds until it was found; None where training went on.
        by: Who found it, and what it said.
        lost: Of the training.
    """

    happened: str
    found: float | None = None
    by: str = ""
    lost: str = "nothing"


@dataclasses.dataclass(frozen=True)
class Scenario:
    """A failure to practise.

    Attributes:
        name: For the command line.
        failure: In words, for the table.
        expected: What must come of it.
        seconds: About how long it takes.
        run: Plays it, and raises `Unexpected` for another outcome than the one that it must have.
        missing: Why it cannot be played here; "" if it can.
    """

    name: str
    failure: str
    expected: str
    seconds: float
    run: Callable[[Bench], Outcome]
    missing: Callable[[], str]


SCENARIOS: dict[str, Scenario] = {}


def scenario(failure: str, expected: str, seconds: float, missing: Callable[[], str] = lambda: ""):
    """Adds a function to the table of scenarios."""

    def add(run: Callable[[Bench], Outcome]):
        name = run.__name__
        SCENARIOS[name] = Scenario(name, failure, expected, seconds, run, missing)
        return run

    return add


class Bench:
    """One run of some scenarios.

    Args:
        seed: Of everything that is left to chance.
        folder: For checkpoints; it is emptied by who has made it.
    """

    def __init__(self, seed: int, folder: Path):
        self.random = random.Random(seed)
        self._folder = folder
        self._references: dict[tuple, dict] = {}

    def folder(self) -> Path:
        """A new one."""
        return Path(tempfile.mkdtemp(dir=self._folder))

    def reference(self, settings: Settings) -> dict:
        """How the same training ends that nothing happens to, without checkpoints."""
        plain = Settings(
            steps=settings.steps, bad_steps=settings.bad_steps, units=settings.units, pace=0.0
        )
        key = (plain.steps, tuple(plain.bad_steps), plain.units)
        if key not in self._references:
            with Job(plain) as job:
                self._references[key] = job.trained()
        return self._references[key]

    def trained_as_ever(self, job: Job) -> str:
        """Waits for the end of a job, which must have the bits of the undisturbed one."""
        found, expected = job.trained(), self.reference(job.settings)
        must(found == expected, f"it ends with {found}; undisturbed with {expected}", job)
        return "weights bit for bit those of an undisturbed run"

    def goes_on(self, settings: Settings, died_at: int) -> str:
        """Starts a job again; returns what was lost of the one that died."""
        with Job(dataclasses.replace(settings, pace=0.0)) as job:
            same = self.trained_as_ever(job)
            first = job.workers[0].events("step")
        resumed = first[0]["step"] - 1 if first else died_at
        # A checkpoint may still be written when the next one is due.
        must(
            resumed >= died_at - 2 * settings.every, f"it went on from step {resumed} of {died_at}"
        )
        steps = max(0, died_at - resumed)
        again = f"{steps} steps of work, done again" if steps else "nothing"
        return f"{again} (from step {resumed}); in the end {same}"


def must(condition: object, text: str, job: Job | None = None) -> None:
    """Raises `Unexpected` with the text, and what the workers have said."""
    if not condition:
        raise Unexpected(text if job is None else f"{text}\n{job.report()}")


def error_of(worker: Worker, since: float, pattern: str) -> tuple[float, str]:
    """When a worker's training ended by an error, in seconds, and the line that says why."""
    events = worker.events("error")
    must(events, f"worker {worker.rank} ended without an error of its training:\n{worker.output}")
    lines = events[0]["text"].splitlines()
    found = next((line for line in lines if re.search(pattern, line)), "")
    must(found, f"worker {worker.rank} says nothing of {pattern!r}:\n{events[0]['text']}")
    return events[0]["at"] - since, found.rpartition("aborted by: ")[2].strip()


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """A file system of its own, in memory."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def remount(folder: Path, mode: str) -> None:
    """Makes it read-only ("ro") or writable ("rw"); a write that is under way has to end first."""
    for _ in range(100):
        command = ["mount", "-o", f"remount,{mode}", str(folder)]
        if not subprocess.run(command, capture_output=True, check=False).returncode:
            return
        time.sleep(0.05)
    raise Unexpected(f"{folder} could not be mounted {mode}")


def no_mounts() -> str:
    """Why there can be no `small_disk`."""
    return "" if os.geteuid() == 0 else "it needs root, to mount a small file system"
