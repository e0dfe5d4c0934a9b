"""Rendezvous with peers on raw sockets: only peers that know the job's secret are accepted."""

import contextlib
import json
import os
import socket
import threading
import time

import pytest

from tests.unit.raw_peer import MAGIC, RawPeer
from tests.unit.test_rendezvous import (
    cluster,
    connect,
    error_of,
    no_environment,
    report_early,
    started,
)
from tf_redsync import environment
from tf_redsync.cluster import handshake

__all__ = ["no_environment", "report_early", "started"]  # fixtures

SECRET = "a secret of forty characters for a job.."
TASKS = ["worker:0", "worker:1"]


@pytest.fixture
def secret(monkeypatch):
    monkeypatch.setenv(environment.JOB, SECRET)


@contextlib.contextmanager
def serving(address, answer):
    """Accepts connections at a worker's address and passes each to `answer`."""

    def serve():
        with contextlib.suppress(OSError):
            while True:
                connection, _ = server.accept()
                kept.append(connection)
                threading.Thread(target=one, args=(connection,), daemon=True).start()

    def one(connection):
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            answer(connection)

    kept = []
    with socket.create_server(("127.0.0.1", int(address.rpartition(":")[2]))) as server:
        threading.Thread(target=serve, daemon=True).start()
        yield
        server.shutdown(socket.SHUT_RDWR)
    for connection in kept:
        connection.close()


def identity(rank):
    return {"rank": rank, "tasks": TASKS, "nonce": "stranger"}


def answer_as(rank, secret, *messages):
    """Returns a function for `serving` that authenticates as a worker and sends messages."""

    def answer(connection):
        peer = RawPeer(connection, secret, calls=False)
        peer.receive()
        for words in (identity(rank), *messages):
            peer.send(**words)

    return answer


def join(cluster, secret):
    """Returns a peer that has asked the chief to join as worker 1."""
    peer = RawPeer(connect(cluster.addresses[0]), secret)
    peer.send(**identity(1), join=True)
    return peer


def assert_all_meet(*workers):
    for future in workers:
        future.result(10)


def read_all(connection):
    connection.settimeout(5)
    got = b""
    with contextlib.suppress(OSError):
        while data := connection.recv(1 << 16):
            got += data
    return got


@pytest.mark.parametrize("rank", [0, 1])
def test_worker_identifies_itself_only_to_peers_with_the_secret(started, secret, rank):
    two = cluster(2)
    address = two.addresses[rank]
    first = started(two, rank)
    trusted = RawPeer(connect(address), SECRET)
    trusted.send(**identity(1 - rank))
    assert trusted.receive()["tasks"] == TASKS

    got = []
    for guess in ("", "other", SECRET[:-1]):
        stranger = RawPeer(connect(address), guess)
        stranger.send(**identity(1 - rank), join=True)
        stranger.read_until_closed()
        got.append(stranger.got)
    challenge = b'tf_redsync {"challenge": "0123456789abcdef0123456789abcdef"}\n'
    texts = (b"", challenge, challenge * 2, MAGIC + json.dumps(identity(0)).encode() + b"\n")
    connections = [connect(address) for _ in texts]
    for connection, text in zip(connections, texts, strict=True):
        connection.sendall(text)
    got += [read_all(connection) for connection in connections]
    for text in got:  # challenges and a line without content
        words = [line.rpartition(b" {")[2] for line in text.splitlines()]
        assert all(word == b"}" or word.startswith(b'"challenge": ') for word in words)
    assert any(got)
    assert not first.done()
    assert_all_meet(first, started(two, 1 - rank))


def test_messages_cannot_be_replayed(started, secret):
    """A peer between chief and worker replays all messages of the worker to the chief."""
    two = cluster(2)
    chief = started(two, 0, 3.0)
    recorded = []
    with serving(two.addresses[1], answer_as(1, SECRET)):
        trusted = RawPeer(connect(two.addresses[0]), SECRET)
        write = trusted.write
        trusted.write = lambda text: (recorded.append(text), write(text))
        trusted.send(**identity(1), join=True)
        assert trusted.receive()["rank"] == 0 and trusted.receive() == {"joined": False}
        trusted.file.close()
        again = RawPeer(connect(two.addresses[0]), "")
        for text in (*recorded, *recorded):
            again.write(text)
        again.read_until_closed()
        assert b"joined" in trusted.got and b"rank" not in again.got
    assert not chief.done(), chief.exception(0)
    assert_all_meet(started(two, 1), chief)


@pytest.mark.parametrize("knows", [True, False])
def test_only_peers_with_the_secret_end_the_job(started, secret, knows):
    two = cluster(2)
    chief = started(two, 0)
    key = SECRET if knows else ""
    with serving(two.addresses[1], answer_as(1, key)):
        stranger = join(two, key)
        stranger.send(end="text of a stranger")
        stranger.read_until_closed()
    if knows:
        assert error_of(chief) == "text of a stranger"
        return
    assert not chief.done(), chief.exception(0)
    assert_all_meet(started(two, 1), chief)


