"""Workers meet before TensorFlow's servers start: who is there, who is missing, who is too many.

TensorFlow waits for workers without a word, and a second process with an index that is taken ends
the job of the first one. So each worker first listens itself on its port of TF_CONFIG, the one that
TensorFlow's server gets afterwards, and tells whoever calls who it is.

1. Each calls its own address. If another process answers, this one is one too many.
2. Each joins the chief, which calls it back at its address of TF_CONFIG, for the same reason.
3. When all have joined, each calls all others: collectives need every pair.
4. When all have reached all, the chief says so, and all close their ports and start TensorFlow.

Until then everyone says whom it waits for and why. A worker that finds TensorFlow's server at the
chief's address waits too: an earlier run of the job may have to end.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Coroutine, Sequence
from typing import Any

from typing_extensions import override

from tf_redsync import environment
from tf_redsync.exchange import greetings
from tf_redsync.exchange.greetings import Identity, Line, NoAnswer

DEFAULT_TIMEOUT_SECONDS = 600.0
_STATUS_SECONDS = 1.0
_LOST_SECONDS = 10.0  # without a status from the chief
_MAX_NAMES = 8
_OLDER = (
    "an earlier run that has not ended, a worker of an older tf_redsync, or one with "
    f"{environment.HANDSHAKE}=0, which must then be set for all workers"
)
_logger = logging.getLogger("tf_redsync")
_held: dict[tuple[int, str], socket.socket] = {}  # by process and port, see `_hold`


class StartError(RuntimeError):
    """The workers did not find each other, or one is there twice."""


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The workers that train together, and which of them this process is.

    Attributes:
        addresses: "host:port", by rank.
        tasks: Their names in TF_CONFIG, as "worker:0", by rank.
        rank: This process's.
    """

    addresses: tuple[str, ...]
    tasks: tuple[str, ...]
    rank: int

    @classmethod
    def of(cls, resolver: Any) -> Cluster | None:
        """Return that of a `ClusterResolver`; `None` where this process trains alone."""
        spec = resolver.cluster_spec()
        trains = [job for job in ("chief", "worker") if job in spec.jobs]
        if resolver.task_type not in trains:  # an evaluator
            return None
        tasks = [(job, index) for job in trains for index in spec.task_indices(job)]
        if len(tasks) == 1:
            return None
        return cls(
            tuple(spec.task_address(*task) for task in tasks),
            tuple(f"{job}:{index}" for job, index in tasks),
            tasks.index((resolver.task_type, int(resolver.task_id))),
        )

    def name(self, rank: int) -> str:
        """Return what people call a worker."""
        return f"worker {rank} at {self.addresses[rank]}"


def meet(cluster: Cluster, timeout: float) -> None:
    """Return when all workers are there and reach each other; say meanwhile who is missing.

    Args:
        cluster: The same tasks on all workers.
        timeout: Seconds until it ends with an error; may be infinite.

    Raises:
        StartError: when the time is over, naming who is missing; or if this process is one too
            many, or of another job.
        ValueError: for a port in use.
    """
    if not environment.switched_on(environment.HANDSHAKE):
        return
    _hold(cluster)
    meeting = (_Chief if cluster.rank == 0 else _Member)(cluster, timeout)
    failures: list[BaseException] = []

    def run() -> None:
        try:
            asyncio.run(meeting.run())
        except BaseException as error:
            failures.append(error)

    # A thread, for the program may have an event loop of its own in this one.
    thread = threading.Thread(target=run, name="tf_redsync_rendezvous", daemon=True)
    thread.start()
    try:
        thread.join()
    except BaseException:  # Ctrl-C
        meeting.cancel()
        thread.join()
        raise
    if failures:
        raise failures[0]


def _hold(cluster: Cluster) -> None:
    """Keep other processes of this machine from this worker's place, for the process's life.

    The port itself is free for an instant, between our socket and TensorFlow's.
    """
    if not sys.platform.startswith("linux"):
        return
    port = cluster.addresses[cluster.rank].rpartition(":")[2]
    if (os.getpid(), port) in _held:
        return
    place = socket.socket(socket.AF_UNIX)
    try:
        place.bind(f"\0tf_redsync/port/{port}")  # as a port, in this network namespace
    except OSError:
        place.close()
        raise _taken(cluster, "another process of this machine has its port") from None
    _held[os.getpid(), port] = place


def _taken(cluster: Cluster, how: str) -> StartError:
    return StartError(
        f"{cluster.name(cluster.rank)} is running already: {how}. Two processes were started with "
        "the same task, or an earlier run has not ended; this process ends, the other one goes on. "
        f"Received: task={cluster.tasks[cluster.rank]} in TF_CONFIG"
    )


