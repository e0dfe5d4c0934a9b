"""Periodic comparison of what must be equal on all workers: weights, bit by bit, and learning rate.

In the first step of a run, and in every `every`-th one after it, all workers gather a fingerprint
of each weight, in a branch on a counter that is equal on all of them. Workers that compute the same
updates from the same totals stay equal to the last bit, so any difference means that something else
happened: another learning rate, other hyper-parameters, weights that one worker alone has loaded.
"""

from __future__ import annotations

import dataclasses
import logging
import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_redsync.errors import DistributedError
from tf_redsync.exchange.driver import Network, gather
from tf_redsync.ops import native, wire
from tf_redsync.ops.wire import as_row, joined, moved
from tf_redsync.step import state_variables

DEFAULT_EVERY = 500
CHOICES = ("error", "restore")
_WORDS = 2  # int32 words for each number, and for each fingerprint
_logger = logging.getLogger("tf_redsync")


class Drifted(DistributedError):
    """Workers that must be equal are not."""


@dataclasses.dataclass(frozen=True)
class Shared:
    """A variable that must be equal on all workers.

    Attributes:
        name: For messages.
        copies: This process's variables, one for each replica.
        read: Returns the value to compare; `None`: that of the first copy.
    """

    name: str
    copies: Sequence[tf.Variable]
    read: Callable[[], tf.Tensor] | None = None

    def value(self) -> tf.Tensor:
        """The value to compare."""
        return self.copies[0].read_value() if self.read is None else self.read()


class Drift:
    """Compares, every `every` steps.

    Args:
        network: What carries requests; in branches, too.
        every: The number of steps.
        on_drift: `"error"`, or `"restore"`: take over what worker 0 has.
        numbers: Returns scalars by name that must be equal: the learning rate. A difference is
            an error always, since restored weights would only drift apart again.
        weights: Returns the variables that must be equal.
        slots: Returns those that go with the weights when they are restored.
    """

    def __init__(
        self,
        network: Network,
        every: int,
        on_drift: str,
        numbers: Callable[[], dict[str, tf.Tensor]],
        weights: Callable[[], Sequence[Shared]],
        slots: Callable[[], Sequence[Shared]],
    ):
        self._network, self._every, self._on_drift = network, every, on_drift
        self._numbers, self._weights, self._slots = numbers, weights, slots
        self._steps = state_variables.counter("drift_steps")

    def step(self) -> None:
        """Compare after a step, if it is due. All workers call it."""
        steps = self._steps.read_value()
        self._steps.assign_add(1, read_value=False)
        tf.cond(tf.equal(steps % self._every, 0), self._compare, lambda: None)

    def _compare(self) -> None:
        numbers, weights = self._numbers(), list(self._weights())
        words = [number_words(n) for n in numbers.values()]
        own = joined(*words, *(fingerprint(w.value()) for w in weights))
        rows = gather(self._network, own)  # [workers, words]
        names = [*numbers, *(w.name for w in weights)]

        def react() -> None:
            def tell(found: tf.Tensor) -> None:
                self._tell(found.numpy(), names, len(numbers))

            # What follows must not happen if this raises.
            told = tf.py_function(tell, [rows], [])
            if self._on_drift == "restore":
                with tf.control_dependencies([] if told is None else [told]):
                    for shared in (*weights, *self._slots()):
                        self._take_over(shared)

        tf.cond(tf.reduce_any(tf.not_equal(rows, rows[:1])), react, lambda: None)

    def _take_over(self, shared: Shared) -> None:
        """Set a variable to what worker 0 has, bit by bit."""
        value = shared.value()
        bits = _as_int32(value)
        words = moved(lambda w: tf.reshape(w, [-1]), bits)
        rows = gather(self._network, words)
        received = moved(lambda r: tf.reshape(r[0], bits.shape), rows)
        for copy in shared.copies:
            copy.assign(_from_int32(received, value), read_value=False)

    def _tell(self, rows: np.ndarray, names: Sequence[str], numbers: int) -> None:
        pairs = rows.reshape(len(rows), -1, _WORDS)  # [workers, numbers and weights, words]
        differ = (pairs != pairs[:1]).any(axis=-1)
        lines = []
        for rank in differ.any(axis=-1).nonzero()[0]:
            first, *more = differ[rank].nonzero()[0]
            what = names[first] if first < numbers else f"bits of {names[first]!r}"
            own, chiefs = (_text(pairs[r, first], first < numbers) for r in (rank, 0))
            others = f", and {len(more)} more differ" if more else ""
            lines.append(f"worker {rank} has the {what} {own}, worker 0 has {chiefs}{others}")
        text = f"the workers have drifted apart: {'; '.join(lines)}."
        if self._on_drift == "restore" and not differ[:, :numbers].any():
            _logger.warning("%s Worker 0's weights are taken over.", text)
            return
        raise Drifted(
            f"{text} Give all workers the same callbacks, hyper-parameters and weights. Machines "
            "of different kinds may round differently: for them use on_drift='restore' of "
            f"DistributedOptimizer. The check is made every check_every={self._every} steps."
        )


def fingerprint(value: tf.Tensor) -> tf.Tensor:
    """Return a hash of a tensor's bits, int32 `[2]`: equal for equal bits, of NaNs as well.

    On CPUs FarmHash64. TensorFlow has it nowhere else, and a GPU's weights would all go through the
    host's memory; there it is the checksum of a message that holds them, 32 bits.
    """
    if native.are_on_cpus([value]):
        hashed = tf.fingerprint(tf.reshape(value, [1, -1]))  # uint8 [1, 8]
        return tf.reshape(tf.bitcast(tf.reshape(hashed, [_WORDS, 4]), tf.int32), [_WORDS])
    words = moved(lambda w: tf.reshape(w, [-1]), _as_int32(value))
    message = wire.with_header(tf.constant(True), words)
    seal = wire.sealed(as_row(message))
    return moved(lambda m: tf.pad(m[0, : wire.HEADER_WORDS], [[0, _WORDS - 1]]), seal)


def number_words(number: tf.Tensor) -> tf.Tensor:
    """Return the bits of a scalar as float64, int32 `[2]`."""
    return tf.bitcast(tf.cast(number, tf.float64), tf.int32)


def _as_int32(value: tf.Tensor) -> tf.Tensor:
    """A tensor's bits as int32: shape `[...]` for up to 32 bits an element, else `[..., 2]`."""
    if value.dtype.size == 2:
        return tf.cast(tf.bitcast(value, tf.int16), tf.int32)
    return tf.bitcast(value, tf.int32)


def _from_int32(words: tf.Tensor, like: tf.Tensor) -> tf.Tensor:
    """The inverse of `_as_int32`."""
    return tf.bitcast(tf.cast(words, tf.int16) if like.dtype.size == 2 else words, like.dtype)


def _text(words: np.ndarray, is_number: bool) -> str:
    data: Any = words.astype("<i4").tobytes()
    if not is_number:
        return data.hex()
    number = struct.unpack("<d", data)[0]
    short = np.float32(number)
    return str(short) if float(short) == number else repr(number)
