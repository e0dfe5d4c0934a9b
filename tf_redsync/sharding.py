"""Datasets that are a worker's own share of the data."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


def already_sharded(dataset: tf.data.Dataset, strategy: tf.distribute.Strategy) -> Any:
    """Return a dataset for `fit`, `evaluate` or `predict` that is this worker's own share.

    By default `tf.distribute` divides a dataset among the workers, and each batch of it too. Of
    this one every worker takes all batches as they are, so the global batch is the sum of the
    workers' batches, and an epoch is as long as this dataset. All workers need the same number of
    batches. Keras's `class_weight` is not supported; make weights a part of the dataset.

    Args:
        dataset: Batches of this worker's examples. With several replicas in a process, each takes
            a batch of it in turn.
        strategy: The one that the model is built under.

    Returns:
        What `strategy.distribute_datasets_from_function` makes of it.

    Raises:
        TypeError: if `dataset` is no `tf.data.Dataset`.

    Example:
        train = tf.data.Dataset.from_tensor_slices((x[rank::workers], y[rank::workers])).batch(32)
        model.fit(tf_redsync.already_sharded(train, strategy))
    """
    if not isinstance(dataset, tf.data.Dataset):
        raise TypeError(
            "`already_sharded` needs a `tf.data.Dataset` that is not distributed yet. Received: "
            f"dataset={dataset!r}. Make one by `tf.data.Dataset.from_tensor_slices(...).batch(n)` "
            "or `from_generator`."
        )
    return strategy.distribute_datasets_from_function(lambda _: dataset)
