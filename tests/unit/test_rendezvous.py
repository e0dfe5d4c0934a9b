"""Rendezvous of workers before TensorFlow starts: each worker is a thread, without TensorFlow."""

import asyncio
import contextlib
import dataclasses
import errno
import gc
import json
import random
import socket
import threading
import time
import types
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import tensorflow as tf

from tests.loops import loop
from tests.unit.raw_peer import RawPeer
from tf_redsync import environment
from tf_redsync.cli.launch import free_ports
from tf_redsync.cluster import handshake, rendezvous
from tf_redsync.cluster.rendezvous import Member, StartError
from tf_redsync.cluster.tf_config import Cluster

# First bytes of gRPC servers and clients.
SETTINGS = b"\x00\x00\x12\x04\x00\x00\x00\x00\x00\x00\x03\x7f\xff\xff\xff"
CALL = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


@pytest.fixture(autouse=True)
def no_environment(monkeypatch):
    for name in (environment.HANDSHAKE, environment.JOB):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def report_early(monkeypatch):
    """Shortens the delay after which missing workers are reported to tenths of a second."""
    monkeypatch.setattr(rendezvous, "_report_times", lambda: (0.1, 0.2, 0.4, 0.8))


def started_with(cluster, timeout):
    with rendezvous.startup(cluster, timeout) as seconds:
        return seconds


@pytest.fixture
def started():
    """Returns a function that starts a worker and returns a future of its `startup`."""
    with ThreadPoolExecutor(32) as pool:
        yield lambda cluster, rank, timeout=10.0: pool.submit(
            started_with, dataclasses.replace(cluster, rank=rank), timeout
        )


def cluster(workers, ports=None):
    addresses = tuple(f"127.0.0.1:{port}" for port in ports or free_ports(workers))
    return Cluster(addresses, tuple(f"worker:{i}" for i in range(workers)), 0)


def with_other_port(one, rank, port):
    """Returns the cluster as seen by a process that has another port for one worker."""
    addresses = list(one.addresses)
    addresses[rank] = f"127.0.0.1:{port}"
    return dataclasses.replace(one, addresses=tuple(addresses))


@contextlib.contextmanager
def serve_bytes(address, says):
    """Serves the same bytes to every connection at an address."""

    def serve():
        with contextlib.suppress(OSError):
            while True:
                connection, _ = server.accept()
                with contextlib.suppress(OSError):
                    connection.sendall(says)
                kept.append(connection)

    kept = []
    with socket.create_server(("127.0.0.1", int(address.rpartition(":")[2]))) as server:
        threading.Thread(target=serve, daemon=True).start()
        yield
        server.shutdown(socket.SHUT_RDWR)
    for connection in kept:
        connection.close()


def error_of(future):
    with pytest.raises(StartError) as error:
        future.result(20)
    return str(error.value)


@pytest.mark.parametrize(
    ("host", "rank"), [("a..b", 0), ("a..b", 1), ("x" * 70 + ".b", 0), ("a\0b", 0)]
)
def test_a_name_that_no_host_can_have_is_named(started, host, rank):
    two = cluster(2)
    addresses = list(two.addresses)
    addresses[1 - rank] = f"{host}:{addresses[1 - rank].rpartition(':')[2]}"
    wrong = dataclasses.replace(two, addresses=tuple(addresses))
    text = error_of(started(wrong, rank, 1.0))
    assert f"{host!r} is not a host name" in text and f"worker {1 - rank}" in text


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_workers_meet_in_any_order(started, order):
    three = cluster(3)
    futures = []
    for rank in order:
        futures.append(started(three, rank))
        time.sleep(0.1)
        assert len(futures) == 3 or not any(future.done() for future in futures)
    for future in futures:
        future.result(10)
    for address in three.addresses:  # all are free for TensorFlow
        with socket.create_server(("", int(address.rpartition(":")[2]))):
            pass