class _Meeting:
    """What chief and members do alike: listen, answer, call themselves, speak."""

    def __init__(self, cluster: Cluster, timeout: float):
        self.cluster = cluster
        self.timeout = timeout
        self.me = Identity(cluster.rank, cluster.tasks, os.environ.get(environment.JOB, ""))
        self._started = time.monotonic()
        self._main: tuple[asyncio.AbstractEventLoop, asyncio.Task] | None = None

    async def run(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._main = asyncio.get_running_loop(), task
        beside: list[asyncio.Task] = []
        try:
            with _listener(self.cluster) as listener:
                server = await asyncio.start_server(
                    self._answer, sock=listener, limit=greetings.LIMIT
                )
                beside = [asyncio.create_task(self._speak())]
                await self._in_time(self._first([self.meet(), self._call_myself()]))
                server.close()
        finally:
            for one in beside:
                one.cancel()

    def cancel(self) -> None:
        """End it, from another thread."""
        if self._main is not None:
            loop, task = self._main
            with contextlib.suppress(RuntimeError):  # it has ended
                loop.call_soon_threadsafe(task.cancel)

    async def meet(self) -> None:
        raise NotImplementedError

    def end(self, text: str) -> None:
        """Tell the others that it is over."""
        raise NotImplementedError

    def waits(self) -> list[tuple[str, str]]:
        """For whom this process waits, and why that one is not there."""
        raise NotImplementedError

    async def greet(self, words: dict[str, Any], line: Line) -> None:
        """Answer a call that is more than a question who is here."""

    async def _in_time(self, meeting: Coroutine[Any, Any, None]) -> None:
        seconds = None if self.timeout == float("inf") else self.timeout
        try:
            await asyncio.wait_for(meeting, seconds)
        except asyncio.TimeoutError:
            text = (
                f"the workers did not all come within {self.timeout:g} s; missing:\n"
                + "\n".join(f"{who}: {why}" for who, why in self.waits())
                + "\nStart them, or give the strategy a larger `start_timeout`. Received: "
                f"start_timeout={self.timeout:g}"
            )
            self.end(text)
            raise StartError(text) from None
        except StartError as error:
            self.end(str(error))
            raise

    async def _first(self, both: Sequence[Coroutine[Any, Any, None]]) -> None:
        """Return with the first of two, the meeting, or raise what either raises."""
        main, beside = (asyncio.ensure_future(one) for one in both)
        try:
            await asyncio.wait((main, beside), return_when=asyncio.FIRST_COMPLETED)
            if beside.done():
                beside.result()
            await main
        finally:
            main.cancel()
            beside.cancel()

    async def _call_myself(self) -> None:
        address = self.cluster.addresses[self.cluster.rank]
        try:
            other = await greetings.ask(address, self.me)
        except NoAnswer as error:
            if error.serves:
                raise _taken(self.cluster, f"TensorFlow's server answers at {address}") from None
            _logger.warning(
                "this process does not reach itself at %s, its address in TF_CONFIG (%s): is that "
                "another machine's?",
                address,
                error,
            )
        else:
            if other.nonce != self.me.nonce:
                raise _taken(self.cluster, f"another process answers at {address}")

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = Line(reader, writer)
        try:
            words = await line.hear()
            line.tell(**vars(self.me))
            await self.greet(words, line)
            await line.flush()
        except NoAnswer as error:
            if error.calls:
                self.heard_of_tensorflow()
        except asyncio.CancelledError:  # the meeting is over
            pass
        finally:
            line.close()

    def heard_of_tensorflow(self) -> None:
        """Some worker has started TensorFlow without a meeting."""

    async def _speak(self) -> None:
        for seconds in _moments():
            await asyncio.sleep(max(0.0, self._started + seconds - time.monotonic()))
            waits = self.waits()
            for who, why in waits[:_MAX_NAMES]:
                _logger.warning("waiting for %s (%d s): %s", who, seconds, why)
            if len(waits) > _MAX_NAMES:
                _logger.warning("and for %d more workers", len(waits) - _MAX_NAMES)

    def differs(self, other: Identity) -> str:
        """Return in words why another process is not of this job, or nothing."""
        if other.tasks != self.me.tasks:
            return (
                f"it is of a cluster of {len(other.tasks)} workers ({_few(other.tasks)}), and this "
                f"process of one of {len(self.me.tasks)} ({_few(self.me.tasks)})"
            )
        if other.job != self.me.job:
            return (
                f"it is of another job: {environment.JOB}={other.job!r} there, {self.me.job!r} here"
            )
        return ""


class _Member(_Meeting):
    """A worker that is not the chief: joins it, and reaches the others when all have."""

    def __init__(self, cluster: Cluster, timeout: float):
        super().__init__(cluster, timeout)
        self._called = asyncio.Event()  # the chief has
        self._line: Line | None = None
        self._waits = [(cluster.name(0), "it has not answered yet")]

    @override
    def waits(self) -> list[tuple[str, str]]:
        return self._waits

    @override
    async def meet(self) -> None:
        pauses = _pauses()
        while True:
            try:
                self._line = await self._join()
                await self._stay(self._line)
                return
            except NoAnswer as error:
                why = f"{error}: {_OLDER}" if error.serves else str(error)
                self._waits = [(self.cluster.name(0), why)]
                if self._line is not None:
                    self._line.close()
                    self._line = None
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._called.wait(), next(pauses))
            self._called.clear()

    @override
    def end(self, text: str) -> None:
        if self._line is not None:
            self._line.tell(end=text)

    @override
    async def greet(self, words: dict[str, Any], line: Line) -> None:
        if words.get("rank") == 0:
            self._called.set()

    async def _join(self) -> Line:
        line = await greetings.call(self.cluster.addresses[0], join=True, **vars(self.me))
        try:
            chief = Identity.of(await line.hear())
            differs = self.differs(chief) or (
                "" if chief.rank == 0 else f"it is worker {chief.rank}"
            )
            if differs:
                raise StartError(
                    f"What answers at {self.cluster.addresses[0]} is not worker 0: {differs}. "
                    "Start all workers with the same `cluster` in TF_CONFIG."
                )
            words = await line.hear(2 * greetings.ANSWER_SECONDS)
            if "refused" in words:
                raise StartError(str(words["refused"]))
            if "unreached" in words:
                raise NoAnswer(
                    f"it does not reach this worker at {self.cluster.addresses[self.me.rank]}: "
                    f"{words['unreached']}"
                )
        except BaseException:
            line.close()
            raise
        return line

    async def _stay(self, line: Line) -> None:
        """Do as the chief says, until it says that all are there."""
        reaching: asyncio.Task | None = None
        try:
            while True:
                words = await line.hear(_LOST_SECONDS)
                if "end" in words:
                    self._line = None
                    raise StartError(str(words["end"]))
                if "go" in words:
                    return
                self._waits = [(str(who), str(why)) for who, why in words.get("waits", ())]
                if words.get("joined") and reaching is None:
                    reaching = asyncio.create_task(self._reach_all(line))
        finally:
            if reaching is not None:
                reaching.cancel()

    async def _reach_all(self, line: Line) -> None:
        left = set(range(1, len(self.cluster.addresses))) - {self.me.rank}
        pauses = _pauses()
        while True:
            whys = await asyncio.gather(*(_why_not(self, rank) for rank in sorted(left)))
            unreached = {r: why for r, why in zip(sorted(left), whys, strict=True) if why}
            line.tell(unreached=[[self.cluster.name(r), why] for r, why in unreached.items()])
            left = set(unreached)
            if not left:
                return
            await asyncio.sleep(next(pauses))


