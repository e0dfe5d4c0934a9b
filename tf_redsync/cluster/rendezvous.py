"""Rendezvous of the workers before TensorFlow starts its servers.

TensorFlow waits for workers silently, and a second process with the same task index ends the first
one's job. So each worker first listens on its own port of TF_CONFIG and identifies itself to every
caller (`handshake.py`). TensorFlow's server takes over the port afterwards.

1. Each worker calls its own address. If another process answers, this process is a duplicate.
2. Each worker joins the chief, which calls back at the worker's address, for the same reason.
3. When all have joined, each worker calls all others: collectives need every pair.
4. When every worker reaches every other one, the chief announces it. All close their ports and
   start TensorFlow, which `startup_monitor.py` monitors.

Until then every worker logs the missing workers with reasons. A worker that finds TensorFlow's
server at the chief's address waits, too: an earlier run of the job may be about to end.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import socket
import threading
import time
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from typing_extensions import override

from tf_redsync import environment
from tf_redsync.cluster import handshake, ports, startup_monitor
from tf_redsync.cluster.handshake import Connection, Identity, NoAnswer
from tf_redsync.cluster.tf_config import Cluster
from tf_redsync.errors import DistributedError, first_lines

DEFAULT_TIMEOUT_SECONDS = 600.0
_logger = logging.getLogger("tf_redsync")


_held: dict[tuple[int, str], socket.socket] = {}  # reservations by process and port


class StartError(DistributedError):
    """A worker is missing, unreachable, started twice, or belongs to another job."""


@contextmanager
def startup(cluster: Cluster | None, start_timeout: float | None = None) -> Iterator[float]:
    """Context in which TensorFlow starts, entered when all workers reach each other.

    It logs the missing workers meanwhile, and ends the process if another worker is lost while
    TensorFlow starts.

    Args:
        cluster: The same tasks on all workers. With `None`, or without the handshake, there is no
            rendezvous.
        start_timeout: Seconds to wait, may be infinite. Default: the environment variable's, else
            600.

    Yields:
        `start_timeout`.

    Raises:
        StartError: after `start_timeout`, with the missing workers; or if this process is a
            duplicate or belongs to another job.
        ValueError: if `start_timeout` is not positive.
    """
    seconds = environment.seconds("start_timeout", start_timeout, environment.START_TIMEOUT)
    seconds = seconds or DEFAULT_TIMEOUT_SECONDS
    with startup_monitor.watching(_connect(cluster, seconds), seconds):
        yield seconds


def _connect(cluster: Cluster | None, seconds: float) -> dict[str, socket.socket]:
    """Wait for all workers; return open connections, by worker, for `startup_monitor`."""
    if cluster is None or not environment.switched_on(environment.HANDSHAKE):
        return {}
    reserve_port(cluster)
    if cluster.rank == 0 and not os.environ.get(environment.JOB):
        _logger.warning(
            "%s is not set: any process that reaches a worker's port can join this job while it "
            "starts. Set it to the same random text for all workers (docs/security.md)",
            environment.JOB,
        )
    rendezvous = (Chief if cluster.rank == 0 else Member)(cluster, seconds)
    _run(rendezvous)
    return rendezvous.connections


def _run(rendezvous: Rendezvous) -> None:
    """Run the rendezvous in a thread: the main thread may have an event loop of its own."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            asyncio.run(rendezvous.run())
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run, name="tf_redsync_rendezvous", daemon=True)
    thread.start()
    try:
        thread.join()
    except BaseException:  # Ctrl-C
        rendezvous.cancel()
        thread.join()
        raise
    if failures:
        is_complete = isinstance(failures[0], StartError)  # complete without asyncio's stack frames
        raise failures[0].with_traceback(None) if is_complete else failures[0]


_EARLIER_RUN = (
    "an earlier run that has not ended, a worker of an older tf_redsync, or one with "
    f"{environment.HANDSHAKE}=0, which must then be set for all workers"
)
_SAME_TASKS = "Start all workers with the same tasks in TF_CONFIG."
_MAX_NAMES = 8


def reserve_port(cluster: Cluster) -> None:
    """Reserve this worker's port on this machine until the process ends."""
    port = cluster.addresses[cluster.rank].rpartition(":")[2]
    if (os.getpid(), port) in _held:
        return
    try:
        _held[os.getpid(), port] = ports.reserve(int(port))
    except OSError:
        raise already_running(cluster, "another process of this machine uses its port") from None


