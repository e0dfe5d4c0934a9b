"""Different random numbers on each replica for layers of Keras 3, such as `Dropout`.

The state of a `SeedGenerator` is equal on all workers. Without an offset, the rows at the same
place in the workers' batches get the same dropout mask, noise and augmentation.

Name of Keras used here: the public method `SeedGenerator.next`.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tf_redsync.network import strategies
from tf_redsync.patching import patch_once

_STRIDE = 1_000_003  # so that replicas do not draw the numbers of a neighboring seed


def install() -> None:
    """Offset drawn seeds by the replica under our strategy; a second call is a no-op."""

    def offsetting(next_seed: Any) -> Any:
        def offset(self: Any, *args: Any, **kwargs: Any) -> Any:
            seed = next_seed(self, *args, **kwargs)
            replica = tf.distribute.get_replica_context()
            if replica is None or not strategies.is_redsync_strategy(replica.strategy):
                return seed
            number = tf.cast(replica.replica_id_in_sync_group, seed.dtype)
            return seed + tf.stack([_STRIDE * number, tf.zeros_like(number)])

        return offset

    patch_once(keras.random.SeedGenerator, "next", offsetting)
