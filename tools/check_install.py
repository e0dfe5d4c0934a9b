"""Installs the wheel and the sdist with several TensorFlow versions, and trains on two workers.

    python tools/check_install.py             # TensorFlow 2.16, 2.18 and 2.21: 20 minutes
    python tools/check_install.py --tensorflow "tensorflow-cpu==2.20.*" --python python3.12
    python tools/check_install.py --tensorflow "tensorflow==2.16.* keras==3.10.*"
    python tools/check_install.py --this      # the wheel with this interpreter's TensorFlow: 20 s

Every environment is new and has its own cache folder, in a folder that is removed at the end
(--keep keeps it). The script checks that pip keeps the installed TensorFlow; that the first start
builds the native library once for both workers; that the training runs on native ops, evaluates the
data of both workers, and continues from its checkpoint; that a second start builds nothing; and
that without a compiler one line reports it and the losses are the same.
--this checks only the first start, with objects that were compiled before.
"""

import argparse
import json
import math
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
# The oldest versions, some between, and the newest, each with the newest installed Python that it
# has packages for.
PINS = (
    ("tensorflow==2.16.* keras==3.10.*", ("python3.11", "python3.12", "python3.10")),
    ("tensorflow==2.18.*", ("python3.12", "python3.11", "python3.10")),
    ("tensorflow-cpu==2.21.*", ("python3.13", "python3.12", "python3.11")),
)
TRAINING = """
import json, os
import keras, numpy as np, tensorflow as tf
import tf_redsync as rs

keras.utils.set_random_seed(0)
strategy = rs.MultiWorkerMirroredStrategy()
with strategy.scope():
    model = keras.Sequential([keras.layers.Dense(64, "relu"), keras.layers.Dense(4)])
    optimizer = rs.DistributedOptimizer(keras.optimizers.SGD(0.1), rs.CodedGMC(momentum=0.9))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    metric = keras.metrics.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=[metric])
rng = np.random.default_rng(0)
x = rng.normal(size=(256, 20)).astype("float32")
y = np.argmax(x[:, :4], axis=1)
losses = model.fit(x, y, batch_size=64, epochs=3, verbose=0).history["loss"]
evaluated = model.evaluate(x, y, batch_size=48, verbose=0)  # the last batch is smaller
by_hand = float(loss(y, model(x)))
saved = tf.train.Checkpoint(model=model, optimizer=optimizer)
path = saved.write(f"saved-{strategy.cluster_resolver.task_id}")
saved.read(path).assert_existing_objects_matched()
losses += model.fit(x, y, batch_size=64, epochs=1, verbose=0).history["loss"]
from tf_redsync.ops import native
print("RESULT", json.dumps({
    "tensorflow": tf.__version__, "keras": keras.__version__, "backend": rs.ops.backend(),
    "workers": strategy.num_replicas_in_sync, "package": rs.__file__,
    "losses": losses, "evaluated": evaluated, "by_hand": by_hand,
    "library": str(native.library()) if rs.ops.backend() == "native" else None,
}))
"""
LIMIT = 1800


class Problem(Exception):
    """A check failed."""


def run(command, **options):
    """Runs a command and returns its output; raises `Problem` with all of it on failure."""
    done = subprocess.run(
        [str(word) for word in command], text=True, timeout=LIMIT, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options,
    )  # fmt: skip
    if done.returncode != 0:
        raise Problem(f"{' '.join(map(str, command))} failed:\n{done.stdout[-6000:]}")
    return done.stdout


def runs(interpreter):
    """Whether the interpreter runs, and is not only a tool's shim."""
    command = [interpreter, "-c", "import venv, ensurepip"]
    return (
        bool(shutil.which(interpreter))
        and not subprocess.run(command, capture_output=True).returncode
    )