def listen(cluster: Cluster) -> socket.socket:
    """Return a socket that listens on the port of TensorFlow's server."""
    address = cluster.addresses[cluster.rank]
    port = int(address.rpartition(":")[2])
    try:
        if socket.has_dualstack_ipv6():
            with contextlib.suppress(OSError):  # IPv6 is off, or the port is in use
                return socket.create_server(
                    ("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024
                )
        return socket.create_server(("", port), backlog=1024)
    except PermissionError as error:
        raise StartError(
            f"{cluster.name(cluster.rank)} may not listen on port {port} ({error.strerror}). Use a "
            f"port from 1024 on. Received: address={address}"
        ) from None
    except OSError as error:
        raise already_running(cluster, f"its port {port} is in use ({error.strerror})") from None


def already_running(cluster: Cluster, evidence: str) -> StartError:
    """Return the error of a process whose task already runs elsewhere."""
    return StartError(
        f"{cluster.name(cluster.rank)} is running already: {evidence}. Two processes were started "
        "with the same task, or an earlier run has not ended; this process ends, the other one "
        f"goes on. Received: task={cluster.tasks[cluster.rank]} in TF_CONFIG"
    )


class Rendezvous:
    """One worker's rendezvous: listens, answers, checks its own address, logs missing workers."""

    def __init__(self, cluster: Cluster, timeout: float):
        self.cluster = cluster
        self.timeout = timeout
        self.connections: dict[str, socket.socket] = {}  # by worker, for the startup monitor
        self.me = Identity(cluster.rank, cluster.tasks)
        self._secret = os.environ.get(environment.JOB, "")
        self._unauthenticated = handshake.UnauthenticatedConnections(
            max(handshake.MAX_UNAUTHENTICATED, 2 * len(cluster.addresses))
        )
        self._started = time.monotonic()
        self._main: tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]] | None = None

    async def run(self) -> None:
        """Return when all workers reach each other."""
        task = asyncio.current_task()
        assert task is not None
        self._main = asyncio.get_running_loop(), task
        beside: list[asyncio.Task[Any]] = []
        try:
            with listen(self.cluster) as port:
                server = await handshake.start_server(self._answer, port)
                beside = [asyncio.create_task(self._log_missing())]
                await self._within_timeout(
                    self._first_of([self.connect(), self._call_own_address()])
                )
                server.close()
        finally:
            for side_task in beside:
                side_task.cancel()

    def cancel(self) -> None:
        """Cancel `run` from another thread."""
        if self._main is not None:
            loop, task = self._main
            with contextlib.suppress(RuntimeError):  # `run` has ended
                loop.call_soon_threadsafe(task.cancel)

    async def connect(self) -> None:
        """Run this role, chief or member, until all workers reach each other."""
        raise NotImplementedError

    def end(self, text: str) -> None:
        """Send the reason of a failed rendezvous to the other workers."""
        raise NotImplementedError

    def waits(self) -> list[tuple[str, str]]:
        """Return the missing workers, each with the reason."""
        raise NotImplementedError

    async def ask(self, address: str) -> Identity:
        """Return the identity of the worker at "host:port"; raise `NoAnswer` without one."""
        return await handshake.ask(address, self.me, self._secret)

    async def call(self, address: str, **words: Any) -> Connection:
        """Connect to "host:port", send this identity and `words`; raise `NoAnswer` as `ask`."""
        return await handshake.call(address, self._secret, **vars(self.me), **words)

    async def greet(self, words: dict[str, Any], line: Connection) -> None:
        """Answer a caller that has sent more than its identity."""

    async def _within_timeout(self, rendezvous: Coroutine[Any, Any, None]) -> None:
        seconds = None if self.timeout == float("inf") else self.timeout
        task = asyncio.ensure_future(rendezvous)
        try:
            await asyncio.wait((task,), timeout=seconds)
            if not task.done():
                missing = [f"{who}: {why}" for who, why in self.waits()]
                raise StartError(
                    f"some workers did not start within {self.timeout:g} s; missing:\n"
                    + "\n".join(first_lines(missing, of=" workers"))
                    + "\nStart them, or give the strategy a larger `start_timeout`. Received: "
                    f"start_timeout={self.timeout:g}"
                )
            task.result()
        except StartError as error:
            self.end(str(error))
            raise
        finally:
            await _cancelled(task)

    async def _first_of(self, both: Sequence[Coroutine[Any, Any, None]]) -> None:
        """Return when the first of two coroutines returns; raise the error of either."""
        main, beside = (asyncio.ensure_future(one) for one in both)
        try:
            await asyncio.wait((main, beside), return_when=asyncio.FIRST_COMPLETED)
            if beside.done():
                beside.result()
            await main
        finally:
            await _cancelled(main, beside)

    async def _call_own_address(self) -> None:
        address = self.cluster.addresses[self.cluster.rank]
        try:
            other = await self.ask(address)
        except NoAnswer as error:
            if error.serves:
                raise already_running(
                    self.cluster, f"TensorFlow's server answers at {address}"
                ) from None
            _logger.warning(
                "this process does not reach itself at %s, its address in TF_CONFIG (%s): is that "
                "another machine's?",
                address,
                error,
            )
        else:
            if other.nonce != self.me.nonce:
                raise already_running(self.cluster, f"another process answers at {address}")

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = Connection(reader, writer)
        self._unauthenticated.add(line)
        try:
            await line.open(self._secret, calls=False)
            words = await line.receive()
            self._unauthenticated.remove(line)
            line.send(**vars(self.me))
            await self.greet(words, line)
            await line.flush()
        except NoAnswer as error:
            if error.calls:
                self.note_started_tensorflow()
            if error.unsigned:
                line.send()  # signed, so that a worker with another secret detects it
                self._unauthenticated.report(writer.get_extra_info("peername")[0])
        except asyncio.CancelledError:  # the rendezvous is over
            pass
        finally:
            self._unauthenticated.remove(line)
            line.close()

    def note_started_tensorflow(self) -> None:
        """Handle the news that a worker has started TensorFlow without a rendezvous."""

    async def _log_missing(self) -> None:
        for seconds in _report_times():
            await asyncio.sleep(max(0.0, self._started + seconds - time.monotonic()))
            waits = self.waits()
            for who, why in waits[:_MAX_NAMES]:
                _logger.warning("waiting for %s (%d s): %s", who, seconds, why)
            if len(waits) > _MAX_NAMES:
                _logger.warning("and for %d more workers", len(waits) - _MAX_NAMES)

    def differs(self, other: Identity) -> str:
        """Return the reason why another process belongs to another job; empty if it does not."""
        if other.tasks != self.me.tasks:
            return (
                f"its cluster has {len(other.tasks)} workers ({_shortened(other.tasks)}), and this "
                f"process's has {len(self.me.tasks)} ({_shortened(self.me.tasks)})"
            )
        return ""


