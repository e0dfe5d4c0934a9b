"""Authenticated handshake of two processes: JSON lines over TCP, before TensorFlow starts.

The peer may be a worker, TensorFlow's server (HTTP/2), another program, or an attacker. A call ends
within seconds, with an answer or with a reason.

Both sides first send a random challenge and nothing else. Every later line carries an HMAC-SHA256
keyed by the job's secret and both challenges, over the direction, the line number and the text. So
an attacker learns nothing from a worker and cannot replay, reflect or change its lines. Without a
secret the key is empty, and any process can sign.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import hmac
import json
import logging
import os
import re
import socket
from collections.abc import Awaitable, Callable
from typing import Any

from tf_redsync import environment

ANSWER_SECONDS = 3.0
_RESOLVED_SECONDS = 0.5  # for a name that was resolved before a connection was tried
_NEXT_ADDRESS_SECONDS = 0.25  # after which the next address of a host is tried, too (RFC 8305)
LIMIT = 1 << 20  # bytes in a line: enough for the names of some thousand workers
MAX_UNAUTHENTICATED = 128  # connections at a time; a process often has 1,024 descriptors
_MAX_REPORTED_HOSTS = 8
_MAGIC = b"tf_redsync "
_CHALLENGE = re.compile(r"[0-9a-f]{32}")
_OTHER_VERSION = "the process there speaks another protocol: another version of tf_redsync?"
_HTTP2_CALL = b"PRI * HTTP/"  # first bytes of a gRPC client
_HTTP2_SETTINGS = b"\x04\x00\x00\x00\x00\x00"  # bytes 3 to 9 of a gRPC server
_logger = logging.getLogger("tf_redsync")


class NoAnswer(Exception):
    """No worker of this job answers; the message gives the reason to the user.

    Attributes:
        serves: Whether the peer is a gRPC server, such as TensorFlow's.
        calls: Whether the peer is a gRPC client, such as TensorFlow's.
        unsigned: Whether a line has no valid signature with this job's secret.
    """

    def __init__(self, why: str, serves: bool = False, calls: bool = False, unsigned: bool = False):
        super().__init__(why)
        self.serves = serves
        self.calls = calls
        self.unsigned = unsigned


@dataclasses.dataclass(frozen=True)
class Identity:
    """Identity of a worker process.

    Attributes:
        rank: Rank of the worker.
        tasks: Names of all tasks, by rank. Addresses are omitted, since they differ behind proxies.
        nonce: Random text that is unique to this process.
    """

    rank: int
    tasks: tuple[str, ...]
    nonce: str = dataclasses.field(default_factory=lambda: os.urandom(8).hex())

    @classmethod
    def of(cls, words: dict[str, Any]) -> Identity:
        """Return the identity in a received line; raise `NoAnswer` for a malformed one."""
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
    """Signs the lines of one direction of a connection in order."""

    def __init__(self, key: bytes, direction: str):
        self._mac = hmac.new(key, direction.encode(), "sha256")
        self._count = 0

    def next(self, text: bytes) -> bytes:
        """Return the signature of the next line."""
        self._count += 1
        mac = self._mac.copy()
        mac.update(b" %d " % self._count + text)
        return mac.hexdigest().encode()


class Connection:
    """A TCP connection on which both sides send signed lines of JSON."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._reader = reader
        self._writer = writer
        self._sent: _Signer | None = None  # before `open`, lines are not signed
        self._received: _Signer | None = None

    async def open(self, secret: str, calls: bool) -> None:
        """Exchange challenges; sign and verify all later lines.

        Args:
            secret: The job's secret; may be empty.
            calls: Whether this side has opened the connection.

        Raises:
            NoAnswer: if no challenge arrives.
        """
        mine = os.urandom(16).hex()
        if calls:  # the caller sends first; a TensorFlow server sends without waiting for it
            self.send(challenge=mine)
        theirs = (await self.receive()).get("challenge")
        if not isinstance(theirs, str) or not _CHALLENGE.fullmatch(theirs):
            raise NoAnswer(_OTHER_VERSION)
        if not calls:
            self.send(challenge=mine)
        both = f"{mine} {theirs}" if calls else f"{theirs} {mine}"
        key = hmac.digest(secret.encode(), both.encode(), "sha256")
        directions = ("call", "answer") if calls else ("answer", "call")
        self._sent, self._received = (_Signer(key, direction) for direction in directions)

    def send(self, **words: Any) -> None:
        """Send one line; a lost connection shows in the next `receive`."""
        if not self._writer.is_closing():
            text = json.dumps(words).encode()
            signature = self._sent.next(text) + b" " if self._sent else b""
            self._writer.write(_MAGIC + signature + text + b"\n")

    async def receive(self, seconds: float | None = ANSWER_SECONDS) -> dict[str, Any]:
        """Return the peer's next line; raise `NoAnswer` if none arrives."""
        try:
            return await asyncio.wait_for(self._receive(), seconds)
        except asyncio.TimeoutError:
            raise NoAnswer("a program accepts the connection there and sends nothing") from None
        except OSError as error:
            raise _unreachable(error) from error

    async def _receive(self) -> dict[str, Any]:
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
        except (ValueError, RecursionError):  # malformed JSON, or a line that is too long
            words = None
        if not isinstance(words, dict):
            raise NoAnswer("the answer from there is malformed")
        return words

    def _checked(self, text: bytes) -> bytes:
        """Return a line without its signature; raise `NoAnswer` if the signature is wrong."""
        if self._received is None:
            return text
        signature, _, text = text.rstrip(b"\n").partition(b" ")
        if not hmac.compare_digest(signature, self._received.next(text)):
            raise NoAnswer(
                f"the process there has another {environment.JOB} than this one, or none; set the "
                "same for all workers of a job",
                unsigned=True,
            )
        return text

    async def flush(self) -> None:
        """Wait some seconds until all lines are sent."""
        with contextlib.suppress(OSError, asyncio.TimeoutError):
            await asyncio.wait_for(self._writer.drain(), ANSWER_SECONDS)

    @property
    def local_host(self) -> str:
        """The address of this side."""
        return str(self._writer.get_extra_info("sockname")[0])

    def duplicate_socket(self) -> socket.socket:
        """Return a duplicate socket, which stays open when this connection is closed."""
        return self._writer.get_extra_info("socket").dup()

    async def finish(self) -> None:
        """Send pending lines, and wait some seconds until the peer has read them and closed.

        Closing with unread lines of the peer would reset the connection, and the peer could lose
        the last line.
        """
        with contextlib.suppress(OSError, asyncio.TimeoutError):
            self._writer.write_eof()
            await asyncio.wait_for(self._discard(), ANSWER_SECONDS)

    async def _discard(self) -> None:
        while await self._reader.read(LIMIT):
            pass

    def close(self) -> None:
        """Close the connection after pending lines are sent."""
        self._writer.close()


