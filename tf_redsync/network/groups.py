"""Groups of hosts and of pairs of workers for collectives, and the order of a group's members.

TensorFlow identifies a group by its group key, and the collectives of a group by their instance
keys. It numbers the group keys of its strategies from 1 and would merge groups with the same key,
so the keys of these groups start far above.

Within a group TensorFlow orders the members itself: tasks by their names as text, so that "task:10"
precedes "task:2", and the GPUs of a task along their fastest links. `Order` converts rows between
this order and that of the ranks, also for TensorFlow's own gathers.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import cross_device_utils as _cross_device_utils
from tensorflow.python.eager import context as _context

from tf_redsync.network import transport

_HOSTS = 1_000_003
_PAIRS = 2_000_003
_BACKGROUND = 1_500_007
_MAX_RANKS = 2**20  # keeps the keys of pairs distinct


class Order:
    """Converts rows between the order of the ranks and TensorFlow's order of the members.

    It returns rows unchanged if both orders are equal.

    Args:
        keys: By rank, the keys by which TensorFlow sorts the members.
    """

    def __init__(self, keys: Sequence[str] | Sequence[int]):
        self._ranks = sorted(range(len(keys)), key=keys.__getitem__)  # rank of each row
        self._rows = sorted(range(len(keys)), key=self._ranks.__getitem__)  # row of each rank

    @property
    def is_that_of_ranks(self) -> bool:
        """Whether row r belongs to rank r."""
        return self._ranks == list(range(len(self._ranks)))

    def by_rank(self, rows: tf.Tensor) -> tf.Tensor:
        """Return rows in TensorFlow's order such that row r belongs to rank r."""
        return rows if self.is_that_of_ranks else tf.gather(rows, self._rows)

    def for_tensorflow(self, rows: tf.Tensor) -> tf.Tensor:
        """Return rows in the order of the ranks such that TensorFlow sends row r to rank r."""
        return rows if self.is_that_of_ranks else tf.gather(rows, self._ranks)


class GatherByRank:
    """Replaces `_all_gather` of a launcher: it returns tensors in the order of the ranks.

    `Strategy.gather` and `ReplicaContext.all_gather` use it.
    """

    def __init__(self, launcher: Any, order: Order):
        self._launcher, self._order = launcher, order
        self._gather = launcher._all_gather

    def __call__(self, input_tensor: tf.Tensor, options: Any) -> tf.Tensor:
        """Return the members' tensors, concatenated along their first axis."""
        gathered = self._gather(input_tensor, options)
        with tf.device(self._launcher._device):
            part = tf.shape(input_tensor)
            rows = tf.reshape(gathered, tf.concat([[self._launcher._group_size], part], axis=0))
            return tf.reshape(self._order.by_rank(rows), tf.shape(gathered))


def gather_by_rank(strategy: tf.distribute.Strategy) -> None:
    """Make `gather` and `all_gather` of a strategy concatenate by rank; idempotent.

    With several replicas per process it runs a collective: all workers must call it, eagerly.
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


def _put_in_order(launchers: Sequence[Any], order: Order) -> None:
    if not order.is_that_of_ranks:
        for launcher in launchers:
            launcher._all_gather = GatherByRank(launcher, order)


def order_of_devices(strategy: tf.distribute.Strategy) -> Order:
    """Return TensorFlow's order of the replicas, which depends on the links between GPUs.

    It runs a collective, so all workers must call it.
    """
    number = strategy.experimental_distribute_values_from_function(
        lambda context: tf.constant([context.replica_id_in_sync_group])
    )
    by_row = strategy.gather(number, axis=0).numpy().tolist()
    return Order(sorted(range(len(by_row)), key=by_row.__getitem__))


def carrier(strategy: tf.distribute.Strategy) -> str:
    """Return the transport of collectives between processes, as text; "" with one process."""
    if getattr(strategy.extended, "_num_workers", 1) == 1:
        return ""
    launcher = strategy.extended._cross_device_ops._launchers[0]
    return transport.carrier(launcher._options, launcher._device)


def in_cluster() -> bool:
    """Return whether a strategy has connected this process to a cluster."""
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
    alone = getattr(strategy.extended, "_num_workers", 1) == 1  # or an evaluator
    return ["/job:localhost/replica:0/task:0"] if alone else names


def of_hosts(replica: Any, hosts: int) -> _cross_device_utils.CollectiveReplicaLauncher:
    """Return a launcher of collectives between one device of each host.

    Args:
        replica: The launcher of the replica on this host's device.
        hosts: Number of hosts.
    """
    return _launcher(_HOSTS, hosts, replica)


def in_background(replica: Any, workers: int) -> _cross_device_utils.CollectiveReplicaLauncher:
    """Return a launcher of collectives between all workers, concurrent with those of `replica`.

    Args:
        replica: The launcher of this worker's other collectives.
        workers: Number of workers.
    """
    return _launcher(_BACKGROUND, workers, replica)


def of_pair(
    replica: Any, rank: int, distance: int
) -> _cross_device_utils.CollectiveReplicaLauncher:
    """Return a launcher of collectives between a worker and its partner.

    Args:
        replica: The launcher of this worker's collectives with all others.
        rank: This worker's rank.
        distance: The bit in which the partner's rank differs: a power of two.
    """
    lower = rank & ~distance
    return _launcher(_PAIRS + _MAX_RANKS * distance.bit_length() + lower, 2, replica)


def _launcher(key: int, size: int, replica: Any) -> _cross_device_utils.CollectiveReplicaLauncher:
    keys, device = _keys(key, replica._device), replica._device
    launcher = _cross_device_utils.CollectiveReplicaLauncher(
        key, size, keys, device, replica._options
    )
    # NCCL needs one order of all collectives of a device, across groups.
    launcher._ordering_token = replica._ordering_token
    return launcher


@functools.cache
def _keys(key: int, device: str) -> _cross_device_utils.CollectiveKeys:
    """Return the instance keys of a group, unique in this process."""
    keys = _cross_device_utils.CollectiveKeys(group_key_start=key)
    keys.get_group_key([device])
    return keys
