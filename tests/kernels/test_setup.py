"""setup.py: without a compiler, or with one that fails, the installation succeeds and says why."""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture
def tree(tmp_path):
    """A copy of the project with one source file, which does not compile, and an old library."""
    for name in ("setup.py", "pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, tmp_path / name)
    ops = tmp_path / "custom_ops" / "ops"
    ops.mkdir(parents=True)
    shutil.copy(ROOT / "custom_ops" / "sources.bzl", ops.parent)
    (ops / "bad.cc").write_text("#error this file is broken\n")
    package = tmp_path / "tf_redsync" / "ops"
    package.mkdir(parents=True)
    (package / "_redsync_ops.so").write_bytes(b"left by an earlier build")
    return tmp_path


def build(tree, **env):
    return subprocess.run(
        [sys.executable, "setup.py", "build_ext", "--inplace"],
        cwd=tree, env={**os.environ, **env}, capture_output=True, text=True, timeout=240,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("case", "reason"),
    [("no compiler", "no C++ compiler"), ("broken source", "this file is broken")],
)
def test_failure_is_said_and_survived(tree, case, reason):
    if case == "no compiler":
        run = build(tree, CXX=str(tree / "no-such-compiler"))
    elif shutil.which(os.environ.get("CXX", "g++")) is None:
        pytest.skip("there is no C++ compiler")
    else:
        run = build(tree)
    assert run.returncode == 0, run.stderr[-2000:]
    assert "THE NATIVE LIBRARY IS NOT BUILT" in run.stderr
    assert reason in run.stderr and "pure TensorFlow" in run.stderr
    # A library of other sources must not be taken for this tree's.
    assert not list(tree.glob("tf_redsync/**/*.so"))


def test_without_tensorflow(tree):
    # A module of this name that cannot be imported stands before the installed one.
    blocked = tree / "blocked"
    blocked.mkdir()
    (blocked / "tensorflow.py").write_text("raise ImportError('no TensorFlow here')\n")
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        pytest.skip("there is no C++ compiler")
    run = build(tree, PYTHONPATH=str(blocked))
    assert run.returncode == 0, run.stderr[-2000:]
    assert "THE NATIVE LIBRARY IS NOT BUILT" in run.stderr
    assert "TensorFlow cannot be imported" in run.stderr and "no TensorFlow here" in run.stderr
