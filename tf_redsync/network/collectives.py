"""The network: requests answered by `tf.distribute`, and facts about the cluster.

Besides the adapters of `tf_redsync/keras/`, `groups.py`, `collective_keys.py` and `coordination.py`
this is the only file that uses private names of TensorFlow. What they buy:

* the strategy's replica launcher issues an all-gather as *one* collective; the public
  `ReplicaContext.all_gather` first gathers shapes and then padded values;
* launchers of their own let hosts, with one of the devices of each, and pairs of workers form
  groups;
* a variable on one device can be made in the scope of a strategy with several.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.checkpoint import tensor_callable as _tensor_callable
from tensorflow.python.distribute import cross_device_ops as _cross_device_ops
from tensorflow.python.ops import collective_ops as _collective_ops
from tensorflow.python.ops import control_flow_util as _control_flow_util
from tensorflow.python.ops import resource_variable_ops as _resource_variable_ops
from typing_extensions import override

from tf_redsync.exchange import wire
from tf_redsync.network import groups, instance_keys, transport
from tf_redsync.ops.words import as_row, moved

# TensorFlow parks a thread for the whole timeout of every collective that has one.
_NO_TIMEOUT = 0.0
_COLLECTIVES = {
    "gather": _collective_ops.all_gather_v2,
    "reduce": _collective_ops.all_reduce_v2,
    "all to all": _collective_ops.all_to_all_v2,
}
_TOKENS = 256  # Collectives in a function beyond so many share their tokens.


# A variable as a strategy makes it for one device; `tf.Variable` in its scope is one for each.
OneDeviceVariable = _resource_variable_ops.ResourceVariable


class Alone:
    """One worker: nothing crosses the network."""

    workers = 1
    in_branches = True
    checked = False

    def rank(self) -> tf.Tensor:
        """Return 0."""
        return tf.constant(0)

    def all_gather(self, message: tf.Tensor) -> tf.Tensor:
        """Return `message` of shape `[words]` as `[1, words]`."""
        return message[tf.newaxis]

    def all_reduce(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Return `tensors` themselves."""
        return list(tensors)

    def all_to_all(self, messages: tf.Tensor) -> tf.Tensor:
        """Return `messages` of shape `[1, words]`."""
        return messages

    def pair_gather(self, message: tf.Tensor, distance: int) -> tf.Tensor:
        """Return `message` and that of a missing partner."""
        del distance
        return tf.stack([message, wire.absent(message)])


