"""setup.py and Bazel compile the same files with the same flags."""

import ast
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import setuptools

from tf_redsync.building import libraries

ROOT = Path(__file__).resolve().parents[2]
OPS = ROOT / "custom_ops"
TENSORFLOW = {
    "version": "9.9.9",
    "commit": "v9",
    "include": "/tensorflow/include",
    "compile_flags": [],
    "link_flags": [],
}


def constants() -> dict:
    """Returns the literals that sources.bzl assigns; the file must be Starlark and Python."""
    tree = ast.parse((OPS / "sources.bzl").read_text())
    found = {}
    for node in tree.body[1:]:
        assert isinstance(node, ast.Assign), ast.unparse(node)
        found[node.targets[0].id] = ast.literal_eval(node.value)
    return found


def matches(pattern: str) -> set[str]:
    """Returns the files under custom_ops/ that match by Bazel's rules."""
    parts = re.split(r"(\*\*/|\*)", pattern)
    rule = "".join({"**/": "(?:[^/]+/)*", "*": "[^/]*"}.get(p, re.escape(p)) for p in parts)
    files = (p.relative_to(OPS).as_posix() for p in OPS.rglob("*") if p.is_file())
    return {name for name in files if re.fullmatch(rule, name)}


def listed_files(*names: str) -> list[str]:
    patterns = [pattern for name in names for pattern in constants()[name]]
    return sorted(f"custom_ops/{f}" for f in set().union(*map(matches, patterns)))


@pytest.fixture
def setup_sources(monkeypatch):
    """Returns the C++ sources that setup.py passes to its compiler."""
    monkeypatch.setattr(setuptools, "setup", lambda **arguments: None)
    # imported unmodified: its folder comes first in sys.path
    runpy.run_path(str(ROOT / "setup.py"))
    import build_library

    sources = [*build_library.SOURCES, *build_library.PRELOAD_SOURCES]
    for_gpu = listed_files("GPU_OP_SOURCES")
    return [s for s in sources if s.endswith(".cc") and s not in for_gpu]


def test_objects_depend_on_all_included_files(setup_sources):
    """Otherwise a build after a header change would reuse a stale object."""
    import build_library

    compiler = shutil.which("g++") or pytest.skip("no g++")
    for source in build_library.CORE_SOURCES:
        command = [compiler, "-std=c++17", "-MM", "-I", str(ROOT), source]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        read = {Path(word) for word in done.stdout.replace("\\\n", " ").split()[1:]}
        read = {os.path.relpath(ROOT / path, ROOT) for path in read}
        assert {f for f in read if f.startswith("custom_ops")} == build_library.reads(source)


def test_files_that_another_build_removes_are_no_error(setup_sources, monkeypatch, tmp_path):
    """Two builds may clean the shared folder of objects at once."""
    import build_library

    monkeypatch.setenv("TF_REDSYNC_CACHE", str(tmp_path))
    objects = build_library.Objects(fallback=tmp_path)
    digest = "0" * 32
    for name in (f"a.cc.{digest}.o", f"b.cc.{digest}.o", f"c.cc.{digest}.7.partial"):
        (tmp_path / "objects" / name).touch()
        os.utime(tmp_path / "objects" / name, (0, 0))

    def removed_meanwhile(path):
        path.unlink()
        return False

    monkeypatch.setattr(Path, "is_symlink", removed_meanwhile)  # checked before the time stamp
    objects.clean()
    assert not list((tmp_path / "objects").iterdir())


def test_builds_with_equal_process_ids_write_different_files(setup_sources, monkeypatch, tmp_path):
    """Containers that share a folder without locks may have equal process IDs."""
    import build_library

    monkeypatch.setenv("TF_REDSYNC_CACHE", str(tmp_path))
    written = []

    def compiler(command, *_):
        file = Path(command[-1])
        written.append(file)
        if len(written) == 1:  # another build compiles and renames meanwhile
            build_library.Objects(tmp_path).make(path, ["c++"])
        file.touch()

    monkeypatch.setattr(build_library, "run_compiler", compiler)
    objects = build_library.Objects(tmp_path)
    path = tmp_path / "objects" / f"a.cc.{'0' * 32}.o"
    objects.make(path, ["c++"])
    assert len(set(written)) == 2 and path.exists()
    assert all(build_library.KEPT.fullmatch(name.name) for name in written)


def test_files_are_on_disk_before_they_get_their_names(setup_sources, monkeypatch, tmp_path):
    """After a crash of the machine they could be empty otherwise."""
    import build_library

    calls = []
    monkeypatch.setenv("TF_REDSYNC_CACHE", str(tmp_path))
    monkeypatch.setattr(build_library, "run_compiler", lambda command, _: Path(command[-1]).touch())
    monkeypatch.setattr(os, "fsync", lambda file: calls.append("fsync"))
    monkeypatch.setattr(os, "replace", lambda old, new: calls.append("replace"))
    build_library.Objects(tmp_path).make(tmp_path / f"a.cc.{'0' * 32}.o", ["c++"])
    build_library.build_preload(tmp_path / "preload.so")
    assert calls == ["fsync", "replace"] * 2


def test_objects_depend_on_architecture_and_c_library(setup_sources, monkeypatch, tmp_path):
    """Machines that share a home print equal versions of their compilers."""
    import build_library

    monkeypatch.setenv("TF_REDSYNC_CACHE", str(tmp_path))
    cuda = {"command": ["nvcc"], "compiler": "nvcc 12"}

    def names():
        build = build_library.NativeBuild(tmp_path, TENSORFLOW, cuda)
        source = build_library.VERSION
        plans = [build._plan(source), build._cuda_plan(source), *build._core_plans().values()]
        return {path.name for path, _ in plans}

    found = [names()]
    monkeypatch.setattr(build_library.platform, "machine", lambda: "another")
    found.append(names())
    monkeypatch.setattr(build_library.platform, "libc_ver", lambda: ("musl", "1"))
    found.append(names())
    assert len(set().union(*found)) == 3 * len(found[0])