def test_no_socket_is_left_open(started):
    gc.collect()  # left by other tests
    three = cluster(3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ResourceWarning)
        for future in [started(three, rank) for rank in range(3)]:
            future.result(10)
        gc.collect()
    assert [str(w.message) for w in caught if w.category is ResourceWarning] == []


def test_many_workers_leave_together(started):
    many = cluster(12)
    futures = [started(many, rank) for rank in range(11)]
    time.sleep(0.5)
    assert not any(future.done() for future in futures)
    for future in [*futures, started(many, 11)]:
        future.result(10)


def test_missing_worker_is_named_by_all_and_ends_the_wait(started, report_early, caplog):
    four = cluster(4)
    futures = [started(four, rank, timeout=1.0 + rank / 10) for rank in (0, 1, 3)]
    missing = f"worker 2 at {four.addresses[2]}"
    for future in futures:
        text = error_of(future)
        assert f"missing:\n{missing}: nothing listens there\nStart them" in text
        assert "Received: start_timeout=1" in text and "worker 3" not in text
    messages = [r.getMessage() for r in caplog.records if "waiting for" in r.getMessage()]
    assert f"waiting for {missing} (0 s): nothing listens there" in messages


def test_deadline_holds_for_a_missed_cancellation(started, monkeypatch):
    """`asyncio.wait_for` sometimes misses one."""

    async def connect(self):
        for _ in range(2):
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(60)
        await asyncio.sleep(60)

    monkeypatch.setattr(Member, "connect", connect)
    assert "start_timeout=0.5" in error_of(started(cluster(2), 1, timeout=0.5))


def test_missing_chief(started, report_early, caplog):
    two = cluster(2)
    text = error_of(started(two, 1, timeout=0.5))
    assert f"missing:\nworker 0 at {two.addresses[0]}: nothing listens there" in text
    assert f"waiting for worker 0 at {two.addresses[0]}" in caplog.text


@pytest.mark.parametrize("rank", [0, 1])
def test_duplicate_worker_on_another_machine_ends_alone(started, rank):
    """The duplicate has its own port and calls the address in TF_CONFIG."""
    three = cluster(3)
    futures = {other: started(three, other) for other in (0, 1)}
    for address in three.addresses[:2]:
        connect(address).close()
    text = duplicate_error(dataclasses.replace(three, rank=rank))
    assert f"worker {rank} at {three.addresses[rank]} is running already: " in text
    assert "another process" in text  # whichever of the other two detects it first
    assert f"Received: task=worker:{rank} in TF_CONFIG" in text
    for future in (*futures.values(), started(three, 2)):
        future.result(10)


def test_port_without_permission(monkeypatch):
    def refuse(*args, **kwargs):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(socket, "create_server", refuse)
    with pytest.raises(StartError) as raised:
        rendezvous.listen(cluster(2, ports=(80, 81)))
    assert "127.0.0.1:80" in str(raised.value) and "running already" not in str(raised.value)


def connect(address):
    """Returns a connection to a worker, once it listens."""
    host, _, port = address.rpartition(":")
    end = time.monotonic() + 30
    while True:
        try:
            return socket.create_connection((host, int(port)), 5)
        except OSError:
            assert time.monotonic() < end
            time.sleep(0.02)


def duplicate_error(one):
    """Returns the error of a process that listens elsewhere than TF_CONFIG says."""
    port = free_ports(1)[0]
    listen = rendezvous.listen
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor() as pool:
        patch.setattr(rendezvous, "reserve_port", lambda cluster: None)
        patch.setattr(rendezvous, "listen", lambda c: listen(with_other_port(c, c.rank, port)))
        return error_of(pool.submit(started_with, one, 5.0))


def test_duplicate_worker_on_this_machine(started):
    two = cluster(2)
    first = started(two, 0)
    connect(two.addresses[0]).close()
    assert "its port" in error_of(started(two, 0))
    started(two, 1).result(10)
    first.result(10)


