"""tests/run.sh skips tests while a hash is unchanged: the hash covers all their inputs."""

import ast
import pathlib
import re
import shlex
import subprocess

import pytest

ROOT = pathlib.Path(__file__).parents[2]
LEFT_OUT = ("tests/kernels", "tests/gpu")
OURS = ("benchmarks", "tests", "tf_redsync", "tools")


def not_hashed(paths):
    """Returns the paths, relative to the root, that the hash does not cover."""
    script = (ROOT / "tests" / "run.sh").read_text(encoding="utf-8")
    (words,) = re.findall(r"^fingerprint\(\) {\n  {\n    find (.*?) -type f", script, re.S | re.M)
    hashed = {pathlib.Path(word) for word in shlex.split(words.replace("\\\n", " "))}
    return [str(p) for p in sorted(map(pathlib.Path, paths)) if not hashed & {p, *p.parents}]


def imported_files(path):
    """Returns the project's files that a module imports, without parent packages."""
    for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            names = [node.module or "", *(f"{node.module}.{a.name}" for a in node.names)]
        else:
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        for name in names:
            file = pathlib.Path(*name.split("."))
            if file.parts and file.parts[0] in OURS and len(file.parts) > 1:
                both = file.with_suffix(".py"), file / "__init__.py"
                yield from (one for one in both if (ROOT / one).is_file())


def test_hash_covers_imported_modules():
    waiting = [f.relative_to(ROOT) for folder in LEFT_OUT for f in (ROOT / folder).glob("*.py")]
    seen = set(waiting)
    while waiting:
        new = set(imported_files(waiting.pop())) - seen
        waiting += new
        seen |= new
    assert pathlib.Path("tf_redsync/ops/selection.py") in seen
    assert not_hashed(seen) == []


def test_hash_covers_files_that_tests_read():
    """Tests name them from the root, and Bazel's files by labels and paths."""
    tests = [f.read_text("utf-8") for folder in LEFT_OUT for f in (ROOT / folder).glob("*.py")]
    named = {n for t in tests for n in re.findall(r'ROOT((?: / "[\w./]+")+)', t)}
    found = {"/".join(re.findall(r'"([\w./]+)"', n)) for n in named}
    builds = [ROOT / "WORKSPACE", *ROOT.glob("custom_ops/**/BUILD"), *ROOT.glob("tests/**/BUILD")]
    for text in (f.read_text("utf-8") for f in builds):
        found |= {*re.findall(r'load\("//([\w/]+):', text), *re.findall(r'path = "([\w/]+)"', text)}
    assert {"tools/gpu_check.sh", "tools/build_defs", "custom_ops"} <= found
    assert not_hashed(found) == []


@pytest.mark.parametrize(
    ("bazel", "status"), [("true", 0), ("false", 1), ("kill -KILL $BASHPID", 1)]
)
def test_failed_background_stage_is_a_failure(tmp_path, bazel, status):
    """This includes a stage that was killed before it could record its failure."""
    script = (ROOT / "tests" / "run.sh").read_text(encoding="utf-8")
    (stage,) = re.findall(r"^stage\(\) {\n.*?^}\n", script, re.S | re.M)
    start = 'stage "bazel" bazel_test >"$work/bazel" 2>&1 &\n  background=$!\n'
    end = script[script.index('if [ -n "$background" ]') : script.index("if [ $status -eq 0 ]")]
    assert start in script and "status=1" in end
    lines = [f"work={tmp_path}", "status=0", stage, f"bazel_test() {{ {bazel}; }}", start, end]
    done = subprocess.run(["bash", "-c", "\n".join([*lines, "exit $status"])], timeout=60)
    assert done.returncode == status
