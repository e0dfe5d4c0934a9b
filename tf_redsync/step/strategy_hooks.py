"""What our strategy does around a step for the exchanges in it; others know nothing of it.

See `strategy.MultiWorkerMirroredStrategy.run`. Everything is said while a step is traced.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf


def is_ours(strategy: Any) -> bool:
    """Whether this is a `tf_redsync.MultiWorkerMirroredStrategy`, which stands further up."""
    return hasattr(strategy, "skips")


def shared_statistics(strategy: tf.distribute.Strategy) -> list[Any]:
    """The statistics that our strategy keeps equal on all workers."""
    return getattr(strategy, "shared_statistics", [])


def taken_data(strategy: tf.distribute.Strategy) -> tuple[int | None, str | None]:
    """What our strategy knows of the data that it got last, once; `None` for what it does not.

    Returns:
        The cardinality of the dataset that it has distributed, and a hash of the first batch of a
        generator.
    """
    if not is_ours(strategy):
        return None, None
    found = strategy.distributed_batches, strategy.first_digest
    strategy.distributed_batches, strategy.first_digest = None, None
    return found