async def _unreachable_reason(rendezvous: Rendezvous, rank: int) -> str:
    """Return the reason why a worker is unreachable; empty if it is reachable."""
    try:
        other = await rendezvous.ask(rendezvous.cluster.addresses[rank])
    except NoAnswer as error:
        return f"{error}: {_EARLIER_RUN}" if error.serves else str(error)
    if other.rank != rank:
        return f"worker {other.rank} answers there: is `task` or `cluster` in TF_CONFIG wrong?"
    return rendezvous.differs(other)


async def _cancelled(*tasks: asyncio.Future[None]) -> None:
    """Cancel tasks until they have ended.

    One cancellation is not enough: before Python 3.12 `asyncio.wait_for` swallows a cancellation
    that arrives just when its awaitable has finished.
    """
    while left := [task for task in tasks if not task.done()]:
        for task in left:
            task.cancel()
        await asyncio.wait(left, timeout=0.1)


def _retry_delays() -> Iterator[float]:
    """Yield seconds between attempts: short at first, since local workers start within a second."""
    seconds = 0.05
    while True:
        yield seconds
        seconds = min(1.2 * seconds, 1.0)


def _report_times() -> Iterator[int]:
    """Yield the seconds since the start at which missing workers are logged."""
    yield from (3, 10, 20)
    seconds = 30
    while True:
        yield seconds
        seconds += 30


def _shortened(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_MAX_NAMES])
    return shown if len(names) <= _MAX_NAMES else f"{shown}, ..."


_STATUS_SECONDS = 1.0
_CALLED = "it has called, but at its address"


@dataclasses.dataclass
class _JoinedWorker:
    """A worker that has joined the chief.

    Attributes:
        line: The connection to it.
        unreached: The workers that it cannot reach, with reasons; `None` before it has tried.
    """

    line: Connection
    unreached: list[Any] | None = None


