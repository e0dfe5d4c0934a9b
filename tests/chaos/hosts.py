"""Scenarios: hosts of `launch --nodes` that fail and return, in network namespaces."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from tests.chaos.bench import Bench, Outcome, must, scenario
from tests.chaos.job import TRAINING, Unexpected, Worker
from tests.chaos.network import Network, missing
from tests.chaos.training import Settings
from tests.distributed import cluster

PATIENCE = 300.0  # seconds: three workers import TensorFlow on two cores
_PORT = 29500
_SECRET = "chaos"
_MINUTES = 10.0


class Process(Worker):
    """`tf-redsync WORDS` on one host; collects its workers' events."""

    def __init__(self, namespace: str, *words: str):
        self.namespace = namespace
        command = ["ip", "netns", "exec", namespace, sys.executable, "-m", "tf_redsync", *words]
        env = {name: value for name, value in os.environ.items() if name != "TF_CONFIG"}
        env |= {**cluster.ENVIRONMENT, "TF_REDSYNC_JOB": _SECRET, "PYTHONUNBUFFERED": "1"}
        super().__init__(0, command, env, threading.Condition())

    def rounds(self) -> list[tuple[int, int]]:
        """Number and node count of each round that it has begun."""
        found = re.findall(r"round (\d+): \d+ workers? on (\d+) nodes?", self.output)
        return [(int(number), int(nodes)) for number, nodes in found]

    def power_off(self) -> float:
        """Cuts the network and kills all processes of the host; returns the time."""
        _link(self.namespace, "down")
        at = self.kill()
        _link(self.namespace, "up")
        return at

    def kill(self) -> float:
        """Sends SIGKILL to the launcher, which also ends its workers; returns the time."""
        self.process.kill()
        at = time.monotonic()
        self._thread.join(10)
        return at


def _link(namespace: str, state: str) -> None:
    words = ["ip", "-n", namespace, "link", "set", "eth0", state]
    subprocess.run(words, check=True, capture_output=True, timeout=30)


class Hosts:
    """Machines on a network, as a context manager.

    Args:
        network: The machines' network; if `apart`, its last machine runs the rendezvous.
        settings: Settings of the training.
        apart: Whether the rendezvous has a machine of its own.
        timeout: Timeout of the rendezvous in seconds.
    """

    def __init__(self, network: Network, settings: Settings, apart: bool, timeout: float = 120):
        self._network, self._settings, self._timeout = network, settings, timeout
        machine = len(network.namespaces) - 1 if apart else 0
        host = network.addresses[machine].rpartition(":")[0]
        self.rendezvous = f"{host}:{_PORT}"
        self.all: list[Process] = []

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, *_) -> None:
        for one in self.all:
            one.close()

    def start(self, machine: int) -> Process:
        """Starts the launcher on a machine."""
        words = ["--nodes", "2:3", "--rendezvous", self.rendezvous, "--grace", "3"]
        words += ["--rendezvous-timeout", f"{self._timeout:g}", "--max-restarts", "0"]
        words += ["--threads", "1", "--stop-grace", "60", str(TRAINING), self._settings.to_text()]
        return self._keep(Process(self._network.namespaces[machine], "launch", *words))

    def serve(self, machine: int) -> Process:
        """Starts a rendezvous on a machine."""
        words = ("--port", str(_PORT), "--rendezvous-timeout", f"{self._timeout:g}")
        return self._keep(Process(self._network.namespaces[machine], "rendezvous", *words))

    def _keep(self, process: Process) -> Process:
        self.all.append(process)
        return process

    def until(self, goal: str, condition: Callable[[], object], seconds: float = PATIENCE) -> float:
        """Waits until `condition()` is true; returns the time."""
        limit = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > limit:
                tails = "\n".join(f"--- {p.code}\n{p.output[-2500:]}" for p in self.all)
                raise Unexpected(f"{goal}: not within {seconds:g} s.\n{tails}")
            time.sleep(0.02)
        return time.monotonic()

    def until_progress(self, among: Sequence[Process], since: float, end: float) -> None:
        """Waits until a worker makes a step after time `since`, or until `end`."""

        def has_progressed() -> bool:
            steps = [event["at"] for one in among for event in one.events("step")]
            return time.monotonic() >= end or max(steps, default=0.0) > since

        self.until("a step", has_progressed)

    def until_steps(self, workers: int, among: Sequence[Process], since: float) -> float:
        """Waits until a round of `workers` workers has made a step after `since`; returns when."""

        def steps() -> bool:
            return all(
                one.rounds()
                and one.rounds()[-1][1] == workers
                and any(event["at"] > since for event in one.events("step"))
                and one.events("start")[-1]["at"] > since
                for one in among
            )

        return self.until(f"a step of {workers} workers", steps)