@dataclasses.dataclass
class _Joined:
    """A worker at the chief's: its line, and whom it has not reached; `None` before it tried."""

    line: Line
    unreached: list[Any] | None = None


class _Chief(_Meeting):
    """Worker 0: takes in all others, each once, and says when all have reached all."""

    def __init__(self, cluster: Cluster, timeout: float):
        super().__init__(cluster, timeout)
        others = range(1, len(cluster.addresses))
        self._whys = dict.fromkeys(others, "it has not called yet")
        self._joined: dict[int, _Joined] = {}
        self._changed = asyncio.Event()
        self._ended = ""

    @override
    async def meet(self) -> None:
        searches = [asyncio.create_task(self._search(rank)) for rank in self._whys]
        try:
            while True:
                if self._ended:
                    raise StartError(self._ended)
                joined = len(self._joined) == len(self._whys)
                if joined and all(one.unreached == [] for one in self._joined.values()):
                    return await self._go()
                for one in self._joined.values():
                    one.line.tell(waits=self.waits(), joined=joined)
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), _STATUS_SECONDS)
                self._changed.clear()
        finally:
            for search in searches:
                search.cancel()

    async def _go(self) -> None:
        for one in self._joined.values():
            one.line.tell(go=True)
        await asyncio.gather(*(one.line.flush() for one in self._joined.values()))

    @override
    def end(self, text: str) -> None:
        for one in self._joined.values():
            one.line.tell(end=text)

    @override
    def heard_of_tensorflow(self) -> None:
        for rank in set(self._whys) - set(self._joined):
            if not self._whys[rank].startswith("TensorFlow"):
                self._whys[rank] += f"; TensorFlow calls from somewhere: {_OLDER}"

    @override
    def waits(self) -> list[tuple[str, str]]:
        missing = [r for r in self._whys if r not in self._joined]
        if missing:
            return [(self.cluster.name(rank), self._whys[rank]) for rank in missing]
        return [
            (f"worker {rank}, which has to reach {who}", why)
            for rank, one in sorted(self._joined.items())
            for who, why in one.unreached or [("all others", "it has not answered yet")]
            if one.unreached != []
        ]

    async def _search(self, rank: int) -> None:
        """Call a worker until it has joined: to say why not, and that this process is there."""
        pauses = _pauses()
        while True:
            if rank not in self._joined:
                self._whys[rank] = await _why_not(self, rank) or "it has not joined yet"
            await asyncio.sleep(next(pauses))

    @override
    async def greet(self, words: dict[str, Any], line: Line) -> None:
        if not words.get("join"):
            return
        other = Identity.of(words)
        refused = self._refused(other)
        if not refused:
            try:
                there = await greetings.ask(self.cluster.addresses[other.rank], self.me)
            except NoAnswer as error:
                if not error.serves:
                    self._whys[other.rank] = f"it has called, but there {error}"
                    line.tell(unreached=str(error))
                    return
                refused = self._one_too_many(other, "TensorFlow's server answers")
            else:
                if there.nonce != other.nonce:
                    refused = self._one_too_many(other, "another process answers")
        if refused:
            line.tell(refused=refused)
            return
        await self._take_in(other, line)

    async def _take_in(self, other: Identity, line: Line) -> None:
        if other.rank in self._joined:  # the process that was there before is gone
            self._joined[other.rank].line.close()
        one = self._joined[other.rank] = _Joined(line)
        line.tell(joined=False)
        self._changed.set()
        try:
            while True:
                words = await line.hear(None)
                if "end" in words:
                    self._ended = str(words["end"])
                if "unreached" in words:
                    one.unreached = words["unreached"]
                self._changed.set()
        except NoAnswer as error:
            if self._joined.get(other.rank) is one:
                del self._joined[other.rank]
                self._whys[other.rank] = f"it had joined, and {error}"
                self._changed.set()

    def _refused(self, other: Identity) -> str:
        differs = self.differs(other)
        if differs:
            return (
                f"worker 0 at {self.cluster.addresses[0]} refuses this process: {differs} (seen "
                "from worker 0). Start all workers with the same `cluster` in TF_CONFIG."
            )
        if not 0 < other.rank < len(self.cluster.addresses):
            return f"worker 0 is the chief, and this process is not. Received: rank={other.rank}"
        return ""

    def _one_too_many(self, other: Identity, how: str) -> str:
        cluster = dataclasses.replace(self.cluster, rank=other.rank)
        address = self.cluster.addresses[other.rank]
        return str(_taken(cluster, f"worker 0 finds that {how} at {address}, not this one"))


