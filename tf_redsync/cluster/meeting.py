"""What chief and members do alike to meet (`rendezvous.py`)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import Coroutine, Iterator, Sequence
from typing import Any

from tf_redsync import environment
from tf_redsync.cluster import handshake
from tf_redsync.cluster import tasks as clusters
from tf_redsync.cluster.handshake import Identity, Line, NoAnswer
from tf_redsync.cluster.tasks import Cluster, StartError, taken

OLDER = (
    "an earlier run that has not ended, a worker of an older tf_redsync, or one with "
    f"{environment.HANDSHAKE}=0, which must then be set for all workers"
)
SAME = "Start all workers with the same tasks in TF_CONFIG."
_MAX_NAMES = 8
_logger = logging.getLogger("tf_redsync")


class Meeting:
    """Listens, answers, calls itself, and says for whom it waits."""

    def __init__(self, cluster: Cluster, timeout: float):
        self.cluster = cluster
        self.timeout = timeout
        self.kept: dict[str, socket.socket] = {}  # by workers' names, connections for `witness.py`
        self.me = Identity(cluster.rank, cluster.tasks)
        self._secret = os.environ.get(environment.JOB, "")
        self._strangers: set[str] = set()  # their addresses, as far as they were reported
        self._started = time.monotonic()
        self._main: tuple[asyncio.AbstractEventLoop, asyncio.Task] | None = None

    async def run(self) -> None:
        """Return when all have met."""
        task = asyncio.current_task()
        assert task is not None
        self._main = asyncio.get_running_loop(), task
        beside: list[asyncio.Task] = []
        try:
            with clusters.listener(self.cluster) as port:
                server = await asyncio.start_server(self._answer, sock=port, limit=handshake.LIMIT)
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
        """Play this process's part."""
        raise NotImplementedError

    def end(self, text: str) -> None:
        """Tell the others that it is over."""
        raise NotImplementedError

    def waits(self) -> list[tuple[str, str]]:
        """For whom this process waits, and why that one is not there."""
        raise NotImplementedError

    async def ask(self, address: str) -> Identity:
        """Return the worker of this job at "host:port"; raise `NoAnswer` if there is none."""
        return await handshake.ask(address, self.me, self._secret)

    async def call(self, address: str, **words: Any) -> Line:
        """Tell who this is, and further words, to "host:port"; raise `NoAnswer` as `ask`."""
        return await handshake.call(address, self._secret, **vars(self.me), **words)

    async def greet(self, words: dict[str, Any], line: Line) -> None:
        """Answer a call that is more than a question who is here."""

    async def _in_time(self, meeting: Coroutine[Any, Any, None]) -> None:
        seconds = None if self.timeout == float("inf") else self.timeout
        task = asyncio.ensure_future(meeting)
        try:
            await asyncio.wait((task,), timeout=seconds)
            if not task.done():
                raise StartError(
                    f"the workers did not all come within {self.timeout:g} s; missing:\n"
                    + "\n".join(f"{who}: {why}" for who, why in self.waits())
                    + "\nStart them, or give the strategy a larger `start_timeout`. Received: "
                    f"start_timeout={self.timeout:g}"
                )
            task.result()
        except StartError as error:
            self.end(str(error))
            raise
        finally:
            await _ended(task)

    async def _first(self, both: Sequence[Coroutine[Any, Any, None]]) -> None:
        """Return with the first of two, the meeting, or raise what either raises."""
        main, beside = (asyncio.ensure_future(one) for one in both)
        try:
            await asyncio.wait((main, beside), return_when=asyncio.FIRST_COMPLETED)
            if beside.done():
                beside.result()
            await main
        finally:
            await _ended(main, beside)

    async def _call_myself(self) -> None:
        address = self.cluster.addresses[self.cluster.rank]
        try:
            other = await self.ask(address)
        except NoAnswer as error:
            if error.serves:
                raise taken(self.cluster, f"TensorFlow's server answers at {address}") from None
            _logger.warning(
                "this process does not reach itself at %s, its address in TF_CONFIG (%s): is that "
                "another machine's?",
                address,
                error,
            )
        else:
            if other.nonce != self.me.nonce:
                raise taken(self.cluster, f"another process answers at {address}")

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = Line(reader, writer)
        try:
            await line.open(self._secret, calls=False)
            words = await line.hear()
            line.tell(**vars(self.me))
            await self.greet(words, line)
            await line.flush()
        except NoAnswer as error:
            if error.calls:
                self.heard_of_tensorflow()
            if error.unsigned:
                line.tell()  # signed, so that a worker with another secret hears of it
                self._report(writer.get_extra_info("peername")[0].removeprefix("::ffff:"))
        except asyncio.CancelledError:  # the meeting is over
            pass
        finally:
            line.close()

    def _report(self, host: str) -> None:
        """Say that a stranger has called, once for each of a few addresses."""
        if host not in self._strangers and len(self._strangers) < _MAX_NAMES:
            self._strangers.add(host)
            _logger.warning(
                "a process at %s has called this worker with another %s, or is a stranger; it was "
                "told nothing",
                host,
                environment.JOB,
            )

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
        return ""


async def why_not(meeting: Meeting, rank: int) -> str:
    """Return why a worker is not reached, or nothing if it is."""
    try:
        other = await meeting.ask(meeting.cluster.addresses[rank])
    except NoAnswer as error:
        return f"{error}: {OLDER}" if error.serves else str(error)
    if other.rank != rank:
        return f"worker {other.rank} answers there: is `task` or `cluster` in TF_CONFIG wrong?"
    return meeting.differs(other)


async def _ended(*tasks: asyncio.Future[None]) -> None:
    """Cancel tasks until they have ended.

    Once is not enough: before Python 3.12 `asyncio.wait_for` swallows a cancellation that comes
    when what it waits for has just been done.
    """
    while left := [task for task in tasks if not task.done()]:
        for task in left:
            task.cancel()
        await asyncio.wait(left, timeout=0.1)


def pauses() -> Iterator[float]:
    """Seconds between attempts: short at first, since local workers start within a second."""
    seconds = 0.05
    while True:
        yield seconds
        seconds = min(1.2 * seconds, 1.0)


def _moments() -> Iterator[int]:
    """Seconds from the start at which a missing worker is named."""
    yield from (3, 10, 20)
    seconds = 30
    while True:
        yield seconds
        seconds += 30


def _few(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_MAX_NAMES])
    return shown if len(names) <= _MAX_NAMES else f"{shown}, ..."
