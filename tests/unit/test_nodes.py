"""`tf-redsync launch --nodes`: real launchers on the loopback interface, without TensorFlow."""

import argparse
import asyncio
import collections
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.loops import loop
from tests.processes import AS_COMMAND, alive
from tf_redsync import launch
from tf_redsync.cli import launch as launcher
from tf_redsync.cli import node_agent, node_rendezvous, options, output
from tf_redsync.cli.command_line import Parser
from tf_redsync.cli.membership import Round, Settings
from tf_redsync.cli.processes import TimeLimits, Worker
from tf_redsync.cluster import handshake

ROOT = Path(__file__).resolve().parents[2]
SECRET = "s3cret"
PATIENCE = 60.0
# The command, which waits one second for further nodes and for a worker that handles SIGUSR1.
IMPATIENT = f"""
{AS_COMMAND}
from tf_redsync.cli import main, membership, node_agent
membership.JOIN_SECONDS = node_agent._OBSTACLE_SECONDS = 1.0
raise SystemExit(main.main())
"""
# Each worker prints a line with its rank, then trains until the file `end` appears. Like the
# callback, all workers exit with 75 after SIGUSR1 to one of them, if they handle it.
TRAIN = """
import json, os, pathlib, signal, sys, time
here = pathlib.Path(sys.argv[1])
config = json.loads(os.environ["TF_CONFIG"])
rank, workers = config["task"]["index"], config["cluster"]["worker"]
attempt = os.environ["TF_REDSYNC_RESTART"]
saved = here / f"saved{attempt}"
if not (here / "deaf").exists():
    signal.signal(signal.SIGUSR1, lambda *_: saved.touch())
if (here / "trap").exists():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("RANK", rank, "OF", len(workers), "ROUND", attempt, "PID", os.getpid(), flush=True)
(here / f"began{attempt}.{rank}").touch()
while not (here / "end").exists():
    if saved.exists():
        sys.exit(75)
    fails = (here / f"fail{attempt}").exists() and (here / f"began{attempt}.0").exists()
    if fails and rank == 1:
        raise ValueError("bad batch")
    time.sleep(0.02)
"""


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    monkeypatch.setenv("TF_REDSYNC_JOB", SECRET)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


class Process:
    """A running command of `tf-redsync` and its output."""

    def __init__(self, *words, code=None, **env):
        self.lines = []
        program = ["-m", "tf_redsync"] if code is None else ["-c", code]
        self.process = subprocess.Popen(
            [sys.executable, *program, *words], text=True, env={**os.environ, **env},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            cwd=ROOT, start_new_session=True,
        )  # fmt: skip
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self):
        self.lines.extend(self.process.stdout)

    @property
    def text(self):
        return "".join(self.lines)

    @property
    def rounds(self):
        """Rank and number of workers of its only worker, by round."""
        found = re.findall(r"RANK (\d+) OF (\d+) ROUND (\d+)", self.text)
        return {int(number): (int(rank), int(workers)) for rank, workers, number in found}

    @property
    def worker(self):
        """Process ID of its newest worker."""
        return int(re.findall(r"PID (\d+)", self.text)[-1])

    def kill(self, number=signal.SIGKILL):
        os.kill(self.process.pid, number)

    def code(self):
        code = self.process.wait(PATIENCE)
        self.reader.join(PATIENCE)  # a remaining worker may hold the pipe open
        return code


class Hosts:
    def __init__(self, folder):
        self.folder, self.all = folder, []
        self.port = launch.free_ports(1)[0]
        (folder / "train.py").write_text(TRAIN)

    def start(self, *words, nodes="2:3", **env):
        flags = ["--nodes", nodes, "--rendezvous", f"127.0.0.1:{self.port}", "--grace", "0.2"]
        script = [str(self.folder / "train.py"), str(self.folder)]
        return self.keep(Process("launch", *flags, *words, *script, **env))

    def keep(self, process):
        self.all.append(process)
        return process

    def until(self, condition, seconds=PATIENCE):
        limit = time.monotonic() + seconds
        while not condition():
            texts = "\n".join(f"--- {one.process.poll()}\n{one.text}" for one in self.all)
            assert time.monotonic() < limit, texts
            time.sleep(0.02)

    def until_round(self, number, *processes):
        self.until(lambda: all(number in one.rounds for one in processes))

    def end(self):
        (self.folder / "end").touch()


