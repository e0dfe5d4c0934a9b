"""What is true in a process that has just been started; `fresh_process.py` is that process."""

import os
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_redsync as rs
from tests.kernels.common import digest_of_selections, needs_native
from tests.unit import fresh_process
from tests.unit.test_plan import FLAGS, MODULE

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """What each part has said, in lines; of one that is left out it came to a hang before."""
    folder = tmp_path_factory.mktemp("fresh")
    (folder / "here.py").write_text(MODULE)
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(3)])
    with pytest.warns(UserWarning, match="one worker"):
        model.compile(rs.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
        model.fit(tf.ones([8, 4]), tf.ones([8, 3]), verbose=0)
    model.save(folder / "model.keras")
    np.save(folder / "kernel.npy", model.layers[0].kernel.numpy())
    env = {**os.environ, "TF_NUM_INTRAOP_THREADS": "4", "PYTHONPATH": ROOT}
    command = [sys.executable, fresh_process.__file__, folder, *FLAGS, "--method", "TopK"]
    with subprocess.Popen(
        command, cwd=ROOT, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as child:
        try:
            out, err = child.communicate(timeout=200)  # importing takes long on a busy machine
        except subprocess.TimeoutExpired:
            child.kill()
            out, err = child.communicate()
    print(err[-5000:])  # shown where a test fails
    parts = [part.splitlines() for part in out.split("== ")[1:]]
    return {"stderr": err.splitlines(), **{lines[0]: lines[1:] for lines in parts}}


def test_the_file_of_one_worker_loads_without_the_library(said):
    """Weights load with `compile=False` in a process that never imports tf_redsync."""
    assert said["load_without_the_library"] == ["True", "False"]


def test_keras_3_needs_no_tf_keras(said):
    first, *errors = said["no_tf_keras"]
    assert first == "Keras3Optimizer"
    assert len(errors) == 3
    assert all("tf_keras is not installed" in e and "pip install" in e for e in errors)


@needs_native
def test_results_do_not_depend_on_the_number_of_threads(said):
    """This process has as many as its environment says, one by default."""
    if os.environ["TF_NUM_INTRAOP_THREADS"] == "4":
        pytest.skip("this process has four threads, too")
    assert said["four_threads"] == [f"4 {digest_of_selections()}"]


def test_plan_as_a_user_starts_it(said):
    """No pieces replaced: it measures."""
    *out, end = said["plan"]
    assert end == "ended with 0"
    assert "captured energy" in "\n".join(out) and "rs.TopK()" in "\n".join(out)


def test_replicas_of_one_process_do_not_wait_for_each_other(said):
    """They run, or are traced, one by one; the reference's checks are ordered between them, too."""
    assert said.get("replicas") == ["eager: 1", "traced: 2"]


def test_a_loop_that_was_too_short_is_said_when_the_process_ends(said):
    """Of two steps, where an element of six is sent in each."""
    warned = [line for line in said["stderr"] if "AccuracyWarning: " in line]
    assert len([line for line in warned if "this training has 2 of them" in line]) == 1
