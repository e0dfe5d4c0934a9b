"""Disables autotuning of the iterators that fetch batches to a device, since it can delay `fit`.

A `tf.data` iterator has an autotuning thread that sleeps between two rounds, for up to a minute.
The iterator's destructor wakes that thread, and only then sets the flag that ends it
(`CancellationManager::StartCancelWithStatus` of TensorFlow 2.16 to 2.21). On a busy core the thread
reads the flag first and continues to sleep, and the destructor waits for it. So `fit`, `evaluate`
and the end of an epoch's data were delayed by the iterator's age, up to a minute.

A distributed dataset has an iterator of the user's pipeline on the host, and one on each device
that fetches its batches and has nothing to tune. The host's iterator keeps its autotuning and can
still be late, more rarely. To prevent this, set `autotune.enabled = False` in the dataset's
options.

Private name of TensorFlow used here: `_create_device_dataset`, which creates the device's iterator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.data.ops import multi_device_iterator_ops

from tf_redsync.patching import patch_once

_NAME = "_create_device_dataset"


def install() -> None:
    """Disable autotuning of the device iterators of all strategies; idempotent."""

    def untuning(create: Callable[..., Any]) -> Callable[..., Any]:
        def untuned(*args: Any, **kwargs: Any) -> Any:
            options = tf.data.Options()
            options.autotune.enabled = False
            return create(*args, **kwargs).with_options(options)

        return untuned

    patch_once(multi_device_iterator_ops, _NAME, untuning)
