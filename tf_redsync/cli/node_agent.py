"""A node of an elastic job: the launcher of one host, which starts its workers in every round.

A thread holds the connection to the rendezvous. It also serves the rendezvous if the rendezvous
address belongs to this host and is free. The main thread supervises the workers. If the connection
is lost, the workers continue and the thread reconnects; its first messages name the running round.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import os
import queue
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from typing_extensions import Self

from tf_redsync import stopping
from tf_redsync.cli import output, root_cause, worker_environment
from tf_redsync.cli.membership import LOST_SECONDS, NO_ROUND_EXIT_CODE, Round, Settings
from tf_redsync.cli.node_rendezvous import ALIVE_SECONDS, Server, is_loopback, own_socket
from tf_redsync.cli.processes import TIMEOUT_EXIT_CODE, Job, LaunchResult, TimeLimits
from tf_redsync.cluster import handshake
from tf_redsync.cluster.handshake import Connection, NoAnswer

_ASK_SECONDS = 1.0  # between two checks whether a worker can take a request for a checkpoint
_REPEAT_SECONDS = 15.0  # between two requests for a checkpoint
_OBSTACLE_SECONDS = 5.0
_FINISHED_SECONDS = 30.0  # limit of the search for a lost rendezvous after the workers finished
_REPORT_SECONDS = 2.0  # limit for other nodes to report the same checkpoint
_USR1_EXIT_CODE = 128 + signal.SIGUSR1
_STOP_EXIT_CODES = tuple(128 + number for number in stopping.SIGNALS)


@dataclasses.dataclass(frozen=True)
class Nodes:
    """Configuration of one node of an elastic job.

    Attributes:
        settings: Settings that all nodes share.
        host: Host of the rendezvous.
        port: Port of the rendezvous.
        workers: Workers of this node.
        timeout: Seconds to wait for enough nodes, and for a lost rendezvous.
        secret: The job's secret.
        address: Name at which other nodes reach this one; `None` for the address of its connection
            to the rendezvous.
    """

    settings: Settings
    host: str
    port: int
    workers: int
    timeout: float
    secret: str
    address: str | None = None

    @property
    def rendezvous(self) -> str:
        """The address of the rendezvous."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def own_host(self, called_from: str) -> str:
        """Return the host name or address at which other nodes reach this one.

        Debian resolves a host's own name to 127.0.1.1. The host of the rendezvous then calls from a
        loopback address, and the other nodes reach it by its name.

        Args:
            called_from: The address from which this node has called the rendezvous.
        """
        if self.address:
            return self.address
        by_name = is_loopback(called_from) and not is_loopback(self.host)
        return self.host if by_name else called_from


