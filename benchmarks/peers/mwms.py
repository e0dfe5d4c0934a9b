"""One worker of TensorFlow's MultiWorkerMirroredStrategy with plain Keras, on CPUs.

`none`   the same model without a strategy: nothing is sent
`dense`  the strategy and Keras's SGD

Started by `python -m benchmarks.peers`. The TensorFlow version is that of the driver, in a virtual
environment without tf_redsync.
"""

from __future__ import annotations

import argparse
import contextlib
from importlib import metadata
from typing import Any

from benchmarks.models import LEARNING_RATE, WORKLOADS, set_initial_weights
from benchmarks.peers import common

METHODS = ("none", "dense")


def versions() -> dict[str, str]:
    """Returns the installed versions of TensorFlow and Keras."""
    names = {distribution.metadata["Name"] for distribution in metadata.distributions()}
    tensorflow = "tensorflow-cpu" if "tensorflow-cpu" in names else "tensorflow"
    return {name: metadata.version(name) for name in (tensorflow, "keras")}


def peer() -> common.Peer:
    """Returns the library's description, with the versions that tf_redsync uses here."""
    wanted = tuple(f"{name}=={version}" for name, version in versions().items())
    return common.Peer(
        name="mwms", module="benchmarks.peers.mwms", methods=METHODS, installs=(wanted,)
    )


def build(args: argparse.Namespace, where: common.Cluster) -> common.Session:
    """Joins the cluster and returns the model, ready to train."""
    import keras
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    alone = args.method == "none"  # the strategy is then only a barrier
    with contextlib.nullcontext() if alone else strategy.scope():
        model = WORKLOADS[args.model].build()
        optimizer = keras.optimizers.SGD(LEARNING_RATE)
        optimizer.build(model.trainable_variables)
        set_initial_weights(model, args.seed)
    loss_of, replicas = keras.losses.sparse_categorical_crossentropy, 1 if alone else where.size

    def replica_step(inputs: Any, labels: Any) -> Any:
        with tf.GradientTape() as tape:
            losses = loss_of(labels, model(inputs, training=True), from_logits=True)
            # The strategy sums over the replicas. Loss objects divide by their number in newer
            # versions of Keras only; this function never does.
            loss = tf.reduce_mean(losses) / replicas
        variables = model.trainable_variables
        optimizer.apply(tape.gradient(loss, variables), variables)
        return loss

    @tf.function
    def train(inputs: Any, labels: Any) -> Any:
        if alone:
            return replica_step(inputs, labels)
        return strategy.run(replica_step, args=(inputs, labels))

    @tf.function
    def agree() -> Any:
        return strategy.reduce("SUM", strategy.run(lambda: tf.ones(())), axis=None)

    return common.Session(
        tensor=tf.constant,
        step=lambda inputs, labels: train(inputs, labels).numpy(),
        barrier=lambda: agree().numpy(),
        logits=lambda inputs: model(inputs).numpy(),
        params=model.count_params(),
        versions={"tensorflow": tf.__version__, "keras": keras.__version__},
        settings={},
    )


if __name__ == "__main__":
    common.main(METHODS, build)
