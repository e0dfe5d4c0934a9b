"""Restarts in spare processes of the launcher. A file next to the script replaces TensorFlow."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.loops import loop
from tests.processes import alive
from tests.unit.test_launch import wait_for
from tf_redsync.cli import launch, prewarm, processes, restarts

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = """
import os
attempt = os.environ.get('TF_REDSYNC_RESTART')
if attempt is None:
    with open(os.environ['SPARES'], 'a') as file:
        file.write(f'{os.getpid()}\\n')
"""
HEAD = """
import json, os, sys, time
index = json.loads(os.environ['TF_CONFIG'])['task']['index']
attempt = int(os.environ['TF_REDSYNC_RESTART'])
import tf_redsync
"""
STATE = """
import __main__
spec = None if __spec__ is None else __spec__.name
attributes = [__name__, __file__, __doc__, __package__, __cached__, spec, type(__loader__).__name__]
variables = {n: v for n, v in os.environ.items() if n not in ('TF_CONFIG', 'TF_REDSYNC_RESTART')}
streams = [sys.stdin.read(), os.readlink('/proc/self/fd/0')]
state = [attributes, sys.argv, sys.orig_argv, sys.path, os.getcwd(), variables, streams]
state += [__main__.__dict__ is globals(), os.getsid(0) == os.getpid(), sys.flags]
print(json.dumps([tf_redsync.attempt, attempt, index, os.environ['PLACE'], os.getpid(), state]))
sys.stdout.flush()
if attempt < 2 and index == 1:
    raise ValueError('not yet')
if attempt < 2:
    time.sleep(60)