class Link:
    """The connection to the rendezvous, which a thread keeps open.

    Attributes:
        key: This node's key.
        inbox: Messages of the rendezvous.
        missing: Time since which the rendezvous has not answered, by `time.monotonic`, and the
            reason; `None` while it answers.
        status: Text about what the rendezvous waits for; empty while a round is running.
    """

    def __init__(self, nodes: Nodes):
        self.key = os.urandom(8).hex()
        self.inbox: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.missing: tuple[float, str] | None = (time.monotonic(), "it was not called yet")
        self.status = ""
        self._nodes = nodes
        self._round: Round | None = None
        self._rounds = self._failures = 0  # the job's counts that this node knows
        self._said: list[dict[str, Any]] = []  # messages since this node's round or waiting began
        self._line: Connection | None = None
        self._server: asyncio.Task[tuple[int, str]] | None = None
        self._serving: Server | None = None
        self._loop = asyncio.new_event_loop()
        self._over = asyncio.Event()
        self._job_is_over = False
        self._thread = threading.Thread(target=self._run, name="tf_redsync_nodes", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(3 * LOST_SECONDS)

    def ready(self) -> None:
        """Report that this node can start workers, on new ports."""
        ports = worker_environment.free_ports(self._nodes.workers)
        self._loop.call_soon_threadsafe(self._begin, None)
        self.say(kind="ready", ports=ports)

    def begin(self, begun: Round) -> None:
        """Record the round in which this node's workers start."""
        self._loop.call_soon_threadsafe(self._begin, begun)

    def say(self, **words: Any) -> None:
        """Send a message, and resend it after a lost connection."""
        self._loop.call_soon_threadsafe(self._send, words)

    def _begin(self, begun: Round | None) -> None:
        self._round, self._said = begun, []
        if begun is not None:
            self._rounds, self._failures = begun.number + 1, begun.failures

    def _send(self, words: dict[str, Any]) -> None:
        self._said.append(words)
        if self._line is not None:
            self._line.send(**words)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._main())
        except Exception as error:  # the main thread would wait forever, so it shows the error
            why = f"{type(error).__name__}: {error}"
            self.missing = self.missing or (time.monotonic(), why)
            self.inbox.put({"failed": why})
        finally:  # asyncio warns about tasks that are pending at the exit
            left = asyncio.all_tasks(self._loop)
            for task in left:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))

    async def _main(self) -> None:
        talking = asyncio.create_task(self._keep_talking())
        closing = asyncio.create_task(self._over.wait())
        await asyncio.wait((talking, closing), return_when=asyncio.FIRST_COMPLETED)
        if talking.done():
            talking.result()  # raises the task's error
        if self._line is not None:
            await self._line.flush()
        talking.cancel()
        await asyncio.wait((talking,), timeout=1.0)
        if self._server is not None:
            await self._end_server(self._server)

    async def _end_server(self, server: asyncio.Task[tuple[int, str]]) -> None:
        """Let a server that has announced the job's end finish; cancel any other server."""
        await asyncio.sleep(0)
        if self._serving is not None and self._serving.membership.over is None:
            output.say(
                f"this process served the rendezvous {self._nodes.rendezvous}; the other nodes "
                f"wait for another one there, for up to {self._nodes.timeout:g} s."
            )
            server.cancel()
        await asyncio.wait((server,), timeout=2 * LOST_SECONDS)

    async def _keep_talking(self) -> None:
        seconds = 0.1
        while not self._job_is_over:
            await self._serve_if_free()
            try:
                await self._talk()
                seconds = 0.1
            except NoAnswer as error:
                since = time.monotonic() if self.missing is None else self.missing[0]
                self.missing = since, str(error)
            await asyncio.sleep(seconds)
            seconds = min(1.5 * seconds, 1.0)

    async def _serve_if_free(self) -> None:
        if self._server is not None and not self._server.done():
            return
        listening = await own_socket(self._nodes.host, self._nodes.port)
        if listening is not None:
            output.say(f"this host serves the rendezvous {self._nodes.rendezvous}.")
            self._serving = Server(self._nodes.timeout, self._nodes.secret)
            self._server = asyncio.create_task(self._serving.run(listening))

    async def _talk(self) -> None:
        """Join the job, and receive messages until it is over.

        Raises:
            NoAnswer: the connection is lost.
        """
        line = await handshake.call(self._nodes.rendezvous, self._nodes.secret)
        beat: asyncio.Task[None] | None = None
        try:
            begun = self._round
            line.send(
                node=self.key,
                host=self._nodes.own_host(line.local_host),
                process=os.getpid(),
                round=None if begun is None else dataclasses.asdict(begun),
                rounds=self._rounds,
                failures=self._failures,
                **dataclasses.asdict(self._nodes.settings),
            )
            for words in self._said:
                line.send(**words)
            self._line = line
            beat = asyncio.create_task(_send_heartbeats(line))
            while not self._job_is_over:
                words = await line.receive(LOST_SECONDS)
                self.missing = None
                if words.pop("alive", False):
                    self.status = str(words.get("status", ""))
                elif words:
                    self._job_is_over = "end" in words
                    self.inbox.put(words)
        finally:
            self._line = None
            if beat is not None:
                beat.cancel()
            line.close()


async def _send_heartbeats(line: Connection) -> None:
    while True:
        line.send(kind="alive")
        await asyncio.sleep(ALIVE_SECONDS)


