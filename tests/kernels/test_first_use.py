"""Build at first use: once per TensorFlow, and its error messages.

Each test starts processes with a small tree of sources instead of the package's, without
TensorFlow.
"""

import json
import os
import pathlib
import shlex
import shutil
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from tests.kernels import small_tree
from tests.kernels.small_tree import CXX, ROOT, compiled

pytestmark = [
    pytest.mark.skipif(
        shutil.which(shlex.split(CXX)[0]) is None, reason="there is no C++ compiler"
    ),
    pytest.mark.timeout(120),
]
TENSORFLOW = {
    "version": "9.9.9",
    "commit": "v9",
    "include": "/nowhere",
    "compile_flags": ["-DFROM_TENSORFLOW=1"],
    "link_flags": [],
    "build": {"is_cuda_build": False},
}
ALL = ["a.cc", "kernels.cc", "version.cc"]
# The package without its imports; its sources are the tree's. `change` runs first.
PROGRAM = """
import json, os, pathlib, sys, types
sys.modules["tf_redsync"] = package = types.ModuleType("tf_redsync")
package.__path__ = [sys.argv[1] + "/tf_redsync"]
from tf_redsync.building import BuildError, libraries, once
libraries.sources = lambda: pathlib.Path(sys.argv[2])
exec(sys.argv[5])
try:
    show = sys.argv[6] == "True"
    print(libraries.op_library(json.loads(sys.argv[3]), json.loads(sys.argv[4]), show=show))
except BuildError as error:
    print("error:", error)
"""


@pytest.fixture
def tree(tmp_path):
    return small_tree.make(tmp_path)


def start(tree, *, change="", gpus=(), env=None, show=False, **tensorflow):
    given = {
        "TF_REDSYNC_CACHE": str(tree / "cache"), "CXX": str(tree / "compiler"),
        "CUDA_HOME": str(tree / "cuda"), "REDSYNC_CUDA_ARCHITECTURES": "", "CXXFLAGS": "",
        "TF_REDSYNC_CUDA": "", **(env or {}),
    }  # fmt: skip
    facts = [json.dumps({**TENSORFLOW, **tensorflow}), json.dumps(gpus), change, str(show)]
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(ROOT), str(tree), *facts], env={**os.environ, **given},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip


def ask(tree, **how) -> tuple[str, str]:
    """Returns the library's path and the messages of one process."""
    process = start(tree, **how)
    out, messages = process.communicate(timeout=60)
    assert process.returncode == 0, messages
    return out.strip(), messages


