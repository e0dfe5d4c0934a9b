"""TCP user timeouts of accepted connections, on real sockets."""

import contextlib
import os
import socket
import threading
import time

import pytest

from tf_redsync.cluster import tcp_timeout

USER_TIMEOUT = getattr(socket, "TCP_USER_TIMEOUT", 18)


def timeout(connection):
    return connection.getsockopt(socket.IPPROTO_TCP, USER_TIMEOUT)


@pytest.fixture(params=["127.0.0.1", "::1"])
def pair(request):
    """Returns a server, a client's connection and the accepted connection, as gRPC has them."""
    family = socket.AF_INET6 if ":" in request.param else socket.AF_INET
    with contextlib.ExitStack() as stack:
        try:
            server = stack.enter_context(socket.create_server((request.param, 0), family=family))
        except OSError as error:
            pytest.skip(str(error))
        client = stack.enter_context(socket.create_connection(server.getsockname()[:2]))
        accepted = stack.enter_context(server.accept()[0])
        accepted.setsockopt(socket.IPPROTO_TCP, USER_TIMEOUT, 20_000)
        yield server, client, accepted


def test_only_grpc_timeouts_on_the_servers_port_are_replaced(pair):
    server, client, accepted = pair
    port = server.getsockname()[1]
    client.setsockopt(socket.IPPROTO_TCP, USER_TIMEOUT, 20_000)  # of another port
    files = len(os.listdir("/proc/self/fd"))
    assert tcp_timeout.extend(port + 1, 240_000) == 0 and timeout(accepted) == 20_000
    assert tcp_timeout.extend(port, 240_000) == 1
    assert (timeout(accepted), timeout(client)) == (240_000, 20_000)
    # no longer gRPC's
    assert tcp_timeout.extend(port, 300_000) == 0 and timeout(accepted) == 240_000
    assert len(os.listdir("/proc/self/fd")) == files and accepted.getblocking()
    client.sendall(b"x")
    assert accepted.recv(1) == b"x"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_keep_raises_the_timeouts_until_the_process_ends(pair, monkeypatch):
    server, _, accepted = pair
    monkeypatch.setattr(tcp_timeout, "_EVERY_SECONDS", 0.01)
    before = {*threading.enumerate()}
    tcp_timeout.keep(server.getsockname()[1], 240)
    (thread,) = {*threading.enumerate()} - before
    for _ in range(2):  # and on a connection that gRPC accepts later
        deadline = time.monotonic() + 10
        while timeout(accepted) != 240_000:
            assert time.monotonic() < deadline, timeout(accepted)
            time.sleep(0.01)
        accepted.setsockopt(socket.IPPROTO_TCP, USER_TIMEOUT, 20_000)

    def end(*arguments):
        raise SystemExit  # ends only the thread

    monkeypatch.setattr(tcp_timeout, "extend", end)
    thread.join(10)
    assert not thread.is_alive()