def test_duplicate_worker_beside_a_running_job():
    two = cluster(2)
    with serve_bytes(two.addresses[0], SETTINGS), serve_bytes(two.addresses[1], SETTINGS):
        for rank in range(2):
            text = duplicate_error(dataclasses.replace(two, rank=rank))
            assert f"running already: TensorFlow's server answers at {two.addresses[rank]}" in text


def test_process_at_a_wrong_address_is_rejected_when_the_right_one_comes(started):
    three = cluster(3)
    chief = started(three, 0)
    wrong = with_other_port(three, 1, free_ports(1)[0])
    impostor = started(wrong, 1)
    time.sleep(0.5)
    assert not impostor.done()
    right = started(three, 1)
    assert "worker 0 finds that another process answers" in error_of(impostor)
    for future in (started(three, 2), chief, right):
        future.result(10)


def test_earlier_run_is_awaited(started, report_early, caplog):
    two = cluster(2)
    with serve_bytes(two.addresses[0], SETTINGS):
        member = started(two, 1)
        time.sleep(0.6)
        assert not member.done()
    assert "TensorFlow's server is running there already: an earlier run" in caplog.text
    assert "TF_REDSYNC_HANDSHAKE=0" in caplog.text
    started(two, 0).result(10)
    member.result(10)


def test_workers_without_a_handshake_are_named(started):
    three = cluster(3)
    chief = started(three, 0, timeout=1.0)
    time.sleep(0.3)
    with serve_bytes(three.addresses[1], SETTINGS):
        host, _, port = three.addresses[0].rpartition(":")
        with socket.create_connection((host, int(port))) as older:
            older.sendall(CALL)
            text = error_of(chief)
    assert f"{three.addresses[1]}: TensorFlow's server is running there already" in text
    assert f"{three.addresses[2]}: nothing listens there" in text


def test_workers_of_other_clusters_are_rejected(started):
    two = cluster(2)
    three = Cluster((*two.addresses, "127.0.0.1:1"), ("worker:0", "worker:1", "worker:2"), 0)
    chief = started(two, 0)
    assert "is not worker 0: its cluster has 2 workers" in error_of(started(three, 1))
    assert not chief.done()
    started(two, 1).result(10)
    chief.result(10)


def test_unreachable_pair_is_named(started, report_early, caplog):
    three = cluster(3)
    closed = free_ports(1)[0]
    futures = [started(three, 0, 1.5), started(with_other_port(three, 2, closed), 1, 2.0)]
    for future in (*futures, started(three, 2, 2.0)):
        text = error_of(future)
        assert f"worker 1, which cannot reach worker 2 at 127.0.0.1:{closed}: nothing" in text
    assert f"waiting for worker 1, which cannot reach worker 2 at 127.0.0.1:{closed}" in caplog.text


def test_many_unreachable_pairs_fit_in_a_line():
    """In a cluster whose workers reach only the chief, such as for missing names of hosts."""
    workers, reason = 256, "no answer within 3 s: a firewall, or the machine is down"
    addresses = tuple(f"node{rank:03d}.cluster.local:29500" for rank in range(workers))
    many = Cluster(addresses, tuple(f"worker:{rank}" for rank in range(workers)), 0)
    lines, chief = [], rendezvous.Chief(many, 0.2)
    line = types.SimpleNamespace(send=lambda **words: lines.append(words))
    for rank in range(1, workers):
        unreached = [[many.name(r), reason] for r in range(1, workers) if r != rank]
        chief._joined[rank] = rendezvous._JoinedWorker(line, unreached)
    with pytest.raises(StartError) as error:
        asyncio.run(chief._within_timeout(chief.connect()))
    assert len(json.dumps(lines[0])) < handshake.LIMIT / 8
    who, _ = lines[0]["waits"][0]
    assert who == f"worker 1, which cannot reach {many.name(2)} and 253 more workers"
    assert len(str(error.value).splitlines()) < 20 and "and 239 more workers" in str(error.value)


