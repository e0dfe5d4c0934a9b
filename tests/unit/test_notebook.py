"""`notebook_launcher`: results, output, errors and exits of real workers, without TensorFlow."""

import atexit
import functools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import cloudpickle
import pytest

import tf_redsync as rs
from tests.loops import loop
from tests.patience import PATIENCE
from tests.processes import alive
from tf_redsync.cli import launch, notebook

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def short_grace(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    monkeypatch.setattr(notebook.launch, "run", functools.partial(launch.run, grace=0.3))


def wait_for(condition, seconds=30):
    end = time.monotonic() + PATIENCE * seconds
    while not condition():
        assert time.monotonic() < end, "condition not reached"
        time.sleep(0.02)


def rank():
    return json.loads(os.environ["TF_CONFIG"])["task"]["index"]


# Workers receive this module's functions like a notebook's: by value.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def test_rank_0_returns_and_prints(capsys, monkeypatch):
    monkeypatch.setenv("OF_THE_NOTEBOOK", "seen")
    factor = 10

    def train(a, b):
        own = json.loads(os.environ["TF_CONFIG"])
        print("rank", own["task"]["index"], len(own["cluster"]["worker"]))
        print("error of rank", own["task"]["index"], file=sys.stderr)
        return factor * a + b, os.environ["OF_THE_NOTEBOOK"], os.getcwd()

    assert rs.notebook_launcher(train, 2, (3, 4)) == (34, "seen", os.getcwd())
    assert capsys.readouterr().out.splitlines() == ["rank 0 2", "error of rank 0"]
    assert rs.notebook_launcher(train, workers=1, args=[3, 4])[0] == 34
    assert capsys.readouterr().out.splitlines()[0] == "rank 0 1"


def test_incomplete_lines_are_shown(tmp_path, monkeypatch):
    seen = tmp_path / "seen"

    class Cell:
        def __init__(self):
            self.text = ""

        def write(self, text):
            self.text += text
            if self.text.endswith("\r━━ 1/2"):
                seen.touch()

        def flush(self):
            pass

    def train():
        print("\r━━ 1/2", end="", flush=True)
        end = time.monotonic() + 30
        while not seen.exists() and time.monotonic() < end:
            time.sleep(0.02)
        print("\r━━━ 2/2")
        return seen.exists()

    cell = Cell()
    monkeypatch.setattr(sys, "stdout", cell)
    assert notebook.notebook_launcher(train, workers=1)
    assert cell.text == "\r━━ 1/2\r━━━ 2/2\n"


def test_log_noise_is_filtered_after_a_progress_bar(capsys):
    noise = b"2026-01-01 00:00:00.123456: I tensorflow/core/x.cc:1] This TensorFlow binary\n"
    show = notebook._Cell()
    for chunk in (noise, b"\r1/2 \xe2", b"\x94\x81", noise, b"\r2/2\n" + noise, b"end\n"):
        show(chunk)
    assert capsys.readouterr().out == "\r1/2 ━\r2/2\nend\n"


def test_folder_is_private_and_removed():
    def train():
        folder = Path(sys.orig_argv[-1])
        return {str(p): p.stat().st_mode & 0o777 for p in (folder, *folder.iterdir())}

    found = notebook.notebook_launcher(train)
    assert len(found) == 3
    assert {(0o700 if Path(p).suffix == "" else 0o600) for p in found} == set(found.values())
    assert not any(Path(p).exists() for p in found)


def test_error_of_rank_1_is_raised_and_others_are_ended(capsys):
    class Diverged(ValueError):
        def __init__(self, step, loss):
            super().__init__(f"loss {loss} in step {step}")
            self.step = step

    def train():
        print("before the error of", rank(), flush=True)
        printed = Path(sys.orig_argv[-1]) / "printed"
        if rank() == 1:
            wait_for(printed.exists)
            atexit.register(lambda: 1 / 0)  # printed as an ignored exception
            raise Diverged(7, loss=float("inf"))
        printed.touch()
        time.sleep(600)

    began = time.monotonic()
    with pytest.raises(Diverged, match="loss inf in step 7") as caught:
        notebook.notebook_launcher(train)
    assert time.monotonic() - began < PATIENCE * 60
    assert caught.value.step == 7
    notes = "\n".join(caught.value.__notes__)
    assert "worker 1" in notes and "before the error of 1" in notes
    assert notes.count("raise Diverged(7") == 1 and "notebook_worker" not in notes
    assert capsys.readouterr().out == "before the error of 0\n"


def test_error_of_rank_0_is_shown_once(capsys):
    def train():
        print("before the error")
        try:
            {}["missing"]
        except KeyError as error:
            raise ValueError("of rank 0") from error

    with pytest.raises(ValueError, match="of rank 0") as caught:
        notebook.notebook_launcher(train, workers=1)
    (note,) = caught.value.__notes__
    assert "worker 0" in note and "KeyError: 'missing'" in note and "ValueError: of rank 0" in note
    assert capsys.readouterr().out == "before the error\n"


def test_later_error_of_rank_0_is_a_note(capsys, monkeypatch):
    monkeypatch.setattr(notebook.launch, "run", functools.partial(launch.run, grace=60))

    def train():
        folder = Path(sys.orig_argv[-1])
        if rank() == 1:
            (folder / "pid").write_text(str(os.getpid()))
            raise ValueError("of rank 1")
        wait_for((folder / "error_1.pickle").exists)
        wait_for(lambda: not alive((folder / "pid").read_text()))
        raise ArithmeticError("of rank 0")

    with pytest.raises(ValueError, match="of rank 1") as caught:
        notebook.notebook_launcher(train)
    first, *_, last = caught.value.__notes__
    assert "worker 1" in first and "ArithmeticError: of rank 0" in last
    assert capsys.readouterr().out == ""


class WithLock(RuntimeError):
    """An error that cannot be pickled."""

    def __init__(self):
        super().__init__("held")
        self.lock = threading.Lock()


@loop(
    "make",
    [
        lambda: KeyError("a"),
        lambda: OSError(2, "No such file", "x"),
        lambda: UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid"),
        lambda: json.JSONDecodeError("bad", "{", 1),
    ],
)
def test_errors_keep_class_and_text(make):
    def train():
        raise make()

    with pytest.raises(type(make())) as caught:
        notebook.notebook_launcher(train, workers=1)
    assert str(caught.value) == str(make()) and caught.value.args == make().args


def test_error_that_cannot_be_unpickled_is_named():
    def train():
        raise WithLock

    with pytest.raises(rs.DistributedError, match="worker 0 .*WithLock: held") as caught:
        notebook.notebook_launcher(train, workers=1)
    assert "raise WithLock" in caught.value.__notes__[0]


def test_chained_errors_have_one_note():
    def train():
        print("first")
        try:
            {}["missing"]
        except KeyError as error:
            if rank() == 1:
                raise ValueError("second") from error

    with pytest.raises(ValueError, match="second") as caught:
        notebook.notebook_launcher(train)
    traceback, earlier = caught.value.__notes__
    assert "KeyError: 'missing'" in traceback and earlier.splitlines()[1:] == ["first"]


def test_result_that_cannot_be_pickled_raises():
    with pytest.raises(TypeError, match=r"`train`.*lock"):
        notebook.notebook_launcher(lambda: threading.Lock(), workers=1)


def test_only_rank_0_needs_a_picklable_result():
    assert notebook.notebook_launcher(lambda: threading.Lock() if rank() else "fine") == "fine"


@loop(
    "end, text",
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "SIGKILL"),
        (lambda: os._exit(3), "exit code 3"),
        (lambda: sys.exit(0), "exited"),
        (lambda: sys.exit(75), "exit code 75"),
    ],
)
def test_exit_of_a_worker_raises(end, text):
    with pytest.raises(rs.DistributedError, match=text):
        notebook.notebook_launcher(end, workers=1)


