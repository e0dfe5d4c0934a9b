"""Access to the hooks of our strategy; strategies of TensorFlow do not have them.

See `strategy.MultiWorkerMirroredStrategy.run`. The hooks are registered while a step is traced.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf


def is_ours(strategy: Any) -> bool:
    """Whether this is a `tf_redsync.MultiWorkerMirroredStrategy`, which no lower layer imports."""
    return hasattr(strategy, "skips")


def shared_statistics(strategy: tf.distribute.Strategy) -> list[Any]:
    """Return the statistics that our strategy keeps equal on all workers."""
    return getattr(strategy, "shared_statistics", [])


def taken_data(
    strategy: tf.distribute.Strategy,
) -> tuple[int | None, str | None, int | None]:
    """Return and reset the data properties that our strategy recorded; `None` if unknown.

    Returns:
        The cardinality of the dataset that the strategy distributed last, kind and hash of the
        first rows of a generator or of arrays, and the seed by which arrays are shuffled.
    """
    if not is_ours(strategy):
        return None, None, None
    found = strategy.distributed_batches, strategy.first_digest, strategy.shuffle_seed
    strategy.distributed_batches = strategy.first_digest = strategy.shuffle_seed = None
    return found
