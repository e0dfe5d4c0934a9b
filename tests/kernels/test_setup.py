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
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, tmp_path / name)
    # Without TensorFlow's headers, which nothing here includes and which take long to precompile.
    script, headers = (
        (ROOT / "setup.py").read_text(),
        '("op.h", "op_kernel.h", "shape_inference.h")',
    )
    assert script.count(headers) == 1
    (tmp_path / "setup.py").write_text(script.replace(headers, "()"))
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


FAKE_NVCC = """#!/bin/sh
case "$*" in
  *--version*) echo "Cuda compilation tools, release 99.9, V99.9.1" ;;
  *--dryrun*) echo '#$ LIBRARIES=  "-L/nowhere"' >&2 ;;
  *) echo "this compiler is broken" >&2; exit 1 ;;
esac
"""


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("nvcc fails", ["THE GPU KERNELS ARE NOT BUILT", "this compiler is broken"]),
        ("left out", ["GPU kernels: none: left out by TF_REDSYNC_CUDA=0"]),
        ("no nvcc", ["GPU kernels: none: there is no nvcc in CUDA_HOME/bin"]),
    ],
)
def test_without_cuda_the_rest_is_built(tree, case, said):
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        pytest.skip("there is no C++ compiler")
    (tree / "custom_ops" / "ops" / "bad.cc").unlink()
    (tree / "custom_ops" / "core" / "gpu").mkdir(parents=True)
    (tree / "custom_ops" / "core" / "gpu" / "a.cu").write_text("// never compiled\n")
    (tree / "custom_ops" / "kernels").mkdir()
    version = (ROOT / "custom_ops" / "kernels" / "version.cc").read_text()
    version = version.replace("custom_ops/core/cpu/pass.h", "custom_ops/fake.h")
    (tree / "custom_ops" / "kernels" / "version.cc").write_text(version)
    fake = "namespace redsync { struct P { const char* name; }; inline P Passes() { return {}; } }"
    (tree / "custom_ops" / "fake.h").write_text(fake)
    nvcc = tree / "cuda" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    if case != "no nvcc":
        nvcc.write_text(FAKE_NVCC)
        nvcc.chmod(0o755)
    run = build(
        tree, CUDA_HOME=str(tree / "cuda"), TF_REDSYNC_CUDA="0" if case == "left out" else ""
    )
    assert run.returncode == 0, run.stderr[-2000:]
    for text in said:
        assert text in run.stderr
    (library,) = tree.glob("tf_redsync/ops/*.so")
    assert b"none: " in library.read_bytes()
