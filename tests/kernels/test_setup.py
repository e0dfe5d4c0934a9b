"""setup.py compiles changed sources only, and reports missing requirements."""

import json
import os
import shlex
import shutil
import subprocess
import sys

import pytest

from tests.kernels import small_tree
from tests.kernels.small_tree import CXX, FAKE_TENSORFLOW, compiled

needs_compiler = pytest.mark.skipif(
    shutil.which(shlex.split(CXX)[0]) is None, reason="there is no C++ compiler"
)


@pytest.fixture
def tree(tmp_path):
    """A copy of the project with a few sources of its own, and an old library."""
    small_tree.make(tmp_path)
    package = tmp_path / "tf_redsync" / "ops"
    package.mkdir(parents=True)
    (package / "_redsync_ops.so").write_bytes(b"left by an earlier build")
    return tmp_path


def build(tree, **env):
    given = {
        "TF_REDSYNC_CACHE": "",
        "PYTHONPATH": str(tree / "fake"), "XDG_CACHE_HOME": str(tree / "cache"),
        "CXX": str(tree / "compiler"), "TF_REDSYNC_CUDA": "0", "REDSYNC_CUDA_ARCHITECTURES": "",
    }  # fmt: skip
    run = subprocess.run(
        [sys.executable, "setup.py", "build_ext", "--inplace"],
        cwd=tree, env={**os.environ, **given, **env}, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-2000:]
    return run.stderr


def library(tree) -> bytes:
    (path,) = tree.glob("tf_redsync/ops/*.so")
    return path.read_bytes()


@needs_compiler
def test_only_changed_sources_are_compiled(tree):
    assert "for TensorFlow 9.9.9" in build(tree)
    assert compiled(tree) == ["a.cc", "kernels.cc", "version.cc"]
    assert b"old text of a" in library(tree)
    build(tree)
    assert compiled(tree) == []
    (tree / "custom_ops" / "core" / "cpu" / "inner.h").write_text('#define A "new text of a"\n')
    build(tree)
    assert compiled(tree) == ["a.cc"]
    assert b"new text of a" in library(tree) and b"old text of a" not in library(tree)
    build(tree, CXXFLAGS="-DMORE")
    assert compiled(tree) == ["a.cc", "kernels.cc", "version.cc"]


@needs_compiler
def test_objects_are_shared_by_copies_of_the_tree(tree, tmp_path_factory):
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
    assert compiled(tree) == ["kernels.cc", "version.cc"], "compiled for another TensorFlow"


@needs_compiler
def test_core_is_compiled_without_tensorflow(tree):
    """setup_venv.sh does so while pip installs TensorFlow."""
    (tree / "fake" / "tensorflow.py").write_text("raise ImportError('no TensorFlow here')\n")
    cache = {"TF_REDSYNC_CACHE": "", "XDG_CACHE_HOME": str(tree / "cache")}
    subprocess.run(
        [sys.executable, "custom_ops/build_library.py"],
        input='{"kind": "core"}', text=True, cwd=tree, check=True, timeout=240,
        env={**os.environ, **cache, "CXX": str(tree / "compiler")},
    )  # fmt: skip
    assert compiled(tree) == ["a.cc"]
    (tree / "fake" / "tensorflow.py").write_text(FAKE_TENSORFLOW)
    build(tree)
    assert compiled(tree) == ["kernels.cc", "version.cc"]


@needs_compiler
def test_without_a_cache_folder(tree):
    (tree / "cache").write_text("not a folder")
    assert "built the native library" in build(tree)


@needs_compiler
def test_a_relative_cache_folder_is_ignored(tree):
    build(tree, XDG_CACHE_HOME="relative", HOME=str(tree / "home"))
    assert (tree / "home" / ".cache" / "tf_redsync" / "objects").is_dir()
    assert not (tree / "relative").exists()


