"""The numbers of collectives: instance keys that stay from step to step.

Private names of TensorFlow used here: the strategy's launchers and their methods, and the first of
its group keys.
"""

from __future__ import annotations

import collections
import functools
import itertools
import weakref
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

_STRATEGY_KEYS = 100  # group keys of a strategy; it takes some for its devices and hosts
_strategies = itertools.count(1)


def separate(strategy: tf.distribute.Strategy) -> int:
    """Give a strategy that is about to be made group keys that no other one has.

    TensorFlow remembers what a key stands for, so collectives of two strategies must not share any.

    Returns:
        The strategy's number in this process, from 1; workers must make strategies in one order.
    """
    number = next(_strategies)
    strategy._collective_key_base = _STRATEGY_KEYS * number
    return number


def keep(strategy: tf.distribute.Strategy) -> None:
    """Let what a step does have the same keys in every step; a second call does nothing.

    So collectives may also stand in a function that is called in a loop; see `KeysOfLauncher`.
    """
    extended = strategy.extended
    for ops in (extended._cross_device_ops, extended._host_cross_device_ops):
        for launcher in ops._launchers:
            of(launcher)


def of(launcher) -> KeysOfLauncher:
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
        static = value.shape.is_fully_defined()
        shape = tuple(value.shape.as_list()) if static else None
        self._described = (purpose, kind, value.dtype.name, shape) if static else None
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
            return _lasting_key((launcher._group_key, *self._described), launcher._device)
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


# How many collectives of a description a function has: by function and device.
_seen: weakref.WeakKeyDictionary[Any, collections.Counter] = weakref.WeakKeyDictionary()
_lasting: dict[int, tuple[Any, ...]] = {}  # what a key is for


def _lasting_key(description: tuple[Any, ...], device: str) -> int:
    """Return the key of one more collective in the function that is being traced.

    TensorFlow counts its keys up from 100; these are above 2^30.
    """
    function = _function_being_traced()
    seen = _seen.setdefault(function, collections.Counter())
    description = (*description, getattr(function, "name", ""))
    whole = (*description, seen[device, description])
    seen[device, description] += 1
    key = 2**30 + zlib.crc32(repr(whole).encode()) % 2**30
    if _lasting.setdefault(key, whole) != whole:
        raise RuntimeError(  # once in 10^6 programs of 50 collectives
            f"two collectives have one key: {_lasting[key]} and {whole}. Give the function that "
            f"is named there another name."
        )
    return key


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
