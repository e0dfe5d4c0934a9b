"""Several machines: hosts on the command line, SLURM and Kubernetes jobs, workers over SSH.

The tests use a real `sshd` on its own port if openssh-server is installed, else an `ssh` stand-in
that runs the command locally.
"""

import itertools
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.loops import loop
from tests.processes import AS_COMMAND, alive
from tf_redsync.cli import launch, restarts, schedulers
from tf_redsync.cli import ssh as over_ssh
from tf_redsync.cli.worker_environment import cores_of

ROOT = Path(__file__).resolve().parents[2]
SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
FAKE = """#!/bin/sh
# An `ssh` to this machine; host "unreachable" fails.
while [ "${1#-}" != "$1" ]; do shift; done
if [ "$1" = unreachable ]; then echo "ssh: connect to host $1: Connection refused" >&2; exit 255; fi
shift
exec env -i HOME="$HOME" PATH="$PATH" USER="$USER" sh -c "$*"  # as sshd does
"""
WORKER = """
import json, os, sys, time
config = json.loads(os.environ["TF_CONFIG"])
index = config["task"]["index"]
"""
COMMANDS = """
def commands():
    found = ""
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        try:
            found += open(f"/proc/{pid}/cmdline").read() + " "
        except OSError:
            pass
    return found

"""


@pytest.fixture(scope="module")
def ssh(tmp_path_factory):
    """Returns a command that works like `ssh` with a reachable host "localhost"."""
    folder = tmp_path_factory.mktemp("ssh")
    if SSHD is None or not shutil.which("ssh") or os.geteuid():
        (folder / "ssh").write_text(FAKE)
        (folder / "ssh").chmod(0o755)
        yield str(folder / "ssh")
        return
    for name in ("key", "host"):
        words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
        subprocess.run(words, check=True, timeout=30)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    Path("/run/sshd").mkdir(exist_ok=True)
    (folder / "config").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {folder}/host\nPidFile none\n"
        f"AuthorizedKeysFile {folder}/key.pub\nStrictModes no\nUsePAM no\n"
    )
    server = subprocess.Popen([SSHD, "-D", "-f", str(folder / "config")], stderr=subprocess.DEVNULL)
    try:
        limit = time.monotonic() + 20
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert time.monotonic() < limit
            time.sleep(0.05)
        options = f"-F none -p {port} -i {folder}/key -o BatchMode=yes -o LogLevel=ERROR"
        yield f"ssh {options} -o UserKnownHostsFile=/dev/null -o StrictHostKeyChecking=no"
    finally:
        server.kill()
        server.wait()


# The launcher, which gives up failed connections early.
PROGRAM = f"""
{AS_COMMAND}
from tf_redsync.cli import launch, restarts, ssh
ssh.FIRST_SECONDS, restarts.PAUSES = 0.1, ()
raise SystemExit(launch.main())
"""


def command_line(ssh, *flags):
    return [sys.executable, "-c", PROGRAM, "--ssh", ssh, *map(str, flags)]


def run(ssh, *flags, cwd, **env):
    return subprocess.run(
        command_line(ssh, *flags), capture_output=True, text=True, timeout=60, cwd=cwd,
        env={**{k: v for k, v in os.environ.items() if k != "TF_CONFIG"}, "PYTHONPATH": str(ROOT),
             **env},
    )  # fmt: skip


def wait_until_dead(pid):
    limit = time.monotonic() + 20
    while alive(pid):
        assert time.monotonic() < limit
        time.sleep(0.05)