"""


@pytest.fixture(autouse=True)
def surroundings(tmp_path, monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("SPARES", str(tmp_path / "spares"))
    monkeypatch.setattr(processes, "PREPARE_SECONDS", 0.0)
    monkeypatch.setattr(restarts, "PAUSES", ())
    monkeypatch.chdir(tmp_path)


def spares(tmp_path):
    path = tmp_path / "spares"
    return [int(line) for line in path.read_text().splitlines()] if path.exists() else []


def write(tmp_path, body, library=LIBRARY):
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "tf_redsync.py").write_text(library)
    (folder / "train.py").write_text(HEAD + body)
    return "code/train.py"


def job(command, workers=2, **kwargs):
    return launch.run([sys.executable, *command], workers, timeout=60, grace=1, **kwargs)


@pytest.mark.parametrize("how", ["script", "link", "module"])
def test_spare_runs_the_command_like_a_new_process(tmp_path, how, monkeypatch):
    command = [write(tmp_path, STATE), "--steps", "3"]
    if how == "link":
        (tmp_path / "link.py").symlink_to("code/train.py")
        command[0] = "link.py"
    if how == "module":
        monkeypatch.chdir(tmp_path / "code")
        command[:1] = ["-m", "train"]
    own = [{"PLACE": place} for place in "ab"]
    result = job(command, max_restarts=2, worker_env=own, log_dir=tmp_path / "logs", prewarm=True)
    assert result.exit_code == 0 and result.restarts == 2, result.message
    assert "worker 1 failed first: ValueError: not yet" in result.message
    pids = set()
    for rank in range(2):
        log = (tmp_path / "logs" / f"worker_{rank}.log").read_text()
        seen = [json.loads(line) for line in log.splitlines() if line.startswith("[")]
        assert [each[:4] for each in seen] == [
            ["0", 0, rank, "ab"[rank]],
            [None, 1, rank, "ab"[rank]],
            [None, 2, rank, "ab"[rank]],
        ]
        assert seen[0][5] == seen[1][5] == seen[2][5]
        pids |= {each[4] for each in seen[1:]}
    assert pids == set(spares(tmp_path))


def test_without_the_option_each_worker_is_a_new_process(tmp_path):
    path = write(tmp_path, "print(tf_redsync.attempt)\nsys.exit(attempt < 1)")
    for options in ({}, {"prewarm": False}):
        result = job([path], max_restarts=1, **options)
        assert [worker.output for worker in result.workers] == ["1", "1"]
    for names, code in ((["--prewarm"], 0), ([], 3)):
        body = "sys.exit(3 * (tf_redsync.attempt is not None))"
        (tmp_path / path).write_text(HEAD + body)
        assert launch.main(["-n", "1", "--max-restarts", "1", *names, path]) == code
    assert len(spares(tmp_path)) == 1


def test_import_error_in_a_spare_is_left_to_the_script(tmp_path):
    path = write(tmp_path, "print(tf_redsync.attempt)\nsys.exit(attempt < 1)", LIBRARY + "    1/0")
    assert job([path], max_restarts=1, prewarm=True).workers[0].output == "1"


def test_dead_spare_or_one_with_other_cores_is_not_used(tmp_path):
    path = write(tmp_path, "", LIBRARY + "    os._exit(1)")
    core = sorted(os.sched_getaffinity(0))[:1]
    waiting = prewarm.Spares()
    waiting.add(0, [path], os.environ, core)
    waiting.add(1, [path], os.environ, None)
    wait_for(lambda: len(spares(tmp_path)) == 2 and not any(map(alive, spares(tmp_path))))
    assert waiting.take(0, {}, core) is None and waiting.take(2, {}, None) is None
    (tmp_path / "code" / "tf_redsync.py").write_text(LIBRARY)
    waiting.add(0, [path], os.environ, core)
    assert waiting.take(0, {}, None) is None
    waiting.close()
    assert not any(map(alive, spares(tmp_path)))


def test_error_of_a_restarted_script_has_its_line(tmp_path):
    path = write(tmp_path, "if attempt:\n    raise KeyError('late')\nsys.exit(1)")
    result = job([path], 1, max_restarts=1, prewarm=True)
    line = len(HEAD.splitlines()) + 2
    assert result.message.endswith(f"KeyError: 'late' ({path}:{line})")


def test_no_spare_for_other_programs(tmp_path):
    path = write(tmp_path, "time.sleep(1)\nsys.exit(1)")
    shell = ["sh", "-c", "sleep 1; exit 1"]
    launch.run(shell, 1, timeout=60, max_restarts=1, prewarm=True)
    job([path], 1, max_restarts=1, prewarm=True, wrappers=[["env"]])
    assert not spares(tmp_path)


COMMANDS = {
    "a_script": ([sys.executable, __file__, "-m"], True),
    "a_module": ([sys.executable, "-m", "package.train"], True),
    "no_file": ([sys.executable, "/no/such/file.py"], False),
    "options": ([sys.executable, "-X", "dev", __file__], False),
    "code": ([sys.executable, "-c", "pass"], False),
    "another_interpreter": (["python3", __file__], False),
    "a_program": ([sys.executable], False),
}


@loop("name", COMMANDS)
def test_commands(name):
    command, possible = COMMANDS[name]
    assert prewarm.can_run(command) == possible


def test_spares_end_with_a_job_that_needs_none(tmp_path):
    path = write(tmp_path, "while not os.path.exists('end'): time.sleep(0.02)")
    threading.Thread(target=end_with_spares, args=(tmp_path,)).start()
    result = job([path], max_restarts=1, prewarm=True)
    assert result.exit_code == 0 and result.restarts == 0
    assert len(spares(tmp_path)) == 2 and not any(map(alive, spares(tmp_path)))


def end_with_spares(tmp_path):
    wait_for(lambda: len(spares(tmp_path)) == 2)
    (tmp_path / "end").touch()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_no_spare_outlives_the_launcher(tmp_path, number):
    path = write(tmp_path, "time.sleep(60 * index)\nsys.exit(3)")
    words = ["-n", "2", "--max-restarts", "3", "--grace", "60", "--prewarm", path]
    with subprocess.Popen([sys.executable, "-m", "tf_redsync.launch", *words]) as launcher:
        wait_for(lambda: len(spares(tmp_path)) == 2)
        running = spares(tmp_path)
        assert all(map(alive, running))
        launcher.send_signal(number)
        assert launcher.wait(30) == (-9 if number == signal.SIGKILL else 3)
    wait_for(lambda: not any(map(alive, running)))