async def _why_not(meeting: _Meeting, rank: int) -> str:
    """Return why a worker is not reached, or nothing if it is."""
    try:
        other = await greetings.ask(meeting.cluster.addresses[rank], meeting.me)
    except NoAnswer as error:
        return f"{error}: {_OLDER}" if error.serves else str(error)
    if other.rank != rank:
        return f"worker {other.rank} answers there: is `task` or `cluster` in TF_CONFIG wrong?"
    return meeting.differs(other)


def _listener(cluster: Cluster) -> socket.socket:
    """Listen where TensorFlow's server will."""
    address = cluster.addresses[cluster.rank]
    port = int(address.rpartition(":")[2])
    try:
        if socket.has_dualstack_ipv6():
            with contextlib.suppress(OSError):  # switched off, or in use as well
                return socket.create_server(
                    ("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024
                )
        return socket.create_server(("", port), backlog=1024)
    except OSError as error:
        raise _taken(cluster, f"its port {port} is in use ({error.strerror})") from None


def _pauses():
    """Seconds between attempts: short at first, since local workers start within a second."""
    seconds = 0.05
    while True:
        yield seconds
        seconds = min(1.2 * seconds, 1.0)


def _moments():
    """Seconds from the start at which a missing worker is named."""
    yield from (3, 10, 20)
    seconds = 30
    while True:
        yield seconds
        seconds += 30


def _few(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_MAX_NAMES])
    return shown if len(names) <= _MAX_NAMES else f"{shown}, ..."