@contextmanager
def _machines(
    bench: Bench, count: int, settings: dict, braked: bool = False, **options
) -> Iterator[tuple[Hosts, Path]]:
    """Machines, and a folder for checkpoints, states, and the training's brake file."""
    folder = bench.folder()
    (folder / "states").mkdir()
    (folder / "brake").touch()
    run_settings = Settings(
        directory=str(folder / "run"),
        states=str(folder / "states"),
        brake=str(folder / "brake") if braked else "",
        **settings,
    )
    with Network(count) as network, Hosts(network, run_settings, **options) as hosts:
        yield hosts, folder


def residuals(folder: Path, attempt: int, kind: str) -> dict[str, np.ndarray]:
    """Sums over the workers of their residuals in an attempt: "saved" or "restored"."""
    totals: dict[str, np.ndarray] = {}
    for path in sorted((folder / "states").glob(f"{attempt}-{kind}-*.npz")):
        with np.load(path) as arrays:
            for name in arrays.files:
                if "residual" in name and arrays[name].dtype == np.float32:
                    key = name[name.index("bucket") :] if "bucket" in name else name
                    totals[key] = totals.get(key, 0) + arrays[name].astype(np.float64)
    return totals


def conserved(folder: Path, attempt: int) -> str:
    """Compares the sums of residuals before and after a restoration; returns their difference."""
    saved, restored = (residuals(folder, attempt, kind) for kind in ("saved", "restored"))
    must(saved and saved.keys() == restored.keys(), f"{saved.keys()} and {restored.keys()}")
    largest = max(float(np.abs(total).max()) for total in saved.values())
    must(largest > 0, "all residuals are 0")
    apart = max(float(np.abs(saved[name] - restored[name]).max()) for name in saved)
    must(apart <= 1e-6 * largest, f"sums of residuals differ by {apart} of {largest}")
    return f"{apart / largest:.0e}"


@scenario(
    "One of three hosts of `launch --nodes 2:3` dies, and comes back",
    "the others go on from the last checkpoint as two, and as three after a checkpoint when it is "
    "back; the sums of residuals are kept",
    180,
    missing,
)
def host_returns(bench: Bench) -> Outcome:
    settings = {"steps": 80, "pace": 0.02}
    with _machines(bench, 3, settings, braked=True, apart=False) as (hosts, folder):
        a, b, c = (hosts.start(machine) for machine in range(3))
        hosts.until_steps(3, (a, b, c), 0.0)
        hosts.until("a checkpoint", lambda: list((folder / "run").glob("*/manifest.json")))
        at = c.kill()
        detected = hosts.until("the loss", lambda: "is lost" in a.output)
        two = hosts.until_steps(2, (a, b), at)
        late = hosts.start(2)
        back = time.monotonic()
        three = hosts.until_steps(3, (a, b, late), back)
        (folder / "brake").unlink()
        hosts.until("the end", lambda: all(one.code is not None for one in (a, b, late)))
        must([one.code for one in (a, b, late)] == [0, 0, 0], a.output[-3000:])
        ends = {one.events("end")[0]["digest"] for one in (a, b, late)}
        must(len(ends) == 1 and a.events("end")[0]["step"] == 80, str(ends))
        apart = [conserved(folder, attempt) for attempt in (1, 2)]
    return Outcome(
        f"two workers made a step {two - at:.0f} s after the death, three {three - back:.0f} s "
        "after the return (with imports)",
        detected - at,
        "the rendezvous: node is lost",
        f"the steps since the checkpoint; sums of residuals kept to {' and '.join(apart)} of the "
        "largest element",
    )


