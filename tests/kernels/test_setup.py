"""setup.py compiles what has changed; where something is missing, it goes on and says so."""

import os
import pathlib
import shlex
import shutil
import subprocess
import sys
import venv

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
CXX = os.environ.get("CXX", "g++")
needs_compiler = pytest.mark.skipif(
    shutil.which(shlex.split(CXX)[0]) is None, reason="there is no C++ compiler"
)
# Enough of it to build with, and quick to import.
FAKE_TENSORFLOW = """
__version__ = "9.9.9"
class version:
    GIT_VERSION = "v9"
class sysconfig:
    get_include = staticmethod(lambda: "/nowhere")
    get_compile_flags = staticmethod(lambda: ["-I/nowhere", "-DFROM_TENSORFLOW=1"])
    get_link_flags = staticmethod(list)
"""
SOURCES = {
    "fake.h": "namespace redsync { struct P { const char* name; };"
    " inline P Passes() { return {}; } }",
    "core/cpu/a.cc": '#include "custom_ops/core/cpu/a.h"\nextern "C" const char a[] = A;\n',
    "core/cpu/a.h": '#include "custom_ops/core/cpu/inner.h"\n',
    "core/cpu/inner.h": '#define A "old text of a"\n',
    "core/cpu/b.cc": 'extern "C" const int b = FROM_TENSORFLOW;\n',
}


@pytest.fixture
def tree(tmp_path):
    """A copy of the project with a few sources of its own, and an old library."""
    for name in ("pyproject.toml", "README.md", "setup.py"):
        shutil.copy(ROOT / name, tmp_path / name)
    for folder in ("core/cpu", "core/gpu", "kernels"):
        (tmp_path / "custom_ops" / folder).mkdir(parents=True)
    for name in ("sources.bzl", "installed.py", "build_library.py"):
        shutil.copy(ROOT / "custom_ops" / name, tmp_path / "custom_ops")
    version = (ROOT / "custom_ops" / "kernels" / "version.cc").read_text()
    version = version.replace("custom_ops/core/cpu/pass.h", "custom_ops/fake.h")
    for name, text in {**SOURCES, "kernels/version.cc": version}.items():
        (tmp_path / "custom_ops" / name).write_text(text)
    (tmp_path / "fake").mkdir()
    (tmp_path / "fake" / "tensorflow.py").write_text(FAKE_TENSORFLOW)
    compiler = tmp_path / "compiler"
    compiler.write_text(f'#!/bin/sh\necho "$@" >> "{tmp_path}/compiled"\nexec {CXX} "$@"\n')
    compiler.chmod(0o755)
    package = tmp_path / "tf_redsync" / "ops"
    package.mkdir(parents=True)
    (package / "_redsync_ops.so").write_bytes(b"left by an earlier build")
    return tmp_path


def build(tree, **env):
    given = {
        "PYTHONPATH": str(tree / "fake"), "XDG_CACHE_HOME": str(tree / "cache"),
        "CXX": str(tree / "compiler"), "TF_REDSYNC_CUDA": "0", "REDSYNC_CUDA_ARCHITECTURES": "",
    }  # fmt: skip
    run = subprocess.run(
        [sys.executable, "setup.py", "build_ext", "--inplace"],
        cwd=tree, env={**os.environ, **given, **env}, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-2000:]
    return run.stderr


def compiled(tree) -> list[str]:
    """Names of the sources that the compiler has been called for since the last look."""
    log = tree / "compiled"
    calls = [line.split() for line in log.read_text().splitlines()]
    log.unlink()
    return sorted(pathlib.Path(word).name for call in calls for word in call if word[-3:] == ".cc")


def library(tree) -> bytes:
    (path,) = tree.glob("tf_redsync/ops/*.so")
    return path.read_bytes()


@needs_compiler
def test_only_what_has_changed_is_compiled(tree):
    assert "for TensorFlow 9.9.9" in build(tree)
    assert compiled(tree) == ["a.cc", "b.cc", "version.cc"]
    assert b"old text of a" in library(tree)
    build(tree)
    assert compiled(tree) == []
    (tree / "custom_ops" / "core" / "cpu" / "inner.h").write_text('#define A "new text of a"\n')
    build(tree)
    assert compiled(tree) == ["a.cc"]
    assert b"new text of a" in library(tree) and b"old text of a" not in library(tree)
    build(tree, CXXFLAGS="-DMORE")
    assert compiled(tree) == ["a.cc", "b.cc", "version.cc"]


@needs_compiler
def test_objects_serve_another_copy_of_the_tree(tree, tmp_path_factory):
    build(tree)
    compiled(tree)
    copy = tmp_path_factory.mktemp("copy") / "tree"
    shutil.copytree(tree, copy, ignore=shutil.ignore_patterns("cache", "build", "*.so"))
    stamp = {"XDG_CACHE_HOME": str(tree / "cache"), "CXX": str(tree / "compiler")}
    assert "built the native library" in build(copy, **stamp)
    assert compiled(tree) == [] and library(copy) == library(tree)
    newer = FAKE_TENSORFLOW.replace("9.9.9", "9.9.8")
    (copy / "fake" / "tensorflow.py").write_text(newer)
    build(copy, **stamp)
    assert compiled(tree) == ["a.cc", "b.cc", "version.cc"], "of another TensorFlow"


