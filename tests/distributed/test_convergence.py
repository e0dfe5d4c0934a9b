"""benchmarks/convergence.py: worker processes end with the weights of the loopback."""

import dataclasses

import numpy as np
import pytest

from benchmarks.accuracy import command_line, data
from tests.distributed.cluster import run_workers

SPARSE = "density=0.05, momentum=0.9, dense_below=0, warm_up=DenseWarmUp(4)"
ADAMW = ("--optimizer", "adamw", "--learning_rate", "0.01")
TURNS = "steps=4, fragments=2, overlap=1, mixing=0.5, value_bits=32"
# BatchNormalization, clipping, a learning-rate schedule; the inner optimizer's momentum, a code
ROWS = (
    ("cifar10", ["--clip_norm", "0.5", "--schedule", "cosine"], f"RedSync({SPARSE})"),
    ("digits", [*ADAMW, "--evaluations", "1"], "DiLoCo(steps=3)"),  # an evaluation ends a round
    ("digits", [*ADAMW, "--evaluations", "1"], f"StreamingDiLoCo({TURNS})"),
    ("digits", [], "CodedGMC(density=0.05)"),
)
# Bytes sent before the last step's callbacks. Every worker agrees at the end of an epoch: of
# DiLoCo's four rounds the last one ends there; all fragments are sent there for the third time.
BEFORE_THE_END = {"DiLoCo": 3 / 4, "StreamingDiLoCo": 2 / 3}


def problem(task, flags, workers):
    """Settings of ten steps, and synthetic data where the task's data are not installed."""
    if task == "digits":
        found = data.digits(None)
    else:
        rng = np.random.default_rng(0)
        x = rng.integers(0, 255, (60, 32, 32, 3), dtype=np.uint8)
        y = rng.integers(0, 10, 60, dtype=np.int32)
        found = data.Data((x, y), (x[:10], y[:10]), 10, images=True)
    flags = ["--task", task, "--steps", "10", "--batch", "4", "--evaluations", "2", *flags]
    args = command_line.parse([*flags, "--workers", str(workers)])
    return command_line.settings_of(args, len(found.train[1])), found


def train_rows(workers, first, end):
    import tf_redsync as rs
    from benchmarks.accuracy import worker

    strategy, results = rs.MultiWorkerMirroredStrategy(), {}
    for i, (task, flags, text) in enumerate(ROWS[first:end]):
        settings, found = problem(task, flags, workers)
        row = {"settings": dataclasses.asdict(settings), "method": text, "seed": 1}
        result, model = worker.train(row, found, strategy)
        results[f"{i} weights"] = np.concatenate([np.ravel(w) for w in model.get_weights()])
        results[f"{i} losses"] = result["curve"]["loss"]
        results[f"{i} sent"] = result["sent_bytes"]
    return results


@pytest.mark.parametrize(
    ("workers", "begin", "end"),
    [
        # a commit runs tests/unit/test_convergence.py and test_ranks.py instead
        pytest.param(2, 1, 2, marks=pytest.mark.deep),
        pytest.param(2, 0, 3, marks=pytest.mark.deep),
        pytest.param(4, 0, 4, marks=pytest.mark.deep),
    ],
)
def test_processes_end_with_weights_of_loopback(workers, begin, end):
    from benchmarks.accuracy import local_training
    from benchmarks.method_expressions import exchanged

    first, *others = run_workers(train_rows, workers, args=(workers, begin, end), timeout=300)
    for i, (task, flags, text) in enumerate(ROWS[begin:end]):
        training = local_training.make(*problem(task, flags, workers), exchanged(text), 1)
        start = np.concatenate([np.ravel(w) for w in training.model.get_weights()])
        expected = training.run()
        weights = np.concatenate([np.ravel(w) for w in training.model.get_weights()])
        for worker in (first, *others):
            np.testing.assert_allclose(worker[f"{i} weights"], weights, rtol=0, atol=1e-4)
        assert np.abs(weights - start).max() > 1e-2
        np.testing.assert_allclose(first[f"{i} losses"], training.curve["loss"], rtol=1e-4)
        part = BEFORE_THE_END.get(text.partition("(")[0], 1.0)
        assert first[f"{i} sent"] == pytest.approx(part * expected["sent_bytes"])
