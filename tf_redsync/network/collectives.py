"""Networks that answer requests by `tf.distribute`, their keys, and queries of the traced graph.

Reasons for the private names of TensorFlow:

* The strategy's replica launcher issues an all-gather as *one* collective. The public
  `ReplicaContext.all_gather` gathers shapes first and padded values second.
* A collective keeps its instance key from step to step (`_lasting_key`).
* Additional launchers form groups of hosts, with one device each, and of pairs of workers.
* A variable on one device can be created in the scope of a strategy with several.
"""

from __future__ import annotations

import collections
import copy
import functools
import itertools
import weakref
import zlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import tensorflow as tf
from tensorflow.python.ops import collective_ops as _collective_ops
from tensorflow.python.ops import control_flow_util as _control_flow_util
from tensorflow.python.ops import resource_variable_ops as _resource_variable_ops
from typing_extensions import override

from tf_redsync.exchange.driver import Network
from tf_redsync.network import groups, strategies, transport
from tf_redsync.ops import wire
from tf_redsync.ops.wire import as_row, map_words

# TensorFlow parks a thread for the whole timeout of every collective that has one.
_NO_TIMEOUT = 0.0
_COLLECTIVES = {
    "gather": _collective_ops.all_gather_v2,
    "reduce": _collective_ops.all_reduce_v2,
    "all to all": _collective_ops.all_to_all_v2,
}
_STRATEGY_KEYS = 100  # group keys reserved for a strategy, for its devices and hosts
_strategies = itertools.count(1)
_STRIDE = 1_000_003  # difference between the keys of shapes whose first size differs by one
_TOKENS = 256  # a function with more collectives reuses tokens

# A graph collection of operations that all collectives traced after them depend on. Without them, a
# step that fails while a worker waits for a message could leave a pending collective. The next one
# with the same key could raise ("second consumer") or receive a stale message.
CHECKS = "redsync_checks"

# A variable on one device. `tf.Variable` in the scope of a strategy has a copy on each device.
OneDeviceVariable = _resource_variable_ops.ResourceVariable


