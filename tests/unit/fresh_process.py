"""Runs checks that need a new process: `python fresh_process.py FOLDER`.

One process runs all parts, because importing TensorFlow takes seconds. Each part prints its
name before its output; `test_fresh_process.py` reads it.
"""

import json
import os
import runpy
import sys
import traceback


def two_devices(folder):
    import tensorflow as tf

    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)


def load_without_the_library(folder):
    import keras
    import numpy as np

    model = keras.saving.load_model(f"{folder}/model.keras", compile=False)
    print(np.array_equal(model.layers[0].kernel.numpy(), np.load(f"{folder}/kernel.npy")))
    print("tf_redsync" in sys.modules)


def no_tf_keras(folder):
    sys.modules["tf_keras"] = None
    import keras

    import tf_redsync as rs

    print(type(rs.DistributedOptimizer(keras.optimizers.SGD())).__name__)
    for name in ("tf_keras", "legacy"):
        try:
            __import__(f"tf_redsync.keras.{name}")
        except ImportError as error:
            print(error)
    try:
        rs.addons.load()
    except ImportError as error:
        print(error)


def load_a_contrib_method(folder):
    from tf_redsync.config import from_config

    with open(f"{folder}/method.json", encoding="ascii") as file:
        saved = json.load(file)
    print([name for name in sys.modules if name.startswith("tf_redsync.contrib")])
    made = from_config(saved)
    print(type(made.method).__module__, made)


def plan(folder):
    os.chdir(folder)
    sys.path.insert(0, "")  # as `python -m` does
    try:
        sys.argv[1:1] = ["plan"]
        runpy.run_module("tf_redsync", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        print("ended with", end.code)


def four_threads(folder):
    from tests.kernels.common import digest_of_selections

    print(os.environ["TF_NUM_INTRAOP_THREADS"], digest_of_selections())


def replicas(folder):
    import keras
    import tensorflow as tf

    import tf_redsync as rs

    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    rs.ops.set_backend("tensorflow")
    with strategy.scope():
        model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(2)])
        optimizer = rs.DistributedOptimizer(keras.optimizers.SGD(0.1), rs.RedSync(dense_below=0))
        optimizer.build(model.trainable_variables)

    def step():
        grads = [tf.ones(v.shape) for v in model.trainable_variables]
        optimizer.apply(grads, model.trainable_variables)

    strategy.run(step)
    print("eager:", optimizer.exchange.step.numpy(), flush=True)
    tf.function(lambda: strategy.run(step))()
    print("traced:", optimizer.exchange.step.numpy(), flush=True)


# Parts that must not import the library come first; the part that may hang comes last.
PARTS = (
    two_devices,
    load_without_the_library,
    no_tf_keras,
    load_a_contrib_method,
    four_threads,
    plan,
    replicas,
)

if __name__ == "__main__":
    target, sys.argv = sys.argv[1], sys.argv[:1] + sys.argv[2:]
    for part in PARTS:
        print("==", part.__name__, flush=True)
        try:
            part(target)
        except Exception:
            traceback.print_exc()