def test_bad_arguments_start_no_process(monkeypatch):
    lock = threading.Lock()
    for error, name, call in (
        (TypeError, "`train`", lambda: notebook.notebook_launcher(3)),
        (TypeError, "`train`", lambda: notebook.notebook_launcher(lambda: lock)),
        (TypeError, "`args`", lambda: notebook.notebook_launcher(print, 2, (lock,))),
        (TypeError, "`args`", lambda: notebook.notebook_launcher(print, 2, "text")),
        (ValueError, "`workers`", lambda: notebook.notebook_launcher(print, 0)),
        (ValueError, "`workers`", lambda: notebook.notebook_launcher(print, 2.0)),
    ):
        with pytest.raises(error, match=name):
            call()
    monkeypatch.setenv("TF_CONFIG", "{}")
    with pytest.raises(ValueError, match="TF_CONFIG"):
        notebook.notebook_launcher(print)
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(ImportError, match="pip install cloudpickle"):
        notebook.notebook_launcher(print)


# A program whose `__main__` is a notebook's: code without a file. It imitates the command
# line, so that it does not import TensorFlow.
NOTEBOOK = """
import linecache, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
sys.orig_argv = ["python", "-m", "tf_redsync"]
from tf_redsync.cli.notebook import notebook_launcher
assert "tensorflow" not in sys.modules

def run_cell(number, text):
    name = f"/tmp/ipykernel_0/{number}.py"
    lines = [line + "\\n" for line in text.splitlines()]
    linecache.cache[name] = len(text), None, lines, name
    exec(compile(text, name, "exec"), globals())

for number, text in enumerate(open(sys.argv[1]).read().split("# %%\\n")):
    run_cell(number, text)
"""


