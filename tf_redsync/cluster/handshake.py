"""Two processes tell each other who they are: lines of JSON over TCP, before TensorFlow starts.

The other end may be anything: TensorFlow's server, which speaks HTTP/2, a program of another kind,
or a stranger. Whatever it is, an answer comes within seconds, or a reason in words.

Both sides first send a random challenge and nothing else. Every later line carries an HMAC-SHA256
of the job's secret, both challenges, the direction and the line's number. So a stranger learns
nothing from a worker that it calls, and cannot replay, reflect or change what workers have said.
Without a secret the key is empty, and anyone can sign.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import hmac
import json
import os
import re
import socket
from typing import Any

from tf_redsync import environment

ANSWER_SECONDS = 3.0
LIMIT = 1 << 20  # bytes of a line: the names of some thousand workers
_MAGIC = b"tf_redsync "
_CHALLENGE = re.compile(r"[0-9a-f]{32}")
_OTHER_VERSION = "what answers there speaks otherwise: another version of tf_redsync?"
_HTTP2_CALL = b"PRI * HTTP/"  # what a client of gRPC says first
_HTTP2_SETTINGS = b"\x04\x00\x00\x00\x00\x00"  # from the fourth byte of what its server says first


class NoAnswer(Exception):
    """Nobody of ours answers; the text says why, in words for people.

    Attributes:
        serves: Whether a server of gRPC answers there, as TensorFlow's.
        calls: Whether a client of gRPC has called, as TensorFlow's.
        unsigned: Whether a line is not signed by this job's secret.
    """

    def __init__(self, why: str, serves: bool = False, calls: bool = False, unsigned: bool = False):
        super().__init__(why)
        self.serves = serves
        self.calls = calls
        self.unsigned = unsigned


@dataclasses.dataclass(frozen=True)
class Identity:
    """A process of a job.

    Attributes:
        rank: Its worker's.
        tasks: The names of all tasks, by rank; addresses may differ, where there are proxies.
        nonce: Of this process alone.
    """

    rank: int
    tasks: tuple[str, ...]
    nonce: str = dataclasses.field(default_factory=lambda: os.urandom(8).hex())

    @classmethod
    def of(cls, words: dict[str, Any]) -> Identity:
        """Return the sender of a greeting; raise `NoAnswer` for what is none."""
        rank, tasks, nonce = (words.get(f.name) for f in dataclasses.fields(cls))
        if not (
            isinstance(rank, int)
            and isinstance(tasks, list)
            and all(isinstance(task, str) for task in tasks)
            and isinstance(nonce, str)
        ):
            raise NoAnswer(_OTHER_VERSION)
        return cls(rank, tuple(tasks), nonce)


class _Signer:
    """Signs the lines of one direction of a connection, in order."""

    def __init__(self, key: bytes, direction: str):
        self._mac = hmac.new(key, direction.encode(), "sha256")
        self._count = 0

    def next(self, text: bytes) -> bytes:
        """Return the signature of the next line."""
        self._count += 1
        mac = self._mac.copy()
        mac.update(b" %d " % self._count + text)
        return mac.hexdigest().encode()


class Line:
    """A connection, on which both sides tell words by name."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._reader = reader
        self._writer = writer
        self._mine: _Signer | None = None  # before `open`, lines are not signed
        self._theirs: _Signer | None = None

    async def open(self, secret: str, calls: bool) -> None:
        """Exchange challenges; from then on lines are signed, and the other side's are checked.

        Args:
            secret: The job's; may be empty.
            calls: Whether this side has called.

        Raises:
            NoAnswer: if no challenge comes.
        """
        mine = os.urandom(16).hex()
        if calls:  # TensorFlow's server may be there, which has spoken first
            self.tell(challenge=mine)
        theirs = (await self.hear()).get("challenge")
        if not isinstance(theirs, str) or not _CHALLENGE.fullmatch(theirs):
            raise NoAnswer(_OTHER_VERSION)
        if not calls:
            self.tell(challenge=mine)
        both = f"{mine} {theirs}" if calls else f"{theirs} {mine}"
        key = hmac.digest(secret.encode(), both.encode(), "sha256")
        directions = ("call", "answer") if calls else ("answer", "call")
        self._mine, self._theirs = (_Signer(key, direction) for direction in directions)

    def tell(self, **words: Any) -> None:
        """Send words; whether they arrive shows in what comes back."""
        if not self._writer.is_closing():
            text = json.dumps(words).encode()
            signature = self._mine.next(text) + b" " if self._mine else b""
            self._writer.write(_MAGIC + signature + text + b"\n")

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
            words = json.loads(self._checked(await self._reader.readline()))
        except (ValueError, RecursionError):  # of JSON, or of a line that is too long
            words = None
        if not isinstance(words, dict):
            raise NoAnswer("the answer from there is broken")
        return words

    def _checked(self, text: bytes) -> bytes:
        """Return a line without its signature; raise `NoAnswer` if that is not of this job."""
        if self._theirs is None:
            return text
        signature, _, text = text.rstrip(b"\n").partition(b" ")
        if not hmac.compare_digest(signature, self._theirs.next(text)):
            raise NoAnswer(
                f"the process there has another {environment.JOB} than this one, or is a stranger; "
                "all workers of a job need the same",
                unsigned=True,
            )
        return text

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


async def call(address: str, secret: str, **words: Any) -> Line:
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
    try:
        await line.open(secret, calls=True)
    except BaseException:
        line.close()
        raise
    line.tell(**words)
    return line


async def ask(address: str, identity: Identity, secret: str) -> Identity:
    """Return who is at "host:port"; raise `NoAnswer` if that is nobody of ours."""
    line = await call(address, secret, **vars(identity))
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
