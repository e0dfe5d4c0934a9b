"""Many steps on two workers: a process's threads, memory and open files must not grow.

    python -m tests.chaos.soak --steps 20000 --folder build/soak
    python -m tests.chaos.soak --folder build/soak --plot docs/images/soak.png

It may be interrupted, even by SIGKILL, and restarted: it resumes from its last checkpoint with new
processes. Progress and the remaining time are printed, all numbers are in FOLDER/log.jsonl.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

from tests.chaos.job import Job  # noqa: E402
from tests.chaos.training import Settings  # noqa: E402

EPOCH, WATCH, SAVES = 500, 100, 1000  # steps
PANELS = {
    "threads": "threads of a process",
    "mib": "resident memory, MiB",
    "files": "open files",
    "median": "median time of a step, ms",
}


def soak(steps: int, folder: Path) -> None:
    """Trains and records the workers' events."""
    directory = str(folder / "checkpoints")
    settings = Settings(
        steps=steps, epoch=EPOCH, watch=WATCH, pace=0.0, directory=directory, every=SAVES
    )
    seen, began = [0, 0], time.monotonic()
    with Job(settings) as job, (folder / "log.jsonl").open("a", encoding="utf-8") as log:
        while any(worker.code is None for worker in job.workers.values()):
            time.sleep(1.0)
            for rank, worker in job.workers.items():
                events = worker.events("watch")
                for event in events[seen[rank] :]:
                    log.write(json.dumps(event) + "\n")
                seen[rank] = len(events)
            log.flush()
            if seen[0] and job.workers[0].events("watch"):
                show(job.workers[0].events("watch"), steps, began)
        print(job.wait_for_end())


def show(events: list[dict], steps: int, began: float) -> None:
    """Prints progress every twentieth."""
    first, last = events[0]["step"], events[-1]["step"]
    if last % (steps // 20) or show.__dict__.get("shown") == last:
        return
    show.shown = last
    left = (time.monotonic() - began) / max(1, last - first + WATCH) * (steps - last)
    print(f"step {last} of {steps}, {left / 60:.0f} min left: {events[-1]}", flush=True)


def plot(log: Path, picture: Path) -> None:
    """Plots the log."""
    from matplotlib.figure import Figure

    events = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    figure = Figure(figsize=(10, 6), layout="constrained")
    axes = figure.subplots(2, 2, sharex=True)
    for axis, (name, title) in zip(axes.flat, PANELS.items(), strict=True):
        for rank, style in ((0, "-"), (1, "--")):
            rows = [event for event in events if event["rank"] == rank]
            values = [event[name] * (1000 if name == "median" else 1) for event in rows]
            axis.plot([event["step"] for event in rows], values, style, label=f"worker {rank}")
        axis.set_title(title)
        axis.set_ylim(0, 1.15 * axis.get_ylim()[1])
        axis.grid(alpha=0.3)
    for axis in axes[1]:
        axis.set_xlabel("step")
    axes[0, 0].legend()
    figure.savefig(picture, dpi=110)
    for name in PANELS:
        for rank in (0, 1):
            rows = [event[name] for event in events if event["rank"] == rank]
            tenth = max(1, len(rows) // 10)
            head, tail = sorted(rows[tenth : 2 * tenth]), sorted(rows[-tenth:])
            print(f"worker {rank} {name}: {head[len(head) // 2]:.5g}, {tail[len(tail) // 2]:.5g}")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos.soak", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--steps", type=int, default=20000, help=f"a multiple of {EPOCH}")
    parser.add_argument("--folder", type=Path, required=True, help="for checkpoints and the log")
    parser.add_argument("--plot", type=Path, help="draw what is in the log, and do nothing else")
    arguments = parser.parse_args()
    if arguments.steps < EPOCH or arguments.steps % EPOCH:
        parser.error(f"--steps must be a multiple of {EPOCH}. Received: {arguments.steps}")
    arguments.folder.mkdir(parents=True, exist_ok=True)
    if arguments.plot:
        plot(arguments.folder / "log.jsonl", arguments.plot)
    else:
        soak(arguments.steps, arguments.folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