def start(tmp_path, cells):
    (tmp_path / "notebook.py").write_text(NOTEBOOK)
    (tmp_path / "cells").write_text(cells)
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return subprocess.Popen(
        [sys.executable, tmp_path / "notebook.py", tmp_path / "cells"],
        env={**os.environ, "PYTHONPATH": path},
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


CELLS = """
import inspect, sys
sys.path.append("beside")
import library

class Result:
    def __init__(self, value): self.value = value

class Stopped(Exception): pass

total = 0

def add(value):
    global total
    total += value
    return total

# %%
def train(value):
    assert __name__ == "__main__" and sys.argv[1:] == []
    add(value)
    return Result((add(value), library.name, inspect.getsource(add)))

result = notebook_launcher(train, args=(4,))
assert isinstance(result, Result) and total == 0
print(result.value)

# %%
def stop():
    raise Stopped("on purpose")

try:
    notebook_launcher(stop, workers=1)
except Stopped as error:
    print("caught", error.__notes__[0].count('ipykernel_0/2.py", line 2, in stop'))
    print('raise Stopped("on purpose")' in error.__notes__[0])
"""


def test_functions_and_classes_of_cells(tmp_path):
    (tmp_path / "beside").mkdir()
    (tmp_path / "beside" / "library.py").write_text("name = 'beside'\n")
    out = start(tmp_path, CELLS).communicate(timeout=PATIENCE * 60)[0]
    source = "def add(value):\n    global total\n    total += value\n    return total\n"
    assert out.startswith(f"{(8, 'beside', source)}\n"), out
    assert out.endswith("caught 1\nTrue\n"), out


ENDLESS = """
import os, time, traceback

def train():
    with open(f"pid_{os.getpid()}.tmp", "w") as file:
        pass
    os.rename(file.name, f"pid_{os.getpid()}")
    time.sleep(600)

try:
    notebook_launcher(train, 3)
except KeyboardInterrupt as error:
    frames = len(traceback.extract_tb(error.__traceback__))
    print("interrupted", frames, [name for name in os.listdir() if name.startswith("tf_redsync")])
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_workers_end_with_an_interrupt_and_with_the_notebook(tmp_path, monkeypatch, number):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    program = start(tmp_path, ENDLESS)

    def pids():
        found = [re.fullmatch(r"pid_(\d+)", path.name) for path in tmp_path.iterdir()]
        return [int(match[1]) for match in found if match]

    wait_for(lambda: len(pids()) == 3)
    assert all(map(alive, pids()))
    program.send_signal(number)
    out = program.communicate(timeout=PATIENCE * 30)[0]
    wait_for(lambda: not any(map(alive, pids())))
    if number == signal.SIGINT:
        # the cell's folder and one of ours
        assert program.returncode == 0 and out == "interrupted 2 []\n"
    else:
        assert program.returncode == -signal.SIGKILL