class Chief(Rendezvous):
    """Worker 0: accepts each other worker once, and announces when all reach each other."""

    def __init__(self, cluster: Cluster, timeout: float):
        super().__init__(cluster, timeout)
        others = range(1, len(cluster.addresses))
        self._reasons = dict.fromkeys(others, "it has not called yet")
        self._joined: dict[int, _JoinedWorker] = {}
        self._changed = asyncio.Event()
        self._cancelled = ""

    @override
    async def connect(self) -> None:
        searches = [asyncio.create_task(self._search(rank)) for rank in self._reasons]
        try:
            while True:
                if self._cancelled:
                    raise StartError(self._cancelled)
                joined = len(self._joined) == len(self._reasons)
                if joined and all(worker.unreached == [] for worker in self._joined.values()):
                    return await self._send_go()
                waits = self.waits()
                for worker in self._joined.values():
                    worker.line.send(waits=waits, joined=joined)
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), _STATUS_SECONDS)
                self._changed.clear()
        finally:
            for search in searches:
                search.cancel()

    async def _send_go(self) -> None:
        for worker in self._joined.values():
            worker.line.send(go=True)
        await asyncio.gather(*(worker.line.flush() for worker in self._joined.values()))
        self.connections = {
            self.cluster.name(r): worker.line.duplicate_socket()
            for r, worker in self._joined.items()
        }

    @override
    def end(self, text: str) -> None:
        for worker in self._joined.values():
            worker.line.send(end=text)

    @override
    def note_started_tensorflow(self) -> None:
        for rank in set(self._reasons) - set(self._joined):
            if not self._reasons[rank].startswith("TensorFlow"):
                self._reasons[rank] += f"; TensorFlow calls from somewhere: {_EARLIER_RUN}"

    @override
    def waits(self) -> list[tuple[str, str]]:
        missing = [r for r in self._reasons if r not in self._joined]
        if missing:
            return [(self.cluster.name(rank), self._reasons[rank]) for rank in missing]
        waits = []  # one for each worker: the rows of all pairs would exceed `handshake.LIMIT`
        for rank, worker in sorted(self._joined.items()):
            if worker.unreached != []:
                (who, why), *more = worker.unreached or [("all others", "it has not answered yet")]
                others = f" and {len(more)} more workers" if more else ""
                waits.append((f"worker {rank}, which cannot reach {who}{others}", why))
        return waits

    async def _search(self, rank: int) -> None:
        """Call a worker until it joins, to learn why it is missing and to announce the chief."""
        seconds = _retry_delays()
        while True:
            if rank not in self._joined:
                reason = await _unreachable_reason(self, rank)
                # The reason that follows a call of the worker is more informative.
                if not (reason and self._reasons[rank].startswith(_CALLED)):
                    self._reasons[rank] = reason or (
                        "it answers and has not joined; does its TF_CONFIG name worker 0 at "
                        f"{self.cluster.addresses[0]}?"
                    )
            await asyncio.sleep(next(seconds))

    @override
    async def greet(self, words: dict[str, Any], line: Connection) -> None:
        if not words.get("join"):
            return
        other = Identity.of(words)
        refused = self._refused(other)
        if not refused:
            try:
                identity = await self.ask(self.cluster.addresses[other.rank])
            except NoAnswer as error:
                if not error.serves:
                    self._reasons[other.rank] = (
                        f"{_CALLED} {error}; does its TF_CONFIG name the same address?"
                    )
                    line.send(unreached=str(error), at=self.cluster.addresses[other.rank])
                    return
                refused = self._duplicate(other, "TensorFlow's server answers")
            else:
                if identity.nonce != other.nonce:
                    refused = self._duplicate(other, "another process answers")
        if refused:
            line.send(refused=refused)
            return
        await self._accept(other, line)

    async def _accept(self, other: Identity, line: Connection) -> None:
        if other.rank in self._joined:  # its earlier process has ended
            self._joined[other.rank].line.close()
        worker = self._joined[other.rank] = _JoinedWorker(line)
        line.send(joined=False)
        self._changed.set()
        try:
            while True:
                words = await line.receive(None)
                if "end" in words:
                    self._cancelled = str(words["end"])
                if "unreached" in words:
                    worker.unreached = words["unreached"]
                self._changed.set()
        except NoAnswer as error:
            if self._joined.get(other.rank) is worker:
                del self._joined[other.rank]
                self._reasons[other.rank] = f"it had joined, and {error}"
                self._changed.set()

    def _refused(self, other: Identity) -> str:
        differs = self.differs(other)
        if differs:
            return (
                f"worker 0 at {self.cluster.addresses[0]} refuses this process: {differs} (seen "
                f"from worker 0). {_SAME_TASKS}"
            )
        if not 0 < other.rank < len(self.cluster.addresses):
            return f"worker 0 is the chief, not this process. Received: rank={other.rank}"
        return ""

    def _duplicate(self, other: Identity, evidence: str) -> str:
        cluster = dataclasses.replace(self.cluster, rank=other.rank)
        address = self.cluster.addresses[other.rank]
        return str(
            already_running(cluster, f"worker 0 finds that {evidence} at {address}, not this one")
        )


