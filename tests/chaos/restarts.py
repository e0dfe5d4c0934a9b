"""Scenarios: workers that fail under the launcher, which restarts them."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from tests.chaos.bench import Bench, Outcome, must, scenario
from tests.chaos.job import PATIENCE, TRAINING, Unexpected, Worker
from tests.chaos.training import Settings
from tests.distributed import cluster, forks
from tests.processes import AS_COMMAND

_SCRIPT = """
import os, sys
sys.exit(os.environ["TF_REDSYNC_RESTART"] != "{times}")
"""


# The launcher without pauses: their attempts are short, unlike those of a training.
_PROGRAM = f"""
{AS_COMMAND}
from tf_redsync.cli import launch, restarts
restarts.PAUSES = ()
raise SystemExit(launch.main())
"""


class Launcher(Worker):
    """`tf-redsync launch -n 2` with further arguments; collects its workers' events."""

    def __init__(self, *words: str):
        command = [sys.executable, "-c", _PROGRAM, "-n", "2", "--isolate", "no", *words]
        env = {name: value for name, value in os.environ.items() if name != "TF_CONFIG"}
        super().__init__(0, command, {**env, **cluster.ENVIRONMENT}, threading.Condition())

    def __enter__(self) -> Launcher:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def until(self, goal: str, condition: Callable[[], object], seconds: float = PATIENCE) -> None:
        """Waits until `condition()` is true; raises if the launcher has ended before."""
        limit = time.monotonic() + seconds
        while not condition():
            if self.code is not None or time.monotonic() > limit:
                raise Unexpected(f"{goal}: exit code {self.code}\n{self.output[-3000:]}")
            time.sleep(0.01)

    def until_output(self, text: str, seconds: float = PATIENCE) -> float:
        """Waits for a line that contains a text; returns the time."""
        self.until(text, lambda: text in self.output, seconds)
        return time.monotonic()

    def until_ended(self, seconds: float = PATIENCE) -> None:
        """Waits for its end, which must be without an error."""
        self.until("the end", lambda: self.code is not None, seconds)
        must(self.code == 0, f"exit code {self.code}:\n{self.output[-3000:]}")

    def steps(self, since: float = 0.0) -> list[dict]:
        """Step events of the workers after time `since`."""
        return [event for event in self.events("step") if event["at"] > since]


@scenario(
    "SIGKILL of a worker under `launch --max-restarts`, three times",
    "the launcher sees it at once, ends the other worker and starts both again; they go on from "
    "the last checkpoint to the bits of an undisturbed run",
    120,
)
def restarted(bench: Bench, times: int = 3) -> Outcome:
    settings = Settings(steps=60, pace=0.05, directory=str(bench.folder() / "run"))
    expected = bench.reference(settings)
    ask = forks.command(cluster.ENVIRONMENT, TRAINING, settings.to_text())[3:]
    found, again, lost, since = [], [], [], 0.0
    with Launcher("--max-restarts", str(times), "--grace", "2", "--threads", "1", *ask) as launcher:
        for restart in range(1, times + 1):
            count = 2 * bench.random.randrange(4, 15)
            launcher.until("steps", lambda t=since, n=count: len(launcher.steps(t)) >= n)
            victim = launcher.events("start")[-1 - bench.random.randrange(2)]["pid"]
            os.kill(victim, signal.SIGKILL)
            at, reached = time.monotonic(), launcher.step
            found.append(launcher.until_output(f"restart {restart} with") - at)
            since = time.monotonic()
            launcher.until("a step", lambda t=since: launcher.steps(t))
            first = launcher.steps(since)[0]
            again.append(first["at"] - at)
            lost.append(max(0, reached - first["step"] + 1))
        launcher.until_ended()
        ends = launcher.events("end")
    must([e["digest"] for e in ends] == 2 * [expected["digest"]], f"{ends}, and not {expected}")
    text = next(line for line in launcher.output.splitlines() if "restart 1 with" in line)
    happened = f"{times} restarts; {min(again):.0f} to {max(again):.0f} s later a step was done"
    same = "in the end weights bit for bit those of an undisturbed run"
    return Outcome(
        f"{happened} (these workers are forks: add the time of imports)",
        max(found),
        f"the launcher, with 2 s of grace for the other one: {text}",
        f"{', '.join(map(str, lost))} steps of work, done again; {same}",
    )


@scenario(
    "A script that fails a thousand times under `launch --max-restarts 1000`",
    "it is started 1,001 times, and the launcher's memory and open files do not grow",
    300,
)
def thousand_restarts(bench: Bench, times: int = 1000) -> Outcome:
    script = bench.folder() / "fails.py"
    script.write_text(_SCRIPT.format(times=times), encoding="utf-8")
    began, seen = time.monotonic(), []
    with Launcher("--max-restarts", str(times), "--grace", "0", str(script)) as launcher:
        # the launcher continues for a while after both
        for restart in (times // 10, times - times // 10):
            launcher.until_output(f"restart {restart} with", 1200)
            seen.append(_size(launcher.process.pid))
        launcher.until_ended(1200)
    seconds = time.monotonic() - began
    (files, kib), (files_later, kib_later) = seen
    must(files_later <= files + 2, f"{files} open files, later {files_later}")
    must(kib_later < kib + 2000, f"{kib} KiB, later {kib_later}")
    happened = (
        f"{times} restarts, {seconds / times:.2f} s each; the launcher had {files} open files and "
        f"{kib} KiB after a tenth of them, {files_later} and {kib_later} after nine tenths"
    )
    return Outcome(happened)


def _size(process: int) -> tuple[int, int]:
    """Minimum number of open files, and of memory in KiB, over half a second."""
    sizes = []
    for _ in range(50):
        status = Path(f"/proc/{process}/status").read_text(encoding="ascii")
        kib = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))
        sizes.append((len(os.listdir(f"/proc/{process}/fd")), kib))
        time.sleep(0.01)
    files, kibs = zip(*sizes, strict=True)
    return min(files), min(kibs)
