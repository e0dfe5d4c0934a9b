"""Scenarios: disks, clocks, non-finite values, and workers that run different code."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from tests.chaos.bench import (
    Bench,
    Outcome,
    error_of,
    must,
    no_mounts,
    remount,
    scenario,
    small_disk,
)
from tests.chaos.job import Job
from tests.chaos.training import EPOCH, Settings


def newest(directory: Path) -> int:
    """The step of the newest checkpoint, after verifying all of its files."""
    from tf_redsync.state.checkpoint_store import Store

    store = Store(directory)
    number = store.numbers()[0]
    found = store.manifest(number)
    store.verify(number, found.parts)
    return found.step


def fill(disk: Path) -> None:
    """Fills a small disk."""
    with open(disk / "filler", "wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))


def _disk(bench: Bench, spoil, mend, word: str) -> Outcome:
    with small_disk(bench.folder(), "1m") as disk:
        settings = Settings(steps=100, pace=0.05, directory=str(disk / "run"))
        with Job(settings) as job:
            job.until_step(12)
            at = time.monotonic()
            spoil(disk)
            job.until("a warning", lambda: any(word in w.output for w in job.workers.values()))
            found = time.monotonic() - at
            last = newest(disk / "run")
            first = next(w for w in job.workers.values() if word in w.output)
            text = next(line for line in first.output.splitlines() if word in line)
            text = text.partition("; worker ")[0]
            step = first.step
            mend(disk)
            lost = bench.wait_for_reference_weights(job)
        end = newest(disk / "run")
        must(end == settings.steps, f"the newest checkpoint is of step {end}")
    happened = (
        f"saves failed, with a warning, from step {step} on; that of step {last} stayed usable; "
        "once there was room, the next ones were saved"
    )
    return Outcome(happened, found, text, f"nothing: {lost}")


@scenario(
    "The disk becomes full while checkpoints are saved",
    "a warning on each save that fails; the last checkpoint stays usable, training continues, and "
    "saves again once there is room",
    60,
    no_mounts,
)
def full_disk(bench: Bench) -> Outcome:
    return _disk(bench, fill, lambda disk: (disk / "filler").unlink(), "The disk is full")


@scenario(
    "The directory of checkpoints becomes read-only",
    "a warning on each save that fails; the last checkpoint stays usable, training continues, and "
    "saves again once it may",
    60,
    no_mounts,
)
def read_only(bench: Bench) -> Outcome:
    return _disk(
        bench,
        lambda disk: remount(disk, "ro"),
        lambda disk: remount(disk, "rw"),
        "The file system is read-only",
    )


@scenario(
    "The directory of checkpoints is read-only from the start",
    "all workers end before the first step, and say what to do",
    30,
    no_mounts,
)
def read_only_at_start(bench: Bench) -> Outcome:
    with small_disk(bench.folder(), "1m") as disk:
        remount(disk, "ro")
        with Job(Settings(directory=str(disk / "run"))) as job:
            job.until_ended()
            starts = [worker.events("met")[0]["at"] for worker in job.workers.values()]
            found, text = error_of(job.workers[0], min(starts), "The file system is read-only")
            error_of(job.workers[1], 0, "read-only")
            must(not any(w.step for w in job.workers.values()), "a step was trained", job)
    return Outcome("both ended by an error", found, f"both: {text}", "nothing had begun")


@scenario(
    "The wall clock of the chief jumps a day ahead, and that of the other worker a day back",
    "nothing (the clock is Python's: a container may not set the machine's)",
    45,
)
def clock_jumps(bench: Bench) -> Outcome:
    directory = str(bench.folder() / "run")
    settings = Settings(
        steps=60, pace=0.05, directory=directory, clocks={"0": [12, 1.0], "1": [18, -1.0]}
    )
    with Job(settings) as job:
        lost = bench.wait_for_reference_weights(job)
    must(newest(Path(directory)) == settings.steps, "the end was not saved")
    return Outcome("training and saves continued", lost=f"nothing: {lost}")


@scenario(
    "A storm of NaNs: in half of the steps the gradient of one worker is not finite",
    "these steps are skipped on both workers, the others are not",
    60,
)
def nan_storm(bench: Bench) -> Outcome:
    bad = tuple(sorted(bench.random.sample(range(EPOCH), EPOCH // 2)))
    settings = Settings(steps=60, bad_steps=bad)
    with Job(settings) as job:
        end = job.wait_for_end()
    must(end["skipped"] == 3 * len(bad), f"{end['skipped']} steps were skipped of {3 * len(bad)}")
    happened = f"{end['skipped']} of {settings.steps} steps were skipped on both; equal weights"
    return Outcome(happened, lost="the bad steps; see test_skipped_steps: they leave no trace")


@scenario(
    "From a step on, all gradients of one worker are NaN, with max_skipped_steps=15",
    "both end after 15 such steps by an error that names worker, step and variable",
    45,
)
def nan_for_ever(bench: Bench) -> Outcome:
    with Job(Settings(steps=60, bad_steps=tuple(range(3, EPOCH)))) as job:
        job.until_ended()
        steps = job.workers[0].events("step")
        since = steps[2]["at"]
        found, text = error_of(job.workers[0], since, "on worker 1 in the gradient of")
        error_of(job.workers[1], since, "on worker 1 in the gradient of")
    happened = f"both ended after step {steps[-1]['step']}, the third had been the last good one"
    return Outcome(happened, found, f"both: {text}", "15 steps that changed nothing")


@scenario(
    "Workers of different versions of tf_redsync",
    "all end before the first step by an error with both versions",
    30,
)
def versions(bench: Bench) -> Outcome:
    with Job(Settings(versions={"1": "0.0.1"})) as job:
        return _refused(job, r"versions\.tf_redsync", "both", "met")


@scenario(
    "A callback evaluates on the chief alone",
    "all end by one error that says what each was about to do",
    60,
)
def chief_only(bench: Bench) -> Outcome:
    with Job(Settings(chief_only=True, pace=0.0)) as job:
        return _refused(job, "evaluate", "both", "fault")


def _refused(job: Job, pattern: str, by: str, since: str) -> Outcome:
    """Both workers end with an error whose text has a line like `pattern`."""
    job.until_ended()
    at = max(e[0]["at"] for w in job.workers.values() if (e := w.events(since)))
    found, text = max(error_of(worker, at, pattern) for worker in job.workers.values())
    step = max(worker.step for worker in job.workers.values())
    return Outcome(
        "both ended by an error", found, f"{by}: {text}", f"the run ends, in step {step}"
    )
