"""Shared by scenarios: random numbers, folders, a reference training, and outcomes."""

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
    """Result of an injected failure.

    Attributes:
        happened: Description with figures.
        found: Seconds until detection; None if training continued.
        by: The process that detected it, and its message.
        lost: Lost work.
    """

    happened: str
    found: float | None = None
    by: str = ""
    lost: str = "nothing"


@dataclasses.dataclass(frozen=True)
class Scenario:
    """A failure to inject.

    Attributes:
        name: Name on the command line.
        failure: Description for the table.
        expected: Required outcome.
        seconds: Approximate duration.
        run: Runs the scenario; raises `Unexpected` for any other outcome.
        missing: Returns why this machine cannot run it, or "".
    """

    name: str
    failure: str
    expected: str
    seconds: float
    run: Callable[[Bench], Outcome]
    missing: Callable[[], str]


SCENARIOS: dict[str, Scenario] = {}


def scenario(failure: str, expected: str, seconds: float, missing: Callable[[], str] = lambda: ""):
    """Registers a function as a scenario."""

    def add(run: Callable[[Bench], Outcome]):
        name = run.__name__
        SCENARIOS[name] = Scenario(name, failure, expected, seconds, run, missing)
        return run

    return add


class Bench:
    """State shared by the scenarios of one run.

    Args:
        seed: Seed of all random choices.
        folder: For checkpoints; the caller deletes it.
    """

    def __init__(self, seed: int, folder: Path):
        self.random = random.Random(seed)
        self._folder = folder
        self._references: dict[tuple, dict] = {}

    def folder(self) -> Path:
        """Creates a new folder."""
        return Path(tempfile.mkdtemp(dir=self._folder))

    def reference(self, settings: Settings) -> dict:
        """Final values of the same training without failures and checkpoints."""
        plain = Settings(
            steps=settings.steps, bad_steps=settings.bad_steps, units=settings.units, pace=0.0
        )
        key = (plain.steps, tuple(plain.bad_steps), plain.units)
        if key not in self._references:
            with Job(plain) as job:
                self._references[key] = job.wait_for_end()
        return self._references[key]

    def wait_for_reference_weights(self, job: Job) -> str:
        """Waits for a job to end; it must have the bits of the reference training."""
        found, expected = job.wait_for_end(), self.reference(job.settings)
        must(found == expected, f"it ends with {found}; undisturbed with {expected}", job)
        return "weights bit for bit those of an undisturbed run"

    def resume(self, settings: Settings, died_at: int) -> str:
        """Restarts a job; returns the work that the killed one lost."""
        with Job(dataclasses.replace(settings, pace=0.0)) as job:
            same = self.wait_for_reference_weights(job)
            first = job.workers[0].events("step")
        resumed = first[0]["step"] - 1 if first else died_at
        # A checkpoint may still be written when the next one is due.
        must(
            resumed >= died_at - 2 * settings.every, f"it resumed from step {resumed} of {died_at}"
        )
        steps = max(0, died_at - resumed)
        again = f"{steps} steps of work, done again" if steps else "nothing"
        return f"{again} (from step {resumed}); in the end {same}"


def must(condition: object, text: str, job: Job | None = None) -> None:
    """Raises `Unexpected` with the text and the workers' output."""
    if not condition:
        raise Unexpected(text if job is None else f"{text}\n{job.report()}")


def error_of(worker: Worker, since: float, pattern: str) -> tuple[float, str]:
    """Seconds from `since` until a worker's training raised, and the line that gives the reason."""
    events = worker.events("error")
    must(events, f"worker {worker.rank} ended without an error of its training:\n{worker.output}")
    lines = events[0]["text"].splitlines()
    found = next((line for line in lines if re.search(pattern, line)), "")
    must(found, f"worker {worker.rank} says nothing of {pattern!r}:\n{events[0]['text']}")
    return events[0]["at"] - since, found.rpartition("aborted by: ")[2].strip()


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """Mounts a file system of limited size in memory."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def remount(folder: Path, mode: str) -> None:
    """Remounts it read-only ("ro") or writable ("rw"); waits for a pending write."""
    for _ in range(100):
        command = ["mount", "-o", f"remount,{mode}", str(folder)]
        if not subprocess.run(command, capture_output=True, check=False).returncode:
            return
        time.sleep(0.05)
    raise Unexpected(f"{folder} could not be mounted {mode}")


def no_mounts() -> str:
    """Why `small_disk` cannot be mounted, or ""."""
    return "" if os.geteuid() == 0 else "it needs root, to mount a small file system"
