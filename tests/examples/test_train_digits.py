"""The quickstart's script on two real workers, with the launcher and with a manual TF_CONFIG.

Workers are forks of a process with all imports, also under the launcher's command line. See
tests/distributed/test_ports.py for workers that start a new Python process.
"""

import importlib.util
import json
import os
import pathlib
import signal
import subprocess
import sys

import numpy as np
import pytest

from tests.distributed import forks
from tests.distributed.cluster import ENVIRONMENT
from tests.patience import PATIENCE
from tf_redsync import launch as launcher

ROOT = pathlib.Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples/train_digits.py"
KEYS = {"exchange", "workers", "params", "steps", "accuracy", "bytes_per_step", "step_ms", "loss"}


def load_quickstart():
    spec = importlib.util.spec_from_file_location("quickstart", ROOT / "examples/quickstart.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def environment(**extra):
    # The scripts are started by path, so they need this if the package is not installed.
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, **extra}


def script(*flags):
    """The command that runs the script in a fork of one process with all imports."""
    return forks.command(ENVIRONMENT, SCRIPT, *flags)


def train(out, *flags):
    """Runs the script on two workers with the launcher's command line."""
    command = [
        sys.executable,
        "-m",
        "tf_redsync.launch",
        "-n",
        "2",
        "--timeout",
        str(PATIENCE * 150),
    ]
    # without the Python interpreter, which the launcher adds
    _, *words = script(f"--out={out}", *flags)
    command += words[words.index(forks.__file__) :]
    done = subprocess.run(
        command,
        env=environment(),
        cwd=out.parent,
        capture_output=True,
        text=True,
        timeout=PATIENCE * 200,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def train_forks(out, *flags):
    """Runs the script on two workers with the launcher's function."""
    job = launcher.run(
        script(f"--out={out}", *flags), 2, env=ENVIRONMENT, timeout=PATIENCE * 150, threads=1
    )
    assert job.exit_code == 0, [worker.output for worker in job.workers]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Two epochs of each exchange from the same seed."""
    folder = tmp_path_factory.mktemp("digits")
    found = {}
    for name, flags in load_quickstart().RUNS.items():
        start = train if name == "CodedGMC" else train_forks
        start(folder / f"{name}.json", *flags, "--epochs=2")
        found[name] = json.loads((folder / f"{name}.json").read_text())
    return found


@pytest.mark.distributed
@pytest.mark.timeout(500)
def test_result_has_fields_of_quickstart(results):
    for name, result in results.items():
        assert result.keys() >= KEYS
        assert result["exchange"].lower().startswith(name.lower())
        assert result["workers"] == 2
        # 1438 training images, 719 per worker, 22 full batches of 32 per epoch.
        assert result["steps"] == len(result["loss"]) == 44
        assert np.isfinite(result["loss"]).all()
        assert np.mean(result["loss"][-10:]) < 0.7 * np.mean(result["loss"][:10])
        assert result["step_ms"] > 0
    assert results["dense"]["accuracy"] > 0.6
    # Ring all-reduce between two workers: the gradients' bytes once, and little else.
    dense = 4 * results["dense"]["params"]
    assert dense <= results["dense"]["bytes_per_step"] <= 1.01 * dense
    assert results["HalfPrecision"]["bytes_per_step"] <= 1.01 * dense / 2
    assert results["CodedGMC"]["bytes_per_step"] < dense / 100


@pytest.mark.distributed
@pytest.mark.timeout(500)
def test_first_step_is_equal_for_all_methods(results):
    # The same seed means the same weights and the same first batches.
    losses = [result["loss"][0] for result in results.values()]
    assert losses == pytest.approx([losses[0]] * len(losses), rel=1e-5)


@pytest.mark.distributed
@pytest.mark.timeout(500)
def test_summary_table_and_curves(results, tmp_path):
    quickstart = load_quickstart()
    summary = quickstart.summarize(results)
    assert summary["workers"] == 2
    assert list(summary["runs"]) == ["dense", "HalfPrecision", "CodedGMC"]
    for run in summary["runs"].values():
        assert run.keys() >= {"accuracy", "bytes_per_step", "step_ms", "ratio"}
    assert summary["runs"]["dense"]["ratio"] == 1.0
    assert summary["runs"]["CodedGMC"]["ratio"] > 100
    lines = quickstart.table(summary).splitlines()
    assert [line.split()[0] for line in lines[-3:]] == list(summary["runs"])

    quickstart.draw(results, tmp_path / "curves.png")
    import matplotlib.image

    pixels = matplotlib.image.imread(tmp_path / "curves.png")[..., :3]
    assert pixels.shape[1] > pixels.shape[0] > 300
    for color in quickstart.COLORS.values():
        rgb = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)]) / 255
        assert (np.abs(pixels - rgb).max(axis=-1) < 0.02).sum() > 500, f"no curve in {color}"


def test_smoothing_is_a_trailing_mean():
    quickstart = load_quickstart()
    values = list(np.arange(40.0))
    steps, means = quickstart.smoothed(values)
    assert steps[0] == quickstart.SMOOTHING
    assert steps[-1] == 40
    np.testing.assert_allclose(means[-1], np.mean(values[-quickstart.SMOOTHING :]))
    assert len(quickstart.smoothed([1.0, 2.0])[0]) == 1


@pytest.mark.distributed
def test_manual_tf_config_with_own_data(tmp_path):
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, [96, 6, 6], dtype=np.uint8)
    labels = rng.integers(0, 3, [96])
    np.savez(
        tmp_path / "mine.npz",
        x_train=images[:64], y_train=labels[:64], x_test=images[64:], y_test=labels[64:],
    )  # fmt: skip
    hosts = [f"127.0.0.1:{port}" for port in launcher.free_ports(2)]
    out = tmp_path / "result.json"
    flags = ["--exchange=redsync", "--epochs=1", "--batch_size=8", f"--data_dir={tmp_path}"]
    command = script(*flags, f"--out={out}", "--optimizer=adam", "--density=0.05")
    workers = []
    try:
        for index in range(2):
            cluster = {"cluster": {"worker": hosts}, "task": {"type": "worker", "index": index}}
            env = environment(TF_CONFIG=json.dumps(cluster))
            with open(tmp_path / f"{index}.log", "wb") as log:
                process = subprocess.Popen(
                    command, env=env, stdout=log, stderr=log, start_new_session=True
                )
            workers.append(process)
        codes = [worker.wait(timeout=PATIENCE * 120) for worker in workers]
    finally:
        for worker in workers:
            if worker.poll() is None:
                os.killpg(worker.pid, signal.SIGKILL)
                worker.wait()
    assert codes == [0, 0], (tmp_path / "0.log").read_text() + (tmp_path / "1.log").read_text()
    result = json.loads(out.read_text())
    assert result["workers"] == 2
    assert result["steps"] == 4


@pytest.mark.distributed
def test_single_worker_trains_and_warns(tmp_path):
    out = tmp_path / "alone.json"
    done = subprocess.run(
        script("--exchange=redsync", "--epochs=1", f"--out={out}"),
        env=environment(),
        capture_output=True,
        text=True,
        timeout=PATIENCE * 120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "one worker" in done.stdout + done.stderr
    result = json.loads(out.read_text())
    assert (result["workers"], result["bytes_per_step"]) == (1, 0)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--exchange=RedSync(momentum=0.9)", "--optimizer=momentum"], "momentum"),
        (["--exchange=RedSnyc"], "Did you mean RedSync?"),
        (["--exchange=Dense", "--density=0.1"], "Received: 0.1 with Dense"),
        (["--batch_size=5000"], "--batch_size"),
    ],
)
def test_error_names_invalid_flags(tmp_path, flags, message):
    done = subprocess.run(
        script("--epochs=1", *flags),
        env=environment(),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE * 120,
    )
    assert done.returncode != 0
    assert message in done.stderr