class PublicCollectives:
    """Collectives through the public replica context; works with every mirrored strategy.

    Attributes:
        workers: Number of replicas.
        in_branches: Whether they may stand in a branch of a conditional. The public ones
            synchronise the replicas' threads, which a branch forbids.
        checked: Whether messages carry checksums.
    """

    in_branches = False
    checked = True

    def __init__(self, workers: int):
        self.workers = workers

    def rank(self) -> tf.Tensor:
        """Return the replica's number, which is the row of its messages in what is gathered."""
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        return tf.convert_to_tensor(replica, tf.int32)

    def all_gather(self, message: tf.Tensor) -> tf.Tensor:
        """Gather `[words]` from every replica into `[workers, words]`."""
        gathered = tf.distribute.get_replica_context().all_gather(message[tf.newaxis], axis=0)
        return tf.ensure_shape(gathered, [self.workers, message.shape[0]])

    def all_reduce(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Sum every tensor over the replicas, packed into one collective."""
        return tf.distribute.get_replica_context().all_reduce(
            tf.distribute.ReduceOp.SUM, list(tensors)
        )

    def all_to_all(self, messages: tf.Tensor) -> tf.Tensor:
        """Send row r of `[workers, words]` to replica r, by gathering everything."""
        everything = self.all_gather(tf.reshape(messages, [-1]))
        table = tf.reshape(everything, [self.workers, self.workers, -1])  # [from, to, words]
        return tf.gather(table, self.rank(), axis=1)

    def pair_gather(self, message: tf.Tensor, distance: int) -> tf.Tensor:
        """Gather `[words]` of both partners into `[2, words]`, by gathering everything."""
        rows = tf.concat([self.all_gather(message), wire.absent(message)[tf.newaxis]], axis=0)
        lower = tf.bitwise.bitwise_and(self.rank(), ~distance)
        return tf.gather(rows, tf.minimum(tf.stack([lower, lower + distance]), self.workers))


class DirectCollectives(PublicCollectives):
    """`MultiWorkerMirroredStrategy`: an all-gather or all-to-all is one round.

    So is a pair's: the partners are a group of two, whoever the strategy's other workers are.
    """

    in_branches = True

    def __init__(self, workers: int, strategy: tf.distribute.Strategy):
        super().__init__(workers)
        self._cross_device_ops = strategy.extended._cross_device_ops
        self._own_rank = worker_rank(strategy)
        self._tasks = groups.task_names(strategy)
        self._order = groups.Order(self._tasks)
        self._purpose = instance_keys.new_purpose(strategy)
        instance_keys.keep(strategy)
        self._pairs: dict[int, Any] = {}  # launchers, by the distance of the partner
        self._tokens: list[tf.Variable] = []  # see `_own_token`
        self._calls = itertools.count()

    @override
    def all_gather(self, message: tf.Tensor) -> tf.Tensor:
        """Gather `[words]` from every worker into `[workers, words]`, one collective."""
        gathered = self._launch("gather", as_row(message))
        shape = [self.workers, message.shape[0]]
        return moved(lambda g: self._order.by_rank(tf.ensure_shape(g, shape)), gathered)

    @override
    def all_to_all(self, messages: tf.Tensor) -> tf.Tensor:
        """Send row r of `[workers, words]` to worker r, one collective."""
        sent = moved(self._order.for_tensorflow, messages)
        return moved(self._order.by_rank, self._launch("all to all", sent))

    @override
    def all_reduce(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Sum every tensor over the workers, packed into one collective."""
        if tf.executing_eagerly():  # packing costs more than it saves
            return [self._launch("reduce", t) for t in tensors]
        packed = tf.concat([tf.reshape(t, [-1]) for t in tensors], axis=0)
        sizes = [tf.size(t) for t in tensors]
        sums = tf.split(self._launch("reduce", packed), sizes)
        return [tf.reshape(s, tf.shape(t)) for s, t in zip(sums, tensors, strict=True)]

    @override
    def pair_gather(self, message: tf.Tensor, distance: int) -> tf.Tensor:
        """Gather `[words]` of both partners into `[2, words]`, one collective of the two."""
        if self._own_rank ^ distance >= self.workers:
            return moved(lambda *pair: tf.stack(pair), message, wire.absent(message))
        if distance not in self._pairs:
            self._pairs[distance] = groups.of_pair(self._launcher(), self._own_rank, distance)
        gathered = self._launch("gather", as_row(message), self._pairs[distance])
        lower = self._own_rank & ~distance
        order = groups.Order([self._tasks[lower], self._tasks[lower + distance]])
        shape = 2, message.shape[0]
        return moved(lambda g: order.by_rank(tf.ensure_shape(g, shape)), gathered)

    def _launcher(self):
        return self._cross_device_ops._launchers[0]  # one replica a process, see `has_launchers`

    def _launch(self, kind: str, value: tf.Tensor, launcher=None) -> tf.Tensor:
        launcher = launcher or self._launcher()
        with instance_keys.of(launcher).described(kind, value, self._purpose):
            key = launcher._next_instance_key()
        # NCCL wants one order, which the token gives; over gRPC a chain would only make some wait.
        ordered = transport.by_nccl(launcher._options, launcher._device)
        token = launcher._get_ordering_token() if ordered else self._own_token(launcher._device)
        with tf.device(launcher._device):
            return _COLLECTIVES[kind](
                value,
                group_size=launcher._group_size,
                group_key=launcher._group_key,
                instance_key=key,
                communication_hint=launcher._options.implementation.value,
                timeout=_NO_TIMEOUT,
                ordering_token=token,
            )

    def _own_token(self, device: str) -> tf.Tensor:
        """Return a token that hardly any other collective has.

        A collective without a token is put after the one before, as any stateful operation is.
        """
        number = next(self._calls) % _TOKENS
        if number == len(self._tokens):
            with tf.init_scope(), tf.device(device):
                self._tokens.append(OneDeviceVariable(0.0, trainable=False, name="token"))
        return self._tokens[number].handle


class HostCollectives(DirectCollectives):
    """Collectives between hosts with several replicas each, from the first device of every host.

    They need no replica context: `step/workers.py` calls them where a host's replicas have met.
    """

    def __init__(self, strategy: tf.distribute.Strategy):
        super().__init__(worker_count(strategy), strategy)
        replica = self._cross_device_ops._launchers[0]
        self._between_hosts = groups.of_hosts(replica, self.workers)

    @override
    def rank(self) -> tf.Tensor:
        """Return the host's number, which is the row of its messages in what is gathered."""
        return tf.constant(self._own_rank)

    @override
    def _launcher(self):
        return self._between_hosts


def for_strategy(strategy: tf.distribute.Strategy, direct: bool = True):
    """Return the network of `strategy`.

    Args:
        strategy: The strategy in whose scope the optimizer was built.
        direct: Allow the single-round collectives; `False` forces the public ones.
    """
    workers = strategy.num_replicas_in_sync
    if workers == 1:
        return Alone()
    if direct and has_launchers(strategy):
        return DirectCollectives(workers, strategy)
    groups.gather_by_rank(strategy)
    return PublicCollectives(workers)


def check_supported(strategy: tf.distribute.Strategy) -> None:
    """Check that gradients of `strategy` are exchanged by collectives between its replicas.

    Raises:
        ValueError: for parameter servers, TPUs and other strategies.
    """
    default = not tf.distribute.has_strategy()
    supported = (
        tf.distribute.MirroredStrategy,
        tf.distribute.MultiWorkerMirroredStrategy,
        tf.distribute.OneDeviceStrategy,
    )
    if not default and not isinstance(strategy, supported):
        raise ValueError(
            "the strategy must be MultiWorkerMirroredStrategy (of tf_redsync or TensorFlow), "
            "MirroredStrategy, OneDeviceStrategy or none. "
            f"Received: strategy={type(strategy).__name__}"
        )


def has_launchers(strategy: tf.distribute.Strategy) -> bool:
    """Whether the strategy offers what the single-round collectives need.

    One replica in this process: several are traced, or run eagerly, one after the other, and what
    the second one sends may wait for what the first one does with its answer. The public
    collectives let all replicas of a process send before any of them goes on.
    """
    ops = getattr(strategy.extended, "_cross_device_ops", None)
    if not isinstance(ops, _cross_device_ops.CollectiveAllReduce):
        return False
    needed = ("_next_instance_key", "_get_ordering_token", "_group_key", "_group_size")
    launchers = getattr(ops, "_launchers", None) or []
    return len(launchers) == 1 and all(hasattr(launchers[0], name) for name in needed)


def check_one_replica(strategy: tf.distribute.Strategy, network) -> None:
    """Check that every process has one replica, and that collectives may stand in branches.

    Raises:
        ValueError: otherwise.
    """
    if not network.in_branches or local_replicas(strategy) > 1:
        raise ValueError(
            "a method with local steps, a delay or points of its own needs one replica in every "
            "process, MultiWorkerMirroredStrategy and direct_collectives=True. Received: strategy="
            f"{type(strategy).__name__} with {type(network).__name__}. Start one process a device."
        )


def counts_steps(strategy: tf.distribute.Strategy) -> bool:
    """Whether the strategy is ours, which counts every step that is run; also while it is made."""
    return hasattr(strategy, "average_statistics")


def average_statistics_when(strategy: tf.distribute.Strategy, due) -> None:
    """Let our strategy average BatchNormalization's statistics after this step if `due()`."""
    if hasattr(strategy, "statistics_due"):
        strategy.statistics_due = due


def average_statistics(strategy: tf.distribute.Strategy) -> None:
    """Let our strategy average BatchNormalization's statistics now."""
    if hasattr(strategy, "average_statistics"):
        strategy.average_statistics()


def worker_count(strategy: tf.distribute.Strategy) -> int:
    """Number of worker processes of `strategy`."""
    return getattr(strategy.extended, "_num_workers", 1)


def local_replicas(strategy: tf.distribute.Strategy) -> int:
    """Number of replicas in this process; the same in every one, as TensorFlow wants it."""
    return strategy.num_replicas_in_sync // worker_count(strategy)


def worker_rank(strategy: tf.distribute.Strategy) -> int:
    """This process's position among the workers; the chief is 0."""
    return getattr(strategy.extended, "_id_in_cluster", 0)


def compiling_with_xla() -> bool:
    """Whether the function being traced is compiled by XLA, which has no collectives here."""
    graph = tf.compat.v1.get_default_graph()
    return bool(_control_flow_util.GraphOrParentsInXlaContext(graph))


def inside_branch() -> bool:
    """Whether the function being traced is a branch of a conditional."""
    graph = tf.compat.v1.get_default_graph()
    return not tf.executing_eagerly() and type(graph).__name__ == "CondBranchFuncGraph"


def with_python_function(function: Any, python_function: Callable) -> Any:
    """Return a `tf.function` of another Python function, with the options of `function`."""
    return function._clone(python_function=python_function)


def when_saved(value: Callable[[], tf.Tensor], variable: tf.Variable) -> Any:
    """Return, for a checkpoint, a tensor that is made when the checkpoint is written.

    Args:
        value: Makes it.
        variable: One of its dtype and device.
    """
    return _tensor_callable.Callable(value, dtype=variable.dtype, device=variable.device)
