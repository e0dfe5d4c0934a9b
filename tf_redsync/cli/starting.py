"""Starts the workers of one attempt: here, or on other machines over SSH."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tf_redsync import environment
from tf_redsync.cli import hosts as hosts_
from tf_redsync.cli import output, surroundings
from tf_redsync.cli.processes import Job
from tf_redsync.cli.remote_worker import HostError, RemoteWorker
from tf_redsync.cli.restarts import NotStarted, Restarts
from tf_redsync.cli.worker_process import Worker

_MEET_SECONDS = 60.0


@dataclasses.dataclass(frozen=True)
class Output:
    """Where workers' lines go: to files, and to this terminal, with noise or without."""

    logs: Path | None
    echo: bool
    verbose: bool

    def log(self, number: int) -> Path | None:
        """The file of a worker."""
        return self.logs / f"worker_{number}.log" if self.logs else None

    def printer(self, number: int) -> Callable[[bytes], None] | None:
        """What prints a worker's lines."""
        return output.printer(number, bool(self.logs), self.verbose) if self.echo else None


@dataclasses.dataclass(frozen=True)
class Here:
    """Starts workers on this machine.

    Attributes:
        command: Of every worker.
        configs: TF_CONFIG of each; `None` for free ports of 127.0.0.1, or `addresses`.
        base: The environment of all.
        addresses: "host:port" of each.
        wrappers: Of each worker, words before the command.
        worker_env: Of each worker, variables after `base`.
        cores_per_worker: `None` for all cores.
        output: Where their lines go.
        restarts: Which of them are started.
    """

    command: Sequence[str]
    configs: Sequence[str] | None
    base: Mapping[str, str]
    addresses: Sequence[str] | None
    wrappers: Sequence[Sequence[str]]
    worker_env: Sequence[Mapping[str, str]]
    cores_per_worker: int | None
    output: Output
    restarts: Restarts

    def __call__(self, job: Job) -> None:
        """Starts the workers of an attempt.

        Raises:
            NotStarted: for one that cannot be.
        """
        places = self.restarts.places
        attempt = {environment.RESTART: str(self.restarts.attempt)}
        for i, (place, config) in enumerate(zip(places, self._configs(places), strict=True)):
            number = surroundings.rank_in(config) if self.configs else i
            own = {"TF_CONFIG": config, **attempt, **self.worker_env[place]}
            cores = surroundings.cores_of(i, len(places), self.cores_per_worker)
            try:
                worker = Worker(
                    number,
                    [*self.wrappers[place], *self.command],
                    {**self.base, **own},
                    self.output.log(number),
                    self.output.printer(number),
                    self.restarts.attempt > 0,
                    cores,
                )
            except OSError as error:
                raise NotStarted(place, error) from error
            job.add(worker)

    def _configs(self, places: Sequence[int]) -> list[str]:
        if self.configs:
            return [self.configs[place] for place in places]
        if self.addresses:
            at = [self.addresses[place] for place in places]
        else:
            at = [f"127.0.0.1:{port}" for port in surroundings.free_ports(len(places))]
        return [surroundings.tf_config(at, i) for i in range(len(places))]


@dataclasses.dataclass(frozen=True)
class Remote:
    """What is the same for all workers that are started over SSH.

    Attributes:
        hosts: The machines.
        ssh: The command, with its options.
        python: The interpreter on all machines.
        port: Of the first worker of each machine; `None`: one that is free here, new at a restart.
        env: Variables for the workers.
    """

    hosts: Sequence[hosts_.Host]
    ssh: str
    python: str
    port: int | None
    env: Mapping[str, str]

    @property
    def workers(self) -> int:
        """How many workers there are."""
        return sum(host.workers for host in self.hosts)


@dataclasses.dataclass(frozen=True)
class OverSSH:
    """Starts workers on other machines.

    Attributes:
        command: Of every worker, after the interpreter.
        remote: Where and how.
        threads: Of a worker; `None` for the machine's cores over its workers.
        cores_per_worker: `None` for all cores.
        output: Where their lines go.
        restarts: Which of them are started.
    """

    command: Sequence[str]
    remote: Remote
    threads: int | None
    cores_per_worker: int | None
    output: Output
    restarts: Restarts

    def __call__(self, job: Job) -> None:
        """Starts the workers of an attempt, once all machines have answered.

        Raises:
            NotStarted: for one whose machine cannot be used.
        """
        every = [host for host in self.remote.hosts for _ in range(host.workers)]
        places = self.restarts.places
        used = [every[place] for place in places]
        slots = [used[:i].count(host) for i, host in enumerate(used)]
        port = self.remote.port or surroundings.free_ports(1)[0]
        at = [f"{host.address}:{port + slot}" for host, slot in zip(used, slots, strict=True)]
        workers = []
        for i, host in enumerate(used):
            words = hosts_.command(host, self.remote.ssh, self.remote.python)
            log, show = self.output.log(i), self.output.printer(i)
            again = self.restarts.attempt > 0
            try:
                worker = RemoteWorker(i, host.name, words, os.environ, log, show, again)
            except OSError as error:
                raise NotStarted(places[i], error) from error
            job.add(worker)
            workers.append(worker)
        end = time.monotonic() + _MEET_SECONDS
        for place, worker in zip(places, workers, strict=True):
            try:
                worker.meet(max(end - time.monotonic(), 1.0))
            except HostError as error:
                raise NotStarted(place, error) from error
        for i, worker in enumerate(workers):
            config = surroundings.tf_config(at, i)
            attempt = {environment.RESTART: str(self.restarts.attempt)}
            worker.begin(
                {
                    "argv": list(self.command),
                    "cwd": os.getcwd(),
                    "env": dict(self.remote.env),
                    "own": {"TF_CONFIG": config, **attempt},
                    "workers": used.count(used[i]),
                    "slot": slots[i],
                    "threads": self.threads or self.cores_per_worker,
                    "cores": self.cores_per_worker,
                }
            )
