"""Self-test of `doctor --check`: two local workers run every collective and a short training.

`run` starts the workers, which run this module.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tf_redsync.cli import gpus, launch

WORKERS = 2
TIMEOUT = 180.0  # seconds; the first run compiles the native library
_TRAINING = "training"
CHECKS = ("all-gather", "all-reduce", "all-to-all", "pair gather", _TRAINING)


def run(gpu_count: int) -> dict[str, dict[str, str]]:
    """Return the problem of each check by type of device, "" for a check that passed.

    Args:
        gpu_count: Number of GPUs that TensorFlow sees. With 0 only the CPU is tested. Each worker
            uses one of them; the workers share a single one.
    """
    problems = {"CPU": _run_workers([{gpus.VARIABLE: "-1"}] * WORKERS)}
    if gpu_count:
        everything = ",".join(map(str, range(gpu_count)))
        usable = gpus.visible({gpus.VARIABLE: everything, **os.environ})
        listed = {gpus.VARIABLE: ",".join(usable[: min(WORKERS, gpu_count)])}
        own = gpus.worker_variables(listed, [{}] * WORKERS, describe=False)
        problems["GPU"] = _run_workers(own)
    return problems


def _run_workers(worker_env: Sequence[Mapping[str, str]]) -> dict[str, str]:
    with tempfile.TemporaryDirectory() as folder:
        job = launch.run(
            [sys.executable, "-m", "tf_redsync.cli.self_test", folder],
            WORKERS,
            env={"TF_CPP_MIN_LOG_LEVEL": "2", "TF_FORCE_GPU_ALLOW_GROWTH": "true"},
            worker_env=worker_env,
            timeout=TIMEOUT,
            stop_grace=10,
        )
        parts = [json.loads(p.read_text(encoding="utf-8")) for p in Path(folder).glob("*.json")]
    if job.exit_code or len(parts) < WORKERS:
        return dict.fromkeys(CHECKS, "not run") | {_TRAINING: job.message or "no result"}
    return {name: next((part[name] for part in parts if part[name]), "") for name in CHECKS}


def _collectives(strategy: Any) -> dict[str, str]:
    """Return the problem of each collective on this worker, "" for a correct result."""
    import numpy as np
    import tensorflow as tf

    from tf_redsync.network import collectives, strategies

    network = collectives.for_strategy(strategy)
    rank = strategies.process_rank(strategy)
    each = tf.range(WORKERS)[:, tf.newaxis]
    makes: dict[str, tuple[Callable[[], Any], Any]] = {
        "all-gather": (
            lambda: network.all_gather(tf.fill([3], network.rank())),
            [[0] * 3, [1] * 3],
        ),
        "all-reduce": (lambda: network.all_reduce([tf.cast(each, tf.float32)])[0], [[0.0], [2.0]]),
        "all-to-all": (
            lambda: network.all_to_all(10 * network.rank() + each),
            [[rank], [10 + rank]],
        ),
        "pair gather": (
            lambda: network.pair_gather(tf.fill([2], network.rank()), 1),
            [[0, 0], [1, 1]],
        ),
    }
    problems = {}
    for name, (make, expected) in makes.items():
        step = tf.function(lambda make=make: strategy.run(make), autograph=False)
        received = strategy.experimental_local_results(step())[0].numpy()
        right = received.shape == np.shape(expected) and (received == expected).all()
        problems[name] = "" if right else f"received {received.tolist()}, expected {expected}"
    return problems


def _train(strategy: Any) -> str:
    """Run six training steps with comparisons of weights; return the problem, or "" for none."""
    import keras
    import numpy as np

    from tf_redsync.methods import CodedTopK
    from tf_redsync.optimizer import DistributedOptimizer

    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential([keras.layers.Input((8,)), keras.layers.Dense(64)])
        method = CodedTopK(density=0.1, dense_below=16)
        model.compile(DistributedOptimizer(keras.optimizers.SGD(0.1), method, check_every=1), "mse")
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(32, 8)).astype("float32"), rng.normal(size=(32, 64)).astype("float32")
    losses = model.fit(x, y, batch_size=16, epochs=3, verbose=0).history["loss"]
    return "" if losses[-1] < losses[0] else f"the loss does not decrease: {losses}"


def main(argv: Sequence[str] | None = None) -> None:
    """Run one worker, which writes its results into the folder `argv[0]`."""
    from tf_redsync.strategy import MultiWorkerMirroredStrategy

    (folder,) = sys.argv[1:] if argv is None else argv
    strategy = MultiWorkerMirroredStrategy(timeout_seconds=60)
    problems = {**_collectives(strategy), _TRAINING: _train(strategy)}
    rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    (Path(folder) / f"{rank}.json").write_text(json.dumps(problems), encoding="utf-8")


if __name__ == "__main__":
    main()
