"""No tuner for the iterators that fetch batches to a device: it may let `fit` return late.

A `tf.data` iterator has a thread that tunes it and sleeps between two rounds, for up to a minute.
The iterator's destructor wakes that thread, and only then sets the flag that tells it to end
(`CancellationManager::StartCancelWithStatus` of TensorFlow 2.16 to 2.21). On a busy core the thread
reads the flag first and sleeps on, and the destructor waits for it. So `fit`, `evaluate`, and each
epoch whose data end, returned late by as long as the iterator had lived, up to a minute.

A distributed dataset has an iterator of the user's pipeline on the host, and on each device one
that fetches its batches, in which there is nothing to tune. The host's keeps its tuner and may
still end late, more rarely; `autotune.enabled = False` in the dataset's options prevents this.

Private name of TensorFlow used here: `_create_device_dataset`, which makes the device's iterator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.data.ops import multi_device_iterator_ops

from tf_redsync.patching import patch_once

_NAME = "_create_device_dataset"


def install() -> None:
    """Let no strategy tune the iterators on its devices; a second call is a no-op."""

    def untuning(create: Callable[..., Any]) -> Callable[..., Any]:
        def untuned(*args: Any, **kwargs: Any) -> Any:
            options = tf.data.Options()
            options.autotune.enabled = False
            return create(*args, **kwargs).with_options(options)

        return untuned

    patch_once(multi_device_iterator_ops, _NAME, untuning)