def test_arguments_environment_and_directory_are_forwarded(ssh, tmp_path):
    folder = tmp_path / 'it\'s a "folder" $HOME'
    folder.mkdir()
    (folder / "train.py").write_text(
        WORKER
        + COMMANDS
        + "print(json.dumps([config, sys.argv[1:], os.getcwd(), os.environ.get('TF_X'), "
        "os.environ.get('OWN'), os.environ.get('SECRET'), sorted(os.sched_getaffinity(0)), "
        "os.environ['TF_NUM_INTRAOP_THREADS'], os.environ['TF_REDSYNC_JOB'], commands()]))"
    )
    odd = ["a b", "*", "it's", '"$HOME"', "--x=;rm", "é\n2"]
    env = {"TF_X": odd[2] + odd[3], "OWN": "o w n", "SECRET": "s"}
    flags = ["--hosts", "localhost:2", "--env", "OWN", "--cores-per-worker", "1", "--port", "23456"]
    ran = run(ssh, *flags, "--log-dir", "logs", "train.py", *odd, cwd=folder, **env)
    assert ran.returncode == 0, ran.stderr
    found = [json.loads((folder / "logs" / f"worker_{i}.log").read_text()) for i in range(2)]
    addresses = ["localhost:23456", "localhost:23457"]
    for index, (config, argv, cwd, x, own, secret, cores, threads, job, commands) in enumerate(
        found
    ):
        assert config == {
            "cluster": {"worker": addresses},
            "task": {"type": "worker", "index": index},
        }
        assert argv == odd and Path(cwd) == folder.resolve()
        assert (x, own, secret) == (env["TF_X"], env["OWN"], None)
        assert cores == [sorted(os.sched_getaffinity(0))[index]] and threads == "1"
        assert "train.py" in commands and len(job) >= 32 and job not in commands
    assert found[0][-2] == found[1][-2]
    assert ran.stdout == (folder / "logs" / "worker_0.log").read_text()


def test_failed_worker_is_reported_with_its_host(ssh, tmp_path):
    (tmp_path / "train.py").write_text(
        WORKER + "print('line', index)\nif index:\n    os.kill(os.getpid(), 6)\ntime.sleep(60)"
    )
    ran = run(ssh, "--hosts", "localhost:2", "--grace", "0.2", "train.py", cwd=tmp_path)
    assert ran.returncode == 128 + signal.SIGABRT
    assert "worker 1 on localhost was ended by SIGABRT" in ran.stderr
    assert "worker 0 did not end: killed by SIGKILL" in ran.stderr


@pytest.mark.parametrize("how", ["timeout", signal.SIGINT, signal.SIGKILL])
def test_no_remote_process_survives(ssh, tmp_path, how):
    (tmp_path / "train.py").write_text(
        WORKER + "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "signal.signal(signal.SIGINT, lambda *_: print('interrupted', flush=True))\n"
        "os.fork()\nos.write(1, b'%d\\n' % os.getpid())\n"
        "while True:\n    time.sleep(0.1)\n"
    )
    limit = ["--timeout", "10"] if how == "timeout" else []
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    grace = ["--grace", "3", "--stop-grace", "3"]
    line = command_line(ssh, "--hosts", "localhost", *grace, *limit, "train.py")
    with subprocess.Popen(
        line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, cwd=tmp_path
    ) as job:
        pids = [int(job.stdout.readline().split()[-1]) for _ in range(2)]
        assert all(map(alive, pids))
        if how != "timeout":
            job.send_signal(how)
        out, err = job.communicate(timeout=30)
    assert job.returncode == {"timeout": 124, signal.SIGINT: 130, signal.SIGKILL: -9}[how]
    assert ("interrupted" in out) == (how == signal.SIGINT)
    assert ("killed by SIGKILL" in err) == (how != signal.SIGKILL)
    for pid in pids:
        wait_until_dead(pid)