@pytest.fixture
def hosts(tmp_path):
    started = Hosts(tmp_path)
    yield started
    for one in started.all:
        with contextlib.suppress(ProcessLookupError):
            one.kill()
        one.code()


def test_new_node_replaces_a_dead_one_at_a_checkpoint(hosts):
    a, b, c = (hosts.start() for _ in range(3))
    hosts.until_round(0, a, b, c)
    assert {one.rounds[0] for one in (a, b, c)} == {(0, 3), (1, 3), (2, 3)}
    server = next(one for one in (a, b, c) if "serves the rendezvous" in one.text)
    victim = next(one for one in (a, b, c) if one is not server)
    survivors = [one for one in (a, b, c) if one is not victim]
    before = [one.rounds[0][0] for one in survivors]
    worker = victim.worker
    victim.kill()
    hosts.until(lambda: not alive(worker), 2.0)  # its worker dies with it
    hosts.until_round(1, *survivors)
    after = [one.rounds[1] for one in survivors]
    assert sorted(after) == [(0, 2), (1, 2)]
    assert (after[0] < after[1]) == (before[0] < before[1])
    joined = hosts.start()
    hosts.until_round(2, *survivors, joined)
    assert joined.rounds[2] == (2, 3) and [one.rounds[2][0] for one in survivors] == [
        rank for rank, _ in after
    ]
    assert (hosts.folder / "saved1").exists()
    hosts.end()
    assert [one.code() for one in (*survivors, joined)] == [0, 0, 0]


def test_without_a_handler_the_new_node_waits_and_both_sides_report_it(hosts):
    (hosts.folder / "deaf").touch()
    a, b = (hosts.start(code=IMPATIENT) for _ in range(2))
    hosts.until_round(0, a, b)
    c = hosts.start(code=IMPATIENT)
    hosts.until(lambda: "SIGUSR1" in c.text and "SIGUSR1" in a.text + b.text)
    assert alive(a.worker) and alive(b.worker)
    hosts.end()
    assert [one.code() for one in (a, b, c)] == [0, 0, 0] and not c.rounds


def test_failures_count_and_all_nodes_name_the_cause(hosts):
    for number in range(2):
        (hosts.folder / f"fail{number}").touch()
    a, b = (hosts.start("--max-restarts", "1", nodes="2") for _ in range(2))
    assert a.code() == b.code() == 1
    for one in (a, b):
        assert set(one.rounds) == {0, 1}
        assert "worker 1 failed first: ValueError: bad batch" in one.text.splitlines()[-1]


def test_worker_that_finishes_after_the_stop_joins_the_next_round(hosts):
    a, b = (hosts.start("--max-restarts", "1", "--grace", "50", nodes="2") for _ in range(2))
    hosts.until_round(0, a, b)
    (hosts.folder / "fail0").touch()
    hosts.until(lambda: "must end" in a.text + b.text)
    hosts.end()
    assert [a.code(), b.code()] == [0, 0] and set(a.rounds) == set(b.rounds) == {0, 1}


def test_preempted_node_leaves_with_a_checkpoint(hosts):
    a, b, c = (hosts.start() for _ in range(3))
    hosts.until_round(0, a, b, c)
    server = next(one for one in (a, b, c) if "serves the rendezvous" in one.text)
    preempted = next(one for one in (a, b, c) if one is not server)
    preempted.kill(signal.SIGUSR1)
    assert preempted.code() == 75
    survivors = [one for one in (a, b, c) if one is not preempted]
    hosts.until_round(1, *survivors)
    for one in survivors:
        one.kill(signal.SIGUSR1)  # a scheduler ends the whole job
    assert [one.code() for one in survivors] == [75, 75], [one.text for one in survivors]


def test_workers_that_finish_after_sigterm_have_finished(hosts):
    (hosts.folder / "trap").touch()
    both = [hosts.start(nodes="1:2") for _ in range(2)]
    hosts.until_round(0, *both)
    leaving = next(one for one in both if "serves the rendezvous" not in one.text)
    leaving.kill(signal.SIGTERM)
    hosts.until(lambda: "forwarded" in leaving.text)
    hosts.end()
    assert [one.code() for one in both] == [0, 0]
    assert all(set(one.rounds) == {0} for one in both)