@pytest.mark.parametrize("word", ["end", "refused"])
@pytest.mark.parametrize("knows", [True, False])
def test_only_peers_with_the_secret_act_as_the_chief(started, secret, knows, word):
    two = cluster(2)
    messages = [{"joined": False}] if word == "end" else []
    messages.append({word: "text of a stranger"})
    with serving(two.addresses[0], answer_as(0, SECRET if knows else "", *messages)):
        member = started(two, 1)
        if knows:
            assert error_of(member) == "text of a stranger"
            return
        time.sleep(0.5)
        assert not member.done(), member.exception(0)
    assert_all_meet(started(two, 0), member)


@pytest.mark.parametrize("knows", [True, False])
def test_only_peers_with_the_secret_replace_a_missing_worker(started, secret, knows):
    two = cluster(2)
    chief = started(two, 0, 2.0)
    key = SECRET if knows else ""
    with serving(two.addresses[1], answer_as(1, key)):
        stranger = join(two, key)
        stranger.send(unreached=[])
        if knows:
            chief.result(5)  # TensorFlow would start with this peer
        else:
            text = error_of(chief)
            assert f"worker 1 at {two.addresses[1]}" in text and environment.JOB in text


def is_closed(connection):
    """Returns whether the other side has closed a connection."""
    connection.setblocking(False)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def count_open(connections):
    return sum(not is_closed(connection) for connection in connections)


def test_flood_of_connections_leaves_descriptors_to_the_worker(started, secret):
    two = cluster(2)
    chief = started(two, 0)
    silent = [connect(two.addresses[0]) for _ in range(2 * handshake.MAX_UNAUTHENTICATED)]
    end = time.monotonic() + 0.8 * handshake.ANSWER_SECONDS  # then silent ones are closed anyway
    while count_open(silent) > handshake.MAX_UNAUTHENTICATED and time.monotonic() < end:
        time.sleep(0.02)
    # The chief's call of its own address may have taken a place.
    limit = handshake.MAX_UNAUTHENTICATED
    assert count_open(silent) in (limit - 1, limit)
    assert_all_meet(started(two, 1), chief)
    for connection in silent:
        connection.close()


def test_worker_rejects_its_own_reflected_messages(started, secret):
    """A peer at a missing worker's address relays the chief's messages back to the chief."""
    two = cluster(2)
    chief = started(two, 0, 1.5)

    def relay(connection):
        other = connect(two.addresses[0])
        back = threading.Thread(target=copy, args=(other, connection), daemon=True)
        back.start()
        copy(connection, other)

    def copy(source, to):
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                to.sendall(data)
            to.shutdown(socket.SHUT_WR)

    def reflect(connection):
        copy(connection, connection)

    with serving(two.addresses[1], relay):
        time.sleep(0.5)
    with serving(two.addresses[1], reflect):
        assert "missing" in error_of(chief)


def test_mismatched_secret_is_reported_on_both_sides(started, report_early, caplog, monkeypatch):
    two = cluster(2)
    monkeypatch.setenv(environment.JOB, SECRET)
    chief = started(two, 0)
    connect(two.addresses[0]).close()  # it listens, so it has read the secret
    for wrong in ("another one", ""):
        monkeypatch.setenv(environment.JOB, wrong)
        text = error_of(started(two, 1, 0.7))
        assert f"worker 0 at {two.addresses[0]}: " in text and environment.JOB in text
        assert SECRET not in text
    messages = [r.getMessage() for r in caplog.records if environment.JOB in r.getMessage()]
    for origin in (
        "at 127.0.0.1 has called",
        *(f"worker {i} at {two.addresses[i]}" for i in (0, 1)),
    ):
        assert any(origin in one for one in messages), origin
    assert SECRET not in caplog.text
    assert not chief.done(), chief.exception(0)
    monkeypatch.setenv(environment.JOB, SECRET)
    assert_all_meet(started(two, 1), chief)


@pytest.mark.parametrize("value", [None, "", SECRET])
def test_chief_warns_of_missing_secret(started, caplog, monkeypatch, value):
    if value is not None:
        monkeypatch.setenv(environment.JOB, value)
    three = cluster(3)
    assert_all_meet(*[started(three, rank) for rank in range(3)])
    warnings = [r.getMessage() for r in caplog.records if environment.JOB in r.getMessage()]
    assert len(warnings) == (0 if value else 1)
    assert not warnings or "security.md" in warnings[0]


def test_launcher_generates_a_random_secret(monkeypatch):
    from tf_redsync.cli import worker_environment

    monkeypatch.delenv(environment.JOB, raising=False)
    secrets = {worker_environment.variables(2, 1, None, None)[environment.JOB] for _ in range(3)}
    assert len(secrets) == 3 and all(len(one) >= 32 for one in secrets)
    monkeypatch.setenv(environment.JOB, "")
    assert len(worker_environment.variables(2, 1, None, None)[environment.JOB]) >= 32
    monkeypatch.setenv(environment.JOB, "given")
    assert worker_environment.variables(2, 1, None, None)[environment.JOB] == "given"
    assert environment.JOB in os.environ
