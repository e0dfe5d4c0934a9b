"""README.md and CONTRIBUTING.md are valid: code parses; names, flags and files exist."""

import ast
import importlib.util
import inspect
import os
import pathlib
import re
import shlex
import subprocess
import sys

import numpy as np
import pytest

from tests.deep import DEEP
from tests.distributed import forks
from tests.distributed.cluster import ENVIRONMENT
from tests.loops import loop
from tests.patience import PATIENCE
from tf_redsync import launch

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGES = ["README.md", "CONTRIBUTING.md"]
_FENCE = re.compile(r"^( *)```(\w+)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)


def blocks(page, language):
    """The fenced blocks of one language, indentation removed."""
    found = []
    for indent, name, text in _FENCE.findall((ROOT / page).read_text()):
        if name == language:
            found.append(re.sub(f"^{indent}", "", text, flags=re.MULTILINE))
    return found


def commands(page):
    """Every shell command of a page as words, without comments and environment settings."""
    for block in blocks(page, "bash"):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            while words and re.match(r"\w+=", words[0]):
                words = words[1:]
            if words and words[0] != "export":
                yield words


def defined_flags(script="examples/train_digits.py"):
    """Names of the absl flags of an example: its own, and those of `tf_redsync.flags`."""
    return {
        node.args[0].value
        for path in (script, "tf_redsync/flags.py")
        for node in ast.walk(ast.parse((ROOT / path).read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr.startswith("DEFINE_")
    }


def dotted(node):
    """`a.b.c` for an attribute chain, else None."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else None


def new_side(block):
    """The new side of a diff."""
    kept = [line[1:] for line in block.splitlines() if not line.startswith("-")]
    return "\n".join(kept) + "\n"


def test_pages_have_code():
    assert len(blocks("README.md", "diff")) == 1
    assert len(blocks("README.md", "bash")) >= 2
    assert {"exchange", "density", "epochs", "optimizer", "data_dir"} <= defined_flags()


DOCS = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("docs/**/*.md"))


def resolve(name):
    """The object that a page names `rs.TopK` or `tf_redsync.TopK`; None for other names."""
    first, _, rest = (name or "").partition(".")
    if first not in ("rs", "tf_redsync") or not rest:
        return None
    value = importlib.import_module("tf_redsync")
    for part in rest.split("."):
        value = getattr(value, part)
    return value


@loop("page", [*PAGES, *DOCS])
def test_python_blocks_use_existing_names(page):
    for block in [*blocks(page, "python"), *map(new_side, blocks(page, "diff"))]:
        for node in ast.walk(ast.parse(block)):
            resolve(dotted(node))
            function = resolve(dotted(node.func)) if isinstance(node, ast.Call) else None
            if function is not None:
                # Raises TypeError for an argument that does not exist.
                keywords = {k.arg: None for k in node.keywords if k.arg}  # ** may hold any argument
                inspect.signature(function).bind(*[None] * len(node.args), **keywords)


@pytest.mark.parametrize("page", PAGES)
def test_commands_name_existing_scripts_modules_and_flags(page):
    seen = 0
    for words in commands(page):
        for word in words:
            if re.fullmatch(r"[\w./]+\.(py|sh)", word) or word.startswith(("./", "tests/")):
                assert (ROOT / word).exists(), words
                seen += 1
        if "-m" in words and words[0] == "python":
            module = words[words.index("-m") + 1]
            path = ROOT / module.replace(".", "/")
            assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file(), words
        for script in [word for word in words if re.fullmatch(r"examples/\w+\.py", word)]:
            own = words[words.index(script) + 1 :]
            used = {re.match(r"--(\w+)", word).group(1) for word in own}
            assert used <= defined_flags(script), words
    assert seen


@loop("page", [*PAGES, "CHANGELOG.md", *DOCS])
def test_links_are_valid(page):
    for target in re.findall(r"\]\(([^)#]+)", (ROOT / page).read_text()):
        if not target.startswith("https://"):
            assert (ROOT / page).parent.joinpath(target).exists(), target


def test_readme_table_has_format_of_quickstart():
    path = ROOT / "examples/quickstart.py"
    spec = importlib.util.spec_from_file_location("quickstart", path)
    quickstart = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(quickstart)
    (shown,) = blocks("README.md", "text")
    rows = [line.split() for line in shown.splitlines()[3:]]
    assert [row[0] for row in rows] == list(quickstart.RUNS)
    runs = {
        name: {
            "accuracy": float(accuracy),
            "bytes_per_step": int(sent.replace(",", "")),
            "ratio": float(ratio.removesuffix("x")),
            "step_ms": float(ms),
        }
        for name, accuracy, sent, ratio, ms, _ in rows
    }
    assert quickstart.table({"runs": runs}) == shown.rstrip("\n")
    for run in runs.values():
        assert run["ratio"] == round(runs["dense"]["bytes_per_step"] / run["bytes_per_step"], 1)


# Runs a block of the README. Names that the block leaves undefined are created on first use, since
# nothing may use TensorFlow before the strategy exists.
_RUN_BLOCK = """
import pathlib, sys
import numpy as np

def build_model():
    import keras
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(256, "relu"), keras.layers.Dense(256, "relu")]
    return keras.Sequential([keras.Input([16]), *layers, keras.layers.Dense(3, "softmax")])

def make_dataset():
    import tensorflow as tf
    x = np.random.default_rng(0).normal(size=[96, 16]).astype("float32")
    return tf.data.Dataset.from_tensor_slices((x, x[:, :3].argmax(-1))).batch(32)

class Reader(dict):
    def __missing__(self, name):
        made = {"build_model": lambda: build_model, "dataset": make_dataset}
        if name not in made:
            raise KeyError(name)
        return self.setdefault(name, made[name]())

names = Reader()
exec(pathlib.Path(sys.argv[1]).read_text(), {}, names)
model, dataset = names["model"], names["dataset"]
folder = pathlib.Path(sys.argv[2]) / str(names["strategy"].cluster_resolver.task_id)
folder.mkdir()
loss = model.evaluate(dataset)
rows = model.predict(dataset)
np.savez(folder / "end.npz", *model.get_weights(), rows=rows, loss=loss)
model.save(folder / "model.keras")
"""

_LOAD = """
import pathlib, sys
import numpy as np

# Whichever is imported first, Keras must find the optimizer's class.
import {first}
import {second}

folder = pathlib.Path(sys.argv[1])
model = keras.models.load_model(folder / "model.keras")
assert isinstance(model.optimizer.inner_optimizer, keras.optimizers.SGD)
assert model.optimizer.explain()
x = np.random.default_rng(0).normal(size=[96, 16]).astype("float32")
saved = np.load(folder / "end.npz")["rows"]
np.testing.assert_allclose(np.sort(model.predict(x), 0), np.sort(saved, 0), atol=1e-5)
"""


def run_python(code, cwd, *arguments):
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=PATIENCE * 200
    )


@pytest.mark.distributed
def test_first_example_runs_unchanged(tmp_path):
    (tmp_path / "block.py").write_text(new_side(blocks("README.md", "diff")[0]))
    (tmp_path / "run.py").write_text(_RUN_BLOCK)
    words = [tmp_path / "run.py", tmp_path / "block.py", tmp_path]
    job = launch.run(
        forks.command(ENVIRONMENT, *map(str, words)), 2, env=ENVIRONMENT, timeout=PATIENCE * 150
    )
    assert job.exit_code == 0, [worker.output for worker in job.workers]

    ends = [np.load(tmp_path / str(worker) / "end.npz") for worker in range(2)]
    assert "arr_5" in ends[0]
    for name in ends[0]:
        np.testing.assert_array_equal(ends[0][name], ends[1][name], err_msg=name)

    # Processes that have imported only the package.
    orders = [("keras", "tf_redsync"), ("tf_redsync", "keras")]  # each of them imports Keras
    for first, second in orders if DEEP else orders[:1]:
        code = _LOAD.format(first=first, second=second)
        done = run_python(code, tmp_path, str(tmp_path / "0"))
        assert done.returncode == 0, done.stderr


@pytest.mark.deep
@pytest.mark.skipif(sys.version_info >= (3, 12), reason="TensorFlow Addons ends at Python 3.11")
def test_addons_example_runs_unchanged(tmp_path):
    code = blocks("docs/addons.md", "python")[0] + (
        "\nimport tensorflow as tf\n"
        "weight = tf.Variable(tf.ones([3, 4]))\n"
        "optimizer.apply_gradients([(tf.ones([3, 4]), weight)])\n"
        "assert weight.numpy().max() < 1\n"
    )
    done = run_python(code, tmp_path)
    assert done.returncode == 0, done.stderr