class NodeAgent:
    """Runs the workers of one node in all rounds of its job.

    Args:
        nodes: Configuration of this node.
        limits: Time limits of the job.
        signals: Signals that the launcher has received.
        start: Returns a function that starts workers. Its arguments are the TF_CONFIG of each
            worker and the number of the round.
        prepare: Prepares processes for the next round; `None` for none.
    """

    def __init__(
        self,
        nodes: Nodes,
        limits: TimeLimits,
        signals: collections.deque[int],
        start: Callable[[list[str], int], Callable[[Job], None]],
        prepare: Callable[[], None] | None = None,
    ):
        self.nodes = nodes
        self.limits = limits
        self.signals = signals
        self.start = start
        self.prepare = prepare
        self.link = Link(nodes)
        self._shown = ""
        self._repeat_at = 0.0

    def run(self) -> int:
        """Run rounds until the job is over or this node leaves it; return the exit code."""
        with self.link:
            self.link.ready()
            begun = self._wait()
            while isinstance(begun, Round):
                self._shown = ""
                after = _RunningRound(self, begun).run()
                begun = self._wait() if after is None else after
            return begun

    def _wait(self) -> Round | int:
        """Wait for a round; return it, or an exit code."""
        began = time.monotonic()
        while True:
            if self.signals:
                number = self.signals.popleft()
                output.say(f"{signal.Signals(number).name}: this node ends.")
                self.link.say(kind="leaves")
                asks = number in stopping.SIGNALS
                return stopping.EXIT_CODE if asks else 128 + number
            if self.timed_out():
                return TIMEOUT_EXIT_CODE
            words = self.next(0.1)
            if "round" in words:
                return Round.of(words["round"])
            if "taken" in words:
                self.link.ready()
            if (code := self.ends(words)) is not None:
                return code
            self._show(began)
            missing = self.link.missing
            if missing is not None and time.monotonic() - missing[0] >= self.nodes.timeout:
                return self.give_up(missing[1])

    def timed_out(self) -> bool:
        """Return whether the job's timeout has passed; report it to the user and the rendezvous."""
        limits = self.limits
        if limits.timeout is None or time.monotonic() < limits.start + limits.timeout:
            return False
        output.say(f"timeout: this node ends after {limits.timeout:g} s.")
        self.link.say(kind="leaves")
        return True

    def give_up(self, why: str) -> int:
        """Report a missing rendezvous; return the exit code."""
        output.say(
            f"no rendezvous at {self.nodes.rendezvous} within {self.nodes.timeout:g} s: {why}. "
            "Start the launcher on that host, or `tf-redsync rendezvous`; or pass a larger "
            f"--rendezvous-timeout. Exit code {NO_ROUND_EXIT_CODE}."
        )
        return NO_ROUND_EXIT_CODE

    def ends(self, words: dict[str, Any]) -> int | None:
        """Return the exit code if a message ends this node."""
        if "refused" in words:
            output.say(
                f"the rendezvous {self.nodes.rendezvous} refuses this node: {words['refused']}."
            )
            return 2
        if "failed" in words:
            output.say(
                f"this node cannot use the rendezvous {self.nodes.rendezvous}: {words['failed']}."
            )
            return 1
        if "end" in words:
            output.say(f"the job is over: {words.get('text', '')}.")
            return int(words["end"])
        return None

    def next(self, seconds: float) -> dict[str, Any]:
        """Return the next message of the rendezvous; empty if none arrives within `seconds`."""
        try:
            return self.link.inbox.get(timeout=seconds)
        except queue.Empty:
            return {}

    def _show(self, began: float) -> None:
        """Print the reason for waiting, whenever it changes and every 30 s."""
        now, missing = time.monotonic(), self.link.missing
        text = self.link.status
        if missing is not None:
            if now - missing[0] < 3.0:
                return
            text = f"the rendezvous {self.nodes.rendezvous} does not answer: {missing[1]}"
        if text and (text != self._shown or now >= self._repeat_at):
            self._shown, self._repeat_at = text, now + 30.0
            output.say(f"waiting ({now - began:.0f} s): {text}.")