@pytest.mark.parametrize(
    ("case", "reason"),
    [("no compiler", "no compiler"), ("broken source", "this file is broken")],
)
def test_failure_is_reported_but_not_fatal(tree, case, reason):
    if case == "no compiler":
        output = build(tree, CXX=str(tree / "no-such-compiler"))
    elif shutil.which(shlex.split(CXX)[0]) is None:
        pytest.skip("there is no C++ compiler")
    else:
        (tree / "custom_ops" / "core" / "cpu" / "bad.cc").write_text("#error this file is broken\n")
        output = build(tree)
    assert "THE NATIVE LIBRARY IS NOT BUILT" in output
    assert reason in output and "pure TensorFlow" in output
    # The build must not keep a library of other sources.
    assert not list(tree.glob("tf_redsync/**/*.so"))


@needs_compiler
def test_without_tensorflow(tree):
    (tree / "fake" / "tensorflow.py").write_text("raise ImportError('no TensorFlow here')\n")
    output = build(tree)
    assert "THE NATIVE LIBRARY IS NOT BUILT" in output
    assert "TensorFlow cannot be imported" in output and "no TensorFlow here" in output
    assert "tensorflow-cpu" in output


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
    if case != "no nvcc":
        small_tree.nvcc(tree)
    text = build(
        tree, CUDA_HOME=str(tree / "cuda"), TF_REDSYNC_CUDA="0" if case == "left out" else ""
    )
    assert all(part in text for part in said), text
    assert b"none: " in library(tree)


def find_cuda(tree, wanted="", **variables):
    """Returns what installed.py finds with a fake nvcc, for these architectures."""
    small_tree.nvcc(tree)
    program = "import installed, json; print(json.dumps(installed.cuda()))"
    env = {**os.environ, "CUDA_HOME": str(tree / "cuda"), "REDSYNC_CUDA_ARCHITECTURES": wanted}
    env.pop("TF_REDSYNC_CUDA", None)
    env |= variables
    run = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tree / "custom_ops", env=env, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    return json.loads(run.stdout)


@pytest.mark.parametrize(
    ("wanted", "machine_code", "ptx"),
    [
        ("", ["75", "80", "86", "89", "90"], "90"),  # all that this nvcc supports
        ("80", ["80"], "80"),
        ("75 90", ["75", "90"], "90"),
        ("90 120", ["90"], "90"),
        ("90a 80", ["80", "90a"], "90a"),  # code for these runs on no later GPU
        ("120", [], "90"),  # a GPU that is newer than nvcc: PTX
    ],
)
def test_architectures(tree, wanted, machine_code, ptx):
    """Checks the GPU architectures passed to nvcc."""
    found = find_cuda(tree, wanted)
    codes = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in machine_code]
    codes.append(f"-gencode=arch=compute_{ptx},code=compute_{ptx}")
    assert [flag for flag in found["command"] if "-gencode" in flag] == codes
    names = ", ".join(f"sm_{a}" for a in machine_code) or f"compute_{ptx}"
    assert f"CUDA 99.9: {names} and PTX" in found["text"]


def test_nvcc_runs_the_chosen_compiler(tree):
    chosen = str(tree / "compiler")
    found = find_cuda(tree, CXX=chosen, NVCC_CCBIN="")
    dryrun = (tree / "cuda" / "bin" / "nvcc.dryrun").read_text()
    assert f"-ccbin {chosen} " in " ".join(found["command"]) and f"-ccbin {chosen} " in dryrun


@pytest.mark.parametrize("case", ["arguments", "nvcc's own variable", "default"])
def test_nvcc_chooses_its_compiler(tree, case):
    chosen = {"arguments": f"{tree}/compiler -m64", "default": ""}.get(case, f"{tree}/compiler")
    found = find_cuda(tree, CXX=chosen, NVCC_CCBIN="g++" if "own" in case else "")
    assert "-ccbin" not in found["command"]


@pytest.mark.parametrize("wanted", ["sm_90", "8.0", "80,90"])
def test_invalid_architectures_are_named(tree, wanted):
    found = find_cuda(tree, wanted)
    for text in (found["missing"], found["error"]):
        assert f"REDSYNC_CUDA_ARCHITECTURES={wanted!r}" in text
