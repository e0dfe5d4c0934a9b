"""Each example trains on two workers, as it stands but for the length; some go on afterwards."""

import importlib.util
import re
import shutil

import pytest

from tests.deep import DEEP
from tests.examples.running import run_example

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(250)]
NO_ADDONS = importlib.util.find_spec("tensorflow_addons") is None


def numbers(pattern, text):
    return [float(found) for found in re.findall(pattern, text)]


def losses(output):
    return numbers(r" - loss: ([\d.]+)", output)


def test_custom_loop_goes_on(tmp_path):
    first, second = run_example("custom_loop", f"--run_dir={tmp_path}", "--epochs=1")
    assert len(losses(first)) == 1 and not losses(second)  # worker 0 shows the progress
    assert numbers(r"compression_ratio: ([\d.]+)", first)[-1] > 10
    longer, _ = run_example("custom_loop", f"--run_dir={tmp_path}", "--epochs=3")
    assert "goes on after epoch 1" in longer and re.findall(r"Epoch (\d)", longer) == ["2", "3"]
    assert losses(longer)[-1] < 0.8 * losses(first)[0]
    assert (tmp_path / "worker-1.jsonl").exists()
    # What workers have differs by more than the save in which they were stopped.
    shutil.rmtree(tmp_path / "checkpoints" / "worker-1")
    outputs = run_example("custom_loop", f"--run_dir={tmp_path}", code=1)
    assert all("the newest epochs are [3 0]" in output for output in outputs)


@pytest.mark.deep
def test_custom_loop_that_was_stopped_is_one_that_was_not(tmp_path):
    straight, _ = run_example("custom_loop", f"--run_dir={tmp_path / 'a'}", "--epochs=3")
    run = [f"--run_dir={tmp_path / 'b'}"]
    run_example("custom_loop", *run, "--epochs=1")
    stopped, _ = run_example("custom_loop", *run, "--epochs=3")
    assert losses(stopped) == losses(straight)[1:]
    again, _ = run_example("custom_loop", *run, "--epochs=3")
    assert "is complete after epoch 3" in again and not losses(again)
    accuracy = r"test accuracy: ([\d.]+)"
    assert numbers(accuracy, again) == numbers(accuracy, stopped)


@pytest.mark.parametrize(
    "name",
    [
        "tf_keras_legacy",
        pytest.param(
            "addons_lamb",
            marks=pytest.mark.skipif(NO_ADDONS, reason="TensorFlow Addons is not installed"),
        ),
    ],
)
def test_keras_2(name, tmp_path):
    run = [f"--run_dir={tmp_path}", "--batch_size=64"]
    output, _ = run_example(name, *run, "--epochs=2")
    assert losses(output)[-1] < losses(output)[0]
    assert numbers(r"compression_ratio: ([\d.]+)", output)[-1] > 10
    if DEEP:
        again, _ = run_example(name, *run, "--epochs=3")
        assert "training goes on from" in again and losses(again)[0] < losses(output)[-1]
