"""Mends two defects of the iterators that fetch a distributed dataset's batches to a device.

**Late end.** A `tf.data` iterator has an autotuning thread that sleeps between two rounds, for up
to a minute. The iterator's destructor wakes that thread, and only then sets the flag that ends it
(`CancellationManager::StartCancelWithStatus` of TensorFlow 2.16 to 2.21). On a busy core the thread
reads the flag first and continues to sleep, and the destructor waits for it. So `fit`, `evaluate`
and the end of an epoch's data were delayed by the iterator's age, up to a minute.

A distributed dataset has an iterator of the user's pipeline on the host, and one on each device
that fetches its batches and has nothing to tune. Autotuning is disabled on the devices. The host's
iterator keeps its autotuning and can still be late, more rarely. To prevent this, set
`autotune.enabled = False` in the dataset's options.

**Segmentation fault.** If an iterator is dropped before its end, its destructor frees the dataset
first and then waits for the thread that draws from that dataset (`MultiDeviceIterator` of
TensorFlow 2.21). Keras drops one at the start of every evaluation under a strategy. The iterator in
Python therefore keeps the dataset until the native iterator is destroyed.

Private name of TensorFlow used here: `_create_device_dataset`, which creates the device's iterator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.data.ops import multi_device_iterator_ops

from tf_redsync.patching import patch_once


def install() -> None:
    """Mend the iterators of all strategies; idempotent."""
    patch_once(multi_device_iterator_ops, "_create_device_dataset", _without_autotuning)
    patch_once(multi_device_iterator_ops.OwnedMultiDeviceIterator, "__init__", _keeping_dataset)


def _without_autotuning(create: Callable[..., Any]) -> Callable[..., Any]:
    def untuned(*args: Any, **kwargs: Any) -> Any:
        options = tf.data.Options()
        options.autotune.enabled = False
        return create(*args, **kwargs).with_options(options)

    return untuned


def _keeping_dataset(init: Callable[..., None]) -> Callable[..., None]:
    def keeping(self: Any, dataset: Any = None, *args: Any, **kwargs: Any) -> None:
        if dataset is None:  # within a function, from an iterator's parts
            init(self, dataset, *args, **kwargs)
            return
        source = _Source(dataset)
        init(self, source, *args, **kwargs)
        # Python drops attributes in the order in which they were set: this one after the iterators.
        self._redsync_dataset = source.drawn_from

    return keeping


class _Source:
    """A dataset that remembers which dataset its device iterator draws from."""

    def __init__(self, dataset: Any):
        self._dataset = dataset
        self.drawn_from = dataset

    def with_options(self, options: tf.data.Options) -> Any:
        """Return the dataset with options, and keep it."""
        self.drawn_from = self._dataset.with_options(options)
        return self.drawn_from
