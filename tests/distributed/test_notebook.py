"""`notebook_launcher` with Keras's `fit` on two real workers."""

import linecache
import re
import sys

import cloudpickle
import numpy as np
import pytest

import tf_redsync as rs
from tests.distributed import forks
from tests.distributed.cluster import ENVIRONMENT

STEPS, EPOCHS = 3, 2
# Functions of this module are pickled by value, like those of a notebook.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

# AutoGraph needs the source of this cell.
CELL = """
def count_even(n):
    total = 0
    for i in tf.range(n):
        if i % 2 == 0:
            total += 1
    return total
"""


def run_cell(text, names):
    """Runs a cell as IPython does: its source is in `linecache` only."""
    file = "/tmp/ipykernel_0/1.py"
    linecache.cache[file] = len(text), None, text.splitlines(keepends=True), file
    exec(compile(text, file, "exec"), names)


def displayed_lines(text):
    """Lines as a notebook displays them: without colors, after backspaces and carriage returns."""
    lines = []
    for line in re.sub(r"\x1b\[\d+m", "", text).split("\n"):
        row, column = [], 0
        for char in line:
            if char == "\r":
                column = 0
            elif char == "\b":
                column = max(column - 1, 0)
            else:
                row[column : column + 1] = [char]
                column += 1
        lines.append("".join(row).rstrip())
    return lines


def train(x, even, failing):
    """Trains; the worker `failing` raises in the second step of the second epoch."""
    import keras
    import tensorflow as tf

    strategy = rs.MultiWorkerMirroredStrategy()
    keras.utils.set_random_seed(rs.rank())
    with strategy.scope():
        model = keras.Sequential([keras.Input([8]), keras.layers.Dense(4)])
        optimizer = rs.DistributedOptimizer(keras.optimizers.SGD(0.05), rs.TopK(density=0.2))
        model.compile(optimizer, "mse")
    data = tf.data.Dataset.from_tensor_slices((x, x[:, :4])).batch(len(x) // STEPS)
    seen = []

    def act(batch, logs):
        seen.append(batch)
        if rs.rank() == failing and len(seen) == STEPS + 2:
            raise ArithmeticError(f"step {len(seen)}")

    callback = keras.callbacks.LambdaCallback(on_train_batch_end=act)
    history = model.fit(data, epochs=EPOCHS, shuffle=False, callbacks=[callback]).history
    return {
        "loss": history["loss"],
        "kernel": model.get_weights()[0],
        "size": rs.size(),
        "even": int(tf.function(even)(tf.constant(7))),
        "model": model,
    }


@pytest.mark.timeout(300)
def test_fit_in_a_notebook(capsys, monkeypatch, tmp_path):
    """The workers are forks; examples/test_notebook.py starts new processes."""
    import tensorflow as tf

    monkeypatch.setattr(sys, "executable", forks.python(ENVIRONMENT, tmp_path))
    names = {"__name__": "__main__", "tf": tf}
    run_cell(CELL, names)
    x = np.random.default_rng(0).normal(size=[12, 8]).astype("float32")
    found = rs.notebook_launcher(train, 2, (x, names["count_even"], None))
    assert found["size"] == 2 and found["even"] == 4
    assert found["loss"][1] < found["loss"][0]
    np.testing.assert_array_equal(found["model"].get_weights()[0], found["kernel"])
    lines = [line for line in displayed_lines(capsys.readouterr().out) if line]
    bars = [line for line in lines if "━" in line]
    assert len(bars) == EPOCHS and all(line.startswith(f"{STEPS}/{STEPS} ") for line in bars)
    assert [line for line in lines if line not in bars] == ["Epoch 1/2", "Epoch 2/2"]


@pytest.mark.deep
@pytest.mark.timeout(300)
def test_error_in_fit_of_rank_1_is_raised():
    x = np.zeros([12, 8], "float32")
    with pytest.raises(ArithmeticError, match="step 5") as caught:
        rs.notebook_launcher(train, 2, (x, abs, 1))
    notes = "\n".join(caught.value.__notes__)
    assert "worker 1" in notes and "Epoch 2/2" in notes
