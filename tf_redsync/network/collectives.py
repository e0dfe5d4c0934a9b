"""The network: requests answered by `tf.distribute`, and facts about the cluster.

It uses private names of TensorFlow, which buy:

* the strategy's replica launcher issues an all-gather as *one* collective; the public
  `ReplicaContext.all_gather` first gathers shapes and then padded values;
* a collective keeps its instance key from step to step (`KeysOfLauncher`);
* launchers of their own let hosts, with one of the devices of each, and pairs of workers form
  groups;
* a variable on one device can be made in the scope of a strategy with several.
"""

from __future__ import annotations

import collections
import functools
import itertools
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf
from tensorflow.python.checkpoint import tensor_callable as _tensor_callable
from tensorflow.python.distribute import cross_device_ops as _cross_device_ops
from tensorflow.python.ops import collective_ops as _collective_ops
from tensorflow.python.ops import control_flow_util as _control_flow_util
from tensorflow.python.ops import resource_variable_ops as _resource_variable_ops
from typing_extensions import override

from tf_redsync.network import groups, transport
from tf_redsync.ops import wire
from tf_redsync.ops.wire import as_row, moved

# TensorFlow parks a thread for the whole timeout of every collective that has one.
_NO_TIMEOUT = 0.0
_COLLECTIVES = {
    "gather": _collective_ops.all_gather_v2,
    "reduce": _collective_ops.all_reduce_v2,
    "all to all": _collective_ops.all_to_all_v2,
}
_STRATEGY_KEYS = 100  # group keys of a strategy; it takes some for its devices and hosts
_strategies = itertools.count(1)
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
        self._own_rank = worker_rank(strategy)
        self._tasks = groups.task_names(strategy)
        self._order = groups.Order(self._tasks)
        self._in_order = self._order.is_that_of_ranks
        self._purpose = new_purpose(strategy)
        keep_keys(strategy)
        launchers = strategy.extended._cross_device_ops._launchers
        self._launcher = launchers[0]  # one replica a process, see `has_launchers`
        self._by_nccl = transport.by_nccl(self._launcher._options, self._launcher._device)
        self._pairs: dict[int, Any] = {}  # launchers, by the distance of the partner
        self._tokens: list[tf.Variable] = []  # see `_own_token`
        self._calls = itertools.count()

    @override
    def all_gather(self, message: tf.Tensor) -> tf.Tensor:
        """Gather `[words]` from every worker into `[workers, words]`, one collective."""
        gathered = self._launch("gather", as_row(message))
        shape = [self.workers, message.shape[0]]
        rows = moved(lambda g: tf.ensure_shape(g, shape), gathered)
        return rows if self._in_order else moved(self._order.by_rank, rows)

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
        sums = tf.split(self._launch("reduce", packed), list(map(tf.size, tensors)))
        return list(map(tf.reshape, sums, map(tf.shape, tensors)))

    @override
    def pair_gather(self, message: tf.Tensor, distance: int) -> tf.Tensor:
        """Gather `[words]` of both partners into `[2, words]`, one collective of the two."""
        if self._own_rank ^ distance >= self.workers:
            return moved(lambda *pair: tf.stack(pair), message, wire.absent(message))
        if distance not in self._pairs:
            pair = groups.of_pair(self._launcher, self._own_rank, distance)
            keys_of(pair)
            self._pairs[distance] = pair
        gathered = self._launch("gather", as_row(message), self._pairs[distance])
        lower = self._own_rank & ~distance
        order = groups.Order([self._tasks[lower], self._tasks[lower + distance]])
        shape = 2, message.shape[0]
        return moved(lambda g: order.by_rank(tf.ensure_shape(g, shape)), gathered)

    def _launch(self, kind: str, value: tf.Tensor, launcher=None) -> tf.Tensor:
        launcher = launcher or self._launcher
        described = None if tf.executing_eagerly() else _description(kind, value, self._purpose)
        key = _lasting_key(launcher, described) if described else launcher._next_instance_key()
        # NCCL wants one order, which the token gives; over gRPC a chain would only make some wait.
        by_nccl, device = self._by_nccl, launcher._device
        token = launcher._get_ordering_token() if by_nccl else self._own_token(device)
        with tf.device(device):
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
        self._launcher = groups.of_hosts(self._launcher, self.workers)
        keys_of(self._launcher)

    @override
    def rank(self) -> tf.Tensor:
        """Return the host's number, which is the row of its messages in what is gathered."""
        return tf.constant(self._own_rank)


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


# ---------------------------------------------------------------------------- instance keys


def separate_keys(strategy: tf.distribute.Strategy) -> int:
    """Give a strategy that is about to be made group keys that no other one has.

    TensorFlow remembers what a key stands for, so collectives of two strategies must not share any.

    Returns:
        The strategy's number in this process, from 1; workers must make strategies in one order.
    """
    number = next(_strategies)
    strategy._collective_key_base = _STRATEGY_KEYS * number
    return number


