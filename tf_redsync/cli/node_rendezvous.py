"""Server of an elastic job's rendezvous, and the command `tf-redsync rendezvous`.

It connects `membership.Membership` to the nodes, over the authenticated lines of
`cluster/handshake.py`. The launcher on the host of the rendezvous runs it beside its workers.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import errno
import ipaddress
import os
import signal
import socket
import time

from tf_redsync import environment
from tf_redsync.cli import output
from tf_redsync.cli.command_line import Command, Flag, Parser
from tf_redsync.cli.membership import LOST_SECONDS, Membership, Node, Refused
from tf_redsync.cluster import handshake
from tf_redsync.cluster.handshake import Connection, NoAnswer

ALIVE_SECONDS = 1.0
DEFAULT_TIMEOUT_SECONDS = 600.0
_TICK_SECONDS = 0.1


def is_loopback(host: str) -> bool:
    """Return whether a host is `localhost` or a loopback address; names are not resolved."""
    address = _parsed(host)
    return host == "localhost" or (address is not None and address.is_loopback)


def is_unspecified(host: str) -> bool:
    """Return whether a host is 0.0.0.0 or ::, which each host takes for itself."""
    address = _parsed(host)
    return address is not None and address.is_unspecified


def _parsed(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:  # a name
        return None


async def own_socket(host: str, port: int) -> socket.socket | None:
    """Return a socket that listens at an address; `None` if it is taken or another machine's.

    Args:
        host: Name or address; the socket listens on this address only. For a name of a loopback
            address it listens on all addresses, because Debian resolves a host's own name to
            127.0.1.1 and other hosts do not; and for a name of several addresses, because other
            hosts may choose another one.
        port: Port.
    """
    loop = asyncio.get_running_loop()
    try:
        addresses = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        return None
    own = [name for name in dict.fromkeys(str(at[0]) for *_, at in addresses) if _is_own(name)]
    if not own:
        return None
    everywhere = not is_loopback(host) and (len(own) > 1 or is_loopback(own[0]))
    try:
        return _open("" if everywhere else own[0], port)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        return None


def _is_own(address: str) -> bool:
    """Return whether an IP address is one of this machine."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
    except OSError as error:
        # EINVAL: a link-local address without its interface
        if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.EINVAL):
            raise
        return False
    return True


class Server:
    """The rendezvous of one job.

    Args:
        timeout: Seconds that nodes wait for the minimum.
        secret: The job's secret.
    """

    def __init__(self, timeout: float, secret: str):
        self.membership = Membership(timeout, time.monotonic(), output.say)
        self._secret = secret
        self._unauthenticated = handshake.UnauthenticatedConnections()
        self._connected: set[Connection] = set()

    async def run(self, listening: socket.socket) -> tuple[int, str]:
        """Serve until the job is over and all nodes have gone; return its exit code and message."""
        server = await handshake.start_server(self._talk, listening)
        try:
            while self.membership.over is None:
                await asyncio.sleep(_TICK_SECONDS)
                self.membership.tick(time.monotonic())
            until = time.monotonic() + LOST_SECONDS
            while self._connected and time.monotonic() < until:
                await asyncio.sleep(_TICK_SECONDS)
            return self.membership.over
        finally:
            server.close()
            for line in list(self._connected):
                line.close()

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = Connection(reader, writer)
        self._unauthenticated.add(line)
        node: Node | None = None
        beat: asyncio.Task[None] | None = None
        try:
            await line.open(self._secret, calls=False)
            await line.receive()  # an empty message, since the caller did not know its address yet
            self._unauthenticated.remove(line)
            words = await line.receive()
            self._connected.add(line)
            node = self.membership.join(words, line.send, time.monotonic())
            beat = asyncio.create_task(self._send_heartbeats(line, node))
            while True:
                words = await line.receive(LOST_SECONDS)
                self.membership.receive(node, words, time.monotonic())
        except Refused as error:
            line.send(refused=str(error))
            await line.finish()
        except NoAnswer as error:
            if error.unsigned:
                line.send()  # signed, so that a node with another secret detects it
                await line.finish()
                self._unauthenticated.report(writer.get_extra_info("peername")[0])
        except asyncio.CancelledError:  # the job is over
            pass
        finally:
            if beat is not None:
                beat.cancel()
            if node is not None:
                self.membership.lose(node, time.monotonic())
            self._unauthenticated.remove(line)
            self._connected.discard(line)
            line.close()

    async def _send_heartbeats(self, line: Connection, node: Node) -> None:
        while True:
            line.send(alive=True, status=self.membership.status(node))
            await asyncio.sleep(ALIVE_SECONDS)


