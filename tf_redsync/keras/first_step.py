"""Create an optimizer's variables in its first step, where `build` has not been called before.

A first step is in a replica context, mostly inside of a function that is being traced, and may be
in a nested function or a branch. Variables that are distributed over replicas, and everything that
workers agree on while they are created, want none of this: they are made once for all replicas, and
eagerly. Functions and replicas belong to a Python thread, so a thread of its own has left them all.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import tensorflow as tf


def outside_of_replicas(function: Callable[[], None]) -> None:
    """Call `function` eagerly, in the scope of the strategy of the calling replica.

    The replicas of a process run, or are traced, one after the other, so that the first one's call
    is over when the next one asks whether it is needed.
    """
    with tf.init_scope():
        if not tf.distribute.has_strategy() or tf.distribute.in_cross_replica_context():
            function()
            return
    strategy = tf.distribute.get_strategy()
    errors: list[BaseException] = []

    def in_scope() -> None:
        try:
            with strategy.scope():
                function()
        except BaseException as error:  # raised again below
            errors.append(error)

    thread = threading.Thread(target=in_scope, name="tf_redsync_build")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