def keep_keys(strategy: tf.distribute.Strategy) -> None:
    """Let what a step does have the same keys in every step; a second call does nothing.

    So collectives may also stand in a function that is called in a loop; see `KeysOfLauncher`.
    """
    extended = strategy.extended
    for ops in (extended._cross_device_ops, extended._host_cross_device_ops):
        for launcher in ops._launchers:
            keys_of(launcher)


def keys_of(launcher) -> KeysOfLauncher:
    """Return what numbers the collectives of a launcher, which is made at the first call."""
    if not isinstance(launcher._next_instance_key, KeysOfLauncher):
        launcher._next_instance_key = KeysOfLauncher(launcher)
    return launcher._next_instance_key


class KeysOfLauncher:
    """`_next_instance_key` of one launcher: in a function, a collective keeps its key.

    TensorFlow gives a collective a new key at each call, through a placeholder of the outermost
    function. It remembers 1.6 KB of every key for ever, asks the group's leader about each, and
    loses the placeholder on the way into a function that is called in a loop, where Keras 3 has its
    step for `steps_per_execution > 1`.

    A key that stays must not depend on which worker traces a function how often, so it follows from
    what the collective is: its group, for whom it is, its kind, dtype and shape, the name of its
    function, and how many of the same stand before it there. Two collectives with one key are never
    under way at a time: functions that have some for the same purpose share resources, and
    TensorFlow runs them one after the other.
    """

    def __init__(self, launcher):
        self._launcher = launcher
        self._new_key_each_call = launcher._next_instance_key
        self._described: tuple[Any, ...] | None = None  # of the collective to come
        launcher.all_reduce = self._describing("reduce", launcher.all_reduce)
        launcher._all_gather = self._describing("gather", launcher._all_gather)

    @contextmanager
    def described(self, kind: str, value: tf.Tensor, purpose: int = 0) -> Iterator[None]:
        """Within this context, the next key is for a collective of that kind on `value`.

        Args:
            kind: Of the collective.
            value: What this worker gives to it.
            purpose: Whose it is; see `new_purpose`.
        """
        self._described = _description(kind, value, purpose)
        try:
            yield
        finally:
            self._described = None

    def _describing(self, kind: str, launch: Callable[..., tf.Tensor]) -> Callable[..., tf.Tensor]:
        @functools.wraps(launch)
        def described_launch(input_tensor, *args, **kwargs):
            value = tf.convert_to_tensor(input_tensor)
            with self.described(kind, value):
                return launch(value, *args, **kwargs)

        return described_launch

    def __call__(self):
        """Return the key of the next collective."""
        launcher = self._launcher
        if tf.executing_eagerly():
            return self._new_key_each_call()
        if self._described is not None:
            return _lasting_key(launcher, self._described)
        if _called_in_control_flow():  # traced once there, at the same point on all workers
            return launcher._collective_keys.get_instance_key(launcher._group_key, launcher._device)
        return self._new_key_each_call()


def new_purpose(strategy: tf.distribute.Strategy) -> int:
    """Return a number for a user of collectives; workers must ask in the same order."""
    extended = strategy.extended
    first = 10 * getattr(
        strategy, "_collective_key_base", 0
    )  # of our groups' keys, see `groups.py`
    extended.collective_purposes = getattr(extended, "collective_purposes", first) + 1
    return extended.collective_purposes


def _description(kind: str, value: tf.Tensor, purpose: int) -> tuple[Any, ...] | None:
    """What a collective is, apart from its group and function; `None` for a dynamic shape."""
    if not value.shape.is_fully_defined():
        return None
    return purpose, kind, value.dtype.name, tuple(value.shape)


# How many collectives of a description a function has: by function and device.
_seen: weakref.WeakKeyDictionary[Any, collections.Counter] = weakref.WeakKeyDictionary()
_lasting: dict[int, tuple[Any, ...]] = {}  # what a key is for


def _lasting_key(launcher: Any, description: tuple[Any, ...]) -> int:
    """Return the key of one more collective in the function that is being traced.

    TensorFlow counts its keys up from 100; these are above 2^30.

    Args:
        launcher: Of the collective.
        description: Its purpose, kind, dtype and shape.
    """
    function = _function_being_traced()
    seen = _seen.setdefault(function, collections.Counter())
    described = (launcher._group_key, *description, getattr(function, "name", ""))
    whole = (*described, seen[launcher._device, described])
    seen[launcher._device, described] += 1
    key = 2**30 + zlib.crc32(repr(whole).encode()) % 2**30
    if _lasting.setdefault(key, whole) != whole:
        raise _same_key(_lasting[key], whole)
    return key


def _same_key(first: Any, second: Any) -> RuntimeError:
    """Once in 10^6 programs of 50 collectives."""
    return RuntimeError(
        f"two collectives have one key: {first} and {second}. Give the function that is named "
        "there another name."
    )


def _function_being_traced() -> Any:
    """Return the graph of the innermost function, of which branches and loops are parts."""
    graph = tf.compat.v1.get_default_graph()
    while getattr(graph, "is_control_flow_graph", False):
        graph = graph.outer_graph
    return graph


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