class Alone:
    """The network of a single worker. Nothing is sent, but gathers and sums wait for `CHECKS`."""

    workers = 1
    in_branches = True
    checksums = False

    def rank(self) -> tf.Tensor:
        """Return 0."""
        return tf.constant(0)

    def all_gather(self, message: tf.Tensor) -> tf.Tensor:
        """Return `message` of shape `[words]` as `[1, words]`."""
        with after_checks():
            return message[tf.newaxis]

    def all_reduce(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Return `tensors`."""
        with after_checks():
            return list(map(tf.identity, tensors))

    def all_to_all(self, messages: tf.Tensor) -> tf.Tensor:
        """Return `messages` of shape `[1, words]`."""
        return messages

    def pair_gather(self, message: tf.Tensor, distance: int) -> tf.Tensor:
        """Return `message` and the placeholder of a missing partner."""
        del distance
        return tf.stack([message, wire.absent(message)])


class PublicCollectives:
    """Collectives of the public replica context, for every mirrored strategy.

    Attributes:
        workers: Number of replicas.
        in_branches: Whether collectives may stand in a branch of a conditional. Public collectives
            may not, because they synchronize the threads of the replicas.
        checksums: Whether messages carry checksums.
    """

    in_branches = False
    checksums = True

    def __init__(self, workers: int):
        self.workers = workers

    def rank(self) -> tf.Tensor:
        """Return the replica's number, which is the row of its messages after a gather."""
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        return tf.convert_to_tensor(replica, tf.int32)

    def all_gather(self, message: tf.Tensor) -> tf.Tensor:
        """Gather `[words]` from every replica into `[workers, words]`."""
        context, shape = tf.distribute.get_replica_context(), [self.workers, message.shape[0]]
        return map_words(
            lambda m: tf.ensure_shape(context.all_gather(m[tf.newaxis], axis=0), shape), message
        )

    def all_reduce(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Sum every tensor over the replicas, packed into one collective."""
        return tf.distribute.get_replica_context().all_reduce(
            tf.distribute.ReduceOp.SUM, list(tensors)
        )

    def all_to_all(self, messages: tf.Tensor) -> tf.Tensor:
        """Send row r of `[workers, words]` to replica r, by gathering all rows."""
        rows = self.all_gather(map_words(lambda m: tf.reshape(m, [-1]), messages))
        shape = [self.workers, self.workers, -1]  # [from, to, words]
        return map_words(lambda r: tf.gather(tf.reshape(r, shape), self.rank(), axis=1), rows)

    def pair_gather(self, message: tf.Tensor, distance: int) -> tf.Tensor:
        """Gather `[words]` of both partners into `[2, words]`, by gathering all messages."""
        rows = wire.joined(self.all_gather(message), as_row(wire.absent(message)))
        lower = tf.bitwise.bitwise_and(self.rank(), ~distance)
        pair = tf.minimum(tf.stack([lower, lower + distance]), self.workers)
        return map_words(lambda r: tf.gather(r, pair), rows)


class DirectCollectives(PublicCollectives):
    """Single-round collectives for `MultiWorkerMirroredStrategy` with one replica per process.

    A pair of workers forms a group of its own, so its gather is one round, too.
    """

    in_branches = True

    def __init__(self, workers: int, strategy: tf.distribute.Strategy):
        super().__init__(workers)
        self._own_rank = strategies.process_rank(strategy)
        self._tasks = groups.task_names(strategy)
        self._order = groups.Order(self._tasks)
        self._in_order = self._order.is_that_of_ranks
        self._purpose = new_purpose(strategy)
        keep_instance_keys(strategy)
        launchers = strategy.extended._cross_device_ops._launchers
        self._launcher = launchers[0]  # the only replica's, see `strategies.supports_direct`
        self._by_nccl = transport.by_nccl(self._launcher._options, self._launcher._device)
        self._pairs: dict[int, Any] = {}  # launchers by the partner's distance
        self._tokens: list[tf.Variable] = []  # see `_own_token`
        self._calls = itertools.count()

    @override
    def all_gather(self, message: tf.Tensor) -> tf.Tensor:
        """Gather `[words]` from every worker into `[workers, words]` by one collective."""
        gathered = self._launch("gather", as_row(message))
        shape = [self.workers, message.shape[0]]
        rows = map_words(lambda g: tf.ensure_shape(g, shape), gathered)
        return rows if self._in_order else map_words(self._order.by_rank, rows)

    @override
    def all_to_all(self, messages: tf.Tensor) -> tf.Tensor:
        """Send row r of `[workers, words]` to worker r by one collective."""
        sent = map_words(self._order.for_tensorflow, messages)
        return map_words(self._order.by_rank, self._launch("all to all", sent))

    @override
    def all_reduce(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Sum every tensor over the workers, packed into one collective."""
        if tf.executing_eagerly():  # packing costs more than it saves
            return [self._launch("reduce", t) for t in tensors]
        flat = tf.constant([-1])  # one constant for the reshapes of all tensors
        vectors = [t if t.shape.rank == 1 else tf.reshape(t, flat) for t in tensors]
        sizes = [t.shape.num_elements() or tf.size(t) for t in tensors]
        sums = tf.split(self._launch("reduce", tf.concat(vectors, axis=0)), sizes)
        pairs = zip(sums, tensors, strict=True)
        return [s if t.shape.rank == 1 else tf.reshape(s, tf.shape(t)) for s, t in pairs]

    @override
    def pair_gather(self, message: tf.Tensor, distance: int) -> tf.Tensor:
        """Gather `[words]` of both partners into `[2, words]` by one collective of the pair."""
        if self._own_rank ^ distance >= self.workers:
            return map_words(lambda *pair: tf.stack(pair), message, wire.absent(message))
        if distance not in self._pairs:
            self._pairs[distance] = groups.of_pair(self._launcher, self._own_rank, distance)
        gathered = self._launch("gather", as_row(message), self._pairs[distance])
        lower = self._own_rank & ~distance
        order = groups.Order([self._tasks[lower], self._tasks[lower + distance]])
        shape = 2, message.shape[0]
        return map_words(lambda g: order.by_rank(tf.ensure_shape(g, shape)), gathered)

    def in_background(self) -> DirectCollectives | None:
        """Return the same collectives in a separate group, which can run concurrently.

        Returns:
            The collectives; `None` with NCCL, which needs one order of all collectives of a device.
        """
        if self._by_nccl:
            return None
        beside = copy.copy(self)
        beside._launcher = groups.in_background(self._launcher, self.workers)
        beside._pairs, beside._tokens, beside._calls = {}, [], itertools.count()
        return beside

    def _launch(self, kind: str, value: tf.Tensor, launcher: Any = None) -> tf.Tensor:
        launcher = launcher or self._launcher
        eager = tf.executing_eagerly()
        key = launcher._next_instance_key() if eager else _key(launcher, kind, value, self._purpose)
        token = launcher._get_ordering_token() if self._by_nccl else self._own_token(launcher)
        with tf.device(launcher._device), after_checks():
            return _COLLECTIVES[kind](
                value,
                group_size=launcher._group_size,
                group_key=launcher._group_key,
                instance_key=key,
                communication_hint=launcher._options.implementation.value,
                timeout=_NO_TIMEOUT,
                ordering_token=token,
            )

    def _own_token(self, launcher: Any) -> tf.Tensor:
        """Return an ordering token that few or no other collectives of this function share.

        Without a token, a collective is a stateful operation and waits for the previous one. The
        launcher's token enforces one order, which NCCL needs; over gRPC it would only add latency.
        """
        number = next(self._calls) % _TOKENS
        if number == len(self._tokens):
            with tf.init_scope(), tf.device(launcher._device):
                self._tokens.append(OneDeviceVariable(0.0, trainable=False, name="token"))
        return self._tokens[number].handle


class HostCollectives(DirectCollectives):
    """Collectives between the first devices of hosts with several replicas each.

    They need no replica context: `step/workers.py` calls them in a `merge_call` of the replicas.
    """

    def __init__(self, strategy: tf.distribute.Strategy):
        super().__init__(strategies.process_count(strategy), strategy)
        self._launcher = groups.of_hosts(self._launcher, self.workers)

    @override
    def rank(self) -> tf.Tensor:
        """Return the host's number, which is the row of its messages after a gather."""
        return tf.constant(self._own_rank)


def for_strategy(strategy: tf.distribute.Strategy, direct: bool = True) -> Network:
    """Return the network of `strategy`.

    Args:
        strategy: The strategy in whose scope the optimizer was built.
        direct: Allow single-round collectives; `False` forces the public ones.
    """
    workers = strategy.num_replicas_in_sync
    if workers == 1:
        return Alone()
    if direct and strategies.supports_direct(strategy):
        return DirectCollectives(workers, strategy)
    groups.gather_by_rank(strategy)
    return PublicCollectives(workers)


def compiling_with_xla() -> bool:
    """Return whether XLA compiles the function being traced; on CPUs XLA has no collectives."""
    graph = tf.compat.v1.get_default_graph()
    return bool(_control_flow_util.GraphOrParentsInXlaContext(graph))


def after_checks() -> AbstractContextManager[Any]:
    """Return a context whose operations wait for the `CHECKS` of the function being traced."""
    known, graphs = tf.compat.v1.get_collection(CHECKS), _graphs_being_traced()
    return tf.control_dependencies([c for c in known if c.graph in graphs])


def inside_branch() -> bool:
    """Return whether the function being traced is a branch of a conditional."""
    graph = tf.compat.v1.get_default_graph()
    return not tf.executing_eagerly() and type(graph).__name__ == "CondBranchFuncGraph"


def with_python_function(function: Any, python_function: Callable[..., Any]) -> Any:
    """Return a `tf.function` of `python_function` with the options of `function`."""
    return function._clone(python_function=python_function)


# ---------------------------------------------------------------------------- instance keys


def reserve_group_keys(strategy: tf.distribute.Strategy) -> int:
    """Reserve unique group keys for a strategy that is being created.

    TensorFlow remembers the group of each key, so two strategies must not share keys.

    Returns:
        The strategy's number in this process, from 1. All workers must create strategies in the
        same order.
    """
    number = next(_strategies)
    strategy._collective_key_base = _STRATEGY_KEYS * number
    return number


def keep_instance_keys(strategy: tf.distribute.Strategy) -> None:
    """Keep the instance keys of a strategy's collectives from step to step; idempotent.

    This also allows collectives in a function that is called in a loop; see `KeysOfLauncher`.
    """
    extended = strategy.extended
    for ops in (extended._cross_device_ops, extended._host_cross_device_ops):
        for launcher in ops._launchers:
            if not isinstance(launcher._next_instance_key, KeysOfLauncher):
                launcher._next_instance_key = KeysOfLauncher(launcher)


class KeysOfLauncher:
    """Replaces `_next_instance_key` of a launcher: a collective in a function keeps its key.

    TensorFlow gives a collective a new key at each call, by a placeholder of the outermost
    function. It keeps 1.6 KB for every key forever and asks the group's leader about each. It also
    loses the placeholder in a function that is called in a loop, such as the training step of
    Keras 3 with `steps_per_execution > 1`.

    A constant key must not depend on how often a worker traces a function. So it is a hash of the
    collective's group, purpose, kind, dtype and shape, the name of its function, and the number of
    equal collectives before it in that function. Two collectives with the same key never run at the
    same time: functions with collectives of one purpose share resources, so TensorFlow runs them
    one after another. In a loop, and in a gather, which knows the sizes of all workers, the
    function computes the key of a dynamic shape.
    """

    def __init__(self, launcher: Any):
        self._launcher = launcher
        self._new_key_each_call: Callable[[], Any] = launcher._next_instance_key
        self._described: tuple[str, tf.Tensor] | None = None  # kind and input of the next one
        self._shapes: tf.Tensor | None = None  # result of the last gather if it was of shapes
        launcher.all_reduce = self._describing("reduce", launcher.all_reduce)
        launcher._all_gather = self._describing("gather", launcher._all_gather)

    def _describing(self, kind: str, launch: Callable[..., tf.Tensor]) -> Callable[..., tf.Tensor]:
        @functools.wraps(launch)
        def described_launch(input_tensor: Any, *args: Any, **kwargs: Any) -> tf.Tensor:
            value = tf.convert_to_tensor(input_tensor)
            self._described = kind, value
            try:
                with after_checks():
                    made = launch(value, *args, **kwargs)
            finally:
                self._described = None
            of_shapes = value.dtype == tf.int32 and value.shape.rank == 2 and value.shape[0] == 1
            self._shapes = made if kind == "gather" and of_shapes else None
            return made

        return described_launch

    def __call__(self) -> Any:
        """Return the key of the next collective, an integer or a tensor."""
        if tf.executing_eagerly() or self._described is None:
            return self._new_key_each_call()
        kind, value = self._described
        static, shapes = value.shape.is_fully_defined(), self._shapes
        here = shapes is not None and shapes.graph is tf.compat.v1.get_default_graph()
        if kind == "gather" and here and not static:
            # TensorFlow has gathered the shapes and padded the axis. If other sizes differ, workers
            # with one key raise an error. With keys of their own sizes they would wait forever.
            sizes = tf.reduce_max(tf.cast(shapes, tf.int64), axis=0)
            return _key_of_dynamic_shape(self._launcher, kind, value, 0, sizes)
        if static or _called_in_control_flow():
            return _key(self._launcher, kind, value, purpose=0)
        return self._new_key_each_call()


def new_purpose(strategy: tf.distribute.Strategy) -> int:
    """Return a number for a user of collectives; all workers must call it in the same order."""
    extended = strategy.extended
    first = 10 * getattr(strategy, "_collective_key_base", 0)  # see `groups.py`
    extended.collective_purposes = getattr(extended, "collective_purposes", first) + 1
    return extended.collective_purposes


def _key(launcher: Any, kind: str, value: tf.Tensor, purpose: int) -> Any:
    """Return the key of the next collective in the function being traced; an integer or a tensor.

    TensorFlow accepts one shape per key. A step therefore computes the key of a dynamic shape,
    which must be equal on all workers, like any collective's.
    """
    if not value.shape.is_fully_defined():
        return _key_of_dynamic_shape(launcher, kind, value, purpose, wire.shape_of(value))
    return _lasting_key(launcher, (purpose, kind, value.dtype.name, tuple(value.shape)))


def _key_of_dynamic_shape(
    launcher: Any, kind: str, value: tf.Tensor, purpose: int, sizes: tf.Tensor
) -> tf.Tensor:
    first = _lasting_key(launcher, (purpose, kind, value.dtype.name, "dynamic"))
    with tf.device("CPU:0"):
        factors = tf.constant(_STRIDE, tf.int64) ** tf.range(1, tf.size(sizes, tf.int64) + 1)
        number = first - 2**30 + tf.reduce_sum(factors * sizes)
        return tf.cast(2**30 + number % 2**30, tf.int32)


# Number of collectives by device and description, for each function being traced.
_seen: weakref.WeakKeyDictionary[Any, collections.Counter[Any]] = weakref.WeakKeyDictionary()
_lasting: dict[int, tuple[Any, ...]] = {}  # the collective of each key


def _lasting_key(launcher: Any, description: tuple[Any, ...]) -> int:
    """Return a constant key for the next collective in the function being traced.

    TensorFlow counts its keys up from 100; these are above 2^30.

    Args:
        launcher: The collective's launcher.
        description: Its purpose, kind, dtype and shape.
    """
    function = _graphs_being_traced()[-1]
    seen = _seen.setdefault(function, collections.Counter())
    described = (launcher._group_key, *description, getattr(function, "name", ""))
    whole = (*described, seen[launcher._device, described])
    seen[launcher._device, described] += 1
    number = zlib.crc32(repr(whole).encode()) % 2**30
    # All workers trace the functions of the main thread first in the same order, so they resolve
    # a collision alike.
    while _lasting.setdefault(2**30 + number, whole) != whole:
        number = (number + 1) % 2**30
    return 2**30 + number


def _graphs_being_traced() -> list[Any]:
    """Return the nested graphs being traced, from the innermost branch or loop to its function."""
    graphs: list[Any] = [tf.compat.v1.get_default_graph()]
    while getattr(graphs[-1], "is_control_flow_graph", False):
        graphs.append(graphs[-1].outer_graph)
    return graphs


def _called_in_control_flow() -> bool:
    """Return whether the function being traced is called from a loop or a branch."""
    graph = getattr(_graphs_being_traced()[-1], "outer_graph", None)
    while graph is not None:
        if getattr(graph, "is_control_flow_graph", False):
            return True
        graph = getattr(graph, "outer_graph", None)
    return False