def builder(folder):
    """Returns an interpreter with the setuptools that pyproject.toml asks for."""
    text = (ROOT / "pyproject.toml").read_text()
    minimum = re.search(r'^requires = \["setuptools>=([\d.]+)"\]$', text, re.M).group(1)
    code = (
        "import setuptools, sys; found = setuptools.__version__.split('.')[:2];"
        f"sys.exit([int(n) for n in found] < {[int(n) for n in minimum.split('.')[:2]]})"
    )
    if subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0:
        return sys.executable
    run([sys.executable, "-m", "venv", folder / "builder"])
    python = folder / "builder" / "bin" / "python"
    pip(python, f"setuptools>={minimum}")
    return python


def distributions(folder):
    """Builds sdist and wheel; returns their paths."""
    # From a copy: a build leaves folders behind, and includes existing ones.
    copy = folder / "tree"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(
        ".git", ".venv", "build", "dist", "*.egg-info", "*.so", "__pycache__", ".*_cache"
    ))  # fmt: skip
    program = (
        "from setuptools import build_meta as b; import sys; folder = sys.argv[1];"
        "b.build_sdist(folder); b.build_wheel(folder)"
    )
    run([builder(folder), "-c", program, folder / "dist"], cwd=copy)
    (wheel,) = (folder / "dist").glob("*-py3-none-any.whl")
    (sdist,) = (folder / "dist").glob("*.tar.gz")
    return wheel, sdist


def installed(python):
    """Names and versions of the installed packages."""
    text = run([python, "-m", "pip", "list", "--format=json", "--disable-pip-version-check"])
    line = next(line for line in text.splitlines() if line.startswith("["))
    return {package["name"].lower(): package["version"] for package in json.loads(line)}


def pip(python, *words):
    """Installs something."""
    run([python, "-m", "pip", "install", "--disable-pip-version-check", "--no-compile", *words])


def train(python, folder, env):
    """Trains on two workers; returns each one's result, and the output."""
    script = folder / "training.py"
    script.write_text(TRAINING)
    output = run([python, "-m", "tf_redsync.launch", "-n", "2", script], env=env, cwd=folder)
    results = [json.loads(text) for text in re.findall(r"RESULT (\{.*\})", output)]
    if len(results) != 2:
        raise Problem(f"not both workers came to the end:\n{output[-6000:]}")
    for result in results:
        if result["workers"] != 2 or not result["losses"][-1] < 0.8 * result["losses"][0]:
            raise Problem(f"no training of two workers: {result}")
        if not all(math.isclose(v, result["by_hand"], rel_tol=1e-4) for v in result["evaluated"]):
            raise Problem(f"evaluate is wrong: {result}")
        if pathlib.Path(result["package"]).is_relative_to(ROOT):
            raise Problem(f"that was not the installed package: {result['package']}")
    if results[0]["losses"] != results[1]["losses"]:
        raise Problem(f"the workers do not agree: {results}")
    return results, output


def lines_of(output, text):
    """The lines that contain a text."""
    return [line for line in output.splitlines() if text in line]


def environment(cache):
    """Variables for a training."""
    dropped = ("PYTHONPATH", "TF_CONFIG", "TF_REDSYNC_BACKEND")
    env = {name: text for name, text in os.environ.items() if name not in dropped}
    return env | {
        "TF_REDSYNC_CACHE": str(cache), "TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": "-1"
    }  # fmt: skip


def check_first_start(python, folder, env):
    """Trains with an empty cache folder; returns the result and the duration."""
    started = time.monotonic()
    results, output = train(python, folder, env)
    built = lines_of(output, "building the native library")
    if [result["backend"] for result in results] != ["native"] * 2 or len(built) != 1:
        raise Problem(f"not native, or not built once:\n{output[-6000:]}")
    return results[0], time.monotonic() - started