def wait_for(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_compiling(tree):
    return (tree / "compiling").exists()


def slow(tree, then=f'exec {CXX} "$@"'):
    """Replaces the compiler: it waits for the file `go`, then runs `then` for each source."""
    wait = f'touch "{tree}/compiling"; while [ ! -e "{tree}/go" ]; do sleep 0.02; done'
    note = f'echo "$@" >> "{tree}/compiled"'
    compile_it = f"{wait}; {note}; {then}"
    small_tree.compiler(tree, f'case "$*" in *" -c "*) {compile_it} ;; esac\nexec {CXX} "$@"')


def test_concurrent_processes_build_once_and_report_it(tree):
    slow(tree)
    first = start(tree)
    wait_for(lambda: is_compiling(tree))
    others = [start(tree) for _ in range(3)]
    lines = [other.stderr.readline() for other in others]
    assert all("waiting for another process that builds the native library" in x for x in lines)
    assert all("30 minutes" in line for line in lines)
    (tree / "go").touch()
    answers = {process.communicate(timeout=60)[0].strip() for process in (first, *others)}
    (path,) = answers
    assert pathlib.Path(path).is_file() and pathlib.Path(path).is_relative_to(tree / "cache")
    assert compiled(tree) == ALL


def test_existing_library_prints_no_message(tree):
    path, messages = ask(tree)
    assert "building the native library for TensorFlow 9.9.9, once: about" in messages
    assert "built it in" in messages and len(messages.splitlines()) == 2
    compiled(tree)
    assert ask(tree, include="/elsewhere", link_flags=["-L/elsewhere"]) == (path, "")


def test_empty_files_after_a_crash_of_the_machine_are_made_again(tree):
    path = pathlib.Path(ask(tree)[0])
    content = path.read_bytes()
    compiled(tree)
    for file in (path, *(tree / "cache" / "objects").glob("*.o")):
        os.truncate(file, 0)
    assert ask(tree)[0] == str(path) and compiled(tree) == ALL
    assert path.read_bytes() == content


def test_library_per_tensorflow_compiler_and_sources(tree):
    others = [
        {"version": "9.9.8"},
        {"commit": "v9-another"},
        {"build": {"is_cuda_build": True}},
        {"compile_flags": ["-DFROM_TENSORFLOW=2"]},
        {"env": {"CXXFLAGS": "-DMORE"}},
    ]
    found = [ask(tree)[0], *(ask(tree, **other)[0] for other in others)]
    small_tree.compiler(tree, f'[ "$1" = --version ] && echo newer\nexec {CXX} "$@"')
    found.append(ask(tree)[0])
    (tree / "custom_ops" / "core" / "cpu" / "inner.h").write_text('#define A "new text of a"\n')
    found.append(ask(tree)[0])
    assert len(set(found)) == len(found) and all(pathlib.Path(path).is_file() for path in found)
    assert b"new text" in pathlib.Path(found[-1]).read_bytes()


def test_killed_build_leaves_no_library(tree):
    slow(tree)
    first = start(tree)
    wait_for(lambda: is_compiling(tree))
    os.killpg(first.pid, signal.SIGKILL)
    first.communicate(timeout=60)
    assert not list((tree / "cache").rglob("*.so"))
    (tree / "go").touch()
    path, messages = ask(tree)
    assert pathlib.Path(path).is_file() and "waiting" not in messages


def test_killed_build_resumes(tree):
    """It reuses the completed objects."""
    note = f'echo "$@" >> "{tree}/compiled"'
    wait = f'touch "{tree}/compiling"; while [ ! -e "{tree}/go" ]; do sleep 0.02; done'
    last = f'case "$*" in *"objects/kernels."*) {wait} ;; esac'
    small_tree.compiler(tree, f'case "$*" in *" -c "*) {note} ;; esac\n{last}\nexec {CXX} "$@"')
    first = start(tree)
    objects = tree / "cache" / "objects"
    wait_for(lambda: is_compiling(tree) and len(list(objects.glob("*.o"))) == 1)
    os.killpg(first.pid, signal.SIGKILL)
    first.communicate(timeout=60)
    assert compiled(tree) == ["a.cc", "kernels.cc"]
    (tree / "go").touch()
    (objects / "of others").mkdir()
    (objects / "notes.txt").write_text("of others")
    for path in objects.iterdir():
        if path.name in ("of others", "notes.txt"):
            os.utime(path, (0, 0))  # long ago
    path, _ = ask(tree)
    assert {"of others", "notes.txt"} <= {p.name for p in objects.iterdir()}
    assert pathlib.Path(path).is_file()
    assert compiled(tree) == ["kernels.cc", "version.cc"]


def test_children_of_a_killed_process_are_awaited(tree):
    slow(tree)
    first = start(tree)
    wait_for(lambda: is_compiling(tree))
    first.kill()
    first.wait(timeout=60)
    second = start(tree)
    assert "waiting" in second.stderr.readline()
    (tree / "go").touch()
    path = second.communicate(timeout=60)[0].strip()
    assert pathlib.Path(path).is_file() and compiled(tree) == ALL


def test_failure_is_one_line_and_others_do_not_repeat_it(tree):
    slow(tree, then='echo "a.cc:1:2: error: no such thing" >&2; exit 1')
    first = start(tree)
    wait_for(lambda: is_compiling(tree))
    others = [start(tree) for _ in range(2)]
    assert all("waiting" in other.stderr.readline() for other in others)
    (tree / "go").touch()
    answers = [process.communicate(timeout=60)[0].strip() for process in (first, *others)]
    for answer in answers:
        assert answer.startswith("error: The build of the native library failed (a.cc:1:2: error")
        assert "python -m tf_redsync build" in answer and len(answer.splitlines()) == 1
    assert len(compiled(tree)) <= len(ALL), "once"
    small_tree.compiler(tree, f'exec {CXX} "$@"')
    assert pathlib.Path(ask(tree)[0]).is_file(), "a later start must retry"


def test_unusable_cache_folders(tree):
    """Prints one line for each reason, before compiling."""
    (tree / "file").touch()
    noexec = "os.statvfs = lambda folder: types.SimpleNamespace(f_flag=os.ST_NOEXEC)"
    read_only = "os.access = lambda folder, how: False"
    cases = [
        ({"env": {"TF_REDSYNC_CACHE": str(tree / "file" / "cache")}}, "Not a directory"),
        ({"change": noexec}, "mounted `noexec`"),
        ({"change": read_only}, "Permission denied"),
        ({"env": {"TF_REDSYNC_CACHE": str(tree / ("x" * 300))}}, "File name too long"),
    ]
    for how, reason in cases:
        answer, messages = ask(tree, **how)
        assert answer.startswith("error: The folder ") and reason in answer, answer
        assert "Set TF_REDSYNC_CACHE" in answer
        assert len(answer.splitlines()) == 1 and messages == ""
    assert not (tree / "compiled").exists() or compiled(tree) == []


def test_without_a_compiler_a_folder_of_another_user_is_no_error(tree):
    """Such as that of HOME in a container which runs as another user."""
    unusable = {"TF_REDSYNC_CACHE": str(tree / ("x" * 300)), "CXX": str(tree / "no-compiler")}
    assert "no C++ compiler" in ask(tree, env=unusable)[0]


def test_the_default_folder(tree):
    variables = {"TF_REDSYNC_CACHE": "", "XDG_CACHE_HOME": "relative", "HOME": str(tree / "home")}
    assert ask(tree, env=variables)[0].startswith(str(tree / "home" / ".cache" / "tf_redsync"))
    no_home = "os.environ.pop('HOME'); import pwd; pwd.getpwuid = {}.__getitem__"
    answer, printed = ask(tree, env=variables, change=no_home)
    assert answer.startswith("error: This user has no home") and "Set TF_REDSYNC_CACHE" in answer
    assert len(answer.splitlines()) == 1 and printed == ""


def test_python_does_not_search_the_scripts_folder(tree):
    assert pathlib.Path(ask(tree, env={"PYTHONSAFEPATH": "1"})[0]).is_file()


@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")
def test_empty_name_of_the_compiler_is_the_default(tree):
    assert pathlib.Path(ask(tree, env={"CXX": ""})[0]).is_file()


def test_full_disk(tree):
    said_by_it = "a.cc: fatal error: error writing to x.s: No space left on device"
    small_tree.compiler(
        tree, f'[ "$1" = --version ] && exec {CXX} "$@"\necho "{said_by_it}" >&2; exit 1'
    )
    answer = ask(tree)[0]
    assert "No space left on device" in answer and len(answer.splitlines()) == 1
    assert "space" in answer and "TF_REDSYNC_CACHE" in answer


def test_error_of_the_linker(tree):
    said_by_it = "ld: a.o: error adding symbols: file in wrong format"
    summary = "collect2: error: ld returned 1 exit status"
    fails = f'printf "%s\\n" "{said_by_it}" "{summary}" >&2; exit 1'
    small_tree.compiler(tree, f'case "$*" in *-shared*) {fails} ;; esac\nexec {CXX} "$@"')
    assert f"failed ({said_by_it})" in ask(tree)[0]


def test_lock_of_another_user(tree):
    """Such a file can be read and locked, but not written."""
    read_only = """
    def opened(path, flags, *mode, open=os.open):
        if str(path).endswith(".lock") and flags & os.O_RDWR:
            raise PermissionError(13, "Permission denied")
        return open(path, flags | os.O_CREAT, *mode)
    os.open = opened
    """
    path, _ = ask(tree, change=textwrap.dedent(read_only))
    assert pathlib.Path(path).is_file()


def test_no_compiler(tree):
    missing = {"env": {"CXX": str(tree / "no-compiler")}}
    answer, messages = ask(tree, **missing)
    assert answer.startswith("error: There is no C++ compiler") and "apt-get install g++" in answer
    assert len(answer.splitlines()) == 1 and messages == ""
    path = ask(tree)[0]
    assert ask(tree, **missing) == (path, ""), "the existing library must load"
    assert "no C++ compiler" in ask(tree, version="9.9.8", **missing)[0], (
        "another TensorFlow needs a compiler"
    )


def test_wait_has_a_limit(tree):
    slow(tree)
    first = start(tree)
    wait_for(lambda: is_compiling(tree))
    answer = ask(tree, change="once.LIMIT_SECONDS = 0.5")[0]
    assert "Another process has been building" in answer and ".lock" in answer
    os.killpg(first.pid, signal.SIGKILL)
    first.communicate(timeout=60)


def test_build_has_a_limit(tree):
    slow(tree)
    answer = ask(tree, change="libraries.LIMIT_SECONDS = 0.5")[0]
    assert "took more than" in answer
    (tree / "go").touch()


def test_gpu_kernels_are_built_with_a_gpu_or_on_request(tree):
    """nvcc fails here: the library has no GPU kernels, but is stored as the one with them."""
    (tree / "custom_ops" / "core" / "gpu" / "a.cu").write_text("// never compiled\n")
    small_tree.nvcc(tree)
    called = tree / "cuda" / "bin" / "nvcc.called"
    plain = ask(tree)[0]
    assert not called.exists() and "/cpu-" in plain
    assert b"saw no GPU, no nvcc worked" in pathlib.Path(plain).read_bytes()
    assert ask(tree, gpus=["90"], env={"CUDA_HOME": str(tree / "none")})[0] == plain
    assert "/cuda-" in ask(tree, gpus=["80"])[0]
    assert "sm_80" in called.read_text() and "sm_90" not in called.read_text()
    called.unlink()
    with_cuda = ask(tree, env={"TF_REDSYNC_CUDA": "1"})[0]
    assert "/cuda-" in with_cuda and "sm_75" in called.read_text()
    assert ask(tree, gpus=["80"], env={"TF_REDSYNC_CUDA": "0"})[0] == plain
    # A machine with a GPU but without nvcc.
    assert "/cuda-" in ask(tree, gpus=["90"], env={"CUDA_HOME": str(tree / "none")})[0]


def test_failed_gpu_kernels_are_reported_and_built_again_on_request(tree):
    (tree / "custom_ops" / "core" / "gpu" / "a.cu").write_text("// compiled by the fake nvcc\n")
    small_tree.nvcc(tree)
    path, messages = ask(tree, gpus=["80"])
    assert "this compiler is broken" in messages and "python -m tf_redsync build" in messages
    assert "THE GPU KERNELS ARE NOT BUILT" in ask(tree, gpus=["80"], show=True)[1]
    assert ask(tree, gpus=["80"]) == (path, ""), "an automatic start must not retry"
    small_tree.repair_nvcc(tree)
    assert ask(tree, gpus=["80"]) == (path, "")
    assert b"CUDA 99.9: sm_80" not in pathlib.Path(path).read_bytes()
    assert ask(tree, gpus=["80"], show=True)[0] == path
    assert b"CUDA 99.9: sm_80" in pathlib.Path(path).read_bytes()
    without = {"CUDA_HOME": str(tree / "none")}
    for env in ({}, without):
        assert ask(tree, gpus=["80"], show=True, env=env) == (path, ""), "it must be kept"


def test_missing_nvcc_is_reported_on_request(tree):
    how = {"env": {"TF_REDSYNC_CUDA": "1", "CUDA_HOME": str(tree / "none")}}
    path, messages = ask(tree, **how)
    assert "no GPU kernels" not in messages
    assert "there is no nvcc in CUDA_HOME" in ask(tree, show=True, **how)[1]
    assert ask(tree, show=True) == (path, "")


def test_library_depends_on_the_host_only_by_flags_that_do(tree):
    def paths(flags):
        hosts = (f"import platform; platform.node = lambda: 'pod-{n}'" for n in range(2))
        return {ask(tree, env={"CXXFLAGS": flags}, change=host)[0] for host in hosts}

    assert len(paths("-g0 -march=x86-64")) == 1
    assert len(paths("-g0 -mtune=native")) == 2