def test_unresponsive_name_server_is_named(monkeypatch):
    answered = threading.Event()
    monkeypatch.setattr(handshake, "ANSWER_SECONDS", 0.1)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: answered.wait(10))

    async def call():
        try:
            await handshake.call("far-away:1", "")
        finally:
            answered.set()  # the event loop joins the resolver's thread

    with pytest.raises(handshake.NoAnswer, match="name server"):
        asyncio.run(call())


def test_second_address_of_a_host_is_tried_while_the_first_is_silent(monkeypatch):
    answering = socket.create_server(("127.0.0.1", 0))
    port = answering.getsockname()[1]
    silent = socket.create_server(("127.0.0.2", port), backlog=0)
    waiting = [socket.socket() for _ in range(3)]
    for client in waiting:  # the kernel drops further connections to a full backlog
        client.setblocking(False)
        client.connect_ex(silent.getsockname())
    both = [
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, port))
        for host in ("127.0.0.2", "127.0.0.1")
    ]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: both)

    async def answer(reader, writer):
        line = handshake.Connection(reader, writer)
        await line.open("", calls=False)
        line.send(reached=True)
        await line.flush()
        line.close()

    async def call():
        server = await handshake.start_server(answer, answering)
        try:
            line = await handshake.call(f"two-addresses:{port}", "")
            return await line.receive()
        finally:
            server.close()

    with contextlib.ExitStack() as opened:
        for one in (silent, *waiting):
            opened.enter_context(one)
        assert asyncio.run(call()) == {"reached": True}


def test_wrong_addresses_are_reported(started):
    three = cluster(3)
    a, b, c = three.addresses
    text = error_of(started(dataclasses.replace(three, addresses=(b, a, c)), 0, 0.4))
    assert "missing" in text
    chief = started(dataclasses.replace(three, addresses=(a, c, b)), 0, 2.0)
    member = started(three, 1, 2.0)
    assert "worker 1 answers there: is `task` or `cluster` in TF_CONFIG wrong?" in error_of(chief)
    with pytest.raises(StartError):
        member.result(10)


def test_differing_addresses_of_a_worker_are_reported(started):
    """No worker listens at the address, so only the messages show the difference."""
    two = cluster(2)
    original, moved = two.addresses[1], f"127.0.0.1:{free_ports(1)[0]}"
    chief = started(two, 0, 1.0)
    member = started(with_other_port(two, 1, moved.rpartition(":")[2]), 1, 0.8)
    text = error_of(member)
    assert f"at {original} (in this TF_CONFIG: {moved}): nothing" in text
    assert "does its TF_CONFIG name the same address?" in error_of(chief)


def test_differing_address_of_the_chief_is_reported(started):
    two = cluster(2)
    member = started(with_other_port(two, 0, free_ports(1)[0]), 1, 3.0)
    text = error_of(started(two, 0, 1.0))
    assert f"has not joined; does its TF_CONFIG name worker 0 at {two.addresses[0]}?" in text
    error_of(member)


def test_worker_that_disconnects_is_missing_again(started):
    three = cluster(3)
    chief = started(three, 0)
    member = Member(dataclasses.replace(three, rank=1), 10.0)
    with ThreadPoolExecutor() as pool:
        disconnected = pool.submit(lambda: asyncio.run(member.run()))
        connect(three.addresses[1]).close()
        time.sleep(0.4)
        member.cancel()
        with pytest.raises(asyncio.CancelledError):
            disconnected.result(10)
    other = started(three, 2)
    time.sleep(0.3)
    assert not chief.done() and not other.done()
    for future in (started(three, 1), chief, other):
        future.result(10)


