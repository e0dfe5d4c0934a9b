"""The launcher: TF_CONFIG, output, failures, timeouts and signals, without TensorFlow."""

import json
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.processes import AS_COMMAND, alive
from tf_redsync.cli import launch, output, processes, worker_environment
from tf_redsync.cli.worker_environment import rank_in

ROOT = Path(__file__).resolve().parents[2]
CLI = [sys.executable, "-m", "tf_redsync.launch"]


@pytest.fixture(autouse=True)
def no_tf_config(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def script(tmp_path, body):
    """Writes a worker script that defines `index`; returns its path."""
    path = tmp_path / "script.py"
    head = "import json, os, sys, time, signal\n"
    head += "config = json.loads(os.environ['TF_CONFIG'])\nindex = config['task']['index']\n"
    path.write_text(head + body)
    return str(path)


def cli(*args, timeout=50, **kwargs):
    return subprocess.run(
        [*CLI, *args], capture_output=True, text=True, timeout=timeout, check=False, **kwargs
    )


def wait_for(condition, seconds=30):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "condition not reached"
        time.sleep(0.02)


def test_workers_get_their_own_task_of_one_cluster(tmp_path):
    path = script(tmp_path, "print(os.environ['TF_CONFIG'])")
    result = launch.run([sys.executable, path], 3, timeout=20)
    assert result.exit_code == 0 and result.message == ""
    configs = [json.loads(worker.output) for worker in result.workers]
    assert [c["task"] for c in configs] == [{"type": "worker", "index": i} for i in range(3)]
    clusters = [c["cluster"]["worker"] for c in configs]
    assert clusters[0] == clusters[1] == clusters[2]
    assert len(set(clusters[0])) == 3
    assert all(address.startswith("127.0.0.1:") for address in clusters[0])


def test_ports_are_distinct_and_not_ephemeral():
    ports = launch.free_ports(20)
    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert len(set(ports)) == 20
    if low > 16000:
        assert max(ports) < low


@pytest.mark.parametrize("limits", ["1024\t65535\n", "1025 60999", "10000 60999", "unknown"])
def test_ports_beside_any_range_of_outgoing_connections(monkeypatch, limits):
    monkeypatch.setattr(Path, "read_text", lambda path, encoding: limits)
    assert len(set(launch.free_ports(20))) == 20


def test_port_reserved_by_another_process_is_not_free(monkeypatch):
    (reserved, free) = launch.free_ports(2)
    chosen = iter([reserved, free])
    monkeypatch.setattr(random.SystemRandom, "randrange", lambda self, start, end: next(chosen))
    holder = f"{AS_COMMAND}from tf_redsync.cluster import ports\n"
    holder += f"socket = ports.reserve({reserved}); print(flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", holder], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout.readline()
        assert launch.free_ports(1) == [free]
        process.stdin.close()
    chosen = iter([reserved])
    assert launch.free_ports(1) == [reserved]  # the reservation lasts as long as the process


