"""Threads and memory of a training process do not grow with its steps.

The short test runs by default. The long one, of `pytest --deep`, runs every combination for 3,000
steps. As a script, this file prints its measurements:

    python -m tests.distributed.test_soak
"""

import itertools

import numpy as np
import pytest

from tests.deep import DEEP
from tests.distributed.cluster import LEGACY, run_workers

WAYS = ("keras3", "tf_keras", "legacy", "loop")
METHODS = ("RedSync", "CodedGMC", "Dense", "plain")
# For slow links. `fit` ends rounds with epochs, so Keras 3 represents all families.
RARE = {
    "StreamingDiLoCo": "rs.StreamingDiLoCo(steps=20, fragments=2, overlap=3)",
    "SparseLoCo": "rs.SparseLoCo(steps=10, top_k=16)",
    "DeMo": "rs.DeMo()",
    "OneBitAdam": "rs.contrib.OneBitAdam(warm_up=rs.DenseWarmUp(50), dense_below=64)",
    "BlockQuantized": "rs.BlockQuantized(bits=4)",
    "ZeroOneAdam": "rs.contrib.ZeroOneAdam(start=200, steps=16, double_after=300)",
}
LONG = (*itertools.product(WAYS, METHODS), *(("keras3", name) for name in RARE))
FEW = (("keras3", "RedSync"), ("tf_keras", "Dense"), ("legacy", "RedSync"), ("loop", "plain"))
FEW = FEW if DEEP else (FEW[0], FEW[2], FEW[3])
GROWTH = 2**10  # Bytes of resident memory per step: one collective with a new key takes 1.6 KB.


def train(combinations, samples):
    """Train every combination of a way and a method, one after the other.

    Args:
        combinations: Pairs of `WAYS` and `METHODS`.
        samples: Steps after which threads and memory are measured; training ends with the last one.

    Returns:
        Threads, resident bytes and the number of collectives with a new key,
        `[combinations, samples]` each.
    """
    import keras
    import tensorflow as tf
    import tf_keras

    import tf_redsync as rs
    from tests.distributed import problems

    strategy = rs.MultiWorkerMirroredStrategy()
    found = []

    def sample(step):
        if step in samples:
            status = dict(
                line.split(":", 1) for line in open("/proc/self/status").read().splitlines()
            )
            next_keys = strategy.extended._collective_keys._instance_key_table
            keys = sum(key for devices in next_keys.values() for key in devices.values())
            found.append((int(status["Threads"]), 1024 * int(status["VmRSS"].split()[0]), keys))

    def build(family, optimizers, method):
        inner = optimizers.SGD(0.01, momentum=0.0 if method == "CodedGMC" else 0.9)
        model = problems.network(family)
        if method in RARE:
            rate = 1e-4 if method == "DeMo" else 0.01
            kind = optimizers.Adam if method.endswith("Adam") else optimizers.SGD
            return model, rs.DistributedOptimizer(kind(rate), eval(RARE[method], {"rs": rs}))
        if method == "plain":
            return model, inner
        chosen = {
            "RedSync": rs.RedSync(density=0.1, dense_below=16),
            "CodedGMC": rs.CodedGMC(dense_below=16),
            "Dense": rs.Dense(),
        }[method]
        return model, rs.DistributedOptimizer(inner, chosen)

    def fit(family, optimizers, method):
        class Sampler(family.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
                sample(batch + 1)

        with strategy.scope():
            model, optimizer = build(family, optimizers, method)
            model.compile(optimizer=optimizer, loss="mse")
        data = problems.dataset(64, 16).repeat()
        model.fit(data, steps_per_epoch=max(samples), verbose=0, callbacks=[Sampler()])

    def loop(method):
        with strategy.scope():
            model, optimizer = build(keras, keras.optimizers, method)
            optimizer.build(model.trainable_variables)

        def replica_step(batch):
            x, y = batch
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
                rows = tf.distribute.get_replica_context().all_gather(tf.identity(y), axis=0)
                loss += 0.0 * tf.reduce_sum(rows)  # as in a contrastive loss
            grads = tape.gradient(loss, model.trainable_variables)
            optimizer.apply(grads, model.trainable_variables)
            return loss

        @tf.function
        def step(batch):
            return strategy.reduce("SUM", strategy.run(replica_step, args=(batch,)), axis=None)

        finite = problems.dataset(64, 16).repeat(max(samples))  # so workers ask for each batch
        data = strategy.experimental_distribute_dataset(finite)
        for number, batch in zip(range(1, max(samples) + 1), data, strict=False):
            step(batch)
            sample(number)

    for way, method in combinations:
        if way == "loop":
            loop(method)
        elif way == "keras3":
            fit(keras, keras.optimizers, method)
        else:
            legacy = way == "legacy"
            fit(tf_keras, tf_keras.optimizers.legacy if legacy else tf_keras.optimizers, method)
    shape = (len(combinations), len(samples))
    columns = zip(("threads", "memory", "keys"), zip(*found, strict=True), strict=True)
    return {name: np.reshape(values, shape).tolist() for name, values in columns}


def test_nothing_grows_with_steps():
    for worker in run_workers(train, args=(FEW, (20, 100)), env=LEGACY, timeout=150):
        for combination, (before, after) in zip(FEW, worker["threads"], strict=True):
            # Pools start some threads late; one thread in ten steps would be 8.
            assert after <= before + 6, f"{combination}: {before} threads, then {after}"
        for combination, (before, after) in zip(FEW, worker["keys"], strict=True):
            # TensorFlow never forgets a collective's key.
            assert after == before, f"{combination}: {after - before} new keys in 80 steps"


@pytest.mark.deep  # eight minutes
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("way", "method"), LONG)
def test_threads_and_memory_stay_constant_in_long_runs(way, method):
    for worker in run_workers(train, args=([(way, method)], (100, 3000)), env=LEGACY, timeout=1000):
        (threads,), (memory,) = worker["threads"], worker["memory"]
        assert threads[1] <= threads[0] + 2
        assert memory[1] <= memory[0] + 2900 * GROWTH


def main():
    """Print a table of threads and MiB after 100, 1,000 and 3,000 steps."""
    samples = (100, 1000, 3000)
    print(f"{'':20} threads and MiB after {samples} steps, of worker 0 and worker 1")
    for way, method in LONG:
        workers = run_workers(train, args=([(way, method)], samples), env=LEGACY, timeout=1000)
        text = [
            f"{list(w['threads'][0])} {[round(m / 2**20, 1) for m in w['memory'][0]]}"
            for w in workers
        ]
        print(f"{way + ' ' + method:20}", " | ".join(text), flush=True)


if __name__ == "__main__":
    main()
