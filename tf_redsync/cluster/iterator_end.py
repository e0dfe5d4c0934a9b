"""End of a distributed dataset's iterator: a thread waits for it, so that `fit` returns at once.

A `tf.data` iterator has a thread that tunes it and sleeps between two rounds, for up to a minute.
The iterator's destructor wakes that thread, and only then sets the flag that tells it to end
(`CancellationManager::StartCancelWithStatus` of TensorFlow 2.16 to 2.21). On a busy core the thread
reads the flag first and sleeps on, and the destructor waits for it. So `fit`, `evaluate`, and each
epoch whose data end, may return late by as long as the iterator lived, up to a minute.

Names of TensorFlow used here: `OwnedMultiDeviceIterator`, its `_multi_device_iterator_resource` and
`_device_iterators`, and the `_iterator_resource` of these.
"""

from __future__ import annotations

import functools
import threading
import weakref
from typing import Any

from tensorflow.python.data.ops import multi_device_iterator_ops

THREAD_NAME = "tf_redsync-iterator-end"
# By then Python has dropped an iterator and all that it refers to.
KEPT_SECONDS = 1.0

_MARK = "ended_by_tf_redsync"


def install() -> None:
    """Let iterators of all strategies end in a thread; a second call is a no-op."""
    owner = multi_device_iterator_ops.OwnedMultiDeviceIterator
    create = owner.__init__
    if hasattr(create, _MARK):
        return

    @functools.wraps(create)
    def creating(self: Any, dataset: Any = None, *args: Any, **kwargs: Any) -> None:
        create(self, dataset, *args, **kwargs)
        if dataset is not None:  # otherwise another object owns the resources
            weakref.finalize(self, _drop_later, _resources(self)).atexit = False

    setattr(creating, _MARK, True)
    owner.__init__ = creating


def _resources(iterator: Any) -> list[Any]:
    """Return the handles with which the iterators on the host and on the devices live and die."""
    names = ("_multi_device_iterator_resource", "_iterator_resource")
    parts = [iterator, *getattr(iterator, "_device_iterators", ())]
    found = [getattr(part, name, None) for part in parts for name in names]
    return [handle for handle in found if handle is not None]


def _drop_later(resources: list[Any]) -> None:
    """Drop the last references to the iterators in a thread."""
    thread = threading.Timer(KEPT_SECONDS, resources.clear)
    thread.name, thread.daemon = THREAD_NAME, True
    thread.start()
