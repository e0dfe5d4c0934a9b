"""Behavior of a newly started process, which `fresh_process.py` runs."""

import json
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
from tf_redsync import config

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
CONTRIB = rs.Coded(
    method=rs.contrib.SIDCo(density=0.02), indices=rs.contrib.codings.Bloom(policy="p2")
)


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """Output lines by part. A missing part means that the process hung before it."""
    folder = tmp_path_factory.mktemp("fresh")
    (folder / "here.py").write_text(MODULE)
    (folder / "method.json").write_text(json.dumps(config.serialize(CONTRIB)))
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


def test_weights_load_without_the_library(outputs):
    """Weights load with `compile=False` in a process that never imports tf_redsync."""
    assert outputs["load_without_the_library"] == ["True", "False"]


def test_keras_3_works_without_tf_keras(outputs):
    first, *errors = outputs["no_tf_keras"]
    assert first == "Keras3Optimizer"
    assert len(errors) == 3
    assert all("tf_keras is not installed" in e and "pip install" in e for e in errors)


def test_saved_contrib_method_loads_without_importing_contrib(outputs):
    assert "contrib" not in json.dumps(config.serialize(CONTRIB))
    assert outputs["load_a_contrib_method"] == ["[]", f"tf_redsync.contrib.sidco {CONTRIB}"]


@needs_native
def test_results_do_not_depend_on_thread_count(outputs):
    """This process uses `TF_NUM_INTRAOP_THREADS` threads, one by default."""
    if os.environ["TF_NUM_INTRAOP_THREADS"] == "4":
        pytest.skip("this process has four threads, too")
    assert outputs["four_threads"] == [f"4 {digest_of_selections()}"]


def test_plan_runs_as_a_module(outputs):
    """Nothing is mocked: `plan` measures."""
    *out, end = outputs["plan"]
    assert end == "ended with 0"
    assert "captured energy" in "\n".join(out) and "rs.TopK()" in "\n".join(out)


def test_replicas_of_one_process_do_not_deadlock(outputs):
    """Replicas run and are traced in turn; checks of the reference ops are ordered, too."""
    assert outputs.get("replicas") == ["eager: 1", "traced: 2"]


def test_short_custom_loop_warns_at_exit(outputs):
    """The loop has two steps, and each sends one element in six."""
    warned = [line for line in outputs["stderr"] if "AccuracyWarning: " in line]
    assert len([line for line in warned if "this training has 2 of them" in line]) == 1
