"""`CompressionMetrics` on real workers: on all of them, on the chief alone, with local steps."""

import json
import math
import pathlib

import numpy as np
import pytest

from tests.distributed.cluster import run_workers

STEPS, BATCH = 12, 8


def _train(rs, keras, method, callbacks, per_execution=1):
    import tensorflow as tf

    keras.utils.set_random_seed(5)
    with tf.distribute.get_strategy().scope():
        model = keras.Sequential([keras.layers.Input([64]), keras.layers.Dense(64)], name="m")
        optimizer = rs.DistributedOptimizer(keras.optimizers.SGD(0.01), method)
        model.compile(optimizer, "mse", steps_per_execution=per_execution)
    rng = np.random.default_rng(1)
    x = rng.normal(size=[STEPS * BATCH * 2, 64]).astype(np.float32)
    data = tf.data.Dataset.from_tensor_slices((x, x[:, ::-1])).batch(2 * BATCH)
    fitted = model.fit(data, epochs=2, verbose=0, callbacks=callbacks)
    return model, fitted.history


def train(folder):
    import warnings

    import keras

    import tf_redsync as rs

    warnings.simplefilter("ignore", UserWarning)
    strategy = rs.MultiWorkerMirroredStrategy()
    chief = strategy.cluster_resolver.task_id == 0
    out = {}
    with strategy.scope():
        # 1. on all workers
        topk = rs.TopK(density=0.05, dense_below=0)
        metrics = rs.callbacks.CompressionMetrics(f"{folder}/all", every=5)
        model, history = _train(rs, keras, topk, [metrics])
        out |= {n: history[n] for n in ("compression_ratio", "bytes_sent")}
        parts = ("compute", "select", "decode", "input", "wait")
        out["parts"] = [sum(history[f"{p}_ms"][-1] for p in parts if f"{p}_ms" in history)]
        part = model.optimizer.exchange.worker_state()
        (residual,) = (v for n, v in part.items() if "/residual/" in n)
        out |= {"norm": np.linalg.norm(residual), "found": history["residual_norm"][-1]}
        out |= {"expected": model.optimizer.bytes_per_step(), "loss": history["loss"]}
        # 2. on the chief alone, without requests to other workers
        alone = [rs.callbacks.CompressionMetrics(f"{folder}/chief", every=3)] if chief else []
        _, history = _train(rs, keras, topk, alone)
        out |= {"loss_of_chief": history["loss"], "has": "density" in history}
        # 3. rounds of local steps, most of which send nothing; two steps per execution
        local = rs.LocalSGD(steps=5)
        metrics = rs.callbacks.CompressionMetrics(every=1, time_split=False)
        model, history = _train(rs, keras, local, [metrics], per_execution=2)
        out |= {"local": history["bytes_sent"], "per_step": model.optimizer.bytes_per_step()}
    return out


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("metrics")
    return folder, run_workers(train, args=(str(folder),))


def test_on_all_workers(trained):
    folder, workers = trained
    for rank, out in enumerate(workers):
        assert out["found"] == pytest.approx(out["norm"], rel=1e-5) and out["norm"] > 0
        assert list(out["bytes_sent"]) == [out["expected"] * STEPS, out["expected"] * 2 * STEPS]
        dense = 4 * (64 * 64 + 64)  # two workers send each element once
        assert out["compression_ratio"] == pytest.approx([dense / out["expected"]] * 2)
        text = (pathlib.Path(folder) / "all" / f"worker-{rank}.jsonl").read_text()
        found = [json.loads(line) for line in text.splitlines()]
        assert [r["step"] for r in found if r["record"] == "sample"] == [5, *range(8, 25)]
        splits = [r for r in found if r["record"] == "split"]
        if rank > 0:  # worker 0 alone profiles steps
            assert not splits and out["parts"][0] == 0
            continue
        (split,) = splits
        assert split["exchange_ms"] > 0 and split["select_ms"] > 0 and split["decode_ms"] > 0
        assert out["parts"][0] == pytest.approx(split["step_ms"]) and split["compute_ms"] > 0
    assert workers[0]["norm"] != workers[1]["norm"]  # each worker's own
    assert not (pathlib.Path(folder) / "all" / "tensorboard" / "worker-1").exists()


def test_on_the_chief_alone(trained):
    """No worker waits, and the training is unchanged."""
    folder, workers = trained
    assert [bool(out["has"]) for out in workers] == [True, False]
    for out in workers:
        np.testing.assert_array_equal(out["loss"], out["loss_of_chief"])
    assert [p.name for p in sorted((pathlib.Path(folder) / "chief").glob("*.jsonl"))] == [
        "worker-0.jsonl"
    ]


def test_local_steps(trained):
    """Rounds of five steps; an epoch of twelve steps ends its third round early."""
    for out in trained[1]:
        exchange = 5 * out["per_step"]
        assert list(out["local"]) == pytest.approx([3 * exchange, 6 * exchange])
        assert math.isfinite(out["per_step"]) and out["per_step"] > 0


def test_report_reads_files_of_both_workers(trained):
    from tf_redsync.metrics import records

    found = records.load(pathlib.Path(trained[0]) / "all")
    assert [w.rank for w in found.workers] == [0, 1] and found.notes == ()
    (note,) = records.load(pathlib.Path(trained[0]) / "chief").notes
    assert "1 file found of 2 workers" in note