def test_unusable_host_is_reported_before_anything_starts(ssh, tmp_path):
    (tmp_path / "train.py").write_text("open('started', 'w')")
    bare = tmp_path / "bare"  # an interpreter without the package
    bare.write_text(f'#!/bin/sh\nunset PYTHONPATH\nexec {sys.executable} -I -S "$@"\n')
    bare.chmod(0o755)
    broken = "ssh -F none -o BatchMode=yes -o ConnectTimeout=5 -p 1" if SSHD else ssh
    cases = [
        (
            broken,
            ["--hosts", "unreachable" if broken == ssh else "127.0.0.1"],
            "without a password",
        ),
        (ssh, ["--hosts", "localhost", "--python", "/no/python"], "/no/python"),
        (
            ssh,
            ["--hosts", "localhost", "--python", bare],
            f"{bare} has no tf_redsync",
        ),
    ]
    for command, flags, words in cases:
        ran = run(command, *flags, "train.py", cwd=tmp_path)
        assert ran.returncode == launch.NO_HOST_EXIT_CODE == 69, ran.stderr
        assert f"host {flags[1]}: " in ran.stderr and words in ran.stderr
        assert "Traceback" not in ran.stderr and ran.stdout == ""
    assert not (tmp_path / "started").exists()


def test_job_continues_without_an_unusable_host(ssh, tmp_path):
    (tmp_path / "train.py").write_text(WORKER + "print(len(config['cluster']['worker']))")
    selective = tmp_path / "ssh"  # resolves only one host
    real = shlex.join(shlex.split(ssh))
    selective.write_text(
        '#!/bin/bash\nif [ "$1" = lost ]; then echo "No route to host" >&2; exit 255; fi\n'
        f'shift; exec {real} localhost "$@"\n'
    )
    selective.chmod(0o755)
    flags = ["--hosts", "here:1,lost:1", "--max-restarts", "1", "--min-workers", "1"]
    ran = run(str(selective), *flags, "train.py", cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "[worker 0] 1\n"
    assert "without it: host lost:" in ran.stderr


def stand_in(path, body):
    """Writes an `ssh` that runs `body` first, and then the command on this machine."""
    path.write_text(f'#!/bin/bash\n{body}\nshift\nexec bash -c "$*"\n')
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def job(tmp_path, monkeypatch):
    """Returns a function that runs a script on hosts, with a stand-in of `ssh`."""

    def run_job(hosts, ssh_body, script, **kwargs):
        (tmp_path / "train.py").write_text(WORKER + script)
        ssh = stand_in(tmp_path / "ssh", ssh_body)
        remote = over_ssh.Remote(over_ssh.parse(hosts), ssh, sys.executable, None, {})
        command = [sys.executable, "train.py"]
        return launch.run(command, None, remote=remote, timeout=60, grace=0.5, **kwargs)

    monkeypatch.delenv("TF_CONFIG", raising=False)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(over_ssh, "_AGAIN_SECONDS", 0.1)
    monkeypatch.setattr(restarts, "PAUSES", (0.1,))
    return run_job


FAILS_ONCE = """
if [ $1 = b ] && mkdir tried; then echo "kex_exchange_identification: reset by peer"; exit 255; fi
"""


def test_failed_connection_is_opened_again(job):
    result = job("a,b", FAILS_ONCE, "print(index)")
    assert [worker.output.splitlines()[-1] for worker in result.workers] == ["0", "1"]
    assert result.exit_code == 0 and result.restarts == 0
    assert "host b: the connection failed" in result.message and "host a" not in result.message


def test_host_that_returns_after_a_restart_has_begun(job, monkeypatch):
    monkeypatch.setattr(over_ssh, "RESTART_SECONDS", 0.2)
    down = """
if [ $1 = b ] && [ -e down ]; then
    [ $(wc -l < down) -gt 6 ] && rm down || echo >> down
    exit 255
fi
"""
    script = """
if index and int(os.environ['TF_REDSYNC_RESTART']) == 0:
    open('down', 'w').close()
    sys.exit(3)
time.sleep(0.1)
"""
    result = job("a,b", down, script, max_restarts=9)
    assert result.exit_code == 0 and 2 <= result.restarts <= 8, result.message
    assert "restart 2 with 2 workers: host b: the connection failed" in result.message


def test_few_connections_to_a_host_are_opened_at_once(job, tmp_path, monkeypatch):
    monkeypatch.setattr(over_ssh, "AT_A_TIME", 2)
    result = job("a:5,b", "echo 1 >> $1; sleep 0.3; echo -1 >> $1", "print(index)")
    assert [worker.output for worker in result.workers] == [*"012345"]
    assert result.exit_code == 0
    steps = map(int, (tmp_path / "a").read_text().split())
    assert max(itertools.accumulate(steps)) == 2


def test_working_directory_keeps_symbolic_links(tmp_path, monkeypatch):
    (tmp_path / "target").mkdir()
    (tmp_path / "link").symlink_to("target")
    monkeypatch.chdir(tmp_path / "link")
    target, link = str(tmp_path.resolve() / "target"), str(tmp_path / "link")
    for shell, expected in ((link, link), (str(tmp_path), target), ("/no", target), (".", target)):
        monkeypatch.setenv("PWD", shell)
        assert over_ssh.working_directory() == expected
    monkeypatch.delenv("PWD")
    assert over_ssh.working_directory() == target


def test_connection_is_kept_for_half_of_the_heartbeat():
    variable = "TF_REDSYNC_HEARTBEAT_SECONDS"
    for heartbeat in ({}, {variable: "60"}, {variable: "20"}):
        assert over_ssh.default_command(heartbeat) == over_ssh.SSH
    assert over_ssh.default_command({variable: "240"}).endswith(" -o ServerAliveCountMax=12")
    with pytest.raises(ValueError, match=f"{variable}='x'"):
        over_ssh.default_command({variable: "x"})


@pytest.mark.parametrize("how", ["timeout", signal.SIGINT, signal.SIGTERM])
def test_job_ends_while_it_waits_for_a_host(ssh, tmp_path, how):
    (tmp_path / "train.py").write_text("open('started', 'w')")
    slow = tmp_path / "ssh"  # one host never answers
    real = shlex.join(shlex.split(ssh))
    slow.write_text(
        '#!/bin/bash\nif [ "$1" = slow ]; then echo $$ > pid; exec sleep 600; fi\n'
        f'shift; exec {real} localhost "$@"\n'
    )
    slow.chmod(0o755)
    flags = ["--hosts", "here,slow", "--max-restarts", "2", "--min-workers", "1", "--grace", "40"]
    flags += ["--timeout", "4"] if how == "timeout" else []
    line, env = command_line(str(slow), *flags, "train.py"), {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(line, stderr=subprocess.PIPE, text=True, env=env, cwd=tmp_path) as job:
        limit, pid = time.monotonic() + 20, tmp_path / "pid"
        try:
            while not (pid.exists() and pid.read_text()):
                assert time.monotonic() < limit
                time.sleep(0.05)
            if how != "timeout":
                job.send_signal(how)
            _, err = job.communicate(timeout=20)
        finally:
            job.kill()
    assert job.returncode == (124 if how == "timeout" else 128 + how), err
    assert "no worker is started" in err and "restart" not in err
    assert not (tmp_path / "started").exists()
    wait_until_dead(int(pid.read_text()))


# ------------------------------------------------------------------------------------- hosts


def test_hosts_and_hostfiles(tmp_path):
    assert over_ssh.parse("a:2, me@b") == [over_ssh.Host("a", 2), over_ssh.Host("me@b", 1)]
    assert over_ssh.parse("[fe80::1]:3") == [over_ssh.Host("[fe80::1]", 3)]
    assert over_ssh.parse("me@b")[0].address == "b"
    path = tmp_path / "hosts"
    path.write_text("# all\na slots=2\n\nme@b:3  # big\nc\n")
    assert over_ssh.read(str(path)) == [
        over_ssh.Host("a", 2),
        over_ssh.Host("me@b", 3),
        over_ssh.Host("c", 1),
    ]


BAD = {
    "none": (["--hosts", ""], "a host must be"),
    "number": (["--hosts", "a:0"], "Received: 'a:0'"),
    "option": (["--hosts", "-oProxyCommand=x"], "expected one argument"),
    "option2": (["--hosts=-oProxyCommand=x"], "Received: '-oProxyCommand=x'"),
    "option3": (["--hosts=-oProxyCommand=x@a"], "Received: '-oProxyCommand=x@a'"),
    "twice": (["--hosts", "a:1,a:2"], "'a:1,a:2'"),
    "local": (["--hosts", "localhost:1,b:1"], "Received: 'localhost:1,b:1'"),
    "file": (["--hostfile", "/no/file"], "`--hostfile` cannot be read"),
    "both": (["--hosts", "a", "--slurm"], "Received: --hosts, --slurm"),
    "n": (["-n", "2", "--hosts", "a"], "Received: -n 2"),
    "ssh": (["-n", "2", "--ssh", "x"], "Received: --ssh=x"),
    "env": (["--hosts", "a", "--env", "NOT_SET_HERE"], "Received: --env NOT_SET_HERE"),
    "port": (["-n", "2", "--port", "1"], "Received: --port 1"),
    "isolate": (
        ["--hosts", "a", "--isolate", "yes"],
        "cannot be combined with --hosts",
    ),
    "cores": (["-n", "2", "--cores-per-worker", "0"], "Received: cores_per_worker=0"),
    "many": (["-n", "2", "--cores-per-worker", "9999"], "Received: cores_per_worker=9999"),
    "slurm": (["--slurm"], "`--slurm` needs"),
    "kubernetes": (["--kubernetes", "2"], "JOB_COMPLETION_INDEX"),
}


@loop("name", BAD)
def test_bad_arguments(name, capsys, monkeypatch):
    for variable in (*os.environ,):
        if variable.startswith(("SLURM_", "JOB_COMPLETION", "TF_CONFIG")):
            monkeypatch.delenv(variable)
    flags, words = BAD[name]
    with pytest.raises(SystemExit) as end:
        launch.main([*flags, __file__])
    assert end.value.code == 2
    assert words in capsys.readouterr().err


def test_cores_of_neighbors_do_not_overlap():
    usable = sorted(os.sched_getaffinity(0))
    taken = [cores_of(slot, len(usable), 1) for slot in range(len(usable))]
    assert sum(taken, []) == usable
    assert cores_of(0, 5, None) is None


# --------------------------------------------------------------------------------- schedulers

LISTS = {
    "node1": ["node1"],
    "node[01-03,7]": ["node01", "node02", "node03", "node7"],
    "a[8-10],b,c[1]x": ["a8", "a9", "a10", "b", "c1x"],
    "r[1-2]n[1-2]": ["r1n1", "r1n2", "r2n1", "r2n2"],
    "gpu-a-[099-101].net": ["gpu-a-099.net", "gpu-a-100.net", "gpu-a-101.net"],
}


def test_node_lists():
    for text, names in LISTS.items():
        assert schedulers.expand(text) == names
    for text in ("", "a[", "a[1-", "a]", "a[3-1]", "a[x]", "a,,b", ",a", "a[1-2"):
        with pytest.raises(ValueError, match="Received: "):
            schedulers.expand(text)


def slurm(node, **more):
    return {
        "SLURM_JOB_ID": "4711",
        "SLURM_STEP_NODELIST": "n[1-3]",
        "SLURM_NODEID": str(node),
        "SLURM_STEP_NUM_TASKS": "3",
        **more,
    }


def test_slurm(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))  # without scontrol
    shares = [schedulers.slurm(2, None, slurm(node)) for node in range(3)]
    configs = [json.loads(config) for share in shares for config in share.configs]
    assert [c["task"]["index"] for c in configs] == list(range(6))
    addresses = configs[0]["cluster"]["worker"]
    assert all(c["cluster"]["worker"] == addresses for c in configs)
    names, ports = zip(*(address.split(":") for address in addresses), strict=True)
    assert names == ("n1", "n1", "n2", "n2", "n3", "n3")
    assert int(ports[0]) + 1 == int(ports[1]) and set(ports) == set(ports[:2])
    assert len({share.job for share in shares}) == 1
    script = {"SLURM_JOB_NODELIST": "n[1-3]", "SLURM_STEP_NODELIST": ""}  # without srun
    with pytest.raises(ValueError, match="srun"):
        schedulers.slurm(1, None, slurm(0, **script))
    script |= {"SLURM_JOB_NODELIST": "n1", "SLURM_STEP_NUM_TASKS": "1"}
    assert len(schedulers.slurm(2, None, slurm(0, **script)).configs) == 2
    for change in ({"SLURM_JOB_ID": "4712"}, {"SLURM_STEP_ID": "1"}):
        other = schedulers.slurm(2, None, slurm(0, **change))
        others = json.loads(other.configs[0])["cluster"]["worker"]
        assert not set(others) & set(addresses) and other.job != shares[0].job
    assert "n1:7000" in schedulers.slurm(1, 7000, slurm(0)).configs[0]
    for node in ("-1", "3", "x"):
        with pytest.raises(ValueError, match=f"SLURM_NODEID={node}"):
            schedulers.slurm(1, None, slurm(node))
    with pytest.raises(ValueError, match="6 tasks on 3 nodes"):
        schedulers.slurm(1, None, slurm(0, SLURM_STEP_NUM_TASKS="6"))

    scontrol = tmp_path / "scontrol"  # has precedence
    scontrol.write_text("#!/bin/sh\n[ \"$*\" = 'show hostnames n[1-3]' ] && echo x y z\n")
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert '"y:' in schedulers.slurm(1, None, slurm(1)).configs[0]
    scontrol.write_text("#!/bin/sh\nexit 1\n")
    assert '"n2:' in schedulers.slurm(1, None, slurm(1)).configs[0]


def pod(index, **more):
    return {
        "JOB_COMPLETION_INDEX": str(index), "HOSTNAME": f"my-train-{index}.sub.ns.svc", **more
    }  # fmt: skip


def test_kubernetes():
    shares = [schedulers.kubernetes(2, 1, None, pod(index)) for index in range(2)]
    configs = [json.loads(share.configs[0]) for share in shares]
    addresses = ["my-train-0.sub.ns.svc:12345", "my-train-1.sub.ns.svc:12345"]
    assert [c["cluster"]["worker"] for c in configs] == [addresses] * 2
    assert [c["task"]["index"] for c in configs] == [0, 1]
    assert shares[0].job == shares[1].job
    with pytest.raises(ValueError, match="`completions`"):
        schedulers.kubernetes(1, 1, None, pod(1))
    with pytest.raises(ValueError, match="`subdomain`"):
        schedulers.kubernetes(2, 1, None, pod(1, HOSTNAME="my-train-1-x7k2p"))


def test_slurm_node_starts_its_workers(tmp_path):
    (tmp_path / "train.py").write_text(
        WORKER + "print(os.environ['TF_REDSYNC_JOB'], config['cluster']['worker'][index])"
    )
    path = {"PYTHONPATH": str(ROOT), "PATH": str(tmp_path)}
    line = [sys.executable, "-m", "tf_redsync", "launch", "--slurm", "-n", "2", "--port", "7000"]
    for node, secret in ((1, None), (0, None), (0, "a secret")):
        env = {**os.environ, **slurm(node), **path, "TF_REDSYNC_JOB": secret or ""}
        ran = subprocess.run(
            [*line, "train.py"], capture_output=True, text=True, timeout=60, cwd=tmp_path, env=env
        )
        assert ran.returncode == 0, ran.stderr
        assert sorted(ran.stdout.splitlines()) == [
            f"[worker {2 * node + i}] {secret or 'slurm-4711.0'} n{node + 1}:{7000 + i}"
            for i in range(2)
        ]
        # The job's name can be guessed: only the chief's launcher warns.
        assert ("TF_REDSYNC_JOB" in ran.stderr) == (node == 0 and secret is None)