def test_thread_counts(tmp_path, monkeypatch):
    for name in launch.THREAD_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(worker_environment, "_CGROUP", tmp_path)  # no quota
    path = script(tmp_path, "print(os.environ['TF_NUM_INTRAOP_THREADS'])")
    command = [sys.executable, path]
    cores = len(os.sched_getaffinity(0))

    def threads(**kwargs):
        return int(launch.run(command, 2, timeout=20, **kwargs).workers[0].output)

    assert threads() == max(1, cores // 2)
    assert threads(threads=7) == 7
    monkeypatch.setenv("TF_NUM_INTRAOP_THREADS", "5")
    assert threads() == 5
    assert launch.default_threads(10_000) == 1


QUOTAS = {
    "version_2": ({"cpu.max": "250000 100000"}, 3),
    "version_1": ({"cpu.cfs_quota_us": "150000", "cpu.cfs_period_us": "100000"}, 2),
    "above_the_cores": ({"cpu.max": "1200000 100000"}, 8),
    "none_in_version_2": ({"cpu.max": "max 100000"}, 8),
    "none_in_version_1": ({"cpu.cfs_quota_us": "-1", "cpu.cfs_period_us": "100000"}, 8),
}


@pytest.mark.parametrize("name", QUOTAS)
def test_threads_keep_the_quota_of_a_container(tmp_path, monkeypatch, name):
    files, cores = QUOTAS[name]
    (tmp_path / "cpu").mkdir()
    for file, text in files.items():
        folder = tmp_path if file == "cpu.max" else tmp_path / "cpu"
        (folder / file).write_text(f"{text}\n")
    monkeypatch.setattr(worker_environment, "_CGROUP", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    assert launch.default_threads(1) == cores
    assert launch.default_threads(3) == max(1, cores // 3)


def test_huge_pages_are_the_default(tmp_path, monkeypatch):
    command = [sys.executable, script(tmp_path, "print(os.environ['GLIBC_TUNABLES'])")]
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    assert "glibc.malloc.hugetlb=1" in launch.run(command, 1, timeout=20).workers[0].output
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.check=1")
    assert launch.run(command, 1, timeout=20).workers[0].output.split() == ["glibc.malloc.check=1"]


def test_addresses_wrappers_and_worker_env(tmp_path):
    path = script(tmp_path, "print(config['cluster']['worker'], os.environ['A'], os.environ['B'])")
    result = launch.run(
        [sys.executable, path],
        2,
        timeout=20,
        addresses=["h:1", "h:2"],
        wrappers=[["env", "A=x"], ["env", "A=y"]],
        worker_env=[{"B": "0"}, {"B": "1"}],
    )
    assert [w.output for w in result.workers] == ["['h:1', 'h:2'] x 0", "['h:1', 'h:2'] y 1"]


@pytest.mark.parametrize("name", ["addresses", "wrappers", "worker_env"])
@pytest.mark.parametrize("entries", [1, 3])
def test_lists_have_an_entry_per_worker(name, entries):
    entry = {"addresses": "h:1", "wrappers": ["env"], "worker_env": {}}[name]
    with pytest.raises(ValueError, match=f"`{name}` must have one entry per worker, 2"):
        launch.run([sys.executable, "-c", ""], 2, timeout=20, **{name: [entry] * entries})


def test_lines_are_prefixed_and_flags_are_passed_on(tmp_path):
    path = script(tmp_path, "print('args', sys.argv[1:])\nprint('err', file=sys.stderr)")
    done = cli("-n", "2", path, "--epochs=3", "-n", "9", "--timeout", "x")
    assert done.returncode == 0, done.stderr
    for i in range(2):
        assert f"[worker {i}] args ['--epochs=3', '-n', '9', '--timeout', 'x']" in done.stdout
        assert f"[worker {i}] err" in done.stdout


def test_full_disk_ends_the_log_but_not_the_workers(tmp_path):
    path = script(tmp_path, "[print('I am', index, flush=True) for _ in range(9)]")
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "worker_0.log").symlink_to("/dev/full")
    done = cli("-n", "2", "--log-dir", str(logs), path)
    assert done.returncode == 0 and "Traceback" not in done.stderr
    assert done.stdout == 9 * "I am 0\n"
    (message,) = [line for line in done.stderr.splitlines() if "No space left" in line]
    assert "worker 0: " in message and "worker_0.log cannot be written" in message
    assert (logs / "worker_1.log").read_text() == 9 * "I am 1\n"


def test_unwritable_log_does_not_end_the_worker(tmp_path):
    (tmp_path / "logs" / "worker_0.log").mkdir(parents=True)
    done = cli("-n", "1", "--log-dir", str(tmp_path / "logs"), script(tmp_path, "print('I am')"))
    assert done.returncode == 0 and done.stdout == "I am\n", done.stderr
    assert "worker_0.log cannot be written and ends here" in done.stderr


@pytest.mark.parametrize("where", ["> /dev/full", "| head -1", ">&-"])
def test_unwritable_standard_output_does_not_end_the_workers(tmp_path, where):
    body = f"""
for number in range(5):
    print('I am', number, flush=True)
    time.sleep(0.2)
open({str(tmp_path / "done")!r}, 'w').close()
"""
    command = shlex.join([*CLI, "-n", "1", script(tmp_path, body)])
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", f"{command} {where}"],
        capture_output=True, text=True, timeout=50, check=False,
    )  # fmt: skip
    assert done.returncode == 0 and (tmp_path / "done").exists(), done.stderr
    assert done.stderr.count("standard output cannot be written and ends here") == 1
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr


def test_non_training_tasks_have_their_own_numbers():
    cluster = {"chief": ["a"], "worker": ["b", "c"], "ps": ["d"], "evaluator": ["e"]}
    tasks = [(kind, i) for kind in cluster for i in range(len(cluster[kind]))]
    del cluster["evaluator"]  # as Kubeflow writes it
    found = [
        rank_in(json.dumps({"cluster": cluster, "task": {"type": kind, "index": i}}))
        for kind, i in tasks
    ]
    assert found == [0, 1, 2, 3, 4]
    infinite = '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 1e999}}'
    for malformed in ("[" * 100_000, infinite, "{"):  # which the worker reports
        assert rank_in(malformed) == 0


def test_log_that_another_program_truncates(tmp_path):
    """As `logrotate` with `copytruncate` does."""
    log = tmp_path / "worker_0.log"
    body = f"""
print('before', flush=True)
while not open({str(log)!r}).read().endswith(chr(10)):
    time.sleep(0.05)
os.truncate({str(log)!r}, 0)
print('after')
"""
    launch.run([sys.executable, script(tmp_path, body)], 1, timeout=20, log_dir=tmp_path)
    assert log.read_text() == "after\n"


def test_log_dir_prints_worker_0_only(tmp_path):
    path = script(tmp_path, "print('I am', index)")
    done = cli("-n", "2", "--log_dir", str(tmp_path / "logs"), path)
    assert done.stdout == "I am 0\n"
    for i in range(2):
        assert (tmp_path / "logs" / f"worker_{i}.log").read_text() == f"I am {i}\n"


def test_second_run_appends_to_the_logs(tmp_path):
    path = script(tmp_path, "print('I am', index)")
    for _ in range(2):
        assert launch.run([sys.executable, path], 1, log_dir=tmp_path).exit_code == 0
    first, blank, separator, second = (tmp_path / "worker_0.log").read_text().splitlines()
    assert (first, blank, second) == ("I am 0", "", "I am 0")
    year = time.localtime().tm_year
    assert separator.startswith(f"--- {year}-") and separator.endswith(", attempt 1 ---")


def test_module(tmp_path):
    script(tmp_path, "print('module', __name__, sys.argv[1:])")
    done = cli("-n", "1", "-m", "script", "--a", cwd=tmp_path, env={"PYTHONPATH": f"{ROOT}:."})
    assert done.stdout == "[worker 0] module __main__ ['--a']\n", done.stderr


def test_installed_program_imports_from_the_current_directory(tmp_path):
    (tmp_path / "train_here.py").write_text("print('found')")
    program = Path(sys.executable).with_name("tf-redsync")
    done = subprocess.run(
        [program, "launch", "-n", "1", "-m", "train_here"],
        cwd=tmp_path, capture_output=True, text=True, timeout=50, check=False,
    )  # fmt: skip
    assert done.stdout == "[worker 0] found\n", done.stderr


def test_two_dashes_may_precede_the_script(tmp_path):
    done = cli("-n", "1", "--", script(tmp_path, "print(sys.argv[1:])"), "--a", "--", "b")
    assert done.stdout == "[worker 0] ['--a', '--', 'b']\n", done.stderr


def test_last_line_without_newline_and_progress_bar(tmp_path):
    """The log file, too, has only a bar's last state: in days, all states would fill a disk."""
    body = r"sys.stdout.write('1/2\r2/2\nlast'); sys.stdout.flush(); os.kill(os.getpid(), 9)"
    command = [sys.executable, script(tmp_path, body)]
    result = launch.run(command, 1, timeout=20, log_dir=tmp_path)
    assert result.workers[0].output == "2/2\nlast"
    assert (tmp_path / "worker_0.log").read_text() == "2/2\nlast\n"


def test_progress_bar_in_a_pipe(tmp_path):
    """Keras moves back and rewrites its bar, which ends without a newline if `fit` raises."""
    bar = r"sys.stdout.write('\b' * 9 + '\r1/2' + '\b' * 9 + '\r2/2'); sys.stdout.flush()"
    done = cli("-n", "1", script(tmp_path, f"{bar}\nprint()\n{bar}\nraise ValueError('bad batch')"))
    assert done.stdout.startswith(
        "[worker 0] 2/2\n[worker 0] 2/2Traceback (most recent call last):\n"
    )
    assert "[launch] worker 0 failed first: ValueError: bad batch (" in done.stderr


def test_lines_without_end_take_little_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "_LONGEST_LINE", 1000)
    monkeypatch.setattr(processes, "_KEPT_CHARACTERS", 100_000)
    path = script(tmp_path, r"sys.stdout.buffer.write(b'\xff' * 10_000_000 + b'end')")
    (worker,) = launch.run([sys.executable, path], 1, timeout=20).workers
    assert worker.output.endswith("end") and 1000 < len(worker.output) < 110_000


