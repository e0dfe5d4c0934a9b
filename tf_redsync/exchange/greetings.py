"""Two processes tell each other who they are: lines of JSON over TCP, before TensorFlow starts.

What is at the other end may be anything: TensorFlow's server, which speaks HTTP/2, a program of
another kind, or nobody. Whatever it is, an answer comes within seconds, or a reason in words.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import json
import os
import re
import socket
from typing import Any

ANSWER_SECONDS = 3.0
LIMIT = 1 << 20  # bytes of a line: the names of some thousand workers
_MAGIC = b"tf_redsync "
_HTTP2_CALL = b"PRI * HTTP/"  # what a client of gRPC says first
_HTTP2_SETTINGS = b"\x04\x00\x00\x00\x00\x00"  # from the fourth byte of what its server says first


class NoAnswer(Exception):
    """Nobody of ours answers; the text says why, in words for people.

    Attributes:
        serves: Whether a server of gRPC answers there, as TensorFlow's.
        calls: Whether a client of gRPC has called, as TensorFlow's.
    """

    def __init__(self, why: str, serves: bool = False, calls: bool = False):
        super().__init__(why)
        self.serves = serves
        self.calls = calls


@dataclasses.dataclass(frozen=True)
class Identity:
    """A process of a job.

    Attributes:
        rank: Its worker's.
        tasks: The names of all tasks, by rank; addresses may differ, where there are proxies.
        job: A text that is the same for all processes of a job, if it was given one.
        nonce: Of this process alone.
    """

    rank: int
    tasks: tuple[str, ...]
    job: str
    nonce: str = dataclasses.field(default_factory=lambda: os.urandom(8).hex())

    @classmethod
    def of(cls, words: dict[str, Any]) -> Identity:
        """Return the sender of a greeting; raise `NoAnswer` for what is none."""
        rank, tasks, job, nonce = (words.get(f.name) for f in dataclasses.fields(cls))
        if not (
            isinstance(rank, int)
            and isinstance(tasks, list)
            and all(isinstance(task, str) for task in tasks)
            and isinstance(job, str)
            and isinstance(nonce, str)
        ):
            raise NoAnswer("what answers there speaks otherwise: another version of tf_redsync?")
        return cls(rank, tuple(tasks), job, nonce)


class Line:
    """A connection, on which both sides tell words by name."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._reader = reader
        self._writer = writer

    def tell(self, **words: Any) -> None:
        """Send words; whether they arrive shows in what comes back."""
        if not self._writer.is_closing():
            self._writer.write(_MAGIC + json.dumps(words).encode() + b"\n")

    async def hear(self, seconds: float | None = ANSWER_SECONDS) -> dict[str, Any]:
        """Return what the other side tells next; raise `NoAnswer` if it does not."""
        try:
            return await asyncio.wait_for(self._hear(), seconds)
        except asyncio.TimeoutError:
            raise NoAnswer("something accepts the connection there, and says nothing") from None
        except OSError as error:
            raise _unreachable(error) from error

    async def _hear(self) -> dict[str, Any]:
        try:
            head = await self._reader.readexactly(len(_MAGIC))
        except asyncio.IncompleteReadError as error:
            head = error.partial
        if head[3:9] == _HTTP2_SETTINGS:
            raise NoAnswer("TensorFlow's server is running there already", serves=True)
        if head == _HTTP2_CALL:
            raise NoAnswer("TensorFlow calls", calls=True)
        if not head:
            raise NoAnswer("the connection was closed at the other end")
        if head != _MAGIC:
            raise NoAnswer("another kind of program answers there")
        try:
            words = json.loads(await self._reader.readline())
        except (ValueError, RecursionError):  # of JSON, or of a line that is too long
            words = None
        if not isinstance(words, dict):
            raise NoAnswer("the answer from there is broken")
        return words

    async def flush(self) -> None:
        """Wait, but not for ever, until all is sent."""
        with contextlib.suppress(OSError, asyncio.TimeoutError):
            await asyncio.wait_for(self._writer.drain(), ANSWER_SECONDS)

    def kept(self) -> socket.socket:
        """Return the connection as a socket of its own, which stays open when this is closed."""
        return self._writer.get_extra_info("socket").dup()

    def close(self) -> None:
        """Close the connection, after what is still to be sent."""
        self._writer.close()


async def call(address: str, **words: Any) -> Line:
    """Connect to "host:port" and tell words; raise `NoAnswer`, with the reason, if that fails."""
    host, _, port = address.rpartition(":")
    connecting = asyncio.open_connection(host.strip("[]"), int(port), limit=LIMIT)
    try:
        line = Line(*await asyncio.wait_for(connecting, ANSWER_SECONDS))
    except asyncio.TimeoutError:
        raise NoAnswer(
            f"no answer within {ANSWER_SECONDS:g} s: a firewall, or no machine"
        ) from None
    except OSError as error:
        raise _unreachable(error) from error
    line.tell(**words)
    return line


async def ask(address: str, identity: Identity) -> Identity:
    """Return who is at "host:port"; raise `NoAnswer` if that is nobody of ours."""
    line = await call(address, **vars(identity))
    try:
        return Identity.of(await line.hear())
    finally:
        line.close()


def _unreachable(error: OSError) -> NoAnswer:
    # asyncio gives the numbers of all addresses of a name in one text, and texts of its own.
    numbers = [int(number) for number in re.findall(r"\[Errno (\d+)\]", str(error))]
    if errno.ECONNREFUSED in numbers:
        return NoAnswer("nothing listens there")
    if isinstance(error, ConnectionResetError | BrokenPipeError):
        return NoAnswer("the connection was closed at the other end")
    return NoAnswer(os.strerror(numbers[-1]) if numbers else error.strerror or str(error))