class _RunningRound:
    """The workers of this node in one round."""

    def __init__(self, agent: NodeAgent, begun: Round):
        self._agent = agent
        self._nodes = agent.nodes
        self._link = agent.link
        self._round = begun
        self._asks = False  # whether to request a checkpoint from a worker
        self._asked = False
        self._stopped = False  # whether the rendezvous has ended the round
        self._saved = False  # whether workers of another node have made a checkpoint
        self._look_at = 0.0
        self._asks_since = 0.0
        self._successor: Round | None = None  # the next round, if it began without this node
        self._job_code: int | None = None  # exit code of the job, if it is over
        self._told_failure = self._told_leave = self._told_missing = self._told_obstacle = False

    def run(self) -> Round | int | None:
        """Run the workers until they end.

        Returns:
            An exit code if this node ends, too; the next round if it has already begun; else
            `None`.
        """
        agent, begun = self._agent, self._round
        ranks = begun.ranks(self._link.key)
        self._link.begin(begun)
        workers = f"worker{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
        all_workers = _counted(len(begun.workers), "worker")
        nodes = _counted(len(begun.nodes), "node")
        output.say(f"round {begun.number}: {all_workers} on {nodes}; this node has {workers}.")
        configs = [worker_environment.tf_config(begun.workers, rank) for rank in ranks]
        job = Job(agent.limits, True, agent.signals, agent.prepare, self._watch)
        try:
            agent.start(configs, begun.number)(job)
            result = job.supervise()
        finally:
            job.close()
        return self._report(result) if self._successor is None else self._successor

    def _report(self, result: LaunchResult) -> int | None:
        code, failed = result.exit_code, result.failed
        if self._asked and code == _USR1_EXIT_CODE:  # the training had just ended
            code, failed = stopping.EXIT_CODE, False
        if result.interrupted and code in _STOP_EXIT_CODES and self._is_saved():
            code = stopping.EXIT_CODE
        if not code and any(worker.killed for worker in result.workers):
            code = 128 + signal.SIGKILL
        victim = failed and root_cause.blames_another(result.cause)
        report = {"code": code, "failed": failed, "cause": result.cause, "victim": victim}
        if result.interrupted and not self._told_leave:
            self._told_leave = True
            self._link.say(kind="leaves")
        self._link.say(kind="ended", round=self._round.number, **report)
        if self._told_leave:
            return code
        if self._job_code is not None:
            return self._job_code
        if not code and not self._stopped:
            return self._finished()
        self._link.ready()
        return None

    def _is_saved(self) -> bool:
        """Return whether a worker of another node has made the requested checkpoint.

        In that case the signal has only ended workers here that were about to exit anyway.
        """
        limit = time.monotonic() + _REPORT_SECONDS
        while not self._saved and time.monotonic() < limit:
            words = self._agent.next(0.1)
            self._saved = words.get("stop") == self._round.number and bool(words.get("saves"))
        return self._saved

    def _finished(self) -> int | None:
        """Wait until the workers of all nodes have finished, or another round begins."""
        while True:
            words = self._agent.next(0.1)
            if (code := self._agent.ends(words)) is not None:
                return code
            if words.get("stop") == self._round.number:
                self._link.ready()
                return None
            if self._agent.signals:
                self._link.say(kind="leaves")
                return 0
            if self._agent.timed_out():
                return 0
            missing = self._link.missing
            if missing is not None and time.monotonic() - missing[0] >= _FINISHED_SECONDS:
                output.say(f"the rendezvous does not answer ({missing[1]}); all workers finished.")
                return 0

    # ------------------------------------------------------------------------------- meanwhile

    def _watch(self, job: Job) -> None:
        """Pass messages between the rendezvous and the workers; called many times a second."""
        number = self._round.number
        if self._agent.signals and not self._told_leave:
            self._told_leave = True
            self._link.say(kind="leaves")
        if job.failing and not self._told_failure:
            self._told_failure = True
            self._link.say(kind="failing", round=number)
        while words := self._agent.next(0):
            if words.get("stop") == number:
                limits = self._agent.limits
                self._stopped = True
                self._saved = bool(words.get("saves"))
                seconds = limits.stop_grace if self._saved else limits.grace
                job.end(seconds, str(words.get("why", "")))
            elif words.get("regroup") == number and words.get("asks"):
                self._asks, self._asks_since = True, time.monotonic()
            elif "round" in words:
                self._successor = Round.of(words["round"])
                job.end(0, "another round has begun")
            elif "refused" in words:
                output.say(f"the rendezvous refuses this node: {words['refused']}.")
            elif "end" in words:
                self._job_code = self._agent.ends(words)
                job.end(self._agent.limits.grace, "the job is over")
        self._ask(job)
        self._show_missing()

    def _ask(self, job: Job) -> None:
        """Request a checkpoint from a worker that can make one, repeatedly until the round ends.

        A request is lost if the script's own handler, such as `faulthandler`, receives it before
        `fit` begins.
        """
        now = time.monotonic()
        if not self._asks or self._stopped or now < self._look_at:
            return
        self._look_at = now + _ASK_SECONDS
        for process in job.processes:
            if stops_on_request(process):
                self._look_at = now + _REPEAT_SECONDS
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGUSR1)
                if not self._asked:
                    output.say("a node can join: a worker is asked for a checkpoint (SIGUSR1).")
                self._asked = True
                return
        if not (self._asked or self._told_obstacle) and now - self._asks_since >= _OBSTACLE_SECONDS:
            self._told_obstacle = True
            why = "no worker handles SIGUSR1 now, as `fit` with rs.callbacks.Checkpoint does"
            output.say(f"a node waits to join, and {why}.")
            self._link.say(kind="obstacle", why=why)

    def _show_missing(self) -> None:
        missing = self._link.missing
        if missing is None or time.monotonic() - missing[0] < 3.0:
            self._told_missing = self._told_missing and missing is not None
        elif not self._told_missing:
            self._told_missing = True
            output.say(
                f"the rendezvous {self._nodes.rendezvous} does not answer ({missing[1]}); the "
                "workers go on."
            )


def stops_on_request(process: int) -> bool:
    """Return whether a process has a handler for SIGUSR1, whose default action ends it."""
    try:
        lines = Path(f"/proc/{process}/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return False
    caught = next((line.split()[1] for line in lines if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (signal.SIGUSR1 - 1) & 1)


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