def test_too_few_descriptors_are_an_error_in_one_line(tmp_path):
    program = f"{AS_COMMAND}import resource; from tf_redsync.cli import launch\n"
    program += "resource.setrlimit(resource.RLIMIT_NOFILE, (20, 20))\n"
    program += "sys.exit(launch.main(sys.argv[1:]))"
    command = [sys.executable, "-c", program]
    options = ["-n", "16", "--isolate", "no", script(tmp_path, "")]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "Too many open files" in done.stderr and "ulimit" in done.stderr


def test_failing_worker_is_named_and_the_others_are_killed(tmp_path):
    body = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if index == 1:
    for i in range(30):
        print('line', i)
    sys.exit(7)
time.sleep(60)
"""
    done = cli("-n", "3", "--grace", "0.3", script(tmp_path, body))
    assert done.returncode == 7
    assert "worker 1 failed: exit code 7" in done.stderr
    assert "    line 10\n" in done.stderr and "    line 29\n" in done.stderr
    assert "    line 9\n" not in done.stderr
    assert "workers 0, 2 did not end: killed by SIGKILL" in done.stderr


def test_others_may_end_within_the_grace_period(tmp_path):
    body = "if index == 0: sys.exit(3)\ntime.sleep(0.5); print('saved'); sys.exit(4)"
    result = launch.run([sys.executable, script(tmp_path, body)], 2, timeout=20, grace=10)
    assert result.exit_code == 3
    assert result.workers[1].output == "saved" and not result.workers[1].killed
    assert result.workers[1].returncode == 4


def test_worker_ended_by_a_real_time_signal(tmp_path):
    number = signal.SIGRTMIN + 3
    path = script(tmp_path, f"os.kill(os.getpid(), {number})")
    result = launch.run([sys.executable, path], 1, timeout=20)
    assert result.exit_code == 128 + number
    assert result.cause == f"worker 0 failed first: ended by signal {number}"


def test_worker_ended_by_a_signal(tmp_path):
    path = script(tmp_path, "os.kill(os.getpid(), signal.SIGSEGV)")
    result = launch.run([sys.executable, path], 1, timeout=20)
    assert result.exit_code == 128 + signal.SIGSEGV
    assert "SIGSEGV" in result.message


def test_timeout_kills_the_whole_group(tmp_path):
    body = f"""