def check_training(python, folder, *, cache):
    """Trains three times: with a build, with the built library, without a compiler."""
    env = environment(cache)
    result, first = check_first_start(python, folder, env)
    started = time.monotonic()
    again, output = train(python, folder, env)
    second = time.monotonic() - started
    if lines_of(output, "building the native library") or again[0]["backend"] != "native":
        raise Problem(f"built again:\n{output[-6000:]}")
    nothing = {**env, "CXX": "no-such-compiler", "TF_REDSYNC_CACHE": str(folder / "empty")}
    without, output = train(python, folder, nothing)
    notices = lines_of(output, "no-such-compiler")
    if without[0]["backend"] != "tensorflow" or len(notices) != 2:  # one line per worker
        raise Problem(f"without a compiler:\n{output[-6000:]}")
    pairs = zip(without[0]["losses"], result["losses"], strict=True)
    if not all(math.isclose(one, other, rel_tol=1e-4) for one, other in pairs):
        raise Problem(f"native and pure ops differ: {result}, {without[0]}")
    line = notices[0].partition("] ")[2]
    print(f"   first start {first:.0f} s, second {second:.0f} s; without a compiler: {line}")
    return result


def check(pin, interpreter, archives, folder):
    """Creates an environment with one TensorFlow and installs each archive there."""
    folder.mkdir()
    print(f"== {pin} on {interpreter}", flush=True)
    run([interpreter, "-m", "venv", folder / "venv"])
    python = folder / "venv" / "bin" / "python"
    pip(python, *pin.split())
    before = installed(python)
    for archive in archives:
        pip(python, archive)
        after = installed(python)
        changed = {name for name in before if after.get(name) != before[name]}
        new = {name for name in after if "tensorflow" in name and name not in before}
        if changed or new:
            raise Problem(f"installing {archive.name} changed {changed}, added {new}")
        if archive is archives[0]:
            result = check_training(python, folder, cache=folder / "cache")
        else:  # Both archives compile the same sources.
            (folder / "another").mkdir()
            shutil.move(folder / "cache" / "objects", folder / "another")
            result, _ = check_first_start(python, folder, environment(folder / "another"))
        print(
            f"   {archive.name}: native, TensorFlow {result['tensorflow']}, Keras "
            f"{result['keras']}",
            flush=True,
        )
        run([python, "-m", "pip", "uninstall", "-y", "tf_redsync"])


def check_this(wheel, folder):
    """Installs the wheel with this interpreter's own packages and this user's cache."""
    folder.mkdir()
    run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"])
    python = folder / "venv" / "bin" / "python"
    (site,) = (folder / "venv").glob("lib/python*/site-packages")
    run(
        [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target", site, wheel]
    )
    others = [path for path in sys.path if path.endswith("-packages")]
    (site / "others.pth").write_text("\n".join(others) + "\n")
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    ours = folder / "cache"  # With the compiled objects, but no library.
    ours.mkdir()
    (pathlib.Path(cache) / "tf_redsync" / "objects").mkdir(parents=True, exist_ok=True)
    (ours / "objects").symlink_to(pathlib.Path(cache) / "tf_redsync" / "objects")
    result, seconds = check_first_start(python, folder, environment(ours))
    print(f"   {wheel.name}: native, TensorFlow {result['tensorflow']}, {seconds:.0f} s")


def main():
    """Parses arguments, builds the archives, and checks them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--this", action="store_true", help="only this interpreter's TensorFlow")
    parser.add_argument("--tensorflow", help="only this one: requirements for pip")
    parser.add_argument("--python", help="interpreter for --tensorflow")
    parser.add_argument("--keep", help="new folder in which to keep the environments")
    options = parser.parse_args()
    folder = pathlib.Path(options.keep or tempfile.mkdtemp(prefix="check_install-")).absolute()
    folder.mkdir(exist_ok=options.keep is None)
    pins = PINS
    if options.tensorflow:
        pins = ((options.tensorflow, (options.python or sys.executable,)),)
    try:
        wheel, sdist = distributions(folder)
        if options.this:
            check_this(wheel, folder / "this")
        for number, (pin, interpreters) in enumerate(() if options.this else pins):
            found = next(filter(runs, interpreters), None)
            if found is None:
                raise Problem(f"none of {interpreters} is here for {pin}")
            check(pin, found, (wheel, sdist), folder / str(number))
            if not options.keep:
                shutil.rmtree(folder / str(number))
    except Problem as problem:
        sys.exit(f"FAILED: {problem}")
    finally:
        if not options.keep:
            shutil.rmtree(folder)
    print("all as it should be")


if __name__ == "__main__":
    main()