def test_lost_rendezvous_is_taken_over(hosts):
    words = ("rendezvous", "--port", str(hosts.port), "--host", "127.0.0.1")
    rendezvous = hosts.keep(Process(*words, code=IMPATIENT))
    hosts.until(lambda: answers(hosts.port))
    a, b = (hosts.start(code=IMPATIENT) for _ in range(2))
    hosts.until_round(0, a, b)
    workers = [one.worker for one in (a, b)]
    rendezvous.kill()
    # Both launchers run on its host: one of them serves from now on.
    hosts.until(lambda: "takes it over" in a.text + b.text)
    joined = hosts.start(code=IMPATIENT)
    assert all(alive(worker) for worker in workers)
    hosts.until_round(1, a, b, joined)
    hosts.end()
    assert [one.code() for one in (a, b, joined)] == [0, 0, 0]


@pytest.fixture
def debian(monkeypatch):
    """A host that resolves its own name, `nodea`, to 127.0.1.1."""
    real = socket.getaddrinfo

    def resolve(host, *args, **kwargs):
        return real("127.0.1.1" if host == "nodea" else host, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)


def test_rendezvous_at_a_loopback_name_listens_on_all_addresses(debian):
    port = launch.free_ports(1)[0]
    found = {}
    for host in ("nodea", "localhost", "127.0.1.1"):
        with asyncio.run(node_rendezvous.own_socket(host, port)) as listening:
            assert listening is not None
            found[host] = []
            for address in ("127.0.0.1", "127.0.1.1", "127.9.9.9"):
                with socket.socket() as caller:
                    found[host].append(caller.connect_ex((address, port)) == 0)
    all_reachable = [True, True, True]
    assert found == {
        "nodea": all_reachable, "localhost": [True, False, False], "127.0.1.1": [False, True, False]
    }  # fmt: skip


def test_rendezvous_at_a_name_of_several_own_addresses_listens_on_all(monkeypatch):
    """Other hosts may resolve the name to another one of them."""
    names = {"nodea": ["127.0.0.2", "127.0.0.3"], "nodeb": ["192.0.2.1", "127.0.0.2"]}
    kind = (socket.AF_INET, socket.SOCK_STREAM, 6, "")

    def resolve(host, port, *_args, **_kwargs):
        return [(*kind, (address, port)) for address in names.get(host, [host])]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(node_rendezvous, "is_loopback", lambda _: False)  # like a network's
    port = launch.free_ports(1)[0]
    found = {}
    for host in (*names, "127.0.0.2"):
        with asyncio.run(node_rendezvous.own_socket(host, port)):
            found[host] = []
            for address in ("127.0.0.2", "127.0.0.3"):
                with socket.socket() as caller:
                    found[host].append(caller.connect_ex((address, port)) == 0)
            assert asyncio.run(node_rendezvous.own_socket(host, port)) is None  # taken
    assert found == {"nodea": [True, True], "nodeb": [True, False], "127.0.0.2": [True, False]}


@pytest.mark.parametrize(
    ("rendezvous", "called_from", "address", "expected"),
    [
        ("nodea", "10.0.0.1", None, "10.0.0.1"),
        ("nodea", "127.0.0.1", None, "nodea"),  # its own name, which others resolve
        ("127.0.0.1", "127.0.0.1", None, "127.0.0.1"),
        ("localhost", "::1", None, "::1"),
        ("nodea", "127.0.0.1", "10.0.0.1", "10.0.0.1"),
    ],
)
def test_address_at_which_other_hosts_reach_a_node(rendezvous, called_from, address, expected):
    nodes = node_agent.Nodes(Settings(2, 2, 0), rendezvous, 1, 1, 1.0, SECRET, address)
    assert nodes.own_host(called_from) == expected


def answers(port):
    async def call():
        (await handshake.call(f"127.0.0.1:{port}", SECRET)).close()

    try:
        asyncio.run(call())
    except handshake.NoAnswer:
        return False
    return True