import subprocess
signal.signal(signal.SIGTERM, lambda *_: print('term', flush=True))
child = subprocess.Popen(['sleep', '60'])
open({str(tmp_path)!r} + f'/pid{{index}}', 'w').write(f'{{os.getpid()}} {{child.pid}}')
while True:
    time.sleep(1)
"""
    result = launch.run([sys.executable, script(tmp_path, body)], 2, timeout=6, stop_grace=3)
    assert result.exit_code == processes.TIMEOUT_EXIT_CODE
    assert "workers 0, 1 still running after 6 s" in result.message
    assert all(w.killed and w.returncode == -signal.SIGKILL for w in result.workers)
    assert all(w.output == "term" for w in result.workers)
    for i in range(2):
        for pid in (tmp_path / f"pid{i}").read_text().split():
            wait_for(lambda pid=pid: not alive(pid))


def test_workers_may_save_after_the_timeout(tmp_path):
    body = """
def save(*_):
    time.sleep(1)
    print('saved', flush=True)
    sys.exit(75)
signal.signal(signal.SIGTERM, save)
time.sleep(60)
"""
    path = script(tmp_path, body)
    result = launch.run([sys.executable, path], 2, timeout=6, grace=0, stop_grace=30)
    assert result.exit_code == processes.TIMEOUT_EXIT_CODE
    assert [(w.returncode, w.output) for w in result.workers] == 2 * [(75, "saved")]


def test_orphaned_child_does_not_block_the_end(tmp_path):
    body = "import subprocess\nprint(subprocess.Popen(['sleep', '60']).pid)"
    result = launch.run([sys.executable, script(tmp_path, body)], 1, timeout=20)
    assert result.exit_code == 0  # otherwise the timeout's
    wait_for(lambda: not alive(result.workers[0].output))


@pytest.mark.parametrize(
    ("number", "of_worker_1", "expected"),
    [
        (signal.SIGINT, 0, 130),
        (signal.SIGTERM, 0, 0),
        (signal.SIGUSR1, 0, 0),
        (signal.SIGTERM, 3, 143),
    ],
)
def test_signals_are_forwarded(tmp_path, number, of_worker_1, expected):
    body = f"""