class UnauthenticatedConnections:
    """Accepted connections whose callers have not sent a signed message.

    Above `limit` the oldest connection is closed, so that a flood of connections does not use up
    this process's descriptors. A worker whose connection is closed calls again.

    Args:
        limit: Number of connections.
    """

    def __init__(self, limit: int = MAX_UNAUTHENTICATED) -> None:
        self._limit = limit
        self._connections: dict[Connection, None] = {}  # in the order of arrival
        self._hosts: set[str] = set()

    def add(self, connection: Connection) -> None:
        """Add an accepted connection."""
        self._connections[connection] = None
        if len(self._connections) > self._limit:
            oldest = next(iter(self._connections))
            self.remove(oldest)
            oldest.close()

    def remove(self, connection: Connection) -> None:
        """Remove a connection that is authenticated or closed."""
        self._connections.pop(connection, None)

    def report(self, host: str) -> None:
        """Warn of an unauthenticated caller, once for each of the first few hosts."""
        host = host.removeprefix("::ffff:")
        if host not in self._hosts and len(self._hosts) < _MAX_REPORTED_HOSTS:
            self._hosts.add(host)
            _logger.warning(
                "a process at %s has called with another %s or without one; it got no answer",
                host,
                environment.JOB,
            )


async def start_server(
    answer: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
    listening: socket.socket,
) -> asyncio.Server:
    """Serve on a socket; asyncio accepts up to `backlog` connections before it calls `answer`."""
    return await asyncio.start_server(
        answer, sock=listening, limit=LIMIT, backlog=MAX_UNAUTHENTICATED
    )


async def call(address: str, secret: str, **words: Any) -> Connection:
    """Connect to "host:port" and send `words`; raise `NoAnswer` with the reason if that fails."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    connecting = asyncio.open_connection(
        host, int(port), limit=LIMIT, happy_eyeballs_delay=_NEXT_ADDRESS_SECONDS
    )
    try:
        line = Connection(*await asyncio.wait_for(connecting, ANSWER_SECONDS))
    except asyncio.TimeoutError:
        raise await _silence(host) from None
    except OSError as error:
        raise _unreachable(error) from error
    except ValueError as error:  # a name with an empty or long part, or a null character
        raise NoAnswer(f"{host!r} is not a host name ({error})") from error
    try:
        await line.open(secret, calls=True)
    except BaseException:
        line.close()
        raise
    line.send(**words)
    return line


async def ask(address: str, identity: Identity, secret: str) -> Identity:
    """Return the identity of the worker at "host:port"; raise `NoAnswer` without one."""
    line = await call(address, secret, **vars(identity))
    try:
        return Identity.of(await line.receive())
    finally:
        line.close()


async def _silence(host: str) -> NoAnswer:
    """Return the error of a host to which no connection was made within `ANSWER_SECONDS`."""
    resolving = asyncio.get_running_loop().getaddrinfo(host, None)
    try:
        await asyncio.wait_for(resolving, _RESOLVED_SECONDS)
    except asyncio.TimeoutError:
        cause = "the name server does not answer"
    except OSError as error:
        return _unreachable(error)
    else:
        cause = "a firewall, or the machine is down"
    return NoAnswer(f"no answer within {ANSWER_SECONDS:g} s: {cause}")


def _unreachable(error: OSError) -> NoAnswer:
    # asyncio puts the error numbers of all addresses of a host into one text.
    numbers = [int(number) for number in re.findall(r"\[Errno (\d+)\]", str(error))]
    if errno.ECONNREFUSED in numbers:
        return NoAnswer("nothing listens there")
    if isinstance(error, ConnectionResetError | BrokenPipeError):
        return NoAnswer("the connection was closed at the other end")
    return NoAnswer(os.strerror(numbers[-1]) if numbers else error.strerror or str(error))