_LOST_SECONDS = 10.0  # limit without a status from the chief


class Member(Rendezvous):
    """Any other worker: joins the chief, and calls all others once all have joined."""

    def __init__(self, cluster: Cluster, timeout: float):
        super().__init__(cluster, timeout)
        self._called = asyncio.Event()  # set when the chief calls
        self._line: Connection | None = None
        self._waits = [(cluster.name(0), "it has not answered yet")]

    @override
    def waits(self) -> list[tuple[str, str]]:
        return self._waits

    @override
    async def connect(self) -> None:
        seconds = _retry_delays()
        while True:
            try:
                self._line = await self._join()
                await self._await_go(self._line)
                return
            except NoAnswer as error:
                why = f"{error}: {_EARLIER_RUN}" if error.serves else str(error)
                self._waits = [(self.cluster.name(0), why)]
            finally:
                self._hang_up()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._called.wait(), next(seconds))
            self._called.clear()

    @override
    def end(self, text: str) -> None:
        if self._line is not None:
            self._line.send(end=text)

    def _hang_up(self) -> None:
        if self._line is not None:
            self._line.close()
            self._line = None

    @override
    async def greet(self, words: dict[str, Any], line: Connection) -> None:
        if words.get("rank") == 0:
            self._called.set()

    async def _join(self) -> Connection:
        line = await self.call(self.cluster.addresses[0], join=True)
        try:
            chief = Identity.of(await line.receive())
            differs = self.differs(chief) or (
                "" if chief.rank == 0 else f"it is worker {chief.rank}"
            )
            if differs:
                raise StartError(
                    f"The process at {self.cluster.addresses[0]} is not worker 0: {differs}. "
                    f"{_SAME_TASKS}"
                )
            words = await line.receive(2 * handshake.ANSWER_SECONDS)
            if "refused" in words:
                raise StartError(str(words["refused"]))
            if "unreached" in words:
                own_address = self.cluster.addresses[self.me.rank]
                at = words.get("at", own_address)
                note = "" if at == own_address else f" (in this TF_CONFIG: {own_address})"
                raise NoAnswer(f"it does not reach this worker at {at}{note}: {words['unreached']}")
        except BaseException:
            line.close()
            raise
        return line

    async def _await_go(self, line: Connection) -> None:
        """Follow the chief's messages until it announces that all workers reach each other."""
        reaching: asyncio.Task[Any] | None = None
        try:
            while True:
                words = await line.receive(_LOST_SECONDS)
                if "end" in words:
                    raise StartError(str(words["end"]))
                if "go" in words:
                    self.connections = {self.cluster.name(0): line.duplicate_socket()}
                    return
                self._waits = [(str(who), str(why)) for who, why in words.get("waits", ())]
                if words.get("joined") and reaching is None:
                    reaching = asyncio.create_task(self._reach_all(line))
        finally:
            if reaching is not None:
                reaching.cancel()

    async def _reach_all(self, line: Connection) -> None:
        left = set(range(1, len(self.cluster.addresses))) - {self.me.rank}
        seconds = _retry_delays()
        while True:
            whys = await asyncio.gather(*(_unreachable_reason(self, rank) for rank in sorted(left)))
            unreached = {r: why for r, why in zip(sorted(left), whys, strict=True) if why}
            line.send(unreached=[[self.cluster.name(r), why] for r, why in unreached.items()])
            left = set(unreached)
            if not left:
                return
            await asyncio.sleep(next(seconds))