def test_mismatched_secret_is_reported_to_slow_readers(hosts):
    hosts.start()
    hosts.until(lambda: answers(hosts.port))

    async def call():
        line = await handshake.call(f"127.0.0.1:{hosts.port}", "other")
        for _ in range(5):
            await asyncio.sleep(0.1)
            line.send(kind="alive")
        try:
            with pytest.raises(handshake.NoAnswer) as error:
                await line.receive()
        finally:
            line.close()
        return error.value.unsigned

    assert asyncio.run(call())


def test_mismatched_secret_gets_no_answer(hosts):
    a = hosts.start()
    hosts.until(lambda: answers(hosts.port))
    stranger = hosts.start("--rendezvous-timeout", "2", TF_REDSYNC_JOB="other")
    assert stranger.code() == 69 and "TF_REDSYNC_JOB" in stranger.text
    assert a.text.count("called with another TF_REDSYNC_JOB") == 1  # of several calls


def test_missing_nodes_end_the_wait(hosts):
    a = hosts.start("--rendezvous-timeout", "1")
    assert a.code() == 69 and "1 of at least 2 nodes are here" in a.text


def test_forged_lines_are_ignored(hosts):
    a, b = (hosts.start(nodes="2") for _ in range(2))
    hosts.until_round(0, a, b)

    async def attack(text):
        reader, writer = await asyncio.open_connection("127.0.0.1", hosts.port)
        writer.write(text)
        await asyncio.wait_for(reader.read(), 10)
        writer.close()

    forged = b'tf_redsync {"challenge": "' + b"0" * 32 + b'"}\n'
    forged += b"tf_redsync " + b"0" * 64 + b' {"kind": "leaves"}\n'
    for text in (forged, b"GET / HTTP/1.1\r\n\r\n", b"\0" * 100, b"tf_redsync [1]\n"):
        asyncio.run(attack(text))
    assert alive(a.worker) and alive(b.worker)
    hosts.end()
    assert [a.code(), b.code()] == [0, 0] and set(a.rounds) == set(b.rounds) == {0}


def test_mismatched_settings_are_rejected(hosts):
    hosts.start()
    hosts.until(lambda: answers(hosts.port))
    other = hosts.start(nodes="2:4")
    assert other.code() == 2 and "--nodes 2:4" in other.text and "--nodes 2:3" in other.text


def test_workers_of_a_node_have_adjacent_ranks(hosts):
    a, b = (hosts.start("--workers-per-node", "2", nodes="2") for _ in range(2))
    hosts.until(lambda: all(one.text.count("RANK") == 2 for one in (a, b)))
    ranks = [sorted(re.findall(r"RANK (\d) OF 4", one.text)) for one in (a, b)]
    assert sorted(ranks) == [["0", "1"], ["2", "3"]]
    hosts.end()
    assert [a.code(), b.code()] == [0, 0]


def test_timeout_covers_the_wait_for_other_nodes(hosts):
    one = hosts.start("--timeout", "2", "--rendezvous-timeout", "20")
    assert one.code() == 124 and "timeout" in one.text


def test_timeout_covers_the_time_after_the_workers(monkeypatch, capfd):
    monkeypatch.setattr(node_agent, "_FINISHED_SECONDS", 20.0)
    nodes = node_agent.Nodes(Settings(1, 2, 0), "127.0.0.1", 1, 1, 1.0, SECRET)
    agent = node_agent.NodeAgent(
        nodes, TimeLimits(0.1, 1.0, 1.0), collections.deque(), lambda *_: print
    )
    started_round = Round(0, (agent.link.key,), (("h:1",),), 0)
    assert node_agent._RunningRound(agent, started_round)._finished() == 0
    assert "timeout" in capfd.readouterr().err


