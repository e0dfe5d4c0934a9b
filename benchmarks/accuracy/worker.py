"""One row of the report, trained by worker processes with `fit`; `run` starts them.

Examples, weights, optimizer and evaluations are those of `training.py`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.accuracy.data import Data
from benchmarks.accuracy.tasks import Settings, examples

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT = 6 * 3600.0  # seconds per row


def run(
    settings: Settings, method: str, seed: int, data_dir: Path | None, timeout: float = TIMEOUT
) -> dict[str, Any]:
    """Trains a row with worker processes on this machine.

    Returns:
        The results, as `training.Training.results`, without bits.

    Raises:
        RuntimeError: a worker failed; the message has its last lines.
    """
    from tf_redsync import launch

    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "result.json"
        row = {
            "settings": dataclasses.asdict(settings), "method": method, "seed": seed,
            "data_dir": None if data_dir is None else str(data_dir.resolve()),
        }  # fmt: skip
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        job = launch.run(
            [sys.executable, "-m", "benchmarks.accuracy.worker", json.dumps(row), str(output)],
            settings.workers,
            env={"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "2"},
            timeout=timeout,
            grace=10,
        )
        if job.exit_code:
            raise RuntimeError(f"`--real`: {job.message}")
        return json.loads(output.read_text(encoding="utf-8"))


def train(
    row: dict[str, Any], found: Data | None = None, strategy: Any = None
) -> tuple[dict[str, Any], Any]:
    """Trains on this worker.

    Args:
        row: The row that `run` sends.
        found: Data to use instead of its `data_dir`.
        strategy: An existing strategy.

    Returns:
        The results, and the model.
    """
    import keras
    import tensorflow as tf

    import tf_redsync as rs
    from benchmarks.accuracy.evaluation import Evaluation
    from benchmarks.method_expressions import exchanged
    from tf_redsync.policy import Policy

    settings, what = Settings(**row["settings"]), exchanged(row["method"])
    options = dict(what.options)
    last = [rs.callbacks.Flush()] if options.pop("flush", False) else []
    if found is None:
        found = settings.of_task.load(Path(row["data_dir"]) if row["data_dir"] else None)
    rows = settings.rows(len(found.train[1]), row["seed"])
    policy = what.method
    policy = policy if isinstance(policy, Policy) else Policy(default=policy)
    strategy = strategy or rs.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = settings.network(found, row["seed"])
        inner = settings.inner_optimizer(policy.default.traits, clipping=True)
        optimizer = rs.DistributedOptimizer(inner, what.method, **options)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer=optimizer, loss=loss)

    def dataset(context: Any) -> Any:
        def batches() -> Any:
            for step in range(settings.steps):
                yield examples(settings, found, rows, step, context.input_pipeline_id)

        kinds = [tf.as_dtype(a.dtype) for a in examples(settings, found, rows, 0, 0)]
        shapes = [(settings.batch, *a.shape[1:]) for a in found.train]
        signature = tuple(tf.TensorSpec(s, k) for s, k in zip(shapes, kinds, strict=True))
        return tf.data.Dataset.from_generator(batches, output_signature=signature).prefetch(2)

    curve: dict[str, list[float]] = {"steps": [], "loss": [], "metric": []}
    sent: list[float] = []
    evaluation, ends = Evaluation(settings, found, model), set(settings.evaluated_at)

    class Measured(keras.callbacks.Callback):
        """Evaluates, and sums bytes."""

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            """Counts bytes after a step."""
            sent.append(float(optimizer.exchange.bytes_sent.numpy()))
            if batch + 1 in ends and not policy.default.sync_schedule.per_worker_weights:
                measure(batch + 1)

    def measure(steps: int) -> None:
        curve["steps"].append(steps)
        for name, value in evaluation().items():
            curve[name].append(value)

    started = time.perf_counter()
    model.fit(
        strategy.distribute_datasets_from_function(dataset),
        steps_per_epoch=settings.steps,
        callbacks=[Measured(), *last],
        verbose=0,
    )
    if settings.steps not in curve["steps"] or last:
        measure(settings.steps)
    return {
        "metric": curve["metric"][-1],
        "loss": curve["loss"][-1],
        "sent_bytes": sum(sent) / len(sent),
        "skipped": int(optimizer.exchange.skipped.numpy()),
        "elements": sum(math.prod(v.shape) for v in model.trainable_variables),
        "seconds": time.perf_counter() - started,
        "curve": curve,
    }, model


def main() -> None:
    """Entry point of a worker under `run`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("row")
    parser.add_argument("output")
    args = parser.parse_args()
    results, _ = train(json.loads(args.row))
    if int(json.loads(os.environ["TF_CONFIG"])["task"]["index"]) == 0:
        Path(args.output).write_text(json.dumps(results), encoding="utf-8")


if __name__ == "__main__":
    main()
