"""Cost of `CompressionMetrics` per step.

    python -m tf_redsync.launch -n 2 benchmarks/step/metrics_cost.py --model mlp

trains by `fit`, alternately without and with the callback at its defaults and a run directory.
Worker 0 prints the medians of the pairs, and the time inside of the callback, which is nearly free
of noise: per step with its share of a sample, and the rest of a `fit` of one epoch, mostly for the
first sample, the first profile and the epoch's histograms.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
if __name__ == "__main__" and not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[2])


HOOKS = ("on_train_batch_begin", "on_train_batch_end", "on_epoch_end", "on_train_end")


def model_of(name):
    """A model and the shape of its inputs."""
    import keras

    if name == "resnet50":
        return keras.applications.ResNet50(weights=None, classes=10, input_shape=(64, 64, 3))
    width = 2048 if name == "mlp" else 64
    layers = [keras.layers.Input((256,)), keras.layers.Dense(width, activation="relu")]
    layers += [keras.layers.Dense(width, activation="relu"), keras.layers.Dense(10)]
    return keras.Sequential(layers)


def timed_class():
    """Returns a subclass of `CompressionMetrics` that times its hooks."""
    from tf_redsync.callbacks import CompressionMetrics

    class Timed(CompressionMetrics):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.seconds = {name: [] for name in HOOKS}

        def per_step(self):
            """Seconds per step, and seconds of the other work in a `fit` of one epoch."""
            begins, ends = self.seconds["on_train_batch_begin"], self.seconds["on_train_batch_end"]
            # The longest one is the first sample, which sets up.
            samples = sorted(ends)[-(len(ends) // self.every) - 1 : -1]
            plain = statistics.median(begins) + statistics.median(ends)
            steady = plain + statistics.median(samples) / self.every
            return steady, sum(map(sum, self.seconds.values())) - steady * len(ends)

    def of(name):
        inner = getattr(CompressionMetrics, name)

        def hook(self, *args, **kwargs):
            began = time.perf_counter()
            inner(self, *args, **kwargs)
            self.seconds[name].append(time.perf_counter() - began)

        return hook

    for name in HOOKS:
        setattr(Timed, name, of(name))
    return Timed


def main() -> None:
    """Trains and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=("small", "mlp", "resnet50"), default="mlp")
    parser.add_argument("--steps", type=int, default=400, help="of one turn")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--batch", type=int, default=32, help="of each worker")
    args = parser.parse_args()
    import keras
    import numpy as np
    import tensorflow as tf

    import tf_redsync as rs

    strategy = rs.MultiWorkerMirroredStrategy()
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = model_of(args.model)
        optimizer = rs.DistributedOptimizer(keras.optimizers.SGD(0.001), rs.RedSync(density=0.001))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss)
    shape = (args.batch, *model.input_shape[1:])
    one = tf.data.Dataset.from_tensors((np.ones(shape, np.float32), np.zeros(args.batch, np.int64)))
    data = strategy.distribute_datasets_from_function(lambda _: one.repeat())
    kind, times, inside = timed_class(), {"without": [], "with": []}, []
    model.fit(data, steps_per_epoch=10, verbose=0)
    with tempfile.TemporaryDirectory() as folder:
        for pair in range(args.pairs):
            for name in ("without", "with") if pair % 2 else ("with", "without"):
                metrics = kind(f"{folder}/{pair}")
                callbacks = [metrics] if name == "with" else []
                began = time.perf_counter()
                model.fit(data, steps_per_epoch=args.steps, verbose=0, callbacks=callbacks)
                seconds = time.perf_counter() - began
                times[name].append(1e3 * seconds / args.steps)
                if callbacks:
                    inside.append(metrics.per_step())
    if strategy.cluster_resolver.task_id == 0:
        medians = {name: statistics.median(found) for name, found in times.items()}
        pairs = [w / o - 1 for o, w in zip(times["without"], times["with"], strict=True)]
        steady, once = (1e3 * statistics.median(found) for found in zip(*inside, strict=True))
        print(
            f"{args.model}: {medians['without']:.2f} ms a step without, {medians['with']:.2f} ms "
            f"with; median of {args.pairs} pairs {100 * statistics.median(pairs):+.2f} %; inside "
            f"of the callback {steady:.4f} ms a step, {100 * steady / medians['without']:.2f} %, "
            f"and {once:.0f} ms besides in a `fit` of one epoch",
            flush=True,
        )


if __name__ == "__main__":
    main()