def test_arbitrary_bytes_do_not_disturb_the_rendezvous(started):
    two = cluster(2)
    chief = started(two, 0)
    host, _, port = two.addresses[0].rpartition(":")
    connect(two.addresses[0]).close()
    rng = random.Random(0)
    texts = [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        b"tf_redsync {}\n",
        b"tf_redsync []\n",
        b"tf_redsync " + b"[" * 100_000 + b"\n",
        b'tf_redsync {"challenge": 1}\n',
        b'tf_redsync {"challenge": "' + b"a" * 32 + b'"}\ntf_redsync ' + b"b" * 64 + b" {}\n",
        b"tf_redsync " + b"x" * (handshake.LIMIT + 10) + b"\n",
        *(rng.randbytes(rng.randrange(100)) for _ in range(50)),
    ]
    kept = []
    for text in texts:
        connection = socket.create_connection((host, int(port)))
        with contextlib.suppress(OSError):
            connection.sendall(text)
        kept.append(connection)
    for rank in (-1, 7, True, "1"):  # peers that know the (empty) secret
        one = RawPeer(socket.create_connection((host, int(port))), "")
        one.send(rank=rank, tasks=["worker:0", "worker:1"], nonce="", join=True)
    for future in (started(two, 1), chief):
        future.result(10)
    for connection in kept:
        connection.close()


def test_can_be_disabled(monkeypatch):
    monkeypatch.setenv(environment.HANDSHAKE, "0")
    started_with(cluster(2), 1.0)
    monkeypatch.setenv(environment.HANDSHAKE, "off")
    with pytest.raises(ValueError, match="`TF_REDSYNC_HANDSHAKE` must be 0 or 1.*'off'"):
        started_with(cluster(2), 1.0)


ARGUMENTS = {
    "negative": (-1.0, None, "`start_timeout` must be a number of seconds above 0"),
    "nan": (float("nan"), None, "Received: start_timeout=nan"),
    "text": ("10", None, "Received: start_timeout='10'"),
    "environment": (None, "ten", "`VARIABLE` must be a number of seconds.*VARIABLE='ten'"),
    "environment_zero": (None, "0", "VARIABLE='0'"),
}


@loop("name", ARGUMENTS)
def test_bad_seconds(name):
    value, variable, words = ARGUMENTS[name]
    with pytest.MonkeyPatch.context() as patch:
        if variable is not None:
            patch.setenv("VARIABLE", variable)
        with pytest.raises(ValueError, match=words):
            environment.seconds("start_timeout", value, "VARIABLE")


def test_argument_overrides_the_environment(monkeypatch):
    assert environment.seconds("a", None, "VARIABLE") is None
    monkeypatch.setenv("VARIABLE", "7.5")
    assert environment.seconds("a", None, "VARIABLE") == 7.5
    assert environment.seconds("a", 3, "VARIABLE") == 3
    assert environment.seconds("a", float("inf"), "VARIABLE") == float("inf")


def resolver(spec, task_type, task_id):
    return tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(spec), task_type=task_type, task_id=task_id
    )


CLUSTERS = {
    "workers": ({"worker": ["a:1", "b:2"]}, "worker", 1, ("a:1", "b:2"), 1),
    "chief": ({"worker": ["b:2", "c:3"], "chief": ["a:1"]}, "worker", 0, ("a:1", "b:2", "c:3"), 1),
    "text": ({"worker": ["a:1", "b:2"]}, "worker", "0", ("a:1", "b:2"), 0),
    "evaluator": ({"worker": ["a:1", "b:2"], "evaluator": ["c:3"]}, "evaluator", 0, None, None),
    "alone": ({"worker": ["a:1"]}, "worker", 0, None, None),
    "nothing": ({}, None, None, None, None),
}


@loop("name", CLUSTERS)
def test_clusters_that_need_a_rendezvous(name):
    spec, task_type, task_id, addresses, rank = CLUSTERS[name]
    found = Cluster.of(resolver(spec, task_type, task_id))
    assert (found and (found.addresses, found.rank)) == (addresses and (addresses, rank))


def test_clusters_that_cannot_train():
    for workers in (["a:1"], ["a:1", "b:2"]):  # TensorFlow's workers would wait for the server
        with pytest.raises(ValueError, match="`ps`.*c:3"):
            Cluster.of(resolver({"worker": workers, "ps": ["c:3"]}, "worker", 0))
    with pytest.raises(ValueError, match="evaluator.*no strategy"):
        Cluster.of(resolver({"worker": ["a:1", "b:2"]}, "evaluator", 0))
