"""Scenarios: processes that die, stop, are preempted, start late, twice, or never."""

from __future__ import annotations

import signal
import time

from tests.chaos.bench import Bench, Outcome, error_of, must, scenario
from tests.chaos.job import Job
from tests.chaos.training import Settings


def _lasting(bench: Bench, **changes) -> Settings:
    """Settings of a training with checkpoints."""
    return Settings(steps=60, directory=str(bench.folder() / "run"), **changes)


def _kill_one(bench: Bench, victim: int, pattern: str) -> Outcome:
    settings = _lasting(bench, pace=0.05)
    other = 1 - victim
    with Job(settings) as job:
        job.until_step(bench.random.randrange(8, 40))
        at, step = job.workers[victim].send(signal.SIGKILL), job.workers[victim].step
        job.until_ended()
        code = job.workers[other].code
        if job.workers[other].error:
            found, text = error_of(job.workers[other], at, pattern)
        else:
            found, text = job.workers[other].ended - at, _last_words(job.workers[other].output)
    must(code, "the other worker ended without an error")
    lost = bench.resume(settings, step)
    happened = f"killed in step {step}; the other worker ended by an error"
    return Outcome(happened, found, f"worker {other}: {text}", lost)


def _last_words(output: str) -> str:
    lines = [line for line in output.splitlines() if " F" in line[:60] or "rror" in line]
    return (lines or output.splitlines() or ["nothing"])[-1][-200:]


@scenario(
    "SIGKILL of a worker, without a launcher",
    "the other one ends within 15 s by an error that names it; started again, both go on from the "
    "last checkpoint to the bits of an undisturbed run",
    90,
)
def kill_a_worker(bench: Bench) -> Outcome:
    outcome = _kill_one(bench, 1, "worker 1 does not answer")
    must(outcome.found < 15, f"found after {outcome.found:.0f} s only")
    return outcome


@scenario(
    "SIGKILL of the chief, without a launcher",
    "the other one ends within 90 s; started again, both go on from the last checkpoint to the "
    "bits of an undisturbed run",
    90,
)
def kill_the_chief(bench: Bench) -> Outcome:
    outcome = _kill_one(bench, 0, ".")
    must(outcome.found < 90, f"found after {outcome.found:.0f} s only")
    return outcome


@scenario(
    "SIGKILL of all workers, repeatedly, at any moment of the start, a step or a save",
    "each run resumes from the last checkpoint or the one before; the end has the bits of an "
    "undisturbed run",
    180,
)
def kill_all(bench: Bench, times: int = 8) -> Outcome:
    settings = _lasting(bench, pace=0.05)
    steps = [0]
    for number in range(times):
        with Job(settings) as job:
            job.until("the start", lambda j=job: all(w.events("start") for w in j.workers.values()))
            if number % 4:
                more = bench.random.randrange(1, 12)
                job.until("steps", lambda j=job, n=more: len(j.workers[0].events("step")) >= n)
                time.sleep(bench.random.uniform(0.0, 0.1))
            else:
                time.sleep(bench.random.uniform(0.0, 5.0))
            job.kill_all()
            job.until_ended()
            steps.append(max(steps[-1], *(worker.step for worker in job.workers.values())))
    lost = bench.resume(settings, steps[-1])
    reached = ", ".join(map(str, steps[1:]))
    return Outcome(f"{times} times; steps that were reached: {reached}", lost=lost)


@scenario(
    "SIGSTOP of a worker for 20 s",
    "the others wait; training continues",
    45,
)
def stop_20_s(bench: Bench) -> Outcome:
    return stopped_for(bench, 20.0)


def stopped_for(bench: Bench, seconds: float) -> Outcome:
    settings = Settings(steps=60, pace=0.05)
    with Job(settings) as job:
        victim = job.workers[bench.random.randrange(2)]
        job.until_step(bench.random.randrange(5, 30))
        victim.send(signal.SIGSTOP)
        step = victim.step
        time.sleep(seconds)
        at = victim.send(signal.SIGCONT)
        job.until_step(step + 2)
        again = time.monotonic() - at
        lost = bench.wait_for_reference_weights(job)
    happened = f"worker {victim.rank} stopped in step {step}; {again:.1f} s after it goes on, "
    return Outcome(f"{happened}two more steps are done", lost=f"nothing: {lost}")