def stop(*_):
    print('stopped', flush=True)
    sys.exit({of_worker_1} * config['task']['index'])
signal.signal({int(number)}, stop)
print('ready', flush=True)
time.sleep(60)
"""
    args = [*CLI, "-n", "2", script(tmp_path, body)]
    with subprocess.Popen(args, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as job:
        ready = [job.stdout.readline() for _ in range(2)]
        assert sorted(ready) == ["[worker 0] ready\n", "[worker 1] ready\n"]
        job.send_signal(number)
        out, err = job.communicate(timeout=20)
    assert job.returncode == expected
    assert sorted(out.splitlines()) == ["[worker 0] stopped", "[worker 1] stopped"]
    assert "forwarded to workers 0, 1" in err


def test_later_sigusr1_does_not_end_workers_that_save(tmp_path):
    body = """
asked = []
signal.signal(signal.SIGUSR1, lambda *_: asked.append(print('asked', flush=True)))
print('ready', flush=True)
while not asked:
    time.sleep(0.05)
time.sleep(1)
print('saved', flush=True)
sys.exit(75)
"""
    program = f"""
{AS_COMMAND}
from tf_redsync import stopping
from tf_redsync.cli import launch
stopping.SAME_SECONDS = 0.0  # signals within it are ignored in any case
sys.exit(launch.main(sys.argv[1:]))
"""
    args = [sys.executable, "-c", program, "-n", "1", script(tmp_path, body)]
    with subprocess.Popen(args, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as job:
        for line in ("ready", "asked"):
            assert job.stdout.readline() == f"[worker 0] {line}\n"
            job.send_signal(signal.SIGUSR1)
        out, err = job.communicate(timeout=20)
    assert (job.returncode, out) == (75, "[worker 0] saved\n"), err


def test_ignored_signals_at_the_start(tmp_path):
    """`nohup` ignores SIGHUP; an ignored SIGCHLD would hide the ends of workers."""
    body = "print('ready', flush=True)\ntime.sleep(1)\nprint('done')"

    def ignore():
        for number in (signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, signal.SIG_IGN)

    args = [*CLI, "-n", "1", script(tmp_path, body)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(args, preexec_fn=ignore, **pipes) as job:
        assert job.stdout.readline() == "[worker 0] ready\n"
        job.send_signal(signal.SIGHUP)
        out, err = job.communicate(timeout=20)
    assert (job.returncode, out) == (0, "[worker 0] done\n"), err


def test_interrupt_shows_locations_instead_of_tracebacks(tmp_path):
    """Output of the script's own handler is printed, and log files are complete."""
    body = """
print('ready', flush=True)
try:
    time.sleep(60)
except KeyboardInterrupt:
    print('saving', flush=True)
    print('1/2', end='', flush=True)
    raise ValueError('bad batch')
"""
    path = script(tmp_path, body)
    line = Path(path).read_text().splitlines().index("    raise ValueError('bad batch')") + 1
    args = [*CLI, "-n", "2", "--log-dir", tmp_path / "logs", path]
    with subprocess.Popen(args, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as job:
        assert job.stdout.readline() == "ready\n"
        wait_for(lambda: (tmp_path / "logs" / "worker_1.log").read_text() == "ready\n")
        job.send_signal(signal.SIGINT)
        out, err = job.communicate(timeout=20)
    assert job.returncode == 130
    assert out.splitlines() == ["saving"]
    assert "Traceback" not in err and len(err.splitlines()) == 2
    assert all(re.search(rf"worker {rank} at \S*script.py:{line}\b", err) for rank in (0, 1))
    assert "ValueError: bad batch" in (tmp_path / "logs" / "worker_1.log").read_text()


def test_workers_die_with_a_killed_launcher(tmp_path):
    path = script(tmp_path, "print(os.getpid(), flush=True)\ntime.sleep(60)")
    with subprocess.Popen([*CLI, "-n", "2", path], stdout=subprocess.PIPE, text=True) as job:
        pids = [job.stdout.readline().split()[-1] for _ in range(2)]
        assert all(alive(pid) for pid in pids)
        job.kill()
        for pid in pids:
            wait_for(lambda pid=pid: not alive(pid))


def test_api_interrupted_by_an_exception_leaves_no_process(tmp_path, monkeypatch):
    path = script(tmp_path, "print(os.getpid(), flush=True)\ntime.sleep(60)")
    pids = []

    def failing_sink(lines):
        pids.append(lines.decode().strip())
        raise BrokenPipeError

    monkeypatch.setattr(output, "printer", lambda *_: failing_sink)
    with pytest.raises(BrokenPipeError):
        launch.run([sys.executable, path], 2, timeout=20, echo=True)
    assert pids and not any(alive(pid) for pid in pids)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["-n", "0", "SCRIPT"], "Received: workers=0"),
        (["-n", "2", "missing.py"], "Received: 'missing.py'"),
        (["-n", "2", "python3", "SCRIPT"], "Leave out the interpreter"),
        (["-n", "2"], "the script is missing"),
        (["-n", "2", "-m", "no_such_module_here"], "no_such_module_here"),
        (["-n", "2", "--timeout", "0", "SCRIPT"], "`timeout` must be positive"),
        (["-n", "2", "--timeout", "nan", "SCRIPT"], "`timeout` must be positive"),
        (["-n", "2", "--grace", "-1", "SCRIPT"], "`grace` must be at least 0"),
        (["-n", "2", "--threads", "0", "SCRIPT"], "Received: threads=0"),
        (["SCRIPT"], "-n/--workers"),
        (["SCRIPT", "-n", "2"], "come before the script"),
        (["SCRIPT", "--epochs=3", "--workers=2"], "'--workers=2'"),
        (["-m", "json.tool", "-n2"], "come before the script"),
        (["-n", "two", "SCRIPT"], "two"),
        (["-n", "2", "--log-dir", "/dev/null/logs", "SCRIPT"], "log_dir='/dev/null/logs'"),
    ],
)
def test_bad_arguments(tmp_path, args, words):
    path = script(tmp_path, "print('started')")
    done = cli(*[path if a == "SCRIPT" else a for a in args])
    assert done.returncode == 2
    assert words in done.stderr and "Traceback" not in done.stderr
    assert "started" not in done.stdout