@scenario(
    "Hosts of `launch --nodes 2:3` die at random for ten minutes, and their rendezvous, too",
    "the remaining hosts resume the training from the last checkpoint",
    700,
    missing,
)
def hosts_die(bench: Bench, minutes: float = _MINUTES) -> Outcome:
    settings = {"steps": 100_000, "pace": 0.05}
    with _machines(bench, 4, settings, apart=True) as (hosts, _):
        serves = hosts.serve(3)
        there = {machine: hosts.start(machine) for machine in range(3)}
        end, deaths, reached = time.monotonic() + 60 * minutes, [], 0
        hosts.until("a step", lambda: any(one.step for one in there.values()))
        while time.monotonic() < end:
            if bench.random.random() < 0.6:  # otherwise workers may still be starting
                since = time.monotonic()
                hosts.until_progress(list(there.values()), since, end)
            time.sleep(bench.random.uniform(0, 15))
            victim = bench.random.choice([0, 1, 2, 3])
            reached = max(reached, *(one.step for one in there.values()))
            if victim == 3:
                serves.kill()
                time.sleep(bench.random.uniform(0, 15))
                serves = hosts.serve(3)
                options = "rendezvous"
            else:
                off = bench.random.random() < 0.5
                there[victim].power_off() if off else there[victim].kill()
                options = f"{'power' if off else 'SIGKILL'} of host {victim}"
                time.sleep(bench.random.uniform(0, 30))
                there[victim] = hosts.start(victim)
            deaths.append(options)
            print(f"    {len(deaths)} {options}, step {reached}", flush=True)
        since = time.monotonic()
        hosts.until_steps(3, list(there.values()), 0.0)
        last = hosts.until("steps", lambda: min(one.step for one in there.values()) > 0) - since
        reached = max(one.step for one in there.values())
        for one in there.values():
            one.process.send_signal(signal.SIGTERM)
        hosts.until("the end", lambda: all(one.code is not None for one in there.values()))
        codes = [one.code for one in there.values()]
        must(codes == [75, 75, 75], f"{codes}\n{there[0].output[-3000:]}")
        rounds = max(number for one in there.values() for number, _ in one.rounds())
    kinds = {
        kind: sum(kind in options for options in deaths) for kind in ("SIGKILL", "power", "rendez")
    }
    return Outcome(
        f"{len(deaths)} deaths in {minutes:g} min ({kinds['SIGKILL']} by SIGKILL, {kinds['power']} "
        f"without a word, {kinds['rendez']} of the rendezvous), {rounds} restarts, step {reached}; "
        f"three workers again {last:.0f} s after the last",
        lost="the steps since the last checkpoint of each",
    )


@scenario(
    "The host that serves the rendezvous of `launch --nodes 2:3` dies",
    "the others wait for it, then end with an error and exit code 69; if it comes back they go on",
    240,
    missing,
)
def rendezvous_host_dies(bench: Bench) -> Outcome:
    settings = {"steps": 100_000, "pace": 0.05}
    with _machines(bench, 3, settings, apart=False, timeout=60) as (hosts, _):
        a, b, c = (hosts.start(machine) for machine in range(3))
        hosts.until_steps(3, (a, b, c), 0.0)
        at = a.power_off()
        hosts.until("a message", lambda: "does not answer" in b.output and "does not" in c.output)
        again = hosts.start(0)
        back = time.monotonic()
        three = hosts.until_steps(3, (again, b, c), back)
        at = again.kill()
        hosts.until("the end", lambda: b.code is not None and c.code is not None)
        ended = time.monotonic() - at
        must((b.code, c.code) == (69, 69), f"{b.code}, {c.code}:\n{b.output[-2000:]}")
        line = next(line for line in b.output.splitlines() if "no rendezvous at" in line)
    return Outcome(
        f"after its return three workers made a step within {three - back:.0f} s; when it did not "
        f"return, the others ended after {ended:.0f} s with exit code 69",
        None,
        line.removeprefix("[launch] "),
        "the steps since the last checkpoint",
    )
