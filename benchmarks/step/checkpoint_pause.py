"""Time by which a save of `Checkpoint` delays the training.

    python -m tf_redsync.launch -n 2 benchmarks/step/checkpoint_pause.py --directory /tmp/run1

trains 25 million float32 weights with Adam and RedSync by `fit`, and saves several times. Worker 0
prints how long the step before a save waits, and how much longer all steps of a save take than
without one, because the writing threads share the cores with the training.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
if __name__ == "__main__" and not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[2])

WIDTH, LAYERS, BATCH = 2048, 6, 16


def timed_class():
    """Returns a subclass of `Checkpoint` that times its hooks and each step."""
    from tf_redsync.callbacks import Checkpoint

    class Timed(Checkpoint):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.seconds, self.ends = [], []

        def on_train_batch_begin(self, batch, logs=None):
            began = time.perf_counter()
            super().on_train_batch_begin(batch, logs)
            self.seconds.append(time.perf_counter() - began)

        def on_train_batch_end(self, batch, logs=None):
            began = time.perf_counter()
            super().on_train_batch_end(batch, logs)
            self.ends.append(time.perf_counter())
            self.seconds[-1] += self.ends[-1] - began

    return Timed


def main() -> None:
    """Trains and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--directory", required=True, help="for the checkpoints; new or empty")
    parser.add_argument("--every", type=int, default=20, help="steps")
    parser.add_argument("--saves", type=int, default=7)
    args = parser.parse_args()
    import keras
    import numpy as np
    import tensorflow as tf

    import tf_redsync as rs

    strategy = rs.MultiWorkerMirroredStrategy()
    keras.utils.set_random_seed(1)
    with strategy.scope():
        layers = [keras.layers.Dense(WIDTH, activation="relu") for _ in range(LAYERS)]
        model = keras.Sequential([keras.Input((WIDTH,)), *layers, keras.layers.Dense(10)])
        optimizer = rs.DistributedOptimizer(keras.optimizers.Adam(1e-4), rs.RedSync(density=0.001))
        model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    pair = np.ones((BATCH, WIDTH), np.float32), np.zeros(BATCH, np.int64)
    one = tf.data.Dataset.from_tensors(pair).repeat()
    data = strategy.distribute_datasets_from_function(lambda _: one)
    model.fit(data, steps_per_epoch=args.every, verbose=0)
    checkpoint = timed_class()(args.directory, every=args.every)
    steps = args.every * (args.saves + 1)
    model.fit(data, steps_per_epoch=steps, verbose=0, callbacks=[checkpoint])
    if strategy.cluster_resolver.task_id == 0:
        saves = range(args.every, steps, args.every)  # positions of the steps that begin a save
        took = np.diff(checkpoint.ends, prepend=np.nan)
        plain = float(np.median(took[args.every // 2 : args.every]))  # before the first save
        pauses = [checkpoint.seconds[i] for i in saves]
        longer = [float(took[i : i + args.every].sum()) - args.every * plain for i in saves]
        print(
            f"{model.count_params() / 1e6:.1f} M weights, {strategy.num_replicas_in_sync} workers: "
            f"a step of {plain:.3f} s waits {statistics.median(pauses):.3f} s for a save (median "
            f"of {len(pauses)}, {min(pauses):.3f} to {max(pauses):.3f} s); the {args.every} steps "
            f"from there on take {statistics.median(longer):.3f} s longer in all",
            flush=True,
        )


if __name__ == "__main__":
    main()
