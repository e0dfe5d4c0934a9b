"""Scenarios: a network that is cut, slow, or corrupts bits."""

from __future__ import annotations

import dataclasses
import time

from tests.chaos.bench import Bench, Outcome, error_of, must, scenario
from tests.chaos.job import Job
from tests.chaos.network import Network, missing
from tests.chaos.training import Settings


def _settings(network: Network, **changes) -> Settings:
    return Settings(steps=60, pace=0.05, namespaces=network.namespaces, **changes)


@scenario("The cable is cut for 5 s", "TCP retransmits; training continues", 45, missing)
def cut_5_s(bench: Bench) -> Outcome:
    return _cut_for_a_while(bench, 5.0)


@scenario("The cable is cut for 15 s", "TCP retransmits; training continues", 70, missing)
def cut_15_s(bench: Bench) -> Outcome:
    return _cut_for_a_while(bench, 15.0)


@scenario(
    "The cable is cut for 25 s, with heartbeat_seconds=240",
    "TCP retransmits; training continues",
    100,
    missing,
)
def cut_25_s(bench: Bench) -> Outcome:
    return _cut_for_a_while(bench, 25.0, heartbeat_seconds=240)


@scenario(
    "The cable is cut for 40 s, with heartbeat_seconds=240",
    "TCP retransmits; training continues",
    120,
    missing,
)
def cut_40_s(bench: Bench) -> Outcome:
    return _cut_for_a_while(bench, 40.0, heartbeat_seconds=240)


def _cut_for_a_while(bench: Bench, seconds: float, **strategy) -> Outcome:
    with Network(2) as network:
        settings = _settings(network, strategy=strategy)
        with Job(settings, addresses=network.addresses) as job:
            job.until_step(bench.random.randrange(5, 30))
            network.cut, step = True, job.workers[0].step
            time.sleep(seconds)
            network.cut, at = False, time.monotonic()
            job.until_step(step + 2)
            again = time.monotonic() - at
            lost = bench.wait_for_reference_weights(job)
    happened = f"cut in step {step}; {again:.1f} s after it was whole, two more steps were done"
    return Outcome(happened, lost=f"nothing: {lost}")


@scenario(
    "The cable is cut for 60 s",
    "both end by an error, worker 0 within 45 s; started again they go on from the last checkpoint",
    240,
    missing,
)
def cut_60_s(bench: Bench) -> Outcome:
    return _cut(bench, 60.0)


@scenario(
    "The cable is cut permanently",
    "both end by an error, worker 0 within 45 s; started again they go on from the last checkpoint",
    240,
    missing,
)
def cut_for_ever(bench: Bench) -> Outcome:
    return _cut(bench, None)


def _cut(bench: Bench, seconds: float | None) -> Outcome:
    with Network(2) as network:
        settings = _settings(network, directory=str(bench.folder() / "run"))
        with Job(settings, addresses=network.addresses) as job:
            job.until_step(bench.random.randrange(8, 40))
            network.cut, at, step = True, time.monotonic(), job.workers[0].step
            if seconds is not None:
                time.sleep(seconds)
                network.cut = False
            job.until_ended(seconds=300)
            found, text = error_of(job.workers[0], at, "worker 1 does not answer")
            other = job.workers[1].ended - at
            must(job.workers[1].code, "worker 1 ended without an error", job)
    must(found < 45, f"found after {found:.0f} s only")
    must(other < 200, f"worker 1 ended after {other:.0f} s only")
    lost = bench.resume(dataclasses.replace(settings, namespaces=()), step)
    happened = f"cut in step {step}; worker 1 ended by an error {other:.0f} s after the cut"
    return Outcome(happened, found, f"worker 0: {text}", lost)


@scenario("Every packet is 50 ms under way", "training is slower, and the same", 90, missing)
def delayed(bench: Bench) -> Outcome:
    pace = []
    with Network(2) as network:
        for delay in (0.0, 0.05):
            network.delay = delay
            with Job(_settings(network), addresses=network.addresses) as job:
                lost = bench.wait_for_reference_weights(job)
                times = [event["at"] for event in job.workers[0].events("step")]
            pace.append((times[-1] - times[9]) / (len(times) - 10))
    happened = f"{pace[1]:.2f} s a step, {pace[0]:.2f} s without (0.05 s of them are a pause)"
    return Outcome(happened, lost=f"nothing: {lost}")


@scenario(
    "The cable is lossy: each packet is lost with a chance of 2 %",
    "TCP retransmits; training is slower, and the same",
    90,
    missing,
)
def lossy(bench: Bench) -> Outcome:
    with Network(2, bench.random) as network:
        network.loss = 0.02
        with Job(_settings(network), addresses=network.addresses) as job:
            lost = bench.wait_for_reference_weights(job)
            times = [event["at"] for event in job.workers[0].events("step")]
    pace = (times[-1] - times[9]) / (len(times) - 10)
    happened = f"{pace:.2f} s a step (0.05 s of them are a pause); {network.lost} packets were lost"
    return Outcome(happened, lost=f"nothing: {lost}")


@scenario(
    "Two bits of a packet change under way, so that TCP's checksum stays right",
    "the worker that receives it raises before its update and names the sender (or raises an error "
    "of gRPC if the bits belong to its header); the other worker ends too",
    150,
    missing,
)
def changed_bits(bench: Bench) -> Outcome:
    with Network(2) as network:
        directory = str(bench.folder() / "run")
        settings = _settings(network, directory=directory, units=4096)
        with Job(settings, addresses=network.addresses) as job:
            job.until_step(bench.random.randrange(8, 30))
            step = job.workers[0].step
            network.spoil, at = 1, time.monotonic()
            job.until_ended()
            must(all(w.code for w in job.workers.values()), "no worker detected the change", job)
            victim = min(
                job.workers.values(), key=lambda w: (w.events("error") or [{"at": 1e9}])[0]["at"]
            )
            found, text = error_of(victim, at, "corrupted message|grpc_message")
            other = job.workers[1 - victim.rank].ended - at
    lost = bench.resume(dataclasses.replace(settings, namespaces=()), step)
    happened = (
        f"in step {step}; worker {victim.rank} ended by an error, the other {other:.0f} s after"
    )
    return Outcome(happened, found, f"worker {victim.rank}: {text}", lost)
