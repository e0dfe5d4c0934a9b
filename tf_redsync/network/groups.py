"""Groups of workers with collectives of their own, hosts and pairs, and the order of members.

TensorFlow tells groups apart by a number, the group key, and the collectives of a group by another
one, the instance key. It counts the keys of its strategies' groups up from 1, and takes two groups
with one key for one, so those here begin far from there.

Inside of a group it numbers the members itself: tasks by the text of their names, where "task:10"
comes before "task:2", and the GPUs of a task along their fastest links. `Order` translates, and
TensorFlow's own gathers can be put into the order of the ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import tensorflow as tf
from tensorflow.python.distribute import cross_device_utils as _cross_device_utils
from tensorflow.python.eager import context as _context

from tf_redsync.network import transport

_HOSTS = 1_000_003
_PAIRS = 2_000_003
_MAX_RANKS = 2**20  # so that every pair has a key of its own


class Order:
    """Which row of a collective's input or output is which member's.

    Where TensorFlow's order is that of the ranks, nothing is done to the rows.

    Args:
        keys: By rank, what TensorFlow sorts the members by.
    """

    def __init__(self, keys: Sequence[str] | Sequence[int]):
        self._ranks = sorted(range(len(keys)), key=keys.__getitem__)  # by row
        self._rows = sorted(range(len(keys)), key=self._ranks.__getitem__)  # by rank

    @property
    def is_that_of_ranks(self) -> bool:
        """Whether row r is rank r's."""
        return self._ranks == list(range(len(self._ranks)))

    def by_rank(self, rows: tf.Tensor) -> tf.Tensor:
        """Return what TensorFlow has put together so that row r is rank r's."""
        return rows if self.is_that_of_ranks else tf.gather(rows, self._rows)

    def for_tensorflow(self, rows: tf.Tensor) -> tf.Tensor:
        """Return rows of which row r is for rank r as TensorFlow hands them out."""
        return rows if self.is_that_of_ranks else tf.gather(rows, self._ranks)


class GatherByRank:
    """`_all_gather` of one launcher, with the parts in the order of the ranks.

    TensorFlow's own gathers, `Strategy.gather` and `ReplicaContext.all_gather`, go through it.
    """

    def __init__(self, launcher, order: Order):
        self._launcher, self._order = launcher, order
        self._gather = launcher._all_gather

    def __call__(self, input_tensor, options):
        """Return the members' tensors, concatenated along their first axis."""
        gathered = self._gather(input_tensor, options)
        with tf.device(self._launcher._device):
            part = tf.shape(input_tensor)
            rows = tf.reshape(gathered, tf.concat([[self._launcher._group_size], part], axis=0))
            return tf.reshape(self._order.by_rank(rows), tf.shape(gathered))


def gather_by_rank(strategy: tf.distribute.Strategy) -> None:
    """Let `gather` and `all_gather` of a strategy concatenate by rank; a second call does nothing.

    With several replicas in a process all workers must call it, outside of functions.
    """
    extended = strategy.extended
    if not isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        return
    if hasattr(extended, "gathers_by_rank") or strategy.num_replicas_in_sync == 1:
        return
    extended.gathers_by_rank = True
    compute = extended._cross_device_ops._launchers
    by_task = Order(task_names(strategy))
    _put_in_order(compute, by_task if len(compute) == 1 else order_of_devices(strategy))
    _put_in_order(extended._host_cross_device_ops._launchers, by_task)


def _put_in_order(launchers, order: Order) -> None:
    if not order.is_that_of_ranks:
        for launcher in launchers:
            launcher._all_gather = GatherByRank(launcher, order)


def order_of_devices(strategy: tf.distribute.Strategy) -> Order:
    """Find out, by a collective, where TensorFlow puts the replicas: GPUs go by their links."""
    number = strategy.experimental_distribute_values_from_function(
        lambda context: tf.constant([context.replica_id_in_sync_group])
    )
    by_row = strategy.gather(number, axis=0).numpy().tolist()
    return Order(sorted(range(len(by_row)), key=by_row.__getitem__))


def carrier(strategy: tf.distribute.Strategy) -> str:
    """Return what carries the collectives of several processes, in words; "" with one."""
    if getattr(strategy.extended, "_num_workers", 1) == 1:
        return ""
    launcher = strategy.extended._cross_device_ops._launchers[0]
    return transport.carrier(launcher._options, launcher._device)


def in_cluster() -> bool:
    """Whether a strategy has joined this process to others."""
    return _context.context()._collective_ops_server_def is not None


def task_names(strategy: tf.distribute.Strategy) -> list[str]:
    """Return the names of the workers' tasks in the order of their ranks."""
    cluster = getattr(strategy.extended, "_cluster_spec", None) or tf.train.ClusterSpec({})
    names = [
        f"/job:{job}/replica:0/task:{task}"
        for job in ("chief", "worker")  # the order of `_id_in_cluster`
        if job in cluster.jobs
        for task in cluster.task_indices(job)
    ]
    alone = getattr(strategy.extended, "_num_workers", 1) == 1  # also an evaluator beside workers
    return ["/job:localhost/replica:0/task:0"] if alone else names


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
    return launcher


@functools.cache
def _keys(key: int, device: str) -> _cross_device_utils.CollectiveKeys:
    """Numbers for the collectives of a group, none of them twice in this process."""
    keys = _cross_device_utils.CollectiveKeys(group_key_start=key)
    keys.get_group_key([device])
    return keys
