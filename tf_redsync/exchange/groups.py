"""Groups of workers with collectives of their own, hosts and pairs, and the keys of collectives.

TensorFlow tells groups apart by a number, the group key, and the collectives of a group by another
one, the instance key. It counts the keys of its strategies' groups up from 1, and takes two groups
with one key for one, so those here begin far from there.
"""

from __future__ import annotations

import functools

import tensorflow as tf
from tensorflow.python.distribute import cross_device_utils as _cross_device_utils

_HOSTS = 1_000_003
_PAIRS = 2_000_003
_MAX_RANKS = 2**20  # so that every pair has a key of its own


def of_hosts(replica, hosts: int):
    """Return a launcher of collectives between hosts, from one device of each.

    Args:
        replica: The launcher of the replica on this host's device.
        hosts: Number of hosts.
    """
    return _launcher(_HOSTS, hosts, replica)


def of_pair(replica, rank: int, distance: int):
    """Return a launcher of collectives between a worker and its partner.

    Args:
        replica: A launcher of collectives of this worker with all others.
        rank: Of this worker.
        distance: Of the partner: a power of two, in which the ranks differ.
    """
    lower = rank & ~distance
    return _launcher(_PAIRS + _MAX_RANKS * distance.bit_length() + lower, 2, replica)


def _launcher(key: int, size: int, replica):
    keys, device = _keys(key, replica._device), replica._device
    launcher = _cross_device_utils.CollectiveReplicaLauncher(
        key, size, keys, device, replica._options
    )
    # NCCL wants one order of all collectives of a device, whichever group they are of.
    launcher._ordering_token = replica._ordering_token
    launcher._next_instance_key = KeyOfLauncher(launcher)
    return launcher


@functools.cache
def _keys(key: int, device: str) -> _cross_device_utils.CollectiveKeys:
    """Numbers for the collectives of a group, none of them twice in this process."""
    keys = _cross_device_utils.CollectiveKeys(group_key_start=key)
    keys.get_group_key([device])
    return keys


class KeyOfLauncher:
    """`_next_instance_key` of one launcher, with a fixed key in nested functions.

    Keras 3 calls its step in a function inside a loop for `steps_per_execution > 1`. TensorFlow
    gives every collective a new key at each call, through a placeholder of the outermost function,
    and loses it on that way. Such a function is traced once, at the same point on all workers, so a
    key that is fixed at that time does.
    """

    def __init__(self, launcher):
        self._launcher = launcher
        self._new_key_each_call = launcher._next_instance_key

    def __call__(self):
        """Return the key of the next collective."""
        if not _called_in_control_flow():
            return self._new_key_each_call()
        launcher = self._launcher
        return launcher._collective_keys.get_instance_key(launcher._group_key, launcher._device)


def _called_in_control_flow() -> bool:
    """Whether the function being traced is called from a loop or a branch."""
    graph = tf.compat.v1.get_default_graph()
    while getattr(graph, "is_control_flow_graph", False):
        graph = graph.outer_graph
    graph = getattr(graph, "outer_graph", None)
    while graph is not None:
        if getattr(graph, "is_control_flow_graph", False):
            return True
        graph = getattr(graph, "outer_graph", None)
    return False
