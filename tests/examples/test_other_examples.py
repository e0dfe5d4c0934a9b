"""Each example trains on two workers, unchanged except for the length; some also resume."""

import importlib.util
import re
import shutil

import keras
import numpy as np
import pytest

from tests.deep import DEEP
from tests.examples.running import ROOT, run_example

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(250)]
NO_ADDONS = importlib.util.find_spec("tensorflow_addons") is None


def numbers(pattern, text):
    return [float(found) for found in re.findall(pattern, text)]


def losses(output):
    return numbers(r" - loss: ([\d.]+)", output)


def test_custom_loop(tmp_path):
    first, second = run_example("custom_loop", f"--run_dir={tmp_path}", "--epochs=1")
    assert len(losses(first)) == 1 and not losses(second)  # worker 0 prints progress
    assert numbers(r"compression_ratio: ([\d.]+)", first)[-1] > 10
    assert (tmp_path / "worker-1.jsonl").exists()


HALF = """
import sys
import keras
from absl import app
sys.path.insert(0, {folder!r})
import {name}

keras.mixed_precision.set_global_policy("mixed_float16")
app.run({name}.main)
"""


@pytest.mark.parametrize("name", ["custom_loop", "gan"])
def test_loss_is_scaled_in_float16(tmp_path, name):
    (tmp_path / "half.py").write_text(HALF.format(folder=str(ROOT / "examples"), name=name))
    flags = [f"--run_dir={tmp_path}", "--epochs=1", "--batch_size=256"]
    (output,) = run_example(tmp_path / "half", *flags, workers=1)
    assert "loss: " in output and "scale_loss" not in output


@pytest.mark.deep
def test_custom_loop_resumes(tmp_path):
    first, _ = run_example("custom_loop", f"--run_dir={tmp_path}", "--epochs=1")
    longer, _ = run_example("custom_loop", f"--run_dir={tmp_path}", "--epochs=3")
    assert "goes on after epoch 1" in longer and re.findall(r"Epoch (\d)", longer) == ["2", "3"]
    assert losses(longer)[-1] < 0.8 * losses(first)[0]
    # Workers' individual state includes steps after the save in which they were stopped.
    shutil.rmtree(tmp_path / "checkpoints" / "worker-1")
    outputs = run_example("custom_loop", f"--run_dir={tmp_path}", code=1)
    assert all("the newest epochs are [3 0]" in output for output in outputs)


@pytest.mark.deep
def test_stopped_custom_loop_equals_uninterrupted_one(tmp_path):
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
        assert "training resumes from" in again and losses(again)[0] < losses(output)[-1]


def test_gan(tmp_path):
    output, _ = run_example("gan", f"--run_dir={tmp_path}", "--batch_size=64", "--epochs=1")
    assert numbers(r"compression_ratio: ([\d.]+)", output)[-1] > 10
    assert np.ptp(keras.utils.img_to_array(keras.utils.load_img(tmp_path / "samples-0001.png"))) > 9


@pytest.mark.deep
def test_stopped_gan_equals_uninterrupted_one(tmp_path):
    pictures = []
    for name, stops in (("straight", [4]), ("stopped", [2, 4])):
        for epochs in stops:
            run_example("gan", f"--run_dir={tmp_path / name}", f"--epochs={epochs}")
        pictures.append((tmp_path / name / "samples-0004.png").read_bytes())
    assert pictures[0] == pictures[1]


def checksums(outputs, phase):
    """Hashes of the frozen weights before and after, and of all; equal on both workers."""
    line = rf"{phase}: checksum of frozen weights (\w+) before, (\w+) after, of all (\w+)"
    first, second = (re.search(line, output).groups() for output in outputs)
    assert first == second
    return first


@pytest.mark.deep
def test_head_of_finetune(tmp_path):
    run = [f"--run_dir={tmp_path}", "--batch_size=64", "--head_epochs=1", "--epochs=0"]
    outputs = run_example("finetune", *run, "--image_size=36")
    assert "No weights are loaded" in outputs[0] and "1,285 of 219,829 weights learn" in outputs[0]
    before, after, _ = checksums(outputs, "head")
    assert before == after


@pytest.mark.deep
@pytest.mark.parametrize("rank", [0, 4])
def test_finetune(tmp_path, rank):
    run = [f"--run_dir={tmp_path}", "--head_epochs=1", "--epochs=1", f"--lora={rank}"]
    outputs = run_example("finetune", *run, timeout=240)
    before, after, _ = checksums(outputs, "backbone")
    assert before != after  # statistics: nothing is frozen here
    ends = [checksums(outputs, phase) for phase in ("head", "lora" if rank else "whole")]
    assert all(before == after for before, after, _ in ends) and ends[0][2] != ends[1][2]
    learn = re.findall(r"([\d,]+) of [\d,]+ weights learn", outputs[0])
    assert (len(learn[2]) < len("100,000")) == bool(rank)
    again, _ = run_example("finetune", *run, timeout=240)
    assert again.count("nothing left to do") == 3 and not losses(again)


@pytest.mark.deep
def test_finetune_with_image_folder_and_weights_file(tmp_path):
    rng = np.random.default_rng(0)
    for label, name in enumerate(["dark", "light"]):
        (tmp_path / "images" / name).mkdir(parents=True)
        for i in range(40):
            image = rng.integers(0, 100, (40, 40, 3)) + 150 * label
            keras.utils.save_img(tmp_path / "images" / name / f"{i}.png", image, scale=False)
    backbone = keras.applications.MobileNet([32, 32, 3], 0.25, include_top=False, weights=None)
    backbone.save_weights(tmp_path / "backbone.weights.h5")
    run = [f"--run_dir={tmp_path / 'run'}", f"--data_dir={tmp_path / 'images'}", "--epochs=1"]
    outputs = run_example("finetune", *run, f"--weights={tmp_path / 'backbone.weights.h5'}")
    assert "No weights" not in outputs[0] and "Found 80 files belonging to 2 classes" in outputs[0]
    before, after, _ = checksums(outputs, "head")
    assert before == after and losses(outputs[0])
    (refused, _) = run_example("finetune", *run, code=1)
    assert "--data_dir needs --weights=imagenet" in refused