def secret() -> str:
    """Return the job's secret; raise ValueError without one."""
    text = os.environ.get(environment.JOB, "")
    if not text:
        raise ValueError(
            f"a rendezvous needs the job's secret: set {environment.JOB} to the same random text "
            "on all nodes, such as the output of `openssl rand -hex 16` (docs/security.md). "
            f"Received: {environment.JOB}=''"
        )
    return text


_FLAGS: tuple[Flag, ...] = (
    (("--port",), {"type": int, "required": True, "help": "port to listen on"}),
    (
        ("--host",),
        {"metavar": "HOST", "default": "", "help": "address to listen on (all of this machine)"},
    ),
    (
        ("--rendezvous-timeout",),
        {"type": float, "default": DEFAULT_TIMEOUT_SECONDS, "metavar": "SECONDS", "help": "how "
         "long to wait for enough nodes (600)"},
    ),
)  # fmt: skip


def _configure(parser: Parser) -> None:
    parser.flags(_FLAGS)


def _run(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    if not 0 < args.port < 65536:
        parser.error(f"`--port` must be from 1 to 65535. Received: --port {args.port}")
    if not args.rendezvous_timeout > 0:
        parser.error(
            "`--rendezvous-timeout` must be positive seconds. Received: --rendezvous-timeout "
            f"{args.rendezvous_timeout:g}"
        )
    try:
        server = Server(args.rendezvous_timeout, secret())
        listening = _listen(args.host, args.port)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    return asyncio.run(_serve(server, listening))


async def _serve(server: Server, listening: socket.socket) -> int:
    """Serve until the job is over or a signal comes; return the exit code."""
    serving = asyncio.create_task(server.run(listening))
    signalled: asyncio.Future[signal.Signals] = asyncio.get_running_loop().create_future()

    def end(number: signal.Signals) -> None:
        if not signalled.done():
            signalled.set_result(number)

    # The kernel ignores signals without a handler for process 1 of a container.
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, end, number)
    await asyncio.wait((serving, signalled), return_when=asyncio.FIRST_COMPLETED)
    if serving.done():
        return serving.result()[0]
    output.say(f"{signalled.result().name}: this rendezvous ends.")
    return 128 + signalled.result()


def _open(host: str, port: int) -> socket.socket:
    """Return a socket that listens at an address of this machine; at all of them if it is empty."""
    if not host and socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):  # IPv6 is off, or the port is in use
            return socket.create_server(
                ("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024
            )
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=1024)


def _listen(host: str, port: int) -> socket.socket:
    try:
        return _open(host, port)
    except OSError as error:
        raise ValueError(
            f"`--host` and `--port` must be a free address of this machine ({error.strerror}). "
            f"Received: --host {host!r} --port {port}"
        ) from None


COMMAND = Command(
    "rendezvous",
    "serve the rendezvous of an elastic job",
    "Serves the rendezvous of one job of `tf-redsync launch --nodes`, on a host that has no\n"
    "workers or outlives them. It needs the job's secret in TF_REDSYNC_JOB, ends with the job and\n"
    "returns its exit code. Started again, it takes a running job over.",
    (("--port 29500", "then on each node: launch --rendezvous THIS_HOST:29500"),),
    _configure,
    _run,
)