def test_end_of_the_job_ends_the_workers_of_an_earlier_round():
    """A node that was lost reconnects while its workers end and the other nodes have finished."""
    nodes = node_agent.Nodes(Settings(1, 2, 0), "127.0.0.1", 1, 1, 1.0, SECRET)
    to = output.Output(None, False, False)

    def start(configs, number):
        script = [sys.executable, "-c", "import time; time.sleep(30)"]
        return lambda job: job.add(Worker(0, script, os.environ, None, to.printer(0)))

    agent = node_agent.NodeAgent(nodes, TimeLimits(5.0, 0.2, 0.2), collections.deque(), start)
    agent.link.missing = None  # the rendezvous has answered
    agent.link.inbox.put({"end": 3, "text": "worker 0 failed"})
    running = node_agent._RunningRound(agent, Round(0, (agent.link.key,), (("h:1",),), 0))
    assert running.run() == 3


@pytest.mark.parametrize("descriptors", [6, 12])
def test_too_few_descriptors_are_an_error_in_one_line(tmp_path, descriptors):
    (tmp_path / "train.py").write_text("")
    limits = f"resource.setrlimit(resource.RLIMIT_NOFILE, ({descriptors}, {descriptors}))"
    code = f"{AS_COMMAND}import resource; from tf_redsync.cli import launch; "
    words = ["--nodes", "1", "--rendezvous", f"127.0.0.1:{launch.free_ports(1)[0]}"]
    done = subprocess.run(
        [sys.executable, "-c", f"{code}{limits}; sys.exit(launch.main(sys.argv[1:]))", *words,
         "--timeout", "20", str(tmp_path / "train.py")],
        capture_output=True, text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "Too many open files" in done.stderr and "ulimit" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_ends_a_rendezvous(hosts, number):
    """For process 1, as in a container, the kernel ignores signals without a handler."""
    ran = hosts.keep(Process("rendezvous", "--port", str(hosts.port), "--host", "127.0.0.1"))
    hosts.until(lambda: answers(hosts.port))
    ran.kill(number)
    assert ran.code() == 128 + number and "Traceback" not in ran.text


def test_address_that_a_rendezvous_cannot_listen_on_is_named(monkeypatch, capsys):
    monkeypatch.setenv("TF_REDSYNC_JOB", SECRET)
    with pytest.raises(SystemExit) as ended:
        node_rendezvous.COMMAND.main(["--port", "29511", "--host", "203.0.113.9"])
    shown = capsys.readouterr().err
    assert ended.value.code == 2 and "`--host`" in shown and "--host '203.0.113.9'" in shown


def test_rendezvous_without_nodes_times_out(hosts):
    ran = hosts.keep(
        Process("rendezvous", "--port", str(hosts.port), "--rendezvous-timeout", "0.5")
    )
    assert ran.code() == 69


def test_detects_whether_a_process_handles_the_signal():
    code = "import signal, sys\nif int(sys.argv[1]): signal.signal(signal.SIGUSR1, print)\n"
    code += "print('ready', flush=True)\nsys.stdin.read()"
    for handles in (0, 1):
        with subprocess.Popen(
            [sys.executable, "-c", code, str(handles)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        ) as process:  # fmt: skip
            process.stdout.readline()
            assert node_agent.stops_on_request(process.pid) is bool(handles)
            process.stdin.close()
    assert not node_agent.stops_on_request(process.pid)


def test_checkpoint_is_requested_until_the_round_stops(monkeypatch):
    monkeypatch.setattr(node_agent, "_ASK_SECONDS", 0.01)
    monkeypatch.setattr(node_agent, "_REPEAT_SECONDS", 0.05)
    nodes = node_agent.Nodes(Settings(1, 2, 0), "127.0.0.1", 1, 1, 1.0, SECRET)
    limits = TimeLimits(None, 1.0, 1.0)
    agent = node_agent.NodeAgent(nodes, limits, collections.deque(), lambda *_: print)
    running = node_agent._RunningRound(agent, Round(0, (agent.link.key,), (("h:1",),), 0))
    code = "import signal\nsignal.signal(signal.SIGUSR1, lambda *_: print('asked', flush=True))\n"
    code += "print('ready', flush=True)\nwhile True:\n    signal.pause()"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    job = argparse.Namespace(processes=[process.pid], failing=False, end=lambda *_: None)

    def watch(rounds, **words):
        agent.link.inbox.put(words)
        for _ in range(rounds):
            running._watch(job)
            time.sleep(0.01)

    with process, contextlib.ExitStack() as stack:
        stack.callback(process.kill)
        process.stdout.readline()
        os.set_blocking(process.stdout.fileno(), False)
        watch(50, regroup=0, asks=True)
        watch(1, stop=0, why="a checkpoint was made", saves=True)
        time.sleep(1.0)
        assert process.stdout.read().count(b"asked") > 1
        watch(30)
        assert not process.stdout.read()


def parse(*words):
    parser = Parser()
    launcher.COMMAND.configure(parser)
    return parser.parse_args([*words, "train.py"])


GOOD = ("--nodes", "2:4", "--rendezvous", "host:29500")


def test_options():
    nodes = options.nodes(parse(*GOOD, "--workers-per-node", "3", "--max-restarts", "2"))
    assert (nodes.settings.minimum, nodes.settings.maximum, nodes.settings.max_restarts) == (
        2,
        4,
        2,
    )
    assert (nodes.host, nodes.port, nodes.workers, nodes.timeout) == ("host", 29500, 3, 600.0)
    assert options.nodes(parse("-n", "2")) is None
    three = options.nodes(parse("--nodes", "3", "--rendezvous", "[fe80::1]:5"))
    assert (three.settings.minimum, three.settings.maximum) == (3, 3)
    assert (three.host, three.rendezvous) == ("fe80::1", "[fe80::1]:5")


@loop(
    ("words", "named"),
    [
        (("--nodes", "2:4"), "--rendezvous"),
        (("--nodes", "0:4", *GOOD[2:]), "'0:4'"),
        (("--nodes", "4:2", *GOOD[2:]), "'4:2'"),
        (("--nodes", "two", *GOOD[2:]), "'two'"),
        ((*GOOD[:2], "--rendezvous", "host"), "'host'"),
        ((*GOOD[:2], "--rendezvous", "host:0"), "'host:0'"),
        ((*GOOD[:2], "--rendezvous", "host:99999"), "'host:99999'"),
        ((*GOOD[:2], "--rendezvous", "0.0.0.0:29500"), "'0.0.0.0:29500'"),
        ((*GOOD[:2], "--rendezvous", "[::]:29500"), r"'\[::\]:29500'"),
        ((*GOOD, "--workers-per-node", "0"), "--workers-per-node"),
        ((*GOOD, "--rendezvous-timeout", "0"), "--rendezvous-timeout"),
        ((*GOOD, "--max-restarts", "-1"), "max_restarts=-1|-1"),
        ((*GOOD, "-n", "2"), "-n 2"),
        ((*GOOD, "--hosts", "a:1"), "--hosts a:1"),
        ((*GOOD, "--slurm"), "--slurm"),
        ((*GOOD, "--kubernetes", "2"), "--kubernetes 2"),
        ((*GOOD, "--port", "2000"), "--port 2000"),
        ((*GOOD, "--min-workers", "1"), "--min-workers 1"),
        ((*GOOD, "--isolate", "yes"), "--isolate yes"),
        (("-n", "2", "--rendezvous", "host:1"), "--rendezvous host:1"),
        (("-n", "2", "--workers-per-node", "2"), "--workers-per-node 2"),
    ],
)
def test_bad_options(words, named):
    with pytest.raises(ValueError, match=named):
        options.nodes(parse(*words))


def test_secret_is_required(monkeypatch):
    monkeypatch.delenv("TF_REDSYNC_JOB")
    with pytest.raises(ValueError, match="TF_REDSYNC_JOB"):
        options.nodes(parse(*GOOD))


def test_existing_tf_config_conflicts(tmp_path, monkeypatch, capsys):
    config = {"cluster": {"worker": ["a:1", "b:2"]}, "task": {"type": "worker", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    (tmp_path / "train.py").touch()
    with pytest.raises(SystemExit):
        launcher.main([*GOOD, str(tmp_path / "train.py")])
    shown = capsys.readouterr().err
    assert "TF_CONFIG is already set" in shown and "--nodes to start" in shown


def test_flags_after_the_script_are_recognized(tmp_path):
    (tmp_path / "train.py").touch()
    args = argparse.Namespace(**{**vars(parse()), "script": [str(tmp_path / "train.py"), *GOOD]})
    with pytest.raises(ValueError, match="--nodes"):
        options.command(args)