def test_objects_depend_on_the_host_only_by_flags_that_do(setup_sources, monkeypatch, tmp_path):
    """Containers have another host name at each start."""
    import build_library

    monkeypatch.setenv("TF_REDSYNC_CACHE", str(tmp_path))

    def folders(flags):
        monkeypatch.setenv("CXXFLAGS", flags)
        found = set()
        for host in ("pod-1", "pod-2"):
            monkeypatch.setattr(build_library.platform, "node", lambda host=host: host)
            plans = build_library.CoreBuild(tmp_path)._core_plans()
            found.add(frozenset(path for path, _ in plans.values()))
        return found

    assert build_library.HOST_FLAG == libraries._HOST_FLAG
    assert len(folders("-g -march=x86-64")) == 1
    for flag in ("-march=native", "-mcpu=native", "-mtune=native"):
        assert len(folders(f"-g {flag}")) == 2
    monkeypatch.setenv("CXX", "g++ -march=native")
    assert len(folders("-g")) == 2


def test_headers_of_tensorflow_precede_those_of_the_flags(setup_sources, monkeypatch, tmp_path):
    """Conda's CXXFLAGS have a folder that may hold another version of Abseil."""
    import build_library

    monkeypatch.setenv("TF_REDSYNC_CACHE", str(tmp_path))
    monkeypatch.setenv("CXXFLAGS", "-O2 -isystem /conda/include")
    build = build_library.NativeBuild(tmp_path, TENSORFLOW, {"missing": "there is no nvcc"})
    _, command = build._plan(build_library.VERSION)
    folders = [command[i + 1] for i, word in enumerate(command) if word == "-isystem"]
    assert folders == ["/tensorflow/include", "/conda/include"]


def refuse(*_, **__):
    raise PermissionError(1, "Operation not permitted")


def test_files_of_another_user_are_no_error(setup_sources, monkeypatch, tmp_path):
    """In a folder with the sticky bit they can be neither changed nor replaced."""
    import build_library

    monkeypatch.setenv("TF_REDSYNC_CACHE", str(tmp_path))
    objects = build_library.Objects(tmp_path)
    source = objects.including("all", ["a.cc"])
    path = tmp_path / "objects" / f"a.cc.{'0' * 32}.o"
    path.write_text("object")
    os.utime(path, (0, 0))
    monkeypatch.setattr(os, "utime", refuse)
    monkeypatch.setattr(os, "replace", refuse)
    objects.make(path, ["no-compiler"])
    assert objects.including("all", ["a.cc"]) == source
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda path, mode: False)
        objects.clean()
    monkeypatch.setattr(Path, "unlink", refuse)
    objects.clean()
    assert sorted(os.listdir(tmp_path / "objects")) == [path.name, Path(source).name]


def test_each_source_is_in_one_list():
    lists = [name for name in constants() if name.endswith(("SOURCES", "HEADERS"))]
    files = [file for name in lists for file in listed_files(name)]
    assert len(files) == len(set(files)), "in two lists"
    code = {".cc", ".h", ".cu", ".cuh"}
    existing = {p.relative_to(ROOT).as_posix() for p in OPS.rglob("*") if p.suffix in code}
    assert set(files) == existing and len(existing) > 15


def test_setup_compiles_the_listed_sources(setup_sources):
    assert setup_sources == listed_files("CORE_SOURCES", "OP_SOURCES") + listed_files(
        "PRELOAD_SOURCES"
    )


def test_bazel_has_no_own_sources_or_flags():
    for name in ("BUILD", "redsync_ops.bzl"):
        text = (OPS / name).read_text()
        assert not re.search(r"\w\.(cc|h|cuh?)\"|\"-O|-std=|-ffp|-DNDEBUG", text)
    loaded = (OPS / "redsync_ops.bzl").read_text()
    found = (OPS / "installed.py").read_text()  # CUDA's, which the repository rule passes to nvcc
    assert all(f'"{name}"' in loaded or f'LISTS["{name}"]' in found for name in constants())


def query(tmp_path, expression: str) -> list[str]:
    """Returns the labels in Bazel's answer as paths."""
    folders = [f"--output_user_root={tmp_path}/user", f"--output_base={tmp_path}/base"]
    command = ["bazel", "--batch", *folders, "query", "--noshow_progress", expression]
    env = {**os.environ, "PYTHON_BIN_PATH": sys.executable}
    with subprocess.Popen(
        command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            out, err = process.communicate(timeout=240)
        finally:
            process.kill()
    assert process.returncode == 0, err[-3000:]
    labels = [line for line in out.splitlines() if line.startswith("//")]
    return sorted(label.removeprefix("//").replace(":", "/") for label in labels)


@pytest.mark.deep  # Without a source `bazel test` would fail to link or to load the library.
@pytest.mark.skipif(shutil.which("bazel") is None, reason="there is no bazel")
def test_bazel_compiles_the_same_sources_as_setup(tmp_path, setup_sources):
    labels = (
        'kind("source file", labels(srcs, //custom_ops:all) + labels(srcs, //tests/kernels:all))'
    )
    found = query(tmp_path, labels)
    for_gpu = listed_files("GPU_OP_SOURCES")  # Only where nvcc exists.
    compiled = [f for f in found if f.endswith(".cc") and f not in for_gpu]
    programs = sorted(p.relative_to(ROOT).as_posix() for p in ROOT.glob("tests/kernels/*_test.cc"))
    assert compiled == sorted(setup_sources + programs) and programs
