"""Batches that all workers are known to have, before which Keras 3's `fit` need not communicate.

Before each batch of finite data, tf.distribute sums over the workers how many replicas still have a
batch. Local steps would wait for that sum, and other steps for its latency. When `fit` begins, the
workers therefore compare how many batches an epoch has at least on each of them. Up to the smallest
number no step asks.

Names of Keras used here: `data_adapter` and the public `steps_per_epoch` of an epoch iterator, and
`_dataset` of a dataset's adapter; of TensorFlow `_datasets` of a distributed dataset.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tf_redsync.keras import first_batch, fit_resume, models
from tf_redsync.network import collectives


class KnownBatches:
    """The batches of the running epoch that all workers are known to have."""

    def __init__(self) -> None:
        self._per_epoch = 0
        with tf.init_scope(), tf.device("CPU:0"):
            zero = tf.zeros([], tf.int64)
            self._left = collectives.OneDeviceVariable(zero, trainable=False)

    def begin(self, batches: int) -> None:
        """Begin a `fit`.

        Args:
            batches: Batches per epoch that each worker has, equal on all workers.
        """
        self._per_epoch = batches

    def begin_epoch(self) -> None:
        """Begin an epoch, before its first batch."""
        self._left.assign(self._per_epoch)

    def end(self) -> None:
        """End a `fit`."""
        self._per_epoch = 0
        self._left.assign(0)

    def with_batch(self, own: tf.Tensor, ask: Callable[[], tf.Tensor]) -> tf.Tensor:
        """Return how many replicas have another batch; of this worker only if all workers have one.

        Args:
            own: The number of this worker's replicas with a batch, int64 `[1]`.
            ask: Returns the sum over all workers.
        """
        if not _in_fit():
            return ask()
        left = self._left.read_value()
        self._left.assign_sub(1, read_value=False)
        if tf.executing_eagerly():  # a resumed `fit` drops batches
            return ask()

        def known() -> tf.Tensor:
            message = (
                "the data of `fit` have fewer batches than their cardinality. Pass `dataset.apply("
                "tf.data.experimental.assert_cardinality(n))` with the true number, or "
                "`dataset.repeat()` and `steps_per_epoch`."
            )
            with tf.control_dependencies([tf.debugging.assert_positive(own, message)]):
                return tf.identity(own)

        return tf.cond(left > 0, known, ask)


def _in_fit() -> bool:
    """Return whether `fit` itself requests a batch, and not a callback or an evaluation in it."""
    for name in models.keras_functions():
        if name.startswith("on_") or name in ("evaluate", "predict"):
            return False
        if name == "fit":
            return True
    return False


def in_epoch(data: Any) -> int:
    """Return how many batches this worker has at least in an epoch of `fit`; 0 if unknown.

    Args:
        data: Keras 3's epoch iterator; for other objects and `None` the result is 0.
    """
    if getattr(data, "steps_per_epoch", 0) is not None:  # one iterator for several epochs
        return 0
    adapter = data.data_adapter
    if type(adapter).__name__ == "ArrayDataAdapter":
        return int(adapter.num_batches)
    dataset = getattr(adapter, "_dataset", None)
    if isinstance(dataset, tf.distribute.DistributedDataset):
        if hasattr(dataset, "_datasets"):
            return fit_resume.steps_of_shard(dataset) or 0
        (dataset,) = fit_resume.datasets_of(dataset)
    if not isinstance(dataset, tf.data.Dataset) or not first_batch.is_sharded_by_rows(dataset):
        return 0
    return max(0, int(dataset.cardinality()))  # negative if infinite or unknown
