"""The launcher after a failure: the first cause, restarts, requested stops. Without TensorFlow."""

import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tests.loops import loop
from tf_redsync import stopping
from tf_redsync.cli import launch, restarts, root_cause
from tf_redsync.cli.restarts import Restarts

ROOT = Path(__file__).resolve().parents[2]
PAUSES = restarts.PAUSES  # `no_pauses` replaces them
CLI = [sys.executable, "-m", "tf_redsync.launch"]
HEAD = """
import json, os, signal, sys, time
config = json.loads(os.environ['TF_CONFIG'])
index, workers = config['task']['index'], len(config['cluster']['worker'])
attempt = int(os.environ['TF_REDSYNC_RESTART'])
"""


@pytest.fixture(autouse=True)
def no_tf_config(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr(restarts, "PAUSES", ())


def job(tmp_path, body, workers, **kwargs):
    path = tmp_path / "train.py"
    path.write_text(HEAD + body)
    return launch.run([sys.executable, str(path)], workers, timeout=30, grace=0.5, **kwargs)


def log_lines(folder):
    """Returns the lines that worker 0 has printed, and the lines that separate its attempts."""
    lines = [line for line in (folder / "worker_0.log").read_text().splitlines() if line]
    return [[line for line in lines if line.startswith("---") == is_it] for is_it in (False, True)]


# --------------------------------------------------------------------------------- restarts


def test_job_restarts_on_new_ports(tmp_path):
    body = """
print(attempt, workers, config['cluster']['worker'][0], os.environ['TF_REDSYNC_JOB'], flush=True)
printed = os.environ['HERE'] + f'/printed{attempt}'
if attempt < 2 and index == 1:
    while not os.path.exists(printed):
        time.sleep(0.01)
    raise ValueError('not yet')
open(printed, 'w').close()
if attempt < 2:
    time.sleep(60)
"""
    logs = tmp_path / "logs"
    result = job(tmp_path, body, 2, max_restarts=3, log_dir=logs, env={"HERE": str(tmp_path)})
    assert result.exit_code == 0 and result.restarts == 2 and not result.failed
    assert "restart 1 with 2 workers; 2 left." in result.message
    assert "restart 2 with 2 workers; 1 left." in result.message
    lines, separators = log_lines(logs)
    assert [line.rpartition(" attempt ")[2] for line in separators] == ["2 ---", "3 ---"]
    lines = [line.split() for line in lines]
    attempts, counts, addresses, jobs = zip(*lines, strict=True)
    assert attempts == ("0", "1", "2") and set(counts) == {"2"}
    assert len(set(addresses)) == 3 and len(set(jobs)) == 1


def test_restarts_are_limited(tmp_path):
    result = job(tmp_path, "sys.exit(5)", 1, max_restarts=2)
    assert result.exit_code == 5 and result.restarts == 2 and result.failed
    assert result.message.endswith("worker 0 failed first: exit code 5; its last line: (no output)")


def test_worker_that_always_fails_at_once_is_excluded(tmp_path):
    body = """
if os.environ['PLACE'] == 'b':
    raise OSError('broken')
time.sleep(0.2 if workers == 2 else 60)
print(os.environ['PLACE'], index, workers)
"""
    places = [{"PLACE": place} for place in "abc"]
    result = job(tmp_path, body, 3, max_restarts=5, min_workers=2, worker_env=places)
    assert result.exit_code == 0 and result.restarts == 2
    assert "restart 1 with 3 workers; 4 left." in result.message
    assert "restart 2 with 2 workers without it: worker 1 has failed first" in result.message
    assert [worker.output for worker in result.workers] == ["a 0 2", "c 1 2"]


def test_worker_that_cannot_start_is_excluded(tmp_path):
    wrappers = [[], ["/no/such/program"]]
    result = job(tmp_path, "print(workers)", 2, max_restarts=1, min_workers=1, wrappers=wrappers)
    assert result.exit_code == 0 and result.workers[0].output == "1"
    assert "/no/such/program" in result.message
    with pytest.raises(OSError, match="/no/such/program"):
        job(tmp_path, "print(workers)", 2, wrappers=wrappers, max_restarts=1)


def test_exclusion_rule():
    rule = Restarts(left=9, min_workers=2, places=[0, 1, 2, 3])

    def after(first, seconds):
        assert rule.again(first, seconds) is not None
        return rule.places

    assert after(1, 5.0) == [0, 1, 2, 3]
    assert after(2, 5.0) == [0, 1, 2, 3]  # another worker
    assert after(2, 500.0) == [0, 1, 2, 3]  # not at once
    assert after(2, 5.0) == [0, 1, 3]
    assert after(2, 5.0) == [0, 1, 3]  # 3 by its position
    assert after(2, 5.0) == [0, 1]
    assert after(1, 5.0) == after(1, 5.0) == [0, 1]  # no fewer
    assert rule.attempt == 8 and rule.left == 1
    assert rule.again(None, 5.0) and rule.again(None, 5.0) is None


def test_restart_waits_after_short_attempts(tmp_path, monkeypatch):
    monkeypatch.setattr(restarts, "PAUSES", (0.2, 0.7))
    body = "print(time.monotonic())\nsys.exit(5)"
    result = job(tmp_path, body, 1, max_restarts=3, log_dir=tmp_path)
    starts = [float(line) for line in log_lines(tmp_path)[0]]
    waited = [after - before for before, after in itertools.pairwise(starts)]
    assert all(has >= least for has, least in zip(waited, (0.2, 0.7, 0.7), strict=True)), waited
    assert "restart 1 with 1 worker; 2 left. It begins in 0.2 s." in result.message


def test_pauses_grow_until_an_attempt_is_long():
    rule = Restarts(left=9, min_workers=1, places=[0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(restarts, "PAUSES", PAUSES)
        found = [rule.pause(seconds) for seconds in (0.1, 3.0, 0.1, 0.1, 500.0, 0.1)]
    assert found == [1.0, 5.0, 15.0, 15.0, 0.0, 1.0]


def test_signal_ends_a_pause(tmp_path, monkeypatch):
    def pause(*_):
        os.kill(os.getpid(), signal.SIGTERM)
        return 60.0

    monkeypatch.setattr(Restarts, "pause", pause)
    began = time.monotonic()
    result = job(tmp_path, "sys.exit(5)", 1, max_restarts=3, forward_signals=True)
    assert time.monotonic() - began < 20 and result.interrupted
    assert (result.exit_code, result.restarts) == (stopping.EXIT_CODE, 1), result.message


def test_single_worker_of_a_tf_config(tmp_path, monkeypatch):
    """Each machine has such a launcher."""
    task = {"type": "worker", "index": 1}
    config = json.dumps({"cluster": {"chief": ["a:1"], "worker": ["b:2", "c:3"]}, "task": task})
    monkeypatch.setenv("TF_CONFIG", config)
    path = tmp_path / "train.py"
    monkeypatch.delenv("TF_REDSYNC_JOB", raising=False)
    path.write_text(
        HEAD + "print(json.dumps(config), attempt, os.environ.get('TF_REDSYNC_JOB'))\n"
        "sys.exit(3 * (attempt < 1))"
    )
    done = cli(["--max-restarts", "1", str(path)])
    assert done.returncode == 0, done.stderr
    assert done.stdout == "".join(f"[worker 2] {config} {attempt} None\n" for attempt in (0, 1))


# ------------------------------------------------------------------------------------- stops


def cli(args, **kwargs):
    return subprocess.run(
        [*CLI, *args], capture_output=True, text=True, timeout=30, check=False, **kwargs
    )


STOPS = """
def stop(number, _):
    time.sleep(0.3)
    print('saved', flush=True)
    sys.exit(75)
signal.signal(signal.SIGTERM, stop)
signal.signal(signal.SIGUSR1, stop)
print('ready', flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("number", stopping.SIGNALS)
def test_launcher_forwards_the_exit_code_and_does_not_restart(tmp_path, number):
    path = tmp_path / "train.py"
    path.write_text(HEAD + STOPS)
    args = [*CLI, "-n", "2", "--grace", "0", "--max-restarts", "3", str(path)]
    with subprocess.Popen(args, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        ready = [run.stdout.readline() for _ in range(2)]
        assert sorted(ready) == ["[worker 0] ready\n", "[worker 1] ready\n"]
        run.send_signal(number)
        time.sleep(0.1)
        # as from schedulers that signal all processes: not a second request
        run.send_signal(number)
        out, err = run.communicate(timeout=20)
    assert run.returncode == stopping.EXIT_CODE, err
    assert sorted(out.splitlines()) == ["[worker 0] saved", "[worker 1] saved"]
    assert "on request: exit code 75" in err and "restart" not in err


def test_worker_that_stops_itself_stops_the_job(tmp_path):
    stopped = str(tmp_path / "stopped")
    body = f"""
if index == 0:
    open({stopped!r}, 'w').close()
    sys.exit(75)
while not os.path.exists({stopped!r}):
    time.sleep(0.01)
time.sleep(0.4)
sys.exit(1)
"""
    result = job(tmp_path, body, 2, max_restarts=3)
    assert result.exit_code == 75 and result.restarts == 0 and not result.failed


def test_no_restart_after_a_signal_or_the_timeout(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(HEAD + "print('ready', flush=True)\nif index: sys.exit(3)\ntime.sleep(60)")
    args = [*CLI, "-n", "2", "--grace", "20", "--max-restarts", "3", str(path)]
    with subprocess.Popen(args, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        read = [""]
        while "SIGKILL in 20 s" not in read[-1]:
            read.append(run.stderr.readline())
            assert read[-1], f"the launcher ended: {''.join(read)}"
        run.send_signal(signal.SIGTERM)
        _, err = run.communicate(timeout=20)
    assert run.returncode == 3 and "restart" not in err
    result = launch.run([sys.executable, "-c", "import time; time.sleep(60)"], 1, timeout=0.5)
    assert result.exit_code == 124 and not result.failed


# ----------------------------------------------------------------------------- the first cause


def test_last_line_names_the_first_cause(tmp_path):
    """Worker 0 fails because of worker 1, and ends before it."""
    body = """
def train():
    if index == 1:
        raise ValueError('bad batch')
    time.sleep(0.5)
    class AbortedError(Exception): pass
    raise AbortedError('Collective ops is aborted by: worker 1 has gone')
try:
    train()
finally:
    if index == 1:
        import traceback
        traceback.print_exc()
        time.sleep(1)
"""
    (tmp_path / "train.py").write_text(HEAD + body)
    done = cli(["-n", "2", "train.py"], cwd=tmp_path)
    assert done.returncode == 1
    line = HEAD.count("\n") + 4
    assert done.stderr.splitlines()[-1] == (
        f"[launch] worker 1 failed first: ValueError: bad batch (train.py:{line})"
    )


FRAMES = (
    'Traceback (most recent call last):\n  File "/home/me/train.py", line 31, in <module>\n'
    "    f()\n"
    '  File "/v/lib/python3.11/site-packages/keras/src/utils.py", line 7, in g\n    raise e\n'
)
IGNORED = (
    "Exception ignored in: <function Pool.__del__ at 0x7f>\nTraceback (most recent call last):\n"
    '  File "/home/me/pool.py", line 5, in __del__\nTypeError: not subscriptable\n'
)
OUTPUTS = {
    "an_error": (FRAMES + "ValueError: bad batch", "ValueError: bad batch (/home/me/train.py:31)"),
    "without_a_message": (FRAMES + "KeyboardInterrupt", "KeyboardInterrupt (/home/me/train.py:31)"),
    "of_a_module": (FRAMES + "a.b.Odd: x: y\nmore", "Odd: x: y (/home/me/train.py:31)"),
    "the_last_of_two": (
        f"{FRAMES}KeyError: 1\n\nDuring handling of the above exception, another exception "
        f"occurred:\n\n{FRAMES}ValueError: bad",
        "ValueError: bad (/home/me/train.py:31)",
    ),
    "of_a_graph": (
        f"{FRAMES}tensorflow.python.framework.errors_impl.InvalidArgumentError: Graph execution "
        'error:\n\nDetected at node Check defined at (most recent call last):\n  File "/a.py", '
        "line 1, in <module>\n\nIndex 7 is out of range\n\t [[{{node Check}}]] [Op:__inference_1]",
        "InvalidArgumentError: Index 7 is out of range (/home/me/train.py:31)",
    ),
    "of_a_pipeline": (
        FRAMES + "a.b.InvalidArgumentError: {{function_node __wrapped__Next_device_/job:worker}} "
        "Error in user-defined function: bad batch [Op:IteratorGetNext] name:",
        "InvalidArgumentError: Error in user-defined function: bad batch [Op:IteratorGetNext] "
        "name: (/home/me/train.py:31)",
    ),
    "in_a_library_alone": (
        FRAMES.replace("/home/me/train.py", "<frozen runpy>") + "OSError: full",
        "OSError: full (/v/lib/python3.11/site-packages/keras/src/utils.py:7)",
    ),
    "in_user_code": (
        FRAMES + 'ValueError: in user code:\n\n    File "/home/me/train.py", line 9, in step\n'
        "        run()\n\n    ValueError: `x` must be 1. Received: x=2\n",
        "ValueError: `x` must be 1. Received: x=2 (/home/me/train.py:31)",
    ),
    "marks_without_indent": (
        FRAMES + "^^^^~~^^\nValueError: bad",
        "ValueError: bad (/home/me/train.py:31)",
    ),
    "a_script_with_a_syntax_error": (
        '  File "/home/me/train.py", line 2\n    def f(:\n          ^\nSyntaxError: invalid syntax',
        "SyntaxError: invalid syntax (/home/me/train.py:2)",
    ),
    "of_workers_that_disagree": (
        FRAMES + "a.b.Disagreement: make the same calls:\nworker 0: evaluate at step 8\n"
        "worker 1: end epoch 1\n(Steps count.)",
        "Disagreement: make the same calls: worker 0: evaluate at step 8; worker 1: end epoch 1 "
        "(/home/me/train.py:31)",
    ),
    "in_color": (
        'Traceback (most recent call last):\n  File \x1b[35m"/home/me/train.py"\x1b[0m, line '
        "\x1b[35m31\x1b[0m, in \x1b[35m<module>\x1b[0m\n    \x1b[31mf\x1b[0m\x1b[1;31m()\x1b[0m\n"
        "\x1b[1;35mValueError\x1b[0m: \x1b[35mbad batch\x1b[0m",
        "ValueError: bad batch (/home/me/train.py:31)",
    ),
    "before_an_ignored_exception": (
        FRAMES + "ValueError: bad batch:\nworker 1: full\n" + IGNORED + "worker 2: not of it\n",
        "ValueError: bad batch: worker 1: full; worker 2: not of it (/home/me/train.py:31)",
    ),
    "before_an_ignored_chain": (
        FRAMES
        + "ValueError: bad\n"
        + IGNORED
        + "\nDuring handling of the above exception, another "
        f"exception occurred:\n\n{FRAMES}TypeError: no\n",
        "ValueError: bad (/home/me/train.py:31)",
    ),
    "an_ignored_exception_alone": ("one\n" + IGNORED, "exit code 1; its last line: one"),
    "after_a_progress_bar": (
        "40/200 - loss: 2.3" + FRAMES + "ValueError: bad batch",
        "ValueError: bad batch (/home/me/train.py:31)",
    ),
    "no_traceback": ("one\ntwo\n\n", "exit code 1; its last line: two"),
    "a_torn_traceback": (FRAMES, "exit code 1; its last line:     raise e"),
    "nothing": ("", "exit code 1; its last line: (no output)"),
}


@loop("name", OUTPUTS)
def test_first_cause(name):
    output, text = OUTPUTS[name]
    assert root_cause.first_failure([root_cause.Failure(4, 1, output, 0.0)]) == (
        4,
        f"worker 4 failed first: {text}",
    )


def test_ignored_exception_has_no_place():
    error = FRAMES + "ValueError: bad batch\n"
    assert root_cause.place(error + IGNORED) == root_cause.place(error) == "/home/me/train.py:31"


HIDDEN = {  # with the module that the error names
    "AttributeError: module 'random' has no attribute 'Random'": "random",
    "AttributeError: partially initialized module 'random' from '/a/random.py' has no attribute "
    "'x' (most likely due to a circular import)": "random",
    "ImportError: cannot import name 'typing' from 'numpy' (/a/numpy.py)": "numpy",
    "ImportError: cannot import name 'x' from partially initialized module 'numpy' (most likely "
    "due to a circular import) (/a/numpy.py)": "numpy",
    "ModuleNotFoundError: No module named 'tensorflow.python'; 'tensorflow' is not a package": (
        "tensorflow"
    ),
    "AttributeError: partially initialized module 'tf_redsync' has no attribute 'rank' (most "
    "likely due to a circular import)": "tf_redsync",
    "AttributeError: module 'own_module' has no attribute 'x'": None,
    "ModuleNotFoundError: No module named 'own_module.part'; 'own_module' is not a package": None,
    "ValueError: random": None,
}


@loop("error", HIDDEN)
def test_file_that_shadows_a_module(error):
    with tempfile.TemporaryDirectory() as folder:
        output = FRAMES.replace("/home/me/", f"{folder}/") + error
        failure = root_cause.Failure(0, 1, output, 0.0)
        assert "hides" not in root_cause.first_failure([failure])[1]
        for name in ("random", "numpy", "tensorflow", "tf_redsync", "own_module"):
            Path(folder, f"{name}.py").touch()
        hint = f"{folder}/{HIDDEN[error]}.py hides the module"
        assert (hint in root_cause.first_failure([failure])[1]) == bool(HIDDEN[error])


VICTIMS = (
    "tensorflow.python.framework.errors_impl.AbortedError: Collective ops is aborted by: x",
    "tensorflow.python.framework.errors_impl.UnavailableError: Socket closed",
    "tf_redsync.cluster.agreement.Disagreement: worker 1 has ended its program, and worker 0 "
    "waits for it:",
    "tensorflow.python.framework.errors_impl.AbortedError: worker 1 has failed: ValueError: bad",
    "tf_redsync.cluster.agreement.Disagreement: worker 1 has failed: ValueError: bad",
)


@loop("error", VICTIMS)
def test_secondary_failure_is_not_the_first_cause(error):
    victim = root_cause.Failure(0, 1, FRAMES + error, 1.0)
    later = root_cause.Failure(1, 1, FRAMES + "ValueError: bad", 2.0)
    assert root_cause.first_failure([victim, later])[0] == 1
    assert root_cause.first_failure([victim, root_cause.Failure(1, -9, "", 2.0)]) == (
        1,
        "worker 1 failed first: ended by SIGKILL, possibly out of memory",
    )
    assert root_cause.first_failure([victim])[1].startswith("worker 0 failed first: ")


def test_earliest_and_all_equal_failures_are_named():
    ends = [root_cause.Failure(i, 1, FRAMES + f"ValueError: {i // 2}", 3.0 - i) for i in range(3)]
    assert root_cause.first_failure(ends)[1].startswith("worker 2 failed first: ValueError: 1")
    assert root_cause.first_failure(ends[:2]) == (
        1,
        "workers 0, 1 failed with the same error: ValueError: 0 (/home/me/train.py:31)",
    )
    assert root_cause.first_failure([]) is None


BAD = {
    "restarts": (["-n", "2", "--max-restarts", "-1"], "`max_restarts` must be at least 0"),
    "no_workers": (["-n", "2", "--min-workers", "0"], "`min_workers` must be from 1 to the number"),
    "more_workers": (["-n", "2", "--min-workers", "3"], "Received: min_workers=3"),
    "fewer": (["-n", "2", "--min-workers", "1"], "min_workers=1, prewarm=False, max_restarts=0"),
    "prewarm": (["-n", "2", "--prewarm"], "`prewarm` need `max_restarts`"),
    "grace": (["-n", "2", "--stop-grace", "-1"], "`stop_grace` must be at least 0"),
    "start_timeout": (["-n", "2", "--start-timeout", "0"], "`start_timeout` must be positive"),
    "nothing": ([], "Received: workers=None"),
}


@loop("name", BAD)
def test_bad_arguments(name, capsys):
    args, words = BAD[name]
    with pytest.raises(SystemExit) as error:
        launch.main([*args, __file__])
    assert error.value.code == 2
    assert words in capsys.readouterr().err


def test_start_timeout_reaches_the_workers(tmp_path):
    body = "print(os.environ['TF_REDSYNC_START_TIMEOUT'])"
    assert job(tmp_path, body, 1, start_timeout=45.0).workers[0].output == "45"
    assert "TF_REDSYNC_START_TIMEOUT" not in os.environ