@needs_compiler
def test_without_a_cache_folder(tree):
    (tree / "cache").write_text("not a folder")
    assert "built the native library" in build(tree)


@pytest.mark.parametrize(
    ("case", "reason"),
    [("no compiler", "no compiler"), ("broken source", "this file is broken")],
)
def test_failure_is_said_and_survived(tree, case, reason):
    if case == "no compiler":
        said = build(tree, CXX=str(tree / "no-such-compiler"))
    elif shutil.which(shlex.split(CXX)[0]) is None:
        pytest.skip("there is no C++ compiler")
    else:
        (tree / "custom_ops" / "core" / "cpu" / "bad.cc").write_text("#error this file is broken\n")
        said = build(tree)
    assert "THE NATIVE LIBRARY IS NOT BUILT" in said
    assert reason in said and "pure TensorFlow" in said
    # A library of other sources must not be taken for this tree's.
    assert not list(tree.glob("tf_redsync/**/*.so"))


@needs_compiler
def test_without_tensorflow(tree):
    (tree / "fake" / "tensorflow.py").write_text("raise ImportError('no TensorFlow here')\n")
    said = build(tree)
    assert "THE NATIVE LIBRARY IS NOT BUILT" in said
    assert "TensorFlow cannot be imported" in said and "no TensorFlow here" in said
    assert "tensorflow-cpu" in said


@needs_compiler
def test_pip_hides_the_tensorflow_that_the_library_is_for(tree):
    """While pip builds, a PYTHONPATH of its own stands in for what is installed."""
    hidden = tree / "pip-build-env-1" / "site"
    hidden.mkdir(parents=True)
    (hidden / "tensorflow.py").write_text("raise ImportError('hidden')\n")
    venv.create(tree / "venv", symlinks=True)  # what is installed there is quick to import
    (installed,) = (tree / "venv").glob("lib/python*/site-packages")
    shutil.copy(tree / "fake" / "tensorflow.py", installed)
    program = "import installed; print(installed.tensorflow()['version'])"
    env = {**os.environ, "PYTHONPATH": str(hidden), "PYTHONNOUSERSITE": "1"}
    run = subprocess.run(
        [tree / "venv" / "bin" / "python", "-c", program],
        cwd=tree / "custom_ops", env=env, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert run.stdout.strip() == "9.9.9", run.stderr[-2000:]


FAKE_NVCC = """#!/bin/sh
case "$*" in
  *--version*) echo "Cuda compilation tools, release 99.9, V99.9.1" ;;
  *--dryrun*) echo '#$ LIBRARIES=  "-L/nowhere"' >&2 ;;
  *) echo "$@" > "$0.called"; echo "this compiler is broken" >&2; exit 1 ;;
esac
"""


@needs_compiler
@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("nvcc fails", ["THE GPU KERNELS ARE NOT BUILT", "this compiler is broken"]),
        ("left out", ["GPU kernels: none: left out by TF_REDSYNC_CUDA=0"]),
        ("no nvcc", ["GPU kernels: none: there is no nvcc in CUDA_HOME/bin"]),
    ],
)
def test_without_cuda_the_rest_is_built(tree, case, said):
    (tree / "custom_ops" / "core" / "gpu" / "a.cu").write_text("// never compiled\n")
    nvcc = tree / "cuda" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    if case != "no nvcc":
        nvcc.write_text(FAKE_NVCC)
        nvcc.chmod(0o755)
    text = build(
        tree, CUDA_HOME=str(tree / "cuda"), TF_REDSYNC_CUDA="0" if case == "left out" else ""
    )
    assert all(part in text for part in said), text
    assert b"none: " in library(tree)


@pytest.mark.parametrize(
    ("wanted", "machine_code", "ptx"),
    [
        ("", ["75", "80", "86", "89", "90"], "90"),
        ("80", ["80"], "80"),
        ("75 90", ["75", "90"], "90"),
    ],
)
def test_architectures(tree, wanted, machine_code, ptx):
    """Which GPUs nvcc is asked to compile for."""
    nvcc = tree / "cuda" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text(FAKE_NVCC)
    nvcc.chmod(0o755)
    program = "import installed, json; print(json.dumps(installed.cuda()))"
    env = {**os.environ, "CUDA_HOME": str(tree / "cuda"), "REDSYNC_CUDA_ARCHITECTURES": wanted}
    env.pop("TF_REDSYNC_CUDA", None)
    run = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tree / "custom_ops", env=env, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    codes = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in machine_code]
    codes.append(f"-gencode=arch=compute_{ptx},code=compute_{ptx}")
    for code in codes:
        assert f'"{code}"' in run.stdout
    assert run.stdout.count("-gencode") == len(codes)
    assert f"CUDA 99.9: {', '.join('sm_' + a for a in machine_code)} and PTX" in run.stdout