@pytest.mark.parametrize("workers", [2.5, 2.0, True, "2"])
def test_number_of_workers_is_an_integer(workers):
    for call in (lambda: launch.run(["true"], workers), lambda: launch.default_threads(workers)):
        with pytest.raises(ValueError, match="`workers`.*Received: workers="):
            call()


@pytest.mark.parametrize("command", ["true", [], ()])
def test_command_is_a_list(command):
    with pytest.raises(ValueError, match="`command`.*Received: command="):
        launch.run(command, 1)


def test_missing_program_raises():
    with pytest.raises(FileNotFoundError, match="no-such-program"):
        launch.run(["no-such-program"], 1)


@pytest.mark.parametrize("index", [-1, 2, 1.0, True, None])
def test_tf_config_names_one_of_the_workers(index):
    with pytest.raises(ValueError, match="`index`.*Received: index="):
        launch.tf_config(["a:1", "b:1"], index)


def test_other_keras_backends_are_rejected(tmp_path):
    path = script(tmp_path, "print('started')")
    done = cli("-n", "2", path, env={**os.environ, "KERAS_BACKEND": "jax"})
    assert done.returncode == 2 and "started" not in done.stdout
    assert "KERAS_BACKEND=tensorflow" in done.stderr and "Traceback" not in done.stderr


def test_existing_tf_config_is_rejected(tmp_path):
    path = script(tmp_path, "print('started')")
    done = cli("-n", "2", path, env={**os.environ, "TF_CONFIG": '{"cluster": {}}'})
    assert done.returncode == 2
    assert "TF_CONFIG is already set" in done.stderr and '{"cluster": {}}' in done.stderr
    assert "started" not in done.stdout


def test_launcher_does_not_import_tensorflow(tmp_path):
    report = tmp_path / "modules.txt"
    # `-m tf_redsync.launch` as a user starts it; prints the loaded modules at the end.
    (tmp_path / "sitecustomize.py").write_text(
        "import atexit, os, sys\n"
        "if 'tf_redsync.launch' in sys.orig_argv:\n"
        f"    atexit.register(lambda: open({str(report)!r}, 'w').write(' '.join(sys.modules)))\n"
    )
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    subprocess.run(
        [sys.executable, "-m", "tf_redsync.launch", "--help"],
        env=environment,
        capture_output=True,
        check=True,
        timeout=60,
    )
    loaded = set(report.read_text().split())
    assert "tf_redsync" in loaded
    assert not {"tensorflow", "keras", "numpy"} & loaded