@scenario(
    "SIGSTOP of a worker, permanently",
    "the other one ends within 45 s by an error that names it; the stopped one, if it ever goes "
    "on, ends as well",
    120,
)
def stop_for_ever(bench: Bench) -> Outcome:
    settings = _lasting(bench, pace=0.05)
    with Job(settings) as job:
        job.until_step(bench.random.randrange(8, 40))
        at, step = job.workers[1].send(signal.SIGSTOP), job.workers[1].step
        job.until_ended([0])
        found, text = error_of(job.workers[0], at, "worker 1 does not answer")
        must(found < 45, f"found after {found:.0f} s only", job)
        again = job.workers[1].send(signal.SIGCONT)
        job.until_ended([1])
        ended = job.workers[1].ended - again
        must(job.workers[1].code, "the stopped worker ended without an error", job)
    lost = bench.resume(settings, step)
    happened = (
        f"worker 1 stopped in step {step}; continued later, it ended by itself in {ended:.0f} s"
    )
    return Outcome(happened, found, f"worker 0: {text}", lost)


@scenario(
    "SIGTERM to one worker (preemption)",
    "a checkpoint at the end of a step, all workers end by exit code 75; started again they go on "
    "there",
    45,
)
def preempted(bench: Bench) -> Outcome:
    settings = _lasting(bench, pace=0.05, every=1000)
    with Job(settings) as job:
        job.until_step(bench.random.randrange(5, 40))
        at = job.workers[1].send(signal.SIGTERM)
        job.until_ended()
        codes = [worker.code for worker in job.workers.values()]
        must(codes == [75, 75], f"exit codes {codes}", job)
        step = job.workers[1].step
        stopped = [w.events("stopped")[0]["at"] - at for w in job.workers.values()]
    lost = bench.resume(settings, step)
    must("(from" in lost and lost.startswith("nothing"), lost)
    return Outcome(f"both ended after step {step} by exit code 75", max(stopped), "both", lost)


@scenario(
    "A slow worker: every step takes it 0.5 s longer",
    "the others wait; nothing else",
    45,
)
def slow(bench: Bench) -> Outcome:
    with Job(Settings(slow={"1": 0.5})) as job:
        lost = bench.wait_for_reference_weights(job)
        steps = [event["at"] for event in job.workers[0].events("step")]
    each = (steps[-1] - steps[0]) / (len(steps) - 1)
    return Outcome(f"a step takes {each:.2f} s on both", lost=f"nothing: {lost}")


@scenario(
    "A late worker: started 15 s after the other",
    "the other one says for whom it waits within 5 s, and waits",
    45,
)
def late(bench: Bench) -> Outcome:
    with Job(Settings(), later=[1]) as job:
        first = job.workers[0]
        job.until("the start", lambda: first.events("start"))
        at = time.monotonic()
        job.until("a word", lambda: "waiting for worker 1 at" in first.output, 30)
        reported = time.monotonic() - at
        must(reported < 8, f"it reported this after {reported:.0f} s only", job)
        text = next(line for line in first.output.splitlines() if "waiting for worker 1" in line)
        time.sleep(max(0.0, 15 - reported))
        job.workers[1] = job.start(1)
        lost = bench.wait_for_reference_weights(job)
    return Outcome("they met and trained", reported, f"worker 0: {text}", f"nothing: {lost}")


@scenario(
    "A missing worker: never started, with start_timeout=10",
    "the other one ends after 10 s and names it",
    25,
)
def missing(bench: Bench) -> Outcome:
    seconds = 10.0
    with Job(Settings(strategy={"start_timeout": seconds}), later=[1]) as job:
        job.until("the start", lambda: job.workers[0].events("start"))
        at = job.workers[0].events("start")[0]["at"]
        job.until_ended()
        found, text = error_of(job.workers[0], at, r"worker 1 at 127\.0\.0\.1:\d+")
    must(seconds <= found < seconds + 15, f"found after {found:.1f} s")
    return Outcome("the worker ended by an error", found, f"worker 0: {text}", "nothing had begun")


@scenario(
    "A second process with a worker's index, and one with the chief's, while the job trains",
    "each newcomer ends with an error; the job continues",
    45,
)
def twice(bench: Bench) -> Outcome:
    with Job(Settings(steps=60, pace=0.1)) as job:
        job.until_step(5)
        seconds, texts = [], []
        for rank in (1, 0):
            newcomer = job.start(rank)
            job.until("the newcomer's end", lambda new=newcomer: new.ended)
            at = newcomer.events("start")[0]["at"]
            found, text = error_of(newcomer, at, r"is running already|port \d+ is in use")
            seconds.append(found)
            texts.append(text)
        lost = bench.wait_for_reference_weights(job)
    happened = "both newcomers ended; the job trained on"
    return Outcome(happened, max(seconds), f"the newcomers: {texts[0]}", f"nothing: {lost}")
