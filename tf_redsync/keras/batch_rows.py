"""Rows of each worker's batches, for a warning where workers have different numbers of them.

In `fit` each worker's gradient is the mean over its own rows, and all workers count alike. So where
a global batch does not divide evenly, as the last one of an epoch, a row counts for more on the
worker that has fewer. And a worker without any row sends a gradient of 0. To weight the gradients
each step would need the sum of the rows before its exchange. The workers compare their smallest
batches where an epoch ends, in a message that they exchange there anyway.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_redsync.keras.accuracy import AccuracyWarning
from tf_redsync.network import collectives

_MOST = tf.int64.max


class BatchRows:
    """This worker's smallest batch in the steps of `fit`."""

    def __init__(self) -> None:
        with tf.init_scope(), tf.device("CPU:0"):
            most = tf.constant(_MOST, tf.int64)
            self._least = collectives.OneDeviceVariable(most, trainable=False)
        self._warned = False

    def begin(self) -> None:
        """Forget the batches of an earlier `fit`."""
        self._least.assign(_MOST)

    @tf.autograph.experimental.do_not_convert
    def note(self, batch: Any) -> None:
        """Note the rows of a batch, in the step that trains on it."""
        rows = next(
            (tf.shape(t, tf.int64)[0] for t in tf.nest.flatten(batch) if _has_rows(t)), None
        )
        if rows is not None:
            least = tf.minimum(self._least.read_value(), rows)
            self._least.assign(least, read_value=False)

    def told(self) -> str:
        """Return what to tell the other workers: the number, or nothing before the first step."""
        least = int(self._least.numpy())
        return "" if least == _MOST else str(least)

    def compare(self, all_told: Sequence[str]) -> None:
        """Warn once where the smallest batches of all workers, by rank, are not alike."""
        if self._warned or len(set(all_told)) < 2 or "" in all_told:
            return
        self._warned = True
        warnings.warn(_text([int(rows) for rows in all_told]), AccuracyWarning, stacklevel=2)


def _has_rows(value: Any) -> bool:
    return isinstance(value, tf.Tensor) and value.shape.rank is not None and value.shape.rank > 0


def _text(rows: Sequence[int]) -> str:
    some = ", ".join(f"worker {rank}: {n}" for rank, n in list(enumerate(rows))[:8])
    without = sum(n == 0 for n in rows)
    effect = (
        f"{without} of {len(rows)} workers had no rows and sent a gradient of 0, so that step was "
        f"{len(rows) - without}/{len(rows)} as long."
        if without
        else "Each worker's gradient is the mean over its own rows, and all workers count alike: "
        "the rows of a worker with fewer of them counted for more."
    )
    return (
        f"workers had different numbers of rows in a batch. {effect} Use batches of a multiple of "
        f"{len(rows)} rows and leave out the rest: `dataset.batch(size, drop_remainder=True)`, or "
        "arrays whose length is a multiple of `batch_size`. Received: rows in the smallest batch: "
        f"{some}{', ...' if len(rows) > 8 else ''}"
    )
