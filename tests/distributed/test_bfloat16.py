"""Models that compute in bfloat16: the selection reads bfloat16 gradients without a cast."""

import json

import pytest

from tests.deep import DEEP
from tests.distributed.cluster import run_workers
from tests.kernels.common import needs_native

pytestmark = pytest.mark.distributed

METHODS = (  # a commit tests the first two: the others call the same ops
    "RedSync(density=0.05, dense_below=0, momentum=0.9)",
    "Scheduled(method=rs.CodedTopK(), stages=rs.DensityStages((0, 2), (0.1, 0.05)))",  # branches
    "RedSync(density=0.05, dense_below=0, warm_up=rs.DenseWarmUp(2))",  # in a branch
    "GMC(density=0.05)",
    "CodedGMC(density=0.05)",
    "RedSync(density=0.05, dense_below=0, clip_norm=1.0)",
    "TopK(density=0.05)",
    "CodedTopK(density=0.05)",
)
STEPS = 4
RUNS = [
    (policy, text)
    for policy, few in (("mixed_bfloat16", 2), ("bfloat16", 1))
    for text in METHODS[: len(METHODS) if DEEP else few]
]


def trained(runs):
    """Trains twice in each run, the second time with explicit casts."""
    import json

    import keras
    import numpy as np
    import tensorflow as tf

    import tf_redsync as rs
    from tests.distributed import problems
    from tf_redsync.ops import selection
    from tf_redsync.step import gradient_exchange

    rng = np.random.default_rng(0)
    rows = rng.zipf(1.3, (64, 12)).clip(1, 99)
    labels = (rows[:, 0] % 4).astype(np.uint8)
    strategy = rs.MultiWorkerMirroredStrategy()
    looks = {module: module.before_cast for module in (selection, gradient_exchange)}

    def dtypes(graph):
        definition = graph.as_graph_def()
        nodes = [*definition.node, *(n for f in definition.library.function for n in f.node_def)]
        selections = [
            n for n in nodes if n.op in ("RedsyncAccumulateAndSelect", "RedsyncSelectAndCode")
        ]
        return [tf.as_dtype(t).name for n in selections for t in n.attr["T"].list.type]

    def run(policy, text, with_casts):
        for module, look in looks.items():
            module.before_cast = look if with_casts else lambda tensor: tensor
        keras.backend.clear_session()
        keras.utils.set_random_seed(1)
        keras.config.set_dtype_policy(policy)
        with strategy.scope():
            inputs = keras.layers.Input((12,), dtype="int32")
            x = keras.layers.Embedding(100, 32)(inputs)
            x = keras.layers.MultiHeadAttention(2, 16)(x, x)
            x = keras.layers.LayerNormalization()(x)
            x = keras.layers.GlobalAveragePooling1D()(x)
            x = keras.layers.Dense(64, activation="gelu")(x)
            model = keras.Model(inputs, keras.layers.Dense(4, dtype="float32")(x))
            method = eval(f"rs.{text}", {"rs": rs})
            optimizer = rs.DistributedOptimizer(keras.optimizers.SGD(0.1), method)
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            optimizer.build(model.trainable_variables)

        def replica_step(x, y):
            with tf.GradientTape() as tape:
                value = tf.reduce_mean(loss(y, model(x, training=True)))
            gradients = tape.gradient(value, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

        @tf.function(autograph=False)
        def step(x, y):
            strategy.run(replica_step, (x, y))

        start = problems.rank() * len(rows) // 2
        batches = [slice(start + 8 * i, start + 8 * i + 8) for i in range(STEPS)]
        x, y = tf.constant(rows), tf.constant(labels)
        concrete = step.get_concrete_function(x[batches[0]], y[batches[0]])
        for batch in batches:
            concrete(x[batch], y[batch])
        weights = [np.asarray(w, np.float32) for w in model.get_weights()]
        return weights, dtypes(concrete.graph)

    found = {}
    for policy, text in runs:
        weights, read = run(policy, text, True)
        cast, widened = run(policy, text, False)
        same = all(np.array_equal(a, b) for a, b in zip(weights, cast, strict=True))
        finite = all(np.isfinite(w).all() for w in weights)
        counts = [read.count("bfloat16"), widened.count("bfloat16"), len(read)]
        digest = float(sum(np.abs(w).sum(dtype=np.float64) for w in weights))
        found[f"{policy}: {text}"] = [same, finite, *counts, digest]
    return {"found": json.dumps(found)}


@needs_native
def test_bfloat16_gradients_are_read_without_cast():
    workers = run_workers(trained, args=(RUNS,), timeout=280)
    first, second = (json.loads(str(worker["found"])) for worker in workers)
    assert first == second and len(first) == len(RUNS)
    for name, (same, finite, narrow, cast, gradients, _) in first.items():
        assert same and finite, name
        assert narrow > 0 and narrow >= gradients // 2, name
        assert cast == 0 or not name.startswith("mixed"), name
