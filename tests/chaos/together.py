"""A scenario of several failures in one job: the short form, for every commit."""

from __future__ import annotations

import contextlib
import signal
import time

from tests.chaos.bench import Bench, Outcome, error_of, must, no_mounts, scenario, small_disk
from tests.chaos.environment_scenarios import fill, newest
from tests.chaos.job import Job
from tests.chaos.training import Settings

PAUSE = 2.0  # seconds


@scenario(
    "A bad day: NaNs on one worker, clocks that jump, SIGSTOP for 2 s, a second worker 1, a full "
    "disk, and then SIGKILL of all",
    "training continues through all but the last, then resumes from the last checkpoint and ends "
    "with the bits of a run with only the NaNs",
    60,
)
def bad_day(bench: Bench) -> Outcome:
    with contextlib.ExitStack() as stack:
        folder, brake = bench.folder(), bench.folder() / "brake"
        if not no_mounts():
            stack.enter_context(small_disk(folder, "1m"))
        settings = Settings(
            steps=80,
            pace=0.1,
            directory=str(folder / "run"),
            bad_steps=(2, 7, 8),
            clocks={"0": [5, 1.0], "1": [7, -1.0]},
            brake=str(brake),
        )
        with Job(settings) as job:
            job.until_step(bench.random.randrange(8, 12))
            job.workers[1].send(signal.SIGSTOP)
            time.sleep(PAUSE)
            job.workers[1].send(signal.SIGCONT)
            brake.touch()  # a busy machine may take long to start a process
            second = job.start(1)
            job.until("the end of the second worker 1", lambda: second.ended)
            brake.unlink()
            error_of(second, 0.0, r"is running already|port \d+ is in use")
            if not no_mounts():
                fill(folder)
                word = "The disk is full"
                job.until("a warning", lambda: any(word in w.output for w in job.workers.values()))
                (folder / "filler").unlink()
            saved = newest(folder / "run")
            job.until("a save", lambda: newest(folder / "run") > saved)
            job.kill_all()
            job.until_ended()
            step = max(worker.step for worker in job.workers.values())
        must(step < settings.steps - 1, f"it was killed in step {step} only, after its end")
        lost = bench.resume(settings, step)
    return Outcome(f"all was survived; killed in step {step}", lost=lost)
